package store

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// suspend puts a path, gives its pages up, and holds its entries.
func (r *rig) suspend(path string) []Ref {
	r.Helper()
	u := r.put(path)
	_, err := r.arena.Release(u.pages)
	noError(r, err)
	r.store.Suspend(u.refs)
	return u.refs
}

// resume turns holds into a use with its pages on the device, every byte compared.
func (r *rig) resume(path string, refs []Ref) *use {
	r.Helper()
	r.store.Resume(refs)
	fresh, err := r.acquire(r.store.Missing(refs))
	noError(r, err)
	var l Loaded
	noError(r, r.store.Load(refs, fresh, &l))
	u := &use{path: path, keys: r.keys(path), refs: refs, pages: l.Pages, tickets: l.Tickets, hits: len(refs)}
	noError(r, r.verify(u))
	return u
}

func TestSuspend_LetsPagesGoDownAndNoFurther(t *testing.T) {
	r := newRig(t, setup{device: 6, host: 4, bytes: true})
	refs := r.suspend("abc")
	r.wantList(&r.store.device, "abc", "ab", "a")
	freed, err := r.store.Demote(t.Context(), append([]Ref{NoRef}, refs...))
	if freed != 3 || err != nil {
		t.Fatalf("%d freed, error %v", freed, err)
	}
	r.wantWhere("abc", "host, host, host")
	r.wantList(&r.store.host) // not for anybody to take
	noError(t, r.check(nil))
	if n := r.store.EvictHost(4); n != 0 {
		t.Errorf("%d host pages were freed", n)
	}
	r.fill("uvwxyz", "123456") // five pages of these want the one host page that is left
	r.wantWhere("abc", "host, host, host")
	noError(t, r.check(nil))

	r.end(r.resume("abc", refs))
	noError(t, r.check(nil))
	if n := r.store.EvictHost(4); n == 0 {
		t.Error("once it is nobody's, it may go")
	}
}

func TestSuspend_SharesWithThoseThatRun(t *testing.T) {
	r := newRig(t, setup{device: 6, host: 6, bytes: true})
	refs := r.suspend("abc")
	running := r.put("abx") // pins a and ab
	freed, err := r.store.Demote(t.Context(), refs)
	if freed != 1 || err != nil {
		t.Fatalf("%d freed, error %v", freed, err)
	}
	r.wantWhere("abc", "device, device, host")
	r.end(running)
	again := r.suspend("ab") // twice held
	r.evict(3)
	r.wantWhere("abc", "host, host, host")
	r.wantList(&r.store.host, "abx")
	r.store.Unhold(refs)
	r.wantList(&r.store.host, "abx", "abc") // ab and a have another holder
	noError(t, r.check(nil))
	r.store.Unhold(again)
	r.wantList(&r.store.host, "abx", "abc", "ab", "a")
	noError(t, r.check(nil))
}

// Whatever goes wrong, and whoever wants the room: what is held is there afterwards,
// with its bytes.
func TestHeld_IsNeverLost(t *testing.T) {
	for _, o := range []setup{
		{device: 4, host: 1, bytes: true},
		{device: 4, host: 2, bytes: true, inclusive: true},
		{device: 4, host: 4, bytes: true, through: true},
		{device: 4, host: 3, bytes: true, jobPages: 1},
		{device: 4, bytes: true},
	} {
		for _, broken := range []bool{false, true} {
			r := newRig(t, o)
			refs := r.suspend("abc")
			if broken && r.pool != nil {
				r.settled()
				r.dev.Fail(r.copies, errCable)
			}
			if _, err := r.store.Demote(t.Context(), refs); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				n, err := r.store.Evict(t.Context(), 4)
				if !errors.Is(err, fault.Full) && !errors.Is(err, fault.Device) {
					t.Errorf("%+v: %d freed, error %v", o, n, err)
				}
				if r.pool != nil {
					r.store.EvictHost(4)
				}
				noError(t, r.check(nil))
			}
			for i, a := range r.store.Why(nil, r.keys("abc"), 3) {
				if a.Reason != fault.Hit {
					t.Errorf("%+v, broken %v: page %d: %v", o, broken, i, a.Reason)
				}
			}
			r.end(r.resume("abc", refs))
			noError(t, r.check(nil))
		}
	}
}

// Held pages that cannot go down are no reason to keep others.
func TestEvict_PassesOverHeldPagesThatCannotGo(t *testing.T) {
	r := newRig(t, setup{device: 5, host: 1, bytes: true})
	pinned := r.suspend("q")
	_, err := r.store.Demote(t.Context(), pinned) // fills the host, for good
	noError(t, err)
	refs := r.suspend("ab")
	r.fill("xy")
	r.evict(2)
	r.wantWhere("xy", "evicted, evicted")
	r.wantWhere("ab", "device, device")
	n, err := r.store.Evict(t.Context(), 4)
	faulttest.Refused(t, err, fault.Full)
	if n != 0 {
		t.Errorf("%d freed, and all are held", n)
	}
	noError(t, r.check(nil))
	r.store.Unhold(refs)
	r.evict(2)
	r.store.Unhold(pinned)
	noError(t, r.check(nil))
}

// flaky refuses pages while it is broken; the stream is well.
type flaky struct {
	copier.Copier
	broken *bool
}

func (c flaky) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	if *c.broken {
		return copier.Moved{}, fault.New(fault.Device, "copier", "out of order")
	}
	return c.Copier.Copy(s, r, pairs)
}

// Held pages whose copies fail are tried once each, not for ever, and the pages of
// others go meanwhile.
func TestEvict_GivesUpWhenAllThatIsLeftIsHeldAndFails(t *testing.T) {
	broken := true
	r := newRig(t, setup{device: 6, host: 6, bytes: true, jobPages: 2, copier: flaky{copier.NewPortable(), &broken}})
	refs := r.suspend("abc")
	r.fill("xy")
	n, err := r.store.Evict(t.Context(), 6)
	faulttest.Refused(t, err, fault.Device, "out of order")
	if n != 2 {
		t.Errorf("%d freed, want 2", n)
	}
	r.wantWhere("xy", "copy failed, copy failed")
	r.wantWhere("abc", "device, device, device")
	noError(t, r.check(nil))
	broken = false
	r.evict(3)
	r.wantWhere("abc", "host, host, host")
	r.end(r.resume("abc", refs))
	noError(t, r.check(nil))
}

// Pins that a copy has taken over are the copy's to give back; the holds are there
// already.
func TestSuspend_DuringACopy(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("ab")
	r.evict(2)
	release := r.hold(r.copies)
	u, err := r.begin("ab")
	noError(t, err)
	_, err = r.arena.Release(u.pages)
	noError(t, err)
	r.store.Suspend(u.refs)
	if n, err := r.store.Demote(t.Context(), u.refs); n != 0 || err != nil { // still on their way up
		t.Errorf("%d freed, error %v", n, err)
	}
	noError(t, r.check(nil))
	release()
	r.settled()
	r.wantWhere("ab", "device, device")
	noError(t, r.check(nil))
	r.evict(2)
	r.wantWhere("ab", "host, host")
	r.wantList(&r.store.host)
	r.end(r.resume("ab", u.refs))
	noError(t, r.check(nil))
}

func TestDemote_WhoseContextEndsGoesOn(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	refs := r.suspend("ab")
	release := r.hold(r.copies)
	if n, err := r.store.Demote(ended(), refs); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d freed, error %v", n, err)
	}
	noError(t, r.check(nil))
	// It is wanted back before it is down: the copies are abandoned, the pages stay.
	r.store.Resume(refs)
	release()
	r.settled()
	r.wantWhere("ab", "device, device")
	r.end(r.resume("ab", func() []Ref { r.store.Suspend(refs); return refs }()))
	noError(t, r.check(nil))
	noError(t, r.store.Close(t.Context()))
	_, err := r.store.Demote(t.Context(), refs)
	faulttest.Refused(t, err, fault.Closed)
}

// A held page that fails its check is gone, and everybody who held it is told; its
// entry is free for others when the last of them has given it back.
func TestHeld_CorruptIsToldToEverybody(t *testing.T) {
	r := newRig(t, setup{device: 6, host: 6, bytes: true})
	first := r.suspend("ab")
	second := r.suspend("ab")
	_, err := r.store.Demote(t.Context(), first)
	noError(t, err)
	r.flip("ab")
	fresh, err := r.acquire(2)
	noError(t, err)
	var l Loaded
	for _, refs := range [][]Ref{first, second} {
		r.store.Resume(refs)
		faulttest.Refused(t, r.store.Load(refs, fresh, &l), fault.Corrupt, "page 1")
		r.store.Suspend(refs)
		noError(t, r.check(map[page.ID]int{fresh[0]: 1, fresh[1]: 1}))
	}
	_, err = r.arena.Release(fresh)
	noError(t, err)
	r.wantWhere("ab", "host, corrupted")
	if n, err := r.store.Demote(t.Context(), first); n != 0 || err != nil {
		t.Errorf("%d freed, error %v", n, err)
	}
	r.store.Unhold(first)
	r.store.mu.Lock()
	early := slices.Contains(r.store.unused, first[1])
	r.store.mu.Unlock()
	r.store.Unhold(second)
	r.store.mu.Lock()
	late := slices.Contains(r.store.unused, first[1])
	r.store.mu.Unlock()
	if early || !late {
		t.Errorf("the entry is free: %v with a holder, %v without", early, late)
	}
	noError(t, r.check(nil))
	r.fill("ab") // computed again
	r.settled()
	r.wantWhere("ab", "device, device")
	noError(t, r.check(nil))
}

// Who gives a hold back while Demote is on its way there lets others have the entry:
// their pages are none of its business.
func TestDemote_PassesOverWhatIsHeldNoMore(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	refs := r.suspend("ab")
	r.store.Unhold(refs)
	if n, err := r.store.Demote(t.Context(), refs); n != 0 || err != nil {
		t.Errorf("%d freed, error %v", n, err)
	}
	r.wantWhere("ab", "device, device")
	noError(t, r.check(nil))
}

func TestEvictHost_SaysHowManyPagesItFreed(t *testing.T) {
	for _, inclusive := range []bool{false, true} {
		r := newRig(t, setup{device: 6, host: 6, bytes: true, inclusive: inclusive})
		refs := r.suspend("ab")
		_, err := r.store.Demote(t.Context(), refs)
		noError(t, err)
		r.fill("xyz")
		r.evict(3)
		u, err := r.begin("x")
		noError(t, err)
		noError(t, r.verify(u))
		for _, step := range []struct{ n, want int }{{1, 1}, {9, 1}, {1, 0}} { // x is in use
			if got := r.store.EvictHost(step.n); got != step.want {
				t.Errorf("inclusive %v: %d of %d freed, want %d", inclusive, got, step.n, step.want)
			}
			noError(t, r.check(ownedBy(u)))
		}
		r.wantWhere("ab", "host, host")
		r.wantWhere("xyz", "device, evicted, evicted")
		r.end(u)
		r.store.Unhold(refs)
	}
}

func ownedBy(u *use) map[page.ID]int {
	owned := map[page.ID]int{}
	for _, id := range u.pages {
		owned[id]++
	}
	return owned
}
