package kv

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Box is Slices × Rows rows of Width bytes to be copied: row j of slice i goes
// from SrcOff + i·SrcSlice + j·SrcPitch of a region of the source to DstOff +
// i·DstSlice + j·DstPitch of a region of the destination. All of it lies inside
// the regions, and no two rows share a byte on either side. With one row (slice)
// the pitches (slice strides) are 0; otherwise each is at least Width.
//
// A device may take rows and slices in either order: neither need lie inside the
// other.
type Box struct {
	DstRegion, SrcRegion int
	DstOff, SrcOff       int64
	Width                int64
	Rows                 int
	DstPitch, SrcPitch   int64
	Slices               int
	DstSlice, SrcSlice   int64
}

// Bytes returns the bytes that the box copies.
func (b *Box) Bytes() int64 { return b.Width * int64(b.Rows) * int64(b.Slices) }

// Route is how the pages of one cache lie in another, worked out once. It is
// immutable and may be used from any goroutine.
type Route struct {
	dst, src *Cache
	pages    []lane // for whole pages
	tokens   []lane // for ranges of tokens
	partial  error  // why ranges of tokens are refused, nil when they are not
}

// lane is a group of stretches of a page that a copy treats alike: n stretches
// of width bytes, at equal distances on both sides.
type lane struct {
	dstRegion, srcRegion int
	dstOff, srcOff       int64 // of the first stretch, in page 0
	width                int64
	dstPage, srcPage     int64 // page strides
	token                int64 // token stride, of Route.tokens
	kind                 PlaneKind
	n                    int
	dstPitch, srcPitch   int64 // from stretch to stretch, 0 when n is 1
}

// NewRoute works out how pages of src are copied onto pages of dst. Planes are
// paired by the global id of their layer and by kind; those of one kind in a
// layer in their order. dst and src may be one cache.
// Kind: fault.Invalid when the caches are not [Exchangeable].
func NewRoute(dst, src *Cache) (*Route, error) {
	if err := Exchangeable(dst.g, src.g); err != nil {
		return nil, err
	}
	r := &Route{dst: dst, src: src}
	var stretches []lane // by layer, then kind
	to, from := dst.g.spec.sorted(), src.g.spec.sorted()
	for i, l := range to {
		for j, p := range l.Planes {
			q := from[i].Planes[j]
			stretches = append(stretches, lane{
				dstRegion: p.Region, srcRegion: q.Region, dstOff: p.Offset, srcOff: q.Offset, width: p.Bytes,
				dstPage: p.PageStride, srcPage: q.PageStride, token: p.TokenStride, kind: p.Kind, n: 1,
			})
			if p.TokenStride == 0 && r.partial == nil {
				r.partial = fault.New(fault.Unsupported, "tokens", "part of a page: layer %d has a plane (%v) that moves as whole pages only", l.ID, p.Kind).
					Hint("move whole pages")
			}
		}
	}
	if dst.g.spec.Layout == HND && len(stretches) > 0 {
		r.partial = fault.New(fault.Unsupported, "tokens", "part of a page with layout HND: its tokens are a stretch in each head").
			Hint("move whole pages, or keep the cache in NHD")
	}
	r.pages = fewestLanes(stretches, true)
	if r.partial == nil {
		r.tokens = fewestLanes(stretches, false)
	}
	return r, nil
}

// Dst returns the cache that is written.
func (r *Route) Dst() *Cache { return r.dst }

// Src returns the cache that is read.
func (r *Route) Src() *Cache { return r.src }

// PageBytes returns the bytes of one page, the same on both sides.
func (r *Route) PageBytes() int64 { return r.dst.g.pageBytes }

// fewestLanes groups stretches. Which of them are found to be regular depends on
// the order in which they are looked at, so it tries the ones that matter: as
// the destination lies, as the source lies, and kind by kind (all K, then all
// V).
func fewestLanes(stretches []lane, whole bool) (best []lane) {
	for i, order := range []func(a, b lane) int{
		func(a, b lane) int { return cmp.Or(a.dstRegion-b.dstRegion, cmp.Compare(a.dstOff, b.dstOff)) },
		func(a, b lane) int { return cmp.Or(a.srcRegion-b.srcRegion, cmp.Compare(a.srcOff, b.srcOff)) },
		func(a, b lane) int { return cmp.Compare(a.kind, b.kind) }, // stable: by layer in each kind
	} {
		lanes := slices.Clone(stretches)
		slices.SortStableFunc(lanes, order)
		if whole {
			lanes = joinStretches(lanes)
		}
		if lanes = groupStretches(lanes); i == 0 || len(lanes) < len(best) {
			best = lanes
		}
	}
	return best
}

// joinStretches makes one of stretches that follow each other without a gap on
// both sides, page after page.
func joinStretches(in []lane) (out []lane) {
	for _, s := range in {
		if n := len(out); n > 0 {
			if last := &out[n-1]; last.alike(s) && last.dstOff+last.width == s.dstOff && last.srcOff+last.width == s.srcOff {
				last.width += s.width
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

// groupStretches makes one lane of consecutive stretches that are equally wide
// and equally far apart.
func groupStretches(in []lane) (out []lane) {
	for _, s := range in {
		if n := len(out); n > 0 {
			last := &out[n-1]
			k := int64(last.n)
			dst, src := s.dstOff-last.dstOff-(k-1)*last.dstPitch, s.srcOff-last.srcOff-(k-1)*last.srcPitch
			regular := k == 1 || (dst == last.dstPitch && src == last.srcPitch)
			if regular && last.alike(s) && last.width == s.width && dst >= s.width && src >= s.width {
				last.n++
				last.dstPitch, last.srcPitch = dst, src
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

// alike reports whether a and b lie in the same regions and step from page to
// page alike.
func (a lane) alike(b lane) bool {
	return a.dstRegion == b.dstRegion && a.srcRegion == b.srcRegion && a.dstPage == b.dstPage && a.srcPage == b.srcPage
}

// AppendBoxes appends the boxes that copy the pages of run, and allocates
// nothing but room for them. A run widens the rows when the pages of a stretch
// follow each other on both sides, and is slices (or rows, where a page is one
// stretch) otherwise.
//
// Kind: fault.Invalid (ids out of range, less than one page, or a run that
// overlaps itself inside one cache); boxes comes back as it was.
func (r *Route) AppendBoxes(boxes []Box, run page.Run) ([]Box, error) {
	if err := checkRun("destination", run.Dst, run.N, r.dst.g.spec.Pages); err != nil {
		return boxes, err
	}
	if err := checkRun("source", run.Src, run.N, r.src.g.spec.Pages); err != nil {
		return boxes, err
	}
	if d := int64(run.Dst) - int64(run.Src); r.dst == r.src && -int64(run.N) < d && d < int64(run.N) {
		return boxes, fault.New(fault.Invalid, "run", "of %d pages, %d onto %d, overlaps itself", run.N, run.Src, run.Dst).
			Hint("use Cache.CopyPages")
	}
	for i := range r.pages {
		l := &r.pages[i]
		b := l.box(run.Dst, run.Src)
		n := int64(run.N)
		switch {
		case n == 1:
		case l.dstPage == b.Width && l.srcPage == b.Width:
			b.Width *= n
		case b.Rows == 1:
			b.Rows, b.DstPitch, b.SrcPitch = run.N, l.dstPage, l.srcPage
		default:
			b.Slices, b.DstSlice, b.SrcSlice = run.N, l.dstPage, l.srcPage
		}
		boxes = append(boxes, b)
	}
	return boxes, nil
}

// AppendTokenBoxes appends the boxes that copy tokens [t0, t1) of page src, in
// every layer, onto the same tokens of page dst, and allocates nothing but room
// for them. An empty range has no boxes.
//
// Kinds: fault.Invalid (out of range; one page of one cache onto itself),
// fault.Unsupported (part of a page in HND, or of a plane that moves whole);
// boxes comes back as it was.
func (r *Route) AppendTokenBoxes(boxes []Box, dst, src page.ID, t0, t1 int) ([]Box, error) {
	size := r.dst.g.spec.PageSize
	if t0 < 0 || t1 < t0 || t1 > size {
		return boxes, fault.New(fault.Invalid, "tokens", "[%d, %d) is not in [0, %d)", t0, t1, size)
	}
	if t1-t0 == size {
		return r.AppendBoxes(boxes, page.Run{Dst: dst, Src: src, N: 1})
	}
	if err := checkRun("destination", dst, 1, r.dst.g.spec.Pages); err != nil {
		return boxes, err
	}
	if err := checkRun("source", src, 1, r.src.g.spec.Pages); err != nil {
		return boxes, err
	}
	switch {
	case r.dst == r.src && dst == src:
		return boxes, fault.New(fault.Invalid, "page", "%d is copied onto itself", dst)
	case t0 == t1:
		return boxes, nil
	case r.partial != nil:
		return boxes, r.partial
	}
	for i := range r.tokens {
		l := &r.tokens[i]
		b := l.box(dst, src)
		b.DstOff += int64(t0) * l.token
		b.SrcOff += int64(t0) * l.token
		b.Width = int64(t1-t0) * l.token
		boxes = append(boxes, b)
	}
	return boxes, nil
}

// box is the box of one page.
func (l *lane) box(dst, src page.ID) Box {
	return Box{
		DstRegion: l.dstRegion, SrcRegion: l.srcRegion,
		DstOff: l.dstOff + int64(dst)*l.dstPage, SrcOff: l.srcOff + int64(src)*l.srcPage,
		Width: l.width, Rows: l.n, DstPitch: l.dstPitch, SrcPitch: l.srcPitch, Slices: 1,
	}
}

func checkRun(side string, first page.ID, n, pages int) error {
	if n < 1 {
		return outside("pages of a run", int64(n), 1, int64(pages))
	}
	if first < 0 || int64(first)+int64(n) > int64(pages) {
		return fault.New(fault.Invalid, side, "pages %d … %d are not in 0 … %d", first, int64(first)+int64(n)-1, pages-1)
	}
	return nil
}

// AppendOps appends the rows of boxes of this route as ops of a batched copy.
// Boxes of disjoint runs may be copied in one call of [device.Stream.Copy].
func (r *Route) AppendOps(ops []device.Op, boxes []Box) []device.Op {
	for i := range boxes {
		b := &boxes[i]
		dst, src := r.dst.regions[b.DstRegion], r.src.regions[b.SrcRegion]
		for s := range int64(b.Slices) {
			for j := range int64(b.Rows) {
				ops = append(ops, device.Op{
					Dst: dst, DstOff: b.DstOff + s*b.DstSlice + j*b.DstPitch,
					Src: src, SrcOff: b.SrcOff + s*b.SrcSlice + j*b.SrcPitch,
					Bytes: b.Width,
				})
			}
		}
	}
	return ops
}

// String shows the box for people and transcripts.
func (b Box) String() string {
	s := fmt.Sprintf("%d:%d <- %d:%d  %d B", b.DstRegion, b.DstOff, b.SrcRegion, b.SrcOff, b.Width)
	if b.Rows > 1 {
		s += fmt.Sprintf(" x %d rows (%d <- %d apart)", b.Rows, b.DstPitch, b.SrcPitch)
	}
	if b.Slices > 1 {
		s += fmt.Sprintf(" x %d slices (%d <- %d apart)", b.Slices, b.DstSlice, b.SrcSlice)
	}
	return s
}
