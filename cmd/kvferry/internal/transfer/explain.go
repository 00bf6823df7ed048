package transfer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// PeerError is why a read failed whose flags and input are all right: its owner, or what is
// between, has gone, refuses for now or doesn't answer. Another try may go well.
type PeerError struct{ Err error }

func (e *PeerError) Error() string { return e.Err.Error() }

// Unwrap returns the error that has the kind.
func (e *PeerError) Unwrap() error { return e.Err }

const (
	stillRunning = "is kvferry transfer serve still running? Start it again, and give its new descriptor"
	copyAgain    = "copy the descriptor again, or give serve a longer --lease"
)

// explain adds to an error of the reader what the user of two terminals can do, and says
// whose it is.
func (r *readRun) explain(err error) error {
	kind, cause, name := fault.KindOf(err), err, r.engine()
	if kind == 0 || errors.Is(err, context.Canceled) {
		return err
	}
	f := r.opens.telling()
	if f != nil && !errors.Is(err, context.DeadlineExceeded) {
		// Of several ways that lead nowhere the first is often one of another host's.
		if k := fault.KindOf(f.err); k != 0 {
			kind = k
		}
		cause, name = f.err, f.engine
	}
	local := r.engines.LibraryFailed(name, cause) || kind == fault.Device && r.opened.Accelerator != nil && r.opened.Accelerator.Lost() != nil
	hint := r.engines.Remedy(name, cause)
	switch {
	case local:
	case kind == fault.NotFound && !r.d.Expires.IsZero() && !time.Now().Before(r.d.Expires):
		hint = copyAgain
	case kind == fault.NotFound && f == nil && r.opens.engine() != "": // it was reached
		hint = "is kvferry transfer serve still running? If it is, " + copyAgain
	case kind == fault.NotFound && hint == "":
		hint = stillRunning
	case errors.Is(err, context.DeadlineExceeded):
		hint = "the owner, or what is between, is slower than --deadline " + r.o.Deadline.String() + ", or was stopped"
	case kind == fault.Busy && hint == "":
		hint = "the owner, or what is between, doesn't answer: it may be stopped, or a firewall may drop what it is sent"
	case kind == fault.Unsupported && name == "":
		hint = r.engines.Missing(r.offers())
	}
	explained := fault.Wrap(kind, "", err)
	if hint != "" {
		explained = explained.Hint("%s", hint)
	}
	switch kind {
	case fault.NotFound, fault.Busy, fault.Device, fault.Closed, fault.Full:
		if !local {
			return &PeerError{explained}
		}
	case fault.Invalid, fault.Exists, fault.Corrupt, fault.Memory, fault.Unsupported:
	}
	return explained
}

// explainSeed adds to an error about wrong bytes that the seed may be what is wrong.
func (r *readRun) explainSeed(err error) error {
	said, known := seedOf(r.d)
	if !errors.Is(err, fault.Corrupt) || r.o.Seed == nil || !known || said == *r.o.Seed {
		return err
	}
	return fault.Wrap(fault.Corrupt, "", err).Hint("--seed says %d, the descriptor says %d: leave --seed out", *r.o.Seed, said)
}

func (r *readRun) offers() (names []string) {
	for _, o := range r.d.Offers {
		names = append(names, o.Engine)
	}
	return names
}

// engine is the one that is used: or, while there is none, the owner's first choice of
// those that this side has.
func (r *readRun) engine() string {
	if name := r.opens.engine(); name != "" || r.engines == nil {
		return name
	}
	ours := r.engines.Names()
	for _, name := range r.offers() {
		if slices.Contains(ours, name) {
			return name
		}
	}
	return ""
}

// opens is what came of opening the owner. A read that was given up may still be at it.
type opens struct {
	mu     sync.Mutex
	last   string       // guarded by mu; the engine that has opened it; "" before
	failed []failedOpen // guarded by mu; of this read, since one went well
}

type failedOpen struct {
	engine string
	err    error
}

// begin begins a read.
func (o *opens) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failed = nil
}

func (o *opens) add(engine string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		o.failed = append(o.failed, failedOpen{engine, err})
		return
	}
	o.last, o.failed = engine, nil
}

func (o *opens) engine() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last
}

// telling is the failure that says most, of those of a read that got no further: engines
// for one host are offered to readers on others, too, where they find nothing. Nil when
// there is none.
func (o *opens) telling() (most *failedOpen) {
	o.mu.Lock()
	defer o.mu.Unlock()
	best := -1
	for i, f := range o.failed {
		weight := 0
		if engines.Network(f.engine) {
			weight += 2
		}
		if !errors.Is(f.err, fault.NotFound) {
			weight++
		}
		if weight >= best {
			best, most = weight, &o.failed[i]
		}
	}
	return most
}

// seen returns the engines, which now say which of them opens the owner.
func (r *readRun) seen(all []transfer.Engine) (out []transfer.Engine) {
	for _, e := range all {
		out = append(out, seenEngine{e, &r.opens})
	}
	return out
}

type seenEngine struct {
	transfer.Engine
	opens *opens
}

// Open implements [transfer.Engine].
func (e seenEngine) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	s, err := e.Engine.Open(ctx, t, d, offer)
	e.opens.add(e.Name(), err)
	return s, err
}
