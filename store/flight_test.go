package store

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/evict"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// wantList compares a tier's list, oldest first.
func (r *rig) wantList(l *evict.LRU, want ...string) {
	r.Helper()
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	var got []string
	for _, slot := range list(l) {
		got = append(got, r.names[r.store.index.keys[slot]])
	}
	if !slices.Equal(got, want) {
		r.Errorf("list %q, want %q", got, want)
	}
}

func TestMatch_OfAPageOnItsWayDownKeepsIt(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("abc")
	release := r.hold(r.copies)
	_, _ = r.store.Evict(ended(), 2) // abc and ab
	m := r.match("abc")
	if m.Answers[2].Tier != Device {
		t.Errorf("the page is on the %v", m.Answers[2].Tier)
	}
	noError(t, r.check(nil))
	release()
	r.settled()
	r.wantWhere("abc", "device, device, device")
	r.hostFree(4)
	r.free(1)
	if s := r.store.Stats(); s.Abandoned != 2 || s.Demoted != 0 {
		t.Errorf("%+v", s)
	}
	r.store.Unpin(m.Refs)
	r.wantList(&r.store.device, "abc", "ab", "a")
	noError(t, r.check(nil))
}

// TestUnpin_DuringACopyKeepsThePathInOrder: the page on its way enters its list only
// when it has settled, and its parents must not be older than it then.
func TestUnpin_DuringACopyKeepsThePathInOrder(t *testing.T) {
	t.Run("Down", func(t *testing.T) {
		r := newRig(t, setup{device: 4, host: 4, bytes: true})
		r.fill("abc", "x")
		release := r.hold(r.copies)
		_, _ = r.store.Evict(ended(), 1)
		m := r.match("abc")
		r.store.Unpin(m.Refs)
		r.wantList(&r.store.device, "x")
		noError(t, r.check(nil))
		release()
		r.settled()
		r.wantList(&r.store.device, "x", "abc", "ab", "a")
		noError(t, r.check(nil))
	})
	t.Run("Up", func(t *testing.T) {
		for _, jobPages := range []int{1, 16} {
			r := newRig(t, setup{device: 5, host: 4, bytes: true, jobPages: jobPages})
			r.fill("abcd", "x")
			r.evict(3) // abcd, abc and ab
			release := r.hold(r.copies)
			u, err := r.begin("abcd")
			noError(t, err)
			r.end(u)
			r.wantList(&r.store.device, "x")
			r.wantList(&r.store.host)
			noError(t, r.check(nil))
			release()
			r.settled()
			r.wantList(&r.store.device, "x", "abcd", "abc", "ab", "a")
			noError(t, r.check(nil))
		}
	})
	t.Run("UpAndFailing", func(t *testing.T) {
		r := newRig(t, setup{device: 4, host: 4, bytes: true})
		r.fill("abc")
		r.evict(3)
		r.dev.Fail(r.copies, errCable)
		release := r.hold(r.copies)
		u, err := r.begin("abc")
		noError(t, err)
		r.end(u)
		release()
		r.settled()
		r.wantList(&r.store.host)
		r.wantWhere("abc", "copy failed, copy failed, copy failed")
		r.free(4)
		r.hostFree(4)
	})
	t.Run("AbandonedReservations", func(t *testing.T) {
		r := newRig(t, setup{device: 4, host: 4, bytes: true})
		r.fill("ab")
		release := r.hold(r.copies)
		_, _ = r.store.Evict(ended(), 1)
		refs, err := r.store.Reserve(nil, r.keys("abc"))
		noError(t, err)
		r.store.Abandon(refs)
		again, err := r.store.Reserve(nil, r.keys("q")) // takes the entry that abc had
		noError(t, err)
		if again[0] != refs[2] {
			t.Fatal("the entry was not used again: this test shows nothing")
		}
		release()
		r.settled()
		r.wantList(&r.store.device, "ab", "a")
		r.wantWhere("q", "pending")
		r.store.Abandon(again)
		noError(t, r.check(nil))
	})
}

func TestLoad_OfAPageOnItsWayUpSharesItsTicket(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("ab")
	r.evict(2)
	first, second := r.match("ab"), r.match("ab")
	fresh, err := r.acquire(2)
	noError(t, err)
	release := r.hold(r.copies)
	var l, adopted Loaded
	noError(t, r.store.Load(first.Refs, fresh, &l))
	if n := r.store.Missing(second.Refs); n != 0 {
		t.Errorf("%d pages are missing", n)
	}
	noError(t, r.store.Load(second.Refs, nil, &adopted))
	if len(l.Tickets) != 1 || !slices.Equal(adopted.Tickets, l.Tickets) || !slices.Equal(adopted.Pages, fresh) || adopted.Used != 0 {
		t.Errorf("loaded %v with tickets %v, then %v with %v", l.Pages, l.Tickets, adopted.Pages, adopted.Tickets)
	}
	if done, _ := l.Tickets[0].Poll(); done {
		t.Error("the ticket is done before the copy")
	}
	noError(t, r.check(map[page.ID]int{fresh[0]: 2, fresh[1]: 2}))
	release()
	u := &use{path: "ab", keys: r.keys("ab"), refs: second.Refs, pages: adopted.Pages, tickets: adopted.Tickets}
	noError(t, r.verify(u))
	r.wantWhere("ab", "device, device")
	r.end(u)
	r.end(&use{refs: first.Refs, pages: l.Pages})
	r.hostFree(4)
	noError(t, r.check(nil))
}

func TestEvict_WhoseContextEndsFreesItsPagesLater(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true, jobPages: 1})
	r.fill("abc")
	release := r.hold(r.copies)
	freed, err := r.store.Evict(ended(), 3)
	if freed != 0 || !errors.Is(err, context.Canceled) {
		t.Fatalf("%d freed, error %v", freed, err)
	}
	r.free(1)
	// Nothing is left to give, but not for good: another caller waits too.
	if _, err := r.store.Evict(ended(), 1); !errors.Is(err, context.Canceled) {
		t.Errorf("with copies in flight: %v, want the context's error", err)
	}
	noError(t, r.check(nil))
	release()
	_, err = r.store.Evict(context.Background(), 1)
	faulttest.Refused(t, err, fault.Full)
	r.free(4)
	r.hostFree(1)
	r.wantWhere("abc", "host, host, host")
	r.wantList(&r.store.host, "abc", "ab", "a")
	noError(t, r.check(nil))
}

// TestEvict_WaitsForCopiesThatLeavePagesToGive: pins that a copy holds are not for
// ever.
func TestEvict_WaitsForCopiesThatLeavePagesToGive(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 2, bytes: true})
	r.fill("ab")
	r.evict(1)
	release := r.hold(r.copies)
	u, err := r.begin("ab")
	noError(t, err)
	r.end(u) // a and ab are pinned by the promotion of ab
	done := make(chan error)
	go func() {
		n, err := r.store.Evict(context.Background(), 2)
		if err == nil && n != 2 {
			err = errors.New("too few pages were freed")
		}
		done <- err
	}()
	release()
	noError(t, <-done)
	r.wantWhere("ab", "host, host")
	noError(t, r.check(nil))
}

func TestClose_WaitsForCopiesInFlight(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true, jobPages: 1})
	r.fill("ab", "xy")
	r.evict(1)
	release := r.hold(r.copies)
	u, err := r.begin("ab")
	noError(t, err)
	_, _ = r.store.Evict(ended(), 1)
	for range 2 {
		if err := r.store.Close(ended()); !errors.Is(err, context.Canceled) {
			t.Fatalf("closed with copies in flight: %v", err)
		}
	}
	if _, err := r.store.Evict(context.Background(), 1); !errors.Is(err, fault.Closed) {
		t.Errorf("eviction from a closing store: %v", err)
	}
	release()
	noError(t, r.store.Close(context.Background()))
	noError(t, r.verify(u)) // its pages arrived, and are its own
	r.end(u)
	r.free(4)
	r.hostFree(4)
}

// TestClose_WaitsForPagesThatAreBeingSummed: the pool may be closed next, and its
// memory is gone then.
func TestClose_WaitsForPagesThatAreBeingSummed(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 2, bytes: true})
	r.fill("a")
	r.evict(1)
	m := r.match("a")
	var l Loaded
	noError(t, r.store.departing(m.Refs, &l))
	closed := make(chan error)
	go func() { closed <- r.store.Close(context.Background()) }()
	for range 1000 { // ample time to do it wrong
		runtime.Gosched()
	}
	r.hostFree(1)
	r.store.readers.Done()
	noError(t, <-closed)
	r.hostFree(2)
}

// TestStore_LeavesNoOrphans uses whole paths at random, pages of which may be on
// their way up or down meanwhile: no page is ever resident without its parent.
func TestStore_LeavesNoOrphans(t *testing.T) {
	for _, o := range []setup{
		{device: 12, host: 9, bytes: true},
		{device: 12, host: 9, bytes: true, inclusive: true, jobPages: 2},
		{device: 12, host: 3, bytes: true, jobPages: 1},
		{device: 12, host: 14, bytes: true, through: true, jobPages: 2},
		{device: 12},
	} {
		r := newRig(t, o)
		rng := rand.New(rand.NewPCG(7, uint64(o.host)))
		held, promoted := 0, false
		for op := range 800 {
			path := randomPath(rng, 3, 5)
			release := func() {}
			if o.bytes && rng.IntN(3) == 0 {
				release = r.hold(r.copies)
				held++
			}
			switch {
			case o.bytes && rng.IntN(4) == 0: // on their way down, and wanted again
				_, _ = r.store.Evict(ended(), 1+rng.IntN(3))
				m := r.match(path)
				r.store.Unpin(m.Refs)
				release()
				r.settled()
			default:
				m := r.match(path)
				missing := r.store.Missing(m.Refs)
				if missing > r.arena.NumFree() { // evicting would wait for the stream
					release()
				}
				r.store.Unpin(m.Refs)
				u, err := r.begin(path)
				noError(t, err)
				promoted = promoted || len(u.tickets) > 0
				if rng.IntN(2) == 0 {
					r.end(u) // early: pages may be on their way up
					release()
				} else {
					release()
					noError(t, r.verify(u))
					noError(t, r.commit(u))
					r.end(u)
				}
				r.settled()
			}
			if orphan := r.orphan(); orphan != "" {
				t.Fatalf("%+v, operation %d: page %q is an orphan: %s", o, op, orphan, r.where(orphan))
			}
			if op%10 == 0 {
				noError(t, r.check(nil))
			}
		}
		if o.bytes && (held == 0 || !promoted) {
			t.Error("nothing was ever on its way: the test is too easy")
		}
	}
}

// orphan returns a resident page without a resident parent: Why would say that it is
// beyond the prefix.
func (r *rig) orphan() string {
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.entries {
		if s.entries[i].state != kept {
			continue
		}
		path := r.names[s.index.keys[i]]
		if len(path) == 1 {
			continue
		}
		parent := r.key(path[:len(path)-1])
		if p := s.index.lookup(&parent, s.index.hash(&parent)); p == NoRef || s.entries[p].state != kept {
			return path
		}
	}
	return ""
}

// randomPath is a path of up to depth pages, with branches alternatives for each;
// the first is likely, so that paths share prefixes.
func randomPath(rng *rand.Rand, branches, depth int) string {
	path := make([]byte, 1+rng.IntN(depth))
	for i := range path {
		path[i] = 'a' + byte(min(rng.IntN(branches), rng.IntN(branches)))
	}
	return string(path)
}
