package kv

import (
	"math"

	"github.com/kvferry/kvferry/fault"
)

// Limits of a geometry. They are far above any model, and low enough that a
// hostile description can make nobody allocate more than a few hundred KiB.
const (
	MaxLayers   = 1024          // layers of one cache
	MaxPlanes   = 4096          // planes of one cache, all layers together; also regions
	MaxPages    = math.MaxInt32 // page ids are 32 bits
	MaxPageSize = 1 << 20       // tokens a page
	MaxHeads    = 1 << 16       // heads of one layer
	MaxDim      = 1 << 20       // elements of one head, or of one latent row
	MaxID       = 1 << 20       // global layer and head ids are below this
)

// Config describes a cache whose layers are all alike. Its methods arrange the
// bytes: [Config.LayerMajor], [Config.PageMajor], [Config.PerLayerKVFirst],
// [Config.PerLayerPageFirst].
//
// MLA takes LatentDim and neither KVHeads nor HeadDim; NHD and HND the reverse.
// With zero layers all of these, and Layout and DType, may be zero.
type Config struct {
	Layout     Layout
	DType      DType
	Layers     int  // 0 … MaxLayers
	Pages      int  // 1 … MaxPages
	PageSize   int  // tokens a page, 1 … MaxPageSize
	KVHeads    int  // 1 … MaxHeads
	HeadDim    int  // elements, 1 … MaxDim
	LatentDim  int  // elements, 1 … MaxDim
	Sink       bool // page 0 takes the rows of padding
	FirstLayer int  // global id of the first layer, 0 … MaxID-1
	FirstHead  int  // global id of the first KV head, 0 … MaxID-1
}

// LayerMajor is one tensor [layers, pages, 2, page_size, heads, dim] (HND:
// [layers, pages, 2, heads, page_size, dim]; MLA: [layers, pages, page_size,
// latent]): all pages of a layer together.
// Kind: fault.Invalid, naming the field, its value and its limit.
func (c Config) LayerMajor() (*Geometry, error) {
	half, planes, err := c.sizes()
	if err != nil {
		return nil, err
	}
	stride := half * int64(planes)
	layer, ok := mul(stride, int64(c.Pages))
	if !ok {
		return nil, c.tooLarge(stride)
	}
	return c.arrange(half, func(l, i int) (int, int64, int64) {
		return 0, int64(l)*layer + int64(i)*half, stride
	})
}

// PageMajor is one tensor [pages, layers, 2, page_size, heads, dim] (HND and
// MLA likewise): all layers of a page together, so that a page is one stretch.
// Kind: fault.Invalid, as [Config.LayerMajor].
func (c Config) PageMajor() (*Geometry, error) {
	half, planes, err := c.sizes()
	if err != nil {
		return nil, err
	}
	layer := half * int64(planes)
	stride, ok := mul(layer, int64(c.Layers))
	if !ok {
		return nil, c.tooLarge(layer)
	}
	return c.arrange(half, func(l, i int) (int, int64, int64) {
		return 0, int64(l)*layer + int64(i)*half, stride
	})
}

// PerLayerKVFirst is a tensor [2, pages, page_size, heads, dim] for each layer,
// in a region of its own: K of all pages, then V of all pages. Layers whose two
// halves are tensors of their own need [NewGeometry].
// Kinds: fault.Invalid, as [Config.LayerMajor]; fault.Unsupported with MLA,
// which has no K and V.
func (c Config) PerLayerKVFirst() (*Geometry, error) {
	half, _, err := c.sizes()
	if err != nil {
		return nil, err
	}
	if c.Layout == MLA {
		return nil, fault.New(fault.Unsupported, "Config.Layout", "MLA has no K and V to keep apart").
			Hint("use PerLayerPageFirst")
	}
	all, ok := mul(half, int64(c.Pages))
	if !ok {
		return nil, c.tooLarge(half)
	}
	return c.arrange(half, func(l, i int) (int, int64, int64) { return l, int64(i) * all, half })
}

// PerLayerPageFirst is a tensor [pages, 2, page_size, heads, dim] (MLA: [pages,
// page_size, latent]) for each layer, in a region of its own.
// Kind: fault.Invalid, as [Config.LayerMajor].
func (c Config) PerLayerPageFirst() (*Geometry, error) {
	half, planes, err := c.sizes()
	if err != nil {
		return nil, err
	}
	return c.arrange(half, func(l, i int) (int, int64, int64) {
		return l, int64(i) * half, half * int64(planes)
	})
}

// arrange builds the geometry in which place says, for plane i of the layer at
// position l, its region, offset and page stride.
func (c Config) arrange(half int64, place func(l, i int) (region int, off, stride int64)) (*Geometry, error) {
	s := Spec{
		Layout: c.Layout, DType: c.DType, Pages: c.Pages, PageSize: c.PageSize, Sink: c.Sink,
		Layers: make([]Layer, c.Layers),
	}
	heads, dim, kinds := c.KVHeads, c.HeadDim, []PlaneKind{K, V}
	if c.Layout == MLA {
		heads, dim, kinds = 1, c.LatentDim, []PlaneKind{Latent}
	}
	for l := range s.Layers {
		layer := Layer{ID: c.FirstLayer + l, FirstHead: c.FirstHead, Heads: heads, Dim: dim}
		for i, kind := range kinds {
			p := Plane{Kind: kind, Bytes: half}
			p.Region, p.Offset, p.PageStride = place(l, i)
			p.TokenStride, p.HeadStride = packedStrides(&s, &layer, kind)
			layer.Planes = append(layer.Planes, p)
			// Offsets of an arrangement only grow, so its last plane in a region ends it.
			end, ok := planeEnd(p, c.Pages)
			if !ok {
				return nil, c.tooLarge(half * int64(len(kinds)))
			}
			if p.Region == len(s.RegionBytes) {
				s.RegionBytes = append(s.RegionBytes, 0)
			}
			s.RegionBytes[p.Region] = max(s.RegionBytes[p.Region], end)
		}
		s.Layers[l] = layer
	}
	return NewGeometry(s)
}

// sizes validates the fields and returns the bytes of one plane of one page,
// and how many planes a layer has.
func (c Config) sizes() (half int64, planes int, err error) {
	// A cache of no layers has no rows: what describes them may be left out.
	least, rows := int64(1), true
	if c.Layers == 0 {
		least, rows = 0, false
	}
	type field struct {
		name        string
		value       int
		least, most int64
	}
	fields := []field{
		{"Layers", c.Layers, 0, MaxLayers},
		{"Pages", c.Pages, 1, MaxPages},
		{"PageSize", c.PageSize, 1, MaxPageSize},
		{"FirstLayer", c.FirstLayer, 0, MaxID - int64(max(c.Layers, 1))},
	}
	heads := []field{
		{"KVHeads", c.KVHeads, least, MaxHeads},
		{"HeadDim", c.HeadDim, least, MaxDim},
		{"LatentDim", c.LatentDim, 0, 0},
		{"FirstHead", c.FirstHead, 0, MaxID - int64(max(c.KVHeads, 1))},
	}
	if c.Layout == MLA {
		heads = []field{
			{"KVHeads", c.KVHeads, 0, 0},
			{"HeadDim", c.HeadDim, 0, 0},
			{"LatentDim", c.LatentDim, least, MaxDim},
			{"FirstHead", c.FirstHead, 0, 0},
		}
	}
	for _, f := range append(fields, heads...) {
		if int64(f.value) < f.least || int64(f.value) > f.most {
			e := outside("Config."+f.name, int64(f.value), f.least, f.most)
			if f.most == 0 {
				e.Hint("%s is not used with layout %v", f.name, c.Layout)
			}
			return 0, 0, e
		}
	}
	if c.Layout > MLA || (rows && c.Layout == 0) {
		return 0, 0, unknown("Config.Layout", c.Layout, layoutNames)
	}
	if c.DType > FP32 || (rows && c.DType == 0) {
		return 0, 0, unknown("Config.DType", c.DType, dtypeNames)
	}
	// At most 2^20 tokens × 2^16 heads × 2^20 elements × 2^2 bytes = 2^58.
	half, planes = int64(c.PageSize)*c.DType.Size(), 2
	if c.Layout == MLA {
		return half * int64(c.LatentDim), 1, nil
	}
	return half * int64(c.KVHeads) * int64(c.HeadDim), planes, nil
}

// tooLarge is the error of a cache whose size does not fit 63 bits.
func (c Config) tooLarge(layerPage int64) error {
	return fault.New(fault.Invalid, "Config.Pages",
		"%d pages of %d layers of %d bytes are more than %d bytes", c.Pages, c.Layers, layerPage, int64(math.MaxInt64)).
		Hint("lower Pages, PageSize or the size of a head")
}

// OpaqueSpec describes a cache of which only whole blocks are known: block b of
// layer l is the BlockBytes bytes at Offset + l·LayerStride + b·BlockStride of
// one region of RegionBytes bytes.
type OpaqueSpec struct {
	Layers, Blocks int
	PageSize       int // tokens a block
	FirstLayer     int // global id of the first layer
	BlockBytes     int64
	Offset         int64
	LayerStride    int64
	BlockStride    int64
	RegionBytes    int64
}

// Geometry is the geometry that s describes. Its pages move whole: token ranges
// are fault.Unsupported. Kind: fault.Invalid, naming field, value and limit.
func (s OpaqueSpec) Geometry() (*Geometry, error) {
	if s.Layers < 0 || s.Layers > MaxLayers {
		return nil, outside("OpaqueSpec.Layers", int64(s.Layers), 0, MaxLayers)
	}
	if s.LayerStride < 0 {
		return nil, outside("OpaqueSpec.LayerStride", s.LayerStride, 0, math.MaxInt64)
	}
	if s.Offset < 0 {
		return nil, outside("OpaqueSpec.Offset", s.Offset, 0, math.MaxInt64)
	}
	g := Spec{Pages: s.Blocks, PageSize: s.PageSize, Layers: make([]Layer, s.Layers)}
	for l := range g.Layers {
		off, ok := mul(int64(l), s.LayerStride)
		if ok {
			off, ok = add(off, s.Offset)
		}
		if !ok {
			return nil, fault.New(fault.Invalid, "OpaqueSpec.LayerStride",
				"%d bytes: layer %d begins beyond %d bytes", s.LayerStride, l, int64(math.MaxInt64))
		}
		g.Layers[l] = Layer{ID: s.FirstLayer + l, Planes: []Plane{
			{Kind: Opaque, Offset: off, PageStride: s.BlockStride, Bytes: s.BlockBytes},
		}}
	}
	if s.Layers > 0 {
		g.RegionBytes = []int64{s.RegionBytes}
	}
	return NewGeometry(g)
}

// outside is the error of a field whose value is not in [least, most].
func outside(field string, value, least, most int64) *fault.Error {
	return fault.New(fault.Invalid, field, "%d is not in %d … %d", value, least, most)
}
