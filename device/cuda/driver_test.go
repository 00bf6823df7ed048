//go:build !nogpu

package cuda_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

func TestAlloc_GivesZeroedMemory(t *testing.T) {
	for _, mode := range []fakedriver.Mode{fakedriver.Eager, fakedriver.Lazy, fakedriver.Random} {
		r := open(t, "0", fakedriver.Options{Mode: mode})
		for _, n := range []int64{1, 4097, 3<<20 + 1} {
			r.want("fresh memory", r.alloc(n), make([]byte, n))
		}
	}
}

func TestAlloc_RefusesWhatDoesNotFit(t *testing.T) {
	r := open(t, "0", fakedriver.Options{Settings: map[string]string{"memory": "1048576"}})
	_, err := r.drv.Alloc(2 << 20)
	var e *device.DriverError
	if !errors.Is(err, fault.Memory) || !errors.As(err, &e) || e.Class != device.Retry || e.Name != "CUDA_ERROR_OUT_OF_MEMORY" {
		t.Errorf("got %v", err)
	}
	r.alloc(1 << 19) // later, and less, is there
}

func TestAlloc_GivesBackWhatItCannotZero(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	for _, call := range []string{"cuMemsetD8Async", "cuStreamSynchronize"} {
		r.fake.FailCall(call, 1, invalidValue)
		if _, err := r.drv.Alloc(4096); !errors.Is(err, fault.Device) {
			t.Errorf("%s fails: %v", call, err)
		}
		if n := r.fake.Counts().DeviceMemories; n != 0 {
			t.Errorf("%s fails: %d memories stay", call, n)
		}
	}
}

// TestCalls_ThatFailAreNamed has every call of the driver fail once.
func TestCalls_ThatFailAreNamed(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	s := r.stream()
	e, err := r.drv.NewEvent()
	r.must(err)
	addr := r.alloc(64)
	page, err := dl.NewBlock(512)
	r.must(err)
	defer page.Free()
	for call, do := range map[string]func() error{
		"cuCtxSetCurrent":            func() error { return r.sync(s) },
		"cuMemAlloc_v2":              func() error { _, err := r.drv.Alloc(1); return err },
		"cuMemFree_v2":               func() error { return r.drv.Free(addr) },
		"cuMemHostRegister_v2":       func() error { return r.drv.Register(page.Addr, 4096) },
		"cuMemHostUnregister":        func() error { return r.drv.Unregister(page.Addr) },
		"cuStreamCreateWithPriority": func() error { _, err := r.drv.NewStream(device.NormalPriority); return err },
		"cuStreamDestroy_v2":         func() error { return r.drv.CloseStream(s) },
		"cuStreamSynchronize":        func() error { return r.sync(s) },
		"cuEventCreate":              func() error { _, err := r.drv.NewEvent(); return err },
		"cuEventRecord":              func() error { return r.drv.Record(e, s) },
		"cuStreamWaitEvent":          func() error { return r.drv.Wait(s, e) },
		"cuEventQuery":               func() error { _, err := r.drv.EventDone(e); return err },
		"cuEventSynchronize":         func() error { return r.drv.SyncEvent(e) },
		"cuMemGetAddressRange_v2":    func() error { _, err := r.drv.ExportMemory(addr); return err },
		"cuPointerGetAttribute":      func() error { _, err := r.drv.Pointer(addr); return err },
	} {
		for code, want := range map[int]struct {
			kind  fault.Kind
			class device.Class
			name  string
		}{
			outOfMemory:    {fault.Memory, device.Retry, "CUDA_ERROR_OUT_OF_MEMORY"},
			notSupported:   {fault.Unsupported, device.Failed, "CUDA_ERROR_NOT_SUPPORTED"},
			illegalAddress: {fault.Device, device.Lost, "CUDA_ERROR_ILLEGAL_ADDRESS"},
			4242:           {fault.Device, device.Failed, "error 4242"},
		} {
			r.fake.FailCall(call, 1, code)
			err := do()
			var e *device.DriverError
			if !errors.As(err, &e) || !errors.Is(err, want.kind) || e.Call != call || e.Name != want.name || e.Class != want.class || e.Code != code {
				t.Errorf("%s returns %d: got %v (%+v)", call, code, err, e)
			}
		}
	}
}

func TestEvents_ThatAreLeftEndWithTheDevice(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	for range 3 {
		_, err := r.drv.NewEvent()
		r.must(err)
	}
	e, err := r.drv.NewEvent()
	r.must(err)
	if done, err := r.drv.EventDone(e); !done || err != nil {
		t.Errorf("an event that was never recorded is done: %v, %v", done, err)
	}
	r.must(r.drv.CloseEvent(e))
}

func TestStreams_HaveThePriorityThatWasAsked(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	b, err := dl.NewBlock(1)
	r.must(err)
	defer b.Free()
	got := map[device.Priority]int{}
	for _, p := range []device.Priority{device.NormalPriority, device.LowPriority, device.HighPriority} {
		s, err := r.drv.NewStream(p)
		r.must(err)
		// Any call of the driver, on a thread that it has bound, would do.
		r.must(r.drv.Bound(func() {
			if code := int32(r.fake.Find("cuStreamGetPriority").Call(uintptr(s), b.Addr)); code != 0 {
				t.Errorf("code %d", code)
			}
		}))
		got[p] = int(int32(b.Words[0]))
		r.must(r.drv.CloseStream(s))
	}
	if got[device.NormalPriority] != 0 || got[device.HighPriority] >= 0 || got[device.LowPriority] < 0 {
		t.Errorf("priorities are %v: a smaller number is more urgent", got)
	}
}

// TestThreads_AreBoundByEachCall makes what threads have bound void again and again. A
// call that relied on it would be refused, and noted by the fake.
func TestThreads_AreBoundByEachCall(t *testing.T) {
	r := open(t, "1", fakedriver.Options{})
	const goroutines, rounds = 200, 3
	addrs, s := make([]uintptr, goroutines), r.stream()
	for i := range addrs {
		addrs[i] = r.alloc(64)
	}
	for range rounds {
		r.fake.Expire()
		var all sync.WaitGroup
		for i := range goroutines {
			all.Go(func() {
				if err := r.walk(s, addrs[i]); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
}

// walk makes calls of many kinds.
func (r *rig) walk(s device.StreamHandle, src uintptr) error {
	own, err := r.drv.Alloc(4096)
	if err != nil {
		return err
	}
	e, err := r.drv.NewEvent()
	if err != nil {
		return err
	}
	var errs []error
	for _, engine := range r.drv.Engines() {
		_, err := engine.CopyRects(s, []device.Rect{{Dst: own, Src: src, Width: 16, Rows: 1, Slices: 1}})
		errs = append(errs, err)
	}
	errs = append(errs, r.drv.Record(e, s), r.drv.Wait(s, e), r.drv.SyncEvent(e))
	done, err := r.drv.EventDone(e)
	if err == nil && !done {
		err = errors.New("an event that was waited for is not done")
	}
	return errors.Join(append(errs, err, r.sync(s), r.drv.CloseEvent(e), r.drv.Free(own))...)
}

// TestThreads_ThatAreNotBoundAreFound is the control of the test above: a call outside of
// Enter and Leave is noted.
func TestThreads_ThatAreNotBoundAreFound(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	b, err := dl.NewBlock(1)
	r.must(err)
	defer b.Free()
	r.must(r.drv.Bound(func() {
		r.fake.Expire()
		if code := int32(r.fake.Find("cuMemAlloc_v2").Call(b.Addr, 64)); code != 201 {
			t.Errorf("a call on a thread whose context is void returns %d", code)
		}
	}))
	r.fake.Expect("context of this thread was set by an earlier section")
}

func TestLoss_OfTheDevice(t *testing.T) {
	r := openBare(t, "0", fakedriver.Options{})
	s, err := r.drv.NewStream(device.NormalPriority)
	r.must(err)
	addr, err := r.drv.Alloc(64)
	r.must(err)
	e, err := r.drv.NewEvent()
	r.must(err)
	// Another device goes on.
	other, err := openOn(r, "1")
	r.must(err)
	r.fake.Lose(0, illegalAddress)
	for what, do := range map[string]func() error{
		"alloc":  func() error { _, err := r.drv.Alloc(1); return err },
		"sync":   func() error { return r.sync(s) },
		"record": func() error { return r.drv.Record(e, s) },
		"query":  func() error { _, err := r.drv.EventDone(e); return err },
		"copy": func() error {
			_, err := r.drv.Engines()[0].CopyRects(s, []device.Rect{{Dst: addr, Src: addr + 32, Width: 16, Rows: 1, Slices: 1}})
			return err
		},
	} {
		var e *device.DriverError
		if err := do(); !errors.As(err, &e) || e.Class != device.Lost || !errors.Is(err, fault.Device) {
			t.Errorf("%s after the loss: %v", what, err)
		}
	}
	p, err := other.drv.Alloc(64)
	r.must(err)
	r.must(other.drv.Free(p))
	r.must(other.acc.Close())
	lost := &device.DriverError{Library: "libcuda", Code: illegalAddress}
	for what, err := range map[string]error{"free": r.drv.Free(addr), "close of a stream": r.drv.CloseStream(s), "close": r.acc.Close()} {
		if !errors.Is(err, lost) {
			t.Errorf("%s after the loss: %v", what, err)
		}
	}
}

func TestPointer_SaysWhatTheDriverKnows(t *testing.T) {
	r := open(t, "1", fakedriver.Options{})
	addr := r.alloc(1 << 20)
	p, err := r.drv.Pointer(addr + 100)
	if err != nil || !p.Known || !p.OnDevice || p.Ordinal != 1 || p.Base != addr || p.Bytes < 1<<20 || p.Buffer == 0 || !p.Exports {
		t.Errorf("device memory: %+v, %v", p, err)
	}
	b, err := dl.NewBlock(512)
	r.must(err)
	defer b.Free()
	if p, err := r.drv.Pointer(b.Addr); err != nil || p.Known {
		t.Errorf("memory that the driver does not know: %+v, %v", p, err)
	}
}

func TestPeers(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	other, err := openOn(r, "1")
	r.must(err)
	defer func() { r.must(other.acc.Close()) }()
	can, err := r.drv.CanAccessPeer(other.drv)
	if !can || err != nil {
		t.Errorf("can access: %v, %v", can, err)
	}
	if can, err := r.drv.CanAccessPeer(r.drv); can || err != nil {
		t.Errorf("can access itself as a peer: %v, %v", can, err)
	}
	for range 2 {
		if err := r.drv.EnablePeer(other.drv); err != nil {
			t.Error(err)
		}
	}
	r.fake.FailCall("cuCtxEnablePeerAccess", 1, 711)
	if err := other.drv.EnablePeer(r.drv); !errors.Is(err, fault.Device) {
		t.Errorf("too many peers: %v", err)
	}
}
