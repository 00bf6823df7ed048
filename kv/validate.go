package kv

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// validate checks every field and returns the bytes of a page and of all
// regions.
func (s *Spec) validate() (pageBytes, bytes int64, err error) {
	planes := 0
	for _, l := range s.Layers {
		planes += len(l.Planes)
	}
	for _, f := range []struct {
		name        string
		value       int
		least, most int64
	}{
		{"Layout", int(s.Layout), 0, int64(MLA)},
		{"DType", int(s.DType), 0, int64(FP4)},
		{"Pages", s.Pages, 1, MaxPages},
		{"PageSize", s.PageSize, 1, MaxPageSize},
		{"Layers", len(s.Layers), 0, MaxLayers},
		{"Layers[].Planes", planes, 0, MaxPlanes},
		{"RegionBytes", len(s.RegionBytes), 0, MaxPlanes},
	} {
		if int64(f.value) < f.least || int64(f.value) > f.most {
			return 0, 0, outside("Spec."+f.name, int64(f.value), f.least, f.most)
		}
	}
	for i, n := range s.RegionBytes {
		if n < 0 {
			return 0, 0, outside(fmt.Sprintf("Spec.RegionBytes[%d]", i), n, 0, math.MaxInt64)
		}
		sum, ok := add(bytes, n)
		if !ok {
			return 0, 0, fault.New(fault.Invalid, fmt.Sprintf("Spec.RegionBytes[%d]", i),
				"%d bytes, after %d in the regions before it, are more than %d", n, bytes, int64(math.MaxInt64))
		}
		bytes = sum
	}
	seen := make(map[int]int, len(s.Layers))
	for i := range s.Layers {
		l, at := &s.Layers[i], fmt.Sprintf("Spec.Layers[%d]", i)
		if j, twice := seen[l.ID]; twice {
			return 0, 0, fault.New(fault.Invalid, at+".ID", "%d is the id of Layers[%d] too", l.ID, j)
		}
		seen[l.ID] = i
		n, err := s.validateLayer(l, at)
		if err != nil {
			return 0, 0, err
		}
		// Should this overflow, planes overlap, for each lies inside its region
		// and all regions fit 63 bits: checkOverlap refuses them.
		pageBytes += n
	}
	return pageBytes, bytes, s.checkOverlap()
}

func (s *Spec) validateLayer(l *Layer, at string) (bytes int64, err error) {
	var count [Opaque + 1]int
	rows := false
	for j, p := range l.Planes {
		if !p.Kind.valid() {
			return 0, unknown(fmt.Sprintf("%s.Planes[%d].Kind", at, j), p.Kind, kindNames)
		}
		count[p.Kind]++
		rows = rows || p.Kind.hasRows()
	}
	if len(l.Planes) == 0 {
		return 0, fault.New(fault.Invalid, at+".Planes", "is empty: a layer has 1 plane or more").
			Hint("leave the layer out")
	}
	split, joined, latent := count[K]+count[V], count[KV], count[Latent]
	ok := !rows ||
		(s.Layout == MLA && latent == 1 && split+joined == 0) ||
		(s.Layout != MLA && count[K] == 1 && count[V] == 1 && joined+latent == 0) ||
		(s.Layout != MLA && joined == 1 && split+latent == 0)
	if !ok {
		return 0, fault.New(fault.Invalid, at+".Planes", "%d of K, %d of V, %d of KV and %d of latent with layout %v",
			count[K], count[V], joined, latent, s.Layout).
			Hint("NHD and HND take one K and one V, or one KV; MLA takes one latent; scales, states and opaque planes are free")
	}
	least := int64(0)
	if rows {
		least = 1
		if s.Layout == 0 {
			return 0, unknown("Spec.Layout", s.Layout, layoutNames)
		}
		if s.DType == 0 {
			return 0, unknown("Spec.DType", s.DType, dtypeNames)
		}
		if err := s.DType.checkDim(at+".Dim", l.Dim); err != nil {
			return 0, err
		}
	}
	mostHeads := int64(MaxHeads)
	if latent > 0 {
		mostHeads = 1
	}
	for _, f := range []struct {
		name        string
		value       int
		least, most int64
	}{
		{"ID", l.ID, 0, MaxID - 1},
		{"FirstHead", l.FirstHead, 0, MaxID - int64(max(l.Heads, 1))},
		{"Heads", l.Heads, least, mostHeads},
		{"Dim", l.Dim, least, MaxDim},
	} {
		if int64(f.value) < f.least || int64(f.value) > f.most {
			return 0, outside(at+"."+f.name, int64(f.value), f.least, f.most)
		}
	}
	for j, p := range l.Planes {
		if err := s.validatePlane(l, p, fmt.Sprintf("%s.Planes[%d]", at, j)); err != nil {
			return 0, err
		}
		bytes += p.Bytes
	}
	return bytes, nil
}

func (s *Spec) validatePlane(l *Layer, p Plane, at string) error {
	if p.Region < 0 || p.Region >= len(s.RegionBytes) {
		return outside(at+".Region", int64(p.Region), 0, int64(len(s.RegionBytes)-1))
	}
	for _, f := range []struct {
		name         string
		value, least int64
	}{
		{"Bytes", p.Bytes, 1},
		{"Offset", p.Offset, 0},
		{"TokenStride", p.TokenStride, 0},
		{"PageStride", p.PageStride, p.Bytes}, // less, and pages would overlap
	} {
		if f.value < f.least {
			return outside(at+"."+f.name, f.value, f.least, math.MaxInt64)
		}
	}
	var want Plane
	switch {
	case p.Kind == KV:
		rows, blocks := rowPlane(s, l, KV, JoinRows), rowPlane(s, l, KV, JoinBlocks)
		if want = rows; p.KVStride != rows.KVStride || (p.TokenStride == blocks.TokenStride && p.HeadStride == blocks.HeadStride) {
			want = blocks // also those of one row
		}
		if p.KVStride != want.KVStride {
			return fault.New(fault.Invalid, at+".KVStride", "%d is neither %d, from a row of K to its V, nor %d, from a block of K to its V",
				p.KVStride, rows.KVStride, blocks.KVStride)
		}
	case p.Kind.hasRows():
		want = rowPlane(s, l, p.Kind, Apart)
	case p.Kind == Scale:
		want = scalePlane(s, l, p)
	default:
		want = Plane{Bytes: p.Bytes}
	}
	for _, f := range []struct {
		name        string
		value, want int64
	}{
		{"TokenStride", p.TokenStride, want.TokenStride},
		{"HeadStride", p.HeadStride, want.HeadStride},
		{"KVStride", p.KVStride, want.KVStride},
		{"Bytes", p.Bytes, want.Bytes},
	} {
		if f.value != f.want {
			return fault.New(fault.Invalid, at+"."+f.name, "%d is not %d, what packed %v rows of %d heads of %d %v have in pages of %d tokens",
				f.value, f.want, p.Kind, l.Heads, l.Dim, s.DType, s.PageSize)
		}
	}
	end, ok := planeEnd(p, s.Pages)
	if limit := s.RegionBytes[p.Region]; !ok || end > limit {
		return fault.New(fault.Invalid, at+".Offset", "%d: %d pages of %d bytes, %d apart, end beyond the %d bytes of region %d",
			p.Offset, s.Pages, p.Bytes, p.PageStride, limit, p.Region).
			Hint("fewer pages, a smaller stride, or a larger region")
	}
	return nil
}

// rowPlane returns the strides and bytes of a plane of that kind with rows, in a
// layer. At most 2^20 tokens × 2^16 heads × 2^20 elements × 2 × 2^2 bytes: no
// overflow once the fields are in their ranges.
func rowPlane(s *Spec, l *Layer, kind PlaneKind, join Join) Plane {
	row, tokens, heads := s.DType.Bytes(int64(l.Dim)), int64(s.PageSize), int64(l.Heads)
	p := Plane{Kind: kind}
	inner, outer := row, int64(1) // bytes of the inner axis' step; blocks that it has
	switch {
	case kind != KV:
	case join == JoinRows:
		p.KVStride, inner = row, 2*row
	case s.Layout == HND:
		p.KVStride, outer = row*tokens, 2
	default:
		p.KVStride, outer = row*heads, 2
	}
	switch s.Layout {
	case NHD:
		p.HeadStride, p.TokenStride = inner, inner*heads*outer
		p.Bytes = p.TokenStride * tokens
	case HND:
		p.TokenStride, p.HeadStride = inner, inner*tokens*outer
		p.Bytes = p.HeadStride * heads
	default:
		p.TokenStride, p.Bytes = row, row*tokens
	}
	return p
}

// scalePlane returns the strides and bytes that a Scale plane must have, given
// which strides p has and its bytes. The divisions keep hostile strides out of
// the arithmetic.
func scalePlane(s *Spec, l *Layer, p Plane) Plane {
	tokens, heads := int64(s.PageSize), int64(l.Heads)
	want := Plane{Bytes: p.Bytes}
	switch perToken, perHead := p.TokenStride > 0, p.HeadStride > 0 && heads > 0; {
	case perToken && perHead:
		one := p.Bytes / (tokens * heads)
		want.TokenStride, want.HeadStride = one*heads, one
		if s.Layout == HND {
			want.TokenStride, want.HeadStride = one, one*tokens
		}
		want.Bytes = one * tokens * heads
	case perToken:
		want.TokenStride = p.Bytes / tokens
		want.Bytes = want.TokenStride * tokens
	case perHead:
		want.HeadStride = p.Bytes / heads
		want.Bytes = want.HeadStride * heads
	}
	return want
}

// planeEnd returns the offset behind the last page of p, and false when it does
// not fit 63 bits.
func planeEnd(p Plane, pages int) (int64, bool) {
	last, ok1 := mul(p.PageStride, int64(pages)-1)
	last, ok2 := add(last, p.Offset)
	last, ok3 := add(last, p.Bytes)
	return last, ok1 && ok2 && ok3
}

// maxWalk bounds the comparison of planes with different page strides.
const maxWalk = 1 << 20

// checkOverlap refuses two planes that share a byte.
func (s *Spec) checkOverlap() error {
	type extent struct {
		Plane
		layer, plane int
		end          int64
	}
	var all []extent
	for i, l := range s.Layers {
		for j, p := range l.Planes {
			end, _ := planeEnd(p, s.Pages)
			all = append(all, extent{p, i, j, end})
		}
	}
	slices.SortFunc(all, func(a, b extent) int {
		return cmp.Or(cmp.Compare(a.Region, b.Region), cmp.Compare(a.Offset, b.Offset))
	})
	budget := maxWalk
	for i, a := range all {
		for _, b := range all[i+1:] {
			if b.Region != a.Region || b.Offset >= a.end {
				break // sorted: nothing later begins before a ends
			}
			overlap, known := overlaps(a.Plane, b.Plane, s.Pages, &budget)
			if known && !overlap {
				continue
			}
			at := fmt.Sprintf("Spec.Layers[%d].Planes[%d]", b.layer, b.plane)
			if !known {
				return fault.New(fault.Unsupported, at+".PageStride",
					"%d interleaves with the stride %d of Layers[%d].Planes[%d] over %d pages, more than can be compared",
					b.PageStride, a.PageStride, a.layer, a.plane, s.Pages).
					Hint("use one page stride, or regions of their own")
			}
			return fault.New(fault.Invalid, at, "%d bytes at %d, stride %d, overlap Layers[%d].Planes[%d]: %d bytes at %d, stride %d, in region %d",
				b.Bytes, b.Offset, b.PageStride, a.layer, a.plane, a.Bytes, a.Offset, a.PageStride, a.Region)
		}
	}
	return nil
}

// overlaps reports whether a page of a and a page of b share a byte, where b
// begins inside a's extent and not before a. known is false when the budget of
// steps is spent.
func overlaps(a, b Plane, pages int, budget *int) (overlap, known bool) {
	if a.PageStride == b.PageStride {
		// b begins inside a's extent, so it begins in a's last page or between two of
		// a's pages.
		r := (b.Offset - a.Offset) % a.PageStride
		return r < a.Bytes || r > a.PageStride-b.Bytes, true
	}
	// Different strides: walk both lists of stretches like a merge, jumping over
	// those that end before the other list's next one begins.
	n := int64(pages)
	for i, j := int64(0), int64(0); i < n && j < n; *budget-- {
		if *budget == 0 {
			return false, false
		}
		x, y := a.Offset+i*a.PageStride, b.Offset+j*b.PageStride
		switch {
		case x+a.Bytes <= y:
			i += (y-x-a.Bytes)/a.PageStride + 1
		case y+b.Bytes <= x:
			j += (x-y-b.Bytes)/b.PageStride + 1
		default:
			return true, true
		}
	}
	return false, true
}

// add and mul return the sum and the product of a and b, neither negative, and
// false when it does not fit 63 bits.

func add(a, b int64) (int64, bool) { return a + b, a <= math.MaxInt64-b }

func mul(a, b int64) (int64, bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return int64(lo), hi == 0 && lo <= math.MaxInt64
}
