package store

import (
	"context"
	"slices"
)

// Suspend turns pins into holds, for a user that will be away: the entries stay
// until Resume or Unhold, but their pages may be demoted. It takes a path, root
// first, like Unpin; NoRef is passed over.
func (s *Store) Suspend(refs []Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range refs {
		if r != NoRef {
			s.entries[r].holds++
		}
	}
	s.unpin(refs)
}

// Resume turns holds back into pins. What was demoted meanwhile is put on the device
// by Load.
func (s *Store) Resume(refs []Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range refs {
		if r != NoRef {
			s.pin(r)
			s.entries[r].holds--
		}
	}
}

// Unhold gives holds back, for a user that will not return.
func (s *Store) Unhold(refs []Ref) {
	s.Resume(refs)
	s.Unpin(refs)
}

// Demote moves those pages of held refs to the host that nobody pins, as far as the
// host has room, and waits for the copies. It returns how many device pages were freed.
// Refs that are held no more are passed over. When ctx ends, the copies go on.
func (s *Store) Demote(ctx context.Context, refs []Ref) (freed int, err error) {
	v, err := s.demoteSome(refs)
	if err != nil {
		return 0, err
	}
	for _, j := range v.jobs {
		if err := j.done.Wait(ctx); err != nil && ctx.Err() != nil {
			return freed, ctx.Err()
		}
		freed += j.freed
	}
	return freed, nil
}

func (s *Store) demoteSome(refs []Ref) (v victims, err error) {
	s.enqueue.Lock()
	defer s.enqueue.Unlock()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return v, errClosed()
	}
	s.chosen = s.chosen[:0]
	for _, r := range slices.Backward(refs) { // deepest first
		// A ref whose hold was given back meanwhile may name another key by now.
		if r != NoRef && s.entries[r].holds > 0 && s.device.Remove(int32(r)) {
			s.chosen = append(s.chosen, int32(r))
		}
	}
	v = s.demote(s.chosen)
	s.mu.Unlock()
	for _, j := range v.jobs {
		s.run(j)
	}
	return v, nil
}

// EvictHost frees n host pages, the oldest first, for somebody else who uses the
// pool. It returns how many it freed: fewer when the others are in use or held.
func (s *Store) EvictHost(n int) int {
	if s.pool == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.chosen = s.chosen[:0]
	return s.evictHost(n)
}
