// Package kvferry is the front door for an engine that embeds kvferry: a manager
// that hands out the pages of a paged KV cache to sequences, shares finished pages
// between them by key, keeps cold ones in host memory, and never gives back a
// wrong byte.
//
// The life of a sequence:
//
//	seq, err := m.Ingest(id, kvferry.Prompt{Tokens: n, Keys: keys})
//	match, err := seq.Match()            // how much of the prompt is stored already
//	adm, err := seq.Admit(ctx, n-match.Tokens)
//	err = adm.Wait(ctx)                  // or hand Options.Compute to the manager
//	… the engine writes tokens match.Tokens to n into seq.Pages() …
//	err = seq.Commit(n - match.Tokens)   // whole pages are sealed and shared
//	… Admit and Commit again for each step of decoding …
//	freed, err := seq.Offload(ctx)       // optional: its pages wait on the host …
//	back, err := seq.Reload(ctx)         // … and come back, with the same bytes
//	err = seq.Remove()                   // the pages stay, by key, until they are evicted
//
// Token t of a sequence lies at
//
//	seq.Pages(nil)[t/pageSize], slot t%pageSize
//
// Match is optional: without it nothing is looked up, and all is computed. Close the
// manager before the cache, and the cache before its device.
//
// The rooms behind the door, in the order of one page's walk: package store finds
// or places it, hostpool keeps the host's books, copier moves it, device executes,
// kv says where its bytes lie and page says whose it is.
package kvferry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

// ID names a sequence: one run of tokens of one request. A request with one run
// needs no label.
type ID struct{ Request, Label string }

func (id ID) String() string {
	if id.Label == "" {
		return fmt.Sprintf("sequence %q", id.Request)
	}
	return fmt.Sprintf("sequence %q/%q", id.Request, id.Label)
}

// Manager owns the pages of one cache. All methods may be called from any
// goroutine. Calls on one sequence exclude each other: a second one while the
// first is under way is fault.Busy.
//
// Lock order: mu, then the locks of store, hostpool and page. mu is never held
// while anything waits.
type Manager struct {
	o        Options
	pageSize int
	host     *device.Host // of the host pool; the device itself if that is the host
	ownsHost bool
	copies   device.Stream // nil without a host pool
	arena    *page.Arena
	pool     *hostpool.Pool // nil without a host pool
	store    *store.Store

	calls sync.WaitGroup // that use the host pool; none begins once closed

	releasing sync.Mutex
	released  bool // guarded by releasing: all is freed

	mu        sync.Mutex
	sequences map[ID]*Sequence // guarded by mu
	written   []written        // guarded by mu
	spare     []buffers        // of removed sequences, for new ones; guarded by mu
	closed    bool             // guarded by mu
}

// written are device pages that nobody wants any more and that a copy still writes.
// They go back when it is done.
type written struct {
	pages  []page.ID
	copied *device.Ticket
}

// reap gives back the pages whose copy is done. next is the first copy that is not,
// nil when none is left. The caller holds m.mu.
func (m *Manager) reap() (freed int, next *device.Ticket, err error) {
	m.written = slices.DeleteFunc(m.written, func(w written) bool {
		done, _ := w.copied.Poll()
		switch {
		case done:
			n, releaseErr := m.arena.Release(w.pages)
			freed, err = freed+n, errors.Join(err, releaseErr)
		case next == nil:
			next = w.copied
		}
		return done
	})
	return freed, next, err
}

// Open makes a manager over o.Cache. Kinds: fault.Invalid, fault.Memory,
// fault.Device, fault.Closed (o.Device was closed).
func Open(o Options) (*Manager, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	m := &Manager{o: o, pageSize: o.Cache.Geometry().PageSize(), sequences: map[ID]*Sequence{}}
	if err := m.open(); err != nil {
		return nil, errors.Join(err, m.release(context.Background()))
	}
	return m, nil
}

func (m *Manager) open() (err error) {
	g := m.o.Cache.Geometry()
	if m.arena, err = page.NewArena(page.ArenaOptions{Pages: g.Pages(), Sink: g.Sink()}); err != nil {
		return err
	}
	// One host device a process, if it can be: it knows what memory is promised.
	if m.host = m.o.Host; m.host == nil {
		m.host, _ = m.o.Device.(*device.Host)
	}
	if m.host == nil {
		if m.host, err = device.OpenHost(device.HostOptions{}); err != nil {
			return err
		}
		m.ownsHost = true
	}
	if m.o.Device == nil {
		m.o.Device = m.host
	}
	if m.o.HostPages > 0 {
		if m.copies, err = m.o.Device.NewStream("copies"); err != nil {
			return err
		}
		m.pool, err = hostpool.Open(hostpool.Options{
			Cache: m.o.Cache, Pages: m.o.HostPages, Host: m.host, Device: m.o.Device, Compute: m.o.Compute, Checks: m.o.Checks, Copier: m.o.Copier, MustPin: m.o.MustPin, Logger: m.o.Logger,
		})
		if err != nil {
			return err
		}
	}
	m.store, err = store.Open(store.Options{
		Cache: m.o.Cache, Arena: m.arena, Pool: m.pool, Copies: m.copies,
		Inclusive: m.o.Inclusive, WriteThrough: m.o.WriteThrough, History: m.o.History, ScrubAfter: m.o.ScrubAfter, Logger: m.o.Logger,
	})
	return err
}

// Ready is done when the host pool has its full size. The manager is usable
// before that: until then the pool holds as many pages as have been made.
func (m *Manager) Ready() *device.Ticket {
	if m.pool == nil {
		return device.Completed(nil)
	}
	return m.pool.Grown()
}

// Store is the manager's index: look-ups without a sequence, answers to "why".
func (m *Manager) Store() *store.Store { return m.store }

// Pool is the host pool, nil when there is none.
func (m *Manager) Pool() *hostpool.Pool { return m.pool }

// Copies is the stream that copies run on, nil without a host pool.
func (m *Manager) Copies() device.Stream { return m.copies }

// NumFree is how many device pages belong to nobody.
func (m *Manager) NumFree() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, _ = m.reap()
	return m.arena.NumFree()
}

// LargestRun is how many free device pages lie side by side.
func (m *Manager) LargestRun() int { return m.arena.LargestRun() }

// Ingest makes a sequence for a prompt. It is idempotent: ingesting the same
// prompt again returns the sequence that is there, untouched. Kinds: fault.Invalid
// (a prompt that contradicts itself), fault.Exists (another prompt under the same
// id), fault.Closed.
func (m *Manager) Ingest(id ID, p Prompt) (*Sequence, error) {
	if p.Tokens < 0 || p.Tokens/m.pageSize < len(p.Keys) {
		return nil, fault.New(fault.Invalid, id.String(), "%d keys for a prompt of %d tokens: one key for each whole page of %d tokens, at most %d",
			len(p.Keys), p.Tokens, m.pageSize, max(p.Tokens, 0)/m.pageSize)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, m.errClosed()
	}
	if s, ok := m.sequences[id]; ok {
		if !s.prompt.equal(p) {
			return nil, fault.New(fault.Exists, id.String(), "is there with another prompt, of %d tokens", s.prompt.Tokens).
				Hint("remove it first")
		}
		return s, nil
	}
	s := &Sequence{m: m, id: id}
	if n := len(m.spare); n > 0 {
		s.buffers = m.spare[n-1]
		m.spare = m.spare[:n-1]
	}
	s.prompt = Prompt{p.Tokens, append(s.own[:0], p.Keys...)}
	s.own, s.keys = s.prompt.Keys, s.prompt.Keys
	m.sequences[id] = s
	return s, nil
}

// Sequence returns the sequence of id, nil when there is none.
func (m *Manager) Sequence(id ID) *Sequence {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sequences[id]
}

// acquire appends n device pages to dst, evicting as need be. All or nothing. The
// caller has made sure that there are as many: nothing is evicted in vain for a
// request that can never fit.
func (m *Manager) acquire(ctx context.Context, dst []page.ID, n int) ([]page.ID, error) {
	for {
		got, ok := m.arena.TryAcquire(dst, n)
		if ok {
			return got, nil
		}
		full := &page.FullError{Asked: n, Free: m.arena.NumFree(), LargestRun: m.arena.LargestRun()}
		if full.Shortfall() <= 0 { // pages came back between the two looks
			continue
		}
		m.mu.Lock()
		freed, next, reapErr := m.reap()
		m.mu.Unlock()
		if reapErr != nil {
			return dst, reapErr
		}
		if freed > 0 {
			continue
		}
		// What was freed may be taken by another sequence before it comes here, so
		// this is a loop. It ends: Evict fails once nothing is left to give.
		_, evictErr := m.store.Evict(ctx, full.Shortfall())
		switch {
		case evictErr == nil:
		case next != nil: // pages are about to come back
			if _ = next.Wait(ctx); ctx.Err() != nil {
				return dst, ctx.Err()
			}
		case errors.Is(evictErr, fault.Full):
			if m.arena.NumFree() < n { // else somebody gave pages back while Evict looked for others
				return dst, fault.Wrap(fault.Full, "device", full).Hint("release sequences, or use more device pages")
			}
		default:
			return dst, evictErr
		}
	}
}

// load puts the pages of refs on the device, those that are missing on the first
// pages of fresh. More can be missing by now, when a copy that somebody else had begun
// has failed: then it acquires as many more. It returns fresh and missing as they are
// then, after an error too.
func (m *Manager) load(ctx context.Context, refs []store.Ref, fresh []page.ID, missing int, l *store.Loaded) ([]page.ID, int, error) {
	for {
		err := m.store.Load(refs, fresh[:missing], l)
		if !errors.Is(err, fault.Full) {
			return fresh, missing, err
		}
		now := max(missing, m.store.Missing(refs))
		more, err := m.acquire(ctx, nil, now-missing)
		if err != nil {
			return fresh, missing, err
		}
		fresh, missing = slices.Insert(fresh, missing, more...), now
	}
}

// Check verifies the conservation of pages: every device page is free or owned,
// its owners are the store and the sequences that hold it, and the store's and the
// pool's own books agree. It is meant for tests, between operations.
func (m *Manager) Check() error {
	m.mu.Lock()
	_, _, reapErr := m.reap()
	held := map[page.ID]int{}
	for _, w := range m.written {
		for _, id := range w.pages {
			held[id]++
		}
	}
	for _, s := range m.sequences {
		for _, id := range s.pages {
			held[id]++
		}
	}
	m.mu.Unlock()
	if m.o.Cache.Geometry().Sink() {
		held[page.Sink]++
	}
	err := m.store.CheckOwners(func(id page.ID) int { return held[id] })
	if m.pool != nil {
		err = errors.Join(err, m.pool.Check())
	}
	return errors.Join(err, m.store.Check(), reapErr)
}

// Close refuses new calls, settles the copies in flight, forgets every sequence and
// entry, and frees what Open made. The cache, and a device or stream given in
// Options, stay open. When ctx ends first nothing is freed, and Close can be called
// again; afterwards it is fault.Closed. The error of a copy stream that failed
// before (fault.Device) is returned, and all is freed nevertheless.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	idle := device.NewTicket()
	go func() { // ends with the calls under way
		m.calls.Wait()
		idle.Complete(nil)
	}()
	if err := idle.Wait(ctx); err != nil {
		return err
	}
	if m.pool != nil { // copies that an Offload left behind; the store waits for its own
		if err := m.pool.Wait(ctx); err != nil {
			return err
		}
	}
	return m.release(ctx)
}

// release frees what Open made, one after the other. It can be called again when a
// step was refused: those that are done are passed over.
func (m *Manager) release(ctx context.Context) error {
	m.releasing.Lock()
	defer m.releasing.Unlock()
	if m.released {
		return m.errClosed()
	}
	done := func(err error) bool { return err == nil || errors.Is(err, fault.Closed) }
	if m.store != nil {
		if err := m.store.Close(ctx); !done(err) {
			return err
		}
	}
	var streamErr error // it failed before, and is closed all the same
	if m.copies != nil {
		streamErr = m.copies.Close()
	}
	if m.pool != nil {
		if err := m.pool.Close(); !done(err) {
			return errors.Join(streamErr, err)
		}
	}
	if m.ownsHost {
		if err := m.host.Close(); !done(err) {
			return errors.Join(streamErr, err)
		}
	}
	m.released = true
	return streamErr
}

func (m *Manager) errClosed() error { return fault.New(fault.Closed, "manager", "is closed") }
