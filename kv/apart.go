package kv

import (
	"fmt"

	"github.com/kvferry/kvferry/fault"
)

// onto reports whether dst and src are the same pages: one cache, or two over the same
// places of the same memory. Caches that share bytes otherwise are refused: which pages
// they share has no answer that page ids can give. Planes may interleave.
// Kind: fault.Invalid.
func onto(dst, src *Cache) (bool, error) {
	if dst == src {
		return true, nil
	}
	if dst.name != src.name || !meet(dst, src) {
		return false, nil
	}
	to, from := dst.g.sorted, src.g.sorted
	some, all := false, true
	for i := range to {
		for j := range to[i].Planes {
			a := dst.span(&to[i].Planes[j])
			for k := range from {
				for l := range from[k].Planes {
					b := src.span(&from[k].Planes[l])
					pair := i == k && j == l
					switch one := pair && a.base == b.base && (a.stride == b.stride || a.n == 1 || b.n == 1); {
					case one:
						some = true
					case a.overlaps(b):
						return false, errShared(&to[i], &from[k])
					case pair:
						all = false
					}
					if some && !all {
						return false, errShared(&to[i], &from[k])
					}
				}
			}
		}
	}
	return some, nil
}

func errShared(dst, src *Layer) error {
	return fault.New(fault.Invalid, fmt.Sprintf("layer %d", dst.ID), "of the destination and layer %d of the source share bytes", src.ID).
		Hint("copy between caches that are apart, or inside one")
}

// meet reports whether any region of dst crosses one of src.
func meet(dst, src *Cache) bool {
	for i, n := range dst.g.spec.RegionBytes {
		a := uint64(dst.regions[i].Base())
		for j, m := range src.g.spec.RegionBytes {
			b := uint64(src.regions[j].Base())
			if n > 0 && m > 0 && a < b+uint64(m) && b < a+uint64(n) {
				return true
			}
		}
	}
	return false
}

// span is a plane in all pages: n stretches of width bytes, stride apart.
type span struct {
	base          uint64
	width, stride uint64
	n             uint64
}

func (c *Cache) span(p *Plane) span {
	return span{
		base:  uint64(c.regions[p.Region].Base()) + uint64(p.Offset),
		width: uint64(p.Bytes), stride: uint64(p.PageStride), n: uint64(c.g.spec.Pages),
	}
}

// overlaps reports whether s and o share a byte: exactly when they step alike, and else
// whether they cross.
func (s span) overlaps(o span) bool {
	if s.base > o.base {
		s, o = o, s
	}
	if end := s.base + (s.n-1)*s.stride + s.width; end <= o.base {
		return false
	}
	if s.stride != o.stride || s.n == 1 {
		return true
	}
	d := (o.base - s.base) % s.stride
	return d < s.width || s.stride-d < o.width && (o.base-s.base)/s.stride+1 < s.n
}
