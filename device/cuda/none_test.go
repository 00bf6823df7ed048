//go:build nogpu

package cuda_test

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
)

func TestOpen_SaysThatThisBuildCannot(t *testing.T) {
	for _, library := range []string{"", "libc.so.6", "/nonexistent"} {
		_, err1 := cuda.Open("0", cuda.Options{Library: library})
		_, err2 := cuda.List(cuda.Options{Library: library})
		for _, err := range []error{err1, err2} {
			if !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
				t.Errorf("%q: %v", library, err)
			}
		}
	}
}
