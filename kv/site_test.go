package kv

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// site is a device whose memory the tests of caches are made on. What a cache promises
// is the same on all of them.
type site struct {
	name    string
	dev     device.Device
	stream  device.Stream
	scratch *device.Memory // what the tests' own looks pass through; nil: the host addresses the memory
}

type failer interface{ Fatal(...any) }

// onSites runs test on every site; where KVFERRY_GPU names a device ("cuda:0"), on that.
func onSites(t *testing.T, test func(t *testing.T, x *site)) {
	if name := os.Getenv("KVFERRY_GPU"); name != "" {
		test(t, acceleratorSite(t, openNamed(t, name)))
		return
	}
	t.Run("host", func(t *testing.T) { test(t, &site{name: "host", dev: openHost(t)}) })
	t.Run("far", func(t *testing.T) { test(t, openFar(t).site(t)) })
	for mode := range devicetest.Mode(devicetest.Modes) {
		t.Run("accelerator/"+mode.String(), func(t *testing.T) {
			a, _ := devicetest.OpenAccelerator(t, devicetest.Options{Mode: mode, Seed: 1})
			test(t, acceleratorSite(t, a))
		})
	}
	for _, vendor := range []fakedriver.Vendor{fakedriver.CUDA, fakedriver.HIP} {
		t.Run(vendor.String(), func(t *testing.T) {
			a := openVendor(t, fakedriver.Load(t, fakedriver.Options{Vendor: vendor, Delay: -1}))
			test(t, acceleratorSite(t, a))
		})
	}
}

// openVendor opens the first device of a fake driver.
func openVendor(t *testing.T, fake *fakedriver.Fake) *device.Accelerator {
	t.Helper()
	if fake.Runtime() == "" {
		return opened(t)(hip.Open("0", hip.Options{Library: fake.Path()}))
	}
	return opened(t)(cuda.Open("0", cuda.Options{Library: fake.Path(), Runtime: fake.Runtime()}))
}

// openNamed opens a real device.
func openNamed(t *testing.T, name string) *device.Accelerator {
	t.Helper()
	if vendor, which, _ := strings.Cut(name, ":"); vendor == "hip" {
		return opened(t)(hip.Open(which, hip.Options{Library: os.Getenv("KVFERRY_HIP_LIBRARY")}))
	}
	return opened(t)(cuda.Open(strings.TrimPrefix(name, "cuda:"), cuda.Options{Library: os.Getenv("KVFERRY_CUDA_LIBRARY")}))
}

// opened closes the device when the test ends.
func opened(t *testing.T) func(*device.Accelerator, error) *device.Accelerator {
	return func(a *device.Accelerator, err error) *device.Accelerator {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		})
		return a
	}
}

func acceleratorSite(t *testing.T, a *device.Accelerator) *site {
	t.Helper()
	h := openHost(t)
	return newSite(t, a.Name(), a, func(bytes int64) (*device.Memory, error) { return a.AllocHost(h, bytes, 1) })
}

// here reports whether the host can address the memory.
func (x *site) here() bool { return x.scratch == nil }

// cache is a cache full of the random bytes that wrapped gives for the seed, over memory
// that was wrapped; done ends its use.
func (x *site) cache(t failer, g *Geometry, seed uint64) (c *Cache, done func()) {
	twin := wrapped(t, g, seed)
	if x.here() {
		return twin, func() {}
	}
	var regions []*device.Memory
	for _, m := range twin.regions {
		far, err := x.dev.Alloc(m.Size())
		if err != nil {
			t.Fatal(err)
		}
		x.put(t, far, m.Bytes())
		regions = append(regions, far)
	}
	c, err := WrapOn(g, regions, x.dev)
	if err != nil {
		t.Fatal(err)
	}
	return c, func() {
		errs := []error{c.Close()}
		for _, m := range regions {
			errs = append(errs, m.Free())
		}
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
}

// put writes b into m, look reads all of it.
func (x *site) put(t failer, m *device.Memory, b []byte) {
	if x.here() {
		copy(m.Bytes(), b)
		return
	}
	copy(x.scratch.Bytes(), b)
	x.run(t, device.Op{Dst: m, Src: x.scratch, Bytes: int64(len(b))})
}

func (x *site) look(t failer, m *device.Memory) []byte {
	if x.here() {
		return slices.Clone(m.Bytes())
	}
	x.run(t, device.Op{Dst: x.scratch, Src: m, Bytes: m.Size()})
	return slices.Clone(x.scratch.Bytes()[:m.Size()])
}

func (x *site) run(t failer, op device.Op) {
	if err := errors.Join(x.stream.Copy([]device.Op{op}), x.stream.Sync(context.Background())); err != nil {
		t.Fatal(err)
	}
}

// snapshot copies the bytes of all regions.
func (x *site) snapshot(t failer, c *Cache) (out [][]byte) {
	for _, m := range c.regions {
		out = append(out, x.look(t, m))
	}
	return out
}

// far is a device in the manner of an accelerator: its memory has no bytes for the host,
// and its copies reach no host memory but what it has given.
type far struct {
	*device.Host
	refuse error // AllocHost
	strict bool  // and AdmitPageable, with it

	mu     sync.Mutex
	behind map[uintptr]*device.Memory // by base: what is behind far memory; guarded by mu
	pinned map[*device.Memory]int64   // guarded by mu
	given  []int64                    // sizes of pinned memory; guarded by mu
	copies [][]int64                  // bytes of the ops of each call; guarded by mu
	fail   error                      // the next copy fails with it; guarded by mu
}

func openFar(t *testing.T) *far {
	return &far{Host: openHost(t), behind: map[uintptr]*device.Memory{}, pinned: map[*device.Memory]int64{}}
}

func (f *far) site(t *testing.T) *site {
	return newSite(t, f.Name(), f, func(bytes int64) (*device.Memory, error) { return f.AllocHost(f.Host, bytes, 1) })
}

// newSite is a site of a device whose copies reach the host memory that pin gives.
func newSite(t *testing.T, name string, dev device.Device, pin func(bytes int64) (*device.Memory, error)) *site {
	t.Helper()
	x := &site{name: name, dev: dev, stream: must(dev.NewStream("tests"))(t), scratch: must(pin(8 << 20))(t)}
	t.Cleanup(func() {
		if err := errors.Join(x.stream.Close(), x.scratch.Free()); err != nil {
			t.Error(err)
		}
	})
	return x
}

func (*far) Name() string { return "far" }

func (f *far) Alloc(bytes int64) (*device.Memory, error) {
	m, err := f.Host.Alloc(bytes)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.behind[m.Base()] = m
	return device.NewMemory(device.MemoryOptions{Device: f.Name(), Base: m.Base(), Size: bytes, Free: m.Free}), nil
}

func (f *far) AllocHost(h *device.Host, bytes, cut int64) (*device.Memory, error) {
	if f.refuse != nil {
		return nil, f.refuse
	}
	m, err := h.AllocPieces(bytes, cut)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pinned[m], f.given = bytes, append(f.given, bytes)
	return m, nil
}

func (f *far) AdmitPageable(m *device.Memory) error {
	if f.strict {
		return f.refuse
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pinned[m] = m.Size()
	return nil
}

func (f *far) NewStream(name string) (device.Stream, error) {
	s, err := f.Host.NewStream(name)
	return &farStream{s, f}, err
}

type farStream struct {
	device.Stream
	f *far
}

func (s *farStream) Copy(ops []device.Op) error {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	ops = slices.Clone(ops)
	var sizes []int64
	for i := range ops {
		sizes = append(sizes, ops[i].Bytes)
		for _, m := range []**device.Memory{&ops[i].Dst, &ops[i].Src} {
			switch _, pinned := s.f.pinned[*m]; {
			case (*m).Device() == s.f.Name():
				*m = s.f.behind[(*m).Base()]
			case !pinned:
				return fault.New(fault.Unsupported, "copy", "memory that is not pinned")
			}
		}
		for k := range i {
			if a, b := ops[i], ops[k]; a.Dst == b.Dst && a.DstOff < b.DstOff+b.Bytes && b.DstOff < a.DstOff+a.Bytes {
				return fault.New(fault.Invalid, "copy", "ops %d and %d write the same bytes", k, i)
			}
		}
	}
	s.f.copies = append(s.f.copies, sizes)
	if err := s.f.fail; err != nil {
		s.f.fail = nil
		s.f.Fail(s.Stream, err)
	}
	return s.Stream.Copy(ops)
}
