package kvferry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
)

// patience ends a call that waits although it must not, so that the test fails
// rather than hangs.
func patience(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// unordered makes the engine forget to tell the manager about its stream: what the
// manager then does not order must go wrong, or the test of it proves nothing.
func unordered(t *testing.T, o Options, ordered bool) *engine {
	t.Helper()
	e := newEngine(t, geometry(t, shape), o, ordered)
	if !ordered {
		e.compute = must(e.dev.NewStream("compute"))(t)
	}
	return e
}

// busy is a copy that is about nothing.
func (e *engine) busy() []device.Op {
	dst, to, _ := e.g.stage([]byte{1})
	src, from, _ := e.g.stage([]byte{2})
	return []device.Op{{Dst: dst, DstOff: to, Src: src, SrcOff: from, Bytes: 1}}
}

func TestCompute_HeldBackNobodyWaits(t *testing.T) {
	tokens := text(1, 0, 18)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, true)
	e.cold(tokens[:8])
	release := e.hold(e.compute)
	// Something of the engine's is under way: a stream with nothing to do holds nobody up.
	noError(t, e.compute.Copy(e.busy()))
	r := must(e.ingest("a", tokens, 18))(t)
	equal(t, "matched", must(r.match())(t).Pages, 2)
	noError(t, r.admit(patience(t), 14))
	equal(t, "prefix arrived while the engine is held", r.adm.Done(), false)
	noError(t, r.commit(14))
	noError(t, r.admit(patience(t), 18))
	noError(t, r.commit(18))
	e.check()
	release()
	r.verified()
	noError(t, r.adm.Wait(t.Context()))
	e.check()
	noError(t, r.s.Remove())
	equal(t, "pages shared", e.m.store.Stats().Entries, 4)
	again := e.serve("b", tokens)
	again.verified()
}

// A load is not read before it has arrived.
func TestCompute_ReadsBehindTheLoad(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		t.Run(fmt.Sprint("ordered=", ordered), func(t *testing.T) {
			tokens := text(1, 0, 9)
			e := unordered(t, Options{HostPages: 4}, ordered)
			r := e.serve("before", tokens)
			r.verified()
			noError(t, r.s.Remove())
			e.evict(2)

			r = must(e.ingest("a", tokens, 9))(t)
			equal(t, "matched", must(r.match())(t).Pages, 2)
			region := must(e.cache.Region(0))(t)
			e.g.poke(region, 0, make([]byte, region.Size())) // what the device held is gone
			release := e.hold(e.m.Copies())
			noError(t, r.admit(t.Context(), 9))
			wait := must(r.readLater(0, 8))(t)
			if !ordered {
				_, err := wait() // the engine does not wait for anybody
				noError(t, err)
			}
			release()
			got := must(wait())(t)
			equal(t, "right bytes", bytes.Equal(got, wanted(r.trail[:8], 0, e.row)), ordered)
			e.g.raced(!ordered)
		})
	}
}

// A load does not overwrite a page that the engine is still reading.
func TestCompute_LoadWaitsForReads(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		t.Run(fmt.Sprint("ordered=", ordered), func(t *testing.T) {
			tokens := text(1, 0, 9)
			e := unordered(t, Options{HostPages: 4}, ordered)
			r := e.serve("before", tokens)
			r.verified()
			noError(t, r.s.Remove())
			e.evict(2)

			reader := must(e.ingest("reader", text(2, 0, 32), 32))(t) // has every page
			noError(t, reader.admit(t.Context(), 32))
			noError(t, reader.write(0, 32))
			noError(t, e.compute.Sync(t.Context()))
			release := e.hold(e.compute)
			wait := must(reader.readLater(0, 32))(t)
			noError(t, reader.s.Remove()) // never committed: its pages are free at once

			r = must(e.ingest("a", tokens, 9))(t)
			equal(t, "matched", must(r.match())(t).Pages, 2)
			noError(t, r.admit(patience(t), 9))
			if !ordered {
				noError(t, r.adm.Wait(patience(t)))
			}
			release()
			got := must(wait())(t)
			equal(t, "right bytes", bytes.Equal(got, wanted(reader.trail[:32], 0, e.row)), ordered)
			noError(t, r.adm.Wait(t.Context()))
			e.g.raced(!ordered)
		})
	}
}

// A page on its way to the host is complete before it is read.
func TestCompute_DemotionWaitsForWrites(t *testing.T) {
	for _, ordered := range []bool{true, false} {
		t.Run(fmt.Sprint("ordered=", ordered), func(t *testing.T) {
			tokens := text(1, 0, 9)
			e := unordered(t, Options{HostPages: 4}, ordered)
			release := e.hold(e.compute)
			r := must(e.ingest("a", tokens, 9))(t)
			noError(t, r.admit(t.Context(), 9))
			noError(t, r.commit(9)) // the writes are enqueued, not done
			noError(t, r.s.Remove())
			if ordered {
				canceled, cancel := context.WithCancel(t.Context())
				cancel()
				_, err := e.m.store.Evict(canceled, 2) // enqueues the copies
				equal(t, "waits for the engine", errors.Is(err, context.Canceled), true)
			} else {
				e.evict(2)
			}
			release()
			noError(t, errors.Join(e.compute.Sync(t.Context()), e.m.Copies().Sync(t.Context())))

			r = must(e.ingest("b", tokens, 9))(t)
			equal(t, "matched", must(r.match())(t).Pages, 2)
			noError(t, r.admit(patience(t), 9))
			noError(t, r.adm.Wait(t.Context()))
			got := must(must(r.readLater(0, 8))(t)())(t)
			equal(t, "right bytes", bytes.Equal(got, wanted(r.trail[:8], 0, e.row)), ordered)
			e.check()
			e.g.raced(!ordered)
		})
	}
}

// A stream that cannot be ordered with the copies is an error of the copies, never
// a silent race.
func TestCompute_FailedStreamIsReported(t *testing.T) {
	tokens := text(1, 0, 9)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, true)
	e.cold(tokens)
	e.failed = true
	e.cable = e.g.fail(e.compute)
	noError(t, e.compute.Copy(e.busy()))
	equal(t, "failed", errors.Is(e.compute.Sync(t.Context()), e.cable), true)
	r := must(e.ingest("a", tokens, 9))(t)
	equal(t, "matched", must(r.match())(t).Pages, 2)
	noError(t, r.admit(t.Context(), 9))
	equal(t, "reported", errors.Is(r.adm.Wait(t.Context()), e.cable), true)
	equal(t, "refused", r.s.Commit(1) != nil, true)
	noError(t, r.s.Remove())
	e.check()
}
