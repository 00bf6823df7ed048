package kv

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// TestConfig_FormsOfEngines says, for caches that engines have, in which order
// their axes are (blocks b, heads h, tokens t, dim d, 0 K and 1 V) and compares
// every element with what the geometry says.
func TestConfig_FormsOfEngines(t *testing.T) {
	const layers, pages, size, heads, dim, e = 2, 3, 4, 2, 6, 2
	c := Config{DType: BF16, Layers: layers, Pages: pages, PageSize: size, KVHeads: heads, HeadDim: dim}
	hnd := func(c *Config) { c.Layout = HND }
	nhd := func(c *Config) { c.Layout = NHD }
	for _, f := range []struct {
		name   string
		config Config
		make   func(Config) (*Geometry, error)
		index  func(kv, b, h, t, d int) int // of the element in its layer's tensor
	}{
		{"vLLM on CPUs, (2, blocks, heads, block, dim)", c.with(hnd), Config.PerLayerKVFirst, func(kv, b, h, t, d int) int {
			return (((kv*pages+b)*heads+h)*size+t)*dim + d
		}},
		{"vLLM on CPUs, (blocks, heads, block, 2·dim), a row of K beside its V", c.with(hnd).with(func(c *Config) { c.Join = JoinRows }), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return ((b*heads+h)*size+t)*2*dim + kv*dim + d
		}},
		{"vLLM on CPUs, (blocks, heads, block, 2·dim), seen as (blocks, heads, 2·block, dim)", c.with(hnd).with(func(c *Config) { c.Join = JoinBlocks }), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return ((b*heads+h)*2*size+kv*size+t)*dim + d
		}},
		{"blocks first, (blocks, 2, block, heads, dim)", c.with(nhd), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return (((b*2+kv)*size+t)*heads+h)*dim + d
		}},
		{"joined, (blocks, block, heads, 2·dim)", c.with(nhd).with(func(c *Config) { c.Join = JoinRows }), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return ((b*size+t)*heads+h)*2*dim + kv*dim + d
		}},
		{"joined, (blocks, block, 2, heads, dim)", c.with(nhd).with(func(c *Config) { c.Join = JoinBlocks }), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return (((b*size+t)*2+kv)*heads+h)*dim + d
		}},
		{"padded to the page of another layer, (blocks, 2, block, heads, dim) of 512 bytes", c.with(nhd).with(func(c *Config) { c.PageAlign = 512 }), Config.PerLayerPageFirst, func(kv, b, h, t, d int) int {
			return b*512/e + ((kv*size+t)*heads+h)*dim + d
		}},
	} {
		g := must(f.make(f.config))(t)
		for l := range layers {
			for b := range pages {
				for h := range heads {
					for tok := range size {
						for d := range dim {
							for kv := range 2 {
								want := place{l, int64(f.index(kv, b, h, tok, d)) * e}
								if got := locate(g, element{rowPart, l, b, kv, tok, h, d}); got != want {
									t.Fatalf("%s: layer %d block %d head %d token %d dim %d of %d is at %+v, want %+v", f.name, l, b, h, tok, d, kv, got, want)
								}
							}
						}
					}
				}
			}
		}
		// Engines' memory goes into a host pool and back.
		cache := wrapped(t, g, 1)
		pool := wrapped(t, must(g.Packed(pages))(t), 2)
		before := snapshot(cache)
		all := page.Run{N: pages}
		copyRun(t, must(NewRoute(pool, cache))(t), all)
		for _, m := range cache.regions {
			clear(m.Bytes())
		}
		copyRun(t, must(NewRoute(cache, pool))(t), all)
		for r, b := range snapshot(cache) {
			if !samePages(before[r], b, g, r) {
				t.Errorf("%s: region %d came back changed", f.name, r)
			}
		}
	}
}

// samePages compares the bytes of pages, not the padding between them.
func samePages(a, b []byte, g *Geometry, region int) bool {
	for _, l := range g.spec.Layers {
		for _, p := range l.Planes {
			for i := int64(0); p.Region == region && i < int64(g.Pages()); i++ {
				off := p.Offset + i*p.PageStride
				if !bytes.Equal(a[off:off+p.Bytes], b[off:off+p.Bytes]) {
					return false
				}
			}
		}
	}
	return true
}

func copyRun(t *testing.T, r *Route, run page.Run) []Box {
	t.Helper()
	boxes := must(r.AppendBoxes(nil, run))(t)
	execute(r.AppendOps(nil, boxes))
	return boxes
}

// TestGeometry_ARingIsOpaquePlanes: a tensor [2, heads, worlds, capacity, dim] for each
// layer, of which a world moves whole. Its pages are worlds, and what one has of a
// head is one opaque plane.
func TestGeometry_ARingIsOpaquePlanes(t *testing.T) {
	const layers, heads, worlds, capacity, dim, e = 3, 2, 4, 5, 3, 2
	world := int64(capacity * dim * e)
	s := Spec{Pages: worlds, PageSize: capacity}
	for l := range layers {
		layer := Layer{ID: l}
		for i := range int64(2 * heads) {
			layer.Planes = append(layer.Planes, Plane{Kind: Opaque, Region: l, Offset: i * worlds * world, PageStride: world, Bytes: world})
		}
		s.Layers = append(s.Layers, layer)
		s.RegionBytes = append(s.RegionBytes, 2*heads*worlds*world)
	}
	g := must(NewGeometry(s))(t)
	ring, pool := wrapped(t, g, 1), wrapped(t, must(g.Packed(2))(t), 2)
	want := snapshot(pool)
	run := page.Run{Dst: 1, Src: 2, N: 1}
	copySlowly(want, pool, ring, run, 0, capacity)
	boxes := copyRun(t, must(NewRoute(pool, ring))(t), run)
	if !bytes.Equal(want[0], pool.regions[0].Bytes()) {
		t.Error("the pool differs from a copy byte by byte")
	}
	if len(boxes) != layers {
		t.Errorf("%d boxes, want one a layer: %v", len(boxes), boxes)
	}
}

// TestConfig_ABoundedCacheIsJoinedRows: a tensor [layers, slots, rows, heads, entries,
// 2·dim] is the one of slots × rows pages of entries tokens.
func TestConfig_ABoundedCacheIsJoinedRows(t *testing.T) {
	const layers, slots, rows, heads, entries, dim, e = 2, 3, 2, 2, 5, 4, 2
	c := Config{Layout: HND, DType: FP16, Layers: layers, Pages: slots * rows, PageSize: entries, KVHeads: heads, HeadDim: dim, Join: JoinRows}
	g := must(c.LayerMajor())(t)
	for l := range layers {
		for s := range slots {
			for r := range rows {
				for h := range heads {
					for i := range entries {
						for d := range 2 * dim {
							at := (((((l*slots+s)*rows+r)*heads+h)*entries+i)*2*dim + d) * e
							if got := locate(g, element{rowPart, l, s*rows + r, d / dim, i, h, d % dim}); got.off != int64(at) {
								t.Fatalf("layer %d slot %d row %d head %d entry %d dim %d is at %d, want %d", l, s, r, h, i, d, got.off, at)
							}
						}
					}
				}
			}
		}
	}
}

func TestConfig_LayersOfStatesAlone(t *testing.T) {
	c := Config{Layers: 3, Pages: 4, PageSize: 8, StateBytes: 10, FirstLayer: 2, PageAlign: 16}
	for _, a := range arrangements {
		g := must(a.make(c))(t)
		checkAgainstWalk(t, c, a, g)
		cache := wrapped(t, g, 1)
		_, err := cache.Chunks(nil, 0, 0, 0, 4)
		faulttest.Refused(t, err, fault.Unsupported, "layer 2")
		_, err = cache.ReadTokens(nil, 0, nil, nil)
		faulttest.Refused(t, err, fault.Unsupported, "layer 2", "no rows")
	}
}

// TestCache_ScalesAreWrittenAndReadAsTheyAre against a walk over their tensor.
func TestCache_ScalesAreWrittenAndReadAsTheyAre(t *testing.T) { onSites(t, checkScales) }

func checkScales(t *testing.T, x *site) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		c.ScaleBytes = rapid.IntRange(1, 4).Draw(t, "scale bytes")
		c.Scale = PerToken
		if c.Layout != MLA {
			c.Scale = rapid.SampledFrom([]ScalePer{PerToken, PerTokenHead}).Draw(t, "scale")
		}
		g, a := drawGeometry(t, c)
		cache, done := x.cache(t, g, 1)
		defer done()
		layer, nth := rapid.IntRange(0, c.Layers-1).Draw(t, "layer"), 0
		if c.Layout != MLA {
			nth = rapid.IntRange(0, 1).Draw(t, "nth")
		}
		heads := 1
		if c.Scale == PerTokenHead {
			heads = c.KVHeads
		}
		where, want := walk(c, a), x.snapshot(t, cache)
		var pages []page.ID
		var slots []int32
		for range rapid.IntRange(0, 9).Draw(t, "n") {
			pages = append(pages, page.ID(rapid.IntRange(0, c.Pages-1).Draw(t, "page")))
			slots = append(slots, int32(rapid.IntRange(0, c.PageSize-1).Draw(t, "slot")))
		}
		rows := rapid.SliceOfN(rapid.Byte(), len(pages)*heads*c.ScaleBytes, len(pages)*heads*c.ScaleBytes).Draw(t, "rows")
		var left []byte
		for _, write := range []bool{true, false} {
			rest := rows
			for i := range pages {
				for h := range heads {
					at := where[element{scalePart, layer, int(pages[i]), nth, int(slots[i]), h, 0}]
					cell := want[at.region][at.off:][:c.ScaleBytes]
					if write {
						rest = rest[copy(cell, rest):]
					} else {
						left = append(left, cell...)
					}
				}
			}
		}
		if err := cache.WriteScales(layer, nth, rows, pages, slots); err != nil {
			t.Fatal(err)
		}
		for r, b := range x.snapshot(t, cache) {
			if !bytes.Equal(b, want[r]) {
				t.Fatalf("region %d differs from the model", r)
			}
		}
		got, err := cache.ReadScales([]byte("kept"), layer, nth, pages, slots)
		if err != nil || string(got) != "kept"+string(left) {
			t.Fatalf("what is read is not what the slots hold: %v", err)
		}
	})
}

func TestCache_ScalesAreRefusedByName(t *testing.T) {
	with := func(per ScalePer) *Cache {
		return wrapped(t, must(small.with(func(c *Config) { c.Scale, c.ScaleBytes = per, 2 }).LayerMajor())(t), 1)
	}
	one, at := []page.ID{0}, []int32{0}
	for _, x := range []struct {
		cache      *Cache
		layer, nth int
		rows       int
		pages      []page.ID
		kind       fault.Kind
		mentions   string
	}{
		{with(PerToken), 3, 0, 2, one, fault.Invalid, "layer: 3 is not in 0 … 2"},
		{with(PerToken), 0, 2, 2, one, fault.Invalid, "plane of scales: 2 is not in 0 … 1"},
		{with(PerToken), 0, -1, 2, one, fault.Invalid, "plane of scales: -1 is not in 0 … 1"},
		{with(PerToken), 0, 0, 3, one, fault.Invalid, "3 bytes, 1 rows of 2 bytes are 2"},
		{with(PerTokenHead), 0, 0, 2, one, fault.Invalid, "2 bytes, 1 rows of 4 bytes are 4"},
		{with(PerToken), 0, 0, 2, []page.ID{7}, fault.Invalid, "page: 7 is not in 0 … 6"},
		{with(PerToken), 0, 0, 2, nil, fault.Invalid, "0 pages and 1 slots"},
		{with(PerHead), 0, 0, 2, one, fault.Unsupported, "layer 20: tokens have no scales of their own"},
		{wrapped(t, must(small.LayerMajor())(t), 1), 0, 0, 2, one, fault.Invalid, "plane of scales: 0 is not in 0 … -1"},
	} {
		before := snapshot(x.cache)
		err := x.cache.WriteScales(x.layer, x.nth, make([]byte, x.rows), x.pages, at)
		faulttest.Refused(t, err, x.kind, x.mentions)
		if !bytes.Equal(bytes.Join(before, nil), bytes.Join(snapshot(x.cache), nil)) {
			t.Errorf("%v: but it wrote", err)
		}
		if !strings.Contains(x.mentions, "bytes") {
			_, err = x.cache.ReadScales(nil, x.layer, x.nth, x.pages, at)
			faulttest.Refused(t, err, x.kind, x.mentions)
		}
	}
}

func TestCache_PlanesAreReachedWhole(t *testing.T) {
	c := small.with(func(c *Config) { c.Scale, c.ScaleBytes, c.StateBytes = PerHead, 4, 33 })
	cache := wrapped(t, must(c.PageMajor())(t), 1)
	whole := must(cache.Page(3))(t)
	var off int
	for layer := range c.Layers {
		for plane, n := range []int{80, 80, 8, 8, 33} { // K, V, their scales, the state
			b := must(cache.Plane(layer, plane, 3))(t)
			if len(b) != n || cap(b) != n || &b[0] != &whole[off] {
				t.Errorf("layer %d plane %d has %d bytes, want the %d at %d of its page", layer, plane, len(b), n, off)
			}
			off += n
		}
	}
	for _, x := range []struct {
		layer, plane int
		p            page.ID
		mentions     string
	}{
		{3, 0, 0, "layer: 3 is not in 0 … 2"},
		{0, 5, 0, "plane: 5 is not in 0 … 4"},
		{0, -1, 0, "plane: -1 is not in 0 … 4"},
		{0, 0, 7, "page: 7 is not in 0 … 6"},
	} {
		_, err := cache.Plane(x.layer, x.plane, x.p)
		faulttest.Refused(t, err, fault.Invalid, x.mentions)
	}
}

func TestGeometry_PackedLayerMajorKeepsWhatFollowsTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawPlaced(t, drawModel(t))
		pages := rapid.IntRange(1, 9).Draw(t, "packed pages")
		p, err := g.PackedLayerMajor(pages)
		if err != nil {
			t.Fatal(err)
		}
		if err := Exchangeable(g, p); err != nil {
			t.Fatal(err)
		}
		if p.Pages() != pages || p.Bytes() != g.PageBytes()*int64(pages) || p.Sink() || p.Regions() > 1 {
			t.Fatalf("%d pages of %d bytes in %d regions of %d, sink %v", p.Pages(), p.PageBytes(), p.Regions(), p.Bytes(), p.Sink())
		}
		// Layers follow each other; nothing is between them, for all bytes are used.
		var end int64
		for i, l := range p.spec.Layers {
			if l.ID != g.spec.Layers[i].ID {
				t.Fatalf("layer %d is at position %d", l.ID, i)
			}
			least, most := p.Bytes(), int64(0)
			for _, pl := range l.Planes {
				last, _ := planeEnd(pl, pages)
				least, most = min(least, pl.Offset), max(most, last)
			}
			if least != end {
				t.Fatalf("layer %d begins at %d, the one before ends at %d", l.ID, least, end)
			}
			end = most
		}
	})
	// The second plane follows the first in page 0 alone: its pages follow each other,
	// here and there.
	s := Spec{Pages: 4, PageSize: 1, RegionBytes: []int64{400}, Layers: []Layer{{Planes: []Plane{
		{Kind: Opaque, PageStride: 100, Bytes: 4}, {Kind: Opaque, Offset: 4, PageStride: 4, Bytes: 4},
	}}}}
	p := must(must(NewGeometry(s))(t).PackedLayerMajor(6))(t)
	if got := p.spec.Layers[0].Planes[1]; got.PageStride != 4 || got.Offset != 24 {
		t.Errorf("the second plane is %+v", got)
	}
	_, err := must(small.LayerMajor())(t).PackedLayerMajor(0)
	faulttest.Refused(t, err, fault.Invalid, "pages", fmt.Sprint(MaxPages))
}

// TestRoute_ARunIsWideRowsWhenBothSidesAreLayerMajor: for every arrangement that has all
// pages of a stretch together, a layer-major pool makes a run one row a stretch;
// a page-major pool, the negative control, does not.
func TestRoute_ARunIsWideRowsWhenBothSidesAreLayerMajor(t *testing.T) {
	const pages, layers, row = 64, 3, 8 << 10
	c := Config{Layout: NHD, DType: BF16, Layers: layers, Pages: 72, PageSize: 16, KVHeads: 2, HeadDim: 64}
	for _, a := range arrangements {
		g := must(a.make(c))(t)
		if a.name == "PageMajor" {
			continue
		}
		stretches, width := layers, int64(pages*row)
		if a.name == "PerLayerKVFirst" {
			stretches, width = 2*layers, int64(pages*row/2)
		}
		engine := wrapped(t, g, 1)
		for name, pack := range map[string]func(int) (*Geometry, error){"layer-major": g.PackedLayerMajor, "page-major": g.Packed} {
			pool := wrapped(t, must(pack(75))(t), 2)
			for _, r := range []*Route{must(NewRoute(pool, engine))(t), must(NewRoute(engine, pool))(t)} {
				rows := 0
				boxes := must(r.AppendBoxes(nil, page.Run{Dst: 3, Src: 7, N: pages}))(t)
				for _, b := range boxes {
					rows += b.Rows * b.Slices
					if name == "layer-major" && b.Width != width {
						t.Errorf("%s: a row of %d bytes, want %d", a.name, b.Width, width)
					}
				}
				if name == "layer-major" && rows != stretches {
					t.Errorf("%s: %d rows, want %d", a.name, rows, stretches)
				}
				if name == "page-major" && rows != stretches*pages {
					t.Errorf("%s: %d rows from or to a page-major pool, want %d", a.name, rows, stretches*pages)
				}
			}
		}
	}
}

func TestView_OfPackedTypesCountsBytes(t *testing.T) {
	c := small.with(func(c *Config) { c.DType, c.HeadDim = INT4, 6 })
	v := must(wrapped(t, must(c.LayerMajor())(t), 1).ChunkView(1, 2, 1, 3))(t)
	if v.Shape != [5]int64{2, 2, 2, 3} || v.Stride != [5]int64{24, 6, 3, 1} || v.DType != INT4 {
		t.Errorf("shape %v, stride %v", v.Shape, v.Stride)
	}
}
