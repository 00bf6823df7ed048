package kvferry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
	"github.com/kvferry/kvferry/store"
)

// breakCopies makes the next copy between device and host fail.
func (e *engine) breakCopies() {
	e.failed = true
	e.cable = e.g.fail(e.m.Copies())
}

// cold stores tokens and moves their whole pages to the host.
func (e *engine) cold(tokens []uint32) {
	e.t.Helper()
	e.store(tokens)
	e.evict(len(tokens) / e.size)
}

// why answers for the whole pages of tokens.
func (e *engine) why(tokens []uint32) []store.Answer {
	keys := prefix.AppendChain(nil, root, tokens, e.size)
	return e.m.store.Why(nil, keys, len(keys))
}

func TestFailedLoad_IsLatchedAndNothingBehindItIsShared(t *testing.T) {
	tokens := text(1, 0, 13) // 3 whole pages, two of them stored
	for _, end := range []string{"reset", "reset, free", "remove"} {
		t.Run(end, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
			e.cold(tokens[:8])
			r := must(e.ingest("a", tokens, 13))(t)
			equal(t, "matched", must(r.match())(t).Pages, 2)
			e.breakCopies()
			adm := must(r.s.Admit(t.Context(), 5))(t)
			for range 2 {
				err := adm.Wait(t.Context())
				faulttest.Refused(t, err, fault.Device)
				equal(t, "caused by the failure", errors.Is(err, e.cable), true)
			}
			equal(t, "done", adm.Done(), true)
			e.check()
			for range 2 { // latched
				faulttest.Refused(t, r.s.Commit(5), fault.Device, `sequence "a"`, e.cable.Error())
				_, err := r.s.Admit(t.Context(), 9)
				faulttest.Refused(t, err, fault.Device, `sequence "a"`)
				equal(t, "stored", r.s.Stored(), 8)
			}
			switch end {
			case "remove":
				noError(t, r.s.Remove())
				r = must(e.ingest("a", tokens, 13))(t)
			default:
				noError(t, r.reset(end == "reset, free"))
			}
			e.check()
			equal(t, "free", e.m.NumFree(), 8)
			equal(t, "page 2", e.why(tokens)[2].Reason, fault.NeverStored)

			// The sequence is as good as new: all is computed, and the bytes are right.
			noError(t, r.admit(t.Context(), 13))
			noError(t, r.commit(13))
			r.verified()
			e.check()
			noError(t, r.s.Remove())
			e.check()
		})
	}
}

// The engine commits behind a prefix that is still on its way, as Options.Compute
// lets it: what it computed is shared once the prefix has arrived, or never.
func TestCommit_BehindALoadIsSharedOnlyIfItArrives(t *testing.T) {
	tokens := text(1, 0, 17)
	for _, test := range []struct {
		name   string
		broken bool
		want   fault.Reason
	}{
		{"arrived", false, fault.Hit},
		{"failed", true, fault.NeverStored},
	} {
		for _, end := range []string{"commit", "reset", "remove"} {
			t.Run(test.name+"/"+end, func(t *testing.T) {
				e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, true)
				e.cold(tokens[:8])
				r := must(e.ingest("a", tokens, 17))(t)
				equal(t, "matched", must(r.match())(t).Pages, 2)
				if test.broken {
					e.breakCopies()
				}
				release := e.hold(e.m.Copies())
				noError(t, r.admit(t.Context(), 17))
				noError(t, r.commit(13))
				equal(t, "shared too early", e.why(tokens)[2].Reason, fault.NeverStored)
				e.check()
				release()
				equal(t, "failed", r.adm.Wait(t.Context()) != nil, test.broken)
				switch end {
				case "commit":
					equal(t, "refused", r.commit(17) != nil, test.broken)
				case "reset":
					noError(t, r.reset(false))
				case "remove":
					noError(t, r.s.Remove())
				}
				equal(t, "page 2", e.why(tokens)[2].Reason, test.want)
				e.check()
			})
		}
	}
}

// A load that fails while Commit looks must not be taken for one that arrived.
func TestCommit_RacingAFailureSharesNothing(t *testing.T) {
	e := newEngine(t, geometry(t, kv.Config{Pages: 4, PageSize: 4}), Options{}, false)
	for i := range 3000 {
		key := page.Key{byte(i), byte(i >> 8), 1}
		s := must(e.m.Ingest(ID{}, Prompt{Tokens: 4, Keys: []page.Key{key}}))(t)
		must(s.Admit(t.Context(), 4))(t)
		load := device.NewTicket()
		s.loads = []*device.Ticket{load}
		var failing sync.WaitGroup
		failing.Go(func() { load.Complete(errCable) })
		_ = s.Commit(4)
		failing.Wait()
		noError(t, s.Remove())
		if why := e.m.store.Why(nil, []page.Key{key}, 1)[0]; why.Reason != fault.NeverStored {
			t.Fatalf("round %d: what was computed behind a lost page is shared: %+v", i, why)
		}
	}
}

// Two sequences adopt the same page while it is loaded: the failure is theirs both.
func TestFailedLoad_ReachesEverybodyWhoAdoptedThePage(t *testing.T) {
	tokens := text(1, 0, 9)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.cold(tokens)
	e.breakCopies()
	release := e.hold(e.m.Copies())
	var sequences []*Sequence
	var admissions []Admission
	for i := range 3 {
		r := must(e.ingest(fmt.Sprint(i), tokens, 9))(t)
		equal(t, "matched", must(r.match())(t).Pages, 2)
		admissions = append(admissions, must(r.s.Admit(t.Context(), 1))(t))
		sequences = append(sequences, r.s)
		e.check()
	}
	release()
	for i, s := range sequences {
		faulttest.Refused(t, admissions[i].Wait(t.Context()), fault.Device)
		faulttest.Refused(t, s.Commit(1), fault.Device, s.ID().String())
		noError(t, s.Remove())
		e.check()
	}
	equal(t, "free", e.m.NumFree(), 8)
}

// A page that cannot be demoted gives way all the same, and its key says why.
func TestFailedDemotion_GivesItsPageUp(t *testing.T) {
	tokens := text(1, 0, 8)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.store(tokens)
	e.breakCopies()
	r := must(e.ingest("a", text(2, 0, 32), 32))(t)
	noError(t, r.admit(t.Context(), 32))
	noError(t, r.commit(32))
	r.verified()
	e.check()
	for i, a := range e.why(tokens) {
		equal(t, fmt.Sprint("page ", i), a.Reason, fault.CopyFailed)
	}
	equal(t, "host pages free", e.m.Pool().NumFree(), 4)
}

// Of all the calls only Admit waits, and then only as long as its context.
func TestAdmit_LeftEarlyLosesNothing(t *testing.T) {
	tokens := text(1, 0, 32)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	e.store(tokens)
	r := must(e.ingest("a", text(2, 0, 8), 8))(t)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	release := e.hold(e.m.Copies())
	_, err := r.s.Admit(canceled, 8)
	equal(t, "canceled", errors.Is(err, context.Canceled), true)
	e.check()
	release()
	noError(t, r.admit(t.Context(), 8))
	noError(t, r.commit(8))
	r.verified()
	e.check()
	again := must(e.ingest("b", tokens, 32))(t)
	equal(t, "matched", must(again.match())(t).Pages, 7)
	e.check()
}

func TestCorruptHostByte_IsAMissWithAReason(t *testing.T) {
	tokens := text(1, 0, 14) // 3 whole pages
	for _, inclusive := range []bool{false, true} {
		t.Run(fmt.Sprint("inclusive=", inclusive), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 4, Inclusive: inclusive}, false)
			e.cold(tokens)
			r, other := must(e.ingest("a", tokens, 14))(t), must(e.ingest("b", tokens, 14))(t)
			for _, r := range []*run{r, other} {
				equal(t, "matched", must(r.match())(t).Pages, 3)
			}
			flip(t, e, r.hostPage(1))
			for _, r := range []*run{r, other} {
				free := e.m.NumFree()
				_, err := r.s.Admit(t.Context(), 2)
				faulttest.Refused(t, err, fault.Corrupt, r.s.ID().String(), "page 1")
				var corrupt *store.CorruptError
				if !errors.As(err, &corrupt) || corrupt.Index != 1 || corrupt.History == "" {
					t.Fatalf("%+v does not say which page, and where it has been", corrupt)
				}
				equal(t, "free", e.m.NumFree(), free)
				e.check()
			}
			for _, r := range []*run{r, other} {
				m := must(r.match())(t)
				equal(t, "matched", m.Pages, 1)
				equal(t, "answer 1", m.Answers[1].Reason, fault.Corrupted)
				equal(t, "answer 2", m.Answers[2].Reason, fault.BeyondPrefix)
			}
			for _, r := range []*run{r, other} {
				noError(t, r.admit(t.Context(), 14)) // the engine computes it again
				noError(t, r.commit(14))
				r.verified()
				e.check()
			}
			noError(t, r.s.Remove())
			noError(t, other.s.Remove())
			equal(t, "corrupted", e.m.store.Stats().Corrupted, 1)
			equal(t, "stored again", must(must(e.ingest("c", tokens, 14))(t).match())(t).Pages, 3)
			e.check()
		})
	}
}

// A page that never comes must not be found for ever: the prompt is served by
// computing it.
func TestFailedLoad_IsAMissTheNextTime(t *testing.T) {
	tokens := text(1, 0, 13)
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.cold(tokens[:8])
	r := must(e.ingest("a", tokens, 13))(t)
	equal(t, "matched", must(r.match())(t).Pages, 2)
	e.breakCopies()
	adm := must(r.s.Admit(t.Context(), 5))(t)
	faulttest.Refused(t, adm.Wait(t.Context()), fault.Device)
	noError(t, r.reset(false))
	m := must(r.match())(t)
	equal(t, "matched again", m.Pages, 0)
	equal(t, "why", m.Answers[0].Reason, fault.CopyFailed)
	noError(t, r.admit(t.Context(), 13))
	noError(t, r.commit(13))
	r.verified()
	e.check()
}
