package store

import (
	"context"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// liar is a copier that writes one wrong byte into the last page of every copy to the
// host, and says that all is well.
type liar struct {
	*copier.Portable
	host *kv.Cache // set once the pool is open
}

func (l *liar) lie(s device.Stream, r *kv.Route, pairs []page.Pair) error {
	if r.Dst() != l.host || len(pairs) == 0 {
		return nil
	}
	dst := pairs[len(pairs)-1].Dst
	mem, err := l.host.Region(0)
	if err != nil {
		return err
	}
	n := l.host.Geometry().PageBytes()
	wrong := []byte{mem.Bytes()[int64(dst)*n+n/2] ^ 1}
	return s.Copy([]device.Op{{Dst: mem, DstOff: int64(dst)*n + n/2, Src: device.WrapHost(wrong), Bytes: 1}})
}

func (l *liar) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	m, err := l.Portable.Copy(s, r, pairs)
	return m, errors.Join(err, s.Sync(context.Background()), l.lie(s, r, pairs))
}

func (l *liar) CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (copier.Moved, error) {
	m, err := l.Portable.CopySummed(s, r, pairs, digests)
	return m, errors.Join(err, s.Sync(context.Background()), l.lie(s, r, pairs))
}

// TestChecks_FindACopyThatWroteAnotherByteThanItRead: by whoever looks first. The
// control is a copier that can't sum what it reads: the wrong byte is then what was
// summed.
func TestChecks_FindACopyThatWroteAnotherByteThanItRead(t *testing.T) {
	for _, through := range []bool{false, true} {
		for _, c := range []struct {
			name  string
			plain bool
			look  func(r *rig) error
		}{
			{"departure", false, func(r *rig) error { _, err := r.begin("ab"); return err }},
			{"scrubber", false, func(r *rig) error {
				wrong, err := r.store.Scrub(context.Background())
				if wrong > 0 {
					err = errors.Join(err, fault.Corrupt)
				}
				return err
			}},
			{"control", true, func(r *rig) error {
				u, err := r.begin("ab")
				if err != nil {
					return err
				}
				for _, x := range u.tickets {
					noError(r, x.Wait(context.Background()))
				}
				if r.holds(u.pages[0], r.key("a")) && r.holds(u.pages[1], r.key("ab")) {
					r.Error("the copier did not lie: this test shows nothing")
				}
				r.end(u)
				return nil
			}},
		} {
			l := &liar{Portable: copier.NewPortable()}
			s := setup{device: 2, host: 2, bytes: true, scrubAfter: -1, through: through, copier: l}
			if c.plain {
				s.copier = struct{ copier.Copier }{l}
			}
			r := newRig(t, s)
			l.host = r.pool.Cache()
			r.fill("ab")
			r.settled()
			r.evict(2)
			r.wantWhere("ab", "host, host")
			err := c.look(r)
			if found := errors.Is(err, fault.Corrupt); found == c.plain || err != nil && !found {
				t.Errorf("%s, write through %v: got %v", c.name, through, err)
			}
			if corrupted := r.store.Stats().Corrupted; (corrupted == 1) == c.plain {
				t.Errorf("%s, write through %v: %d corrupted", c.name, through, corrupted)
			}
			r.settled()
			noError(t, r.check(nil))
		}
	}
}

// TestChecks_SumWhatIsCopiedOnce: the sum of a page that arrives is the one that it
// has in host memory, whichever copier brought it, and counts as one.
func TestChecks_SumWhatIsCopiedOnce(t *testing.T) {
	for _, c := range []copier.Copier{nil, struct{ copier.Copier }{copier.NewPortable()}} {
		r := newRig(t, setup{device: 6, host: 6, bytes: true, scrubAfter: -1, jobPages: 2, inclusive: true, copier: c})
		r.fill("abcde")
		r.evict(5)
		s := r.store.Stats()
		if s.Summed != 5 || s.SummedBytes != 5*128 || s.SumNanos <= 0 {
			t.Errorf("copier %T: %+v", c, s)
		}
		for _, k := range r.keys("abcde") {
			e := &r.store.entries[r.store.index.lookup(&k, r.store.index.hash(&k))]
			if !e.part.summed || e.part.sum != r.pool.Sum(e.part.host) || e.part.sum == (hostpool.Sum{}) {
				t.Errorf("copier %T: host page %d has another sum than its entry", c, e.part.host)
			}
		}
		// Half of the path comes back and goes again: the host has those pages.
		u, err := r.begin("abc")
		noError(t, err)
		r.end(u)
		r.fill("xyz")
		r.evict(5)
		if wrong, err := r.store.Scrub(t.Context()); wrong != 0 || err != nil {
			t.Errorf("copier %T: %d pages are wrong, %v", c, wrong, err)
		}
		noError(t, r.check(nil))
	}
}
