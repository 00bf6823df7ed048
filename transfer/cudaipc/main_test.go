//go:build !nogpu

package cudaipc

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// TestMain is also what this binary does as a process of its tests.
func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(ownerVariable); ok {
		if err := runOwner(text); err != nil {
			fmt.Fprintln(os.Stderr, "owner:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	roles := map[string]func() (transfertest.Side, error){}
	for _, c := range configs() {
		roles[c.String()] = func() (transfertest.Side, error) {
			library := os.Getenv(libraryVariable)
			s, err := c.side(library, runtimeOf(library), os.Getenv(dirVariable))
			if err != nil {
				return s, err
			}
			end := s.Close
			s.Close = func() error { return errors.Join(end(), nothingLeft(library)) }
			return s, nil
		}
	}
	transfertest.Child(roles)
	leaktest.Main(m)
}
