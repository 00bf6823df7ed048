package local

import (
	"context"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// Only is the engine of a cache that shares with nobody: it offers nothing, so there is
// no descriptor, and refuses to read. An empty read needs no engine and succeeds.
type Only struct{}

var _ transfer.Engine = Only{}

// Name returns "local-only".
func (Only) Name() string { return "local-only" }

// Offer implements [transfer.Engine]: there is none.
func (Only) Offer(transfer.Export) (offer []byte, withdraw func(), err error) { return nil, nil, nil }

// Open implements [transfer.Engine]. Kind: fault.Unsupported.
func (Only) Open(context.Context, transfer.Target, *transfer.Descriptor, []byte) (transfer.Source, error) {
	return nil, fault.New(fault.Unsupported, "engine local-only", "reads nobody's pages").Hint("give both sides an engine that does")
}

// Close does nothing.
func (Only) Close() error { return nil }
