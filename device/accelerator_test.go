package device_test

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
)

func TestAccelerator_IsADevice(t *testing.T) {
	for mode := range devicetest.Mode(devicetest.Modes) {
		for _, c := range []device.Class{device.Failed, device.Lost} {
			t.Run(fmt.Sprint(mode, "/", c), func(t *testing.T) {
				devicetest.Run(t, func(t *testing.T) devicetest.Harness {
					return devicetest.AcceleratorHarness(t, devicetest.Options{Mode: mode, Seed: 1}, c)
				})
			})
		}
	}
}
