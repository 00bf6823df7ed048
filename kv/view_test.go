package kv

import (
	"bytes"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

func TestCache_ChunksCoverExactlyTheTokensAsked(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		g, a := drawGeometry(t, c)
		cache := wrapped(t, g, 1)
		layer, p := rapid.IntRange(0, c.Layers-1).Draw(t, "layer"), rapid.IntRange(0, c.Pages-1).Draw(t, "page")
		t0 := rapid.IntRange(0, c.PageSize).Draw(t, "t0")
		t1 := rapid.IntRange(t0, c.PageSize).Draw(t, "t1")
		chunks, err := cache.Chunks(nil, layer, page.ID(p), t0, t1)
		if part := 0 < t1-t0 && t1-t0 < c.PageSize; part && !c.cuts() {
			if fault.KindOf(err) != fault.Unsupported {
				t.Fatalf("part of what moves whole: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		want := map[place]bool{} // every byte
		sizes := map[int]int64{}
		for _, p := range c.parts() {
			sizes[p.number] = p.bytes
		}
		for e, at := range walk(c, a) {
			if e.layer == layer && e.page == p && t0 < t1 && (!c.cuts() || (t0 <= e.token && e.token < t1)) {
				for i := range sizes[e.part] {
					want[place{at.region, at.off + i}] = true
				}
			}
		}
		// As few chunks as there are: none ends where another begins.
		ends := map[place]PlaneKind{}
		for _, ch := range chunks {
			ends[place{ch.Region, ch.Off + ch.Bytes}] = ch.Kind
		}
		for _, ch := range chunks {
			if kind := ends[place{ch.Region, ch.Off}]; kind == ch.Kind && kind != Scale {
				t.Fatalf("two chunks of one plane (%v) follow each other at %d", kind, ch.Off)
			}
		}
		for _, ch := range chunks {
			if ch.Addr != cache.regions[ch.Region].Base()+uintptr(ch.Off) {
				t.Fatalf("chunk %+v is not at its base + offset", ch)
			}
			for i := range ch.Bytes {
				at := place{ch.Region, ch.Off + i}
				if !want[at] {
					t.Fatalf("chunk %+v holds a byte not asked for, or twice: %+v", ch, at)
				}
				delete(want, at)
			}
		}
		if len(want) > 0 {
			t.Fatalf("%d bytes are in no chunk", len(want))
		}
	})
}

func TestGeometry_ChunksAddressAnotherCacheByItsOwnStrides(t *testing.T) {
	local := must(small.PerLayerPageFirst())(t)
	remote := must(small.with(func(c *Config) { c.Pages = 100 }).LayerMajor())(t)
	got := must(remote.Chunks(nil, []uintptr{0x10000}, 2, 99, 1, 3))(t)
	// token 20, half 80, page 160, layer 16000
	off := int64(2*16000 + 99*160 + 20)
	want := []Chunk{
		{Kind: K, Off: off, Addr: 0x10000 + uintptr(off), Bytes: 40},
		{Kind: V, Off: off + 80, Addr: 0x10000 + uintptr(off) + 80, Bytes: 40},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	_, err := local.Chunks(nil, []uintptr{1}, 0, 0, 0, 1)
	faulttest.Refused(t, err, fault.Invalid, "1 addresses for 3 regions")
	_, err = remote.Chunks(nil, []uintptr{math.MaxUint64 - 5}, 0, 0, 0, 1)
	faulttest.Refused(t, err, fault.Invalid, "region 0", "address space")
}

func TestCache_IdsAndRangesAreAlwaysChecked(t *testing.T) {
	nhd := wrapped(t, must(small.LayerMajor())(t), 1)
	hnd := wrapped(t, must(small.with(func(c *Config) { c.Layout = HND }).LayerMajor())(t), 1)
	whole := wrapped(t, must(small.with(func(c *Config) { c.Scale, c.ScaleBytes = PerPage, 4 }).LayerMajor())(t), 1)
	for _, c := range []struct {
		cache     *Cache
		layer     int
		p         page.ID
		t0, t1    int
		kind      fault.Kind
		mentions  string
		mentions2 string
	}{
		{nhd, -1, 0, 0, 1, fault.Invalid, "layer", "-1 is not in 0 … 2"},
		{nhd, 3, 0, 0, 1, fault.Invalid, "layer", "3 is not in 0 … 2"},
		{nhd, 0, -1, 0, 1, fault.Invalid, "page", "-1 is not in 0 … 6"},
		{nhd, 0, 7, 0, 1, fault.Invalid, "page", "7 is not in 0 … 6"},
		{nhd, 0, 0, -1, 1, fault.Invalid, "tokens", "[-1, 1) is not in [0, 4)"},
		{nhd, 0, 0, 3, 2, fault.Invalid, "tokens", "[3, 2) is not in [0, 4)"},
		{nhd, 0, 0, 0, 5, fault.Invalid, "tokens", "[0, 5) is not in [0, 4)"},
		{hnd, 0, 0, 3, 2, fault.Invalid, "tokens", "[3, 2) is not in [0, 4)"},
		{whole, 0, 0, 0, 3, fault.Unsupported, "layer 20", "[0, 3)"},
		{whole, 0, 0, 1, 4, fault.Unsupported, "layer 20", "[1, 4)"},
	} {
		_, err := c.cache.Chunks(nil, c.layer, c.p, c.t0, c.t1)
		faulttest.Refused(t, err, c.kind, c.mentions, c.mentions2)
		_, err = c.cache.ChunkView(c.layer, c.p, c.t0, c.t1)
		faulttest.Refused(t, err, c.kind, c.mentions, c.mentions2)
	}
	_, err := nhd.LayerView(3)
	faulttest.Refused(t, err, fault.Invalid, "layer")
	_, err = nhd.Page(0)
	faulttest.Refused(t, err, fault.Unsupported, "not one stretch")
	_, err = nhd.Page(7)
	faulttest.Refused(t, err, fault.Invalid, "7 is not in 0 … 6")
	_, err = nhd.Region(1)
	faulttest.Refused(t, err, fault.Invalid, "region", "1 is not in 0 … 0")
	for _, c := range []*Cache{nhd, hnd} {
		if chunks := must(c.Chunks(nil, 0, 0, 0, 4))(t); len(chunks) != 2 {
			t.Errorf("%d chunks of a whole page", len(chunks))
		}
		if chunks := must(c.Chunks(nil, 0, 0, 2, 2))(t); len(chunks) != 0 {
			t.Errorf("%d chunks of no tokens", len(chunks))
		}
	}
}

// index turns an element into its index in a view with or without a page axis.
func (e element) index(layout Layout, t0 int, pageAxis bool) (index []int) {
	if pageAxis {
		index = append(index, e.page)
	}
	switch layout {
	case NHD:
		return append(index, e.k, e.token-t0, e.head, e.dim)
	case HND:
		return append(index, e.k, e.head, e.token-t0, e.dim)
	default:
		return append(index, e.token-t0, e.dim)
	}
}

func TestView_ElementsLieWhereTheWalkSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		g, a := drawGeometry(t, c)
		cache := wrapped(t, g, 1)
		layer, p := rapid.IntRange(0, c.Layers-1).Draw(t, "layer"), rapid.IntRange(0, c.Pages-1).Draw(t, "page")
		t0 := rapid.IntRange(0, c.PageSize-1).Draw(t, "t0")
		t1 := rapid.IntRange(t0+1, c.PageSize).Draw(t, "t1")
		if !c.cuts() {
			t0, t1 = 0, c.PageSize
		}
		chunk, err := cache.ChunkView(layer, page.ID(p), t0, t1)
		if err != nil {
			t.Fatal(err)
		}
		all, err := cache.LayerView(layer)
		if err != nil {
			t.Fatal(err)
		}
		count := map[bool]int64{}
		for e, at := range walk(c, a) {
			if e.layer != layer || e.part != rowPart {
				continue
			}
			check := func(v View, index []int, whole bool) {
				off, err := v.At(index...)
				if err != nil || off != at.off || v.Mem != cache.regions[at.region] {
					t.Fatalf("%v is at %d of the view, %v, want %+v", e, off, err, at)
				}
				count[whole]++
			}
			check(all, e.index(c.Layout, 0, true), true)
			if e.page == p && t0 <= e.token && e.token < t1 {
				check(chunk, e.index(c.Layout, t0, false), false)
			}
		}
		for whole, v := range map[bool]View{false: chunk, true: all} {
			n := int64(1)
			for _, s := range v.Shape[:v.Dims] {
				n *= s
			}
			if n != count[whole] || v.DType != c.DType {
				t.Fatalf("shape %v has %d elements of %v, want %d", v.Shape, n, v.DType, count[whole])
			}
		}
	})
}

func TestView_RowsVisitElementsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := make([]byte, 4096)
		for i := range mem {
			mem[i] = byte(i * 7 >> 2)
		}
		v := View{Mem: device.WrapHost(mem), Off: 2000, DType: BF16, Dims: rapid.IntRange(1, 4).Draw(t, "dims")}
		for d := range v.Dims {
			v.Shape[d] = rapid.Int64Range(1, 3).Draw(t, "shape")
			v.Stride[d] = rapid.SampledFrom([]int64{2, 4, 6, 12, 18, 36, -40, 100}).Draw(t, "stride")
		}
		var want []byte
		var visit func(index []int)
		visit = func(index []int) {
			if len(index) == v.Dims {
				off, err := v.At(index...)
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, mem[off:off+2]...)
				return
			}
			for i := range int(v.Shape[len(index)]) {
				visit(append(index, i))
			}
		}
		visit(nil)
		rows, err := v.Rows()
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		length := -1
		for row := range rows {
			if length >= 0 && len(row) != length {
				t.Fatalf("rows of %d and %d bytes", length, len(row))
			}
			length = len(row)
			got = append(got, row...)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("shape %v stride %v: rows differ from the elements in order", v.Shape, v.Stride)
		}
	})
	c := wrapped(t, must(small.LayerMajor())(t), 1)
	rows := 0
	for row := range must(must(c.LayerView(0))(t).Rows())(t) {
		rows++
		if len(row) != 7*160 {
			t.Errorf("row of %d bytes, the layer is contiguous", len(row))
		}
		break
	}
	if rows != 1 {
		t.Error("a loop that breaks visits more rows")
	}
	empty := must(c.ChunkView(0, 0, 2, 2))(t)
	for range must(empty.Rows())(t) {
		t.Error("a view of no tokens has rows")
	}
	_, err := empty.At(0, 0, 0, 0)
	faulttest.Refused(t, err, fault.Invalid, "axis 1", "0 is not in 0 … -1")
	_, err = empty.At(0)
	faulttest.Refused(t, err, fault.Invalid, "1 axes", "4")
}

func TestView_OfGivenMemoryIsBounded(t *testing.T) {
	g := must(small.LayerMajor())(t)
	elsewhere := device.WrapHost(make([]byte, g.Bytes()))
	v := must(g.ChunkView(elsewhere, 1, 2, 0, 2))(t)
	own := must(wrapped(t, g, 1).ChunkView(1, 2, 0, 2))(t)
	if v.Mem != elsewhere || v.Off != own.Off || v.Shape != own.Shape || v.Stride != own.Stride {
		t.Errorf("%+v differs from %+v in more than its memory", v, own)
	}
	if v := must(g.LayerView(elsewhere, 1))(t); v.Mem != elsewhere {
		t.Error("the layer view is over other memory")
	}
	for _, mem := range []*device.Memory{device.WrapHost(make([]byte, g.Bytes()-1)), nil} {
		_, err := g.ChunkView(mem, 0, 0, 0, 1)
		faulttest.Refused(t, err, fault.Invalid, "region 0")
		_, err = g.LayerView(mem, 0)
		faulttest.Refused(t, err, fault.Invalid, "region 0")
	}
}

func TestView_NeedsOneStrideFromKToV(t *testing.T) {
	s := base()
	s.Layers = s.Layers[:1]
	s.Layers[0].Planes[1].Region, s.Layers[0].Planes[1].Offset = 1, 100
	apart := wrapped(t, must(NewGeometry(s))(t), 1)
	_, err := apart.ChunkView(0, 0, 0, 1)
	faulttest.Refused(t, err, fault.Unsupported, "layer 1", "K is in region 0 and V in region 1")

	s = base()
	s.Layers[0].Planes[1].Offset, s.Layers[0].Planes[1].PageStride = 300, 50
	uneven := wrapped(t, must(NewGeometry(s))(t), 1)
	_, err = uneven.LayerView(0)
	faulttest.Refused(t, err, fault.Unsupported, "page strides of K and V are 48 and 50")
	v, err := uneven.g.viewOf(uneven.memory, &uneven.g.spec.Layers[0], 2, 0, 2)
	if off, _ := v.At(1, 0, 0, 0); err != nil || off != 300+2*50 {
		t.Errorf("V of page 2 is at %d, %v", off, err)
	}

	_, err = uneven.ChunkView(0, 0, 0, 2)
	if err != nil {
		t.Error(err)
	}
	o := OpaqueSpec{Layers: 1, Blocks: 1, PageSize: 1, BlockBytes: 1, BlockStride: 1, RegionBytes: 1}
	_, err = wrapped(t, must(o.Geometry())(t), 1).ChunkView(0, 0, 0, 1)
	faulttest.Refused(t, err, fault.Unsupported, "layer 0", "no rows")
}

func TestAppending_AllocatesNothing(t *testing.T) {
	quantised := func(layout Layout, heads int) *Cache {
		c := small.with(func(c *Config) { c.Layout, c.KVHeads, c.Scale, c.ScaleBytes = layout, heads, PerTokenHead, 4 })
		return wrapped(t, must(c.PerLayerKVFirst())(t), 1)
	}
	for _, c := range []*Cache{wrapped(t, must(small.PerLayerKVFirst())(t), 1), quantised(NHD, 2), quantised(HND, 2)} {
		packed := wrapped(t, must(c.g.Packed(9))(t), 1)
		route := must(NewRoute(packed, c))(t)
		heads := route
		if c.Geometry().Regions() > 3 {
			heads = must(NewHeadRoute(quantised(c.Layout(), 1), c))(t)
		}
		chunks, boxes, ops := make([]Chunk, 0, 100), make([]Box, 0, 200), make([]device.Op, 0, 1000)
		row := Rows{DType: FP32, Data: make([]byte, 40)}
		pages, slots := []page.ID{3}, []int32{1}
		out := make([]byte, 0, 100)
		if n := testing.AllocsPerRun(100, func() {
			var err error
			if chunks, err = c.Chunks(chunks[:0], 1, 2, 1, 3); err != nil {
				t.Fatal(err)
			}
			ops = ops[:0]
			for _, r := range []*Route{route, heads} {
				if boxes, err = r.AppendBoxes(boxes[:0], page.Run{Dst: 2, Src: 1, N: 3}); err != nil {
					t.Fatal(err)
				}
				if boxes, err = r.AppendTokenBoxes(boxes, 2, 1, 0, 3); err != nil {
					t.Fatal(err)
				}
				ops = r.AppendOps(ops, boxes)
			}
			if err = c.WriteTokens(0, row, row, pages, slots); err != nil {
				t.Fatal(err)
			}
			if out, err = c.ReadTokens(out[:0], 0, pages, slots); err != nil {
				t.Fatal(err)
			}
			if c.Geometry().Regions() == 3 {
				return
			}
			if out, err = c.ReadScales(out, 0, 1, pages, slots); err != nil {
				t.Fatal(err)
			}
			if err = c.WriteScales(0, 0, out[len(out)-8:], pages, slots); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("%v: %v allocations", c.Layout(), n)
		}
		if len(chunks) == 0 || len(boxes) == 0 || len(ops) == 0 || len(out) == 0 {
			t.Error("nothing was appended")
		}
	}
}
