package device_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
)

func TestHost_IsADevice(t *testing.T) { conform(t, device.HostOptions{}) }

func TestHost_IsADeviceWithEachKernel(t *testing.T) {
	for i, name := range device.KernelNames() {
		workers := 2 - i%2
		t.Run(fmt.Sprint(name, "/", workers), func(t *testing.T) { conform(t, device.WithKernel(name, workers)) })
	}
}

func conform(t *testing.T, o device.HostOptions) {
	devicetest.Run(t, func(t *testing.T) devicetest.Harness {
		h, err := device.OpenHost(o)
		if err != nil {
			t.Fatal(err)
		}
		return devicetest.Harness{Device: h, Hold: h.Hold, Fail: func(s device.Stream) error {
			broken := errors.New("broken on purpose")
			h.Fail(s, broken)
			return broken
		}}
	})
}
