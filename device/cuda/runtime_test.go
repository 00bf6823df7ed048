//go:build !nogpu

package cuda_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/needtest"
)

// TestRuntime_CopiesWithEachDriver pairs drivers with runtimes. A runtime of a later
// major version than the driver is no engine.
func TestRuntime_CopiesWithEachDriver(t *testing.T) {
	for _, version := range versions() {
		for _, release := range versions() {
			t.Run(fmt.Sprintf("%d on %d", release, version), func(t *testing.T) {
				r := open(t, "1", fakedriver.Options{Version: version, Runtime: release})
				if release/1000 > version/1000 {
					missing := r.drv.Missing()
					if len(missing) != 1 || missing[0].Name != "libcudart" || !errors.Is(missing[0].Err, fault.Unsupported) ||
						!strings.Contains(missing[0].Err.Error(), "cudaErrorInsufficientDriver") {
						t.Errorf("missing are %v", missing)
					}
					return
				}
				e, s := r.engine("libcudart"), r.stream()
				for _, rect := range shapes() {
					if rect.Slices > 1 {
						continue // has no boxes
					}
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
					r.want(fmt.Sprintf("%+v", rect), dst, want)
				}
				l := e.Limits()
				if l.Boxes || l.MaxPitch != 1<<31-1 || l.Library != r.fake.Runtime() || l.Version != fmt.Sprintf("%d.%d", release/1000, release%1000/10) {
					t.Errorf("limits: %+v", l)
				}
				switch {
				case release < fakedriver.CUDA128:
					if l.Batch != 0 || !strings.Contains(l.NoBatch, "12.8") {
						t.Errorf("limits of a runtime without batches: %+v", l)
					}
				case version >= fakedriver.CUDA128:
					r.batches(e, s, device.StreamOrder, []int{1, 1000})
					r.batches(e, s, device.AnyOrder, []int{2, 8192})
				}
				if n := r.fake.Counts().Boxes; n != 0 {
					t.Errorf("%d boxes", n)
				}
			})
		}
	}
}

// TestRuntime_SaysWhatFailedAndForgetsIt: the fake keeps an error for whoever asks next on
// the thread, and fails the test when one is left.
func TestRuntime_SaysWhatFailedAndForgetsIt(t *testing.T) {
	r := open(t, "0", fakedriver.Options{AllowViolations: true})
	e, s := r.engine("libcudart"), r.stream()
	a, b := r.alloc(4096), r.alloc(4096)
	good := device.Rect{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 1, DstPitch: 32, SrcPitch: 64}
	bad := good
	bad.SrcPitch = 15
	queued, err := e.CopyRects(s, []device.Rect{good, bad, good})
	var d *device.DriverError
	if queued != 1 || !errors.As(err, &d) || d.Library != "libcudart" || d.Call != "cudaMemcpy2DAsync" || d.Name != "cudaErrorInvalidPitchValue" ||
		!strings.Contains(err.Error(), "copy 1 of 3") {
		t.Errorf("%d queued, %v", queued, err)
	}
	err = e.CopyBatch(s, &device.Batch{Dst: []uint64{uint64(a) + 4092}, Src: []uint64{uint64(b)}, Bytes: []uint64{16}}, device.StreamOrder)
	if !errors.As(err, &d) || d.Call != "cudaMemcpyBatchAsync" || !errors.Is(err, fault.Device) {
		t.Errorf("got %v", err)
	}
	r.must(r.sync(s))
	if n := r.fake.Counts().PendingErrors; n != 0 {
		t.Errorf("%d errors are left for others", n)
	}
}

func TestRuntime_AllocatesNothing(t *testing.T) {
	r := open(t, "0", fakedriver.Options{Mode: fakedriver.Eager})
	e, s := r.engine("libcudart"), r.stream()
	a, b := r.alloc(4096), r.alloc(4096)
	rects := []device.Rect{
		{Dst: a, Src: b, Width: 16, Rows: 1, Slices: 1},
		{Dst: a, Src: b, Width: 16, Rows: 2, Slices: 1, DstPitch: 32, SrcPitch: 64},
	}
	var err error
	if n := testing.AllocsPerRun(100, func() { _, err = e.CopyRects(s, rects) }); n != 0 || err != nil {
		t.Errorf("%v allocations, %v", n, err)
	}
}

// TestRuntime_IsMissingWithAReason opens devices beside what is no runtime.
func TestRuntime_IsMissingWithAReason(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{})
	for name, kind := range map[string]fault.Kind{"/nonexistent/libcudart.so": fault.NotFound, "libc.so.6": fault.Unsupported} {
		acc, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: name})
		if err != nil {
			t.Fatal(err)
		}
		missing := acc.Driver().(*cuda.Driver).Missing()
		if len(acc.Engines()) != 1 || len(missing) != 1 || !errors.Is(missing[0].Err, kind) || !strings.Contains(missing[0].Err.Error(), name) {
			t.Errorf("%s: engines %v, missing %v", name, acc.Engines(), missing)
		}
		if err := acc.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRuntime_IsTheOneThatTheProcessHas opens a runtime as PyTorch would have, and no name
// for it is given.
func TestRuntime_IsTheOneThatTheProcessHas(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Sonames: true})
	if _, err := dl.Open(f.Runtime()); err != nil {
		t.Fatal(err)
	}
	acc, err := cuda.Open("1", cuda.Options{Library: f.Path()})
	if err != nil {
		t.Fatal(err)
	}
	if engines := acc.Engines(); len(engines) != 2 || engines[1].Limits().Library != f.Runtime() {
		t.Errorf("engines are %v, missing %v", engines, acc.Driver().(*cuda.Driver).Missing())
	}
	if err := acc.Close(); err != nil {
		t.Error(err)
	}
}

// TestRuntime_RealOnesHaveNoDriver loads NVIDIA's own runtimes. There is no driver of
// theirs here, so each says so, and the device does without.
func TestRuntime_RealOnesHaveNoDriver(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("those that tools/vendor fetches are for amd64")
	}
	for _, file := range []string{"cuda-12.8/lib/libcudart.so.12", "cuda-13.0/lib/libcudart.so.13"} {
		t.Run(filepath.Base(file), func(t *testing.T) {
			dir := os.Getenv("KVFERRY_VENDOR")
			if dir == "" {
				dir = filepath.Join("..", "..", ".vendor")
			}
			path, err := filepath.Abs(filepath.Join(dir, file))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path); err != nil {
				needtest.Missing(t, err.Error())
			}
			if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil {
				t.Skip("this machine has a driver")
			}
			f := fakedriver.Load(t, fakedriver.Options{})
			acc, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: path})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := acc.Close(); err != nil {
					t.Error(err)
				}
			}()
			lacks := acc.Driver().(*cuda.Driver).Missing()
			if len(acc.Engines()) != 1 || len(lacks) != 1 {
				t.Fatalf("engines are %v, missing %v", acc.Engines(), lacks)
			}
			var e *device.DriverError
			if err := lacks[0].Err; !errors.As(err, &e) || e.Code != 35 || e.Name != "cudaErrorInsufficientDriver" || !errors.Is(err, fault.Unsupported) {
				t.Errorf("got %v (%+v)", err, e)
			}
			m, err := acc.Alloc(4096)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.Free(); err != nil {
				t.Error(err)
			}
		})
	}
}
