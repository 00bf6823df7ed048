//go:build !nogpu

package cuda_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/needtest"
)

// stub compiles testdata/stub.c to be like what its enum says, and returns its path.
func stub(tb testing.TB, like string) string {
	tb.Helper()
	kinds := []string{"", "absent", "old", "broken", "empty", "stub", "newer", "lookup", "twin"}
	i := slices.Index(kinds, like)
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		needtest.Missing(tb, "no C compiler: "+err.Error())
	}
	out := filepath.Join(tb.TempDir(), "lib"+like+".so")
	cmd := exec.CommandContext(tb.Context(), cc, "-shared", "-fPIC", "-DLIKE="+strconv.Itoa(i), "-o", out, "testdata/stub.c")
	if text, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v\n%s", cc, err, text)
	}
	return out
}

// TestLookUp_NeedsAllAnswersToAgree holds the look-up of functions to what drivers have
// answered of one that they do not have.
func TestLookUp_NeedsAllAnswersToAgree(t *testing.T) {
	find := cuda.LookUp(t, stub(t, "lookup"))
	for name, want := range map[string]bool{
		"ok": true, "error": false, "not found": false, "found nowhere": false, "not sufficient": false, "null": false,
	} {
		if got := find(name, 12000); got != want {
			t.Errorf("%s: found is %v", name, got)
		}
	}
	if find("ok", 12050) {
		t.Error("a function is asked for that is newer than the driver")
	}
	if !find("ok", 12040) {
		t.Error("a function is not found that came with the driver")
	}
}

// TestLookUp_TakesOneFunctionUnderTwoVersionsForTheOlder: a driver that answers the
// question for eight words with what takes nine would be called with eight.
func TestLookUp_TakesOneFunctionUnderTwoVersionsForTheOlder(t *testing.T) {
	if words := cuda.BatchWords(t, stub(t, "twin")); words != 9 {
		t.Errorf("batches of a driver with one function take %d words", words)
	}
	for version, want := range map[int]int{fakedriver.CUDA124: 0, fakedriver.CUDA128: 9, fakedriver.CUDA130: 8} {
		f := fakedriver.Load(t, fakedriver.Options{Version: version})
		if words := cuda.BatchWords(t, f.Path()); words != want {
			t.Errorf("batches of CUDA %d take %d words, want %d", version, words, want)
		}
	}
}
