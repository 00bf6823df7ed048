// Package store knows where the pages of every key are: on the device of an
// embedding engine (tier 0), in the host pool, or gone, and then why. It finds
// the longest stored prefix, takes in new pages, demotes cold ones to the host,
// promotes them back, and evicts. It knows keys and pages, not sequences.
//
// # One index
//
// An entry is what is stored under one key. It has one part, which says in which
// tiers its page is. A [Ref] names an entry and pins it: as long as somebody
// holds a ref, the entry is no victim and its pages stay where they are. Refs are
// given by Match, Reserve and Commit, and given back by Unpin (or Abandon).
//
// A hold is less than a pin: the entry stays, but its page may go from the device to
// the host, and no further. Suspend makes holds of pins, for a user that will be away;
// Resume makes pins of them again, Unhold gives them back.
//
// # States of an entry
//
//	absent   → reserved   Reserve: only the reserver knows it; nobody can match it
//	reserved → kept       Commit: its page is complete, sealed, and owned by the store too
//	reserved → absent     Abandon
//	kept     → dropped    evicted, its bytes failed their check, or a copy failed: out of
//	                      the index, its pages released; the entry is absent once the
//	                      last pin and hold are gone
//
// A kept entry is idle or has one copy in flight:
//
//	demoting   device → host. Chosen only when nobody pins it. If somebody pinned it
//	           meanwhile, its epoch has moved and the copy is abandoned: the page stays.
//	written through  device → host while the page stays where it is, for Options.WriteThrough.
//	promoting  host → device, for the one who pins it. The device page is known and
//	           sealed from the start (nobody but the copy writes it), and has the store as
//	           an owner; whoever adopts it meanwhile waits for the same ticket.
//
// A failed copy changes as little as is safe. A demotion that failed drops the page, or
// it would be chosen again and again, unless somebody pins or holds it: then it stays
// on the device. A failed promotion drops the entry, so that it is a miss the next time,
// unless it is held: then it stays on the host. A failed write-through changes nothing.
//
// A page has one key: the device page of an entry is no other entry's.
//
// # Recency
//
// Each tier has one list of the entries that may go from it: kept, idle, pinned
// by nobody, and of the host held by nobody. Unpin enters a path deepest page
// first, so the oldest page of a list never has a resident child (package evict).
// That needs the whole path at once: when a page of it has a copy in flight, the
// pins of the path are the copy's until it has settled. A page demoted is the oldest of the device and becomes the newest
// of the host: over both tiers there is one recency.
//
// Pins, not owners, keep a page from being chosen. A device page that somebody
// owns without a pin can be demoted or dropped like any other; its bytes stay with
// that owner, and it does not count as freed.
//
// Two ways lead to a resident page whose parent is gone, and it is then found by
// nobody and ages out: a page of the middle failed its check, or the host had no
// room for a page while its child, chosen by an Evict that did not wait, was still
// on its way there.
//
// # Checks
//
// A page's sum is taken when it first comes to host memory, of what the copy read if
// the pool can do that (hostpool.Pool.CopyInSummed), and compared when it arrives
// there again and before it leaves; hostpool.Options.Checks can ask for less. When no
// look-up came for a while, a scrubber compares cold host pages too. A mismatch drops
// the entry: the page is a miss with a reason, never a wrong byte.
//
// The pool orders the copies behind the engine's work, and the engine behind them
// (hostpool.Options.Compute). The store only chooses, enqueues, and settles the books
// when a copy is done: one goroutine does, in the order of the stream.
//
// Lock order: enqueue, mu, then the locks of hostpool and page. mu is never held
// while bytes move or are summed. enqueue is held from the choice of the pages of a
// copy until the copy is on its stream: so copies run in the order in which they
// were chosen, and whoever adopts a page on its way finds that copy enqueued.
package store

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/evict"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Options say what a store keeps its pages in.
type Options struct {
	// Cache is the engine's device cache. Required.
	Cache *kv.Cache
	// Arena says who owns the pages of Cache. Required; the store becomes one
	// more owner of the pages it keeps.
	Arena *page.Arena
	// Pool is the host tier. Nil: a page that leaves the device is gone.
	Pool *hostpool.Pool
	// Copies is the stream that copies run on, of Cache's device. Required with
	// a Pool, unless pages have no bytes. The store enqueues, never closes it.
	Copies device.Stream
	// Inclusive keeps the host's copy of a page that was promoted. The zero
	// value is exclusive: a page is on the device or on the host.
	Inclusive bool
	// WriteThrough copies every page to the host when it is put or used, rather than
	// when it leaves the device. It implies Inclusive.
	WriteThrough bool
	// History is how many evicted keys are remembered, to answer "evicted"
	// rather than "never stored". 0 means 262,144 (6 MiB).
	History int
	// ScrubAfter is how long no look-up must have come before the scrubber looks at
	// cold host pages, 8 MiB of them each time. 0 means a second, negative never.
	ScrubAfter time.Duration
	// JobPages is how many pages one copy job moves. 0 means 16.
	JobPages int
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// Tier is a place where pages live.
type Tier uint8

// The tiers, from the fastest.
const (
	Nowhere Tier = iota
	Device
	Host
)

func (t Tier) String() string { return [...]string{"nowhere", "device", "host"}[t] }

// Ref names an entry of the store and holds a pin on it.
type Ref int32

// NoRef is no entry.
const NoRef Ref = -1

// entry is what is stored under one key. All fields are guarded by Store.mu.
type entry struct { // its key is index.keys[ref]
	part  part
	pins  int32
	holds int32  // suspended users: the page must stay, in whichever tier
	epoch uint32 // moves with every pin: a copy begun before must not decide after
	state entryState
}

// part says where the page of an entry is. An entry of one rank has one part.
type part struct {
	device, host page.ID      // page.None when not in that tier
	flight       *job         // the copy in flight, nil when idle
	sum          hostpool.Sum // valid if summed
	summed       bool
}

// promoting reports whether the device page is not complete yet.
func (p *part) promoting() bool { return p.flight != nil && p.flight.kind == promotion }

type entryState uint8

const (
	absent entryState = iota
	reserved
	kept
	dropped
)

// Store is one index over the tiers. All methods may be called from any
// goroutine.
type Store struct {
	o       Options
	arena   *page.Arena
	pool    *hostpool.Pool // nil: no host tier
	bytes   int64          // of one page
	log     *slog.Logger
	enqueue sync.Mutex
	jobs    chan *job      // enqueued copies, in stream order, for the settler
	readers sync.WaitGroup // calls that sum host pages; none begins once closed
	settled chan struct{}  // closed when there are no more jobs and readers

	arrivals sync.Pool      // of *hostpool.Arrival
	arrived  []hostpool.Sum // the settler's scratch

	rest     context.CancelFunc // ends the scrubber
	scrubbed chan struct{}      // closed when it has ended

	mu       sync.Mutex
	entries  []entry   // slab; guarded by mu
	unused   []Ref     // entries that are absent; guarded by mu
	at       []Ref     // by device page: the entry whose page it is; guarded by mu
	latest   *job      // the last one enqueued, nil at first; guarded by mu
	index    *index    // keys of reserved and kept entries; guarded by mu
	device   evict.LRU // guarded by mu
	host     evict.LRU // guarded by mu
	ghosts   *ghosts   // guarded by mu
	moves    []moves   // by entry; guarded by mu
	lookups  uint64    // guarded by mu
	stats    Stats     // guarded by mu
	hashes   []uint64  // scratch; guarded by mu
	touched  uint32    // what touch has read, so that it is read; guarded by mu
	ids      []page.ID // scratch; guarded by mu
	hosts    []page.ID // scratch; guarded by mu
	chosen   []int32   // scratch; guarded by mu
	closed   bool      // guarded by mu: no more jobs
	released bool      // guarded by mu: every page was given back
}

// Stats counts what a store did since it was opened. Pages are whole pages.
type Stats struct {
	Committed    int64 // pages taken in
	Refused      int64 // pages offered under a key that was there already
	Demoted      int64 // device → host, complete
	Promoted     int64 // host → device, complete
	Written      int64 // device → host while the page stays on the device, complete
	Abandoned    int64 // demotions that were not wanted any more, or failed
	EvictedHost  int64 // gone from the host tier to make room
	DroppedCold  int64 // gone from the device because the host had no room
	Corrupted    int64 // gone because their bytes failed a check
	CopyFailed   int64 // gone, or not promoted, because a copy failed
	Scrubbed     int64 // cold host pages looked at by the scrubber
	Summed       int64 // checksums computed
	SummedBytes  int64
	SumNanos     int64 // time spent computing them: also by the stream, of pages that it copied
	DevicePages  int   // entries on the device now
	HostPages    int   // entries on the host now
	Entries      int   // entries kept now
	HistoryBytes int64
	HistoryFull  bool // an eviction was forgotten: "never stored" can't be told from "evicted"
}

// Open makes a store over the tiers of o. Kind: fault.Invalid.
func Open(o Options) (*Store, error) {
	switch {
	case o.Cache == nil || o.Arena == nil:
		return nil, fault.New(fault.Invalid, "store", "needs a device cache and its arena")
	case o.Pool != nil && o.Copies == nil && o.Cache.Geometry().PageBytes() > 0:
		return nil, fault.New(fault.Invalid, "store", "a host pool needs a stream to copy on")
	case o.History < 0 || o.History > maxGhosts:
		return nil, fault.New(fault.Invalid, "store", "a history of %d keys: the range is 0 to %d", o.History, maxGhosts)
	case o.JobPages < 0:
		return nil, fault.New(fault.Invalid, "store", "jobs of %d pages: at least 1", o.JobPages)
	}
	o.Inclusive = o.Inclusive || o.WriteThrough
	if o.History == 0 {
		o.History = 1 << 18
	}
	if o.JobPages == 0 {
		o.JobPages = 16
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	// Every kept entry holds a page of a tier, and every reserved one is about to
	// get a device page: there are never more entries than this.
	most := 2 * o.Cache.Geometry().Pages()
	if o.Pool != nil {
		most += o.Pool.Pages()
	}
	if most > 1<<31-1 {
		return nil, fault.New(fault.Invalid, "store", "room for %d entries (two for each device page, one for each host page): at most %d", most, 1<<31-1).
			Hint("use fewer pages, or larger ones")
	}
	s := &Store{
		o: o, arena: o.Arena, pool: o.Pool, bytes: o.Cache.Geometry().PageBytes(), log: o.Logger,
		// Every job holds a device page of its own, so putting one in never blocks.
		jobs: make(chan *job, o.Cache.Geometry().Pages()), settled: make(chan struct{}),
		entries: make([]entry, 0, most), moves: make([]moves, 0, most),
		arrivals: sync.Pool{New: func() any { return new(hostpool.Arrival) }},
		index:    newIndex(most), ghosts: newGhosts(o.History),
		at: slices.Repeat([]Ref{NoRef}, o.Cache.Geometry().Pages()),
	}
	s.device.Grow(most)
	s.host.Grow(most)
	scrubbing, rest := context.WithCancel(context.Background())
	s.rest, s.scrubbed = rest, make(chan struct{})
	go s.settle()
	if o.ScrubAfter < 0 || s.bytes == 0 || s.pool == nil || s.pool.Checks() == hostpool.ChecksOff {
		close(s.scrubbed)
	} else {
		go s.scrubber(scrubbing, cmp.Or(o.ScrubAfter, scrubIdle))
	}
	return s, nil
}

// Close settles the copies in flight, and gives back every page the store
// owns. Refs that are still held die with it. It does not close the pool or the
// stream. When ctx ends first nothing was given back, and Close can be called
// again; afterwards it is fault.Closed.
func (s *Store) Close(ctx context.Context) error {
	s.enqueue.Lock() // what was chosen is enqueued
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		s.rest()
		close(s.jobs)
	}
	s.mu.Unlock()
	s.enqueue.Unlock()
	for _, ended := range []<-chan struct{}{s.settled, s.scrubbed} {
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released {
		return errClosed()
	}
	s.released = true
	for i := range s.entries {
		if e := &s.entries[i]; e.state == kept {
			s.releaseDevice(e)
			s.releaseHost(e)
		}
	}
	return nil
}

// Stats returns the counters.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.HistoryBytes, st.HistoryFull = s.ghosts.bytes(), s.ghosts.overflowed
	return st
}

// take makes an absent entry hold the key with hash h, reserved. NoRef when there is
// none left.
func (s *Store) take(key *page.Key, h uint64) (r Ref) {
	switch n := len(s.unused); {
	case n > 0:
		r = s.unused[n-1]
		s.unused = s.unused[:n-1]
	case len(s.entries) < cap(s.entries):
		r = Ref(len(s.entries))
		s.entries, s.moves = append(s.entries, entry{}), append(s.moves, moves{})
	default:
		return NoRef
	}
	e := &s.entries[r]
	*e = entry{state: reserved, epoch: e.epoch + 1, part: part{device: page.None, host: page.None}}
	s.moves[r].n = 0
	s.index.insert(key, h, r)
	return r
}

// list enters an idle, unpinned entry into the lists of its tiers, as newest.
func (s *Store) list(r Ref, e *entry) {
	if e.state != kept || e.pins > 0 || e.part.flight != nil {
		return
	}
	if e.part.device != page.None {
		s.device.Insert(int32(r))
	}
	if e.part.host != page.None && e.holds == 0 {
		s.host.Insert(int32(r))
	}
}

// unlist takes an entry out of all lists.
func (s *Store) unlist(r Ref) {
	s.device.Remove(int32(r))
	s.host.Remove(int32(r))
}

// drop takes a kept entry with no copy in flight out of the index, for why, and
// gives its pages back. The entry itself is absent once nobody pins it. It returns
// how many device pages that left without an owner: 0 or 1.
func (s *Store) drop(r Ref, e *entry, why fault.Reason) (freed int) {
	s.unlist(r)
	key := &s.index.keys[r]
	h := s.index.hash(key)
	s.index.remove(key, h)
	s.ghosts.remember(h, why)
	freed = s.releaseDevice(e)
	s.releaseHost(e)
	e.state = dropped
	s.stats.Entries--
	if e.pins+e.holds == 0 {
		s.forget(r, e)
	}
	return freed
}

// forget makes an entry absent.
func (s *Store) forget(r Ref, e *entry) {
	e.state = absent
	s.unused = append(s.unused, r)
}

// keep makes id the device page of r: sealed, and owned by the store too.
func (s *Store) keep(r Ref, id page.ID) error {
	if err := s.checkKept(id); err != nil {
		return err
	}
	ids := [1]page.ID{id}
	if err := s.arena.Seal(ids[:]); err != nil {
		return err
	}
	if err := s.arena.Retain(ids[:]); err != nil {
		return err
	}
	s.at[id], s.entries[r].part.device = r, id
	s.stats.DevicePages++
	return nil
}

// checkKept refuses a device page that an entry has already.
func (s *Store) checkKept(id page.ID) error {
	if uint(id) < uint(len(s.at)) && s.at[id] != NoRef {
		return fault.New(fault.Invalid, fmt.Sprintf("page %d", id), "is kept under another key, %v", s.index.keys[s.at[id]])
	}
	return nil
}

// releaseDevice undoes keep. It returns how many pages that left without an
// owner: 0 or 1.
func (s *Store) releaseDevice(e *entry) (freed int) {
	if e.part.device == page.None {
		return 0
	}
	id := [1]page.ID{e.part.device}
	s.at[id[0]], e.part.device = NoRef, page.None
	s.stats.DevicePages--
	freed, err := s.arena.Release(id[:])
	s.must(err)
	return freed
}

func (s *Store) releaseHost(e *entry) {
	if e.part.host == page.None {
		return
	}
	id := e.part.host
	e.part.host = page.None
	s.stats.HostPages--
	s.must(s.pool.Release(id))
}

func errClosed() error { return fault.New(fault.Closed, "store", "is closed") }
