package page

import (
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
)

// tb is what helpers need of a *testing.T, a *testing.B or a *rapid.T.
type tb interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func TestMain(m *testing.M) { leaktest.Main(m) }

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
