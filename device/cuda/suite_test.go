//go:build !nogpu

package cuda_test

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// TestConformance runs the suite of devices on every version of the fake driver, in
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
	r := openBare(t, "0", o)
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
			r.fake.FailCopy(handle(s), 1, illegalAddress)
			return &device.DriverError{Library: "libcuda", Code: illegalAddress}
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
