package kv

import (
	"fmt"

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
func (b Box) Bytes() int64 { return b.Width * int64(b.Rows) * int64(b.Slices) }

// Route is how the pages of one cache lie in another, worked out once. It is
// immutable and may be used from any goroutine.
type Route struct {
	dst, src  *Cache
	same      bool // dst and src are the same pages
	pageBytes int64
	pages     []lane // for whole pages
	tokens    []lane // for ranges of tokens
	partial   error  // why ranges of tokens are refused, nil when they are not
}

// NewRoute works out how pages of src are copied onto pages of dst. Planes are
// paired by the global id of their layer and by kind; those of one kind in a
// layer in their order. dst and src may be one cache, or two over the same memory.
// Kind: fault.Invalid when the caches are not [Exchangeable], or share bytes otherwise.
func NewRoute(dst, src *Cache) (*Route, error) {
	if err := Exchangeable(dst.g, src.g); err != nil {
		return nil, err
	}
	return newRoute(dst, src)
}

// NewHeadRoute is [NewRoute] between caches that hold different heads of the
// same layers, as tensor-parallel ranks do: it copies the heads that both hold,
// paired by global id, and leaves the others as they are. All else must be
// exchangeable. A destination with the heads of several sources is filled by a
// route from each.
//
// Kinds: fault.Invalid when the caches differ in more than their heads, or share
// no head of a layer; fault.Unsupported when the heads of a layer differ and it
// has a plane that can't be cut by head.
func NewHeadRoute(dst, src *Cache) (*Route, error) {
	if err := exchangeable(dst.g, src.g, true); err != nil {
		return nil, err
	}
	return newRoute(dst, src)
}

// newRoute is the route of the heads that both caches hold.
func newRoute(dst, src *Cache) (*Route, error) {
	r := &Route{dst: dst, src: src}
	var err error
	if r.same, err = onto(dst, src); err != nil {
		return nil, err
	}
	size := int64(dst.g.spec.PageSize)
	var whole, tokens []lane // by layer, then kind
	to, from := dst.g.sorted, src.g.sorted
	for i := range to {
		for j, p := range to[i].Planes {
			l, err := cell(&to[i], &from[i], p, from[i].Planes[j])
			if err != nil {
				return nil, err
			}
			if p.TokenStride > 0 {
				one := l
				one.token = axis{dst: p.TokenStride, src: from[i].Planes[j].TokenStride}
				one.collapse()
				tokens = append(tokens, one)
				l.push(axis{n: size, dst: one.token.dst, src: one.token.src})
			} else if r.partial == nil {
				r.partial = fault.New(fault.Unsupported, "tokens", "part of a page: layer %d has a plane (%v) that moves as whole pages only", to[i].ID, p.Kind).
					Hint("move whole pages")
			}
			l.collapse()
			r.pageBytes += l.bytes()
			whole = append(whole, l)
		}
	}
	r.pages = fewestLanes(joinLanes(whole))
	if r.partial == nil {
		r.tokens = fewestLanes(tokens)
	}
	return r, nil
}

// Dst returns the cache that is written.
func (r *Route) Dst() *Cache { return r.dst }

// Src returns the cache that is read.
func (r *Route) Src() *Cache { return r.src }

// Same reports whether pages of equal id are the same bytes on both sides: one cache, or
// two over the same memory.
func (r *Route) Same() bool { return r.same }

// PageBytes returns the bytes that are copied of one page.
func (r *Route) PageBytes() int64 { return r.pageBytes }

// AppendBoxes appends the boxes that copy the pages of run, and allocates
// nothing but room for them. Whatever follows each other on both sides is one
// wide row: a run of pages widens the rows when they do in both caches. Where
// stretches, layers, K and V and pages leave more than two axes, the shortest is
// boxes.
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
	if d := int64(run.Dst) - int64(run.Src); r.same && -int64(run.N) < d && d < int64(run.N) {
		return boxes, fault.New(fault.Invalid, "run", "of %d pages, %d onto %d, overlaps itself", run.N, run.Src, run.Dst).
			Hint("use Cache.CopyPages")
	}
	for i := range r.pages {
		l := &r.pages[i]
		boxes = l.appendBoxes(boxes, int64(run.Dst)*l.page.dst, int64(run.Src)*l.page.src, axis{int64(run.N), l.page.dst, l.page.src})
	}
	return boxes, nil
}

// PageBox is a box of page 0 onto page 0, and how far from it the same box of the next
// page lies: that of page s onto page d begins s·SrcStep and d·DstStep bytes later.
type PageBox struct {
	Box
	DstStep, SrcStep int64
}

// AppendPageBoxes appends what all pages have in common: the boxes that AppendBoxes
// makes of a run of one page. Nothing is said of which pages there are.
func (r *Route) AppendPageBoxes(boxes []PageBox) []PageBox {
	var room [8]Box
	for i := range r.pages {
		l := &r.pages[i]
		for _, b := range l.appendBoxes(room[:0], 0, 0, axis{n: 1}) {
			boxes = append(boxes, PageBox{b, l.page.dst, l.page.src})
		}
	}
	return boxes
}

// AppendTokenBoxes appends the boxes that copy tokens [t0, t1) of page src, in
// every layer, onto the same tokens of page dst, and allocates nothing but room
// for them. An empty range has no boxes.
//
// Kinds: fault.Invalid (out of range; one page of one cache onto itself),
// fault.Unsupported (part of a page with a plane that moves whole);
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
	case r.same && dst == src:
		return boxes, fault.New(fault.Invalid, "page", "%d is copied onto itself", dst)
	case t0 == t1:
		return boxes, nil
	case r.partial != nil:
		return boxes, r.partial
	}
	for i := range r.tokens {
		l := &r.tokens[i]
		boxes = l.appendBoxes(boxes, int64(dst)*l.page.dst+int64(t0)*l.token.dst, int64(src)*l.page.src+int64(t0)*l.token.src,
			axis{int64(t1 - t0), l.token.dst, l.token.src})
	}
	return boxes, nil
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
