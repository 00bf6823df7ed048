package kv

import (
	"math"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Chunk is one contiguous stretch of bytes of a page.
type Chunk struct {
	Kind   PlaneKind
	Region int
	Off    int64   // in the region
	Addr   uintptr // the region's base + Off
	Bytes  int64
}

// Chunks appends to dst the chunks of tokens [t0, t1) of page p in the layer at
// that position: one for each plane, in the order of the planes, so K and V that
// are apart are two chunks. Of a part of a page, a plane in HND has one for each
// head (with [JoinBlocks] two: K, V). bases has the address of each region: the
// addresses of a cache elsewhere that has this very geometry. An empty range has
// no chunks.
//
// Kinds: fault.Invalid (layer, page, range or bases out of range),
// fault.Unsupported (part of a plane that moves whole).
func (g *Geometry) Chunks(dst []Chunk, bases []uintptr, layer int, p page.ID, t0, t1 int) ([]Chunk, error) {
	if len(bases) != len(g.spec.RegionBytes) {
		return dst, fault.New(fault.Invalid, "bases", "%d addresses for %d regions", len(bases), len(g.spec.RegionBytes))
	}
	return g.chunks(dst, func(r int) uintptr { return bases[r] }, layer, p, t0, t1)
}

func (g *Geometry) chunks(dst []Chunk, base func(region int) uintptr, layer int, p page.ID, t0, t1 int) ([]Chunk, error) {
	l, err := g.layer(layer)
	if err != nil {
		return dst, err
	}
	if err := g.checkPage(p); err != nil {
		return dst, err
	}
	if err := g.checkTokens(layer, t0, t1); err != nil {
		return dst, err
	}
	n := len(dst)
	for i := range l.Planes {
		pl := &l.Planes[i]
		off := pl.Offset + int64(p)*pl.PageStride
		bytes, parts, pitch := pl.Bytes, int64(1), int64(0)
		if t1-t0 < g.spec.PageSize {
			off += int64(t0) * pl.TokenStride
			bytes = int64(t1-t0) * pl.TokenStride
			parts, pitch = pl.parts()
		}
		if bytes == 0 {
			continue
		}
		b := base(pl.Region)
		if end := off + (parts-1)*pitch + bytes; uint64(b) > math.MaxUint64-uint64(end) {
			return dst[:n], fault.New(fault.Invalid, "base", "%#x of region %d, and %d bytes, end beyond the address space", b, pl.Region, end)
		}
		for ; parts > 0; parts-- {
			dst = append(dst, Chunk{Kind: pl.Kind, Region: pl.Region, Off: off, Addr: b + uintptr(off), Bytes: bytes})
			off += pitch
		}
	}
	return dst, nil
}

// checkTokens refuses ranges that are not in a page, or that the layer's planes
// can't be cut to.
func (g *Geometry) checkTokens(layer, t0, t1 int) error {
	n := g.spec.PageSize
	switch {
	case t0 < 0 || t1 < t0 || t1 > n:
		return fault.New(fault.Invalid, "tokens", "[%d, %d) is not in [0, %d)", t0, t1, n)
	case t0 == t1 || (t0 == 0 && t1 == n):
		return nil
	case g.whole[layer]:
		return fault.New(fault.Unsupported, "tokens", "[%d, %d) of a page of %d: layer %d has a plane that moves as whole pages only", t0, t1, n, g.spec.Layers[layer].ID).
			Hint("move whole pages")
	}
	return nil
}

// parts returns in how many stretches, pitch apart, the page's rows of a token
// lie: one, but in HND one for each head, or for each head's K and V. p can be
// cut by token, and a page has several of them.
func (pl *Plane) parts() (n, pitch int64) {
	switch {
	case pl.HeadStride <= pl.TokenStride: // heads inside tokens, or no heads
		return 1, 0
	case pl.KVStride > pl.TokenStride:
		return pl.Bytes / pl.KVStride, pl.KVStride
	}
	return pl.Bytes / pl.HeadStride, pl.HeadStride
}

// find returns the layer's plane of that kind, nil when it has none.
func (l *Layer) find(kind PlaneKind) *Plane {
	for i := range l.Planes {
		if l.Planes[i].Kind == kind {
			return &l.Planes[i]
		}
	}
	return nil
}
