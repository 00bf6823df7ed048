package kvferry

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/fault"
)

// TestMain fails the package when its tests leave a goroutine, a mapping or a file
// descriptor of host memory behind.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		left := goleak.Find()
		maps, fds, err := hostMemory()
		if left == nil {
			left = err
		}
		if left == nil && maps+fds > 0 {
			left = fmt.Errorf("%d mappings and %d descriptors of host memory", maps, fds)
		}
		if left != nil {
			fmt.Fprintln(os.Stderr, "left behind:", left)
			code = 1
		}
	}
	os.Exit(code)
}

// hostMemory counts the mappings and descriptors of memfds that are ours.
func hostMemory() (maps, fds int, err error) {
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0, 0, err
	}
	maps = strings.Count(string(text), "memfd:kvferry-")
	dir, err := os.ReadDir("/proc/self/fd")
	for _, fd := range dir {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(to, "memfd:kvferry-") {
			fds++
		}
	}
	return maps, fds, err
}

// noError fails the test when err is not nil.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// must is noError for calls that return a value too.
func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		return v
	}
}

// refused fails the test unless err is of the given kind and says all of words.
func refused(t testing.TB, err error, kind fault.Kind, words ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Fatalf("got error %v, want kind %v", err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("error %q does not say %q", err, w)
		}
	}
}

// equal fails the test unless got is want.
func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}
