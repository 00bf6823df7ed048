package transfertest

import (
	"slices"

	"github.com/kvferry/kvferry/kv"
)

// shape is a pair of geometries whose pages can be exchanged.
type shape struct {
	name       string
	local, far func() (*kv.Geometry, error)
	whole      bool // pages move whole only
}

var (
	nhd = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 14, PageSize: 8, KVHeads: 2, HeadDim: 8, FirstLayer: 4}
	hnd = kv.Config{Layout: kv.HND, DType: kv.FP8, Layers: 2, Pages: 14, PageSize: 8, KVHeads: 3, HeadDim: 4}
	mla = kv.Config{Layout: kv.MLA, DType: kv.BF16, Layers: 3, Pages: 14, PageSize: 8, LatentDim: 20, Sink: true}
)

func pages(c kv.Config, n int) kv.Config {
	c.Pages = n
	return c
}

// shapes are what every engine must carry: each has another number of pages on either
// side, so that no stride of one side is right on the other.
func shapes() []shape {
	padded, scaled, state, joined := nhd, hnd, nhd, hnd
	padded.PageAlign = 512
	scaled.Scale, scaled.ScaleBytes = kv.PerTokenHead, 4
	state.StateBytes = 40
	joined.Join = kv.JoinBlocks
	tiny := kv.Config{Layout: kv.NHD, DType: kv.INT4, Layers: 2, Pages: 14, PageSize: 1, KVHeads: 1, HeadDim: 6}
	return []shape{
		{name: "NHD", local: nhd.LayerMajor, far: pages(nhd, 19).LayerMajor},
		{name: "NHD, padded pages", local: nhd.PerLayerPageFirst, far: pages(padded, 19).PerLayerPageFirst},
		{name: "NHD, K first", local: nhd.PageMajor, far: pages(nhd, 19).PerLayerKVFirst},
		{name: "NHD, layers reversed", local: nhd.LayerMajor, far: reversed(pages(nhd, 19))},
		{name: "HND", local: hnd.PerLayerPageFirst, far: pages(hnd, 17).PageMajor},
		{name: "HND, joined", local: joined.LayerMajor, far: pages(joined, 17).LayerMajor},
		{name: "HND, scales", local: scaled.LayerMajor, far: pages(scaled, 17).PageMajor},
		{name: "MLA, with a sink", local: mla.LayerMajor, far: pages(mla, 33).PageMajor},
		{name: "pages of one token", local: tiny.LayerMajor, far: pages(tiny, 17).LayerMajor},
		{name: "states", local: state.LayerMajor, far: pages(state, 19).PageMajor, whole: true},
		{name: "opaque", local: opaque(14, 100), far: opaque(19, 128), whole: true},
	}
}

func reversed(c kv.Config) func() (*kv.Geometry, error) {
	return func() (*kv.Geometry, error) {
		g, err := c.PageMajor()
		if err != nil {
			return nil, err
		}
		s := g.Spec()
		slices.Reverse(s.Layers)
		return kv.NewGeometry(s)
	}
}

func opaque(n int, stride int64) func() (*kv.Geometry, error) {
	return kv.OpaqueSpec{
		Layers: 3, Blocks: n, PageSize: 8, BlockBytes: 100,
		LayerStride: stride * int64(n), BlockStride: stride, RegionBytes: 3 * stride * int64(n),
	}.Geometry
}
