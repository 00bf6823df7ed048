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

// Limits of a [Config]'s planes without rows.
const (
	MaxScaleBytes = 64      // bytes of one scale
	MaxStateBytes = 1 << 40 // bytes of one state
	MaxPageAlign  = 1 << 30 // bytes
)

// Config describes a cache whose layers are all alike. Its methods arrange the
// bytes: [Config.LayerMajor], [Config.PageMajor], [Config.PerLayerKVFirst],
// [Config.PerLayerPageFirst].
//
// MLA takes LatentDim and neither KVHeads nor HeadDim; NHD and HND the reverse.
// Layers of states alone (StateBytes without a Layout) take none of them, nor a
// DType. With zero layers all of these may be zero.
//
// Rows, scales and states are a tensor each, all arranged alike. Scales are
// [2, page_size, heads] a page (MLA: no 2; HND: heads first; without the axes
// that share a scale), states one stretch.
type Config struct {
	Layout     Layout
	DType      DType
	Layers     int      // 0 … MaxLayers
	Pages      int      // 1 … MaxPages
	PageSize   int      // tokens a page, 1 … MaxPageSize
	KVHeads    int      // 1 … MaxHeads
	HeadDim    int      // elements, 1 … MaxDim, even with a 4-bit type
	LatentDim  int      // elements, likewise
	Join       Join     // of K and V; Apart with MLA
	Scale      ScalePer // MLA: NoScale, PerPage or PerToken
	ScaleBytes int      // of one scale, 1 … MaxScaleBytes; 0 with NoScale
	StateBytes int      // recurrent state of a page in a layer, 0 … MaxStateBytes
	PageAlign  int      // bytes: from page to page is a multiple of it, padding included; 0 and 1 mean none
	Sink       bool     // page 0 takes the rows of padding
	FirstLayer int      // global id of the first layer, 0 … MaxID-1
	FirstHead  int      // global id of the first KV head, 0 … MaxID-1
}

// LayerMajor is one tensor [layers, pages, 2, page_size, heads, dim] (HND:
// [layers, pages, 2, heads, page_size, dim]; MLA: [layers, pages, page_size,
// latent]): all pages of a layer together. Scales and states are a tensor, in a
// region of its own, each.
// Kind: fault.Invalid, naming the field, its value and its limit.
func (c Config) LayerMajor() (*Geometry, error) {
	ts, err := c.tensors()
	if err != nil {
		return nil, err
	}
	layer := make([]int64, len(ts))
	for t := range ts {
		var ok1, ok2 bool
		layer[t], ok1 = mul(c.align(ts[t].bytes), int64(c.Pages))
		if _, ok2 = mul(layer[t], int64(c.Layers)); !ok1 || !ok2 {
			return nil, c.tooLarge(ts[t].bytes)
		}
	}
	return c.arrange(ts, func(l, t, i int) (int, int64, int64) {
		return t, int64(l)*layer[t] + ts[t].planes[i].Offset, c.align(ts[t].bytes)
	})
}

// PageMajor is one tensor [pages, layers, 2, page_size, heads, dim] (HND and
// MLA likewise): all layers of a page together, so that a page is one stretch.
// The scales and then the state of a layer follow its rows.
// Kind: fault.Invalid, as [Config.LayerMajor].
func (c Config) PageMajor() (*Geometry, error) {
	ts, err := c.tensors()
	if err != nil {
		return nil, err
	}
	var layer int64
	before := make([]int64, len(ts))
	for t := range ts {
		before[t] = layer
		layer += ts[t].bytes
	}
	page, ok := mul(layer, int64(c.Layers))
	if _, fits := add(page, MaxPageAlign); !ok || !fits {
		return nil, c.tooLarge(layer)
	}
	return c.arrange(ts, func(l, t, i int) (int, int64, int64) {
		return 0, int64(l)*layer + before[t] + ts[t].planes[i].Offset, c.align(page)
	})
}

// PerLayerKVFirst is a tensor [2, pages, page_size, heads, dim] for each layer,
// in a region of its own: K of all pages, then V of all pages. Scales and states
// are likewise, in the regions behind. Layers whose two halves are regions of
// their own need [NewGeometry].
// Kinds: fault.Invalid, as [Config.LayerMajor]; fault.Unsupported with MLA,
// which has no K and V, and with joined K and V.
func (c Config) PerLayerKVFirst() (*Geometry, error) {
	ts, err := c.tensors()
	if err != nil {
		return nil, err
	}
	if c.Layout == MLA || c.Join != Apart {
		field, why := "Config.Layout", "MLA has no K and V to keep apart"
		if c.Join != Apart {
			field, why = "Config.Join", "K and V are joined, not apart"
		}
		return nil, fault.New(fault.Unsupported, field, "%s", why).Hint("use PerLayerPageFirst")
	}
	all := make([]int64, len(ts))
	for t := range ts {
		var ok bool
		if all[t], ok = mul(c.align(ts[t].planes[0].Bytes), int64(c.Pages)); !ok {
			return nil, c.tooLarge(ts[t].bytes)
		}
	}
	return c.arrange(ts, func(l, t, i int) (int, int64, int64) {
		return l*len(ts) + t, int64(i) * all[t], c.align(ts[t].planes[i].Bytes)
	})
}

// PerLayerPageFirst is a tensor [pages, 2, page_size, heads, dim] (MLA: [pages,
// page_size, latent]) for each layer, in a region of its own. Scales and states
// are likewise, in the regions behind.
// Kind: fault.Invalid, as [Config.LayerMajor].
func (c Config) PerLayerPageFirst() (*Geometry, error) {
	ts, err := c.tensors()
	if err != nil {
		return nil, err
	}
	return c.arrange(ts, func(l, t, i int) (int, int64, int64) {
		return l*len(ts) + t, ts[t].planes[i].Offset, c.align(ts[t].bytes)
	})
}

// tensor is the planes of equal size that every arrangement keeps together: the
// rows, the scales or the state of a layer.
type tensor struct {
	planes []Plane // Offset is from the start of the tensor's part of a page
	bytes  int64   // of that part
}

// tensors validates the fields and returns the tensors that a layer has.
func (c Config) tensors() (ts []tensor, err error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	put := func(p Plane, kinds ...PlaneKind) {
		var t tensor
		for _, p.Kind = range kinds {
			p.Offset = t.bytes
			t.planes = append(t.planes, p)
			t.bytes += p.Bytes
		}
		ts = append(ts, t)
	}
	// At most 2^20 tokens × 2^16 heads × 2^20 elements × 2^2 bytes × 2 = 2^59.
	s := Spec{Layout: c.Layout, DType: c.DType, PageSize: c.PageSize}
	l := c.layer()
	if c.Layout != 0 {
		kinds := []PlaneKind{K, V}
		switch {
		case c.Layout == MLA:
			kinds = []PlaneKind{Latent}
		case c.Join != Apart:
			kinds = []PlaneKind{KV}
		}
		p := rowPlane(&s, &l, kinds[0], c.Join)
		put(p, kinds...)
	}
	if c.Scale != NoScale {
		one := int64(c.ScaleBytes)
		tokens, heads := int64(c.PageSize), int64(l.Heads)
		p := Plane{Kind: Scale, Bytes: one}
		switch c.Scale {
		default: // PerPage: one scale, no strides
		case PerHead:
			p.HeadStride, p.Bytes = one, one*heads
		case PerToken:
			p.TokenStride, p.Bytes = one, one*tokens
		case PerTokenHead:
			p.TokenStride, p.HeadStride, p.Bytes = one*heads, one, one*heads*tokens
			if c.Layout == HND {
				p.TokenStride, p.HeadStride = one, one*tokens
			}
		}
		if c.Layout == MLA {
			put(p, Scale)
		} else {
			put(p, Scale, Scale) // of K, of V
		}
	}
	if c.StateBytes > 0 {
		put(Plane{Bytes: int64(c.StateBytes)}, State)
	}
	return ts, nil
}

// layer is a layer without its id and planes.
func (c Config) layer() Layer {
	if c.Layout == MLA {
		return Layer{Heads: 1, Dim: c.LatentDim}
	}
	return Layer{FirstHead: c.FirstHead, Heads: c.KVHeads, Dim: c.HeadDim}
}

// arrange builds the geometry in which place says, for plane i of tensor t of
// the layer at position l, its region, offset and page stride.
func (c Config) arrange(ts []tensor, place func(l, t, i int) (region int, off, stride int64)) (*Geometry, error) {
	s := Spec{
		Layout: c.Layout, DType: c.DType, Pages: c.Pages, PageSize: c.PageSize, Sink: c.Sink,
		Layers: make([]Layer, c.Layers),
	}
	for l := range s.Layers {
		layer := c.layer()
		layer.ID = c.FirstLayer + l
		for t := range ts {
			for i, p := range ts[t].planes {
				p.Region, p.Offset, p.PageStride = place(l, t, i)
				layer.Planes = append(layer.Planes, p)
				// Offsets of an arrangement only grow, so its last plane in a region ends it.
				end, ok := planeEnd(p, c.Pages)
				if !ok {
					return nil, c.tooLarge(ts[t].bytes)
				}
				if p.Region == len(s.RegionBytes) {
					s.RegionBytes = append(s.RegionBytes, 0)
				}
				s.RegionBytes[p.Region] = max(s.RegionBytes[p.Region], end)
			}
		}
		s.Layers[l] = layer
	}
	return NewGeometry(s)
}

// align rounds bytes, below 2^62, up to the distance from page to page.
func (c Config) align(bytes int64) int64 {
	a := int64(max(c.PageAlign, 1))
	return (bytes + a - 1) / a * a
}

// validate checks every field.
func (c Config) validate() error {
	// What describes rows may be left out of a cache that has none.
	least, rows := int64(1), true
	if c.Layers == 0 || (c.Layout == 0 && c.StateBytes > 0) {
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
		{"StateBytes", c.StateBytes, 0, MaxStateBytes},
		{"PageAlign", c.PageAlign, 0, MaxPageAlign},
		{"FirstLayer", c.FirstLayer, 0, MaxID - int64(max(c.Layers, 1))},
		{"Join", int(c.Join), 0, int64(JoinBlocks)},
		{"Scale", int(c.Scale), 0, int64(PerTokenHead)},
	}
	most := int64(MaxDim)
	if c.Layout == 0 && !rows && c.Layers > 0 {
		most = 0
	}
	switch c.Layout {
	case MLA:
		fields = append(fields,
			field{"KVHeads", c.KVHeads, 0, 0},
			field{"HeadDim", c.HeadDim, 0, 0},
			field{"LatentDim", c.LatentDim, least, MaxDim},
			field{"Join", int(c.Join), 0, 0},
			field{"FirstHead", c.FirstHead, 0, 0})
	default:
		fields = append(fields,
			field{"KVHeads", c.KVHeads, least, min(most, MaxHeads)},
			field{"HeadDim", c.HeadDim, least, most},
			field{"LatentDim", c.LatentDim, 0, 0},
			field{"FirstHead", c.FirstHead, 0, MaxID - int64(max(c.KVHeads, 1))})
	}
	switch c.Scale {
	case NoScale:
		fields = append(fields, field{"ScaleBytes", c.ScaleBytes, 0, 0})
	default:
		fields = append(fields, field{"ScaleBytes", c.ScaleBytes, 1, MaxScaleBytes})
	}
	for _, f := range fields {
		if int64(f.value) < f.least || int64(f.value) > f.most {
			e := outside("Config."+f.name, int64(f.value), f.least, f.most)
			if f.most == 0 {
				e = e.Hint("leave %s out: nothing uses it with this Layout and Scale", f.name)
			}
			return e
		}
	}
	if c.Layout > MLA || (rows && c.Layout == 0) {
		return unknown("Config.Layout", c.Layout, layoutNames)
	}
	if c.DType > FP4 || (rows && c.DType == 0) {
		return unknown("Config.DType", c.DType, dtypeNames)
	}
	if c.Layout == MLA && (c.Scale == PerHead || c.Scale == PerTokenHead) {
		return fault.New(fault.Invalid, "Config.Scale", "a scale for each head, and MLA has no heads").
			Hint("use PerPage or PerToken")
	}
	if c.Layout == 0 && c.Scale != NoScale {
		return fault.New(fault.Invalid, "Config.Scale", "%d, and there are no rows to scale", c.Scale).Hint("use NoScale")
	}
	if err := c.DType.checkDim("Config.HeadDim", c.HeadDim); err != nil {
		return err
	}
	return c.DType.checkDim("Config.LatentDim", c.LatentDim)
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
