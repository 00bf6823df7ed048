package kvferry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
	"github.com/kvferry/kvferry/store"
)

func TestMatch_IsWholePagesOfTheLongestPrefix(t *testing.T) {
	c := shape
	c.PageSize, c.Pages = 16, 16
	stored := text(1, 0, 100)
	for _, test := range []struct {
		name    string
		tokens  []uint32
		matched int // pages
		reasons []fault.Reason
	}{
		{"all whole pages", text(1, 0, 100), 6, []fault.Reason{0, 0, 0, 0, 0, 0}},
		{"a longer prompt", text(1, 0, 120), 6, []fault.Reason{0, 0, 0, 0, 0, 0, fault.NeverStored}},
		{"its last page is held back", text(1, 0, 96), 5, []fault.Reason{0, 0, 0, 0, 0, fault.HeldBack}},
		{"a shorter prompt", text(1, 0, 40), 2, []fault.Reason{0, 0}},
		{"one page is held back", text(1, 0, 16), 0, []fault.Reason{fault.HeldBack}},
		{"less than a page", text(1, 0, 15), 0, nil},
		{"another prompt", text(2, 0, 40), 0, []fault.Reason{fault.NeverStored, fault.NeverStored}},
		{"no tokens", nil, 0, nil},
		{
			"diverging on page 2", append(slices.Clone(stored[:40]), text(3, 0, 60)...), 2,
			[]fault.Reason{0, 0, fault.NeverStored, fault.NeverStored, fault.NeverStored, fault.NeverStored},
		},
		{
			"diverging on the last token of page 1", append(slices.Clone(stored[:31]), text(3, 0, 17)...), 1,
			[]fault.Reason{0, fault.NeverStored, fault.NeverStored},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, c), Options{}, false)
			e.store(stored)
			r := must(e.ingest("a", test.tokens, len(test.tokens)))(t)
			m := must(r.match())(t)
			equal(t, "pages", m.Pages, test.matched)
			equal(t, "tokens", m.Tokens, 16*test.matched)
			equal(t, "answers", len(m.Answers), len(test.reasons))
			for i, want := range test.reasons {
				equal(t, fmt.Sprintf("answer %d", i), m.Answers[i].Reason, want)
				equal(t, fmt.Sprintf("tier of %d", i), m.Answers[i].Tier == store.Device, want == fault.Hit)
			}
			equal(t, "refs", len(r.s.Refs(nil)), test.matched) // no match, no lease
			noError(t, r.admit(t.Context(), len(test.tokens)))
			equal(t, "stored", r.s.Stored(), 16*test.matched)
			noError(t, r.commit(len(test.tokens)))
			r.verified()
			e.check()
		})
	}
}

// Every reason that the front door can meet, one page each.
func TestMatch_GivesOneAnswerForEachPage(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 2, History: 16}, false)
	tokens := text(1, 0, 24) // 6 pages
	e.store(tokens)
	e.evict(3) // pages 3, 4, 5: the deepest first; the host has room for two
	r := must(e.ingest("a", tokens, 24))(t)
	m := must(r.match())(t)
	hit := func(tier store.Tier) store.Answer { return store.Answer{Tier: tier} }
	miss := func(why fault.Reason) store.Answer { return store.Answer{Reason: why} }
	want := []store.Answer{hit(store.Device), hit(store.Device), hit(store.Device), hit(store.Host), hit(store.Host), miss(fault.Evicted)}
	if !slices.Equal(m.Answers, want) {
		t.Fatalf("got %v, want %v", m.Answers, want)
	}
	noError(t, r.s.Remove())

	e.evict(3) // the rest; on the host they push out the older pages 3 and 4, and the deepest of themselves
	longer := prefix.AppendChain(nil, root, text(1, 0, 28), 4)
	refs := must(e.m.store.Reserve(nil, longer[6:]))(t) // somebody is writing page 6
	r = must(e.ingest("a", text(1, 0, 28), 28))(t)
	m = must(r.match())(t)
	want = []store.Answer{
		hit(store.Host), hit(store.Host), miss(fault.Evicted),
		miss(fault.Evicted), miss(fault.Evicted), miss(fault.Evicted), miss(fault.Pending),
	}
	if !slices.Equal(m.Answers, want) {
		t.Fatalf("got %v, want %v", m.Answers, want)
	}
	e.m.store.Abandon(refs)
	again := must(r.match())(t)
	if !slices.Equal(again.Answers, want) {
		t.Fatalf("asked again it answers %v, before %v", again.Answers, want)
	}
	e.check()
}

func TestMatch_BeyondPrefix(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 13)
	keys := prefix.AppendChain(nil, root, tokens, 4)
	// Only page 1 has a key that is stored: page 0 was made under another name.
	s := must(e.m.Ingest(ID{Request: "a"}, Prompt{Tokens: 13, Keys: []page.Key{{1}, keys[1]}}))(t)
	must(s.Admit(t.Context(), 8))(t)
	noError(t, s.Commit(8))
	m := must(must(e.ingest("b", tokens, 13))(t).match())(t)
	equal(t, "pages", m.Pages, 0)
	for i, want := range []fault.Reason{fault.NeverStored, fault.BeyondPrefix, fault.NeverStored} {
		equal(t, fmt.Sprint("answer ", i), m.Answers[i].Reason, want)
	}
	e.check()
}

func TestMatch_IsPinnedUntilItIsGivenBack(t *testing.T) {
	for _, test := range []struct {
		name     string
		giveBack func(t *testing.T, r *run) error
	}{
		{"reset", func(_ *testing.T, r *run) error { return r.reset(false) }},
		{"reset, free", func(_ *testing.T, r *run) error { return r.reset(true) }},
		{"remove", func(_ *testing.T, r *run) error { return r.s.Remove() }},
		{"admit and remove", func(t *testing.T, r *run) error {
			return errors.Join(r.admit(t.Context(), 9), r.s.Remove())
		}},
		{"admit, commit and reset", func(t *testing.T, r *run) error {
			return errors.Join(r.admit(t.Context(), 9), r.commit(9), r.reset(false))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{}, false)
			e.store(text(1, 0, 9))
			r := must(e.ingest("a", text(1, 0, 9), 9))(t)
			equal(t, "pages", must(r.match())(t).Pages, 2)
			equal(t, "pages again", must(r.match())(t).Pages, 2) // and not pinned twice
			freed, err := e.m.store.Evict(t.Context(), 1)
			equal(t, "evicted while pinned", freed, 0)
			faulttest.Refused(t, err, fault.Full)
			noError(t, test.giveBack(t, r))
			e.check()
			e.evict(2)
			equal(t, "free", e.m.NumFree(), 8)
			e.check()
		})
	}
}

func TestAdmit_RefusedLeavesTheMatch(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	tokens := text(1, 0, 13)
	e.store(tokens)
	e.evict(1)
	hog := must(e.ingest("hog", text(2, 0, 16), 16))(t)
	noError(t, hog.admit(t.Context(), 16))
	r := must(e.ingest("a", tokens, 13))(t)
	first := must(r.match())(t)
	equal(t, "pages", first.Pages, 3)
	free, refs := e.m.NumFree(), r.s.Refs(nil)
	for range 3 {
		_, err := r.s.Admit(t.Context(), 17) // 5 pages behind 3, of which one is on the host
		faulttest.Refused(t, err, fault.Full, `sequence "a"`, "asked for 6 pages, free 2")
		var full *page.FullError
		if !errors.As(err, &full) || full.Asked != 6 || full.Free != free || full.LargestRun < 1 {
			t.Fatalf("%+v does not say how much was asked and is free", full)
		}
		if fault.RemedyOf(err) == "" {
			t.Fatalf("%v has no remedy", err)
		}
		e.check()
		again := must(r.match())(t)
		if again.Pages != 3 || !slices.Equal(again.Answers, first.Answers) || !slices.Equal(r.s.Refs(nil), refs) {
			t.Fatalf("asked again it matches %+v, before %+v", again, first)
		}
		equal(t, "free", e.m.NumFree(), free)
		equal(t, "pages", len(r.s.Pages(nil)), 0)
	}
	noError(t, hog.s.Remove())
	noError(t, r.admit(t.Context(), 13))
	noError(t, r.commit(13))
	r.verified()
	noError(t, r.s.Remove())
	e.evict(3) // every pin was given back
	e.check()
}

// What can never fit must not cost others their pages.
func TestAdmit_MoreThanThereIsEvictsNothing(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	e.store(text(1, 0, 12))
	for _, span := range []int{33, 1 << 20, 1<<31 - 1} {
		r := must(e.ingest(fmt.Sprint(span), nil, 0))(t)
		_, err := r.s.Admit(t.Context(), span)
		faulttest.Refused(t, err, fault.Full, r.s.ID().String(), "free 5, largest run 5")
		if fault.RemedyOf(err) == "" {
			t.Fatalf("%v has no remedy", err)
		}
		equal(t, "pages in the store", e.m.store.Stats().DevicePages, 3)
	}
	grown := must(e.ingest("grown", nil, 0))(t)
	must(grown.s.Admit(t.Context(), 32))(t) // all there is
	_, err := grown.s.Admit(t.Context(), 33)
	faulttest.Refused(t, err, fault.Full)
	e.check()
}

func TestAdmit_ConvertsTheMatchAndCommitCountsOnce(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 14)
	e.store(tokens[:9])
	r := must(e.ingest("a", tokens, 14))(t)
	lease := must(r.match())(t)
	adm := must(r.s.Admit(t.Context(), 14-lease.Tokens))(t)
	equal(t, "tokens", adm.Tokens, 14)
	equal(t, "stored", adm.Stored, 8)
	equal(t, "done", adm.Done(), true)
	_, err := r.s.Match()
	faulttest.Refused(t, err, fault.Busy, `sequence "a"`)
	r.adm, r.stored = adm, adm.Stored
	noError(t, r.write(8, 14))

	for _, n := range []int{7, -1, 1 << 40} {
		faulttest.Refused(t, r.s.Commit(n), fault.Invalid, `sequence "a"`)
		equal(t, "stored", r.s.Stored(), 8)
	}
	noError(t, r.s.Commit(6))
	faulttest.Refused(t, r.s.Commit(6), fault.Invalid) // a retry of what has succeeded
	noError(t, r.s.Commit(0))
	equal(t, "stored", r.s.Stored(), 14)
	r.stored = 14
	r.verified()
	equal(t, "shared pages", len(r.s.Refs(nil)), 3)
	equal(t, "committed", e.m.store.Stats().Committed, 3)
	e.check()
}

func TestAdmit_WithoutCommitReservesAndKeepsTheLength(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	r := e.serve("a", text(1, 0, 5))
	adm := must(r.s.Admit(t.Context(), 10))(t)
	equal(t, "tokens", adm.Tokens, 15)
	pages, free := r.s.Pages(nil), e.m.NumFree()
	equal(t, "pages", len(pages), 4)
	equal(t, "stored", r.s.Stored(), 5)
	for _, span := range []int{10, 3, 0, 11} { // a step again, a shorter one, none, the rest of the page
		adm = must(r.s.Admit(t.Context(), span))(t)
		equal(t, "stored", adm.Stored, 5)
		equal(t, "tokens that may be committed", adm.Tokens, max(15, 5+span))
		equal(t, "free", e.m.NumFree(), free)
		equal(t, "the same pages", slices.Equal(r.s.Pages(nil), pages), true)
	}
	noError(t, r.s.Commit(adm.Tokens-5))
	e.check()
}

func TestAdmit_PrefixGoesBeforePagesKeptByReset(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 14)
	r := must(e.ingest("a", tokens, 14))(t)
	noError(t, r.admit(t.Context(), 14))
	noError(t, r.reset(false))
	kept := r.s.Pages(nil)
	equal(t, "kept", len(kept), 4)
	e.store(tokens[:9])
	equal(t, "matched", must(r.match())(t).Pages, 2)
	noError(t, r.admit(t.Context(), 14))
	after := r.s.Pages(nil)
	// Four pages are needed: the two that are too many have gone back.
	if !slices.Equal(after[2:], kept[:2]) || slices.Contains(kept[:2], after[0]) || slices.Contains(kept[:2], after[1]) {
		t.Fatalf("pages %v: want the match, then %v", after, kept[:2])
	}
	noError(t, r.commit(14))
	r.verified()
	e.check()
}

func TestCommit_SecondPageOfAKeyStaysPrivate(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 9)
	a, b := must(e.ingest("a", tokens, 9))(t), must(e.ingest("b", tokens, 9))(t)
	for _, r := range []*run{a, b} {
		noError(t, r.admit(t.Context(), 9))
		noError(t, r.commit(9))
	}
	equal(t, "refused", e.m.store.Stats().Refused, 2)
	equal(t, "owners of b's page", e.m.arena.Owners(b.s.Pages(nil)[0]), 1)
	e.check()
	noError(t, a.s.Remove())
	b.verified()
	noError(t, b.s.Remove())
	equal(t, "free", e.m.NumFree(), 6)
	e.check()
}

func TestExtend_SharesWhatDecodingFills(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 20)
	r := must(e.ingest("a", tokens, 6))(t)
	noError(t, r.admit(t.Context(), 6))
	noError(t, r.commit(6))
	for end := 7; end <= 12; end++ { // decoding, token by token
		noError(t, r.admit(t.Context(), end))
		noError(t, r.extend())
		noError(t, r.commit(end))
		e.check()
	}
	next := must(e.ingest("next turn", tokens, 20))(t)
	equal(t, "pages of the next turn", must(next.match())(t).Pages, 3)
	noError(t, next.admit(t.Context(), 20))
	noError(t, next.commit(20))
	next.verified()

	keyed := must(e.ingest("keyed before it is matched", tokens, 6))(t)
	noError(t, keyed.s.Extend(page.Key{1}, page.Key{2}))
	equal(t, "answers: the prompt's pages only", len(must(keyed.match())(t).Answers), 1)
	e.check()
}

// The keys of what was decoded before a reset are not those of what is decoded
// after it.
func TestExtend_IsForgottenByReset(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	tokens := text(1, 0, 13)
	r := must(e.ingest("a", tokens, 5))(t)
	noError(t, r.admit(t.Context(), 13))
	noError(t, r.extend())
	noError(t, r.reset(false)) // before anything was committed under the keys
	r.tokens = append(slices.Clone(tokens[:5]), text(2, 0, 8)...)
	r.trail = trailOf(r.tokens)
	noError(t, r.admit(t.Context(), 13))
	noError(t, r.commit(13))
	equal(t, "shared", len(r.s.Refs(nil)), 1)
	other := must(e.ingest("b", tokens, 13))(t)
	equal(t, "pages matched", must(other.match())(t).Pages, 1)
	e.check()
}

// Corrupt pages that somebody still pins take entries of the store. When they have
// taken all, a page cannot be shared now, and the tokens are stored nevertheless.
func TestCommit_GoesOnWhenNothingCanBeShared(t *testing.T) {
	e := newEngine(t, geometry(t, withPages(1)), Options{HostPages: 1}, false)
	for i := range 3 { // as many as the store has entries
		tokens := text(uint32(i), 0, 5)
		e.store(tokens[:4])
		e.evict(1)
		pinned := must(e.ingest(fmt.Sprint("pinned ", i), tokens, 5))(t)
		equal(t, "matched", must(pinned.match())(t).Pages, 1)
		victim := must(e.ingest(fmt.Sprint("victim ", i), tokens[:5], 5))(t)
		equal(t, "matched", must(victim.match())(t).Pages, 1)
		flip(t, e, victim.hostPage(0))
		_, err := victim.s.Admit(t.Context(), 0)
		faulttest.Refused(t, err, fault.Corrupt)
		noError(t, victim.s.Remove())
	}
	r := must(e.ingest("a", text(9, 0, 4), 4))(t)
	noError(t, r.admit(t.Context(), 4))
	noError(t, r.commit(4))
	equal(t, "stored", r.s.Stored(), 4)
	equal(t, "shared", len(r.s.Refs(nil)), 0)
	r.verified()
	noError(t, e.m.Sequence(ID{Request: "pinned 0"}).Remove())
	noError(t, r.s.Commit(0)) // there is an entry now
	equal(t, "shared", len(r.s.Refs(nil)), 1)
	e.check()
}

// flip changes one byte of a host page.
func flip(t *testing.T, e *engine, id page.ID) {
	t.Helper()
	b := must(e.m.Pool().Cache().Page(id))(t)
	b[len(b)/2] ^= 1
}

func TestIngest_IsIdempotent(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{}, false)
	keys := prefix.AppendChain(nil, root, text(1, 0, 9), 4)
	id := ID{Request: "a", Label: "main"}
	s := must(e.m.Ingest(id, Prompt{Tokens: 9, Keys: keys}))(t)
	must(s.Admit(t.Context(), 9))(t)
	noError(t, s.Commit(9))
	again := must(e.m.Ingest(id, Prompt{Tokens: 9, Keys: slices.Clone(keys)}))(t)
	equal(t, "sequence", again, s)
	equal(t, "stored", again.Stored(), 9)
	equal(t, "looked up", e.m.Sequence(id), s)
	for _, p := range []Prompt{{Tokens: 10, Keys: keys}, {Tokens: 9, Keys: keys[:1]}, {Tokens: 9}} {
		_, err := e.m.Ingest(id, p)
		faulttest.Refused(t, err, fault.Exists, `sequence "a"/"main"`)
	}
	other := must(e.m.Ingest(ID{Request: "a", Label: "draft"}, Prompt{}))(t)
	equal(t, "another label is another sequence", other != s, true)
	noError(t, s.Remove())
	if e.m.Sequence(id) != nil {
		t.Fatal("a removed sequence is still found")
	}
	fresh := must(e.m.Ingest(id, Prompt{Tokens: 10, Keys: keys}))(t)
	equal(t, "stored", fresh.Stored(), 0)
	keys[0] = page.Key{} // the caller's slice is the caller's
	equal(t, "matched", must(fresh.Match())(t).Pages, 2)
	e.check()
}

// A key named twice is no prompt that a chain can make, and must not cost a page.
func TestIngest_KeyNamedTwiceLosesNoPage(t *testing.T) {
	for _, host := range []int{0, 4} {
		t.Run(fmt.Sprint("host=", host), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: host}, false)
			key := page.Key{1}
			for i := range 3 {
				s := must(e.m.Ingest(ID{Request: fmt.Sprint(i)}, Prompt{Tokens: 13, Keys: []page.Key{key, key, key}}))(t)
				m := must(s.Match())(t)
				equal(t, "answers", len(m.Answers), 3)
				adm := must(s.Admit(t.Context(), 13-m.Tokens))(t)
				noError(t, adm.Wait(t.Context()))
				noError(t, s.Commit(13-m.Tokens))
				e.check()
				noError(t, s.Remove())
				e.check()
				e.evict(1)
				e.check()
				equal(t, "free", e.m.NumFree(), 8)
			}
		})
	}
}

// Every kind of error that the calls on a sequence document, with the sequence in
// its text.
func TestSequence_Refusals(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	stored := text(1, 0, 13)
	for _, test := range []struct {
		name string
		kind error
		do   func(t *testing.T, e *engine, r *run) error
	}{
		{"match of an admitted sequence", fault.Busy, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.admit(t.Context(), 13))
			_, err := r.s.Match()
			return err
		}},
		{"negative span", fault.Invalid, func(t *testing.T, _ *engine, r *run) error {
			_, err := r.s.Admit(t.Context(), -1)
			return err
		}},
		{"span behind a match that overflows", fault.Invalid, func(t *testing.T, _ *engine, r *run) error {
			must(r.match())(t)
			_, err := r.s.Admit(t.Context(), 1<<31-8)
			return err
		}},
		{"no room", fault.Full, func(t *testing.T, e *engine, r *run) error {
			noError(t, must(e.ingest("hog", text(2, 0, 20), 20))(t).admit(t.Context(), 20))
			_, err := r.s.Admit(t.Context(), 16)
			return err
		}},
		{"no time to evict", context.Canceled, func(_ *testing.T, e *engine, r *run) error {
			release := e.hold(e.m.Copies())
			defer release()
			_, err := r.s.Admit(canceled, 32)
			return err
		}},
		{"corrupt page", fault.Corrupt, func(t *testing.T, e *engine, r *run) error {
			e.evict(3)
			flip(t, e, r.hostPage(1))
			must(r.match())(t)
			_, err := r.s.Admit(t.Context(), 1)
			return err
		}},
		{"page that did not arrive", fault.Device, func(t *testing.T, e *engine, r *run) error {
			e.evict(3)
			must(r.match())(t)
			e.breakCopies()
			adm := must(r.s.Admit(t.Context(), 1))(t)
			_ = adm.Wait(t.Context())
			_, err := r.s.Admit(t.Context(), 1)
			return err
		}},
		{"commit of more than admitted", fault.Invalid, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.admit(t.Context(), 13))
			return r.s.Commit(14)
		}},
		{"call during a call", fault.Busy, func(_ *testing.T, _ *engine, r *run) error {
			r.s.busy = true
			defer func() { r.s.busy = false }()
			return r.s.Reset(false)
		}},
		{"match when removed", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			_, err := r.s.Match()
			return err
		}},
		{"admit when removed", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			_, err := r.s.Admit(t.Context(), 1)
			return err
		}},
		{"commit when removed", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			return r.s.Commit(0)
		}},
		{"extend when removed", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			return r.s.Extend(page.Key{1})
		}},
		{"reset when removed", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			return r.s.Reset(true)
		}},
		{"removed twice", fault.NotFound, func(t *testing.T, _ *engine, r *run) error {
			noError(t, r.s.Remove())
			return r.s.Remove()
		}},
		{"negative prompt", fault.Invalid, func(_ *testing.T, e *engine, r *run) error {
			_, err := e.m.Ingest(r.s.ID(), Prompt{Tokens: -1})
			return err
		}},
		{"more keys than whole pages", fault.Invalid, func(_ *testing.T, e *engine, r *run) error {
			_, err := e.m.Ingest(r.s.ID(), Prompt{Tokens: 7, Keys: make([]page.Key, 2)})
			return err
		}},
		{"another prompt", fault.Exists, func(_ *testing.T, e *engine, r *run) error {
			_, err := e.m.Ingest(r.s.ID(), Prompt{Tokens: 1})
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
			e.store(stored)
			r := must(e.ingest("a", stored, 13))(t)
			err := test.do(t, e, r)
			if !errors.Is(err, test.kind) {
				t.Fatalf("got %v, want %v", err, test.kind)
			}
			if !errors.Is(err, context.Canceled) {
				faulttest.Refused(t, err, fault.KindOf(err), `sequence "a"`)
			}
		})
	}
}

// A zero layer geometry has pages without bytes: bookkeeping only.
func TestSequence_LivesWithoutBytes(t *testing.T) {
	e := newEngine(t, geometry(t, kv.Config{Pages: 4, PageSize: 512}), Options{HostPages: 8}, false)
	for i := range 6 {
		tokens := text(uint32(i%3), 512, 1500)
		r := e.serve(fmt.Sprint(i), tokens)
		noError(t, r.s.Remove())
		e.check()
	}
	equal(t, "pages kept", e.m.store.Stats().Entries, 4)
}
