// Package needtest is for tests that need what not every machine has: a compiler, a
// vendor's library, a file.
package needtest

import (
	"os"
	"testing"
)

// Missing ends a test that needs something which this machine lacks: a skip, but in CI,
// where everything must be there, a failure.
func Missing(tb testing.TB, what any) {
	tb.Helper()
	if os.Getenv("CI") != "" {
		tb.Fatal(what)
	}
	tb.Skip(what)
}
