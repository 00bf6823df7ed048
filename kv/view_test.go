package kv

import (
	"bytes"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
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
		if c.Layout == HND {
			t0, t1 = 0, c.PageSize
		}
		want := map[place]bool{} // every byte
		for e, at := range walk(c, a) {
			if e.layer == layer && e.page == p && t0 <= e.token && e.token < t1 {
				for i := range c.DType.Size() {
					want[place{at.region, at.off + i}] = true
				}
			}
		}
		chunks, err := cache.Chunks(nil, layer, page.ID(p), t0, t1)
		if err != nil {
			t.Fatal(err)
		}
		if planes := len(g.spec.Layers[layer].Planes); t0 < t1 && len(chunks) != planes {
			t.Fatalf("%d chunks for %d planes", len(chunks), planes)
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
	mustRefuse(t, err, fault.Invalid, "1 addresses for 3 regions")
	_, err = remote.Chunks(nil, []uintptr{math.MaxUint64 - 5}, 0, 0, 0, 1)
	mustRefuse(t, err, fault.Invalid, "region 0", "address space")
}

func TestCache_IdsAndRangesAreAlwaysChecked(t *testing.T) {
	nhd := wrapped(t, must(small.LayerMajor())(t), 1)
	hnd := wrapped(t, must(small.with(func(c *Config) { c.Layout = HND }).LayerMajor())(t), 1)
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
		{hnd, 0, 0, 0, 3, fault.Unsupported, "HND", "[0, 3)"},
		{hnd, 0, 0, 1, 4, fault.Unsupported, "HND", "[1, 4)"},
	} {
		_, err := c.cache.Chunks(nil, c.layer, c.p, c.t0, c.t1)
		mustRefuse(t, err, c.kind, c.mentions, c.mentions2)
		_, err = c.cache.ChunkView(c.layer, c.p, c.t0, c.t1)
		mustRefuse(t, err, c.kind, c.mentions, c.mentions2)
	}
	_, err := nhd.LayerView(3)
	mustRefuse(t, err, fault.Invalid, "layer")
	_, err = nhd.Page(0)
	mustRefuse(t, err, fault.Unsupported, "not one stretch")
	_, err = nhd.Page(7)
	mustRefuse(t, err, fault.Invalid, "7 is not in 0 … 6")
	_, err = nhd.Region(1)
	mustRefuse(t, err, fault.Invalid, "region", "1 is not in 0 … 0")
	for _, whole := range []*Cache{nhd, hnd} {
		if chunks := must(whole.Chunks(nil, 0, 0, 0, 4))(t); len(chunks) != 2 {
			t.Errorf("%d chunks of a whole page", len(chunks))
		}
		if chunks := must(whole.Chunks(nil, 0, 0, 2, 2))(t); len(chunks) != 0 {
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
	}
	return append(index, e.token-t0, e.dim)
}

func TestView_ElementsLieWhereTheWalkSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		g, a := drawGeometry(t, c)
		cache := wrapped(t, g, 1)
		layer, p := rapid.IntRange(0, c.Layers-1).Draw(t, "layer"), rapid.IntRange(0, c.Pages-1).Draw(t, "page")
		t0 := rapid.IntRange(0, c.PageSize-1).Draw(t, "t0")
		t1 := rapid.IntRange(t0+1, c.PageSize).Draw(t, "t1")
		if c.Layout == HND {
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
			if e.layer != layer {
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
	mustRefuse(t, err, fault.Invalid, "axis 1", "0 is not in 0 … -1")
	_, err = empty.At(0)
	mustRefuse(t, err, fault.Invalid, "1 axes", "4")
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
		mustRefuse(t, err, fault.Invalid, "region 0")
		_, err = g.LayerView(mem, 0)
		mustRefuse(t, err, fault.Invalid, "region 0")
	}
}

func TestView_NeedsOneStrideFromKToV(t *testing.T) {
	s := base()
	s.Layers = s.Layers[:1]
	s.Layers[0].Planes[1].Region, s.Layers[0].Planes[1].Offset = 1, 100
	apart := wrapped(t, must(NewGeometry(s))(t), 1)
	_, err := apart.ChunkView(0, 0, 0, 1)
	mustRefuse(t, err, fault.Unsupported, "layer 1", "K is in region 0 and V in region 1")

	s = base()
	s.Layers[0].Planes[1].Offset, s.Layers[0].Planes[1].PageStride = 300, 50
	uneven := wrapped(t, must(NewGeometry(s))(t), 1)
	_, err = uneven.LayerView(0)
	mustRefuse(t, err, fault.Unsupported, "page strides of K and V are 48 and 50")
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
	mustRefuse(t, err, fault.Unsupported, "layer 0", "no rows")
}

func TestAppending_AllocatesNothing(t *testing.T) {
	g := must(small.PerLayerKVFirst())(t)
	c := wrapped(t, g, 1)
	packed := wrapped(t, must(g.Packed(9))(t), 1)
	route := must(NewRoute(packed, c))(t)
	chunks, boxes, ops := make([]Chunk, 0, 100), make([]Box, 0, 100), make([]device.Op, 0, 100)
	row := Rows{DType: FP32, Data: make([]byte, 40)}
	pages, slots := []page.ID{3}, []int32{1}
	out := make([]byte, 0, 100)
	if n := testing.AllocsPerRun(100, func() {
		var err error
		if chunks, err = c.Chunks(chunks[:0], 1, 2, 1, 3); err != nil {
			t.Fatal(err)
		}
		if boxes, err = route.AppendBoxes(boxes[:0], page.Run{Dst: 2, Src: 1, N: 3}); err != nil {
			t.Fatal(err)
		}
		if boxes, err = route.AppendTokenBoxes(boxes, 2, 1, 0, 3); err != nil {
			t.Fatal(err)
		}
		ops = route.AppendOps(ops[:0], boxes)
		if err = c.WriteTokens(0, row, row, pages, slots); err != nil {
			t.Fatal(err)
		}
		if out, err = c.ReadTokens(out[:0], 0, pages, slots); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if len(chunks) == 0 || len(boxes) == 0 || len(ops) == 0 || len(out) == 0 {
		t.Error("nothing was appended")
	}
}
