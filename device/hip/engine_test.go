//go:build !nogpu

package hip_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

func TestCopyRects_CopiesEachFormAndNothingElse(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "1", fakedriver.Options{Version: version})
		e, s := r.drv.Engines()[0], r.stream()
		for _, rect := range []device.Rect{
			{Width: 1, Rows: 1, Slices: 1},
			{Width: 4099, Rows: 1, Slices: 1},
			{Width: 16, Rows: 7, Slices: 1, DstPitch: 16, SrcPitch: 100},
			{Width: 33, Rows: 2, Slices: 1, DstPitch: 4096, SrcPitch: 33},
		} {
			const size = 16 << 10
			src, dst := r.memory(size, 's'), r.memory(size, 'd')
			rect.Dst, rect.Src = dst+64, src+32
			if n, err := e.CopyRects(s, []device.Rect{rect}); n != 1 || err != nil {
				t.Fatalf("%+v: %d queued, %v", rect, n, err)
			}
			r.must(r.sync(s))
			want, from := pattern(size, 'd'), pattern(size, 's')
			for j := range rect.Rows {
				copy(want[64+j*rect.DstPitch:][:rect.Width], from[32+j*rect.SrcPitch:])
			}
			r.want(fmt.Sprintf("%d: %+v", version, rect), dst, want)
		}
		if c, l := r.fake.Counts(), e.Limits(); c.Linear != 2 || c.Rects != 2 || l.Boxes || l.MaxPitch != 1<<31-1 || l.Library != r.fake.Path() {
			t.Errorf("%+v, limits %+v", c, l)
		}
	}
}

// TestCopyBatch_CopiesWithEachVersion copies as each version takes it: the fake refuses
// attributes before 7.13, and more than 8192 copies.
func TestCopyBatch_CopiesWithEachVersion(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "0", fakedriver.Options{Version: version})
		e, s := r.drv.Engines()[0], r.stream()
		if l := e.Limits(); version == fakedriver.ROCm64 {
			err := e.CopyBatch(s, &device.Batch{Dst: []uint64{1}, Src: []uint64{2}, Bytes: []uint64{3}}, device.StreamOrder)
			if l.Batch != 0 || !strings.Contains(l.NoBatch, "7.1") || !errors.Is(err, fault.Unsupported) {
				t.Errorf("limits of a library without batches: %+v, %v", l, err)
			}
			continue
		} else if l.Batch != 8192 || l.NoBatch != "" {
			t.Errorf("limits: %+v", l)
		}
		for _, order := range []device.SourceOrder{device.StreamOrder, device.AnyOrder} {
			for _, n := range []int{1, 8191, 8192} {
				const slot = 16
				src, dst := r.memory(n*slot, 's'), r.memory(n*slot, 'd')
				from, want := pattern(n*slot, 's'), pattern(n*slot, 'd')
				b := &device.Batch{}
				for i := range n {
					j, bytes := (i*7+3)%n, 1+i%slot
					b.Dst = append(b.Dst, uint64(dst)+uint64(i*slot))
					b.Src = append(b.Src, uint64(src)+uint64(j*slot))
					b.Bytes = append(b.Bytes, uint64(bytes))
					copy(want[i*slot:][:bytes], from[j*slot:])
				}
				r.must(e.CopyBatch(s, b, order))
				r.must(r.sync(s))
				r.want(fmt.Sprintf("%d: batch of %d", version, n), dst, want)
			}
		}
		nine := make([]uint64, 8193)
		if err := e.CopyBatch(s, &device.Batch{Dst: nine, Src: nine, Bytes: nine}, device.StreamOrder); !errors.Is(err, fault.Invalid) {
			t.Errorf("8193 copies: %v", err)
		}
	}
}

func TestCopies_SayWhatFailedAndLeaveNoError(t *testing.T) {
	r := open(t, "0", fakedriver.Options{AllowViolations: true})
	e, s := r.drv.Engines()[0], r.stream()
	a, b := r.memory(4096, 'a'), r.memory(4096, 'b')
	good := device.Rect{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 1, DstPitch: 32, SrcPitch: 64}
	bad := good
	bad.DstPitch = 15
	queued, err := e.CopyRects(s, []device.Rect{good, good, bad})
	r.wantCode("a pitch below the width", err, 12, "hipErrorInvalidPitchValue", device.Failed)
	if queued != 2 || !strings.Contains(err.Error(), "copy 2 of 3") {
		t.Errorf("%d queued, %v", queued, err)
	}
	err = e.CopyBatch(s, &device.Batch{Dst: []uint64{uint64(a), uint64(a) + 4092}, Src: []uint64{uint64(b), uint64(b)}, Bytes: []uint64{16, 16}}, device.StreamOrder)
	if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "copy 1 of a batch of 2") {
		t.Errorf("got %v", err)
	}
	r.must(r.sync(s))
	// The state of an event is asked for over and over, and is no failure.
	event, err := r.drv.NewEvent()
	r.must(err)
	release := r.fake.Hold(uintptr(s))
	r.must(r.drv.Record(event, s))
	if done, err := r.drv.EventDone(event); done || err != nil {
		t.Errorf("an event of work that is held is done: %v, %v", done, err)
	}
	release()
	r.must(r.drv.SyncEvent(event))
	if n := r.fake.Counts().PendingErrors; n != 0 {
		t.Errorf("%d errors are left for others", n)
	}
}

func TestCalls_ThatFailAreNamed(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	for code, want := range map[int]struct {
		name  string
		class device.Class
		kind  fault.Kind
	}{
		invalidValue:  {"hipErrorInvalidValue", device.Failed, fault.Device},
		outOfMemory:   {"hipErrorOutOfMemory", device.Retry, fault.Memory},
		launchFailure: {"hipErrorLaunchFailure", device.Lost, fault.Device},
		notSupported:  {"hipErrorNotSupported", device.Failed, fault.Unsupported},
		4242:          {"hipErrorUnknown", device.Failed, fault.Device},
	} {
		r.fake.FailCall("hipMalloc", 1, code)
		_, err := r.drv.Alloc(64)
		r.wantCode("alloc", err, code, want.name, want.class)
		if !errors.Is(err, want.kind) {
			t.Errorf("%d: %v is not of kind %v", code, err, want.kind)
		}
	}
}

// TestThreads_AreBoundByEachCall makes what threads have set void again and again.
func TestThreads_AreBoundByEachCall(t *testing.T) {
	r := open(t, "1", fakedriver.Options{})
	s, src := r.stream(), r.memory(64, 's')
	for range 3 {
		r.fake.Expire()
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() {
				dst, err := r.drv.Alloc(64)
				if err != nil {
					t.Error(err)
					return
				}
				_, err1 := r.drv.Engines()[0].CopyRects(s, []device.Rect{{Dst: dst, Src: src, Width: 64, Rows: 1, Slices: 1}})
				if err := errors.Join(err1, r.sync(s), r.drv.Free(dst)); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
}

func TestCopies_AllocateNothing(t *testing.T) {
	r := open(t, "0", fakedriver.Options{Mode: fakedriver.Eager})
	e, s := r.drv.Engines()[0], r.stream()
	a, b := r.memory(4096, 'a'), r.memory(4096, 'b')
	rects := []device.Rect{
		{Dst: a, Src: b, Width: 16, Rows: 1, Slices: 1},
		{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 1, DstPitch: 32, SrcPitch: 64},
	}
	batch := &device.Batch{Dst: []uint64{uint64(a)}, Src: []uint64{uint64(b)}, Bytes: []uint64{64}}
	var err error
	if n := testing.AllocsPerRun(100, func() {
		_, err1 := e.CopyRects(s, rects)
		err = errors.Join(err, err1, e.CopyBatch(s, batch, device.AnyOrder))
	}); n != 0 || err != nil {
		t.Errorf("%v allocations, %v", n, err)
	}
}
