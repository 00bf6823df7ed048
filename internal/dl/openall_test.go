//go:build !nogpu && (amd64 || arm64)

package dl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/needtest"
)

// shared makes a library of that source, which may call what others have.
func shared(tb testing.TB, source string) string {
	tb.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		needtest.Missing(tb, errNoCompiler.Error())
	}
	dir := tb.TempDir()
	in, out := filepath.Join(dir, "in.c"), filepath.Join(dir, "lib.so")
	if err := os.WriteFile(in, []byte(source), 0o666); err != nil {
		tb.Fatal(err)
	}
	if said, err := exec.CommandContext(tb.Context(), cc, "-fPIC", "-shared", "-o", out, in).CombinedOutput(); err != nil {
		tb.Fatalf("%v\n%s", err, said)
	}
	return out
}

func TestOpenAll_LetsEachUseThoseBeforeIt(t *testing.T) {
	first := shared(t, "int kvferry_dl_test_first(void) { return 41; }")
	second := shared(t, "int kvferry_dl_test_first(void); int second(void) { return kvferry_dl_test_first() + 1; }")
	if _, err := Open(second); !errors.Is(err, fault.NotFound) { // the control: alone it lacks a symbol
		t.Errorf("alone: error %v, want kind not found", err)
	}
	l, err := OpenAll(first, second)
	if err != nil {
		t.Fatal(err)
	}
	if l.Name() != second {
		t.Errorf("the last is %s", l.Name())
	}
	if n := int32(l.Find("second").Call()); n != 42 {
		t.Errorf("it returns %d", n)
	}
}

func TestOpenAll_NamesWhatIsMissing(t *testing.T) {
	if _, err := OpenAll(); !errors.Is(err, fault.NotFound) {
		t.Errorf("of nothing: error %v, want kind not found", err)
	}
	_, err := OpenAll(shared(t, "int x;"), "/nowhere/libgone.so", "/nowhere/libnext.so")
	if !errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "libgone.so") || strings.Contains(err.Error(), "libnext.so") {
		t.Errorf("error %v, want the first that is missing", err)
	}
}
