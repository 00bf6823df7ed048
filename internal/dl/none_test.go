//go:build nogpu || !(amd64 || arm64)

package dl

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

func TestOpen_RefusesInABuildWithoutLibraries(t *testing.T) {
	for _, names := range [][]string{{"libc.so.6", "libm.so.6"}, {"/nowhere/lib.so"}, nil} {
		l, err := Open(names...)
		if l != nil || !errors.Is(err, fault.Unsupported) {
			t.Fatalf("%v: got %v, %v", names, l, err)
		}
		if len(names) > 0 && !strings.Contains(err.Error(), names[0]) {
			t.Errorf("%v is not in %q", names[0], err)
		}
		if !strings.Contains(fault.RemedyOf(err), "nogpu") {
			t.Errorf("the remedy is %q", fault.RemedyOf(err))
		}
	}
	if f := (*Library)(nil).Find("malloc"); f != 0 {
		t.Errorf("found %v", f)
	}
}

func TestCall_OfNothingPanics(t *testing.T) {
	for name, call := range map[string]func(){
		"Call":       func() { Func(1).Call() },
		"CallHandle": func() { Func(1).CallHandle(0, nil, 0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s returned", name)
				}
			}()
			call()
		}()
	}
}
