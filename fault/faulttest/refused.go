// Package faulttest says what tests expect of an error: its kind, and what a reader
// must find in its text.
package faulttest

import (
	"strings"

	"github.com/kvferry/kvferry/fault"
)

// TB is what Refused needs of a *testing.T, a *testing.B or a *rapid.T.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
}

// Refused fails the test unless err is of the given kind, before any other, and says
// all of words.
func Refused(t TB, err error, kind fault.Kind, words ...string) {
	t.Helper()
	if got := fault.KindOf(err); got != kind {
		t.Fatalf("got error %v of kind %v, want kind %v", err, got, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("error %q does not say %q", err, w)
		}
	}
}
