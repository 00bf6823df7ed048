//go:build !nogpu

package cuda_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// A life in which one call of the library fails ends well, whichever it is.
func TestLife_EndsWhateverCallFails(t *testing.T) {
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		t.Fatal(err)
	}
	live := func(f *fakedriver.Fake) (refused, wrong []error) {
		acc, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
		if err != nil {
			return []error{err}, nil
		}
		return devicetest.Life(acc, host)
	}
	dry := fakedriver.Load(t, fakedriver.Options{})
	if refused, wrong := live(dry); len(refused)+len(wrong) > 0 {
		t.Fatal(refused, wrong)
	}
	// What is still there when the call that would end it has failed once. The end of the
	// context ends the rest.
	left := map[string]string{"cuDevicePrimaryCtxRelease_v2": "1 contexts"}
	for _, call := range abi.CUDA().Calls {
		name := call.Export()
		for _, code := range []int{invalidValue, outOfMemory, illegalAddress} {
			if dry.Calls(name) == 0 {
				continue
			}
			t.Run(fmt.Sprint(name, "/", code), func(t *testing.T) {
				f := fakedriver.Load(t, fakedriver.Options{AllowViolations: true, AllowLeaks: true})
				there := 0
				for i := range min(dry.Calls(name), 4) {
					f.FailCall(name, i+1, code)
					refused, wrong := live(f)
					for _, err := range wrong {
						t.Errorf("call %d: %v; refused: %v", i, err, errors.Join(refused...))
					}
					c := f.Counts()
					if l := c.Leaks(); code != illegalAddress && l != "" {
						if there++; strings.ReplaceAll(l, fmt.Sprint(there), "1") != left[name] {
							t.Errorf("call %d: left behind: %s; refused: %v", i, l, errors.Join(refused...))
						}
					}
					for _, v := range f.Violations() {
						if !strings.Contains(v, "is released with") {
							t.Errorf("call %d: %s; refused: %v", i, v, errors.Join(refused...))
						}
					}
					f.Forgive()
				}
			})
		}
	}
	if err := host.Close(); err != nil {
		t.Error(err)
	}
}
