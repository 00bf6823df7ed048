package kvferry

import (
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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

// equal fails the test unless got is want.
func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}
