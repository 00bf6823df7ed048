package copiertest

import (
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// route is a pair of geometries that a copy goes between.
type route struct {
	name     string
	dst, src func() (*kv.Geometry, error)
}

var small = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 12, PageSize: 4, KVHeads: 2, HeadDim: 4}

func with(change func(*kv.Config)) kv.Config {
	c := small
	change(&c)
	return c
}

func packed(c kv.Config, pages int) func() (*kv.Geometry, error) {
	return func() (*kv.Geometry, error) {
		g, err := c.LayerMajor()
		if err != nil {
			return nil, err
		}
		return g.Packed(pages)
	}
}

func layerMajor(c kv.Config, pages int) func() (*kv.Geometry, error) {
	return func() (*kv.Geometry, error) {
		g, err := c.LayerMajor()
		if err != nil {
			return nil, err
		}
		return g.PackedLayerMajor(pages)
	}
}

// routes covers both directions between every arrangement and the packed forms of
// host pools, unequal numbers of pages, one layer, one page, and layers of
// different size.
func routes() []route {
	more := with(func(c *kv.Config) { c.Pages = 17 })
	single := with(func(c *kv.Config) { c.Layers = 1 })
	hnd := with(func(c *kv.Config) { c.Layout = kv.HND })
	mla := with(func(c *kv.Config) { c.Layout, c.KVHeads, c.HeadDim, c.LatentDim = kv.MLA, 0, 0, 6 })
	joined := with(func(c *kv.Config) { c.Layout, c.Join, c.PageAlign = kv.HND, kv.JoinBlocks, 512 })
	quantised := with(func(c *kv.Config) {
		c.Layout, c.KVHeads, c.HeadDim, c.LatentDim = kv.MLA, 0, 0, 6
		c.DType, c.Scale, c.ScaleBytes, c.StateBytes = kv.INT4, kv.PerToken, 2, 40
	})
	one := with(func(c *kv.Config) { c.Pages = 1 })
	return []route{
		{"layer-major to host", packed(small, 20), small.LayerMajor},
		{"host to layer-major", small.LayerMajor, packed(small, 20)},
		{"layer-major to larger layer-major", more.LayerMajor, small.LayerMajor},
		{"page-major to host", packed(small, 9), small.PageMajor},
		{"kv-first to host", packed(small, 20), small.PerLayerKVFirst},
		{"host to kv-first", small.PerLayerKVFirst, packed(small, 20)},
		{"page-first to kv-first", small.PerLayerKVFirst, small.PerLayerPageFirst},
		{"one layer", packed(single, 20), single.LayerMajor},
		{"one page", packed(one, 3), one.LayerMajor},
		{"hnd", packed(hnd, 20), hnd.LayerMajor},
		{"mla", packed(mla, 20), mla.LayerMajor},
		{"layer-major to layer-major host", layerMajor(small, 20), small.LayerMajor},
		{"layer-major host to kv-first", small.PerLayerKVFirst, layerMajor(small, 20)},
		{"page-major host to layer-major host", layerMajor(small, 20), packed(small, 20)},
		{"joined hnd with padding", packed(joined, 20), joined.PerLayerPageFirst},
		{"4-bit rows, scales and states", packed(quantised, 20), quantised.LayerMajor},
		{"layers of different size", func() (*kv.Geometry, error) { return uneven(20, 0) }, func() (*kv.Geometry, error) { return uneven(12, 64) }},
	}
}

// uneven is a cache whose layers differ: opaque planes of 16, 48 and 32 bytes,
// gap bytes of padding between the layers.
func uneven(pages int, gap int64) (*kv.Geometry, error) {
	s := kv.Spec{Pages: pages, PageSize: 4}
	off := int64(0)
	for i, n := range []int64{16, 48, 32} {
		s.Layers = append(s.Layers, kv.Layer{ID: i, Planes: []kv.Plane{{Kind: kv.Opaque, Offset: off, PageStride: n, Bytes: n}}})
		off += n*int64(pages) + gap
	}
	s.RegionBytes = []int64{off}
	return kv.NewGeometry(s)
}

// plans are lists of pages for caches of at least n pages on both sides.
func plans(n int) map[string][]page.Pair {
	p := map[string][]page.Pair{}
	add := func(name string, count int, dst, src func(i int) int) {
		var pairs []page.Pair
		for i := range count {
			pairs = append(pairs, page.Pair{Dst: page.ID(dst(i)), Src: page.ID(src(i))})
		}
		p[name] = pairs
	}
	up := func(i int) int { return i }
	down := func(i int) int { return n - 1 - i }
	add("whole pool one run", n, up, up)
	add("one page", 1, down, up)
	if n >= 4 {
		add("ascending in both, offset", n-1, func(i int) int { return i + 1 }, up)
		add("ascending in source only", n, down, up)
		add("ascending in destination only", n, up, down)
		add("descending in both", n, down, down)
		add("gaps in both", n/2, func(i int) int { return 2 * i }, func(i int) int { return 2*i + 1 })
		add("a run, a hole, a run", n-1, func(i int) int { return i + i/(n/2) }, func(i int) int { return i + i/(n/2) })
		add("one source, many destinations", n/2, up, func(int) int { return n - 1 })
	}
	return p
}
