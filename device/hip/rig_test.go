//go:build !nogpu

package hip_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// versions are those whose libraries differ in what they have.
func versions() []int {
	return []int{fakedriver.ROCm64, fakedriver.ROCm72, fakedriver.ROCm713}
}

// Codes that the tests inject.
const (
	invalidValue  = 1
	outOfMemory   = 2
	launchFailure = 719
	notSupported  = 801
)

// rig is a device of a fake library.
type rig struct {
	*testing.T
	fake *fakedriver.Fake
	acc  *device.Accelerator
	drv  *hip.Driver
}

// open opens a device of a fake that o describes. The end of the test closes it, and
// fails for what the fake has noted or what was left.
func open(t *testing.T, which string, o fakedriver.Options) *rig {
	t.Helper()
	r := openBare(t, which, o)
	t.Cleanup(func() { r.must(r.acc.Close()) })
	return r
}

// openBare is open for who closes the device himself.
func openBare(t *testing.T, which string, o fakedriver.Options) *rig {
	t.Helper()
	o.Vendor = fakedriver.HIP
	r := &rig{T: t, fake: fakedriver.Load(t, o)}
	acc, err := hip.Open(which, hip.Options{Library: r.fake.Path()})
	r.must(err)
	r.acc, r.drv = acc, acc.Driver().(*hip.Driver)
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// memory returns device memory until the test ends, which holds a pattern.
func (r *rig) memory(bytes int, seed byte) uintptr {
	r.Helper()
	addr, err := r.drv.Alloc(int64(bytes))
	r.must(err)
	r.Cleanup(func() { r.must(r.drv.Free(addr)) })
	r.fake.Poke(addr, pattern(bytes, seed))
	return addr
}

func (r *rig) stream() device.StreamHandle {
	r.Helper()
	s, err := r.drv.NewStream(device.NormalPriority)
	r.must(err)
	r.Cleanup(func() { r.must(r.drv.CloseStream(s)) })
	return s
}

// sync waits for a stream.
func (r *rig) sync(s device.StreamHandle) error {
	drained, err := r.drv.SyncStream(s)
	if drained == (err != nil) {
		r.Errorf("drained: %v, with %v", drained, err)
	}
	return err
}

func (r *rig) want(what string, addr uintptr, want []byte) {
	r.Helper()
	if got := r.fake.Peek(addr, len(want)); !bytes.Equal(got, want) {
		for i := range want {
			if got[i] != want[i] {
				r.Fatalf("%s: byte %d is %#x, want %#x", what, i, got[i], want[i])
			}
		}
	}
}

// pattern is bytes that tell who wrote them and where.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = seed ^ byte(i) ^ byte(i>>8)*31
	}
	return b
}

// TestConformance runs the suite of devices on every version of the fake library, in
// every mode of it.
func TestConformance(t *testing.T) {
	for _, version := range versions() {
		for _, mode := range []fakedriver.Mode{fakedriver.Eager, fakedriver.Lazy, fakedriver.Random} {
			t.Run(fmt.Sprintf("%d/%v", version, mode), func(t *testing.T) {
				devicetest.Run(t, func(t *testing.T) devicetest.Harness {
					return harness(t, fakedriver.Options{Version: version, Mode: mode, Delay: 1})
				})
			})
		}
	}
}

func harness(t *testing.T, o fakedriver.Options) devicetest.Harness {
	t.Helper()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Error(err)
		}
	})
	// What was on a device that is lost is nobody's to give back: there is no context
	// that would end with it.
	o.AllowLeaks = true
	r, lost := openBare(t, "0", o), false
	t.Cleanup(func() {
		c := r.fake.Counts()
		if left := c.Leaks(); left != "" && !lost {
			t.Errorf("left behind: %s", left)
		}
	})
	handle := func(s device.Stream) uintptr {
		h, ok := r.acc.Handle(s)
		if !ok {
			t.Fatalf("%s is no stream of %s", s.Name(), r.acc.Name())
		}
		return uintptr(h)
	}
	return devicetest.Harness{
		Device: r.acc,
		Hold:   func(s device.Stream) func() { return r.fake.Hold(handle(s)) },
		Fail: func(s device.Stream) error {
			lost = true
			r.fake.FailCopy(handle(s), 1, launchFailure)
			return &device.DriverError{Library: "libamdhip64", Code: launchFailure}
		},
		FailsDevice: true,
		Host:        func(bytes int64) (*device.Memory, error) { return r.acc.AllocHost(host, bytes, 1<<20) },
		Write: func(m *device.Memory, off int64, b []byte) error {
			r.fake.Poke(m.Base()+uintptr(off), b)
			return nil
		},
		Read: func(m *device.Memory, off int64, b []byte) error {
			copy(b, r.fake.Peek(m.Base()+uintptr(off), len(b)))
			return nil
		},
	}
}

// wantCode wants an error of a code, with its name and class.
func (r *rig) wantCode(what string, err error, code int, name string, class device.Class) {
	r.Helper()
	var e *device.DriverError
	if !errors.As(err, &e) || e.Library != "libamdhip64" || e.Code != code || e.Name != name || e.Class != class {
		r.Errorf("%s: got %v (%+v), want %s", what, err, e, name)
	}
}
