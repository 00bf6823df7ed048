package kv

import (
	"fmt"
	"iter"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// View is a strided tensor over part of a memory: what an attention kernel
// takes. The first Dims entries of Shape and Stride count. Every element lies
// inside Mem; Stride may be negative (V before K). With a 4-bit type the last
// axis counts bytes of two elements.
type View struct {
	Mem    *device.Memory
	Off    int64 // bytes from the start of Mem to element 0, 0, …
	DType  DType
	Dims   int
	Shape  [5]int64 // elements
	Stride [5]int64 // bytes
}

// ChunkView is the view of tokens [t0, t1) of page p in the layer at that
// position, over mem, which stands for the region that the layer lies in: the
// cache's own memory, or a mapping of another cache with this very geometry.
// Shape: NHD [2, t1-t0, heads, dim]; HND [2, heads, t1-t0, dim]; MLA [t1-t0,
// dim].
//
// Kinds: fault.Invalid (out of range; mem too small), fault.Unsupported (part of
// a layer with a plane that moves whole; a layer of no rows; K and V in different
// regions).
func (g *Geometry) ChunkView(mem *device.Memory, layer int, p page.ID, t0, t1 int) (View, error) {
	return g.view(func(int) *device.Memory { return mem }, layer, p, t0, t1)
}

// LayerView is the view of all pages of the layer at that position, over mem as
// in [Geometry.ChunkView]. Shape: NHD [pages, 2, page_size, heads, dim]; HND
// [pages, 2, heads, page_size, dim]; MLA [pages, page_size, dim].
//
// Kinds: as [Geometry.ChunkView]; fault.Unsupported also when the distance of K
// and V is not the same in all pages.
func (g *Geometry) LayerView(mem *device.Memory, layer int) (View, error) {
	return g.layerView(func(int) *device.Memory { return mem }, layer)
}

func (g *Geometry) view(memory func(region int) *device.Memory, layer int, p page.ID, t0, t1 int) (View, error) {
	l, err := g.layer(layer)
	if err != nil {
		return View{}, err
	}
	if err := g.checkPage(p); err != nil {
		return View{}, err
	}
	if err := g.checkTokens(layer, t0, t1); err != nil {
		return View{}, err
	}
	return g.viewOf(memory, l, p, t0, t1)
}

func (g *Geometry) layerView(memory func(region int) *device.Memory, layer int) (View, error) {
	l, err := g.layer(layer)
	if err != nil {
		return View{}, err
	}
	if k, v := l.find(K), l.find(V); k != nil && v != nil && k.PageStride != v.PageStride {
		return View{}, fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID),
			"the page strides of K and V are %d and %d: no stride leads from K to V in every page", k.PageStride, v.PageStride).
			Hint("use ChunkView page by page")
	}
	view, err := g.viewOf(memory, l, 0, 0, g.spec.PageSize)
	if err != nil {
		return View{}, err
	}
	copy(view.Shape[1:], view.Shape[:view.Dims])
	copy(view.Stride[1:], view.Stride[:view.Dims])
	view.Dims++
	view.Shape[0], view.Stride[0] = int64(g.spec.Pages), l.rows().PageStride
	return view, nil
}

// viewOf is the view of one page; arguments are in range.
func (g *Geometry) viewOf(memory func(region int) *device.Memory, l *Layer, p page.ID, t0, t1 int) (View, error) {
	pl := l.rows()
	if pl == nil {
		return View{}, fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID), "has no rows of K and V or of latents")
	}
	e := g.spec.DType.unit()
	tokens, heads, dim := int64(t1-t0), int64(l.Heads), g.spec.DType.Bytes(int64(l.Dim))/e
	view := View{DType: g.spec.DType, Off: pl.Offset + int64(p)*pl.PageStride + int64(t0)*pl.TokenStride}
	axis := func(shape, stride int64) {
		view.Shape[view.Dims], view.Stride[view.Dims] = shape, stride
		view.Dims++
	}
	switch v := l.find(V); {
	case pl.Kind == KV:
		axis(2, pl.KVStride)
	case pl.Kind == K && v.Region != pl.Region:
		return View{}, fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID),
			"K is in region %d and V in region %d: no stride leads from one to the other", pl.Region, v.Region).
			Hint("use Chunks, which has an address for each")
	case pl.Kind == K:
		axis(2, v.Offset-pl.Offset+int64(p)*(v.PageStride-pl.PageStride))
	}
	if g.spec.Layout == HND {
		axis(heads, pl.HeadStride)
		axis(tokens, pl.TokenStride)
	} else {
		axis(tokens, pl.TokenStride)
		if pl.Kind != Latent {
			axis(heads, pl.HeadStride)
		}
	}
	axis(dim, e)
	view.Mem = memory(pl.Region)
	if view.Mem == nil {
		return View{}, fault.New(fault.Invalid, fmt.Sprintf("region %d", pl.Region), "has no memory")
	}
	// Planes lie inside their regions, so memory as large as the region holds
	// every element.
	return view, g.checkMemory(pl.Region, view.Mem)
}

// rows returns the plane that the rows of a layer begin in: K, KV or Latent.
func (l *Layer) rows() *Plane {
	for _, kind := range []PlaneKind{K, KV, Latent} {
		if pl := l.find(kind); pl != nil {
			return pl
		}
	}
	return nil
}

// At returns the offset in Mem of the first byte of an element, given its index
// in each of the Dims axes. Kind: fault.Invalid.
func (v View) At(index ...int) (int64, error) {
	if len(index) != v.Dims {
		return 0, fault.New(fault.Invalid, "index", "has %d axes, the view has %d", len(index), v.Dims)
	}
	off := v.Off
	for d, i := range index {
		if i < 0 || int64(i) >= v.Shape[d] {
			return 0, outside(fmt.Sprintf("index of axis %d", d), int64(i), 0, v.Shape[d]-1)
		}
		off += int64(i) * v.Stride[d]
	}
	return off, nil
}

// Rows visits the view's elements in the order of its axes, the last one
// fastest, as the fewest contiguous rows of one length. The rows are the memory
// itself: writing into them writes the cache. Kind: fault.Unsupported (memory
// that the host can't address).
func (v View) Rows() (iter.Seq[[]byte], error) {
	mem := v.Mem.Bytes()
	if mem == nil {
		return nil, fault.New(fault.Unsupported, "view", "is over memory of %s, which the host can't address", v.Mem.Device())
	}
	// The trailing axes without gaps are one row.
	row, outer := v.DType.unit(), v.Dims
	for outer > 0 && (v.Stride[outer-1] == row || v.Shape[outer-1] == 1) {
		outer--
		row *= v.Shape[outer]
	}
	return func(yield func([]byte) bool) {
		var index [5]int64
		for d := range v.Dims {
			if v.Shape[d] == 0 {
				return
			}
		}
		for off := v.Off; ; {
			if !yield(mem[off : off+row : off+row]) {
				return
			}
			d := outer - 1
			for ; d >= 0; d-- {
				index[d]++
				off += v.Stride[d]
				if index[d] < v.Shape[d] {
					break
				}
				off -= index[d] * v.Stride[d]
				index[d] = 0
			}
			if d < 0 {
				return
			}
		}
	}, nil
}
