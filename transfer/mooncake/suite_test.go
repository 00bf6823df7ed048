package mooncake_test

import (
	"testing"
	"time"

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
	t.Parallel()
	transfertest.Run(t, harness(t, "child", mooncake.Options{}))
}

// All readers of the suite have one engine, for what is in this process is closed slowly:
// newBench closes one for each of its tests. With the race detector only readers have it
// in process.
func TestEngine_PassesTheSuiteInProcess(t *testing.T) {
	t.Parallel()
	owner := "in process"
	if raced {
		owner = "child"
	}
	h := harness(t, owner, mooncake.Options{})
	one := must(side(mooncake.Options{InProcess: true, Stall: time.Second}))(t)
	t.Cleanup(func() { noError(t, one.Engine.Close()) })
	h.Reader = func() (transfertest.Side, error) { return kept(one), nil }
	transfertest.Run(t, h)
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
