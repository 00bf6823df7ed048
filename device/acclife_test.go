package device_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// A life in which one call of the driver fails ends well, whichever it is.
func TestLife_EndsWhateverCallFails(t *testing.T) {
	calls := []string{
		"Alloc", "Free", "Register", "Unregister", "NewStream", "CloseStream", "SyncStream", "NewEvent", "CloseEvent",
		"Record", "Wait", "EventDone", "SyncEvent", "CopyRects", "CopyBatch",
	}
	for mode := range devicetest.Mode(devicetest.Modes) {
		for _, class := range []device.Class{device.Failed, device.Retry, device.Lost} {
			for _, call := range calls {
				t.Run(fmt.Sprint(mode, "/", class, "/", call), func(t *testing.T) {
					for skip := range 12 {
						host, err := device.OpenHost(device.HostOptions{PieceBytes: 1 << 14})
						must(t, err)
						d := devicetest.NewDriver(devicetest.Options{Mode: mode, Seed: uint64(skip), Unordered: true})
						a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
						must(t, err)
						want := d.Refuse(call, skip, class)
						refused, wrong := devicetest.Life(a, host)
						for _, err := range wrong {
							t.Errorf("call %d: %v; refused: %v", skip, err, refused)
						}
						for _, err := range refused {
							if without := (call == "Alloc" || call == "Register") && errors.Is(err, fault.Invalid); !errors.Is(err, want) && !without {
								t.Errorf("call %d: %v", skip, err)
							}
						}
						// What the driver has refused to end is still there.
						if left := d.TakeViolations(); len(left) > len(refused) || len(left) > 0 && call != "Free" && call != "CloseStream" {
							t.Errorf("call %d: violations %q", skip, left)
						}
						d.Check(t)
						must(t, host.Close())
					}
				})
			}
		}
	}
}
