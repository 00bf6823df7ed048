package kv

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// axis is n steps at equal distances on both sides of a copy.
type axis struct{ n, dst, src int64 }

// maxAxes is the most axes of a lane: heads, K and V, tokens, two of stretches
// grouped, and pages.
const maxAxes = 6

// lane is a group of stretches of a page that a copy treats alike: width bytes
// at each step of every axis.
type lane struct {
	dstRegion, srcRegion int
	dstOff, srcOff       int64 // of the first stretch, in page 0
	width                int64
	axes                 [maxAxes]axis // the first dims count; the others are zero
	dims                 int
	page                 axis // distance from page to page; n is 0
	token                axis // from token to token, in Route.tokens; likewise
	kind                 PlaneKind
}

// cell is the lane of the heads that both layers hold, of plane p of the one and
// q of the other: all of them for one token, or for the page when p has no
// tokens.
func cell(dst, src *Layer, p, q Plane) (lane, error) {
	l := lane{
		dstRegion: p.Region, srcRegion: q.Region, dstOff: p.Offset, srcOff: q.Offset,
		page: axis{dst: p.PageStride, src: q.PageStride}, kind: p.Kind,
	}
	if p.HeadStride == 0 {
		if dst.FirstHead != src.FirstHead || dst.Heads != src.Heads {
			return l, fault.New(fault.Unsupported, "heads", "layer %d holds heads %s and %s, and has a plane (%v) that can't be cut by head",
				dst.ID, dst.heads(), src.heads(), p.Kind)
		}
		l.width = cmp.Or(p.TokenStride, p.Bytes)
		return l, nil
	}
	h0, h1 := max(dst.FirstHead, src.FirstHead), min(dst.FirstHead+dst.Heads, src.FirstHead+src.Heads)
	if h0 >= h1 {
		return l, fault.New(fault.Invalid, "heads", "layer %d holds heads %s and %s: none is shared", dst.ID, dst.heads(), src.heads())
	}
	l.dstOff += int64(h0-dst.FirstHead) * p.HeadStride
	l.srcOff += int64(h0-src.FirstHead) * q.HeadStride
	// The rows of one head and token follow each other: what steps over the heads
	// or over the tokens, whichever is less, is their bytes.
	l.width = p.HeadStride
	if p.TokenStride > 0 {
		l.width = min(l.width, p.TokenStride)
	}
	l.push(axis{int64(h1 - h0), p.HeadStride, q.HeadStride})
	if p.KVStride >= l.width { // else K and V are both inside the width
		l.push(axis{2, p.KVStride, q.KVStride})
	}
	return l, nil
}

// push adds an axis. The caller knows that there is room.
func (l *lane) push(a axis) {
	l.axes[l.dims] = a
	l.dims++
}

// drop removes an axis.
func (l *lane) drop(i int) {
	copy(l.axes[i:], l.axes[i+1:l.dims])
	l.dims--
	l.axes[l.dims] = axis{}
}

// collapse removes the axes that are not needed: of one step, whose steps follow
// each other without a gap on both sides, or that go on where another ends.
func (l *lane) collapse() {
	for i := 0; i < l.dims; {
		a := l.axes[i]
		switch {
		case a.n == 1:
		case a.dst == l.width && a.src == l.width:
			l.width *= a.n
		default:
			j := slices.IndexFunc(l.axes[:l.dims], func(b axis) bool { return a.dst == b.n*b.dst && a.src == b.n*b.src })
			if j < 0 {
				i++
				continue
			}
			l.axes[j].n *= a.n
		}
		l.drop(i)
		i = 0 // what is left may go on where the wider rows, or the longer axis, end
	}
}

// bytes returns the bytes of all stretches of one page, or of one token.
func (l *lane) bytes() int64 {
	n := l.width
	for _, a := range l.axes[:l.dims] {
		n *= a.n
	}
	return n
}

// appendBoxes appends the boxes of the lane's stretches at all steps of one axis
// more, the offsets added.
func (l *lane) appendBoxes(boxes []Box, dstOff, srcOff int64, more axis) []Box {
	if more.n == 1 && l.dims <= 2 { // the lanes of a route are collapsed: one step more changes nothing
		b := l.box()
		b.DstOff += dstOff
		b.SrcOff += srcOff
		return append(boxes, b)
	}
	m := l.with(more)
	m.dstOff += dstOff
	m.srcOff += srcOff
	return m.split(boxes)
}

// with returns the lane with one axis more.
func (l *lane) with(more axis) lane {
	m := *l
	m.push(more)
	m.collapse()
	return m
}

// split appends the boxes of the lane as it is: the two longest axes are rows and
// slices, each step of the others is a box.
func (l *lane) split(boxes []Box) []Box {
	if l.dims > 2 {
		short := l.shortest()
		rest, a := *l, l.axes[short]
		rest.drop(short)
		for range a.n {
			boxes = rest.split(boxes)
			rest.dstOff += a.dst
			rest.srcOff += a.src
		}
		return boxes
	}
	return append(boxes, l.box())
}

// box returns the box of a lane of two axes or less.
func (l *lane) box() Box {
	b := Box{
		DstRegion: l.dstRegion, SrcRegion: l.srcRegion, DstOff: l.dstOff, SrcOff: l.srcOff,
		Width: l.width, Rows: 1, Slices: 1,
	}
	if l.dims > 0 {
		b.Rows, b.DstPitch, b.SrcPitch = int(l.axes[0].n), l.axes[0].dst, l.axes[0].src
	}
	if l.dims > 1 {
		b.Slices, b.DstSlice, b.SrcSlice = int(l.axes[1].n), l.axes[1].dst, l.axes[1].src
	}
	return b
}

// shortest returns which axis has the fewest steps.
func (l *lane) shortest() (at int) {
	for i, a := range l.axes[:l.dims] {
		if a.n < l.axes[at].n {
			at = i
		}
	}
	return at
}

// boxes returns how many boxes the lane becomes with n steps of its open axis,
// tokens or pages.
func (l *lane) boxes(n int64) int64 {
	open := l.page
	if l.token.dst > 0 {
		open = l.token
	}
	m := l.with(axis{n, open.dst, open.src})
	boxes := int64(1)
	for m.dims > 2 {
		short := m.shortest()
		boxes *= m.axes[short].n
		m.drop(short)
	}
	return boxes
}

// joinLanes makes one of stretches that follow each other without a gap on both
// sides, page after page.
func joinLanes(in []lane) (out []lane) {
	slices.SortStableFunc(in, func(a, b lane) int {
		return cmp.Or(a.dstRegion-b.dstRegion, cmp.Compare(a.dstOff, b.dstOff))
	})
	for _, l := range in {
		if n := len(out); n > 0 && l.dims == 0 {
			last := &out[n-1]
			if last.dims == 0 && last.dstRegion == l.dstRegion && last.srcRegion == l.srcRegion && last.page == l.page &&
				last.dstOff+last.width == l.dstOff && last.srcOff+last.width == l.srcOff {
				last.width += l.width
				continue
			}
		}
		out = append(out, l)
	}
	return out
}

// fewestLanes groups stretches. Which of them are found to be regular depends on
// the order in which they are looked at, so it tries the ones that matter: as
// the destination lies, as the source lies, and kind by kind (all K, then all
// V).
func fewestLanes(stretches []lane) (best []lane) {
	least := int64(-1)
	for _, order := range []func(a, b lane) int{
		func(a, b lane) int { return cmp.Compare(a.dstOff, b.dstOff) },
		func(a, b lane) int { return cmp.Compare(a.srcOff, b.srcOff) },
		func(a, b lane) int { return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.dstOff, b.dstOff)) },
	} {
		lanes := slices.Clone(stretches)
		for range 2 { // lanes of stretches, then lanes of such lanes
			slices.SortStableFunc(lanes, func(a, b lane) int { return cmp.Or(a.compare(&b), order(a, b)) })
			lanes = groupLanes(lanes)
		}
		var boxes int64
		for i := range lanes {
			boxes += lanes[i].boxes(1) + lanes[i].boxes(64) // alone, and in a run of some length
		}
		if least < 0 || boxes < least {
			best, least = lanes, boxes
		}
	}
	return best
}

// compare orders lanes so that those which differ in nothing but where they begin
// are neighbours, and is 0 for these.
func (l *lane) compare(m *lane) int {
	c := cmp.Or(l.dstRegion-m.dstRegion, l.srcRegion-m.srcRegion, cmp.Compare(l.width, m.width), l.dims-m.dims,
		l.page.compare(m.page), l.token.compare(m.token))
	for i := 0; c == 0 && i < l.dims; i++ {
		c = l.axes[i].compare(m.axes[i])
	}
	return c
}

func (a axis) compare(b axis) int {
	return cmp.Or(cmp.Compare(a.n, b.n), cmp.Compare(a.dst, b.dst), cmp.Compare(a.src, b.src))
}

// groupLanes makes one lane, with one axis more, of consecutive lanes that are
// alike and equally far apart.
func groupLanes(in []lane) (out []lane) {
	for len(in) > 0 {
		l, n := in[0], 1
		var step axis
		for ; n < len(in) && l.compare(&in[n]) == 0; n++ {
			d := axis{dst: in[n].dstOff - in[n-1].dstOff, src: in[n].srcOff - in[n-1].srcOff}
			if d.dst < l.width || d.src < l.width || (n > 1 && d != step) {
				break
			}
			step = d
		}
		if n > 1 {
			step.n = int64(n)
			l.push(step)
			l.collapse()
		}
		out = append(out, l)
		in = in[n:]
	}
	return out
}

// heads is the range of heads, for errors.
func (l *Layer) heads() string { return fmt.Sprintf("%d … %d", l.FirstHead, l.FirstHead+l.Heads-1) }
