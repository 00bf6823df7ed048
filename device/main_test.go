package device

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails the package when its tests leave a goroutine, a mapping or a
// file descriptor of host memory behind.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		for _, err := range []error{goleak.Find(), leftover()} {
			if err != nil {
				fmt.Fprintln(os.Stderr, "left behind:", err)
				code = 1
			}
		}
	}
	os.Exit(code)
}

// leftover names a mapping or descriptor of a memfd of ours.
func leftover() error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:kvferry-") {
			return fmt.Errorf("mapping %s", line)
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(to, "memfd:kvferry-") {
			return fmt.Errorf("descriptor %s of %s", fd.Name(), to)
		}
	}
	return nil
}
