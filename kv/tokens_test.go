package kv

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// drawRows draws n rows of elements of that type, as bytes.
func drawRows(rng *rand.Rand, d DType, elements int) Rows {
	b := make([]byte, int64(elements)*d.unit())
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return Rows{DType: d, Data: b}
}

func TestCache_TokensWrittenAreWhereTheWalkSaysAndAreRead(t *testing.T) {
	onSites(t, func(t *testing.T, x *site) { rapid.Check(t, x.checkTokens) })
}

func (x *site) checkTokens(t *rapid.T) {
	c := drawConfig(t)
	g, a := drawGeometry(t, c)
	cache, done := x.cache(t, g, 1)
	defer done()
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2))
	layer := rapid.IntRange(0, c.Layers-1).Draw(t, "layer")
	from := c.DType
	if c.DType.float() {
		from = rapid.SampledFrom([]DType{BF16, FP16, FP32}).Draw(t, "from")
	}
	heads, dim, ks := max(c.KVHeads, 1), c.dims(), 2
	if c.Layout == MLA {
		ks = 1
	}
	n := rapid.IntRange(0, 12).Draw(t, "n") // often more than there are slots: duplicates
	var pages []page.ID
	var slots []int32
	for range n {
		pages = append(pages, page.ID(rng.IntN(c.Pages)))
		slots = append(slots, int32(rng.IntN(c.PageSize)))
	}
	rows := [2]Rows{drawRows(rng, from, n*heads*dim), {DType: from}}
	if ks == 2 {
		rows[1] = drawRows(rng, from, n*heads*dim)
	}

	// The model writes element by element, in order, so that the last wins.
	want := x.snapshot(t, cache)
	where := walk(c, a)
	var written, left []byte
	e := c.DType.unit()
	visit := func(use func(row, k, i int, at place)) {
		for row := range n {
			for k := range ks {
				for i := range heads * dim {
					use(row, k, i, where[element{rowPart, layer, int(pages[row]), k, int(slots[row]), i / dim, i % dim}])
				}
			}
		}
	}
	visit(func(row, k, i int, at place) {
		cell := make([]byte, e)
		convert(cell, c.DType, rows[k].Data[int64(row*heads*dim+i)*from.unit():][:from.unit()], from)
		copy(want[at.region][at.off:], cell)
		written = append(written, cell...)
	})
	visit(func(_, _, _ int, at place) { left = append(left, want[at.region][at.off:at.off+e]...) })

	prefix := []byte("kept")
	got, err := cache.WriteTokensAppend(slices.Clone(prefix), layer, rows[0], rows[1], pages, slots)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, append(slices.Clone(prefix), written...)) {
		t.Fatal("the rows given back are not the rows written")
	}
	for r, b := range x.snapshot(t, cache) {
		if !bytes.Equal(b, want[r]) {
			t.Fatalf("region %d differs from the model", r)
		}
	}
	got, err = cache.ReadTokens(slices.Clone(prefix), layer, pages, slots)
	if err != nil || !bytes.Equal(got, append(prefix, left...)) {
		t.Fatalf("what is read is not what the slots hold: %v", err)
	}
}

func TestCache_JoinedKAndVAreReadApart(t *testing.T) { onSites(t, checkJoined) }

func checkJoined(t *testing.T, on *site) {
	for _, x := range []struct {
		layout       Layout
		join         Join
		memory, view string
	}{
		{NHD, JoinRows, "abABcdCDefEFghGH", "abcdefghABCDEFGH"},
		{NHD, JoinBlocks, "abcdABCDefghEFGH", "abcdefghABCDEFGH"},
		{HND, JoinRows, "abABefEFcdCDghGH", "abefcdghABEFCDGH"},
		{HND, JoinBlocks, "abefABEFcdghCDGH", "abefcdghABEFCDGH"},
	} {
		config := Config{Layout: x.layout, DType: INT8, Layers: 1, Pages: 1, PageSize: 2, KVHeads: 2, HeadDim: 2, Join: x.join}
		c, done := on.cache(t, must(config.PageMajor())(t), 1)
		defer done()
		k, v := Rows{INT8, []byte("abcdefgh")}, Rows{INT8, []byte("ABCDEFGH")}
		if err := c.WriteTokens(0, k, v, []page.ID{0, 0}, []int32{0, 1}); err != nil {
			t.Fatal(err)
		}
		if got := string(on.look(t, c.regions[0])); got != x.memory {
			t.Errorf("%+v: %s", x, got)
		}
		if got := must(c.ReadTokens(nil, 0, []page.ID{0, 0}, []int32{1, 0}))(t); string(got) != "efghEFGHabcdABCD" {
			t.Errorf("%+v: read %s", x, got)
		}
		if !on.here() {
			_, err := must(c.ChunkView(0, 0, 0, 2))(t).Rows()
			faulttest.Refused(t, err, fault.Unsupported, "can't address")
			continue
		}
		var rows string
		for row := range must(must(c.ChunkView(0, 0, 0, 2))(t).Rows())(t) {
			rows += string(row)
		}
		if rows != x.view {
			t.Errorf("%+v: view of %s", x, rows)
		}
	}
}

func TestCache_WriteConvertsToItsType(t *testing.T) { onSites(t, checkConverts) }

func checkConverts(t *testing.T, x *site) {
	c := Config{Layout: NHD, DType: FP16, Layers: 1, Pages: 1, PageSize: 1, KVHeads: 1, HeadDim: 4}
	cache, done := x.cache(t, must(c.LayerMajor())(t), 1)
	defer done()
	var k []byte
	for _, f := range []float32{1.0 / 3, 65520, 1e-7, float32(math.NaN())} {
		k = binary.LittleEndian.AppendUint32(k, math.Float32bits(f))
	}
	v := []byte{0x80, 0x3F, 0, 0xC0, 0, 0, 0x80, 0x7F} // 1, -2, 0, Inf in BF16
	got := must(cache.WriteTokensAppend(nil, 0, Rows{FP32, k}, Rows{BF16, v}, []page.ID{0}, []int32{0}))(t)
	want := []byte{0x55, 0x35, 0x00, 0x7C, 0x02, 0x00, 0x00, 0x7E, 0x00, 0x3C, 0x00, 0xC0, 0, 0, 0x00, 0x7C}
	if !bytes.Equal(got, want) {
		t.Errorf("% x, want % x", got, want)
	}
}

func TestCache_RefusedWritesWriteNothing(t *testing.T) { onSites(t, checkRefusedWrites) }

func checkRefusedWrites(t *testing.T, on *site) {
	open := func(g *Geometry) *Cache {
		c, done := on.cache(t, g, 1)
		t.Cleanup(done)
		return c
	}
	c := open(must(small.LayerMajor())(t))
	mla := open(must(smallMLA.LayerMajor())(t))
	fp8 := open(must(small.with(func(c *Config) { c.DType = FP8 }).LayerMajor())(t))
	opaque := open(must(OpaqueSpec{Layers: 1, Blocks: 1, PageSize: 4, BlockBytes: 1, BlockStride: 1, RegionBytes: 1}.Geometry())(t))
	row := func(d DType, n int) Rows { return Rows{d, make([]byte, n)} }
	two, slots := []page.ID{0, 1}, []int32{0, 1}
	for _, x := range []struct {
		cache    *Cache
		layer    int
		k, v     Rows
		pages    []page.ID
		slots    []int32
		kind     fault.Kind
		mentions string
	}{
		{c, 3, row(BF16, 40), row(BF16, 40), two, slots, fault.Invalid, "layer"},
		{c, 0, row(BF16, 40), row(BF16, 39), two, slots, fault.Invalid, "v: has 39 bytes"},
		{c, 0, row(BF16, 20), row(BF16, 40), two, slots, fault.Invalid, "k: has 20 bytes"},
		{c, 0, row(FP32, 40), row(BF16, 40), two, slots, fault.Invalid, "2 rows of 10 elements of fp32 are 80"},
		{c, 0, row(BF16, 40), row(BF16, 40), two, slots[:1], fault.Invalid, "2 pages and 1 slots"},
		{c, 0, row(BF16, 40), row(BF16, 40), []page.ID{0, 7}, slots, fault.Invalid, "7 is not in 0 … 6"},
		{c, 0, row(BF16, 40), row(BF16, 40), []page.ID{-1, 0}, slots, fault.Invalid, "-1 is not in 0 … 6"},
		{c, 0, row(BF16, 40), row(BF16, 40), two, []int32{0, 4}, fault.Invalid, "slot: 4 is not in 0 … 3"},
		{c, 0, row(BF16, 40), row(BF16, 40), two, []int32{0, -1}, fault.Invalid, "slot: -1 is not in 0 … 3"},
		{c, 0, row(INT8, 20), row(INT8, 20), two, slots, fault.Unsupported, "int8 in a cache of bf16"},
		{c, 0, row(BF16, 40), row(0, 0), two, slots, fault.Unsupported, "none in a cache of bf16"},
		{fp8, 0, row(INT8, 20), row(INT8, 20), two, slots, fault.Unsupported, "int8 in a cache of fp8"},
		{fp8, 0, row(FP16, 40), row(FP16, 40), two, slots, fault.Unsupported, "fp16 in a cache of fp8"},
		{mla, 0, row(BF16, 40), row(BF16, 40), two, slots, fault.Invalid, "v: has 40 bytes"},
		{opaque, 0, row(BF16, 0), row(BF16, 0), nil, nil, fault.Unsupported, "layer 0"},
	} {
		before := on.snapshot(t, x.cache)
		got, err := x.cache.WriteTokensAppend([]byte("x"), x.layer, x.k, x.v, x.pages, x.slots)
		faulttest.Refused(t, err, x.kind, x.mentions)
		if string(got) != "x" {
			t.Errorf("%v: %d bytes were given back", err, len(got)-1)
		}
		for r, b := range on.snapshot(t, x.cache) {
			if !bytes.Equal(b, before[r]) {
				t.Errorf("%v: region %d was written", err, r)
			}
		}
	}
	_, err := c.ReadTokens(nil, 0, two, []int32{0, 4})
	faulttest.Refused(t, err, fault.Invalid, "slot: 4 is not in 0 … 3")
	if err := c.WriteTokens(0, row(BF16, 0), row(BF16, 0), nil, nil); err != nil {
		t.Error("no rows at all: ", err)
	}
}

// openHost opens the host device, closed when the test ends.
func openHost(t *testing.T) *device.Host {
	t.Helper()
	h := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func openCache(t *testing.T, h device.Device, g *Geometry) *Cache {
	t.Helper()
	c := must(NewCache(g, h))(t)
	t.Cleanup(func() {
		if err := c.Close(); err != nil && fault.KindOf(err) != fault.Closed {
			t.Error(err)
		}
	})
	return c
}

func openStream(t *testing.T, h device.Device) device.Stream {
	t.Helper()
	s := must(h.NewStream("test"))(t)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func drain(t *testing.T, s device.Stream) {
	t.Helper()
	if err := s.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestCache_OwnsZeroedMemoryOfItsDevice(t *testing.T) { onSites(t, checkOwns) }

func checkOwns(t *testing.T, x *site) {
	h, g := x.dev, must(small.PerLayerKVFirst())(t)
	c := openCache(t, h, g)
	if c.Device() != h.Name() || c.Layers() != 3 || c.Pages() != 7 || c.PageSize() != 4 || c.Layout() != NHD || c.DType() != BF16 || c.Geometry() != g {
		t.Error("accessors do not repeat the geometry")
	}
	if c.Bytes() != 3*7*160 || c.Base() == 0 || c.Base() != must(c.Region(0))(t).Base() {
		t.Errorf("%d bytes at %#x", c.Bytes(), c.Base())
	}
	for r, b := range x.snapshot(t, c) {
		if int64(len(b)) != 7*160 || slices.ContainsFunc(b, func(b byte) bool { return b != 0 }) {
			t.Errorf("region %d has %d bytes, not all zero", r, len(b))
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	faulttest.Refused(t, c.Close(), fault.Closed, "cache")
	one, at := Rows{BF16, make([]byte, 20)}, []int32{0}
	faulttest.Refused(t, c.WriteTokens(0, one, one, []page.ID{0}, at), fault.Closed)
	_, err := c.ReadTokens(nil, 0, []page.ID{0}, at)
	faulttest.Refused(t, err, fault.Closed)
	faulttest.Refused(t, c.CopyPages(nil, nil), fault.Closed)
	faulttest.Refused(t, c.CopySlots(nil, page.Pair{}, 0), fault.Closed)

	empty := openCache(t, h, must(Config{Pages: 3, PageSize: 1}.LayerMajor())(t))
	if b, err := empty.Page(2); err != nil || len(b) != 0 || empty.Base() != 0 {
		t.Errorf("a page without layers has %d bytes, %v", len(b), err)
	}
}

func TestNewCache_FreesWhatItGotWhenMemoryRunsOut(t *testing.T) {
	h := openHost(t) // closing it fails when memory is still open
	c := Config{Layout: NHD, DType: FP32, Layers: 1, Pages: 1, PageSize: 1, KVHeads: 1, HeadDim: 1}
	s := must(c.LayerMajor())(t).Spec()
	s.RegionBytes = append(s.RegionBytes, 1<<60)
	_, err := NewCache(must(NewGeometry(s))(t), h)
	faulttest.Refused(t, err, fault.Memory, "region 1 of 2")
}

func TestWrap_RefusesMemoryThatDoesNotFit(t *testing.T) {
	g := must(small.PerLayerKVFirst())(t)
	ok := func() *device.Memory { return device.WrapHost(make([]byte, 7*160)) }
	shared := make([]byte, 7*160*3)
	part := func(from int) *device.Memory { return device.WrapHost(shared[from:][:7*160]) }
	for _, c := range []struct {
		regions  []*device.Memory
		mentions string
	}{
		{[]*device.Memory{ok(), ok()}, "2 memories for 3 regions"},
		{[]*device.Memory{ok(), nil, ok()}, "region 1"},
		{[]*device.Memory{ok(), ok(), device.WrapHost(make([]byte, 7*160-1))}, "region 2: has 1119 bytes of memory, its geometry needs 1120"},
		{[]*device.Memory{part(2240), part(0), part(1119)}, "inside the 1120 bytes of region 1"},
	} {
		_, err := Wrap(g, c.regions)
		faulttest.Refused(t, err, fault.Invalid, c.mentions)
	}
	if _, err := Wrap(g, []*device.Memory{part(2240), part(0), part(1120)}); err != nil {
		t.Error("neighbours share nothing: ", err)
	}
	c := must(Wrap(g, []*device.Memory{ok(), ok(), ok()}))(t)
	if c.Device() != "host" {
		t.Errorf("device %q", c.Device())
	}
	mem := c.regions[0].Bytes()
	if err := c.Close(); err != nil || len(mem) == 0 {
		t.Error("closing a wrapped cache frees nothing: ", err)
	}
}

func TestCache_MemoryTheHostCannotAddressIsRefused(t *testing.T) {
	c := wrapped(t, must(small.PageMajor())(t), 1)
	view := must(c.ChunkView(0, 0, 0, 1))(t)
	if err := c.regions[0].Free(); err != nil { // freed memory has no bytes either
		t.Fatal(err)
	}
	row := Rows{BF16, make([]byte, 20)}
	faulttest.Refused(t, c.WriteTokens(0, row, row, []page.ID{0}, []int32{0}), fault.Unsupported, "region 0", "can't address")
	_, err := c.ReadTokens(nil, 0, []page.ID{0}, []int32{0})
	faulttest.Refused(t, err, fault.Unsupported, "region 0")
	_, err = c.Page(0)
	faulttest.Refused(t, err, fault.Unsupported, "region 0")
	_, err = view.Rows()
	faulttest.Refused(t, err, fault.Unsupported, "can't address")
	faulttest.Refused(t, c.CopyPages(nil, []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}}), fault.Unsupported, "cycle")
}
