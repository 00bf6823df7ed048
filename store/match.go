package store

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Answer says for one page where it is or, when it is a miss, why.
type Answer struct {
	Tier   Tier         // where a hit is now, Nowhere for a miss
	Reason fault.Reason // fault.Hit for a hit
}

// Match is the answer to a look-up. It can be used again and again.
type Match struct {
	// Refs pin the entries of the hit prefix, root first.
	Refs []Ref
	// Answers has one answer for each key asked for.
	Answers []Answer
}

// Match looks keys up (a chain, root first), pins the longest stored prefix of at
// most limit pages, and answers for every page. Pages resident behind the limit
// are held back; pages resident behind the first missing one are beyond the
// prefix. m is overwritten; what it pinned before must have been given back.
func (s *Store) Match(keys []page.Key, limit int, m *Match) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.Refs, m.Answers = m.Refs[:0], m.Answers[:0]
	if s.closed {
		return errClosed()
	}
	s.lookups++
	m.Refs, m.Answers = s.walk(keys, limit, m.Refs, m.Answers, true)
	return nil
}

// Why appends the answers that Match would give now, and changes nothing.
func (s *Store) Why(answers []Answer, keys []page.Key, limit int) []Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, answers = s.walk(keys, limit, nil, answers, false)
	return answers
}

func (s *Store) walk(keys []page.Key, limit int, refs []Ref, answers []Answer, pin bool) ([]Ref, []Answer) {
	prefix := true
	answers = slices.Grow(answers, len(keys))
	s.hashAll(keys)
	for i := range keys {
		h := s.hashes[i]
		r := s.index.lookup(&keys[i], h)
		switch {
		case r == NoRef:
			answers = append(answers, Answer{Reason: s.ghosts.why(h)})
			prefix = false
		case s.entries[r].state == reserved:
			answers = append(answers, Answer{Reason: fault.Pending})
			prefix = false
		case !prefix:
			answers = append(answers, Answer{Reason: fault.BeyondPrefix})
		case i >= limit:
			answers = append(answers, Answer{Reason: fault.HeldBack})
		default:
			answers = append(answers, Answer{Tier: s.entries[r].tier()})
			if pin {
				s.pin(r)
				refs = append(refs, r)
			}
		}
	}
	return refs, answers
}

// hashAll fills s.hashes, and has what they lead to fetched side by side.
func (s *Store) hashAll(keys []page.Key) {
	s.hashes = s.hashes[:0]
	for i := range keys {
		h := s.index.hash(&keys[i])
		s.hashes = append(s.hashes, h)
		s.touched ^= s.index.touch(h) ^ s.ghosts.touch(h)
	}
}

// tier says where an entry is. A page that is on its way is still on the host.
func (e *entry) tier() Tier {
	if e.part.device != page.None && !e.part.promoting() {
		return Device
	}
	return Host
}

func (s *Store) pin(r Ref) {
	e := &s.entries[r]
	if e.pins == 0 {
		s.unlist(r)
	}
	e.pins++
	e.epoch++
}

// Unpin gives back the pins of refs (a path, root first). Their pages count as
// just used, the deepest as the oldest of them; while one of them has a copy in
// flight, all of them stay pinned until it has settled. NoRef is passed over.
//
// With Options.WriteThrough the pages that the host does not have are copied to it
// first; nobody waits for that.
func (s *Store) Unpin(refs []Ref) {
	if !s.o.WriteThrough || s.pool == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unpin(refs)
		return
	}
	s.enqueue.Lock()
	defer s.enqueue.Unlock()
	s.mu.Lock()
	jobs := s.writeThrough(refs)
	s.unpin(refs)
	s.mu.Unlock()
	for _, j := range jobs {
		s.run(j)
	}
}

func (s *Store) unpin(refs []Ref) {
	for _, r := range refs {
		if r == NoRef {
			continue
		}
		if j := s.entries[r].part.flight; j != nil {
			pinned := slices.DeleteFunc(slices.Clone(refs), func(r Ref) bool { return r == NoRef || s.entries[r].state == absent })
			j.unpin = append(j.unpin, pinned)
			return
		}
	}
	for _, r := range slices.Backward(refs) {
		if r == NoRef || s.entries[r].state == absent { // absent: abandoned
			continue
		}
		e := &s.entries[r]
		if e.pins == 0 {
			s.must(fault.New(fault.Invalid, "store", "entry %d unpinned twice", r))
			continue
		}
		if e.pins--; e.pins > 0 {
			continue
		}
		if e.state == dropped {
			if e.holds == 0 {
				s.forget(r, e)
			}
			continue
		}
		s.list(r, e)
	}
}

// moves is the recent history of an entry, for people: a small ring.
type moves struct {
	n   uint32 // moves ever
	log [5]move
}

type move struct {
	lookup uint32
	page   page.ID
	verb   verb
}

type verb uint8

const (
	stored verb = iota
	demoted
	promoted
	written
)

var verbNames = [...]string{stored: "stored on the device as page %d", demoted: "demoted to host page %d", promoted: "promoted to device page %d", written: "written through to host page %d"}

func (s *Store) note(r Ref, v verb, id page.ID) {
	m := &s.moves[r]
	m.log[m.n%uint32(len(m.log))] = move{uint32(s.lookups), id, v}
	m.n++
}

// History tells the last moves of a pinned entry, oldest first.
func (s *Store) History(r Ref) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history(r)
}

func (s *Store) history(r Ref) string {
	if uint(r) >= uint(len(s.moves)) {
		return "no entry"
	}
	m := &s.moves[r]
	size := uint32(len(m.log))
	first := uint32(0)
	var b strings.Builder
	if m.n > size {
		first = m.n - size
		fmt.Fprintf(&b, "%d earlier moves; ", first)
	}
	for i := first; i < m.n; i++ {
		x := m.log[i%size]
		if i > first {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, verbNames[x.verb], x.page)
		fmt.Fprintf(&b, " after look-up %d", x.lookup)
	}
	return b.String()
}
