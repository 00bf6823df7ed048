//go:build !nogpu

package hip_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/needtest"
)

func TestList_DescribesTheDevices(t *testing.T) {
	for _, version := range versions() {
		f := fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP, Version: version})
		all, err := hip.List(hip.Options{Library: f.Path(), Root: fstest.MapFS{}})
		if err != nil || len(all) != 2 {
			t.Fatalf("%d devices, %v", len(all), err)
		}
		a := all[1]
		if a.Model == "" || !strings.HasPrefix(a.UUID, "GPU-") || a.UUID == all[0].UUID || a.NUMANode != -1 || a.Bytes != 8<<30 ||
			a.MaxPitch != 1<<31-1 || !a.IPC || !a.VMM || a.Driver != fmt.Sprintf("%d.%d", version/10_000_000, version/100_000%100) {
			t.Errorf("got %+v", a)
		}
		root := fstest.MapFS{"sys/bus/pci/devices/" + a.PCI + "/numa_node": {Data: []byte("1\n")}}
		if all, err = hip.List(hip.Options{Library: f.Path(), Root: root}); err != nil || all[1].NUMANode != 1 || all[0].NUMANode != -1 {
			t.Errorf("with a NUMA node: %+v, %v", all, err)
		}
		for _, call := range []string{"hipSetDevice", "hipMalloc", "hipStreamCreateWithPriority"} {
			if n := f.Calls(call); n != 0 {
				t.Errorf("%d calls of %s", n, call)
			}
		}
	}
}

func TestOpen_TouchesOnlyTheDeviceThatWasAsked(t *testing.T) {
	r := open(t, "1", fakedriver.Options{})
	if r.acc.Name() != "hip:1" {
		t.Errorf("device 1 is %s", r.acc.Name())
	}
	// The fake knows what was freed under which device, and the peer of device 0 is 1.
	other := openBare(t, "0", fakedriver.Options{})
	if can, err := other.drv.CanAccessPeer(other.drv); can || err != nil {
		t.Errorf("device 0 is its own peer: %v, %v", can, err)
	}
	other.must(other.acc.Close())

	acc, err := hip.Open(r.acc.Attributes().UUID[:10], hip.Options{Library: r.fake.Path()})
	r.must(err)
	if acc.Name() != "hip:1" {
		t.Errorf("by its UUID, device 1 is %s", acc.Name())
	}
	peer := acc.Driver().(*hip.Driver)
	zero, err := hip.Open("0", hip.Options{Library: r.fake.Path()})
	r.must(err)
	drv := zero.Driver().(*hip.Driver)
	if can, err := drv.CanAccessPeer(peer); !can || err != nil {
		t.Errorf("peers: %v, %v", can, err)
	}
	for range 2 {
		r.must(drv.EnablePeer(peer))
	}
	r.must(errors.Join(acc.Close(), zero.Close()))
}

func TestOpen_SaysWhatIsWrong(t *testing.T) {
	text := filepath.Join(t.TempDir(), "libamdhip64.so")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	none := fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP, Devices: -1})
	some := fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP})
	for name, test := range map[string]struct {
		which, library string
		batch          int
		kind           fault.Kind
		says           string
	}{
		"no file":           {"0", "/nonexistent/libamdhip64.so", 0, fault.NotFound, "/nonexistent/libamdhip64.so"},
		"no library":        {"0", text, 0, fault.NotFound, text},
		"another one":       {"0", "libc.so.6", 0, fault.Unsupported, "hipRuntimeGetVersion"},
		"no device":         {"0", none.Path(), 0, fault.NotFound, "NoDevice"},
		"no such device":    {"2", some.Path(), 0, fault.NotFound, "hip:2: this process sees 2 devices"},
		"no such UUID":      {"GPU-0bad0bad0", some.Path(), 0, fault.NotFound, "hip:GPU-0bad0bad0: no device has that UUID"},
		"no UUID":           {"x", "/nonexistent/libamdhip64.so", 0, fault.Invalid, "hip:x: which of the devices?"},
		"batches too large": {"0", some.Path(), 8193, fault.Invalid, "8192"},
	} {
		_, err := hip.Open(test.which, hip.Options{Library: test.library, Batch: test.batch})
		if !errors.Is(err, test.kind) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want kind %v and %q", name, err, test.kind, test.says)
		}
	}
	for _, call := range []string{"hipInit", "hipGetDeviceCount", "hipDeviceGetName", "hipSetDevice", "hipStreamCreateWithPriority"} {
		some.FailCall(call, 1, 304)
		_, err := hip.Open("0", hip.Options{Library: some.Path()})
		var e *device.DriverError
		if !errors.As(err, &e) || e.Call != call || !errors.Is(err, fault.Device) {
			t.Errorf("%s fails: %v", call, err)
		}
	}
}

// TestOpen_RealLibraryHasNoDevice loads AMD's own library, which Debian has. There is no
// device here, so it says so.
func TestOpen_RealLibraryHasNoDevice(t *testing.T) {
	if _, err := os.Stat("/dev/kfd"); err == nil {
		t.Skip("this machine may have a device")
	}
	for name, open := range map[string]func() error{
		"open": func() error { _, err := hip.Open("0", hip.Options{}); return err },
		"list": func() error { _, err := hip.List(hip.Options{}); return err },
	} {
		err := open()
		var e *device.DriverError
		switch {
		case errors.As(err, &e):
			if !errors.Is(err, fault.NotFound) || e.Code != 100 && e.Code != 101 {
				t.Errorf("%s: %v", name, err)
			}
		case errors.Is(err, fault.NotFound):
			needtest.Missing(t, err)
		default:
			t.Errorf("%s: %v", name, err)
		}
	}
}
