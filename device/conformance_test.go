package device_test

import (
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
)

func TestHost_IsADevice(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) devicetest.Harness {
		h, err := device.OpenHost(device.HostOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return devicetest.Harness{Device: h, Hold: h.Hold, Fail: h.Fail}
	})
}
