//go:build !nogpu

package cuda_test

import (
	"errors"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// What was closed is not closed again in the driver, which may have given the handle to
// somebody else.
func TestSharedEvent_IsClosedOnce(t *testing.T) {
	r := openBare(t, "0", fakedriver.Options{})
	a, err := r.drv.NewSharedEvent()
	r.must(err)
	b, err := r.drv.NewSharedEvent()
	r.must(err)
	r.must(a.Close())
	if err := a.Close(); !errors.Is(err, fault.Closed) {
		t.Errorf("closed twice: %v", err)
	}
	r.must(r.acc.Close())
	if err := b.Close(); !errors.Is(err, fault.Closed) {
		t.Errorf("closed after its device: %v", err)
	}
	if n := r.fake.Calls("cuEventDestroy_v2"); n != 2 {
		t.Errorf("%d calls for 2 events", n)
	}
}

// Of a driver that is closed nothing panics.
func TestDriver_AfterItsClose(t *testing.T) {
	r := openBare(t, "0", fakedriver.Options{AllowViolations: true, AllowLeaks: true})
	other, err := openOn(r, "0") // keeps the context
	r.must(err)
	r.must(r.acc.Close())
	if e, err := r.drv.NewSharedEvent(); err == nil {
		r.must(e.Close())
	}
	r.must(other.acc.Close())
}

// TestOpen_OfNamesThatNobodyMeant opens devices by what flags and variables may hold.
func TestOpen_OfNamesThatNobodyMeant(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Devices: 4})
	all, err := cuda.List(cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
	if err != nil {
		t.Fatal(err)
	}
	for _, which := range []string{
		"", " ", "GPU-", "gpu-", "MIG-", "-", "-1", "+1", "4", "2147483647", "2147483648", "99999999999999999999", "0x0", "1e0", "0,1",
		"cuda:0", "GPU-\x00", strings.Repeat("9", 1<<16), strings.Repeat("a", 1<<16), all[0].UUID + "0", "☃",
	} {
		acc, err := cuda.Open(which, cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
		if !errors.Is(err, fault.NotFound) && !errors.Is(err, fault.Invalid) || len(err.Error()) > 1000 {
			t.Errorf("%.40q: %v, %v", which, acc, err)
		}
	}
	for _, which := range []string{all[3].UUID, strings.ToUpper(all[3].UUID), all[3].UUID[4:], "03", "3"} {
		acc, err := cuda.Open(which, cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
		if err != nil {
			t.Errorf("%q: %v", which, err)
			continue
		}
		if acc.Name() != "cuda:3" {
			t.Errorf("%q is %s", which, acc.Name())
		}
		if err := acc.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, batch := range []int{-1, math.MaxInt, math.MaxInt / 3, math.MinInt, 1 << 40} {
		acc, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime(), Batch: batch})
		if !errors.Is(err, fault.Invalid) {
			t.Errorf("batches of %d: %v, %v", batch, acc, err)
		}
		if err == nil {
			_ = acc.Close()
		}
	}
}

// TestOpen_OfAUUIDThatIsNotOne has two devices whose UUIDs begin alike: each visible twice.
func TestOpen_OfAUUIDThatIsNotOne(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Visible: []int{5, 5, 1}})
	all, err := cuda.List(cuda.Options{Library: f.Path()})
	if err != nil || len(all) != 3 || all[0].UUID != all[1].UUID {
		t.Fatal(all, err)
	}
	if _, err := cuda.Open(all[0].UUID, cuda.Options{Library: f.Path()}); !errors.Is(err, fault.Invalid) {
		t.Errorf("of two: %v", err)
	}
}

// Descriptors do not leak, whatever fails between the first and the last call.
func TestShared_LeavesNothingWhateverFails(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{})
	acc, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
	if err != nil {
		t.Fatal(err)
	}
	drv := acc.Driver().(*cuda.Driver)
	live := func() error {
		s, err := drv.AllocShared(1)
		if err != nil {
			return err
		}
		fd, err := s.Export()
		if err != nil {
			return errors.Join(err, s.Close())
		}
		file := os.NewFile(uintptr(fd), "shared")
		again, err := drv.ImportShared(fd, s.Bytes)
		if err == nil {
			err = again.Close()
			if !errors.Is(again.Close(), fault.Closed) {
				t.Error("closed twice")
			}
			if _, err := again.Export(); !errors.Is(err, fault.Closed) {
				t.Error("exported when it was closed")
			}
		}
		return errors.Join(err, file.Close(), s.Close())
	}
	fds := func() int {
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(dir)
	}
	if err := live(); err != nil {
		t.Fatal(err)
	}
	before := fds()
	for _, call := range []string{
		"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
		"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemsetD8Async", "cuStreamSynchronize", "cuCtxSetCurrent",
	} {
		for n := 1; n <= 3; n++ {
			f.FailCall(call, n, outOfMemory)
			_ = live() // it may fail
			_ = live() // the rest of the rule
			c := f.Counts()
			if c.Handles+c.Mappings+c.Reservations != 0 || fds() != before {
				t.Errorf("call %d of %s: left %s and %d descriptors", n, call, c.Leaks(), fds()-before)
			}
		}
	}
	for _, fd := range []int{-1, 0, 1 << 20, math.MaxInt32} {
		if s, err := drv.ImportShared(fd, 2<<20); err == nil {
			t.Errorf("imported descriptor %d at %#x", fd, s.Addr)
		}
	}
	for _, bytes := range []int64{0, -1, 1, math.MaxInt64, math.MinInt64} {
		_, err1 := drv.AllocShared(-max(bytes, -bytes))
		_, err2 := drv.ImportShared(0, bytes)
		if err1 == nil || err2 == nil {
			t.Errorf("%d bytes: %v, %v", bytes, err1, err2)
		}
	}
	f.Forgive()
	if err := acc.Close(); err != nil {
		t.Error(err)
	}
}
