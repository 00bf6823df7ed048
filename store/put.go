package store

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Reserve claims keys for pages that the caller is about to complete, and appends
// one ref for each:
//
//   - a key that is not there is reserved for the caller: invisible until Commit;
//   - a key that is there already is pinned: the caller's page stays the caller's;
//   - a key that somebody else has reserved gives NoRef, and no pin: a page put
//     behind it may outlive it on the device, found by nobody.
//
// Every ref but NoRef goes to Commit, or to Abandon. Kinds: fault.Full (more keys
// reserved than pages exist; nothing was reserved), fault.Closed.
func (s *Store) Reserve(refs []Ref, keys []page.Key) ([]Ref, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return refs, errClosed()
	}
	before := len(refs)
	refs = slices.Grow(refs, len(keys))
	for i := range keys {
		h := s.index.hash(&keys[i])
		r := s.index.lookup(&keys[i], h)
		switch {
		case r == NoRef:
			if r = s.take(&keys[i], h); r == NoRef {
				s.abandon(refs[before:])
				return refs[:before], fault.New(fault.Full, "store", "all %d entries are taken", cap(s.entries)).
					Hint("commit or abandon what is reserved")
			}
		case s.entries[r].state == reserved:
			r = NoRef
		default:
			s.pin(r)
		}
		refs = append(refs, r)
	}
	return refs, nil
}

// Commit makes the reserved refs match: pages[i], owned by the caller and
// complete, becomes the page of refs[i], sealed and owned by the store too. Refs
// that were pinned by Reserve, and NoRef, are passed over: their pages stay the
// caller's alone. The caller holds a pin on every ref until Unpin. All or
// nothing, but for seals; fault.Invalid when a page cannot be shared, or is kept
// under another key.
func (s *Store) Commit(refs []Ref, pages []page.ID) error {
	if len(refs) != len(pages) {
		return fault.New(fault.Invalid, "store", "commit of %d refs with %d pages", len(refs), len(pages))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed()
	}
	if err := s.keepAll(refs, pages); err != nil {
		return fmt.Errorf("store: commit: %w", err)
	}
	for i, r := range refs {
		if r == NoRef {
			continue
		}
		e := &s.entries[r]
		if e.state != reserved {
			s.stats.Refused++
			continue
		}
		e.state, e.pins = kept, 1
		s.stats.Entries++
		s.stats.DevicePages++
		s.ghosts.forget(s.index.hash(&s.index.keys[r]))
		s.note(r, stored, pages[i])
		s.stats.Committed++
	}
	return nil
}

// keepAll makes pages those of the reserved refs among refs, or changes nothing but
// seals.
func (s *Store) keepAll(refs []Ref, pages []page.ID) error {
	s.ids = s.ids[:0]
	var err error
	for i, r := range refs {
		if r == NoRef || s.entries[r].state != reserved {
			continue
		}
		if err = s.checkKept(pages[i]); err != nil {
			break
		}
		if uint(pages[i]) < uint(len(s.at)) { // else the arena refuses it
			s.at[pages[i]] = r
		}
		s.entries[r].part.device = pages[i]
		s.ids = append(s.ids, pages[i])
	}
	if err == nil {
		err = s.arena.Seal(s.ids)
	}
	if err == nil {
		err = s.arena.Retain(s.ids)
	}
	if err == nil {
		return nil
	}
	for _, r := range refs {
		if r == NoRef || s.entries[r].state != reserved {
			continue
		}
		if p := &s.entries[r].part; p.device != page.None {
			if uint(p.device) < uint(len(s.at)) {
				s.at[p.device] = NoRef
			}
			p.device = page.None
		}
	}
	return err
}

// Abandon gives back refs of Reserve: reserved keys are free again, pins are
// taken off. NoRef is passed over.
func (s *Store) Abandon(refs []Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abandon(refs)
}

func (s *Store) abandon(refs []Ref) {
	for _, r := range refs {
		if r != NoRef && s.entries[r].state == reserved {
			s.index.remove(&s.index.keys[r], s.index.hash(&s.index.keys[r]))
			s.forget(r, &s.entries[r])
		}
	}
	s.unpin(refs)
}
