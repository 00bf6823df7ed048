package copier_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// vendor is a version of a vendor's fake driver, and what its device can do.
type vendor struct {
	vendor  fakedriver.Vendor
	version int
	engines []string // in the order in which they are tried
	batches bool
}

func vendors() []vendor {
	return []vendor{
		{fakedriver.CUDA, fakedriver.CUDA124, []string{"cuda", "libcudart"}, false},
		{fakedriver.CUDA, fakedriver.CUDA128, []string{"cuda", "libcudart"}, true},
		{fakedriver.CUDA, fakedriver.CUDA130, []string{"cuda", "libcudart"}, true},
		{fakedriver.HIP, fakedriver.ROCm64, []string{"libamdhip64"}, false},
		{fakedriver.HIP, fakedriver.ROCm72, []string{"libamdhip64"}, true},
		{fakedriver.HIP, fakedriver.ROCm713, []string{"libamdhip64"}, true},
	}
}

func (v vendor) String() string { return fmt.Sprintf("%v_%d", v.vendor, v.version) }

// open opens device 0 of a new fake. The test closes it.
func (v vendor) open(t *testing.T, o fakedriver.Options) (*device.Accelerator, *fakedriver.Fake) {
	t.Helper()
	o.Vendor, o.Version = v.vendor, v.version
	fake := fakedriver.Load(t, o)
	return v.openOn(t, fake, "0"), fake
}

func (v vendor) openOn(t *testing.T, fake *fakedriver.Fake, which string) (a *device.Accelerator) {
	t.Helper()
	var err error
	if v.vendor == fakedriver.HIP {
		a, err = hip.Open(which, hip.Options{Library: fake.Path()})
	} else {
		a, err = cuda.Open(which, cuda.Options{Library: fake.Path(), Runtime: fake.Runtime()})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, a.Close) })
	return a
}

// illegalAddress is the code with which CUDA and HIP lose a device.
const illegalAddress = 700

func (v vendor) harness(t *testing.T, o fakedriver.Options, make func(a *device.Accelerator) copier.Copier) copiertest.Harness {
	t.Helper()
	// What HIP has of a device that is lost is nobody's to give back.
	lost := false
	o.Vendor, o.Version, o.AllowLeaks = v.vendor, v.version, true
	fake := fakedriver.Load(t, o)
	t.Cleanup(func() {
		c := fake.Counts()
		if left := c.Leaks(); left != "" && (!lost || v.vendor != fakedriver.HIP) {
			t.Errorf("left behind: %s", left)
		}
	})
	a := v.openOn(t, fake, "0")
	h := openHost(t)
	other := v.openOn(t, fake, "1")
	foreign, err := other.NewStream("foreign")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, foreign.Close) })
	handle := func(s device.Stream) uintptr {
		handle, ok := a.Handle(s)
		if !ok {
			t.Errorf("%T is no stream of %s", s, a.Name())
		}
		return uintptr(handle)
	}
	return copiertest.Harness{
		Copier: make(a), Device: a, Foreign: foreign, FailsDevice: true,
		Hold: func(s device.Stream) func() { return fake.Hold(handle(s)) },
		Fail: func(s device.Stream) error {
			lost = true
			fake.FailCopy(handle(s), 1, illegalAddress)
			return &device.DriverError{Library: library(v), Code: illegalAddress}
		},
		Lose:      func() { lost = true; fake.Lose(0, illegalAddress) },
		AllocHost: func(n int64) (*device.Memory, error) { return a.AllocHost(h, n, n) },
		Write:     func(m *device.Memory, off int64, b []byte) error { fake.Poke(m.Base()+uintptr(off), b); return nil },
		Read: func(m *device.Memory, off int64, b []byte) error {
			copy(b, fake.Peek(m.Base()+uintptr(off), len(b)))
			return nil
		},
	}
}

func library(v vendor) string {
	if v.vendor == fakedriver.HIP {
		return "libamdhip64"
	}
	return "libcuda"
}

// engineOf returns the engine of that name.
func engineOf(t *testing.T, a *device.Accelerator, name string) device.Engine {
	t.Helper()
	for _, e := range a.Engines() {
		if e.Name() == name {
			return e
		}
	}
	t.Fatalf("%s has no engine %s", a.Name(), name)
	return nil
}

// TestVendors runs the suite of copiers for every engine of every version, in every way
// that it has, and the portable copier.
func TestVendors(t *testing.T) {
	for _, v := range vendors() {
		for _, mode := range []fakedriver.Mode{fakedriver.Random, fakedriver.Lazy} {
			for _, name := range append([]string{"portable"}, v.engines...) {
				for _, way := range []copier.Way{copier.InRectangles, copier.InBatches, copier.OneByOne} {
					newest := v.version == fakedriver.CUDA130 || v.version == fakedriver.ROCm713
					switch {
					case way == copier.InBatches && !v.batches,
						way != copier.InRectangles && (name == "portable" || mode == fakedriver.Lazy),
						way == copier.OneByOne && !newest, mode == fakedriver.Lazy && !newest:
						continue
					}
					t.Run(fmt.Sprintf("%v/%v/%s/%v", v, mode, name, way), func(t *testing.T) {
						copiertest.Run(t, func(t *testing.T) copiertest.Harness {
							return v.harness(t, fakedriver.Options{Mode: mode, Delay: -1}, func(a *device.Accelerator) copier.Copier {
								if name == "portable" {
									return copier.NewPortable()
								}
								ways := copier.Every(way)
								return copier.NewAccelerated(a, engineOf(t, a, name), copier.AcceleratedOptions{Crossovers: &ways})
							})
						})
					})
				}
			}
		}
	}
}

// TestVendors_Select has each version's device choose.
func TestVendors_Select(t *testing.T) {
	for _, v := range vendors() {
		for _, mode := range []fakedriver.Mode{fakedriver.Random, fakedriver.Eager, fakedriver.Lazy} {
			t.Run(fmt.Sprintf("%v/%v", v, mode), func(t *testing.T) {
				a, _ := v.open(t, fakedriver.Options{Mode: mode, Delay: -1, Protect: true})
				s, err := copier.Select(t.Context(), a, copier.SelectOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if s.Copier.Name() != v.engines[0] || len(s.Rejected) > 0 || s.Pageable != nil {
					t.Errorf("chosen: %v", s)
				}
				if (s.BatchOps > 0) != v.batches {
					t.Errorf("batches of %d, because %v: want them: %t", s.BatchOps, s.NoBatches, v.batches)
				}
				for _, name := range append([]string{"portable"}, v.engines...) {
					if s, err := copier.Select(t.Context(), a, copier.SelectOptions{Force: name}); err != nil || s.Copier.Name() != name {
						t.Errorf("%s asked for: chosen %v, error %v", name, s, err)
					}
				}
			})
		}
	}
}

// TestVendors_WithoutARuntime has no libcudart where M* would take it.
func TestVendors_WithoutARuntime(t *testing.T) {
	fake := fakedriver.Load(t, fakedriver.Options{})
	a, err := cuda.Open("0", cuda.Options{Library: fake.Path(), Runtime: "/nowhere/libcudart.so.13"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, a.Close) })
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{Order: copier.Seed})
	if err != nil {
		t.Fatal(err)
	}
	if s.Copier.Name() != "cuda" || len(s.Rejected) != 1 || s.Rejected[0].Name != "libcudart" || !strings.Contains(s.String(), "/nowhere/libcudart.so.13") {
		t.Errorf("chosen: %v", s)
	}
	if _, err := copier.Select(t.Context(), a, copier.SelectOptions{Force: "libcudart"}); err == nil || !strings.Contains(err.Error(), "libcudart") {
		t.Errorf("libcudart asked for: error %v", err)
	}
}
