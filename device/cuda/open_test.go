//go:build !nogpu

package cuda_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

func TestOpen_TouchesOnlyTheDeviceThatWasAsked(t *testing.T) {
	for which, ordinal := range map[string]int{"0": 0, "1": 1} {
		r := open(t, which, fakedriver.Options{})
		if n := r.fake.Calls("cuDevicePrimaryCtxRetain"); n != 1 {
			t.Errorf("opening device %s makes %d contexts", which, n)
		}
		if want := fmt.Sprint("cuda:", ordinal); r.acc.Name() != want {
			t.Errorf("device %s is %s", which, r.acc.Name())
		}
		p, err := r.drv.Pointer(r.alloc(1))
		if err != nil || p.Ordinal != ordinal {
			t.Errorf("memory of device %s is of device %d (%v)", which, p.Ordinal, err)
		}
	}
}

func TestList_TouchesNoDevice(t *testing.T) {
	for _, version := range versions() {
		f := fakedriver.Load(t, fakedriver.Options{Version: version, Devices: 3})
		root := fstest.MapFS{"sys/bus/pci/devices/0000:27:00.0/numa_node": {Data: []byte("1\n")}}
		all, err := cuda.List(cuda.Options{Library: f.Path(), Root: root})
		if err != nil || len(all) != 3 {
			t.Fatalf("%d devices, %v", len(all), err)
		}
		want := device.Attributes{
			Model: "Fake CUDA GPU 1", UUID: all[1].UUID, PCI: "0000:27:00.0", NUMANode: 1, Bytes: 8 << 30, MaxPitch: 1<<31 - 1,
			AsyncEngines: 3, UVA: true, IPC: true, VMM: true, Driver: fmt.Sprintf("%d.%d", version/1000, version%1000/10),
		}
		if all[1] != want {
			t.Errorf("got %+v, want %+v", all[1], want)
		}
		if all[0].NUMANode != -1 || !strings.HasPrefix(all[0].UUID, "GPU-") || len(all[0].UUID) != 40 || all[0].UUID == all[1].UUID {
			t.Errorf("got %+v beside %s", all[0], all[1].UUID)
		}
		for _, call := range []string{"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2"} {
			if n := f.Calls(call); n != 0 {
				t.Errorf("%d calls of %s", n, call)
			}
		}
	}
}

func TestOpen_FindsDevicesByUUID(t *testing.T) {
	// The ordinals are masked, as CUDA_VISIBLE_DEVICES does it: the UUID stays.
	f := fakedriver.Load(t, fakedriver.Options{Visible: []int{5, 2, 7}})
	all, err := cuda.List(cuda.Options{Library: f.Path()})
	if err != nil {
		t.Fatal(err)
	}
	id := all[1].UUID
	for _, which := range []string{
		id, id[:12], strings.ToUpper(id), strings.TrimPrefix(id, "GPU-"), "gpu-" + id[4:14], "MIG-" + id[4:],
	} {
		acc, err := cuda.Open(which, cuda.Options{Library: f.Path()})
		if err != nil {
			t.Errorf("%s: %v", which, err)
			continue
		}
		if acc.Name() != "cuda:1" || acc.Attributes().UUID != id || acc.Attributes().Model != "Fake CUDA GPU 2" {
			t.Errorf("%s is %s, %+v", which, acc.Name(), acc.Attributes())
		}
		if err := acc.Close(); err != nil {
			t.Error(err)
		}
	}
	for which, kind := range map[string]fault.Kind{
		"": fault.Invalid, "GPU-": fault.Invalid, "x": fault.Invalid, "GPU-zz": fault.Invalid, id + "0": fault.NotFound,
		"3": fault.NotFound, "-1": fault.Invalid, "99999999999": fault.NotFound,
	} {
		if _, err := cuda.Open(which, cuda.Options{Library: f.Path()}); !errors.Is(err, kind) {
			t.Errorf("%q: got %v, want kind %v", which, err, kind)
		}
	}
	if n := f.Calls("cuDevicePrimaryCtxRetain"); n != 6 {
		t.Errorf("%d contexts for 6 devices that were opened", n)
	}
}

// TestOpen_RefusesAUUIDOfSeveral opens by what two devices begin with.
func TestOpen_RefusesAUUIDOfSeveral(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Devices: 16})
	all, err := cuda.List(cuda.Options{Library: f.Path()})
	if err != nil {
		t.Fatal(err)
	}
	first := map[string]int{}
	for _, a := range all {
		first[a.UUID[4:5]]++
	}
	for c, n := range first {
		if n > 1 && strings.Trim(c, "0123456789") != "" { // a digit is an ordinal
			if _, err := cuda.Open(c, cuda.Options{Library: f.Path()}); !errors.Is(err, fault.Invalid) {
				t.Errorf("%q begins %d UUIDs: %v", c, n, err)
			}
			return
		}
	}
	t.Error("no two UUIDs of the fake begin with one letter")
}

// What names no device is said before a library is opened, and what names several says
// which.
func TestOpen_SaysWhatANameIsNot(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{})
	all, err := cuda.List(cuda.Options{Library: f.Path()})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		which, library string
		kind           fault.Kind
		says           []string
	}{
		{"x", "/nonexistent", fault.Invalid, []string{"cuda:x: ", "a number from 0, or a UUID"}},
		{"-1", "/nonexistent", fault.Invalid, []string{"cuda:-1: ", "a number from 0, or a UUID"}},
		{"GPU-", f.Path(), fault.Invalid, []string{"ambiguous", "cuda:0 is " + all[0].UUID, "cuda:1 is " + all[1].UUID}},
		{"0", "/nonexistent", fault.NotFound, []string{"libcuda: /nonexistent: cannot open"}},
	} {
		_, err := cuda.Open(test.which, cuda.Options{Library: test.library})
		if !errors.Is(err, test.kind) || fault.RemedyOf(err) == "" {
			t.Errorf("%s: %v (%s)", test.which, err, fault.RemedyOf(err))
			continue
		}
		for _, text := range test.says {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v does not say %q", test.which, err, text)
			}
		}
	}
}

func TestOpen_SaysWhatIsWrongWithTheLibrary(t *testing.T) {
	text := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		library string
		kind    fault.Kind
		says    []string
	}{
		"no file":       {"/nonexistent/libcuda.so.1", fault.NotFound, []string{"/nonexistent/libcuda.so.1"}},
		"no library":    {text, fault.NotFound, []string{text}},
		"another one":   {"libc.so.6", fault.Unsupported, []string{"cuDriverGetVersion", "no driver"}},
		"too old":       {stub(t, "old"), fault.Unsupported, []string{"11.2", "11.4"}},
		"symbol absent": {stub(t, "absent"), fault.Unsupported, []string{"cuMemcpy2DAsync_v2", "12.4"}},
		"no version":    {stub(t, "broken"), fault.Unsupported, []string{"cuDriverGetVersion", "999"}},
		"no device":     {stub(t, "empty"), fault.NotFound, []string{"cuInit", "CUDA_ERROR_NO_DEVICE"}},
		"a stub":        {stub(t, "stub"), fault.Unsupported, []string{"cuInit", "CUDA_ERROR_STUB_LIBRARY"}},
		"a new code":    {stub(t, "newer"), fault.Device, []string{"cuInit", "error 4242"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err1 := cuda.Open("0", cuda.Options{Library: test.library})
			_, err2 := cuda.List(cuda.Options{Library: test.library})
			for _, err := range []error{err1, err2} {
				if !errors.Is(err, test.kind) {
					t.Errorf("got %v, want kind %v", err, test.kind)
				}
				for _, text := range test.says {
					if err != nil && !strings.Contains(err.Error(), text) {
						t.Errorf("%v does not say %q", err, text)
					}
				}
			}
		})
	}
}

// TestOpen_LooksForNoLibraryWithoutADriver makes sure that a machine without a driver is
// left alone: libcuda would make a device node.
func TestOpen_LooksForNoLibraryWithoutADriver(t *testing.T) {
	_, err := cuda.Open("0", cuda.Options{Root: fstest.MapFS{}})
	if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "/proc/driver/nvidia/version") || fault.RemedyOf(err) == "" {
		t.Errorf("got %v", err)
	}
	// With a driver the library is looked for, under all of its names.
	if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil {
		return
	}
	_, err = cuda.Open("0", cuda.Options{Root: fstest.MapFS{"proc/driver/nvidia/version": {}}})
	for _, name := range []string{"libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"} {
		if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not say that %s was tried", err, name)
		}
	}
}

func TestOpen_SaysWhichCallFailed(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{})
	for _, call := range []string{
		"cuDriverGetVersion", "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceGetPCIBusId",
		"cuDeviceTotalMem_v2", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority",
	} {
		f.FailCall(call, 1, 304)
		_, err := cuda.Open("0", cuda.Options{Library: f.Path()})
		if call == "cuDriverGetVersion" {
			if !errors.Is(err, fault.Unsupported) {
				t.Errorf("%s fails: %v", call, err)
			}
			continue
		}
		var e *device.DriverError
		if !errors.As(err, &e) || !errors.Is(err, fault.Device) || e.Call != call || e.Name != "CUDA_ERROR_OPERATING_SYSTEM" || e.Library != "libcuda" {
			t.Errorf("%s fails: %v (%+v)", call, err, e)
		}
	}
	if c := f.Counts(); c.Leaks() != "" {
		t.Errorf("after openings that failed: %s", c.Leaks())
	}
	f.FailCall("cuDevicePrimaryCtxRetain", 1, 2)
	if _, err := cuda.Open("0", cuda.Options{Library: f.Path()}); !errors.Is(err, fault.Memory) {
		t.Errorf("no memory for a context: %v", err)
	}
	if _, err := cuda.Open("0", cuda.Options{Library: f.Path(), Batch: -1}); !errors.Is(err, fault.Invalid) {
		t.Errorf("batches of -1 copies: %v", err)
	}
}

// TestOpen_NeedsAddressesThatSayWhereTheyPoint refuses a device whose engines would copy
// to the wrong place.
func TestOpen_NeedsAddressesThatSayWhereTheyPoint(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Settings: map[string]string{"attributes": "41=0"}})
	if _, err := cuda.Open("0", cuda.Options{Library: f.Path()}); !errors.Is(err, fault.Unsupported) {
		t.Errorf("got %v", err)
	}
}

func TestOpen_NoDevices(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Devices: -1})
	if _, err := cuda.List(cuda.Options{Library: f.Path()}); !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "CUDA_ERROR_NO_DEVICE") ||
		!strings.Contains(fault.RemedyOf(err), "CUDA_VISIBLE_DEVICES") {
		t.Errorf("got %v (%s)", err, fault.RemedyOf(err))
	}
	if _, err := cuda.Open("0", cuda.Options{Library: f.Path()}); !errors.Is(err, fault.NotFound) || !strings.Contains(fault.RemedyOf(err), "/dev/nvidia0") {
		t.Errorf("open: %v (%s)", err, fault.RemedyOf(err))
	}
}

// TestOpen_ManyAtOnce opens a device over and over, from many goroutines.
func TestOpen_ManyAtOnce(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{})
	errs := make(chan error)
	for i := range 16 {
		go func() {
			acc, err := cuda.Open(fmt.Sprint(i%2), cuda.Options{Library: f.Path()})
			if err == nil {
				err = acc.Close()
			}
			errs <- err
		}()
	}
	var all []error
	for range 16 {
		all = append(all, <-errs)
	}
	if slices.ContainsFunc(all, func(err error) bool { return err != nil }) {
		t.Error(errors.Join(all...))
	}
}
