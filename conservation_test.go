package kvferry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func TestConservation_OwnersOfAPageAreTheStoreAndItsSequences(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 5) // one whole page and a token
	a := must(e.ingest("a", tokens, 5))(t)
	noError(t, a.admit(t.Context(), 5))
	shared := a.s.Pages(nil)[0]
	owners := func(n int, when string) {
		t.Helper()
		equal(t, "owners "+when, e.m.arena.Owners(shared), n)
		e.check()
	}
	owners(1, "when admitted")
	equal(t, "sealed before commit", e.m.arena.Sealed(shared), false)
	noError(t, a.commit(5))
	owners(2, "when committed")
	equal(t, "sealed", e.m.arena.Sealed(shared), true)

	b := e.serve("b", tokens)
	equal(t, "page of b", b.s.Pages(nil)[0], shared)
	owners(3, "with a second sequence")
	noError(t, a.s.Remove())
	owners(2, "without the first")
	free := e.m.NumFree()
	noError(t, b.s.Remove())
	owners(1, "without sequences")
	equal(t, "free: only b's last page came back", e.m.NumFree(), free+1)

	e.evict(1)
	owners(0, "when evicted")
	equal(t, "sealed when free", e.m.arena.Sealed(shared), false)
	equal(t, "free", e.m.NumFree(), 8)
}

func TestConservation_PagesOfASequenceAreItsOwn(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	seen := map[page.ID]bool{}
	for i := range 4 {
		r := must(e.ingest(fmt.Sprint(i), text(uint32(i), 0, 8), 8))(t)
		noError(t, r.admit(t.Context(), 8))
		for _, id := range r.s.Pages(nil) {
			if seen[id] || e.m.arena.Owners(id) != 1 {
				t.Fatalf("page %d has %d owners, handed out before: %v", id, e.m.arena.Owners(id), seen[id])
			}
			seen[id] = true
		}
	}
	equal(t, "pages handed out", len(seen), 8)
	e.check()
}

func TestConservation_SinkIsHandedToNobody(t *testing.T) {
	for _, sink := range []bool{true, false} {
		t.Run(fmt.Sprint(sink), func(t *testing.T) {
			c := shape
			c.Sink = sink
			e := newEngine(t, geometry(t, c), Options{HostPages: 2}, false)
			all := usable(e.cache.Geometry())
			equal(t, "free", e.m.NumFree(), all)
			r := must(e.ingest("a", text(1, 0, 4*all), 4*all))(t)
			noError(t, r.admit(t.Context(), 4*all))
			equal(t, "page 0 handed out", slices.Contains(r.s.Pages(nil), page.Sink), !sink)
			equal(t, "owners of page 0", e.m.arena.Owners(page.Sink), 1)
			noError(t, r.commit(4*all))
			e.check()
			noError(t, r.s.Remove())
			e.evict(all)
			equal(t, "owners of page 0 in the end", e.m.arena.Owners(page.Sink) == 1, sink)
			e.check()
		})
	}
}

func TestReset_KeepsPagesOnlyWhenNoneIsSealed(t *testing.T) {
	for _, test := range []struct {
		name       string
		keys, free bool
		committed  int
		kept       bool
	}{
		{"sealed page", true, false, 9, false},
		{"sealed page, free", true, true, 9, false},
		{"no whole page yet", true, false, 3, true},
		{"no keys", false, false, 9, true},
		{"no keys, free", false, true, 9, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{}, false)
			r := must(e.ingest("a", text(1, 0, 9), 9))(t)
			if !test.keys {
				noError(t, r.s.Remove())
				r.s = must(e.m.Ingest(ID{Request: "a"}, Prompt{Tokens: 9}))(t)
			}
			noError(t, r.admit(t.Context(), 9))
			noError(t, r.commit(test.committed))
			before := r.s.Pages(nil)
			noError(t, r.reset(test.free))
			e.check()
			equal(t, "stored", r.s.Stored(), 0)
			if after := r.s.Pages(nil); test.kept != slices.Equal(before, after) || !test.kept && len(after) > 0 {
				t.Fatalf("pages %v after a reset of %v", after, before)
			}
			// What was shared must survive the next use of the sequence.
			must(r.match())(t)
			noError(t, r.admit(t.Context(), 9))
			if test.kept {
				equal(t, "the same pages again", slices.Equal(before, r.s.Pages(nil)), true)
			}
			noError(t, r.commit(9))
			r.verified()
			e.check()
		})
	}
}

// A page that gets its key after it was committed is shared at the latest by the
// reset itself: then it must not be kept for overwriting.
func TestReset_PageWithALateKeyIsNotOverwritten(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	first := must(e.ingest("a", text(1, 0, 4), 3))(t) // a prompt of no whole page
	noError(t, first.admit(t.Context(), 4))
	noError(t, first.commit(4))
	noError(t, first.extend())
	noError(t, first.reset(false))
	e.check()

	reader := must(e.ingest("b", text(1, 0, 5), 5))(t)
	equal(t, "pages matched", must(reader.match())(t).Pages, 1)
	noError(t, reader.admit(t.Context(), 5))
	noError(t, reader.commit(5))

	first.tokens = text(2, 0, 4) // the engine decodes something else
	first.trail = trailOf(first.tokens)
	noError(t, first.admit(t.Context(), 4))
	noError(t, first.commit(4))
	first.verified()
	reader.verified()
	e.check()
}

// A lifecycle in a pool that is too small for it, over few prompts so that they
// share. Nothing may be lost, whatever is refused.
func TestConservation_HoldsThroughARandomLife(t *testing.T) {
	for _, host := range []int{0, 1, 6} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprintf("host=%d/seed=%d", host, seed), func(t *testing.T) {
				e := newEngine(t, geometry(t, shape), Options{HostPages: host, Inclusive: seed == 1}, false)
				liveAtRandom(t, e, rand.New(rand.NewPCG(seed, 1)), 400)
				e.evict(e.m.store.Stats().DevicePages)
				equal(t, "free in the end", e.m.NumFree(), 8)
				if host > 0 {
					equal(t, "host pages free in the end", e.m.Pool().NumFree()+e.m.store.Stats().HostPages, host)
				}
				e.check()
			})
		}
	}
}

// liveAtRandom does ops operations on e, checks the books after each, and removes
// every sequence in the end.
func liveAtRandom(t *testing.T, e *engine, rng *rand.Rand, ops int) {
	t.Helper()
	var live []*run
	full, away := 0, 0
	for op := range ops {
		var err error
		var r *run
		if len(live) > 0 {
			r = live[rng.IntN(len(live))]
		}
		switch verb := rng.IntN(10); {
		case verb == 0 && len(live) < 6 || r == nil:
			n := 1 + rng.IntN(16)
			if r, err = e.ingest(fmt.Sprint(op), text(uint32(rng.IntN(4)), 6, 24), n); err == nil {
				live = append(live, r)
			}
		case verb == 1 && r.adm.Tokens == 0 && r.stored == 0:
			_, err = r.match()
		case verb <= 3:
			end := max(r.adm.Tokens, r.prompt)
			err = r.admit(t.Context(), min(end+rng.IntN(4), len(r.tokens)))
		case verb <= 5 && r.adm.Tokens > r.stored:
			err = r.commit(r.stored + rng.IntN(r.adm.Tokens-r.stored+1))
		case verb == 6:
			err = r.reset(rng.IntN(2) == 0)
		case verb == 7:
			live = slices.DeleteFunc(live, func(x *run) bool { return x == r })
			err = r.s.Remove()
		case verb == 8 && e.m.Pool() != nil:
			if _, err = r.s.Offload(t.Context()); r.s.IsOffloaded() {
				away++
			}
		case verb == 9 && r.s.IsOffloaded():
			_, err = r.reload(t.Context())
		}
		if errors.Is(err, fault.Full) {
			full++
			err = nil
		}
		if errors.Is(err, fault.Busy) && (r.adm.Tokens > r.stored || r.s.IsOffloaded()) {
			err = nil // it may neither go nor, once gone, be used
		}
		if err == nil && r.s.Stored() > 0 && !r.s.IsOffloaded() {
			err = r.verify()
		}
		if err := errors.Join(err, e.m.Check()); err != nil {
			t.Fatalf("operation %d: %v", op, err)
		}
	}
	if full == 0 {
		t.Error("the pool was never too small: the test is too easy")
	}
	if away == 0 && e.m.Pool() != nil && e.m.Pool().Pages() > 1 {
		t.Error("no sequence was ever offloaded: the test is too easy")
	}
	for _, r := range live {
		noError(t, r.s.Remove())
	}
}

func TestCheck_SeesAWrongCountAtOnce(t *testing.T) {
	for _, test := range []struct {
		name     string
		sabotage func(e *engine, r *run) error
	}{
		{"an owner too many", func(e *engine, r *run) error { return e.m.arena.Retain(r.s.pages[:1]) }},
		{"an owner too few", func(e *engine, r *run) error { _, err := e.m.arena.Release(r.s.pages[:1]); return err }},
		{"a page of its own freed", func(e *engine, r *run) error { _, err := e.m.arena.Release(r.s.pages[1:]); return err }},
		{"a page taken and forgotten", func(e *engine, _ *run) error { _, err := e.m.arena.Acquire(nil, 1); return err }},
		{"a page lost from the list", func(_ *engine, r *run) error { r.s.pages = r.s.pages[:1]; return nil }},
		{"a page in two sequences", func(e *engine, r *run) error {
			other, err := e.ingest("b", r.tokens, 1)
			if err == nil {
				other.s.pages = append(other.s.pages, r.s.pages[1])
			}
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 2}, false)
			r := e.serve("a", text(1, 0, 5))
			e.check()
			noError(t, test.sabotage(e, r))
			if e.m.Check() == nil {
				t.Fatal("the check passed")
			}
		})
	}
}
