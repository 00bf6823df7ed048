package store

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// fenced runs f with a store that knows the engine's stream, which must see the
// right bytes, and with one that does not, which must see wrong ones: the engine of
// f waits for nothing itself.
func fenced(t *testing.T, f func(t *testing.T, r *rig) (right bool)) {
	for _, compute := range []bool{true, false} {
		name := "WithCompute"
		if !compute {
			name = "NegativeControl_WithoutComputeGoesWrong"
		}
		t.Run(name, func(t *testing.T) {
			r := newRig(t, setup{device: 3, host: 3, bytes: true, compute: compute})
			if right := f(t, r); right != compute {
				t.Errorf("bytes right: %v, want %v", right, compute)
			}
			noError(t, r.check(nil))
		})
	}
}

// quiet waits until nothing is enqueued any more on either stream.
func (r *rig) quiet() {
	r.Helper()
	noError(r, errors.Join(r.compute.Sync(context.Background()), r.copies.Sync(context.Background())))
	r.settled()
}

func TestEvict_WaitsForTheEnginesWrites(t *testing.T) {
	fenced(t, func(t *testing.T, r *rig) bool {
		release := r.hold(r.compute)
		own, err := r.acquire(1)
		noError(t, err)
		r.enqueueWrite(own[0], r.key("a"))
		refs, err := r.store.Reserve(nil, r.keys("a"))
		noError(t, err)
		noError(t, r.store.Commit(refs, own))
		r.end(&use{refs: refs, pages: own})
		if r.setup.compute {
			_, err := r.store.Evict(ended(), 1)
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("evicted before the engine has written: %v", err)
			}
		} else {
			r.evict(1)
		}
		release()
		r.quiet()
		r.wantWhere("a", "host")
		m := r.match("a")
		defer r.store.Unpin(m.Refs)
		b, err := r.pool.Cache().Page(r.store.entries[m.Refs[0]].part.host)
		noError(t, err)
		return bytes.Equal(b, r.contents(r.key("a")))
	})
}

func TestLoad_WaitsForTheEnginesReads(t *testing.T) {
	fenced(t, func(t *testing.T, r *rig) bool {
		r.fill("a")
		r.quiet()
		r.evict(1)
		own, err := r.acquire(1)
		noError(t, err)
		copy(r.bytesOf(own[0]), r.contents(r.key("old")))
		release := r.hold(r.compute)
		got := r.enqueueRead(own[0]) // the engine still reads what was in the page
		m := r.match("a")
		var l Loaded
		noError(t, r.store.Load(m.Refs, own, &l))
		if !r.setup.compute {
			noError(t, l.Tickets[0].Wait(t.Context()))
		}
		release()
		r.quiet()
		r.end(&use{refs: m.Refs, pages: l.Pages})
		return bytes.Equal(got, r.contents(r.key("old")))
	})
}

func TestLoad_HoldsTheEnginesReadsBack(t *testing.T) {
	fenced(t, func(t *testing.T, r *rig) bool {
		r.fill("a")
		r.quiet()
		r.evict(1)
		own, err := r.acquire(1)
		noError(t, err)
		copy(r.bytesOf(own[0]), r.contents(r.key("old")))
		release := r.hold(r.copies)
		m := r.match("a")
		var l Loaded
		noError(t, r.store.Load(m.Refs, own, &l))
		got := r.enqueueRead(own[0])
		if !r.setup.compute {
			noError(t, r.compute.Sync(t.Context()))
		}
		release()
		r.quiet()
		r.end(&use{refs: m.Refs, pages: l.Pages})
		return bytes.Equal(got, r.contents(r.key("a")))
	})
}

// TestEvict_FreesAPageOnlyWhenItsCopyHasRun: its next owner may write it at once.
func TestEvict_FreesAPageOnlyWhenItsCopyHasRun(t *testing.T) {
	r := newRig(t, setup{device: 1, host: 1, bytes: true})
	r.fill("a")
	release := r.hold(r.copies)
	if _, err := r.store.Evict(ended(), 1); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, ok := r.arena.TryAcquire(nil, 1); ok {
		t.Fatal("the page is free with its copy in flight")
	}
	r.wantWhere("a", "device") // until it has arrived
	release()
	r.settled()
	r.wantWhere("a", "host")
	r.free(1)
}

// meddler is a copier that does something else in the middle of the next copy.
type meddler struct {
	copier.Copier
	during func()
}

func (m *meddler) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	if f := m.during; f != nil {
		m.during = nil
		f()
	}
	return m.Copier.Copy(s, r, pairs)
}

// TestLoad_AdoptsOnlyWhatIsEnqueued: an engine whose stream is fenced needs no
// ticket, so whoever is given a page on its way must find that the fences are up.
func TestLoad_AdoptsOnlyWhatIsEnqueued(t *testing.T) {
	m := &meddler{Copier: copier.NewPortable()}
	r := newRig(t, setup{device: 2, host: 2, bytes: true, compute: true, copier: m})
	r.fill("a")
	r.quiet()
	r.evict(1)
	first, second := r.match("a"), r.match("a")
	own, err := r.acquire(1)
	noError(t, err)
	copy(r.bytesOf(own[0]), r.contents(r.key("old")))
	var l, adopted Loaded
	var got []byte
	done := make(chan struct{})
	m.during = func() { // the first load has its page, and no copy or fence yet
		go func() {
			defer close(done)
			if err := r.store.Load(second.Refs, nil, &adopted); err != nil {
				t.Error(err)
				return
			}
			got = r.enqueueRead(adopted.Pages[0])
		}()
		for range 1000 { // ample time to do it wrong
			runtime.Gosched()
		}
	}
	noError(t, r.store.Load(first.Refs, own, &l))
	<-done
	r.quiet()
	if !slices.Equal(adopted.Pages, own) || adopted.Used != 0 {
		t.Fatalf("adopted %v, used %d", adopted.Pages, adopted.Used)
	}
	if !bytes.Equal(got, r.contents(r.key("a"))) {
		t.Error("the page was read before it had arrived")
	}
	r.end(&use{refs: first.Refs, pages: l.Pages})
	r.end(&use{refs: second.Refs, pages: adopted.Pages})
}

// TestStore_ChoosesPagesOnlyWhenItMayEnqueue: between the choice of a copy's pages
// and its place on the stream no other copy may come, or copies would run in another
// order than they were chosen in, and a parent could become older than its child.
func TestStore_ChoosesPagesOnlyWhenItMayEnqueue(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("ab", "x")
	r.evict(1)
	m := r.match("ab")
	fresh, err := r.acquire(1)
	noError(t, err)
	var l Loaded
	s := r.store
	s.enqueue.Lock()
	done := make(chan error)
	go func() { done <- s.Load(m.Refs, fresh, &l) }()
	go func() {
		_, err := s.Evict(context.Background(), 1)
		done <- err
	}()
	for range 1000 { // ample time to do it wrong
		runtime.Gosched()
	}
	s.mu.Lock()
	for i := range s.entries {
		if e := &s.entries[i]; e.part.flight != nil {
			t.Errorf("%q was chosen", r.names[s.index.keys[i]])
		}
	}
	s.mu.Unlock()
	s.enqueue.Unlock()
	noError(t, errors.Join(<-done, <-done))
	r.settled()
	r.wantWhere("ab", "device, device")
	r.wantWhere("x", "host")
	r.end(&use{refs: m.Refs, pages: l.Pages})
}
