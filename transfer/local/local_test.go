package local_test

import (
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/local"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// harness has both sides of one engine in this process.
func harness() transfertest.Harness {
	e := local.New()
	return transfertest.Harness{
		Owner:  func(g *kv.Geometry, seed uint64) (transfertest.Owner, error) { return transfertest.Serve(g, seed, e) },
		Engine: func() (transfer.Engine, error) { return e, nil },
	}
}

func TestEngine_PassesTheSuite(t *testing.T) { transfertest.Run(t, harness()) }

func TestEngine_NegativeControls(t *testing.T) { transfertest.Controls(t, harness()) }
