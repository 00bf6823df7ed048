// Package copiertest is the suite that every copier passes, unchanged: the same
// geometries, the same lists of pages, every byte of both caches compared, the
// untouched ones included.
//
// The contents of a cache are a function of (cache, page, layer, plane, offset), so
// that nothing has to be remembered and a foreign byte shows whose it is. What a
// copy should have done is worked out from the geometry's plain fields, not by the
// code under test.
package copiertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Harness is one copier under test and the device that it is made for.
type Harness struct {
	Copier copier.Copier
	Device device.Device
	// Hold holds a stream back until release is called.
	Hold func(device.Stream) (release func())
	// Fail makes the next copy on a stream fail when its turn comes.
	Fail func(device.Stream, error)
}

// Run runs the suite. open is called once a test, and cleans up after itself.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	for name, test := range map[string]func(*testing.T, Harness){
		"EveryByteOfEveryPlan":              everyPlan,
		"RandomPlansMatchTheReference":      randomPlans,
		"ReportsWhatItMoved":                reportsMoved,
		"RefusesBeforeAnythingIsEnqueued":   refusesWhole,
		"OnlyEnqueues":                      onlyEnqueues,
		"ReadingBeforeTheTicketSeesOldData": negativeControl,
		"RowsOfATokenRange":                 tokenRange,
		"RowsWithAnyPitch":                  rowsWithPitch,
		"RefusesBadRows":                    refusesRows,
		"NothingToDo":                       nothingToDo,
		"FailedStreamFailsTheTicket":        failedStream,
		"ClosedStreamIsRefused":             closedStream,
		"ManyGoroutines":                    manyGoroutines,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

// rig is one route opened on the device.
type rig struct {
	t        *testing.T
	h        Harness
	s        device.Stream
	dst, src *kv.Cache
	route    *kv.Route
}

func open(t *testing.T, h Harness, dst, src func() (*kv.Geometry, error)) *rig {
	t.Helper()
	r := &rig{t: t, h: h}
	var err error
	if r.s, err = h.Device.NewStream("copies"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.s.Close() }) // a case may have failed it or closed it
	make := func(side string, g func() (*kv.Geometry, error)) *kv.Cache {
		geometry, err := g()
		if err != nil {
			t.Fatalf("%s: %v", side, err)
		}
		c, err := kv.NewCache(geometry, h.Device)
		if err != nil {
			t.Fatalf("%s: %v", side, err)
		}
		t.Cleanup(func() { _ = c.Close() }) // the device tells what stays behind
		for i := range geometry.Regions() {
			m, _ := c.Region(i)
			r.write(m, pattern(side, i, m.Size()))
		}
		return c
	}
	r.dst, r.src = make("destination", dst), make("source", src)
	if r.route, err = kv.NewRoute(r.dst, r.src); err != nil {
		t.Fatal(err)
	}
	return r
}

// pattern is the content of one region: every 8 bytes name side, region and place.
func pattern(side string, region int, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		x := uint64(i/8)*0x9e3779b97f4a7c15 + uint64(region+1)*0xd1342543de82ef95 + uint64(len(side))*0xaf251af3b0f025b5
		b[i] = byte(x >> (8 * (i % 8)))
	}
	return b
}

// write puts b into m by way of the device, so that m may be out of the host's reach.
func (r *rig) write(m *device.Memory, b []byte) {
	r.t.Helper()
	r.move(m, device.WrapHost(b), int64(len(b)))
}

// read returns the bytes of all regions of c.
func (r *rig) read(c *kv.Cache) [][]byte {
	r.t.Helper()
	var all [][]byte
	for i := range c.Geometry().Regions() {
		m, _ := c.Region(i)
		b := make([]byte, m.Size())
		r.move(device.WrapHost(b), m, m.Size())
		all = append(all, b)
	}
	return all
}

func (r *rig) move(dst, src *device.Memory, n int64) {
	r.t.Helper()
	s, err := r.h.Device.NewStream("staging")
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = s.Close() }() // Sync has told
	err = s.Copy([]device.Op{{Dst: dst, Src: src, Bytes: n}})
	if err = errors.Join(err, s.Sync(r.t.Context())); err != nil {
		r.t.Fatal(err)
	}
}

// expect returns the destination's regions after pairs were copied, worked out
// plane by plane from the plain fields of both geometries.
func (r *rig) expect(pairs []page.Pair) [][]byte {
	want, src := r.read(r.dst), r.read(r.src)
	d, s := r.dst.Geometry().Spec(), r.src.Geometry().Spec()
	for _, x := range pairs {
		for _, dl := range d.Layers {
			for _, sl := range s.Layers {
				if dl.ID != sl.ID {
					continue
				}
				for _, dp := range dl.Planes {
					for _, sp := range sl.Planes {
						if dp.Kind == sp.Kind {
							copy(want[dp.Region][dp.Offset+int64(x.Dst)*dp.PageStride:][:dp.Bytes],
								src[sp.Region][sp.Offset+int64(x.Src)*sp.PageStride:][:sp.Bytes])
						}
					}
				}
			}
		}
	}
	return want
}

// copyAndWait copies pairs and waits for a ticket.
func (r *rig) copyAndWait(pairs []page.Pair) (copier.Moved, error) {
	moved, err := r.h.Copier.Copy(r.s, r.route, append([]page.Pair(nil), pairs...))
	if err != nil {
		return moved, err
	}
	ticket := device.NewTicket()
	if err := r.s.Signal(ticket); err != nil {
		return moved, err
	}
	return moved, ticket.Wait(r.t.Context())
}

func (r *rig) compare(what string, c *kv.Cache, want [][]byte) {
	r.t.Helper()
	for i, got := range r.read(c) {
		if bytes.Equal(got, want[i]) {
			continue
		}
		for at := range got {
			if got[at] != want[i][at] {
				r.t.Fatalf("%s: region %d, byte %d is %#x, want %#x", what, i, at, got[at], want[i][at])
			}
		}
	}
}

func (r *rig) pages() int { return min(r.dst.Pages(), r.src.Pages()) }

func everyPlan(t *testing.T, h Harness) {
	for _, x := range routes() {
		t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
			r := open(t, h, x.dst, x.src)
			for name, pairs := range plans(r.pages()) {
				want, untouched := r.expect(pairs), r.read(r.src)
				if _, err := r.copyAndWait(pairs); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				r.compare(name+": destination", r.dst, want)
				r.compare(name+": source", r.src, untouched)
			}
		})
	}
}

func randomPlans(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 50 {
		var pairs []page.Pair
		for _, d := range rng.Perm(r.dst.Pages())[:rng.IntN(r.dst.Pages())] {
			pairs = append(pairs, page.Pair{Dst: page.ID(d), Src: page.ID(rng.IntN(r.src.Pages()))})
		}
		want := r.expect(pairs)
		if _, err := r.copyAndWait(pairs); err != nil {
			t.Fatal(err)
		}
		r.compare(fmt.Sprintf("list %d: %v", i, pairs), r.dst, want)
	}
}

func reportsMoved(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	pairs := []page.Pair{{Dst: 5, Src: 2}, {Dst: 4, Src: 1}, {Dst: 9, Src: 11}}
	moved, err := r.copyAndWait(pairs)
	if err != nil {
		t.Fatal(err)
	}
	if moved.Pages != 3 || moved.Runs != 2 || moved.Bytes != 3*r.route.PageBytes() || moved.Rows < 2 {
		t.Errorf("moved %+v, want 3 pages in 2 runs, %d bytes", moved, 3*r.route.PageBytes())
	}
}

func refusesWhole(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	same := open(t, h, small.LayerMajor, small.LayerMajor)
	same.dst = same.src
	var err error
	if same.route, err = kv.NewRoute(same.src, same.src); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name  string
		r     *rig
		pairs []page.Pair
		names string // what the error must name
	}{
		{"destination twice", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 2, Src: 2}, {Dst: 1, Src: 3}}, "1"},
		{"destination beyond the pool", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 20, Src: 2}}, "20"},
		{"source beyond the cache", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 2, Src: 12}}, "12"},
		{"negative page", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: -1, Src: 2}}, "-1"},
		{"run over the end", r, []page.Pair{{Dst: 1, Src: 10}, {Dst: 2, Src: 11}, {Dst: 3, Src: 12}}, "12"},
		{"destination is a source of one cache", same, []page.Pair{{Dst: 1, Src: 2}, {Dst: 2, Src: 3}}, "2"},
		{"page onto itself", same, []page.Pair{{Dst: 4, Src: 4}}, "4"},
	} {
		t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
			before := x.r.read(x.r.dst)
			_, err := x.r.copyAndWait(x.pairs)
			if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), x.names) {
				t.Errorf("error %v, want kind invalid, naming %s", err, x.names)
			}
			if err := x.r.s.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			x.r.compare("destination", x.r.dst, before)
		})
	}
}

func onlyEnqueues(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	pairs := plans(r.pages())["descending in both"]
	want := r.expect(pairs)
	release := h.Hold(r.s)
	ticket := device.NewTicket()
	_, err := h.Copier.Copy(r.s, r.route, pairs) // returns although nothing can run
	if err = errors.Join(err, r.s.Signal(ticket)); err != nil {
		t.Fatal(err)
	}
	if done, _ := ticket.Poll(); done {
		t.Error("the ticket was done while the stream was held")
	}
	release()
	if err := ticket.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.compare("destination", r.dst, want)
}

// negativeControl breaks the rule that a destination is read only after its
// ticket, and must see the wrong bytes: otherwise the suite could not tell.
func negativeControl(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	pairs := plans(r.pages())["whole pool one run"]
	want := r.expect(pairs)
	release := h.Hold(r.s)
	defer func() {
		release()
		if err := r.s.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	if _, err := h.Copier.Copy(r.s, r.route, pairs); err != nil {
		t.Fatal(err)
	}
	for i, got := range r.read(r.dst) {
		if bytes.Equal(got, want[i]) {
			t.Errorf("region %d holds the copied bytes although the stream is held", i)
		}
	}
}

// tokenRange copies tokens 1 to 3 of one page in every layer, K and V apart.
func tokenRange(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	boxes, err := r.route.AppendTokenBoxes(nil, 7, 5, 1, 3)
	if err != nil {
		t.Fatal(err)
	}
	want, src := r.read(r.dst), r.read(r.src)
	d, s := r.dst.Geometry().Spec(), r.src.Geometry().Spec()
	for l := range d.Layers {
		for i, dp := range d.Layers[l].Planes {
			sp := s.Layers[l].Planes[i]
			copy(want[dp.Region][dp.Offset+7*dp.PageStride+dp.TokenStride:][:2*dp.TokenStride],
				src[sp.Region][sp.Offset+5*sp.PageStride+sp.TokenStride:][:2*sp.TokenStride])
		}
	}
	for _, b := range boxes {
		for slice := range int64(b.Slices) {
			dm, _ := r.dst.Region(b.DstRegion)
			sm, _ := r.src.Region(b.SrcRegion)
			_, err := h.Copier.CopyRows(r.s,
				copier.Rows{Mem: dm, Off: b.DstOff + slice*b.DstSlice, Width: b.Width, Pitch: b.DstPitch, N: b.Rows},
				copier.Rows{Mem: sm, Off: b.SrcOff + slice*b.SrcSlice, Width: b.Width, Pitch: b.SrcPitch, N: b.Rows})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := r.s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.compare("destination", r.dst, want)
}

func memories(t *testing.T, h Harness, n int64) (r *rig, dst, src *device.Memory) {
	t.Helper()
	r = &rig{t: t, h: h}
	var err error
	if r.s, err = h.Device.NewStream("rows"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.s.Close() }) // a case may have failed it or closed it
	for _, m := range []**device.Memory{&dst, &src} {
		if *m, err = h.Device.Alloc(n); err != nil {
			t.Fatal(err)
		}
		memory := *m
		t.Cleanup(func() { _ = memory.Free() }) // the device tells what stays behind
	}
	r.write(dst, pattern("destination", 0, n))
	r.write(src, pattern("source", 0, n))
	return r, dst, src
}

func rowsWithPitch(t *testing.T, h Harness) {
	const n = 4096
	rng := rand.New(rand.NewPCG(3, 4))
	r, dst, src := memories(t, h, n)
	for range 40 {
		count, width := 1+rng.IntN(9), int64(1+rng.IntN(200))
		side := func(m *device.Memory) copier.Rows {
			pitch := width + int64(rng.IntN(200))
			return copier.Rows{Mem: m, Off: rng.Int64N(n - int64(count-1)*pitch - width + 1), Width: width, Pitch: pitch, N: count}
		}
		if int64(count)*(width+200) > n {
			continue
		}
		d, s := side(dst), side(src)
		want := make([]byte, n)
		r.move(device.WrapHost(want), dst, n)
		from := pattern("source", 0, n)
		for i := range int64(count) {
			copy(want[d.Off+i*d.Pitch:][:width], from[s.Off+i*s.Pitch:][:width])
		}
		moved, err := h.Copier.CopyRows(r.s, d, s)
		if err = errors.Join(err, r.s.Sync(t.Context())); err != nil {
			t.Fatal(err)
		}
		if moved.Bytes != int64(count)*width {
			t.Errorf("moved %d bytes, want %d", moved.Bytes, int64(count)*width)
		}
		got := make([]byte, n)
		r.move(device.WrapHost(got), dst, n)
		if !bytes.Equal(got, want) {
			t.Fatalf("%+v onto %+v: wrong bytes", s, d)
		}
	}
}

func refusesRows(t *testing.T, h Harness) {
	const n = 1024
	r, dst, src := memories(t, h, n)
	ok := copier.Rows{Mem: dst, Width: 16, Pitch: 32, N: 4}
	from := copier.Rows{Mem: src, Width: 16, Pitch: 16, N: 4}
	edit := func(r copier.Rows, f func(*copier.Rows)) copier.Rows { f(&r); return r }
	for name, x := range map[string][2]copier.Rows{
		"pitch below width":    {edit(ok, func(r *copier.Rows) { r.Pitch = 15 }), from},
		"beyond the memory":    {edit(ok, func(r *copier.Rows) { r.Off = n - 3*32 - 15 }), from},
		"pitch overflows":      {edit(ok, func(r *copier.Rows) { r.Pitch = 1 << 62 }), from},
		"negative offset":      {edit(ok, func(r *copier.Rows) { r.Off = -1 }), from},
		"negative rows":        {edit(ok, func(r *copier.Rows) { r.N = -1 }), from},
		"other number of rows": {edit(ok, func(r *copier.Rows) { r.N = 3 }), from},
		"other width":          {ok, edit(from, func(r *copier.Rows) { r.Width = 15 })},
		"no memory":            {edit(ok, func(r *copier.Rows) { r.Mem = nil }), from},
		"onto itself":          {from, from},
		"overlap":              {edit(from, func(r *copier.Rows) { r.Off = 8 }), from},
	} {
		if _, err := h.Copier.CopyRows(r.s, x[0], x[1]); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	// Rows of one memory may interleave.
	if _, err := h.Copier.CopyRows(r.s, edit(ok, func(r *copier.Rows) { r.Off = 16 }), ok); err != nil {
		t.Errorf("interleaved rows: %v", err)
	}
	if err := r.s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func nothingToDo(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	none := with(func(c *kv.Config) { c.Layers = 0 })
	empty := open(t, h, none.LayerMajor, none.PageMajor)
	release := h.Hold(r.s)
	defer release()
	before := r.read(r.dst)
	for name, f := range map[string]func() (copier.Moved, error){
		"no pairs":       func() (copier.Moved, error) { return h.Copier.Copy(r.s, r.route, nil) },
		"pages no bytes": func() (copier.Moved, error) { return h.Copier.Copy(r.s, empty.route, []page.Pair{{Dst: 1, Src: 2}}) },
		"no rows":        func() (copier.Moved, error) { return h.Copier.CopyRows(r.s, copier.Rows{}, copier.Rows{}) },
	} {
		if moved, err := f(); err != nil || moved.Bytes != 0 || moved.Rows != 0 {
			t.Errorf("%s: moved %+v, error %v", name, moved, err)
		}
	}
	r.compare("destination", r.dst, before)
}

func failedStream(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	boom := errors.New("the link went down")
	h.Fail(r.s, boom)
	_, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}, {Dst: 3, Src: 3}})
	if !errors.Is(err, boom) || !errors.Is(err, fault.Device) {
		t.Errorf("error %v, want kind device, caused by %v", err, boom)
	}
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); !errors.Is(err, fault.Device) {
		t.Errorf("the stream failed, and the next copy says %v", err)
	}
}

func closedStream(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	if err := r.s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); !errors.Is(err, fault.Closed) {
		t.Errorf("error %v, want kind closed", err)
	}
}

// manyGoroutines copies disjoint pages from many goroutines over two streams.
func manyGoroutines(t *testing.T, h Harness) {
	c := with(func(c *kv.Config) { c.Pages = 64 })
	r := open(t, h, packed(c, 64), c.LayerMajor)
	var all []page.Pair
	for i := range 64 {
		all = append(all, page.Pair{Dst: page.ID(63 - i), Src: page.ID(i)})
	}
	want := r.expect(all)
	second, err := h.Device.NewStream("second")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = second.Close() }()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			s := [...]device.Stream{r.s, second}[i%2]
			if _, err := h.Copier.Copy(s, r.route, append([]page.Pair(nil), all[4*i:4*i+4]...)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(r.s.Sync(t.Context()), second.Sync(t.Context())); err != nil {
		t.Fatal(err)
	}
	r.compare("destination", r.dst, want)
}
