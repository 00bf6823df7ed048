package store

import (
	"fmt"

	"github.com/kvferry/kvferry/page"
)

// Check verifies the store's books, for tests and debug builds:
//
//  1. every reserved or kept entry is found under its key, and nothing else is;
//  2. a kept entry is in a tier; on both only if inclusive, or while promoting;
//  3. no two entries name the same page of a tier, and at has each device page's;
//  4. the lists hold exactly the kept, idle, unpinned entries of their tier;
//  5. the counts of Stats are right;
//  6. every device page the store names has an owner, and several only if sealed.
func (s *Store) Check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed()
	}
	indexed, entries := 0, 0
	onDevice, onHost := map[page.ID]Ref{}, map[page.ID]Ref{}
	listedDevice, listedHost := 0, 0
	for i := range s.entries {
		r, e := Ref(i), &s.entries[i]
		if e.state == absent || e.state == dropped {
			if s.device.Contains(int32(r)) || s.host.Contains(int32(r)) {
				return fmt.Errorf("store: entry %d is gone and still listed", r)
			}
			continue
		}
		indexed++
		if got := s.index.lookup(&s.index.keys[r], s.index.hash(&s.index.keys[r])); got != r {
			return fmt.Errorf("store: entry %d is found as %d under its key", r, got)
		}
		if e.state == reserved {
			continue
		}
		entries++
		p := &e.part
		if p.device == page.None && p.host == page.None {
			return fmt.Errorf("store: entry %d is kept, and in no tier", r)
		}
		if p.device != page.None && s.at[p.device] != r {
			return fmt.Errorf("store: entry %d has device page %d, which is of entry %d", r, p.device, s.at[p.device])
		}
		if p.device != page.None && p.host != page.None && !s.o.Inclusive && !p.promoting() {
			return fmt.Errorf("store: entry %d is in both tiers of an exclusive store", r)
		}
		for _, t := range []struct {
			id    page.ID
			names map[page.ID]Ref
		}{{p.device, onDevice}, {p.host, onHost}} {
			if t.id == page.None {
				continue
			}
			if other, twice := t.names[t.id]; twice {
				return fmt.Errorf("store: entries %d and %d name the same page %d", other, r, t.id)
			}
			t.names[t.id] = r
		}
		idle := e.pins == 0 && p.flight == nil
		if want := idle && p.device != page.None; s.device.Contains(int32(r)) != want {
			return fmt.Errorf("store: entry %d in the device list: %v, must be %v", r, !want, want)
		} else if want {
			listedDevice++
		}
		if want := idle && e.holds == 0 && p.host != page.None; s.host.Contains(int32(r)) != want {
			return fmt.Errorf("store: entry %d in the host list: %v, must be %v", r, !want, want)
		} else if want {
			listedHost++
		}
	}
	if indexed != s.index.n {
		return fmt.Errorf("store: %d entries, %d keys", indexed, s.index.n)
	}
	if s.device.Len() != listedDevice || s.host.Len() != listedHost {
		return fmt.Errorf("store: lists of %d and %d, must be %d and %d", s.device.Len(), s.host.Len(), listedDevice, listedHost)
	}
	if got, want := [3]int{s.stats.Entries, s.stats.DevicePages, s.stats.HostPages}, [3]int{entries, len(onDevice), len(onHost)}; got != want {
		return fmt.Errorf("store: entries, device pages and host pages are counted as %v, and are %v", got, want)
	}
	for id, r := range s.at {
		if _, there := onDevice[page.ID(id)]; !there && r != NoRef {
			return fmt.Errorf("store: device page %d is said to be of entry %d, which does not have it", id, r)
		}
	}
	for id := range onDevice {
		if n := s.arena.Owners(id); n == 0 || n > 1 && !s.arena.Sealed(id) {
			return fmt.Errorf("store: device page %d has %d owners, sealed: %v", id, n, s.arena.Sealed(id))
		}
	}
	return nil
}

// CheckOwners verifies that the owners of every device page are the store, if it keeps
// the page, and those that held counts. Nothing moves meanwhile.
func (s *Store) CheckOwners(held func(page.ID) int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	owned := map[page.ID]int{}
	for i := range s.entries {
		if e := &s.entries[i]; e.state == kept && e.part.device != page.None {
			owned[e.part.device]++
		}
	}
	return s.arena.Check(func(id page.ID) int { return owned[id] + held(id) })
}
