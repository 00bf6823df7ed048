package store

import (
	"fmt"

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
	for i := range keys {
		r := s.index.lookup(&keys[i])
		switch {
		case r == NoRef:
			if r, _ = s.take(keys[i]); r == NoRef {
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
	for i, r := range refs {
		if r == NoRef || s.entries[r].state != reserved {
			continue
		}
		if err := s.keep(r, pages[i]); err != nil {
			for _, q := range refs[:i] {
				if q != NoRef && s.entries[q].state == reserved {
					s.releaseDevice(&s.entries[q])
				}
			}
			return fmt.Errorf("store: commit: %w", err)
		}
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
		s.ghosts.forget(&s.index.keys[r])
		s.note(r, stored, pages[i])
		s.stats.Committed++
	}
	return nil
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
			s.index.remove(s.index.keys[r])
			s.forget(r, &s.entries[r])
		}
	}
	s.unpin(refs)
}
