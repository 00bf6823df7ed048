package store

import (
	"context"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

var errCable = errors.New("cable pulled")

func TestEvict_WhoseCopyFailsDropsThePage(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("ab")
	r.dev.Fail(r.copies, errCable)
	freed, err := r.store.Evict(context.Background(), 1)
	if freed != 1 || err != nil {
		t.Fatalf("%d freed, error %v", freed, err)
	}
	r.wantWhere("ab", "device, copy failed")
	r.free(3)
	r.hostFree(4)
	if s := r.store.Stats(); s.CopyFailed != 1 || s.Abandoned != 1 || s.Demoted != 0 {
		t.Errorf("%+v", s)
	}
	noError(t, r.check(nil))
	// The key can be stored again, and then its failure is history.
	u := r.put("ab")
	r.wantWhere("ab", "device, device")
	r.end(u)
}

// TestEvict_WhoseCopyFailsKeepsPagesThatArePinnedByThen: they are good on the device.
func TestEvict_WhoseCopyFailsKeepsPagesThatArePinnedByThen(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true})
	r.fill("a")
	r.dev.Fail(r.copies, errCable)
	release := r.hold(r.copies)
	_, _ = r.store.Evict(ended(), 1)
	m := r.match("a")
	release()
	r.settled()
	r.wantWhere("a", "device")
	r.hostFree(4)
	r.store.Unpin(m.Refs)
	noError(t, r.check(nil))
}

func TestLoad_WhoseCopyFailsDropsThePages(t *testing.T) {
	for _, inclusive := range []bool{false, true} {
		r := newRig(t, setup{device: 4, host: 4, bytes: true, inclusive: inclusive})
		r.fill("ab")
		r.evict(2)
		r.dev.Fail(r.copies, errCable)
		first, second := r.match("ab"), r.match("ab")
		release := r.hold(r.copies)
		fresh, err := r.acquire(2)
		noError(t, err)
		var l, adopted Loaded
		noError(t, r.store.Load(first.Refs, fresh, &l))
		noError(t, r.store.Load(second.Refs, nil, &adopted))
		r.wantWhere("ab", "host, host") // nobody is told that they are on the device
		release()
		for _, l := range []*Loaded{&l, &adopted} { // whoever has a page knows that it has no bytes
			if len(l.Tickets) != 1 {
				t.Fatalf("%d tickets", len(l.Tickets))
			}
			err := l.Tickets[0].Wait(t.Context())
			faulttest.Refused(t, err, fault.Device, "cable pulled")
			if !errors.Is(err, errCable) {
				t.Errorf("the cause of %v is lost", err)
			}
		}
		// They would be found again and again, and never come.
		r.wantWhere("ab", "copy failed, copy failed")
		if s := r.store.Stats(); s.CopyFailed != 2 || s.Promoted != 0 || s.DevicePages != 0 || s.HostPages != 0 {
			t.Errorf("%+v", s)
		}
		noError(t, r.check(map[page.ID]int{fresh[0]: 2, fresh[1]: 2}))
		r.end(&use{refs: first.Refs, pages: l.Pages})
		r.end(&use{refs: second.Refs, pages: adopted.Pages})
		r.free(4)
		noError(t, r.check(nil))
	}
}

// TestStore_WithAStreamThatStaysFailed goes on without the tier below.
func TestStore_WithAStreamThatStaysFailed(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 4, bytes: true, compute: true})
	r.fill("x")
	r.evict(1)
	r.dev.Fail(r.copies, errCable)
	r.fill("ab", "cd", "ef") // each takes the place of the one before
	r.wantWhere("ab", "copy failed, copy failed")
	r.wantWhere("ef", "device, device")
	r.hostFree(3)
	m := r.match("x")
	r.evict(1)
	fresh, err := r.acquire(1)
	noError(t, err)
	var l Loaded
	noError(t, r.store.Load(m.Refs, fresh, &l))
	faulttest.Refused(t, l.Tickets[0].Wait(t.Context()), fault.Device)
	r.wantWhere("x", "copy failed")
	r.end(&use{refs: m.Refs, pages: l.Pages})
	noError(t, r.check(nil))
}

// TestEvict_WithoutFencesCountsAsFailed: a copy that is not ordered behind the
// engine's work may have read anything.
func TestEvict_WithoutFencesCountsAsFailed(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 2, bytes: true, compute: true})
	r.fill("a")
	noError(t, r.compute.Sync(t.Context()))
	noError(t, r.compute.Close())
	r.evict(1)
	r.wantWhere("a", "copy failed")
	r.hostFree(2)
	noError(t, r.check(nil))
}

// refuser is a copier that enqueues nothing, while the stream is well.
type refuser struct{ copier.Copier }

func (refuser) Copy(device.Stream, *kv.Route, []page.Pair) (copier.Moved, error) {
	return copier.Moved{}, fault.New(fault.Unsupported, "copier", "no such pages today")
}

func TestEvict_ThatTheCopierRefusesIsNoSuccess(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 2, bytes: true, copier: refuser{copier.NewPortable()}})
	r.fill("a")
	r.evict(1)
	r.wantWhere("a", "copy failed")
	r.hostFree(2)
	noError(t, r.check(nil))
}

// flip changes one bit of a page in host memory.
func (r *rig) flip(path string) {
	r.Helper()
	r.flipIn(r.pool.Cache(), path, func(p *part) page.ID { return p.host })
}

func (r *rig) flipIn(c *kv.Cache, path string, of func(*part) page.ID) {
	r.Helper()
	k := r.key(path)
	e := &r.store.entries[r.store.index.lookup(&k, r.store.index.hash(&k))]
	b, err := c.Page(of(&e.part))
	noError(r, err)
	b[len(b)/3] ^= 0x10
}

func TestLoad_OfACorruptPageDropsItAndSaysWhich(t *testing.T) {
	r := newRig(t, setup{device: 6, host: 6, bytes: true})
	r.fill("abc")
	r.evict(3)
	r.flip("ab")
	m, bystander := r.match("abc"), r.match("abc")
	fresh, err := r.acquire(3)
	noError(t, err)
	var l Loaded
	err = r.store.Load(m.Refs, fresh, &l)
	faulttest.Refused(t, err, fault.Corrupt, "page 1", "demoted to host page")
	var corrupt *CorruptError
	if !errors.As(err, &corrupt) || corrupt.Index != 1 {
		t.Fatalf("error %v", err)
	}
	if len(l.Pages) != 0 || l.Used != 0 || len(l.Tickets) != 0 {
		t.Errorf("a refused load gave pages %v", l.Pages)
	}
	r.wantWhere("abc", "host, corrupted, beyond prefix")
	r.hostFree(4)
	// Whoever pinned it before is told the same.
	faulttest.Refused(t, r.store.Load(bystander.Refs, fresh, &l), fault.Corrupt, "page 1")
	r.store.Unpin(bystander.Refs)
	r.store.Unpin(m.Refs)
	_, err = r.arena.Release(fresh)
	noError(t, err)
	noError(t, r.check(nil))
	u, err := r.begin("abc")
	noError(t, err)
	if u.hits != 1 || u.answers[1].Reason != fault.Corrupted || u.answers[2].Reason != fault.BeyondPrefix {
		t.Errorf("%d hits, answers %v", u.hits, u.answers)
	}
	r.end(u)
	r.settled()
	// Computed again, it is there again, and c with it.
	refs, err := r.store.Reserve(nil, r.keys("ab")[1:])
	noError(t, err)
	own, err := r.acquire(1)
	noError(t, err)
	r.write(own[0], r.key("ab"))
	noError(t, r.store.Commit(refs, own))
	r.wantWhere("abc", "device, device, host")
	r.end(&use{refs: refs, pages: own})
	if s := r.store.Stats(); s.Corrupted != 1 {
		t.Errorf("%+v", s)
	}
	noError(t, r.check(nil))
}

// TestEvict_ComparesAPageThatArrivesAgain: it was summed when it came to the host
// the first time.
func TestEvict_ComparesAPageThatArrivesAgain(t *testing.T) {
	for _, flip := range []bool{false, true} {
		r := newRig(t, setup{device: 4, host: 4, bytes: true})
		r.fill("ab")
		r.evict(2)
		u, err := r.begin("ab")
		noError(t, err)
		noError(t, r.verify(u))
		if flip {
			r.flipIn(r.cache, "ab", func(p *part) page.ID { return p.device })
		}
		r.end(u)
		r.evict(2)
		want, corrupted := "host, host", int64(0)
		if flip {
			want, corrupted = "host, corrupted", 1
		}
		r.wantWhere("ab", want)
		r.free(4)
		if s := r.store.Stats(); s.Corrupted != corrupted || s.Summed != 6 || s.SummedBytes != 6*128 {
			t.Errorf("flipped %v: %+v", flip, s)
		}
		noError(t, r.check(nil))
	}
}

// TestLoad_ThatFindsItsPageGoneMeanwhileIsNotCorrupt: between the sum and the
// comparison somebody else promotes the page, and its place in host memory is given
// to another page.
func TestLoad_ThatFindsItsPageGoneMeanwhileIsNotCorrupt(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 1, bytes: true})
	r.fill("a")
	r.evict(1)
	r.fill("x")
	m := r.match("a")
	var l Loaded
	noError(t, r.store.departing(m.Refs, &l))
	u, err := r.begin("a")
	noError(t, err)
	noError(t, r.verify(u))
	r.evict(1) // x takes the page's place
	r.wantWhere("x", "host")
	l.sums = r.store.sum(l.sums[:0], l.ids)
	r.store.readers.Done()
	noError(t, r.store.compare(m.Refs, &l))
	if l.sums[0] == l.want[0] {
		t.Fatal("the place was not taken: this test shows nothing")
	}
	r.wantWhere("a", "device")
	r.end(u)
	r.store.Unpin(m.Refs)
	noError(t, r.check(nil))
}

// TestUnpin_WhoseWriteThroughFailsKeepsThePage: the device's is as good as before.
func TestUnpin_WhoseWriteThroughFailsKeepsThePage(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 4, bytes: true, through: true})
	u := r.put("ab")
	r.dev.Fail(r.copies, errCable)
	r.end(u)
	r.settled()
	r.wantWhere("ab", "device, device")
	r.wantList(&r.store.device, "ab", "a")
	r.hostFree(4)
	if s := r.store.Stats(); s.Written != 0 || s.Abandoned != 2 {
		t.Errorf("%+v", s)
	}
	noError(t, r.check(nil))
}

// TestUnpin_WhoseWriteThroughFindsOtherBytesDropsThePage: the page was summed when it
// was on the host before.
func TestUnpin_WhoseWriteThroughFindsOtherBytesDropsThePage(t *testing.T) {
	r := newRig(t, setup{device: 3, host: 3, bytes: true, through: true})
	r.fill("a")
	r.settled()
	r.evict(1)
	u, err := r.begin("a")
	noError(t, err)
	noError(t, r.verify(u))
	// Others take the host's copy away, so that the page is written through again.
	r.store.mu.Lock()
	r.store.evictHost(3)
	r.store.releaseHost(&r.store.entries[u.refs[0]])
	r.store.mu.Unlock()
	r.flipIn(r.cache, "a", func(p *part) page.ID { return p.device })
	r.end(u)
	r.settled()
	r.wantWhere("a", "corrupted")
	r.free(3)
	r.hostFree(3)
	noError(t, r.check(nil))
}
