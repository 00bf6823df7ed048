package store

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Evict frees n device pages that only the store owns, the oldest first: they are
// demoted to the host, which evicts its own oldest pages for them; a page is
// dropped when the host has no room at all. It waits for the copies, with no lock
// held, and for those of others when there is nothing else to give. It returns how
// many pages it freed: pages that were demoted or dropped but have other owners do
// not count. Fewer than n is fault.Full (the rest are pinned, or held and the host has
// no room), or fault.Device (the rest are held, and their copies fail). When ctx ends,
// the copies go on, and free their pages later.
func (s *Store) Evict(ctx context.Context, n int) (freed int, err error) {
	stuck := 0 // pages that must stay because their copies failed
	for freed < n {
		v, err := s.evictSome(n - freed)
		if err != nil {
			return freed, err
		}
		freed += v.freed
		if v.n == 0 {
			if v.latest == nil {
				return freed, fault.New(fault.Full, "store", "%d of %d device pages freed: the others are in use", freed, n).
					Hint("release sequences, or use more device pages")
			}
			// What is in flight may leave pages that can go. How it ends does not matter.
			if err := v.latest.done.Wait(ctx); err != nil && ctx.Err() != nil {
				return freed, ctx.Err()
			}
		}
		var failure error
		for _, j := range v.jobs {
			// A failed copy still freed its pages, by dropping them: see finishDemotion.
			err := j.done.Wait(ctx)
			if err != nil && ctx.Err() != nil {
				return freed, ctx.Err()
			}
			freed, stuck = freed+j.freed, stuck+j.stuck
			if j.stuck > 0 {
				failure = err
			}
		}
		if failure != nil && freed < n && stuck >= s.idle() { // they went behind the others: all were tried
			return freed, failure
		}
	}
	return freed, nil
}

// idle is how many pages may go from the device.
func (s *Store) idle() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.device.Len()
}

// victims are n pages that go from the device: freed of them are free already,
// jobs free the others. Without any, latest is the last copy still in flight.
type victims struct {
	n, freed int
	jobs     []*job
	latest   *job
}

// evictSome chooses up to n victims and enqueues their copies.
func (s *Store) evictSome(n int) (victims, error) {
	s.enqueue.Lock()
	defer s.enqueue.Unlock()
	v, err := s.chooseVictims(n)
	for _, j := range v.jobs {
		s.run(j)
	}
	return v, err
}

// chooseVictims takes up to n victims off the device's list, oldest first, and
// claims host pages for them. Those that get none are dropped: the oldest. A victim
// that the host has already (inclusive) goes with the job all the same, with nothing
// to copy: pages enter the host's list in the order in which they leave the device.
func (s *Store) chooseVictims(n int) (v victims, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return v, errClosed()
	}
	// Pages that must stay go behind the others, which are tried then.
	for tried, all := 0, s.device.Len(); v.n == 0 && tried < all; tried += n {
		s.chosen = s.device.AppendOldest(s.chosen[:0], n)
		v = s.demote(s.chosen)
	}
	if v.n == 0 && s.latest != nil {
		if done, _ := s.latest.done.Poll(); !done {
			v.latest = s.latest
		}
	}
	return v, nil
}

// demote chooses what becomes of victims, which were taken off the device's list.
func (s *Store) demote(oldest []int32) (v victims) {
	toHost := 0
	for _, i := range oldest {
		s.touched ^= s.moves[i].n
		s.host.Remove(i) // no host page is evicted to make room for its own device page
		if s.entries[i].part.host == page.None {
			toHost++
		}
	}
	claimed := s.claim(toHost)
	for _, i := range oldest {
		r, e := Ref(i), &s.entries[i]
		host := page.None
		if e.part.host == page.None {
			if toHost > len(claimed) {
				toHost--
				if e.holds > 0 { // it must not be lost: it stays where it is
					s.list(r, e)
					continue
				}
				s.stats.DroppedCold++
				v.n++
				v.freed += s.drop(r, e, fault.Evicted)
				continue
			}
			toHost--
			host, claimed = claimed[0], claimed[1:]
		}
		if k := len(v.jobs); k == 0 || len(v.jobs[k-1].refs) == s.o.JobPages {
			v.jobs = append(v.jobs, newJob(demotion))
		}
		j := v.jobs[len(v.jobs)-1]
		j.refs, j.epochs, j.hosts = append(j.refs, r), append(j.epochs, e.epoch), append(j.hosts, host)
		if host != page.None {
			j.pairs = append(j.pairs, page.Pair{Dst: host, Src: e.part.device})
		}
		e.part.flight = j
		v.n++
	}
	return v
}

// claim claims n host pages, evicting from the host as need be; fewer when the
// host can't give more. The answer is good until the next call.
func (s *Store) claim(n int) []page.ID {
	if s.pool == nil || n == 0 {
		return nil
	}
	free := s.pool.NumFree()
	if n > free {
		s.evictHost(n - free)
	}
	var err error
	if s.hosts, err = s.pool.Claim(s.hosts[:0], n); err == nil {
		return s.hosts
	}
	// Fewer could be evicted, or somebody else who uses the pool was faster.
	if full, ok := errors.AsType[*page.FullError](err); ok {
		s.hosts, err = s.pool.Claim(s.hosts[:0], min(n, full.Free))
	}
	s.must(err)
	return s.hosts
}

// evictHost gives up the n oldest host pages, or all that can go, and returns how
// many. An entry that is on the device too only loses its copy.
func (s *Store) evictHost(n int) int {
	before := len(s.chosen) // the caller's victims are in front
	s.chosen = s.host.AppendOldest(s.chosen, n)
	for _, v := range s.chosen[before:] {
		h := s.index.hash(&s.index.keys[v])
		s.touched ^= s.index.touch(h) ^ s.ghosts.touch(h) ^ s.entries[v].epoch
	}
	s.ids = s.ids[:0]
	for _, v := range s.chosen[before:] {
		r, e := Ref(v), &s.entries[v]
		s.stats.EvictedHost++
		s.ids = append(s.ids, e.part.host)
		e.part.host = page.None
		s.stats.HostPages--
		e.epoch++ // who is summing the page must not judge it
		if e.part.device == page.None {
			s.drop(r, e, fault.Evicted)
		}
	}
	s.chosen = s.chosen[:before]
	s.must(s.pool.Release(s.ids...))
	return len(s.ids)
}
