package kvferry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

// Many goroutines, each with its own sequences, over prompts that share prefixes:
// everybody finds the right bytes, and in the end nothing is lost. The device has
// room for what all hold at once, and for little more, so that pages keep moving.
func TestManager_ServesManyGoroutines(t *testing.T) {
	const goroutines, rounds, longest = 16, 40, 24
	for _, test := range []struct {
		name      string
		host      int
		inclusive bool
		streams   bool
	}{
		{"no host pool", 0, false, false},
		{"small host pool", 5, false, false},
		{"exclusive", 64, false, false},
		{"inclusive", 64, true, false},
		{"streams", 64, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			// A sequence holds longest/4 pages, and pins as many of others with its keys.
			c := withPages(goroutines*longest/4*2 + 4)
			e := newEngine(t, geometry(t, c), Options{HostPages: test.host, Inclusive: test.inclusive}, test.streams)
			var all sync.WaitGroup
			for i := range goroutines {
				all.Go(func() {
					rng := rand.New(rand.NewPCG(7, uint64(i)))
					for round := range rounds {
						if err := serveOnce(t, e, rng, fmt.Sprint(i, "/", round), longest); err != nil {
							t.Errorf("goroutine %d, round %d: %v", i, round, err)
							return
						}
					}
				})
			}
			all.Wait()
			if t.Failed() {
				return
			}
			noError(t, e.settle())
			e.check()
			st := e.m.store.Stats()
			equal(t, "corrupted", st.Corrupted, 0)
			if test.host == 64 && (st.Demoted == 0 || st.Promoted == 0) {
				t.Errorf("no page moved: %+v", st)
			}
			e.evict(st.DevicePages)
			equal(t, "free in the end", e.m.NumFree(), c.Pages)
			e.check()
		})
	}
}

// serveOnce takes one random prompt through its life.
func serveOnce(t *testing.T, e *engine, rng *rand.Rand, name string, longest int) error {
	prompt := 1 + rng.IntN(longest-4)
	tokens := text(uint32(rng.IntN(60)), 4*rng.IntN(4), longest)
	r, err := e.ingest(name, tokens, prompt)
	if err != nil {
		return err
	}
	end := prompt + rng.IntN(5)
	for { // Full: somebody is just moving the pages that would be free; Corrupt: somebody has just moved them
		if _, err := r.match(); err != nil {
			return err
		}
		if err = r.admit(t.Context(), end); err == nil {
			break
		}
		if !errors.Is(err, fault.Full) && !errors.Is(err, fault.Corrupt) {
			return err
		}
		runtime.Gosched()
	}
	for r.stored < end {
		if err := r.commit(r.stored + 1 + rng.IntN(end-r.stored)); err != nil {
			return err
		}
		if err := r.extend(); err != nil {
			return err
		}
	}
	if err := r.verify(); err != nil {
		return err
	}
	if rng.IntN(4) == 0 {
		if err := r.reset(rng.IntN(2) == 0); err != nil {
			return err
		}
	}
	return r.s.Remove()
}

// The same sequence from two sides: one call at a time, and no race.
func TestSequence_CallsExcludeEachOther(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	tokens := text(1, 0, 13)
	e.store(tokens)
	r := must(e.ingest("a", tokens, 13))(t)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for j := range 200 {
				var err error
				switch (i + j) % 4 {
				case 0:
					_, err = r.s.Match()
				case 1:
					_, err = r.s.Admit(t.Context(), 1)
				case 2:
					err = r.s.Reset(true)
				case 3:
					_, _ = e.m.store.Evict(t.Context(), 3)
					_, _ = r.s.Pages(nil), r.s.Refs(nil)
				}
				if err != nil && !errors.Is(err, fault.Busy) && !errors.Is(err, fault.Full) && !errors.Is(err, fault.Corrupt) {
					t.Errorf("%d/%d: %v", i, j, err)
				}
			}
		})
	}
	all.Wait()
	noError(t, r.s.Remove())
	e.check()
}

// Who looks at a sequence while Admit gives back its match sees the match or
// nothing.
func TestSequence_CanBeLookedAtDuringAdmit(t *testing.T) {
	for range 20 {
		e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
		tokens := text(1, 0, 13)
		e.cold(tokens)
		r := must(e.ingest("a", tokens, 13))(t)
		equal(t, "matched", must(r.match())(t).Pages, 3)
		flip(t, e, r.hostPage(1))
		stop := make(chan struct{})
		var looking sync.WaitGroup
		looking.Go(func() {
			for {
				if n := len(r.s.Refs(nil)); n != 0 && n != 3 {
					t.Errorf("%d refs", n)
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		_, err := r.s.Admit(t.Context(), 1)
		faulttest.Refused(t, err, fault.Corrupt)
		close(stop)
		looking.Wait()
	}
}
