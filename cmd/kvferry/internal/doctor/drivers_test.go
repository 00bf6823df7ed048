package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/needtest"
)

// quick are options with which measuring means nothing and takes no time.
func quick() Options { return Options{Budget: time.Nanosecond, PoolBytes: 8 << 20} }

// look runs the doctor with a library and returns its report, and the findings that are
// not of the machine by the title of their section and their name.
func look(t *testing.T, o Options) (*Report, map[string]Finding) {
	t.Helper()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]Finding{}
	for _, s := range r.Sections[4:] {
		for _, f := range s.Findings {
			found[s.Title+" "+f.Name] = f
			if f.Name == "" || f.Text == "" || (f.Level == Green) != (f.Remedy == "") {
				t.Errorf("%s: %+v: a name, a text, and a remedy unless it is green", s.Title, f)
			}
		}
	}
	return r, found
}

// want checks a finding.
func want(t *testing.T, found map[string]Finding, name string, l Level, texts ...string) {
	t.Helper()
	f, ok := found[name]
	if !ok {
		t.Errorf("nothing is said of %s: %v", name, found)
		return
	}
	if f.Level != l {
		t.Errorf("%s is %v: %s", name, f.Level, f.Text)
	}
	for _, text := range texts {
		if !strings.Contains(f.Text, text) {
			t.Errorf("%s: no %q in %q", name, text, f.Text)
		}
	}
}

func TestRun_LooksAtEveryDeviceOfEveryDriver(t *testing.T) {
	for version, batches := range map[int]string{
		fakedriver.CUDA124: "no batches: ",
		fakedriver.CUDA128: "batches of 8192",
		fakedriver.CUDA130: "batches of 8192",
	} {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Version: version})
			o := quick()
			o.CUDA = f.Path()
			r, found := look(t, o)
			for i := range 2 {
				on := fmt.Sprintf("cuda:%d ", i)
				want(t, found, on+"device", Green, fmt.Sprintf("GPU %d", i), fmt.Sprintf("driver %d.%d", version/1000, version%1000/10))
				want(t, found, on+"cuda", Green, f.Path())
				want(t, found, on+"libcudart", Green, "not used: ")
				want(t, found, on+"copier", Green, "cuda, self-test passed", batches)
				if text := found[on+"copier"].Text; strings.Contains(text, "batches: batches") {
					t.Error(text)
				}
				want(t, found, on+"sharing", Green, "by handle: yes")
				want(t, found, on+"pinning", Green, "8 MiB in ")
				want(t, found, on+"link", Green, "GB/s at best")
			}
			for _, s := range r.Sections[6:] {
				if len(s.Rates) != 3*(len(copySizes())+1) {
					t.Errorf("%s: %d rates", s.Title, len(s.Rates))
				}
			}
		})
	}
}

func TestRun_LooksAtHIPDevices(t *testing.T) {
	for version, batches := range map[int]string{
		fakedriver.ROCm64:  "no batches: ",
		fakedriver.ROCm72:  "batches of 8192",
		fakedriver.ROCm713: "batches of 8192",
	} {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			f := fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP, Mode: fakedriver.Eager, Version: version})
			o := quick()
			o.HIP = f.Path()
			r, found := look(t, o)
			for i := range 2 {
				on := fmt.Sprintf("hip:%d ", i)
				want(t, found, on+"device", Green, fmt.Sprintf("GPU %d", i))
				want(t, found, on+"libamdhip64", Green, f.Path())
				want(t, found, on+"copier", Green, "libamdhip64, self-test passed", batches)
				want(t, found, on+"sharing", Green, "by handle: yes")
			}
			if r.Level == Red {
				t.Error(r.Err())
			}
		})
	}
}

// The vendor's own library, on a machine that it has nothing to do on.
func TestRun_FallsBackWithAMDsOwnLibrary(t *testing.T) {
	m := ThisMachine()
	if m.hasHIP() {
		t.Skip("this machine has a driver")
	}
	const library = "/usr/lib/x86_64-linux-gnu/libamdhip64.so.5"
	if !m.exists(library[1:]) {
		needtest.Missing(t, "no "+library+" (Debian: apt-get install libamdhip64-5)")
	}
	o := quick()
	o.HIP = library
	r, found := look(t, o)
	want(t, found, "hip library", Red, "libamdhip64", "hipError")
	want(t, found, "host copier", Green, "portable")
	if err := r.Err(); err == nil {
		t.Error("nothing is red")
	}
	if m.hasHIP() {
		t.Error("a device node was made")
	}
}

func TestRun_SaysWhatIsWrongWithALibrary(t *testing.T) {
	text := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(text, []byte(strings.Repeat("no library\n", 1000)), 0o666); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		options func(*testing.T, *Options)
		finding string
		texts   []string
		kind    fault.Kind
	}{
		"not there": {
			func(_ *testing.T, o *Options) { o.CUDA = "/none/libcuda.so.1" },
			"cuda library",
			[]string{"/none/libcuda.so.1"},
			fault.NotFound,
		},
		"no library": {
			func(_ *testing.T, o *Options) { o.CUDA = text },
			"cuda library",
			[]string{text, "invalid ELF header"},
			fault.NotFound,
		},
		"another library": {
			func(_ *testing.T, o *Options) { o.CUDA = "libc.so.6" },
			"cuda library",
			[]string{"no driver"},
			fault.Unsupported,
		},
		"no device": {
			func(t *testing.T, o *Options) {
				o.CUDA = fakedriver.Load(t, fakedriver.Options{Devices: -1}).Path()
			},
			"cuda library",
			[]string{"NO_DEVICE"},
			0,
		},
		"a runtime that is none": {
			func(t *testing.T, o *Options) {
				o.CUDA = fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1}).Path()
				o.CUDART = "/none/libcudart.so.12"
			},
			"cuda:0 libcudart",
			[]string{"/none/libcudart.so.12"},
			fault.NotFound,
		},
		"a copier that is not there": {
			func(t *testing.T, o *Options) {
				o.CUDA = fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1}).Path()
				o.CUDART, o.Copier = "/none/libcudart.so.12", "libcudart"
			},
			"cuda:0 copier",
			[]string{"libcudart"},
			0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := quick()
			tc.options(t, &o)
			r, found := look(t, o)
			want(t, found, tc.finding, Red, tc.texts...)
			if err := r.Err(); err == nil || tc.kind != 0 && !errors.Is(err, tc.kind) {
				t.Errorf("got %v, want one of kind %v", err, tc.kind)
			}
		})
	}
}

func TestRun_NamesWhatADeviceRefuses(t *testing.T) {
	const outOfMemory = 2
	for call, finding := range map[string]string{
		"cuMemHostRegister_v2":     "cuda:0 pinning",
		"cuDevicePrimaryCtxRetain": "cuda:0 device",
	} {
		t.Run(call, func(t *testing.T) {
			f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1, AllowPageable: true})
			for n := range 40 {
				f.FailCall(call, n+1, outOfMemory)
			}
			o := quick()
			o.CUDA = f.Path()
			_, found := look(t, o)
			if got, ok := found[finding]; !ok || got.Level == Green || !strings.Contains(got.Text, "OUT_OF_MEMORY") {
				t.Errorf("%s: %+v in %v", finding, got, found)
			}
		})
	}
}

func TestRun_SaysWhyACopierIsNotUsed(t *testing.T) {
	const invalidValue = 1
	f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1})
	for n := range 40 {
		f.FailCall("cuMemcpy2DAsync_v2", n+1, invalidValue)
	}
	o := quick()
	o.CUDA, o.CUDART = f.Path(), f.Runtime()
	_, found := look(t, o)
	want(t, found, "cuda:0 copier cuda", Yellow, "not used: ", "INVALID_VALUE")
	want(t, found, "cuda:0 copier libcudart", Yellow, "not used: ") // it calls the driver, too
	want(t, found, "cuda:0 copier", Yellow, "portable, self-test passed: every row is a copy of its own")
}

func TestRun_StartsNoLibraryWhereThereIsNoDriver(t *testing.T) {
	m := ThisMachine()
	if m.hasCUDA() || m.hasHIP() {
		t.Skip("this machine has a driver")
	}
	r, _ := look(t, quick())
	for _, s := range r.Sections[6:] {
		t.Errorf("section %s: %+v", s.Title, s.Findings)
	}
	if m.hasCUDA() || m.hasHIP() {
		t.Error("a device node was made")
	}
}

func TestRun_RefusesACopierThatThereIsNot(t *testing.T) {
	o := quick()
	o.Copier = "memcpy"
	if r, err := Run(t.Context(), o); r != nil || !errors.Is(err, fault.Invalid) || !strings.Contains(fault.RemedyOf(err), "libcudart") {
		t.Errorf("got %v, %v", r, err)
	}
}

// What is another vendor's does not force this one's devices.
func TestRun_ForcesOnlyDevicesThatCanHaveTheCopier(t *testing.T) {
	f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1})
	for name, text := range map[string]string{
		portable: "portable, self-test passed", "cuda": "cuda, self-test passed", "libcudart": "libcudart, self-test passed",
	} {
		o := quick()
		o.Libraries, o.Copier = accel.Libraries{CUDA: f.Path(), CUDART: f.Runtime()}, name
		r, found := look(t, o)
		want(t, found, "cuda:0 libcudart", Green, f.Runtime())
		want(t, found, "cuda:0 copier", Green, text)
		if r.Level == Red {
			t.Errorf("%s: %v", name, r.Err())
		}
	}
}

// What is another vendor's is refused where there is nothing of that vendor's.
func TestRun_RefusesACopierThatNoDeviceCanHave(t *testing.T) {
	if ThisMachine().hasHIP() {
		t.Skip("this machine has a driver")
	}
	f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1})
	o := quick()
	o.CUDA, o.Copier = f.Path(), "libamdhip64"
	r, found := look(t, o)
	want(t, found, "cuda:0 copier", Red, "libamdhip64", "none of that name")
	remedied(t, found, "cuda:0 copier", "leave --copier out")
	if f, ok := found["hip library"]; ok {
		t.Errorf("nobody has asked for it: %+v", f)
	}
	if err := r.Err(); !errors.Is(err, fault.Unsupported) && !errors.Is(err, fault.NotFound) {
		t.Errorf("error %v", err)
	}
}

func TestForced(t *testing.T) {
	both := func(cuda, hip bool) []maker {
		return []maker{{name: "cuda", copiers: []string{"cuda", "libcudart"}, ready: cuda}, {name: "hip", copiers: []string{"libamdhip64"}, ready: hip}}
	}
	for _, tc := range []struct {
		copier    string
		all       []maker
		cuda, hip string
		asked     bool // of HIP
	}{
		{"", both(true, true), "", "", false},
		{portable, both(true, true), portable, portable, false},
		{"libcudart", both(true, true), "libcudart", "", false},
		{"libamdhip64", both(true, true), "", "libamdhip64", true},
		{"libamdhip64", both(true, false), "libamdhip64", "libamdhip64", false},
		{"libamdhip64", both(false, false), "", "libamdhip64", true},
	} {
		forced(tc.all, tc.copier)
		if c, h := tc.all[0], tc.all[1]; c.force != tc.cuda || h.force != tc.hip || h.asked != tc.asked {
			t.Errorf("%s: %+v", tc.copier, tc.all)
		}
	}
}
