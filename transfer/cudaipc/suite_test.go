//go:build !nogpu

package cudaipc

import (
	"testing"

	"github.com/kvferry/kvferry/transfer/transfertest"
)

// TestSuite runs the suite with owners in processes of their own.
func TestSuite(t *testing.T) {
	for _, c := range configs() {
		t.Run(c.String(), func(t *testing.T) {
			g := newGround(t, c)
			transfertest.Run(t, transfertest.Harness{Role: c.String(), Reader: g.side})
		})
	}
}

func TestControls(t *testing.T) {
	c := configs()[0]
	g := newGround(t, c)
	transfertest.Controls(t, transfertest.Harness{Role: c.String(), Reader: g.side})
}
