package mooncake_test

import (
	"testing"

	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// harness has owners and readers in processes of their own, both by the real library.
func harness(tb testing.TB, role string, o mooncake.Options) transfertest.Harness {
	tb.Helper()
	need(tb)
	return transfertest.Harness{
		Role:   role,
		Reader: func() (transfertest.Side, error) { return side(o) },
		Unseen: true,
	}
}

func TestEngine_PassesTheSuiteInChildren(t *testing.T) {
	transfertest.Run(t, harness(t, "child", mooncake.Options{}))
}

func TestEngine_PassesTheSuiteInProcess(t *testing.T) {
	transfertest.Run(t, harness(t, "in process", mooncake.Options{InProcess: true}))
}
