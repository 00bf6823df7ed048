package kvferry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/store"
)

// Suspended sequences while copies run, fail or are left: see offload_test.go for those
// where all is well.

func TestReload_OnAFullDeviceIsRefusedAndSucceedsLater(t *testing.T) {
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint("keys=", keys), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			r := e.stored(keys)
			r.offload(3)
			other := e.plain(ID{Request: "b"}, 2, 24) // two pages are left
			for range 2 {
				_, err := r.s.Reload(t.Context())
				faulttest.Refused(t, err, fault.Full, "asked for 3 pages, free 2")
				equal(t, "offloaded", r.s.IsOffloaded(), true)
				equal(t, "free", e.m.NumFree(), 2)
				e.check()
			}
			other.verified()
			noError(t, other.s.Remove())
			e.poison()
			r.back()
		})
	}
}

// Pages that only the store holds make room for those that come back.
func TestReload_EvictsFromTheDevice(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 16}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	r.offload(3)
	e.store(text(2, 0, 32))
	equal(t, "free", e.m.NumFree(), 0)
	r.back()
	equal(t, "matched", must(must(e.ingest("b", text(2, 0, 33), 33))(t).match())(t).Pages, 8)
	e.check()
}

// While the copies run the sequence is claimed: nobody may use it, and everybody else
// can work.
func TestOffload_WhileItsCopiesRun(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	release, done := r.offloading(t.Context())
	equal(t, "offloaded", e.m.IsOffloaded("a"), true)
	_, err := r.s.Admit(t.Context(), 1)
	faulttest.Refused(t, err, fault.Busy, `sequence "a"`)
	_, err = r.s.Reload(t.Context())
	faulttest.Refused(t, err, fault.Busy)
	_, err = r.s.Offload(t.Context())
	faulttest.Refused(t, err, fault.Busy)
	faulttest.Refused(t, r.s.SetPosition(1, 1), fault.Busy)
	faulttest.Refused(t, r.s.Reset(true), fault.Busy)
	other := e.plain(ID{Request: "b"}, 2, 16) // no lock is held
	other.verified()
	_, err = must(e.m.Ingest(ID{Request: "c"}, Prompt{}))(t).Admit(t.Context(), 8) // its pages are not given up yet
	faulttest.Refused(t, err, fault.Full, "free 1")
	release()
	freed, err := done()
	noError(t, err)
	equal(t, "freed", freed, 3)
	e.check()
	e.poison()
	r.back()
}

func TestRemove_DuringOffload(t *testing.T) {
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint("keys=", keys), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			tokens := text(1, 0, 9)
			r := e.stored(keys)
			release, done := r.offloading(t.Context())
			noError(t, r.s.Remove())
			release()
			_, err := done()
			faulttest.Refused(t, err, fault.NotFound, "was removed meanwhile")
			noError(t, e.m.Pool().Wait(t.Context()))
			e.check()
			equal(t, "host pages free", e.m.Pool().NumFree(), 8)
			if keys { // the store keeps its own
				equal(t, "page 1", e.why(tokens)[1].Reason, fault.Hit)
				e.evict(2)
			}
		})
	}
}

func TestOffload_WhoseContextEndsChangesNothing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	ctx, cancel := context.WithCancel(t.Context())
	release, done := r.offloading(ctx)
	cancel()
	_, err := done()
	equal(t, "canceled", errors.Is(err, context.Canceled), true)
	equal(t, "offloaded", r.s.IsOffloaded(), false)
	e.check()
	equal(t, "host pages free", e.m.Pool().NumFree(), 1) // a copy may write them yet
	release()
	noError(t, e.m.Pool().Wait(t.Context()))
	equal(t, "host pages free", e.m.Pool().NumFree(), 4)
	r.verified()
	r.offload(3)
	r.back()
}

// The sequence has gone when its own pages have; those of the store follow when they can.
func TestOffload_WhoseContextEndsLeavesTheStoresPagesForLater(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	r := e.serve("a", text(1, 0, 8))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	freed, err := r.s.Offload(ctx)
	if err == nil {
		equal(t, "offloaded", r.s.IsOffloaded(), true)
	} else {
		equal(t, "canceled", errors.Is(err, context.Canceled) && freed == 0 && !r.s.IsOffloaded(), true)
		noError(t, e.m.Pool().Wait(t.Context()))
		r.offload(2)
	}
	if _, err := e.m.store.Evict(t.Context(), 2); err != nil { // they may be on their way already
		faulttest.Refused(t, err, fault.Full)
	}
	equal(t, "free", e.m.NumFree(), 8)
	e.check()
	e.poison()
	r.back()
}

func TestReload_WhoseContextEndsMovesNothing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 16}, false)
	r := e.serve("a", text(1, 0, 13))
	r.offload(4)
	e.store(text(2, 0, 32))
	release := e.hold(e.m.Copies())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := r.s.Reload(ctx) // has to evict, and does not wait for it
	equal(t, "canceled", errors.Is(err, context.Canceled), true)
	equal(t, "offloaded", r.s.IsOffloaded(), true)
	e.check()
	release()
	r.back()
}

// The pages of a sequence that was given up while they were on their way are nobody's
// until they have arrived: a copy writes them.
func TestReload_PagesOnTheirWayAreNotHandedOut(t *testing.T) {
	for _, end := range []string{"remove", "reset", "reset, free"} {
		t.Run(end, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			r := e.plain(ID{Request: "a"}, 1, 20)
			r.offload(5)
			release := e.hold(e.m.Copies())
			must(r.s.Reload(t.Context()))(t)
			_, err := r.s.Offload(t.Context())
			faulttest.Refused(t, err, fault.Busy, "still arriving")
			if end == "remove" {
				noError(t, r.s.Remove())
			} else {
				noError(t, r.s.Reset(end == "reset, free"))
			}
			e.check()
			equal(t, "free", e.m.NumFree(), 3)
			other := e.plain(ID{Request: "b"}, 2, 12) // writes at once
			// One that needs more waits for them.
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			s := must(e.m.Ingest(ID{Request: "c"}, Prompt{}))(t)
			_, err = s.Admit(ctx, 4)
			equal(t, "canceled", errors.Is(err, context.Canceled), true)
			admitted := make(chan error)
			go func() {
				_, err := s.Admit(context.Background(), 20)
				admitted <- err
			}()
			release()
			noError(t, <-admitted)
			e.check()
			other.verified()
			noError(t, s.Remove())
			equal(t, "free", e.m.NumFree(), 5)
			e.check()
		})
	}
}

// A Reload that waits for room is under way when its sequence is removed.
func TestRemove_DuringReload(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 16}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	r.offload(3)
	e.store(text(2, 0, 32))
	release := e.hold(e.m.Copies())
	ended := make(chan error)
	go func() {
		_, err := r.s.Reload(context.Background())
		ended <- err
	}()
	for busy := false; !busy; {
		e.m.mu.Lock()
		busy = r.s.busy
		e.m.mu.Unlock()
		runtime.Gosched()
	}
	noError(t, r.s.Remove())
	release()
	faulttest.Refused(t, <-ended, fault.NotFound, "was removed meanwhile")
	noError(t, e.m.Copies().Sync(t.Context()))
	noError(t, e.m.Pool().Wait(t.Context()))
	e.check()
	equal(t, "free and the store's", e.m.NumFree()+e.m.store.Stats().DevicePages, 8)
	equal(t, "host pages", e.m.Pool().NumFree()+e.m.store.Stats().HostPages, 16)
}

// A copy to the host that fails has moved nothing; the other labels stay as they are.
func TestOffload_WhoseCopyFailsStrandsNothing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	a, b := e.plain(ID{"r", "a"}, 1, 8), e.plain(ID{"r", "b"}, 2, 8)
	a.offload(2)
	e.breakCopies()
	freed, err := e.m.Offload(t.Context(), "r")
	faulttest.Refused(t, err, fault.Device, `sequence "r"/"b"`, e.cable.Error())
	equal(t, "cause", errors.Is(err, e.cable), true)
	equal(t, "freed", freed, 0)
	equal(t, "b", b.s.IsOffloaded(), false)
	equal(t, "host pages free", e.m.Pool().NumFree(), 6)
	e.check()
	b.verified()
	noError(t, b.admit(t.Context(), 12))
	noError(t, b.commit(12))
	b.verified()
	// The stream is gone for good, and a's pages cannot come back by it.
	_, err = a.s.Reload(t.Context())
	faulttest.Refused(t, err, fault.Device, `sequence "r"/"a"`)
	equal(t, "a", a.s.IsOffloaded(), true)
	e.check()
	noError(t, a.reset(true))
	noError(t, a.admit(t.Context(), 8))
	noError(t, a.commit(8))
	a.verified()
	e.check()
}

// A reload whose copies fail on the way is told by everything that follows; reset, the
// sequence is as good as new.
func TestReload_ThatDoesNotArriveIsLatched(t *testing.T) {
	for _, keys := range []bool{false, true} {
		t.Run(fmt.Sprint("keys=", keys), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			r := e.stored(keys)
			r.offload(3)
			e.breakCopies()
			release := e.hold(e.m.Copies()) // or the later copies are refused at once
			got := must(r.s.Reload(t.Context()))(t)
			release()
			faulttest.Refused(t, got.Wait(t.Context()), fault.Device, e.cable.Error())
			for range 2 {
				_, err := r.s.Admit(t.Context(), 1)
				faulttest.Refused(t, err, fault.Device, e.cable.Error())
				faulttest.Refused(t, r.s.Commit(0), fault.Device)
				_, err = r.s.Offload(t.Context())
				faulttest.Refused(t, err, fault.Device)
			}
			e.check()
			noError(t, r.reset(true))
			noError(t, e.m.Pool().Wait(t.Context()))
			equal(t, "free", e.m.NumFree(), 8)
			equal(t, "host pages", e.m.Pool().NumFree()+e.m.store.Stats().HostPages, 8)
			noError(t, r.admit(t.Context(), 9))
			noError(t, r.commit(9))
			r.verified()
			e.check()
		})
	}
}

func TestReload_OfACorruptPageIsANamedFailure(t *testing.T) {
	for _, test := range []struct {
		name string
		at   int // which page is damaged: 1 is the store's, 2 the sequence's own
	}{{"of the store", 1}, {"of its own", 2}} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
			tokens := text(1, 0, 12)
			r := must(e.ingest("a", tokens, 11))(t)
			noError(t, r.admit(t.Context(), 12))
			noError(t, r.commit(12))
			other := must(e.ingest("b", tokens, 11))(t)
			must(other.match())(t)
			noError(t, other.admit(t.Context(), 12))
			noError(t, other.commit(12))
			r.offload(1)
			other.offload(3)
			bad := r.hostPage(test.at) // of a page that both have, one of the two copies
			flip(t, e, bad)
			e.poison()
			struck := 0
			for _, r := range []*run{r, other} {
				if _, err := r.reload(t.Context()); err != nil {
					struck++
					faulttest.Refused(t, err, fault.Corrupt, r.s.ID().String())
					equal(t, "remedy", fault.RemedyOf(err) != "", true)
					equal(t, "offloaded", r.s.IsOffloaded(), true)
					e.check()
					_, err = r.s.Reload(t.Context()) // latched
					faulttest.Refused(t, err, fault.Corrupt)
					noError(t, r.reset(true))
					noError(t, r.admit(t.Context(), 12))
					noError(t, r.commit(12))
				}
				r.verified()
				e.check()
			}
			equal(t, "sequences struck", struck, 3-test.at)
			noError(t, r.s.Remove())
			noError(t, other.s.Remove())
			e.check()
			equal(t, "host pages", e.m.Pool().NumFree()+e.m.store.Stats().HostPages, 8)
		})
	}
}

// Extend, Offload, Reload and the looks at a sequence race its removal.
func TestOffload_RacesARemoval(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	for i := range 100 {
		r := e.serve(fmt.Sprint(i), text(uint32(i), 0, 10))
		done := make(chan error, 4)
		go func() { _, err := r.s.Offload(context.Background()); done <- err }()
		go func() { _, err := r.s.Reload(context.Background()); done <- err }()
		go func() { done <- r.s.Extend() }()
		go func() { _ = e.m.IsOffloaded(fmt.Sprint(i)); done <- r.s.Remove() }()
		for range 4 {
			if err := <-done; err != nil && !errors.Is(err, fault.NotFound) && !errors.Is(err, fault.Busy) {
				t.Fatal(err)
			}
		}
		_ = r.s.Remove()
		noError(t, e.m.Copies().Sync(t.Context()))
		noError(t, e.m.Pool().Wait(t.Context()))
		e.check()
	}
	e.evict(e.m.store.Stats().DevicePages)
	equal(t, "free", e.m.NumFree(), 8)
	equal(t, "host pages", e.m.Pool().NumFree()+e.m.store.Stats().HostPages, 8)
}

// Close waits for an Offload under way, which reads the host pool.
func TestClose_DuringOffload(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	r, gone := e.plain(ID{Request: "a"}, 1, 9), e.plain(ID{Request: "b"}, 2, 9)
	gone.offload(3)
	release, done := r.offloading(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	equal(t, "canceled", errors.Is(e.m.Close(ctx), context.Canceled), true)
	_, err := gone.s.Reload(t.Context())
	faulttest.Refused(t, err, fault.Closed)
	closed := make(chan error)
	go func() { closed <- e.m.Close(context.Background()) }()
	release()
	noError(t, <-closed)
	_, err = done()
	noError(t, err)
}

// Copies that an Offload left behind are waited for.
func TestClose_BehindAnOffloadThatWasLeft(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	r := e.plain(ID{Request: "a"}, 1, 9)
	ctx, cancel := context.WithCancel(t.Context())
	release, done := r.offloading(ctx)
	cancel()
	_, err := done()
	equal(t, "canceled", errors.Is(err, context.Canceled), true)
	equal(t, "canceled", errors.Is(e.m.Close(ctx), context.Canceled), true)
	release()
	noError(t, e.m.Close(t.Context()))
	faulttest.Refused(t, e.m.Close(t.Context()), fault.Closed)
}

// A reload that is refused halfway is still writing: its pages are nobody's until it has
// ended.
func TestReload_RefusedHalfwayWaitsForWhatItHasBegun(t *testing.T) {
	in := must(devicetest.NewInjector("(half pages (at 2))"))(t)
	e := newPlaguedEngine(t, geometry(t, shape), Options{HostPages: 8}, false, in)
	r := e.plain(ID{Request: "a"}, 1, 16)
	r.offload(4)
	release := e.hold(e.m.Copies())
	ended := make(chan error, 1)
	go func() {
		_, err := r.s.Reload(context.Background())
		ended <- err
	}()
	for in.Hits()[0] == 0 {
		runtime.Gosched()
	}
	for range 1000 { // ample time to do it wrong
		runtime.Gosched()
	}
	equal(t, "free", e.m.NumFree(), 4)
	release()
	faulttest.Refused(t, <-ended, fault.Device, "half pages")
	equal(t, "free", e.m.NumFree(), 8)
	e.check()
	e.poison()
	r.back() // the third time all is well
}

// Somebody else was loading the pages when they were counted, and failed.
func TestLoad_AcquiresWhatGoesMissingMeanwhile(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	tokens := text(1, 0, 13)
	e.cold(tokens)
	e.plain(ID{Request: "b"}, 2, 20)
	e.store(text(3, 0, 12)) // all pages are taken; these can go
	r := must(e.ingest("a", tokens, 13))(t)
	equal(t, "matched", must(r.match())(t).Pages, 3)
	refs := r.s.Refs(nil)
	first := must(e.m.acquire(t.Context(), nil, 1))(t)
	var l store.Loaded
	fresh, missing, err := e.m.load(t.Context(), refs, first, 1, &l)
	noError(t, err)
	if missing != 3 || l.Used != 3 || !slices.Equal(fresh, l.Pages) || fresh[0] != first[0] {
		t.Fatalf("%d were missing, %d used; pages %v, fresh %v", missing, l.Used, l.Pages, fresh)
	}
	for _, ticket := range l.Tickets {
		noError(t, ticket.Wait(t.Context()))
	}
	must(e.m.arena.Release(fresh))(t)
	e.check()
}
