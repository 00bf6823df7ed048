package store

import (
	"context"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/page"
)

// A flipped byte anywhere in a host page is found, by whoever looks first: the page
// is a miss with its reason, counted, and said in the log.
func TestScrub_FindsAFlippedByteAnywhere(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 60 {
		r := newRig(t, setup{device: 4, host: 4, bytes: true, scrubAfter: -1})
		r.fill("abc")
		r.evict(3)
		k := r.key("ab")
		e := &r.store.entries[r.store.index.lookup(&k, r.store.index.hash(&k))]
		b, err := r.pool.Cache().Page(e.part.host)
		noError(t, err)
		b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
		wrong, err := r.store.Scrub(t.Context())
		noError(t, err)
		if wrong != 1 {
			t.Fatalf("%d wrong pages found, want 1", wrong)
		}
		m := r.match("abc")
		if got := []fault.Reason{m.Answers[0].Reason, m.Answers[1].Reason, m.Answers[2].Reason}; got[0] != fault.Hit || got[1] != fault.Corrupted || got[2] != fault.BeyondPrefix {
			t.Errorf("answers %v", got)
		}
		r.store.Unpin(m.Refs)
		if st := r.store.Stats(); st.Corrupted != 1 || st.Scrubbed != 3 {
			t.Errorf("corrupted %d, scrubbed %d", st.Corrupted, st.Scrubbed)
		}
		if !strings.Contains(r.complain.String(), "checksum mismatch") {
			t.Errorf("the log says %q", r.complain.String())
		}
		noError(t, r.store.Check())
		if wrong, err := r.store.Scrub(t.Context()); wrong != 0 || err != nil {
			t.Errorf("looked again: %d wrong, %v", wrong, err)
		}
	}
}

// The scrubber runs by itself once no look-up came for a while, and rests after a
// round.
//
//nolint:forbidigo // Sleep moves the time of the bubble
func TestScrubber_LooksWhenNobodyElseDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, setup{device: 4, host: 4, bytes: true, scrubAfter: time.Minute})
		r.fill("abc")
		r.evict(2)
		scrubbed := func() int64 { return r.store.Stats().Scrubbed }
		time.Sleep(30 * time.Second) // look-ups fall between two looks of the scrubber
		for range 5 {                // busy: a look-up in every minute
			time.Sleep(time.Minute)
			m := r.match("x")
			r.store.Unpin(m.Refs)
		}
		if n := scrubbed(); n != 0 {
			t.Errorf("%d pages were looked at while look-ups came", n)
		}
		time.Sleep(10 * time.Minute)
		if n := scrubbed(); n != 2 {
			t.Errorf("%d pages were looked at, want one round over 2", n)
		}
		m := r.match("x")
		r.store.Unpin(m.Refs)
		time.Sleep(10 * time.Minute)
		if n := scrubbed(); n != 4 {
			t.Errorf("%d pages were looked at after another look-up, want two rounds", n)
		}
		noError(t, r.store.Close(context.Background()))
	})
}

// What is being read by the scrubber may go and come back as somebody else's: that is
// no wrong byte.
func TestScrub_DoesNotJudgeAPageThatHasGone(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 1, bytes: true, scrubAfter: -1})
	r.fill("a")
	r.evict(1)
	suspects, _ := r.store.suspects(0, len(r.store.entries), 10)
	if len(suspects) != 1 {
		t.Fatalf("%d suspects", len(suspects))
	}
	r.store.readers.Done()
	r.fill("b")
	r.evict(1) // b takes the only host page; a is gone
	x := suspects[0]
	e := &r.store.entries[x.r]
	if e.state == kept && e.epoch == x.epoch && e.part.host == x.host {
		t.Error("the page of a would be judged by b's bytes")
	}
	if got, want := r.pool.Sum(x.host), x.sum; got == want {
		t.Error("b has the bytes of a: this test shows nothing")
	}
}

func TestChecks_SayWhenAPageIsSummed(t *testing.T) {
	for _, c := range []struct {
		checks hostpool.Checks
		summed int64 // demoted, promoted, demoted again
		found  bool  // a byte flipped on the host, when the page leaves
	}{
		{hostpool.ChecksAlways, 3, true},
		{hostpool.ChecksArrival, 2, false},
		{hostpool.ChecksOff, 0, false},
	} {
		t.Run(c.checks.String(), func(t *testing.T) {
			r := newRig(t, setup{device: 2, host: 2, bytes: true, checks: c.checks, scrubAfter: -1})
			r.fill("a")
			r.evict(1)
			u, err := r.begin("a")
			noError(t, err)
			r.end(u)
			r.evict(1)
			if n := r.store.Stats().Summed; n != c.summed {
				t.Errorf("summed %d times, want %d", n, c.summed)
			}
			r.flipIn(r.pool.Cache(), "a", func(p *part) page.ID { return p.host })
			m := r.match("a")
			fresh, err := r.acquire(1)
			noError(t, err)
			var l Loaded
			err = r.store.Load(m.Refs, fresh, &l)
			if found := err != nil; found != c.found {
				t.Errorf("the flipped byte was found: %v, want %v (%v)", found, c.found, err)
			}
			r.store.Unpin(m.Refs)
			for _, x := range l.Tickets {
				noError(t, x.Wait(t.Context()))
			}
			_, err = r.arena.Release(fresh)
			noError(t, err)
		})
	}
}
