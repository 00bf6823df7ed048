package hostipc

import (
	"os"
	"testing"

	"github.com/kvferry/kvferry/transfer/transfertest"
)

// harness has owners with that kind of memory in processes of their own.
func harness(t *testing.T, kind string) transfertest.Harness {
	t.Helper()
	dir := directory(t)
	t.Setenv(dirVariable, dir)
	// What the killed have left is gone with the next owner, at the latest.
	t.Cleanup(func() {
		s := must(side(mapped, dir))(t)
		_, withdraw, err := s.Engine.Offer(smallExport(t))
		noError(t, err)
		withdraw()
		if left := must(os.ReadDir(dir))(t); len(left) > 0 {
			t.Errorf("%v are left", left)
		}
	})
	return transfertest.Harness{Role: kind, Reader: func() (transfertest.Side, error) { return side(mapped, dir) }}
}

func TestSuite(t *testing.T) {
	for _, kind := range []string{mapped, pieces, wrapped, refused} {
		t.Run(kind, func(t *testing.T) {
			nothingLeft(t)
			transfertest.Run(t, harness(t, kind))
		})
	}
}

// Both sides may be in one process: an engine, and what it embeds.
func TestSuite_OneProcess(t *testing.T) {
	for _, kind := range []string{mapped, wrapped} {
		t.Run(kind, func(t *testing.T) {
			nothingLeft(t)
			dir := directory(t)
			transfertest.Run(t, transfertest.Harness{
				Owner:  func() (transfertest.Side, error) { return side(kind, dir) },
				Reader: func() (transfertest.Side, error) { return side(mapped, dir) },
			})
		})
	}
}

func TestControls(t *testing.T) {
	for _, kind := range []string{mapped, wrapped} {
		t.Run(kind, func(t *testing.T) { transfertest.Controls(t, harness(t, kind)) })
	}
}
