package kvferry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

// Prompt is what a sequence starts from.
type Prompt struct {
	// Tokens is the length of the prompt.
	Tokens int
	// Keys name its whole pages, from the first: at most Tokens/pageSize of them.
	// Pages without a key are not shared. Package prefix makes keys.
	Keys []page.Key
}

func (p Prompt) equal(o Prompt) bool { return p.Tokens == o.Tokens && slices.Equal(p.Keys, o.Keys) }

// Sequence is one run of tokens and its ordered pages.
//
//	ingested → matched    Match: a prefix is pinned, and not the sequence's own yet
//	         → admitted   Admit: pages reserved; the prefix is its own, or on its way
//	         → ingested   Reset
//	admitted → admitted   Commit, Admit, …
//	admitted → offloaded  Offload, and back by Reload: see offload.go
//	any      → removed    Remove
//
// pages is a high-water mark: it may hold more pages than the stored tokens fill.
type Sequence struct {
	m      *Manager
	id     ID
	prompt Prompt // immutable

	// All below are guarded by m.mu. A call that must let go of m.mu sets busy: until
	// it clears it nobody else changes them, and it changes under m.mu what others
	// read. Of the buffers, loaded and fresh are its own.
	busy     bool
	removed  bool
	matched  bool             // lease is the answer of Match, not converted yet
	keys     []page.Key       // of whole pages: the prompt's, and those of Extend
	stored   int              // tokens committed
	admitted int              // tokens that the pages are admitted for
	loads    []*device.Ticket // of the prefix; nil once all has arrived
	failed   error            // latched: a page of the prefix did not arrive

	offloaded          bool           // on the host or on its way: no pages, and refs are holds
	named              bool           // the host pool may have pages under its name
	returning          *device.Ticket // of the last Reload: pages that only the sequence has are written until it is done
	position, released int            // the caller's

	buffers
}

// buffers are the lists of a sequence. They are handed on when it is removed: most of
// what the life of a short one would allocate.
type buffers struct {
	own    []page.Key  // backs the prompt's keys
	lease  store.Match // what Match pinned
	pages  []page.ID
	refs   []store.Ref // pinned entries of the leading whole pages; NoRef: not shared
	loaded store.Loaded
	fresh  []page.ID
}

// Matched is the answer of Match.
type Matched struct {
	// Pages and Tokens are the length of the stored prefix: whole pages, and at
	// least one token short of the prompt, because one must be computed.
	Pages, Tokens int
	// Answers say for each keyed page of the prompt where it is, or why not.
	// They are valid until the next Match of this sequence, or its Remove.
	Answers []store.Answer
}

// Admission is what Admit reserved.
type Admission struct {
	// Tokens is the length that the sequence may be committed to.
	Tokens int
	// Stored is how many tokens need not be computed: the matched prefix, and
	// what was committed before.
	Stored int

	tickets []*device.Ticket
}

// Wait waits until the pages of the prefix have arrived. The sequence's pages must
// not be read before that, unless by work on Options.Compute.
func (a Admission) Wait(ctx context.Context) error {
	for _, t := range a.tickets {
		if err := t.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Done reports whether Wait would return at once.
func (a Admission) Done() bool {
	for _, t := range a.tickets {
		if done, _ := t.Poll(); !done {
			return false
		}
	}
	return true
}

// ID returns the sequence's name.
func (s *Sequence) ID() ID { return s.id }

// enter begins a call. On success m.mu is held.
func (s *Sequence) enter() error {
	s.m.mu.Lock()
	var err error
	switch {
	case s.removed:
		err = fault.New(fault.NotFound, s.id.String(), "was removed")
	case s.m.closed:
		err = s.m.errClosed()
	case s.busy:
		err = fault.New(fault.Busy, s.id.String(), "another call on it is under way").Hint("call again when it has returned")
	}
	if err != nil {
		s.m.mu.Unlock()
	}
	return err
}

// Pages appends the sequence's pages to dst, in order. There may be more than the
// stored tokens fill.
func (s *Sequence) Pages(dst []page.ID) []page.ID {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return append(dst, s.pages...)
}

// Stored is how many tokens are committed.
func (s *Sequence) Stored() int {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.stored
}

// Refs appends the store entries that the sequence pins, root first.
func (s *Sequence) Refs(dst []store.Ref) []store.Ref {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.matched {
		return append(dst, s.lease.Refs...)
	}
	return append(dst, s.refs...)
}

// Extend gives the sequence keys for pages behind the ones that have keys: what
// decoding fills. Reset forgets them. A page that was committed before it had a key
// is shared by the next Commit, Reset or Remove.
func (s *Sequence) Extend(keys ...page.Key) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.m.mu.Unlock()
	s.keys = append(s.keys, keys...)
	return nil
}

// Match looks up the longest stored prefix of the prompt and pins it until the
// sequence is admitted, reset or removed. Asked again before that, it gives the
// same answer. Kinds: fault.Busy (tokens are admitted already), and those of every
// call on a sequence: fault.NotFound (removed), fault.Busy, fault.Closed.
func (s *Sequence) Match() (Matched, error) {
	if err := s.enter(); err != nil {
		return Matched{}, err
	}
	defer s.m.mu.Unlock()
	if s.admitted > 0 || s.stored > 0 {
		return Matched{}, fault.New(fault.Busy, s.id.String(), "holds %d tokens: only an empty sequence can be matched", max(s.stored, s.admitted)).
			Hint("reset it first")
	}
	if !s.matched {
		limit := max(s.prompt.Tokens-1, 0) / s.m.pageSize
		if err := s.m.store.Match(s.prompt.Keys, limit, &s.lease); err != nil {
			return Matched{}, err
		}
		s.matched = true
	}
	n := len(s.lease.Refs)
	return Matched{Pages: n, Tokens: n * s.m.pageSize, Answers: s.lease.Answers}, nil
}

// Admit reserves room for span more tokens behind what is stored, or behind the
// matched prefix, which becomes the sequence's own. Pages are taken from the free
// ones and, when those are short, from the coldest that only the store holds: then
// Admit waits for their copies to the host. It never waits for pages coming up:
// that is Admission.Wait.
//
// All or nothing: a refused Admit leaves the sequence, and its match, as they were.
// Kinds: fault.Full (with asked, free and largest run; nothing else to evict, or more
// than there are), fault.Corrupt (a page of the match failed its check and was
// discarded: the match is given back, call Match again), fault.Device (a page admitted
// before never arrived: see Commit), fault.Invalid, ctx's error.
func (s *Sequence) Admit(ctx context.Context, span int) (Admission, error) {
	if err := s.enter(); err != nil {
		return Admission{}, err
	}
	m := s.m
	if s.offloaded {
		m.mu.Unlock()
		return Admission{}, s.errOffloaded()
	}
	base := s.stored
	if s.matched {
		base = len(s.lease.Refs) * m.pageSize
	}
	if span < 0 || span > 1<<31-1-base {
		m.mu.Unlock()
		return Admission{}, fault.New(fault.Invalid, s.id.String(), "cannot admit %d tokens behind %d: the range is 0 to %d", span, base, 1<<31-1-base)
	}
	if _, err := s.arrived(); err != nil {
		m.mu.Unlock()
		return Admission{}, err
	}
	total := base + span
	pages := (total + m.pageSize - 1) / m.pageSize
	if !s.matched && pages <= len(s.pages) {
		defer m.mu.Unlock()
		s.admitted = max(s.admitted, total)
		return Admission{Tokens: s.admitted, Stored: base, tickets: s.loads}, nil
	}
	s.busy = true
	m.mu.Unlock()

	err := s.reserve(ctx, pages)

	m.mu.Lock()
	defer m.mu.Unlock()
	if err := s.leave(err); err != nil {
		return Admission{}, err
	}
	s.stored, s.admitted = base, max(s.admitted, total)
	return Admission{Tokens: s.admitted, Stored: base, tickets: s.loads}, nil
}

// leave ends a call that had let go of m.mu, with its error. A sequence that was
// removed meanwhile gives everything back now.
func (s *Sequence) leave(err error) error {
	s.busy = false
	if s.removed {
		return errors.Join(fault.New(fault.NotFound, s.id.String(), "was removed meanwhile"), s.clear(true))
	}
	if err != nil {
		return fmt.Errorf("%v: %w", s.id, err)
	}
	return nil
}

func (s *Sequence) errOffloaded() error {
	return fault.New(fault.Busy, s.id.String(), "is offloaded").Hint("reload it first")
}

// reserve makes the sequence hold pages pages, the match first. It runs with
// busy set and m.mu let go.
func (s *Sequence) reserve(ctx context.Context, pages int) error {
	m := s.m
	var refs []store.Ref
	need := pages - len(s.pages)
	if s.matched {
		refs = s.lease.Refs
		// Pages kept by an unsealed reset are in the way of the prefix: they go
		// behind it, and those that are too many go back.
		if err := s.shed(max(0, pages-len(refs))); err != nil {
			return err
		}
		need = pages - len(refs) - len(s.pages)
	}
	missing := m.store.Missing(refs)
	if asked, usable := missing+max(need, 0), m.arena.Usable(); pages > usable {
		full := &page.FullError{Asked: asked, Free: m.arena.NumFree(), LargestRun: m.arena.LargestRun()}
		return fault.Wrap(fault.Full, "device", full).Hint("%d pages are needed at once and there are %d: use more device pages", pages, usable)
	}
	fresh, err := m.acquire(ctx, s.fresh[:0], missing+max(need, 0))
	s.fresh = fresh
	if err != nil {
		return err
	}
	if s.matched {
		fresh, missing, err = m.load(ctx, refs, fresh, missing, &s.loaded)
		s.fresh = fresh
		if err != nil {
			if _, releaseErr := m.arena.Release(fresh); releaseErr != nil {
				err = errors.Join(err, releaseErr)
			}
			if errors.Is(err, fault.Corrupt) {
				m.mu.Lock()
				s.giveBackLease()
				m.mu.Unlock()
			}
			return err
		}
		if spare := fresh[s.loaded.Used:missing]; len(spare) > 0 { // somebody else loaded them meanwhile
			if _, err := m.arena.Release(spare); err != nil {
				return err
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.matched {
		s.pages = slices.Insert(s.pages, 0, s.loaded.Pages...)
		s.refs = append(s.refs[:0], refs...)
		s.loads = slices.Clone(s.loaded.Tickets)
		s.matched, s.lease.Refs = false, s.lease.Refs[:0]
	}
	s.pages = append(s.pages, fresh[missing:]...)
	return nil
}

// shed gives back the sequence's pages behind the first n.
func (s *Sequence) shed(n int) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if n >= len(s.pages) {
		return nil
	}
	_, err := s.m.arena.Release(s.pages[n:])
	s.pages = s.pages[:n]
	return err
}

func (s *Sequence) giveBackLease() {
	s.m.store.Unpin(s.lease.Refs)
	s.matched, s.lease.Refs = false, s.lease.Refs[:0]
}

// arrived reports whether the whole prefix is there, and latches the failure of a
// page that should have been. It looks at each load once: between two looks one
// could fail, and what is behind it would be taken for good.
func (s *Sequence) arrived() (all bool, err error) {
	if s.failed != nil {
		return false, s.failed
	}
	all = true
	for _, t := range s.loads {
		done, err := t.Poll()
		if err != nil {
			s.failed = fmt.Errorf("%v: a page of its prefix did not arrive: %w", s.id, err)
			return false, s.failed
		}
		all = all && done
	}
	if all {
		s.loads = nil
	}
	return all, nil
}

// Commit counts n admitted tokens as stored: their K and V are written, or will be
// by work already on Options.Compute. Pages that became whole and have a key are
// sealed and shared. Kinds: fault.Invalid (more than admitted), fault.Device (a
// page of the prefix never arrived: what was computed behind it is worthless; reset
// or remove the sequence).
func (s *Sequence) Commit(n int) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.m.mu.Unlock()
	if n < 0 || n > s.admitted-s.stored {
		return fault.New(fault.Invalid, s.id.String(), "cannot commit %d tokens: %d are admitted behind the %d stored", n, s.admitted-s.stored, s.stored).
			Hint("admit them first")
	}
	s.stored += n
	if err := s.share(); err != nil {
		s.stored -= n
		return err
	}
	return nil
}

// share seals whole pages that have a key and puts them into the store. While the
// prefix is still arriving nothing behind it is shared, for it may yet fail; nor is
// anything while the store has no entry left: both are tried again by the next call.
// The error is that of a page that did not arrive.
func (s *Sequence) share() error {
	all, err := s.arrived()
	first, end := len(s.refs), min(s.stored/s.m.pageSize, len(s.keys))
	if err != nil || !all || end <= first || s.offloaded { // on the host it has no pages
		return err
	}
	refs, err := s.m.store.Reserve(s.refs, s.keys[first:end])
	if errors.Is(err, fault.Full) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.m.store.Commit(refs[first:], s.pages[first:end]); err != nil {
		s.m.store.Abandon(refs[first:])
		return err
	}
	s.refs = refs
	return nil
}

// Reset rewinds the sequence to nothing stored. Its pages go back when free is
// set, or when any of them is sealed (a rewind must not overwrite what others may
// read); otherwise they are kept for reuse. The keys of the prompt stay.
func (s *Sequence) Reset(free bool) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.m.mu.Unlock()
	_ = s.share() // before the seals are looked at; if it fails nothing is lost but a chance
	return s.clear(free || s.m.arena.AnySealed(s.pages))
}

// Remove ends the sequence. Its shared pages stay in the store until they are
// evicted; pages still on their way stay reserved until they have arrived. While
// another call on the sequence is under way, that call fails and gives everything
// back when it returns.
func (s *Sequence) Remove() error {
	err := s.enter()
	if err != nil && !errors.Is(err, fault.Busy) {
		return err
	}
	if err != nil {
		return s.removeLater()
	}
	defer s.m.mu.Unlock()
	_ = s.share() // pages committed while the prefix was arriving; if it fails nothing is lost but a chance
	s.removed = true
	delete(s.m.sequences, s.id)
	err = s.clear(true)
	const most = 64 // spare buffers
	if len(s.m.spare) < most {
		s.m.spare = append(s.m.spare, s.buffers)
	}
	s.buffers, s.keys, s.prompt.Keys = buffers{}, nil, nil
	return err
}

// removeLater removes a sequence that another call is using.
func (s *Sequence) removeLater() error {
	s.m.mu.Lock()
	if !s.busy { // it has returned meanwhile
		s.m.mu.Unlock()
		return s.Remove()
	}
	defer s.m.mu.Unlock()
	s.removed = true
	delete(s.m.sequences, s.id)
	return nil
}

// clear takes everything off the sequence; its own pages stay unless free is set.
func (s *Sequence) clear(free bool) (err error) {
	if s.returning != nil {
		if done, _ := s.returning.Poll(); !done { // its pages are still being written
			s.m.written = append(s.m.written, written{s.pages, s.returning})
			s.pages = nil
		}
	}
	if free { // before the pins: until it has given its pages up, evicting them frees nothing
		_, err = s.m.arena.Release(s.pages)
		s.pages = s.pages[:0]
	}
	switch {
	case s.matched:
		s.giveBackLease()
	case s.offloaded:
		s.m.store.Unhold(s.refs)
	default:
		s.m.store.Unpin(s.refs)
	}
	if s.named {
		err = errors.Join(err, s.m.pool.Discard(s.name()))
	}
	s.refs, s.loads, s.failed, s.returning = s.refs[:0], nil, nil, nil
	s.stored, s.admitted, s.offloaded, s.named, s.position, s.released = 0, 0, false, false, 0, 0
	s.keys = s.prompt.Keys
	return err
}
