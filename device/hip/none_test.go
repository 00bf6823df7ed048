//go:build nogpu

package hip_test

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
)

func TestOpen_SaysThatThisBuildCannot(t *testing.T) {
	for _, library := range []string{"", "libc.so.6", "/nonexistent"} {
		_, err1 := hip.Open("0", hip.Options{Library: library})
		_, err2 := hip.List(hip.Options{Library: library})
		for _, err := range []error{err1, err2} {
			if !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
				t.Errorf("%q: %v", library, err)
			}
		}
	}
}
