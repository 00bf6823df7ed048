package hostipc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// patience turns a hang into a message.
const patience = 20 * time.Second

// dirVariable tells processes that a test starts where the sockets are.
const dirVariable = "KVFERRY_TEST_HOSTIPC"

func TestMain(m *testing.M) {
	roles := map[string]func() (transfertest.Side, error){}
	for _, kind := range []string{mapped, pieces, wrapped, refused} {
		roles[kind] = func() (transfertest.Side, error) { return side(kind, os.Getenv(dirVariable)) }
	}
	transfertest.Child(roles)
	child()
	leaktest.Main(m)
}

// The kinds of an owner's memory.
const (
	mapped  = "mapped"               // of a host device: one memfd a region
	pieces  = "pieces"               // memfds of 3 pages, mapped side by side
	wrapped = "process"              // an engine's own: no memfd
	refused = "shareable by process" // memfds that are not shared, so that Offer has both
)

// side is one side over memory of a kind.
func side(kind, dir string) (s transfertest.Side, err error) {
	e, err := New(Options{Dir: dir, unmappable: kind == refused})
	if err != nil {
		return s, err
	}
	s.Engine = e
	var ends []func() error
	switch kind {
	case pieces:
		host, err := device.OpenHost(device.HostOptions{PieceBytes: 3 * int64(os.Getpagesize())})
		if err != nil {
			return s, err
		}
		ends = append(ends, host.Close)
		s.Memory = host.Alloc
	case wrapped:
		s.Memory = func(n int64) (*device.Memory, error) {
			b, err := unix.Mmap(-1, 0, int(max(n, 1)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			ends = append(ends, func() error { return unix.Munmap(b) })
			return device.WrapHost(b[:n]), err
		}
	}
	s.Close = func() error {
		var errs []error
		for _, end := range ends {
			errs = append(errs, end())
		}
		return errors.Join(errs...)
	}
	return s, nil
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		return v
	}
}

func wantKind(t testing.TB, err error, kind fault.Kind, text string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("error %v, want kind %q and %q", err, kind, text)
	}
}

// directory is for sockets: its path is short. Nothing is left in it when a test ends.
func directory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipc") //nolint:usetesting // the test's name would be in its path
	noError(t, err)
	t.Cleanup(func() { noError(t, os.RemoveAll(dir)) })
	return filepath.Join(dir, "s")
}

// nothingLeft fails a test that leaves descriptors, or mappings of shared memory.
func nothingLeft(t testing.TB) {
	t.Helper()
	files, maps := count(t)
	t.Cleanup(func() {
		if f, m := count(t); f != files || m != maps {
			t.Errorf("%d descriptors and %d mappings are left, there were %d and %d", f, m, files, maps)
		}
	})
}

func count(t testing.TB) (files, maps int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	noError(t, err)
	for _, e := range all {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(to, "anon_inode:[event") { // the runtime's own
			files++
		}
	}
	text, err := os.ReadFile("/proc/self/maps")
	noError(t, err)
	return files, strings.Count(string(text), "memfd:")
}
