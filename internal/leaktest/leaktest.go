// Package leaktest ends the tests of a package with a look at what they left behind:
// goroutines, and mappings and descriptors of host memory. Memory outside the Go heap
// is nobody's to collect, so that a test that passes and forgets some is a leak in the
// making.
package leaktest

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// memfd is how the host device's memory is named in /proc.
const memfd = "memfd:kvferry-"

// Main is the TestMain of a package: it runs the tests, and fails them when they pass
// and have left something behind.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		for _, find := range []func() error{func() error { return goleak.Find() }, HostMemory} {
			if err := find(); err != nil {
				fmt.Fprintln(os.Stderr, "left behind:", err)
				code = 1
			}
		}
	}
	os.Exit(code) //nolint:forbidigo // a TestMain ends the process
}

// HostMemory names the mappings and descriptors of host memory that are open, nil when
// there are none.
func HostMemory() error {
	maps, fds, err := CountHostMemory()
	if err == nil && maps+fds > 0 {
		err = fmt.Errorf("%d mappings and %d descriptors of host memory", maps, fds)
	}
	return err
}

// CountHostMemory counts the mappings and descriptors of host memory that are open.
func CountHostMemory() (maps, fds int, err error) {
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0, 0, err
	}
	maps = strings.Count(string(text), memfd)
	dir, err := os.ReadDir("/proc/self/fd")
	for _, fd := range dir {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(to, memfd) {
			fds++
		}
	}
	return maps, fds, err
}
