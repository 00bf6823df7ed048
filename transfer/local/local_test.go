package local_test

import (
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/local"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// harness has both sides of one engine in this process.
func harness() transfertest.Harness {
	e := local.New()
	side := func() (transfertest.Side, error) { return transfertest.Side{Engine: e}, nil }
	return transfertest.Harness{Owner: side, Reader: side}
}

func TestEngine_PassesTheSuite(t *testing.T) { transfertest.Run(t, harness()) }

func TestEngine_NegativeControls(t *testing.T) { transfertest.Controls(t, harness()) }
