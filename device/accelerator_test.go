package device_test

import (
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
)

// narrow are engines with limits that small copies reach.
func narrow() []devicetest.EngineOption {
	return []devicetest.EngineOption{
		{Name: "narrow", Limits: device.EngineLimits{MaxPitch: 4096, Boxes: true, Batch: 100}},
		{Name: "flat", Limits: device.EngineLimits{MaxPitch: 4096}},
		{Name: "linear", Limits: device.EngineLimits{}},
	}
}

// plain are engines of which the first has no batches.
func plain() []devicetest.EngineOption {
	return []devicetest.EngineOption{
		{Name: "plain", Limits: device.EngineLimits{MaxPitch: 1<<31 - 1}},
		{Name: "batched", Limits: device.EngineLimits{MaxPitch: 1<<31 - 1, Boxes: true, Batch: 8192}},
	}
}

func TestAccelerator_IsADevice(t *testing.T) {
	for name, c := range map[string]struct {
		o     devicetest.Options
		class device.Class
	}{
		"eager":  {devicetest.Options{Mode: devicetest.Eager}, device.Failed},
		"lazy":   {devicetest.Options{Mode: devicetest.Lazy, Engines: narrow()}, device.Failed},
		"random": {devicetest.Options{Mode: devicetest.Random, Seed: 1, Engines: plain()}, device.Failed},
		"lost":   {devicetest.Options{Mode: devicetest.Random, Seed: 2}, device.Lost},
	} {
		t.Run(name, func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) devicetest.Harness {
				return devicetest.AcceleratorHarness(t, c.o, c.class)
			})
		})
	}
}
