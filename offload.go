package kvferry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

// This file suspends sequences: a cold one gives up its device pages to those that
// run, and gets pages back, with the same bytes, when its turn comes.
//
// A page that the store has under a key is not copied a second time: the suspended
// sequence holds the store's entry, which then may move to the host but not go. Its
// other pages (a partial last one, those without a key) are the host pool's, under
// the sequence's name. Both count as one owner of a host page.
//
//	admitted → offloading   claimed: nobody else may use the sequence
//	offloading → offloaded  the copies are done: the device pages are given up
//	offloading → admitted   the pool is full, a copy failed, ctx ended: nothing has changed
//	offloaded → admitted    Reload; → ingested Reset; → removed Remove

// Reloaded is what Reload brought back.
type Reloaded struct {
	Admission
	Pages     []page.ID // device pages, in order; not those of before
	StoredLen int       // tokens stored, as before
	Position  int       // as last set by SetPosition
	Released  int       // likewise
}

// SetPosition keeps two numbers of the caller's with the sequence, through a stay on
// the host: its position (of rotary embeddings, say) and how many tokens were
// dropped from its front. Neither means anything to kvferry. Reset makes both 0.
func (s *Sequence) SetPosition(position, released int) error {
	if position < 0 || released < 0 {
		return fault.New(fault.Invalid, s.id.String(), "position %d, released %d: neither may be negative", position, released)
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.m.mu.Unlock()
	s.position, s.released = position, released
	return nil
}

// IsOffloaded reports whether the sequence is on the host, or on its way there.
func (s *Sequence) IsOffloaded() bool {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.offloaded
}

// Offload suspends the sequence: its pages move to the host, as far as others don't
// use them, and it gives them up. It waits for the copies and returns how many device
// pages became free. A sequence that stores nothing, or is on the host already, is
// left as it is.
//
// All or nothing: after an error the sequence is as it was. Pages that the store keeps
// are no part of that. They go when the sequence's own have gone, and those that cannot
// (the host has no room, a copy failed, ctx ended) stay on the device until they can;
// freed does not count them. Kinds: fault.Unsupported (no host pool), fault.Busy (tokens
// are admitted and not committed, or the prefix is still arriving), fault.Full (the host
// pool has no room and nothing to evict), fault.Device, fault.NotFound (removed
// meanwhile), ctx's error.
func (s *Sequence) Offload(ctx context.Context) (freed int, err error) {
	if err := s.enter(); err != nil {
		return 0, err
	}
	m := s.m
	if err := s.mayOffload(); err != nil || s.offloaded || s.stored == 0 {
		m.mu.Unlock()
		return 0, err
	}
	m.calls.Add(1)
	defer m.calls.Done()
	own := s.pagesAt(s.ownPages())
	o := hostpool.Offloaded{StoredLen: s.stored, Position: s.position, Released: s.released}
	s.busy, s.offloaded, s.named = true, true, true
	m.mu.Unlock()

	err = m.offload(ctx, s.name(), own, o)

	m.mu.Lock()
	s.offloaded = false // until its pins are holds: leave may have to clear it
	if err = s.leave(err); err != nil {
		m.mu.Unlock()
		return 0, err
	}
	s.offloaded = true
	refs := slices.Clone(s.refs)
	m.store.Suspend(refs)
	freed, err = m.arena.Release(s.pages)
	s.pages, s.admitted = s.pages[:0], s.stored
	m.mu.Unlock()
	if err != nil {
		return freed, err
	}
	demoted, _ := m.store.Demote(ctx, refs) // as far as can be
	return freed + demoted, nil
}

func (s *Sequence) mayOffload() error {
	switch all, err := s.arrived(); {
	case s.m.pool == nil:
		return fault.New(fault.Unsupported, s.id.String(), "there is no host pool").Hint("set Options.HostPages")
	case err != nil:
		return err
	case s.admitted > s.stored:
		return s.errUncommitted()
	case !all:
		return fault.New(fault.Busy, s.id.String(), "its prefix is still arriving").Hint("wait for its admission")
	}
	return s.share() // what is whole is the store's to keep
}

func (s *Sequence) errUncommitted() error {
	return fault.New(fault.Busy, s.id.String(), "%d tokens are admitted and not committed", s.admitted-s.stored).
		Hint("commit or reset them first")
}

// ownPages lists the places of the pages that only the sequence has.
func (s *Sequence) ownPages() (at []int) {
	for i := range (s.stored + s.m.pageSize - 1) / s.m.pageSize {
		if i >= len(s.refs) || s.refs[i] == store.NoRef {
			at = append(at, i)
		}
	}
	return at
}

func (s *Sequence) pagesAt(at []int) []page.ID {
	ids := make([]page.ID, len(at))
	for i, k := range at {
		ids[i] = s.pages[k]
	}
	return ids
}

func (s *Sequence) name() hostpool.Name { return hostpool.Name(s.id) }

// offload copies pages to the host under name, making room once, and waits. When it
// fails nothing is left there; a copy that was refused halfway has drained, whatever ctx
// says, for the pages may be somebody else's to write next. Copies cut short by ctx only
// read; what they have read goes to nobody.
func (m *Manager) offload(ctx context.Context, name hostpool.Name, pages []page.ID, o hostpool.Offloaded) error {
	err := m.pool.Offload(m.copies, name, pages, o)
	var full *page.FullError
	if errors.As(err, &full) && m.store.EvictHost(full.Shortfall()) > 0 {
		err = m.pool.Offload(m.copies, name, pages, o)
	}
	if err != nil {
		if errors.Is(err, fault.Device) {
			_ = m.pool.Wait(context.WithoutCancel(ctx)) // ends with the stream's work
		}
		return err
	}
	if err := m.pool.Settle(ctx, name); err != nil {
		return errors.Join(err, m.pool.Discard(name))
	}
	return nil
}

// Reload brings an offloaded sequence back: device pages are taken as Admit takes
// them, and the copies are enqueued; Reloaded.Wait waits for them. When the device has
// no room nothing has moved, and the sequence stays on the host. When it is refused
// after copies were enqueued, it returns once they have drained, whatever ctx says:
// their pages are somebody else's then. Kinds: fault.NotFound
// (not on the host), fault.Full, fault.Corrupt (a page failed its check and was
// discarded: reset the sequence and compute it again), fault.Device (the copies were
// refused), ctx's error. When the copies fail later, Reloaded.Wait and every later call
// but Reset and Remove say so, as for a prefix that did not arrive.
func (s *Sequence) Reload(ctx context.Context) (Reloaded, error) {
	if err := s.enter(); err != nil {
		return Reloaded{}, err
	}
	m := s.m
	err := s.failed // a page was found to be corrupt before
	if !s.offloaded {
		err = fault.New(fault.NotFound, s.id.String(), "is not on the host")
	}
	if err != nil {
		m.mu.Unlock()
		return Reloaded{}, err
	}
	s.busy = true
	m.calls.Add(1)
	defer m.calls.Done()
	m.mu.Unlock()

	r, own, err := s.reload(ctx)

	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		s.offloaded, s.pages, s.loads, s.returning = false, append(s.pages[:0], r.Pages...), r.tickets, own
	}
	if errors.Is(err, fault.Corrupt) {
		s.failed = fmt.Errorf("%v: %w", s.id, err)
	}
	if err := s.leave(err); err != nil {
		return Reloaded{}, err
	}
	return r, nil
}

// reload runs with busy set and m.mu let go. arrived is done when nothing writes into
// the sequence's own pages any more.
func (s *Sequence) reload(ctx context.Context) (r Reloaded, arrived *device.Ticket, err error) {
	m := s.m
	own := s.ownPages()
	shared := slices.DeleteFunc(slices.Clone(s.refs), func(r store.Ref) bool { return r == store.NoRef })
	m.store.Resume(shared)
	missing := m.store.Missing(shared)
	fresh, err := m.acquire(ctx, nil, missing+len(own))
	if err != nil {
		m.store.Suspend(shared)
		return r, nil, err
	}
	var l store.Loaded
	arrived = device.NewTicket()
	if fresh, missing, err = m.load(ctx, shared, fresh, missing, &l); err != nil {
		l.Pages, l.Used = nil, 0
	} else if _, err = m.pool.Reload(m.copies, s.name(), fresh[missing:], arrived); err != nil {
		// A copy that was refused halfway may be writing still: it ends by itself.
		_ = arrived.Wait(context.Background())
	}
	// What Load was given and did not take, and all of it when this failed.
	give := fresh[l.Used:missing]
	if err != nil {
		give = append(slices.Clone(fresh[l.Used:]), l.Pages...)
	}
	if _, releaseErr := m.arena.Release(give); releaseErr != nil {
		err = errors.Join(err, releaseErr)
	}
	if err != nil {
		m.store.Suspend(shared)
		if errors.Is(err, fault.Corrupt) {
			err = &fault.Error{Kind: fault.Corrupt, Object: "reload", Err: err, Remedy: "reset the sequence and compute it again"}
		}
		return r, nil, err
	}
	r = Reloaded{
		Admission: Admission{Tokens: s.stored, Stored: s.stored, tickets: append(slices.Clone(l.Tickets), arrived)},
		StoredLen: s.stored, Position: s.position, Released: s.released,
	}
	back := fresh[missing:]
	for i := range len(shared) + len(own) {
		from := &l.Pages
		if len(own) > 0 && own[0] == i {
			from, own = &back, own[1:]
		}
		r.Pages, *from = append(r.Pages, (*from)[0]), (*from)[1:]
	}
	return r, arrived, nil
}

// Offload suspends every sequence of a request, in the order of their labels, and
// returns how many device pages became free. Sequences that could not go stay, and
// the first reason is returned; a request with tokens admitted and not committed is
// left alone (fault.Busy). fault.NotFound: there is none.
func (m *Manager) Offload(ctx context.Context, request string) (freed int, err error) {
	all := m.sequencesOf(request)
	if len(all) == 0 {
		return 0, errNoRequest(request)
	}
	m.mu.Lock()
	for _, s := range all {
		if s.admitted > s.stored {
			m.mu.Unlock()
			return 0, s.errUncommitted()
		}
	}
	m.mu.Unlock()
	for _, s := range all {
		n, offloadErr := s.Offload(ctx)
		freed += n
		if err == nil {
			err = offloadErr
		}
	}
	return freed, err
}

// Reload brings every offloaded sequence of a request back, and waits until their
// pages have arrived. It stops at the first that cannot come, and says why.
// fault.NotFound: there is no such request.
func (m *Manager) Reload(ctx context.Context, request string) error {
	all := m.sequencesOf(request)
	if len(all) == 0 {
		return errNoRequest(request)
	}
	for _, s := range all {
		if !s.IsOffloaded() {
			continue
		}
		r, err := s.Reload(ctx)
		if err == nil {
			err = r.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func errNoRequest(request string) error {
	return fault.New(fault.NotFound, fmt.Sprintf("request %q", request), "has no sequences")
}

// IsOffloaded reports whether any sequence of a request is on the host, or on its way
// there.
func (m *Manager) IsOffloaded(request string) bool {
	return slices.ContainsFunc(m.sequencesOf(request), (*Sequence).IsOffloaded)
}

// sequencesOf returns the sequences of a request by label.
func (m *Manager) sequencesOf(request string) (all []*Sequence) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, s := range m.sequences {
		if id.Request == request {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *Sequence) int { return strings.Compare(a.id.Label, b.id.Label) })
	return all
}
