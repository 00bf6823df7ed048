package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/needtest"
	"golang.org/x/sys/unix"
)

// fetch runs the script fetch for a folder, where nobody serves PyPI.
func fetch(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	if err := exec.CommandContext(t.Context(), "python3", "-m", "pip", "--version").Run(); err != nil {
		needtest.Missing(t, "no python3 with pip")
	}
	c := exec.CommandContext(t.Context(), "./fetch")
	c.Env = append(os.Environ(), "KVFERRY_VENDOR="+dir, "PIP_INDEX_URL=http://127.0.0.1:9/simple", "PIP_RETRIES=0",
		"PIP_NO_INDEX=", "PIP_EXTRA_INDEX_URL=", "PIP_FIND_LINKS=", "PIP_CONFIG_FILE=/dev/null")
	return c
}

// entries are the names in a folder, but for the lock.
func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	for _, e := range must(os.ReadDir(dir))(t) {
		if e.Name() != ".lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestFetch_SaysThatNothingIsWithinReach(t *testing.T) {
	dir := t.TempDir()
	said, err := fetch(t, dir).CombinedOutput()
	if err == nil || !strings.Contains(string(said), "e2e/fetch: mooncake-transfer-engine-npu==0.3.13.post1 was not fetched") {
		t.Errorf("error %v, and it says\n%s", err, said)
	}
	if left := entries(t, filepath.Join(dir, "mooncake")); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}

// What an interrupted one has left is removed, and what lacks a part is fetched anew.
func TestFetch_TakesNoHalfForWhole(t *testing.T) {
	libraries(t)
	dir := t.TempDir()
	at := filepath.Join(dir, "mooncake")
	noError(t, os.MkdirAll(filepath.Join(at, "tmp.abc", "lib"), 0o700))
	pins := string(must(os.ReadFile(filepath.Join(fetched(), "pins")))(t))
	old := must(filepath.Abs(fetched()))(t)
	noError(t, os.WriteFile(filepath.Join(at, "pins"), []byte(strings.Replace(pins, old, at, 1)), 0o600))
	if said, err := fetch(t, dir).CombinedOutput(); err == nil {
		t.Errorf("it takes pins without a library for all:\n%s", said)
	}
	if left := entries(t, at); len(left) != 1 || left[0] != "pins" {
		t.Errorf("it leaves %v", left)
	}
}

// The control of the test before: what is there is not fetched again. Two at a time: the
// second waits for the first.
func TestFetch_WaitsForAnother(t *testing.T) {
	libraries(t)
	dir := must(filepath.Abs(filepath.Dir(fetched())))(t)
	lock := must(os.OpenFile(filepath.Join(fetched(), ".lock"), os.O_CREATE|os.O_RDWR, 0o600))(t)
	defer func() { _ = lock.Close() }() // which unlocks it
	noError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	c := fetch(t, dir)
	noError(t, c.Start())
	over := make(chan error, 1)
	go func() { over <- c.Wait() }()
	select {
	case err := <-over:
		t.Fatalf("it does not wait: error %v", err)
	case <-waiting(t):
	}
	noError(t, unix.Flock(int(lock.Fd()), unix.LOCK_UN))
	noError(t, <-over)
}

// waiting is closed when somebody waits for a lock.
func waiting(t *testing.T) <-chan struct{} {
	t.Helper()
	found := make(chan struct{})
	go func() {
		defer close(found)
		limit := time.After(patience)
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			locks, err := os.ReadFile("/proc/locks")
			if err != nil || strings.Contains(string(locks), "-> FLOCK") {
				return
			}
			select {
			case <-tick.C:
			case <-limit:
				t.Error("nobody waits for the lock")
				return
			}
		}
	}()
	return found
}
