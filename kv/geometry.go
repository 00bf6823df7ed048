package kv

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Spec is everything that decides where the bytes of a cache lie: plain data,
// to be made, decoded and compared freely. [NewGeometry] makes it usable.
type Spec struct {
	Layout      Layout // zero only when no plane has rows of K, V or latents
	DType       DType  // likewise
	Pages       int    // 1 … MaxPages
	PageSize    int    // tokens a page, 1 … MaxPageSize
	Sink        bool   // page 0 takes the rows of padding
	Layers      []Layer
	RegionBytes []int64 // bytes of each region
}

// Layer is one layer of the model: the heads of it that this cache holds.
type Layer struct {
	ID        int // global id, unique in the cache, 0 … MaxID-1
	FirstHead int // global id of its first head
	Heads     int // heads held here; 1 for MLA; may be 0 when no plane has rows
	Dim       int // elements a head, or of a latent row; likewise
	Planes    []Plane
}

// Plane says where the bytes of one kind lie in every page: page p has Bytes
// contiguous bytes at Offset + p·PageStride of its region.
//
// The strides of planes with rows are those of packed rows, and so follow from
// the layout; they are stated so that a plane can be read without it. NHD: rows
// of heads × dim elements, TokenStride apart. HND: a block of tokens × dim
// elements for each head, HeadStride apart. Latent: HeadStride is 0. In a KV
// plane an element of V lies KVStride behind the one of K; KVStride is one row
// (dim elements: [JoinRows]), or one row for each head in NHD, for each token in
// HND ([JoinBlocks]). In all other planes it is 0.
//
// A Scale plane has a TokenStride when tokens have scales of their own, and a
// HeadStride when heads have, ordered as the layout is. State and Opaque planes
// have no strides but PageStride.
type Plane struct {
	Kind        PlaneKind
	Region      int
	Offset      int64 // of page 0 in the region
	PageStride  int64 // ≥ Bytes
	TokenStride int64
	HeadStride  int64
	KVStride    int64
	Bytes       int64 // of one page, ≥ 1
}

// Geometry is a validated [Spec]. It is immutable and may be used from any
// goroutine.
type Geometry struct {
	spec        Spec
	sorted      []Layer // by id, as two caches are compared and paired; never changed
	pageBytes   int64
	bytes       int64
	whole       []bool // by position: the layer has a plane that moves only as whole pages
	fingerprint Fingerprint

	// A page is one stretch: pageBytes bytes at start + p·stride of region.
	single        bool
	region        int
	start, stride int64
}

// Fingerprint is a hash of every field of a geometry. It is stable: the same
// fields give the same fingerprint in every process and version.
type Fingerprint [16]byte

func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// NewGeometry validates s and makes a geometry of a copy of it.
// Kinds: fault.Invalid, naming the field, its value and its limit;
// fault.Unsupported for planes of different page strides that interleave over
// too many pages to be compared.
func NewGeometry(s Spec) (*Geometry, error) {
	g := &Geometry{spec: s.clone()}
	var err error
	if g.pageBytes, g.bytes, err = g.spec.validate(); err != nil {
		return nil, err
	}
	for _, l := range g.spec.Layers {
		whole := slices.ContainsFunc(l.Planes, func(p Plane) bool { return p.TokenStride == 0 })
		g.whole = append(g.whole, whole)
	}
	g.sorted = g.spec.sorted()
	g.fingerprint = fingerprint(&g.spec)
	g.findSingle()
	return g, nil
}

// Packed is the geometry of the same pages, pages of them, page after page in
// one region with nothing between: layer by layer in g's order, in each K, V,
// joined K and V, latents, scales, states, opaque planes. It is what host memory,
// disks and networks use. It has no sink, for nobody computes in it.
// Kind: fault.Invalid.
func (g *Geometry) Packed(pages int) (*Geometry, error) {
	return g.packed(pages, func(layers []Layer, _ int64) {
		var off int64
		for _, l := range layers {
			slices.SortStableFunc(l.Planes, func(a, b Plane) int { return cmp.Compare(a.Kind, b.Kind) })
			for i := range l.Planes {
				p := &l.Planes[i]
				p.Region, p.Offset, p.PageStride = 0, off, g.pageBytes
				off += p.Bytes
			}
		}
	})
}

// PackedLayerMajor is [Geometry.Packed] with all pages of a layer together. Of
// one layer, planes that follow each other in g do so here, and the others are
// apart: so every stretch of a page that is followed by the next page's in g is
// here too, and runs of pages become one wide row each. A page is not one
// stretch, so disks and checksums take more pieces: it is meant for stretches too
// small to be copied one by one.
// Kind: fault.Invalid.
func (g *Geometry) PackedLayerMajor(pages int) (*Geometry, error) {
	return g.packed(pages, func(layers []Layer, pages int64) {
		var off int64
		for _, l := range layers {
			// The planes keep their order, which pairs those of one kind; only where they
			// lie is worked out in the order of their places in g.
			var rest []*Plane
			for i := range l.Planes {
				rest = append(rest, &l.Planes[i])
			}
			slices.SortFunc(rest, func(a, b *Plane) int {
				return cmp.Or(a.Region-b.Region, cmp.Compare(a.Offset, b.Offset))
			})
			for len(rest) > 0 {
				first, stride, n := *rest[0], int64(0), 0
				for n < len(rest) && rest[n].Region == first.Region && rest[n].PageStride == first.PageStride &&
					rest[n].Offset == first.Offset+stride {
					stride += rest[n].Bytes
					n++
				}
				at := off
				for _, p := range rest[:n] {
					p.Region, p.Offset, p.PageStride = 0, at, stride
					at += p.Bytes
				}
				off += stride * pages
				rest = rest[n:]
			}
		}
	})
}

// packed is g with pages pages in one region, where place puts its planes. All
// pages together fit 63 bits.
func (g *Geometry) packed(pages int, place func(layers []Layer, pages int64)) (*Geometry, error) {
	s := g.spec.clone()
	s.Pages, s.Sink, s.RegionBytes = pages, false, nil
	if pages < 1 || pages > MaxPages {
		return nil, outside("pages", int64(pages), 1, MaxPages)
	}
	all, ok := mul(g.pageBytes, int64(pages))
	if !ok {
		return nil, fault.New(fault.Invalid, "pages", "%d pages of %d bytes are more than 63 bits can count", pages, g.pageBytes)
	}
	place(s.Layers, int64(pages))
	if all > 0 {
		s.RegionBytes = []int64{all}
	}
	return NewGeometry(s)
}

// Spec returns a copy of the geometry's fields.
func (g *Geometry) Spec() Spec { return g.spec.clone() }

// Layout returns the order of axes in a page, 0 when no plane has rows.
func (g *Geometry) Layout() Layout { return g.spec.Layout }

// DType returns the type of the elements, 0 when no plane has rows.
func (g *Geometry) DType() DType { return g.spec.DType }

// Layers returns the number of layers.
func (g *Geometry) Layers() int { return len(g.spec.Layers) }

// Pages returns the number of pages; ids are 0 … Pages-1.
func (g *Geometry) Pages() int { return g.spec.Pages }

// PageSize returns the tokens of a page.
func (g *Geometry) PageSize() int { return g.spec.PageSize }

// Sink reports whether page 0 is reserved for the rows of padding.
func (g *Geometry) Sink() bool { return g.spec.Sink }

// PageBytes returns the bytes of one page, all layers and planes together.
func (g *Geometry) PageBytes() int64 { return g.pageBytes }

// Regions returns the number of memory regions.
func (g *Geometry) Regions() int { return len(g.spec.RegionBytes) }

// Bytes returns the bytes of all regions together.
func (g *Geometry) Bytes() int64 { return g.bytes }

// Layer returns a copy of the layer at a position. Kind: fault.Invalid.
func (g *Geometry) Layer(layer int) (Layer, error) {
	l, err := g.layer(layer)
	if err != nil {
		return Layer{}, err
	}
	c := *l
	c.Planes = slices.Clone(l.Planes)
	return c, nil
}

// Fingerprint returns the hash of every field.
func (g *Geometry) Fingerprint() Fingerprint { return g.fingerprint }

// Exchangeable returns nil when pages of a and b hold the same bytes in the same
// order, so that one can be copied onto the other. The number of pages, regions,
// offsets, page strides, the order of layers and the sink may differ; all else
// must be equal. The error (fault.Invalid) names the field and both its values.
func Exchangeable(a, b *Geometry) error { return exchangeable(a, b, false) }

// exchangeable is [Exchangeable], but when anyHeads, a and b may hold different
// heads of each layer.
func exchangeable(a, b *Geometry, anyHeads bool) error {
	differ := func(field string, x, y any) error {
		return fault.New(fault.Invalid, "geometry", "%s differs: %v and %v", field, x, y).
			Hint("pages move only between caches of one layout, dtype, page size and set of layers and heads")
	}
	s, t := &a.spec, &b.spec
	switch {
	case s.Layout != t.Layout:
		return differ("layout", s.Layout, t.Layout)
	case s.DType != t.DType:
		return differ("dtype", s.DType, t.DType)
	case s.PageSize != t.PageSize:
		return differ("page size", s.PageSize, t.PageSize)
	case len(s.Layers) != len(t.Layers):
		return differ("number of layers", len(s.Layers), len(t.Layers))
	}
	for i := range a.sorted {
		x, y := &a.sorted[i], &b.sorted[i]
		if x.ID != y.ID {
			return differ("set of layers", fmt.Sprintf("layer %d", x.ID), fmt.Sprintf("layer %d", y.ID))
		}
		layer := func(field string, of, other any) error {
			return differ(fmt.Sprintf("layer %d: %s", x.ID, field), of, other)
		}
		switch {
		case !anyHeads && x.FirstHead != y.FirstHead:
			return layer("first head", x.FirstHead, y.FirstHead)
		case !anyHeads && x.Heads != y.Heads:
			return layer("number of heads", x.Heads, y.Heads)
		case x.Dim != y.Dim:
			return layer("head dim", x.Dim, y.Dim)
		case len(x.Planes) != len(y.Planes):
			return layer("number of planes", len(x.Planes), len(y.Planes))
		}
		for j := range x.Planes {
			p, q := &x.Planes[j], &y.Planes[j]
			plane := func(field string, of, other any) error {
				return layer(fmt.Sprintf("plane %v: %s", p.Kind, field), of, other)
			}
			// What has heads is compared by what one head has: all else follows from it
			// and the number of heads.
			all := !anyHeads || p.HeadStride == 0 || q.HeadStride == 0
			token := all || s.Layout == HND || (p.TokenStride > 0) != (q.TokenStride > 0)
			switch {
			case p.Kind != q.Kind:
				return layer(fmt.Sprintf("kind of plane %d", j), p.Kind, q.Kind)
			case all && p.Bytes != q.Bytes:
				return plane("bytes a page", p.Bytes, q.Bytes)
			case token && p.TokenStride != q.TokenStride:
				return plane("token stride", p.TokenStride, q.TokenStride)
			case p.HeadStride != q.HeadStride:
				return plane("head stride", p.HeadStride, q.HeadStride)
			case all && p.KVStride != q.KVStride:
				return plane("distance from K to V", p.KVStride, q.KVStride)
			}
		}
	}
	return nil
}

// sorted returns the layers by id and in each the planes by kind, those of one
// kind in their own order: the order in which two caches are compared and
// paired.
func (s *Spec) sorted() []Layer {
	layers := s.clone().Layers
	slices.SortFunc(layers, func(a, b Layer) int { return cmp.Compare(a.ID, b.ID) })
	for _, l := range layers {
		slices.SortStableFunc(l.Planes, func(a, b Plane) int { return cmp.Compare(a.Kind, b.Kind) })
	}
	return layers
}

func (s *Spec) clone() Spec {
	c := *s
	c.Layers = slices.Clone(c.Layers)
	for i := range c.Layers {
		c.Layers[i].Planes = slices.Clone(c.Layers[i].Planes)
	}
	c.RegionBytes = slices.Clone(c.RegionBytes)
	return c
}

// fingerprint hashes the fields in the order of their declaration, numbers as 8
// bytes, lists after their length.
func fingerprint(s *Spec) Fingerprint {
	h := sha256.New()
	var buf []byte
	put := func(vs ...int64) {
		buf = buf[:0]
		for _, v := range vs {
			buf = binary.LittleEndian.AppendUint64(buf, uint64(v))
		}
		h.Write(buf)
	}
	var sink int64
	if s.Sink {
		sink = 1
	}
	const version = 2 // of this encoding
	put(version, int64(s.Layout), int64(s.DType), int64(s.Pages), int64(s.PageSize), sink, int64(len(s.Layers)))
	for _, l := range s.Layers {
		put(int64(l.ID), int64(l.FirstHead), int64(l.Heads), int64(l.Dim), int64(len(l.Planes)))
		for _, p := range l.Planes {
			put(int64(p.Kind), int64(p.Region), p.Offset, p.PageStride, p.TokenStride, p.HeadStride, p.KVStride, p.Bytes)
		}
	}
	put(int64(len(s.RegionBytes)))
	put(s.RegionBytes...)
	return Fingerprint(h.Sum(nil)[:16])
}

// findSingle sees whether the planes of a page follow one another in one region
// without a gap.
func (g *Geometry) findSingle() {
	var planes []Plane
	for _, l := range g.spec.Layers {
		planes = append(planes, l.Planes...)
	}
	if len(planes) == 0 {
		return
	}
	slices.SortFunc(planes, func(a, b Plane) int { return cmp.Compare(a.Offset, b.Offset) })
	first := planes[0]
	end := first.Offset
	for _, p := range planes {
		if p.Region != first.Region || p.Offset != end || p.PageStride != first.PageStride {
			return
		}
		end += p.Bytes
	}
	g.single, g.region, g.start, g.stride = true, first.Region, first.Offset, first.PageStride
}

// layer returns the layer at a position.
func (g *Geometry) layer(layer int) (*Layer, error) {
	if layer < 0 || layer >= len(g.spec.Layers) {
		return nil, outside("layer", int64(layer), 0, int64(len(g.spec.Layers)-1))
	}
	return &g.spec.Layers[layer], nil
}

// checkPage refuses ids outside the cache.
func (g *Geometry) checkPage(p page.ID) error {
	if p < 0 || int(p) >= g.spec.Pages {
		return outside("page", int64(p), 0, int64(g.spec.Pages-1))
	}
	return nil
}
