//go:build !nogpu

package cuda

import (
	"testing"

	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// LookUp opens a library and returns what finds its functions.
func LookUp(tb testing.TB, path string) func(name string, version int) bool {
	tb.Helper()
	opened, err := dl.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	find, err := resolver(&gpu.Library{}, opened)
	if err != nil {
		tb.Fatal(err)
	}
	return func(name string, version int) bool { return find(abi.Call{Name: name, Version: version}) != 0 }
}

// Bound calls f on a thread that is bound to the device.
func (d *Driver) Bound(f func()) error {
	if err := d.dev.Enter(); err != nil {
		return err
	}
	defer d.dev.Leave()
	f()
	return nil
}

// BatchWords returns how many words a driver's batches take, 0 when it has none.
func BatchWords(tb testing.TB, path string) int {
	tb.Helper()
	lib, err := load(Options{Library: path})
	if err != nil {
		tb.Fatal(err)
	}
	defer lib.Blocks.Close()
	_, form, no := batchForm(lib)
	switch {
	case no != "":
		return 0
	case form.FailedAt:
		return 9
	}
	return 8
}
