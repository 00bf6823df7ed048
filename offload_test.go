package kvferry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// poison overwrites every device page that belongs to nobody.
func (e *engine) poison() {
	e.t.Helper()
	for id := range page.ID(e.cache.Pages()) {
		if e.m.arena.Owners(id) > 0 {
			continue
		}
		for l := range e.layers {
			for _, c := range must(e.cache.Chunks(nil, l, id, 0, e.size))(e.t) {
				e.g.poke(must(e.cache.Region(c.Region))(e.t), c.Off, bytes.Repeat([]byte{0xAB}, int(c.Bytes)))
			}
		}
	}
}

// plain makes a sequence without keys whose n tokens are stored: all pages are its own.
func (e *engine) plain(id ID, seed uint32, n int) *run {
	e.t.Helper()
	tokens := text(seed, 0, n+16)
	s := must(e.m.Ingest(id, Prompt{Tokens: n}))(e.t)
	r := &run{e: e, s: s, tokens: tokens, trail: trailOf(tokens), prompt: n}
	noError(e.t, r.admit(e.t.Context(), n))
	noError(e.t, r.commit(n))
	return r
}

// stored makes sequence "a" with 9 tokens stored; with keys, two of its pages are shared.
func (e *engine) stored(keys bool) *run {
	e.t.Helper()
	if keys {
		return e.serve("a", text(1, 0, 9))
	}
	return e.plain(ID{Request: "a"}, 1, 9)
}

func (r *run) offload(freed int) {
	r.e.t.Helper()
	equal(r.e.t, "pages freed", must(r.s.Offload(r.e.t.Context()))(r.e.t), freed)
	equal(r.e.t, "offloaded", r.s.IsOffloaded(), true)
	r.e.check()
}

// back reloads r and compares every byte.
func (r *run) back() Reloaded {
	r.e.t.Helper()
	got := must(r.reload(r.e.t.Context()))(r.e.t)
	equal(r.e.t, "offloaded", r.s.IsOffloaded(), false)
	r.verified()
	r.e.check()
	return got
}

// offloading starts an Offload that waits for the copies, which are held. done waits
// for its end.
func (r *run) offloading(ctx context.Context) (release func(), done func() (int, error)) {
	r.e.t.Helper()
	release = r.e.hold(r.e.m.Copies())
	type result struct {
		freed int
		err   error
	}
	ended := make(chan result, 1)
	go func() {
		freed, err := r.s.Offload(ctx)
		ended <- result{freed, err}
	}()
	for !r.s.IsOffloaded() {
		runtime.Gosched()
	}
	return release, func() (int, error) { x := <-ended; return x.freed, x.err }
}

// settings are the ways in which the two tiers can hold pages.
var settings = map[string]Options{
	"exclusive":     {HostPages: 8},
	"inclusive":     {HostPages: 8, Inclusive: true},
	"write-through": {HostPages: 8, WriteThrough: true},
}

func TestOffload_RoundTrip(t *testing.T) {
	for name, o := range settings {
		for _, streams := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/streams=%v", name, streams), func(t *testing.T) {
				e := newEngine(t, geometry(t, withPages(10)), o, streams)
				r := must(e.ingest("a", text(1, 0, 32), 11))(t) // two whole pages and a part
				noError(t, r.admit(t.Context(), 17))
				noError(t, r.commit(17)) // two more pages, without keys
				noError(t, r.s.SetPosition(23, 6))
				before := r.s.Pages(nil)
				r.offload(5)
				equal(t, "free", e.m.NumFree(), 10)
				equal(t, "pages of the sequence", len(r.s.Pages(nil)), 0)
				equal(t, "stored", r.s.Stored(), 17)
				equal(t, "freed by a second offload", must(r.s.Offload(t.Context()))(t), 0)
				e.poison()

				other := e.serve("b", text(2, 0, 12))
				got := r.back()
				if slices.Equal(got.Pages, before) || !slices.Equal(got.Pages, r.s.Pages(nil)) {
					t.Errorf("reloaded on pages %v, before on %v", got.Pages, before)
				}
				if got.StoredLen != 17 || got.Position != 23 || got.Released != 6 || got.Stored != 17 || got.Tokens != 17 {
					t.Errorf("reloaded %+v", got)
				}
				other.verified()
				_, err := r.s.Reload(t.Context())
				faulttest.Refused(t, err, fault.NotFound, `sequence "a"`)

				// It goes on as if it had never been away.
				noError(t, r.admit(t.Context(), 21))
				noError(t, r.commit(21))
				r.verified()
				noError(t, r.s.Remove())
				noError(t, other.s.Remove())
				e.check()
			})
		}
	}
}

func TestOffload_WithoutAHostPoolIsUnsupported(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	_, err := r.s.Offload(t.Context())
	faulttest.Refused(t, err, fault.Unsupported)
	equal(t, "remedy", fault.RemedyOf(err), "set Options.HostPages")
	_, err = r.s.Reload(t.Context())
	faulttest.Refused(t, err, fault.NotFound)
	equal(t, "offloaded", r.s.IsOffloaded(), false)
	r.verified()
	e.check()
}

func TestOffload_LeavesWhatStoresNothing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	e.store(text(1, 0, 9))
	r := must(e.ingest("a", text(1, 0, 9), 9))(t)
	for range 2 { // ingested; then matched: the lease is no page of its own
		equal(t, "freed", must(r.s.Offload(t.Context()))(t), 0)
		equal(t, "offloaded", r.s.IsOffloaded(), false)
		equal(t, "matched", must(r.match())(t).Pages, 2)
		equal(t, "refs", len(r.s.Refs(nil)), 2)
		e.check()
	}
	noError(t, r.admit(t.Context(), 9))
	_, err := r.s.Offload(t.Context())
	faulttest.Refused(t, err, fault.Busy, "1 tokens are admitted and not committed")
	noError(t, r.commit(9))
	r.verified()
	r.offload(3)
	r.back()
}

// Of two labels the host has room for one: it goes, and the other stays whole.
func TestOffload_OfARequestTakesWhatFits(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 2}, false)
	a, b := e.plain(ID{"r", "a"}, 1, 8), e.plain(ID{"r", "b"}, 2, 9)
	other := e.plain(ID{"other", ""}, 3, 4)
	freed, err := e.m.Offload(t.Context(), "r")
	faulttest.Refused(t, err, fault.Full, `sequence "r"/"b"`, "host pool")
	equal(t, "freed", freed, 2)
	equal(t, "a", a.s.IsOffloaded(), true)
	equal(t, "b", b.s.IsOffloaded(), false)
	equal(t, "r", e.m.IsOffloaded("r"), true)
	equal(t, "other", e.m.IsOffloaded("other"), false)
	e.check()
	noError(t, b.admit(t.Context(), 13)) // it can grow
	noError(t, b.commit(13))
	b.verified()
	other.verified()
	noError(t, e.m.Reload(t.Context(), "r"))
	equal(t, "r", e.m.IsOffloaded("r"), false)
	a.verified()
	b.verified()
	e.check()
	for _, call := range []func() error{
		func() error { _, err := e.m.Offload(t.Context(), "nobody"); return err },
		func() error { return e.m.Reload(t.Context(), "nobody") },
	} {
		faulttest.Refused(t, call(), fault.NotFound, `"nobody"`)
	}
	noError(t, b.admit(t.Context(), 14)) // admitted and not committed: the request is left alone
	freed, err = e.m.Offload(t.Context(), "r")
	faulttest.Refused(t, err, fault.Busy, `sequence "r"/"b"`)
	equal(t, "freed", freed, 0)
	equal(t, "r", e.m.IsOffloaded("r"), false)
}

func TestOffload_RefusedLeavesTheSequenceAsItWas(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 1}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	before := r.s.Pages(nil)
	for range 2 {
		_, err := r.s.Offload(t.Context())
		faulttest.Refused(t, err, fault.Full, "asked for 3 pages, free 1")
		equal(t, "offloaded", r.s.IsOffloaded(), false)
		equal(t, "its pages", slices.Equal(before, r.s.Pages(nil)), true)
		equal(t, "host pages free", e.m.Pool().NumFree(), 1)
		e.check()
	}
	noError(t, r.admit(t.Context(), 12))
	noError(t, r.commit(12))
	r.verified()
}

// The store's cold pages make room on the host.
func TestOffload_EvictsFromTheHost(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 3}, false)
	e.cold(text(7, 0, 12)) // fills the host
	equal(t, "host pages free", e.m.Pool().NumFree(), 0)
	r := e.plain(ID{Request: "a"}, 1, 5)
	r.offload(2)
	why := e.why(text(7, 0, 12))
	equal(t, "evicted", why[1].Reason == fault.Evicted && why[2].Reason == fault.Evicted, true)
	e.poison()
	r.back()
}

func TestRemove_OfAnOffloadedSequenceGivesItsHostPagesBack(t *testing.T) {
	for _, end := range []string{"remove", "reset", "reset, free"} {
		t.Run(end, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			r := must(e.ingest("a", text(1, 0, 24), 9))(t)
			noError(t, r.admit(t.Context(), 13))
			noError(t, r.commit(13))
			noError(t, r.s.SetPosition(5, 5))
			r.offload(4)
			equal(t, "host pages free", e.m.Pool().NumFree(), 4)
			if end == "remove" {
				noError(t, r.s.Remove())
			} else {
				noError(t, r.reset(end == "reset, free"))
				equal(t, "offloaded", r.s.IsOffloaded(), false)
				equal(t, "stored", r.s.Stored(), 0)
				_, err := r.s.Reload(t.Context()) // no old contents come back
				faulttest.Refused(t, err, fault.NotFound)
			}
			e.check()
			equal(t, "host pages free", e.m.Pool().NumFree(), 6) // the store's two are still there
			equal(t, "evicted", e.m.store.EvictHost(8), 2)       // and held by nobody
			equal(t, "host pages free", e.m.Pool().NumFree(), 8)
			if end != "remove" {
				noError(t, r.admit(t.Context(), 13))
				noError(t, r.commit(13))
				r.offload(4)
				got := r.back()
				equal(t, "position after a reset", got.Position, 0)
			}
		})
	}
}

func TestOffloaded_RefusesToBeUsed(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	r := e.serve("a", text(1, 0, 9))
	r.offload(3)
	_, err := r.s.Admit(t.Context(), 1)
	faulttest.Refused(t, err, fault.Busy, `sequence "a"`, "is offloaded")
	equal(t, "remedy", fault.RemedyOf(err), "reload it first")
	faulttest.Refused(t, r.s.Commit(1), fault.Invalid)
	_, err = r.s.Match()
	faulttest.Refused(t, err, fault.Busy)
	same := must(e.m.Ingest(r.s.ID(), r.s.prompt))(t)
	equal(t, "ingested again", same, r.s)
	e.check()
	r.back()
}

// Keys and positions that arrive while the sequence is away are for when it is back: it
// has no pages that could be shared now.
func TestOffloaded_TakesKeysAndPositions(t *testing.T) {
	for _, call := range []string{"offload", "commit", "reset", "remove", "reload"} {
		t.Run(call, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			r := must(e.ingest("a", text(1, 0, 12), 4))(t)
			noError(t, r.admit(t.Context(), 12))
			noError(t, r.commit(12))
			r.offload(3)
			noError(t, r.extend())
			noError(t, r.s.SetPosition(40, 2))
			other := e.plain(ID{Request: "b"}, 2, 32) // has all pages that r had
			switch call {
			case "offload":
				equal(t, "freed", must(r.s.Offload(t.Context()))(t), 0)
			case "commit":
				noError(t, r.s.Commit(0))
			case "reset":
				noError(t, r.reset(false))
			case "remove":
				noError(t, r.s.Remove())
			}
			e.check()
			other.verified()
			equal(t, "page 1", e.why(text(1, 0, 12))[1].Reason, fault.NeverStored)
			noError(t, other.s.Remove())
			if call == "reset" || call == "remove" {
				return
			}
			got := r.back()
			equal(t, "position", got.Position, 40)
			equal(t, "released", got.Released, 2)
			noError(t, r.s.Commit(0))
			equal(t, "page 1", e.why(text(1, 0, 12))[1].Reason, fault.Hit)
			e.check()
		})
	}
}

// What one sequence suspends another runs on: shared pages stay, and are held once.
func TestOffload_KeepsPagesThatOthersUse(t *testing.T) {
	for name, o := range settings {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), o, false)
			tokens := text(1, 0, 13)
			a, b := e.serve("a", tokens), e.serve("b", tokens)
			a.offload(1) // its last page; three are shared
			b.verified()
			equal(t, "host pages for a's own", e.m.pool.NumPages(a.s.name()), 1)
			noError(t, b.s.Remove())
			e.evict(3)
			equal(t, "free", e.m.NumFree(), 8)
			equal(t, "kept on the host", e.m.store.EvictHost(8), 0)
			e.check()
			e.poison()
			a.back()
			equal(t, "shared again", must(must(e.ingest("c", tokens, 13))(t).match())(t).Pages, 3)
			e.check()
		})
	}
}

// A prefix that was adopted and not yet built upon goes and comes back, and the index
// answers as before.
func TestOffload_OfAnAdoptedPrefix(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	tokens := text(1, 0, 12)
	e.store(tokens[:8])
	r := must(e.ingest("a", tokens, 12))(t)
	equal(t, "matched", must(r.match())(t).Pages, 2)
	noError(t, r.admit(t.Context(), 8))
	equal(t, "stored", r.s.Stored(), 8)
	r.offload(2)
	equal(t, "free", e.m.NumFree(), 8)
	e.check()
	other := must(e.ingest("b", tokens, 12))(t)
	equal(t, "matched", must(other.match())(t).Pages, 2)
	r.stored = 8
	r.back()
	noError(t, other.admit(t.Context(), 12))
	noError(t, other.commit(12))
	other.verified()
	noError(t, r.admit(t.Context(), 12))
	noError(t, r.commit(12))
	r.verified()
	e.check()
}

// When there is no room at all the shortfall is told, suspended or not.
func TestAdmit_BesideOffloadedSequencesSaysWhatIsMissing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	e.plain(ID{Request: "a"}, 1, 9).offload(3)
	e.plain(ID{Request: "b"}, 2, 20)
	s := must(e.m.Ingest(ID{Request: "c"}, Prompt{}))(t)
	_, err := s.Admit(t.Context(), 20)
	var full *page.FullError
	if !errors.As(err, &full) || full.Shortfall() != 2 {
		t.Fatalf("got %v, want a shortfall of 2", err)
	}
	e.check()
}

// The engine's work, the copies and the sequence's return are ordered by their streams
// alone: the engine writes, offloads, writes over its pages, reloads and reads, and never
// waits.
func TestOffload_IsOrderedByTheComputeStream(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, true)
	r := e.plain(ID{Request: "a"}, 1, 9)
	release := e.hold(e.compute) // nothing of r is written yet
	r2 := must(e.m.Ingest(ID{Request: "b"}, Prompt{}))(t)
	ended := make(chan error)
	go func() {
		_, err := r.s.Offload(context.Background())
		ended <- err
	}()
	for !r.s.IsOffloaded() {
		runtime.Gosched()
	}
	release()
	noError(t, <-ended)
	must(r2.Admit(t.Context(), 32))(t) // all pages
	junk := &run{e: e, s: r2, trail: trailOf(text(9, 0, 32)), stored: 0}
	noError(t, junk.write(0, 32))
	noError(t, r2.Remove())
	held := e.hold(e.m.Copies())
	must(r.reload(t.Context()))(t)
	waits := make([]func() ([]byte, error), 0, len(e.layers))
	for l := range e.layers {
		waits = append(waits, must(r.readLater(l, 9))(t))
	}
	held()
	for l, wait := range waits {
		got := must(wait())(t)
		equal(t, "bytes", string(got) == string(wanted(r.trail[:9], l, e.row)), true)
	}
	e.check()
}
