package mooncake_test

import (
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// harness has owners and readers in processes of their own, both by the real library.
func harness(tb testing.TB, role string, o mooncake.Options) transfertest.Harness {
	tb.Helper()
	need(tb)
	return transfertest.Harness{
		Role:   role,
		Reader: func() (transfertest.Side, error) { return side(o) },
		Unseen: true,
	}
}

func TestEngine_PassesTheSuiteInChildren(t *testing.T) {
	transfertest.Run(t, harness(t, "child", mooncake.Options{}))
}

// Closing the library takes it a second, so this is slow, and waits most of the time. With
// the race detector only readers have it in process.
func TestEngine_PassesTheSuiteInProcess(t *testing.T) {
	t.Parallel()
	owner := "in process"
	if raced {
		owner = "child"
	}
	transfertest.Run(t, harness(t, owner, mooncake.Options{InProcess: true}))
}

// A reader whose pages are a device's reads them by way of host memory.
func TestEngine_PassesTheSuiteIntoADevice(t *testing.T) {
	t.Parallel()
	h := harness(t, "child", mooncake.Options{})
	h.Reader = func() (transfertest.Side, error) {
		s, err := side(mooncake.Options{})
		if err != nil {
			return s, err
		}
		d := devicetest.NewDriver(devicetest.Options{Mode: devicetest.Lazy})
		a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
		if err != nil {
			return s, err
		}
		s.Device, s.Copier, s.Close = a, copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{}), a.Close
		return s, nil
	}
	transfertest.Run(t, h)
}
