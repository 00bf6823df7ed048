package faulttest_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

// failed is a test that only notes that it failed.
type failed bool

func (*failed) Helper() {}

func (f *failed) Fatalf(string, ...any) { *f = true }

func TestRefused_FailsUnlessKindAndWordsAreThere(t *testing.T) {
	full := fmt.Errorf("offload: %w", fault.New(fault.Full, "pool", "asked 3, free 2"))
	for _, c := range []struct {
		name  string
		err   error
		words []string
		want  failed
	}{
		{"kind", full, nil, false},
		{"words", full, []string{"asked 3", "offload"}, false},
		{"one word is missing", full, []string{"asked 3", "remedy"}, true},
		{"no error", nil, nil, true},
		{"no kind", errors.New("full"), nil, true},
		{"another kind first", fault.Wrap(fault.Device, "copy", full), nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got failed
			defer func() {
				if got != c.want {
					t.Errorf("failed: %v, want %v", got, c.want)
				}
			}()
			faulttest.Refused(&got, c.err, fault.Full, c.words...)
		})
	}
}
