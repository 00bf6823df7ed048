package fakedriver

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/needtest"
)

// TestExports: what a version lacks is not there.
func TestExports(t *testing.T) {
	for _, c := range []struct {
		o      Options
		symbol string
		want   bool
	}{
		{Options{Version: CUDA124}, "cuMemcpyAsync", true},
		{Options{Version: CUDA124}, "cuMemcpyBatchAsync", false},
		{Options{Version: CUDA128}, "cuMemcpyBatchAsync", true},
		{Options{Version: CUDA128}, "cuMemcpyBatchAsync_v2", false},
		{Options{Version: CUDA130}, "cuMemcpyBatchAsync", true},
		{Options{Version: CUDA130}, "cuMemcpyBatchAsync_v2", true},
		{Options{Version: CUDA130}, "cuMemcpy2DAsync", false},
		{Options{Vendor: HIP, Version: ROCm64}, "hipMemcpyBatchAsync", false},
		{Options{Vendor: HIP, Version: ROCm72}, "hipMemcpyBatchAsync", true},
		{Options{Vendor: HIP}, "hipMemcpyBatchAsync", true},
		{Options{Vendor: HIP}, "locate", false}, // what is ours alone
	} {
		if got := Load(t, c.o).Has(c.symbol); got != c.want {
			t.Errorf("%s %d has %s: %v", c.o.Vendor, c.o.version(), c.symbol, got)
		}
	}
}

func TestVersionsAreReported(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		if got := int(r.word(r.either("cuDriverGetVersion", "hipRuntimeGetVersion"))); got != o.Version {
			t.Errorf("version %d", got)
		}
	})
}

func TestGetProcAddress(t *testing.T) {
	for _, c := range []struct {
		driver  int
		name    string
		version uintptr
		symbol  string
		status  uint64
	}{
		{CUDA124, "cuMemcpyBatchAsync", 12080, "", 1},
		{CUDA128, "cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync", 0},
		{CUDA128, "cuMemcpyBatchAsync", 12040, "", 2},
		{CUDA130, "cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync", 0},
		{CUDA130, "cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2", 0},
		{CUDA130, "cuMemcpy2DAsync", 12040, "cuMemcpy2DAsync_v2", 0},
		{CUDA130, "cuMemcpy2DAsync_v2", 12040, "", 1},
		{CUDA130, "cuMemcpyAsync", 12040, "cuMemcpyAsync", 0},
		{CUDA130, "cuNoSuchThing", 13000, "", 1},
	} {
		r := newRig(t, Options{Version: c.driver})
		r.args.PutString(64, c.name)
		r.args.Words[1], r.args.Words[2] = 1, 9
		a := r.args.Addr
		r.must("cuGetProcAddress_v2", a+64, a+8, c.version, 0, a+16)
		var want dl.Func
		if c.symbol != "" {
			want = r.Find(c.symbol)
		}
		if got := dl.Func(r.args.Words[1]); got != want || r.args.Words[2] != c.status {
			t.Errorf("%s at %d of %d: %#x, status %d; want %#x, %d", c.name, c.version, c.driver, got, r.args.Words[2], want, c.status)
		}
	}
}

func TestErrorNames(t *testing.T) {
	r := newRig(t, Options{})
	if got := dl.GoString(r.word2("cuGetErrorName", launchFailed)); got != "CUDA_ERROR_LAUNCH_FAILED" {
		t.Error(got)
	}
	r.args.Words[0] = 1
	r.want(invalidValue, "cuGetErrorName", 12345, r.args.Addr)
	if r.args.Words[0] != 0 {
		t.Error("a code that is not known has a name")
	}
	h := Load(t, Options{Vendor: HIP})
	if got := dl.GoString(h.Find("hipGetErrorName").Call(12)); got != "hipErrorInvalidPitchValue" {
		t.Error(got)
	}
}

// word2 calls a function whose second argument is where its answer goes.
func (r *rig) word2(name string, arg uintptr) uintptr {
	r.tb.Helper()
	r.must(name, arg, r.args.Addr)
	return uintptr(r.args.Words[0])
}

func TestDevices(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		uuid := func(o Options, device uintptr) string {
			o.Vendor = vendor
			r := newRig(t, o)
			r.must(r.either("cuDeviceGetUuid_v2", "hipDeviceGetUuid"), r.args.Addr, device)
			return fmt.Sprintf("%x", r.args.Bytes[:16])
		}
		all := map[string]bool{}
		for i := range uintptr(3) {
			all[uuid(Options{Devices: 3}, i)] = true
		}
		if len(all) != 3 {
			t.Errorf("%s: UUIDs %v", vendor, slices.Collect(maps.Keys(all)))
		}
		if uuid(Options{Visible: []int{1, 0}}, 0) != uuid(Options{}, 1) {
			t.Errorf("%s: an ordinal is not what is visible", vendor)
		}
	}
	none := Load(t, Options{Devices: -1})
	if code := int32(none.Find("cuInit").Call(0)); code != 100 {
		t.Errorf("no device: %d", code)
	}
}

// TestSourcesCompileWithoutWarnings: all of them, of all versions, as strictly as the
// compiler can be asked to be.
func TestSourcesCompileWithoutWarnings(t *testing.T) {
	compiler := strings.Fields(os.Getenv("CC"))
	if len(compiler) == 0 {
		compiler = []string{"cc"}
	}
	if _, err := exec.LookPath(compiler[0]); err != nil {
		needtest.Missing(t, err.Error())
	}
	for version, files := range map[int][]string{CUDA124: cudaFiles, CUDA130: cudaFiles, ROCm64: hipFiles, ROCm713: hipFiles, CUDA128: runtimeFiles} {
		args := append(slices.Clone(compiler[1:]), "-fsyntax-only", "-Werror", fmt.Sprintf("-DFAKE_VERSION=%d", version))
		args = append(append(args, flags[2:]...), files...)
		cmd := exec.CommandContext(t.Context(), compiler[0], args...)
		cmd.Dir = "csrc"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%d: %v\n%s", version, err, out)
		}
	}
}
