//go:build !nogpu

package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// apply copies as r says, from src to dst, which begin where the memories of r do.
func apply(r device.Rect, dst, src []byte) {
	for i := range r.Slices {
		for j := range r.Rows {
			copy(dst[i*r.DstSlice+j*r.DstPitch:][:r.Width], src[i*r.SrcSlice+j*r.SrcPitch:][:r.Width])
		}
	}
}

// shapes are copies of each form, beside the limits.
func shapes() []device.Rect {
	return []device.Rect{
		{Width: 1, Rows: 1, Slices: 1},
		{Width: 4099, Rows: 1, Slices: 1, DstPitch: 3, SrcPitch: 5}, // the strides mean nothing
		{Width: 16, Rows: 7, Slices: 1, DstPitch: 16, SrcPitch: 100},
		{Width: 33, Rows: 2, Slices: 1, DstPitch: 4096, SrcPitch: 33},
		{Width: 5, Rows: 3, Slices: 4, DstPitch: 5, SrcPitch: 8, DstSlice: 15, SrcSlice: 80},
		{Width: 8, Rows: 1, Slices: 3, DstPitch: 16, SrcPitch: 8, DstSlice: 64, SrcSlice: 8},
		{Width: 64, Rows: 2, Slices: 2, DstPitch: 64, SrcPitch: 128, DstSlice: 640, SrcSlice: 256},
	}
}

func (r *rig) engine(name string) device.Engine {
	r.Helper()
	for _, e := range r.drv.Engines() {
		if e.Name() == name {
			return e
		}
	}
	r.Fatalf("there is no engine %s: %v", name, r.drv.Missing())
	return nil
}

// TestCopyRects_CopiesEachFormAndNothingElse copies between memories whose every byte is
// looked at.
func TestCopyRects_CopiesEachFormAndNothingElse(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "0", fakedriver.Options{Version: version})
		e, s := r.engine("cuda"), r.stream()
		for _, rect := range shapes() {
			const size = 16 << 10
			src, dst := r.filled(size, 's'), r.filled(size, 'd')
			rect.Dst, rect.Src = dst+64, src+32
			n, err := e.CopyRects(s, []device.Rect{rect})
			if n != 1 || err != nil {
				t.Fatalf("%+v: %d queued, %v", rect, n, err)
			}
			r.must(r.sync(s))
			want := pattern(size, 'd')
			apply(rect, want[64:], pattern(size, 's')[32:])
			r.want(fmt.Sprintf("%d: %+v", version, rect), dst, want)
		}
		if c := r.fake.Counts(); c.Linear != 2 || c.Rects != 2 || c.Boxes != 3 {
			t.Errorf("%d linear copies, %d of rows, %d boxes", c.Linear, c.Rects, c.Boxes)
		}
	}
}

func TestCopyRects_QueuesInOrder(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	e, s := r.engine("cuda"), r.stream()
	const n = 100
	src, dst := r.filled(n*64, 's'), r.alloc(64)
	rects := make([]device.Rect, n)
	for i := range rects {
		rects[i] = device.Rect{Dst: dst, Src: src + uintptr(64*i), Width: 64, Rows: 1, Slices: 1}
		if i%2 == 1 { // rows that lie close are the same bytes
			rects[i].Width, rects[i].Rows, rects[i].DstPitch, rects[i].SrcPitch = 32, 2, 32, 32
		}
	}
	for range 3 {
		if queued, err := e.CopyRects(s, rects); queued != n || err != nil {
			t.Fatalf("%d queued, %v", queued, err)
		}
	}
	r.must(r.sync(s))
	r.want("the last copy", dst, pattern(n*64, 's')[64*(n-1):])
	if queued, err := e.CopyRects(s, nil); queued != 0 || err != nil {
		t.Errorf("no rects: %d queued, %v", queued, err)
	}
}

func TestCopyRects_SaysWhichFailedAndHowManyAreQueued(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	e, s := r.engine("cuda"), r.stream()
	a, b := r.alloc(4096), r.alloc(4096)
	line := device.Rect{Dst: a, Src: b, Width: 16, Rows: 1, Slices: 1}
	rows := device.Rect{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 1, DstPitch: 32, SrcPitch: 64}
	box := device.Rect{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 2, DstPitch: 32, SrcPitch: 64, DstSlice: 64, SrcSlice: 128}
	for i, call := range []string{"cuMemcpyAsync", "cuMemcpy2DAsync_v2", "cuMemcpy3DAsync_v2"} {
		r.fake.FailCall(call, 2, invalidValue)
		queued, err := e.CopyRects(s, []device.Rect{line, rows, box, line, rows, box})
		if queued != 3+i || !errors.Is(err, fault.Device) {
			t.Errorf("%s: %d queued, %v", call, queued, err)
		}
		if want := fmt.Sprintf("copy %d of 6", 3+i); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), call+": CUDA_ERROR_INVALID_VALUE") {
			t.Errorf("%v does not say %q and %q", err, want, call)
		}
	}
	r.must(r.sync(s))
}

// TestCopyBatch_CopiesAndNothingElse runs batches of both forms.
func TestCopyBatch_CopiesAndNothingElse(t *testing.T) {
	for _, version := range versions() {
		for _, order := range []device.SourceOrder{device.StreamOrder, device.AnyOrder} {
			r := open(t, "0", fakedriver.Options{Version: version})
			e, s := r.engine("cuda"), r.stream()
			l := e.Limits()
			if version == fakedriver.CUDA124 {
				err := e.CopyBatch(s, &device.Batch{Dst: []uint64{1}, Src: []uint64{2}, Bytes: []uint64{3}}, order)
				if l.Batch != 0 || !strings.Contains(l.NoBatch, "12.8") || !errors.Is(err, fault.Unsupported) {
					t.Errorf("limits of a driver without batches: %+v, %v", l, err)
				}
				continue
			}
			if l.Batch != 8192 || l.NoBatch != "" || !l.Boxes || l.MaxPitch != 1<<31-1 || l.Library != r.fake.Path() {
				t.Errorf("limits: %+v", l)
			}
			r.batches(e, s, order, []int{1, 2, 1000, 8192})
			// One name for each form: the wrong one would be called with other arguments.
			nine, eight := r.fake.Calls("cuMemcpyBatchAsync"), 0
			if version >= fakedriver.CUDA130 {
				eight = r.fake.Calls("cuMemcpyBatchAsync_v2")
			}
			if (nine > 0) == (eight > 0) || (eight > 0) != (version == fakedriver.CUDA130) {
				t.Errorf("CUDA %d: %d batches with nine words and %d with eight", version, nine, eight)
			}
		}
	}
}

// batches copies in batches of each size and looks at every byte.
func (r *rig) batches(e device.Engine, s device.StreamHandle, o device.SourceOrder, sizes []int) {
	r.Helper()
	for _, n := range sizes {
		const slot = 24
		src, dst := r.filled(n*slot, 's'), r.filled(n*slot, 'd')
		from, want := pattern(n*slot, 's'), pattern(n*slot, 'd')
		b := &device.Batch{}
		random := rand.New(rand.NewPCG(uint64(n), 1))
		for i, j := range random.Perm(n) {
			bytes := 1 + random.IntN(slot)
			b.Dst = append(b.Dst, uint64(dst)+uint64(i*slot))
			b.Src = append(b.Src, uint64(src)+uint64(j*slot))
			b.Bytes = append(b.Bytes, uint64(bytes))
			copy(want[i*slot:][:bytes], from[j*slot:])
		}
		r.must(e.CopyBatch(s, b, o))
		clear(b.Dst) // was read
		r.must(r.sync(s))
		r.want(fmt.Sprintf("batch of %d", n), dst, want)
	}
}

func TestCopyBatch_SaysWhichFailed(t *testing.T) {
	for _, version := range versions()[1:] {
		r := open(t, "0", fakedriver.Options{Version: version, AllowViolations: true})
		e, s := r.engine("cuda"), r.stream()
		a, b := uint64(r.alloc(4096)), uint64(r.alloc(4096))
		end := a + 4096 - 4 // bytes of a, and more
		err := e.CopyBatch(s, &device.Batch{Dst: []uint64{a, end, a + 32}, Src: []uint64{b, b, b}, Bytes: []uint64{8, 8, 8}}, device.StreamOrder)
		want := "batch of 3"
		if version < fakedriver.CUDA130 { // the driver says which it was
			want = fmt.Sprintf("copy 1 of a batch of 3: 8 bytes from %#x to %#x", b, end)
		}
		if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "CUDA_ERROR_INVALID_VALUE") {
			t.Errorf("%d: %v does not say %q", version, err, want)
		}
		for _, b := range []*device.Batch{
			{},
			{Dst: []uint64{a}, Src: []uint64{b}, Bytes: nil},
			{Dst: make([]uint64, 8193), Src: make([]uint64, 8193), Bytes: make([]uint64, 8193)},
		} {
			if err := e.CopyBatch(s, b, device.StreamOrder); !errors.Is(err, fault.Invalid) {
				t.Errorf("a batch of %d: %v", len(b.Dst), err)
			}
		}
	}
}

// TestCopies_AllocateNothing counts while the fake runs what it gets at once.
func TestCopies_AllocateNothing(t *testing.T) {
	for _, version := range versions()[1:] {
		r := open(t, "0", fakedriver.Options{Version: version, Mode: fakedriver.Eager})
		e, s := r.engine("cuda"), r.stream()
		a, b := r.alloc(1<<20), r.alloc(1<<20)
		var rects []device.Rect
		for _, rect := range shapes() {
			rect.Dst, rect.Src = a, b
			rects = append(rects, rect)
		}
		batch := &device.Batch{}
		for i := range 1000 {
			batch.Dst = append(batch.Dst, uint64(a)+uint64(64*i))
			batch.Src = append(batch.Src, uint64(b)+uint64(64*i))
			batch.Bytes = append(batch.Bytes, 64)
		}
		var err error
		if n := testing.AllocsPerRun(100, func() {
			_, err1 := e.CopyRects(s, rects)
			err = errors.Join(err, err1, e.CopyBatch(s, batch, device.AnyOrder))
		}); n != 0 || err != nil {
			t.Errorf("%v allocations for %d copies and a batch, %v", n, len(rects), err)
		}
		event, err := r.drv.NewEvent()
		r.must(err)
		if n := testing.AllocsPerRun(100, func() {
			_, err1 := r.drv.EventDone(event)
			err = errors.Join(err, r.drv.Record(event, s), r.drv.Wait(s, event), err1)
		}); n != 0 || err != nil {
			t.Errorf("%v allocations for calls of an event, %v", n, err)
		}
		r.must(r.sync(s))
	}
}

func TestEngines_AreNobodysToChange(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	before := r.drv.Engines()
	clear(r.drv.Engines())
	if !slices.Equal(r.drv.Engines(), before) || len(before) != 2 || before[0].Name() != "cuda" || before[1].Name() != "libcudart" {
		t.Errorf("engines are %v, and were %v", r.drv.Engines(), before)
	}
}
