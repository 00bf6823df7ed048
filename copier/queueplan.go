package copier

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// queuePlan is how the pages of one cache are copied in one direction.
type queuePlan struct {
	name  string
	route *kv.Route
	rows  []queueRow
}

// queueRow is one stretch of a page: where it lies in page 0 of both sides, and how far
// it is to the same stretch of the next page.
type queueRow struct {
	dst, src             *device.Memory
	dstOff, srcOff       int64
	bytes                int64
	dstStride, srcStride int64
}

// takeCaches works out the plans of both directions, once.
func (q *Queue) takeCaches(onDevice, onHost map[string]*kv.Cache) error {
	if len(onDevice) == 0 {
		return fault.New(fault.Invalid, "copy queue", "no device caches")
	}
	q.names = slices.Sorted(maps.Keys(onDevice))
	for _, name := range slices.Sorted(maps.Keys(onHost)) {
		if _, ok := onDevice[name]; !ok {
			return fault.New(fault.Invalid, cacheObject(name), "is a host cache and no device cache has its name")
		}
	}
	for i, name := range q.names {
		dev, host := onDevice[name], onHost[name]
		switch {
		case dev == nil:
			return fault.New(fault.Invalid, cacheObject(name), "the device cache is nil")
		case host == nil:
			return fault.New(fault.Invalid, cacheObject(name), "is a device cache and no host cache has its name")
		case dev.Geometry().PageBytes() != host.Geometry().PageBytes():
			return fault.New(fault.Invalid, cacheObject(name), "a page has %d bytes on the device and %d on the host",
				dev.Geometry().PageBytes(), host.Geometry().PageBytes())
		}
		for side, pages := range [...]int{dev.Pages(), host.Pages()} {
			if i == 0 || pages < q.pages[side] {
				q.pages[side] = pages
			}
		}
		for dir, ends := range [...][2]*kv.Cache{Store: {host, dev}, Load: {dev, host}} {
			plan, err := newQueuePlan(name, ends[0], ends[1])
			if err != nil {
				return fault.Wrap(fault.Invalid, cacheObject(name), err)
			}
			q.lanes[dir].plans = append(q.lanes[dir].plans, plan)
		}
	}
	return q.checkApart()
}

func cacheObject(name string) string { return fmt.Sprintf("cache %q", name) }

func newQueuePlan(name string, dst, src *kv.Cache) (queuePlan, error) {
	p := queuePlan{name: name}
	var err error
	if p.route, err = kv.NewRoute(dst, src); err != nil {
		return p, err
	}
	// All pages lie alike, so two of them tell where every page is. They are looked at
	// in caches like these over memory that there is not, since both sides may be one
	// cache, where no page is copied onto itself.
	to, err := blank(dst.Geometry(), "destination")
	if err != nil {
		return p, err
	}
	from, err := blank(src.Geometry(), "source")
	if err != nil {
		return p, err
	}
	route, err := kv.NewRoute(to, from)
	if err != nil {
		return p, err
	}
	first, err := rowsOf(route, page.Run{N: 1})
	if err != nil {
		return p, err
	}
	second, err := rowsOf(route, page.Run{Dst: min(1, page.ID(dst.Pages()-1)), Src: min(1, page.ID(src.Pages()-1)), N: 1})
	if err != nil {
		return p, err
	}
	for i, b := range first {
		r := queueRow{
			dstOff: b.DstOff, dstStride: second[i].DstOff - b.DstOff,
			srcOff: b.SrcOff, srcStride: second[i].SrcOff - b.SrcOff, bytes: b.Width,
		}
		if r.dst, err = dst.Region(b.DstRegion); err != nil {
			return p, err
		}
		if r.src, err = src.Region(b.SrcRegion); err != nil {
			return p, err
		}
		p.rows = append(p.rows, r)
	}
	return p, nil
}

// blank is a cache over memory that there is not.
func blank(g *kv.Geometry, side string) (*kv.Cache, error) {
	var regions []*device.Memory
	base := uintptr(1)
	for _, n := range g.Spec().RegionBytes {
		regions = append(regions, device.NewMemory(device.MemoryOptions{Device: side, Base: base, Size: n}))
		base += uintptr(n)
	}
	return kv.Wrap(g, regions)
}

// rowsOf returns the boxes of run cut into boxes of one row.
func rowsOf(r *kv.Route, run page.Run) (rows []kv.Box, err error) {
	boxes, err := r.AppendBoxes(nil, run)
	for _, b := range boxes {
		for s := range int64(b.Slices) {
			for j := range int64(b.Rows) {
				row := b
				row.DstOff += s*b.DstSlice + j*b.DstPitch
				row.SrcOff += s*b.SrcSlice + j*b.SrcPitch
				rows = append(rows, row)
			}
		}
	}
	return rows, err
}

// queueSpan is a row of every page of a cache, in one side of a queue.
type queueSpan struct {
	name string
	side string
	mem  string // the device that has the memory
	rows Rows   // Off is an address
	end  int64
}

// checkApart refuses caches that share bytes, but for both sides of a name, which their
// route has compared.
func (q *Queue) checkApart() error {
	var spans []queueSpan
	for i := range q.names {
		load := &q.lanes[Load].plans[i]
		spans = append(spans, load.spans(true)...)
		if !load.route.Same() {
			spans = append(spans, load.spans(false)...)
		}
	}
	slices.SortFunc(spans, func(a, b queueSpan) int { return cmp.Compare(a.rows.Off, b.rows.Off) })
	var open []queueSpan // those that go on beyond where the next begins
	for _, s := range spans {
		open = slices.DeleteFunc(open, func(o queueSpan) bool { return o.end <= s.rows.Off })
		for _, o := range open {
			if o.mem == s.mem && o.name != s.name && o.rows.overlaps(s.rows) {
				return fault.New(fault.Invalid, cacheObject(s.name), "the %s cache shares memory with the %s cache %q", s.side, o.side, o.name).
					Hint("name memory that several layers share once")
			}
		}
		open = append(open, s)
	}
	return nil
}

// spans returns the rows of the plan's destination, or of its source.
func (p *queuePlan) spans(dst bool) (spans []queueSpan) {
	for _, r := range p.rows {
		s := queueSpan{name: p.name, side: "host"}
		mem, off, pages := r.src, r.srcOff, p.route.Src().Pages()
		s.rows.Pitch = r.srcStride
		if dst {
			s.side = "device"
			mem, off, pages = r.dst, r.dstOff, p.route.Dst().Pages()
			s.rows.Pitch = r.dstStride
		}
		s.mem = mem.Device()
		s.rows.Off, s.rows.Width, s.rows.N = int64(mem.Base())+off, r.bytes, pages
		s.end = s.rows.Off + int64(pages-1)*s.rows.Pitch + r.bytes
		spans = append(spans, s)
	}
	return spans
}
