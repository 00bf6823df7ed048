package kv

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// wide has rows of 8 KiB, half of them K: 128 slots fill the buffer.
var wide = Config{Layout: NHD, DType: FP16, Layers: 2, Pages: 20, PageSize: 16, KVHeads: 4, HeadDim: 512}

// allSlots are the slots of n pages, in order.
func allSlots(n, size int) (pages []page.ID, slots []int32) {
	for i := range n * size {
		pages, slots = append(pages, page.ID(i/size)), append(slots, int32(i%size))
	}
	return pages, slots
}

// TestBounce_RowsPassInPartsThatAreBoundedAndUsedAgain: the memory is that of one call,
// however many rows there are, and neighbouring slots are one copy.
func TestBounce_RowsPassInPartsThatAreBoundedAndUsedAgain(t *testing.T) {
	for _, layout := range []Layout{NHD, HND} {
		f := openFar(t)
		x := f.site(t)
		c := openCache(t, f, must(wide.with(func(c *Config) { c.Layout = layout }).LayerMajor())(t))
		f.given = nil
		pages, slots := allSlots(20, 16)
		rng := rand.New(rand.NewPCG(1, 1))
		k, v := drawRows(rng, FP16, 320*2048), drawRows(rng, FP16, 320*2048)
		for range 3 {
			f.copies = nil
			if err := c.WriteTokens(1, k, v, pages, slots); err != nil {
				t.Fatal(err)
			}
			if len(f.copies) != 3 { // of 128, 128 and 64 slots
				t.Fatalf("%d parts", len(f.copies))
			}
			for i, part := range f.copies {
				// K and V are apart, in HND those of each head: neighbouring slots of a page are one copy.
				want := map[Layout]int{NHD: 8, HND: 32}[layout] / (1 + i/2)
				var sum int64
				for _, n := range part {
					sum += n
				}
				if len(part) > 2*want || sum > bounceBytes {
					t.Errorf("%v: part %d is %d copies of %d bytes", layout, i, len(part), sum)
				}
			}
		}
		got := must(c.ReadTokens(nil, 1, pages, slots))(t)
		for i := range pages {
			row := got[i*8192:][:8192]
			if !bytes.Equal(row[:4096], k.Data[i*4096:][:4096]) || !bytes.Equal(row[4096:], v.Data[i*4096:][:4096]) {
				t.Fatalf("%v: slot %d of page %d holds other rows", layout, slots[i], pages[i])
			}
		}
		if !slices.Equal(f.given, []int64{bounceBytes}) {
			t.Errorf("%v: pinned memory of %v bytes was asked for", layout, f.given)
		}
		for _, b := range x.look(t, c.regions[0])[:c.regions[0].Size()/2] {
			if b != 0 {
				t.Fatalf("%v: another layer was written", layout)
			}
		}
	}
}

// TestBounce_ARowLargerThanTheBufferMakesRoom, once.
func TestBounce_ARowLargerThanTheBufferMakesRoom(t *testing.T) {
	f := openFar(t)
	f.site(t)
	f.given = nil
	c := openCache(t, f, must(Config{Layout: MLA, DType: FP8, Layers: 1, Pages: 1, PageSize: 2, LatentDim: 1 << 20, ScaleBytes: 4, Scale: PerToken}.LayerMajor())(t))
	if err := c.WriteScales(0, 0, []byte("abcd"), []page.ID{0}, []int32{1}); err != nil {
		t.Fatal(err)
	}
	big := openCache(t, f, must(Config{Layout: NHD, DType: FP8, Layers: 1, Pages: 1, PageSize: 1, KVHeads: 3, HeadDim: 1 << 18}.LayerMajor())(t))
	rows := drawRows(rand.New(rand.NewPCG(1, 2)), FP8, 3<<18)
	for range 2 {
		if err := big.WriteTokens(0, rows, rows, []page.ID{0}, []int32{0}); err != nil {
			t.Fatal(err)
		}
	}
	if got := must(big.ReadTokens(nil, 0, []page.ID{0}, []int32{0}))(t); !bytes.Equal(got, slices.Concat(rows.Data, rows.Data)) {
		t.Error("the row that came back is another")
	}
	if !slices.Equal(f.given, []int64{bounceBytes, 6 << 18}) {
		t.Errorf("pinned memory of %v bytes was asked for", f.given)
	}
}

// TestBounce_TheLastOfRowsForOneSlotWins, in one part and across parts.
func TestBounce_TheLastOfRowsForOneSlotWins(t *testing.T) {
	f := openFar(t)
	f.site(t)
	c := openCache(t, f, must(wide.LayerMajor())(t))
	pages, slots := slices.Repeat([]page.ID{3}, 300), slices.Repeat([]int32{5}, 300)
	rng := rand.New(rand.NewPCG(1, 3))
	k, v := drawRows(rng, FP16, 300*2048), drawRows(rng, FP16, 300*2048)
	back := must(c.WriteTokensAppend(nil, 0, k, v, pages, slots))(t)
	if !bytes.Equal(back[:4096], k.Data[:4096]) || !bytes.Equal(back[8192+4096:][:4096], v.Data[4096:][:4096]) {
		t.Error("rows that others overwrote are not given back")
	}
	got := must(c.ReadTokens(nil, 0, pages[:1], slots[:1]))(t)
	if !bytes.Equal(got[:4096], k.Data[299*4096:]) || !bytes.Equal(got[4096:], v.Data[299*4096:]) {
		t.Error("the last row did not win")
	}
}

// TestBounce_AFailureIsSaidAndTheNextCallWorks: nothing is appended, and a stream that
// failed is not used again.
func TestBounce_AFailureIsSaidAndTheNextCallWorks(t *testing.T) {
	f := openFar(t)
	x := f.site(t)
	c := openCache(t, f, must(small.LayerMajor())(t))
	row := Rows{BF16, bytes.Repeat([]byte{7}, 20)}
	one, at := []page.ID{2}, []int32{1}

	f.refuse, f.strict = fault.New(fault.Memory, "far", "no more"), true
	faulttest.Refused(t, c.WriteTokens(0, row, row, one, at), fault.Memory)
	f.strict = false // and now rows go through memory that is not pinned
	if slices.ContainsFunc(x.look(t, c.regions[0]), func(b byte) bool { return b != 0 }) {
		t.Error("a write without memory for it wrote")
	}

	broken := fault.New(fault.Device, "far", "broken")
	f.fail = broken
	got, err := c.WriteTokensAppend([]byte("x"), 0, row, row, one, at)
	if !errors.Is(err, fault.Device) || string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
	if err := c.WriteTokens(0, row, row, one, at); err != nil {
		t.Error("the call after a failure: ", err)
	}
	f.fail = broken
	if got, err = c.ReadTokens([]byte("x"), 0, one, at); !errors.Is(err, fault.Device) || string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
	if got = must(c.ReadTokens(nil, 0, one, at))(t); !bytes.Equal(got, slices.Concat(row.Data, row.Data)) {
		t.Errorf("read %v", got)
	}
}

// TestBounce_CallsAtOnceTakeTurns.
func TestBounce_CallsAtOnceTakeTurns(t *testing.T) {
	f := openFar(t)
	f.site(t)
	c := openCache(t, f, must(wide.PageMajor())(t))
	var all sync.WaitGroup
	for p := range page.ID(8) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(p), 4))
			for slot := range int32(16) {
				k, v := drawRows(rng, FP16, 2048), drawRows(rng, FP16, 2048)
				if err := c.WriteTokens(0, k, v, []page.ID{p}, []int32{slot}); err != nil {
					t.Error(err)
					return
				}
				got, err := c.ReadTokens(nil, 0, []page.ID{p}, []int32{slot})
				if err != nil || !bytes.Equal(got, slices.Concat(k.Data, v.Data)) {
					t.Errorf("slot %d of page %d holds other rows: %v", slot, p, err)
				}
			}
		})
	}
	all.Wait()
}

// TestWrapOn_IsWhatACacheOnADeviceNeeds: without the device what needs it is refused, with
// a remedy; the memory stays its owner's.
func TestWrapOn_IsWhatACacheOnADeviceNeeds(t *testing.T) {
	f := openFar(t)
	x := f.site(t)
	g := must(small.PageMajor())(t)
	mem := must(f.Alloc(g.Bytes()))(t)
	row, one, at := Rows{BF16, make([]byte, 20)}, []page.ID{2}, []int32{1}
	swap := []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}}

	without := must(Wrap(g, []*device.Memory{mem}))(t)
	faulttest.Refused(t, without.WriteTokens(0, row, row, one, at), fault.Unsupported, "region 0", "far")
	_, err := without.ReadTokens(nil, 0, one, at)
	faulttest.Refused(t, err, fault.Unsupported, "region 0")
	faulttest.Refused(t, without.CopyPages(x.stream, swap), fault.Unsupported, "cycle")
	if err := without.CopyPages(x.stream, swap[:1]); err != nil {
		t.Error("a copy without a cycle needs no device: ", err)
	}
	drain(t, x.stream)

	_, err = WrapOn(g, []*device.Memory{mem}, f.Host)
	faulttest.Refused(t, err, fault.Invalid, "region 0", "memory of far, the device is host")
	_, err = WrapOn(g, []*device.Memory{mem}, nil)
	faulttest.Refused(t, err, fault.Invalid, "device")
	_, err = WrapOn(g, nil, f)
	faulttest.Refused(t, err, fault.Invalid, "0 memories for 1 regions")

	with := must(WrapOn(g, []*device.Memory{mem}, f))(t)
	if err := with.WriteTokens(0, row, row, one, at); err != nil {
		t.Error(err)
	}
	if err := with.CopyPages(x.stream, swap); err != nil {
		t.Error(err)
	}
	_, err = with.Page(0)
	faulttest.Refused(t, err, fault.Unsupported, "region 0", "can't address")
	_, err = with.Plane(0, 0, 0)
	faulttest.Refused(t, err, fault.Unsupported, "region 0")
	view := must(with.LayerView(0))(t)
	_, err = view.Rows()
	faulttest.Refused(t, err, fault.Unsupported, "can't address")
	drain(t, x.stream)
	if err := with.Close(); err != nil {
		t.Error(err)
	}
	faulttest.Refused(t, with.WriteTokens(0, row, row, one, at), fault.Closed)
	if err := mem.Free(); err != nil {
		t.Error("the memory is its owner's: ", err)
	}
}

// TestCache_RowsInHostMemoryAllocateNothing: the way through a device costs the host's
// own way nothing.
func TestCache_RowsInHostMemoryAllocateNothing(t *testing.T) {
	h := openHost(t)
	c := openCache(t, h, must(small.with(func(c *Config) { c.Scale, c.ScaleBytes = PerToken, 4 }).LayerMajor())(t))
	row, one, at := Rows{BF16, make([]byte, 20)}, []page.ID{2}, []int32{1}
	room, scales := make([]byte, 0, 64), make([]byte, 4)
	allocs := testing.AllocsPerRun(100, func() {
		_ = c.WriteTokens(0, row, row, one, at)
		_, _ = c.ReadTokens(room, 0, one, at)
		_ = c.WriteScales(0, 0, scales, one, at)
		_, _ = c.ReadScales(room, 0, 0, one, at)
	})
	if allocs > 0 {
		t.Errorf("%v allocations", allocs)
	}
}
