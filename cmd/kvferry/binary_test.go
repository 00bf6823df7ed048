package main

import (
	"debug/elf"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/needtest"
)

// buildBinary builds the command without cgo, as a user does, and opens it.
func buildBinary(t *testing.T, arch string, flags ...string) *elf.File {
	t.Helper()
	goTool, err := exec.LookPath("go")
	if err != nil {
		needtest.Missing(t, err)
	}
	out := filepath.Join(t.TempDir(), "kvferry")
	cmd := exec.CommandContext(t.Context(), goTool, append([]string{"build", "-o", out}, flags...)...)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, said)
	}
	f, err := elf.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// needs returns what the loader has to find before the binary starts.
func needs(t *testing.T, f *elf.File) (interpreter bool, libraries []string) {
	t.Helper()
	libraries, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }), libraries
}

func TestBinary_NeedsOnlyLibcAndNothingWithoutDevices(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		interpreter, libraries := needs(t, buildBinary(t, arch, "-tags", "nogpu"))
		if interpreter || len(libraries) > 0 {
			t.Errorf("%s with -tags nogpu: interpreter %v, libraries %v: it is not static", arch, interpreter, libraries)
		}
		_, libraries = needs(t, buildBinary(t, arch))
		for _, l := range libraries {
			if name, _, _ := strings.Cut(l, ".so."); !slices.Contains([]string{"libc", "libpthread", "libdl"}, name) {
				t.Errorf("%s: it needs %s, which is not of libc", arch, l)
			}
		}
		// A build that opens libraries is dynamic: if it is not, this test sees nothing.
		if !slices.Contains(libraries, "libc.so.6") {
			t.Errorf("%s: it needs %v, and so opens no libraries", arch, libraries)
		}
	}
}
