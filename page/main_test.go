package page

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

// tb is what helpers need of a *testing.T, a *testing.B or a *rapid.T.
type tb interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func TestMain(m *testing.M) { leaktest.Main(m) }

// refused fails the test unless err is of the given kind and names all of words.
func refused(t tb, err error, kind fault.Kind, words ...string) {
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

func must[T any](t tb) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func noError(t tb, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
