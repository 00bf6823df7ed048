// Package hostpool keeps pages in host memory: the tier below the device, and
// the memory that disks, networks and other processes read from.
//
// The pool is page-major (all layers of a page together), so that one page is
// one stretch of bytes for a checksum, a disk or a socket, and one 2-D copy for
// a device. Its address range is made at once and its memory in the background,
// a stretch at a time: pages can be claimed as soon as they exist. The size
// asked for is the size used. Where the device wants host memory pinned, each stretch
// is pinned before its pages can be claimed, and stays so until the pool is closed.
//
// # States of a page
//
//	missing → free                     the background growth reached it
//	free    → claimed                  Claim: nobody can see it, its content is undefined
//	claimed → kept                     Commit: sealed, its bytes never change again
//	claimed → free                     Abandon: the copy failed, or is no longer wanted
//	kept    → free                     Release
//
// A copy in flight (CopyIn into claimed pages, CopyOut out of kept ones) holds
// its pages: another copy of them, Commit, Abandon and Release are refused with
// fault.Busy until the copy's ticket is done. So a page has one copy at a time,
// and changes hands only through the ticket of the last one, whatever streams the
// copies run on and whatever order their callers finish in.
//
// A pool that has too few free pages refuses with the shortfall, and nothing
// moves: who holds the pages decides what to give up, and asks again.
//
// Pages are claimed by those who keep books of their own (package store), or under
// the name of a suspended run, whose books the pool keeps: Offload, Settle, Reload.
//
// # Fences
//
// A copy must not read a device page that the engine still writes, nor overwrite one
// that it still reads, nor may the engine read one that is still being loaded. With
// Options.Compute every copy is put on its stream between two events: it waits for
// what the engine has enqueued, and what the engine enqueues afterwards waits for it.
// Without Compute the engine itself waits: for its own work before it gives pages to
// a copy, and for the copy's ticket before it uses them. Sync puts any other stream
// behind the copies. Copies on one stream run in the order of their calls.
//
// # Sums
//
// The sum of a page is the xxh3-128 of its bytes in the pool (CopyInSummed, Sum). The
// pool keeps and compares those of suspended runs; whoever claims pages itself keeps
// and compares theirs: as Checks says, when a page arrives again and before it leaves.
// CopyInSummed takes them of the bytes that the copy has read, which lie in the
// processor's cache then, where the processor is what copies; elsewhere of the page
// that has arrived.
//
// Lock order: order, mu, then the arena's own. No lock is held while bytes move or
// are summed.
package hostpool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Options say what a pool is made of.
type Options struct {
	// Cache is the device cache whose pages the pool keeps. Required.
	Cache *kv.Cache
	// Pages is how many pages the pool holds once grown: 1 to 2^31-1.
	Pages int
	// Host is the device that the pool's memory comes from. Required.
	Host *device.Host
	// Device is the device of the cache and of the streams, which makes the events
	// that order them. Nil means Host.
	Device device.Device
	// Compute is the stream on which the engine reads and writes its pages. When set,
	// copies run behind what it has enqueued, and what it enqueues afterwards runs
	// behind them: a store must not read a page still being written, a load must not
	// overwrite a page still being read, and the engine must not read a page still
	// being loaded. When nil, the engine itself waits.
	Compute device.Stream
	// Checks says when the pages' bytes are checked. The zero value is always.
	Checks Checks
	// Copier moves the pages. Nil means the portable one.
	Copier copier.Copier
	// GrowBytes is how much memory is touched at a time in the background, at
	// least a page. 0 means 64 MiB.
	GrowBytes int64
	// MustPin ends the growth, with the device's error, where Device refuses to pin
	// memory: the pool then has the pages that it has until then. Otherwise it goes on
	// with memory that is not pinned, whose copies block the caller and are slow, and
	// says so: to Logger, and in Pool.Pinned.
	MustPin bool
	// Logger gets what no error can carry: a growth that failed, memory that could not be
	// pinned. Nil is silent.
	Logger *slog.Logger
}

// Pool keeps pages in host memory. All methods may be called from any
// goroutine.
type Pool struct {
	cache   *kv.Cache // packed, over mem; immutable
	mem     []byte    // the whole pool; immutable
	memory  *device.Memory
	copier  copier.Copier
	summer  summer    // copier, if it can take sums of the cache's pages; else nil
	offload *kv.Route // device → host
	reload  *kv.Route // host → device
	device  device.Device
	compute device.Stream // nil: the engine waits
	checks  Checks
	log     *slog.Logger
	pages   int

	stop  context.CancelFunc // ends the growth
	grown *device.Ticket     // done when the growth has ended
	pins  pins               // of the growth

	mu     sync.Mutex
	arena  *page.Arena      // every page that exists; claimed and kept ones have one owner
	state  []state          // by page; guarded by mu
	last   []*device.Ticket // by page: the last copy that touched it; guarded by mu
	closed bool             // guarded by mu

	suspended map[Name]*suspended // guarded by mu; see suspended.go
	leaving   []leaving           // guarded by mu

	order  sync.Mutex                     // a copy and its fences are enqueued as one
	fences map[device.Stream]device.Event // guarded by order: behind the last copy on each stream
	engine device.Event                   // guarded by order: what compute has enqueued, once asked
}

type state uint8

const (
	free state = iota
	claimed
	kept
)

var stateNames = [...]string{"free", "claimed", "kept"}

// Open makes a pool and starts to grow it. Kinds: fault.Invalid, fault.Memory.
func Open(o Options) (*Pool, error) {
	p, err := prepare(o)
	if err != nil {
		return nil, err
	}
	step := o.GrowBytes
	if step == 0 {
		step = 64 << 20
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	if p.PageBytes() == 0 { // pages without bytes are there at once
		p.grown.Complete(p.arena.Grow(o.Pages))
	} else {
		go p.grow(ctx, p.step(step))
	}
	return p, nil
}

// prepare makes a pool with room for its pages, and none yet.
func prepare(o Options) (*Pool, error) {
	switch {
	case o.Cache == nil || o.Host == nil:
		return nil, fault.New(fault.Invalid, "host pool", "needs a device cache and a host device")
	case o.Pages < 1 || int64(o.Pages) > 1<<31-1:
		return nil, fault.New(fault.Invalid, "host pool", "%d pages: the range is 1 to %d", o.Pages, 1<<31-1)
	case o.Checks > ChecksOff:
		return nil, fault.New(fault.Invalid, "host pool", "checks %d: there are %d choices", o.Checks, len(checkNames))
	case o.GrowBytes < 0:
		return nil, fault.New(fault.Invalid, "host pool", "growth of %d bytes at a time is negative", o.GrowBytes)
	}
	g, err := o.Cache.Geometry().Packed(o.Pages)
	if err != nil {
		return nil, fmt.Errorf("host pool: %w", err)
	}
	mem, err := o.Host.AllocPieces(g.PageBytes()*int64(o.Pages), max(g.PageBytes(), 1))
	if err != nil {
		return nil, fmt.Errorf("host pool of %d pages: %w", o.Pages, err)
	}
	p := &Pool{
		mem: mem.Bytes(), memory: mem, copier: o.Copier, log: o.Logger, pages: o.Pages, grown: device.NewTicket(),
		state: make([]state, o.Pages), last: make([]*device.Ticket, o.Pages),
		suspended: map[Name]*suspended{}, fences: map[device.Stream]device.Event{}, device: o.Device, compute: o.Compute, checks: o.Checks,
	}
	if err := p.assemble(g, o); err != nil {
		return nil, errors.Join(err, mem.Free())
	}
	return p, nil
}

func (p *Pool) assemble(g *kv.Geometry, o Options) (err error) {
	if p.device == nil {
		p.device = o.Host
	}
	p.pins.by, _ = p.device.(pinner)
	p.pins.must = o.MustPin
	if p.copier == nil {
		p.copier = copier.NewPortable()
	}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	if p.cache, err = kv.Wrap(g, []*device.Memory{p.memory}[:g.Regions()]); err != nil { // no region without bytes
		return err
	}
	if p.offload, err = kv.NewRoute(p.cache, o.Cache); err != nil {
		return err
	}
	if o.Cache.Device() == o.Host.Name() { // the processor copies, and so reads every byte
		p.summer, _ = p.copier.(summer)
	}
	if p.reload, err = kv.NewRoute(o.Cache, p.cache); err != nil {
		return err
	}
	p.arena, err = page.NewArena(page.ArenaOptions{Pages: 0, Capacity: o.Pages})
	return err
}

// grow touches the pool's memory from front to back and hands its pages over.
func (p *Pool) grow(ctx context.Context, step int) {
	for done := 0; done < p.pages; {
		if ctx.Err() != nil {
			p.grown.Complete(fault.New(fault.Closed, "host pool", "closed after %d of %d pages", done, p.pages))
			return
		}
		n := min(step, p.pages-done)
		if err := p.extend(done, n); err != nil {
			p.log.LogAttrs(ctx, slog.LevelError, "host pool stopped growing",
				slog.Int("pages", done), slog.Int("asked", p.pages), slog.Any("error", err))
			p.grown.Complete(err)
			return
		}
		done += n
	}
	p.grown.Complete(nil)
}

// extend touches the memory of n pages behind the first done ones, pins it for a device
// that asks for it, and makes them free.
func (p *Pool) extend(done, n int) error {
	bytes := p.PageBytes()
	if err := p.memory.Populate(int64(done)*bytes, int64(n)*bytes); err != nil {
		return err
	}
	if err := p.pin(int64(done+n) * bytes); err != nil {
		return fmt.Errorf("host pool: %w", err)
	}
	return p.arena.Grow(n)
}

// Grown is done when the pool has its full size, or growing failed.
func (p *Pool) Grown() *device.Ticket { return p.grown }

// Cache is the pool's own cache: page-major, in host memory. Its pages belong to
// the pool; read kept ones only.
func (p *Pool) Cache() *kv.Cache { return p.cache }

// Pages is how many pages the pool has when fully grown.
func (p *Pool) Pages() int { return p.pages }

// Checks says when the pages' bytes are checked.
func (p *Pool) Checks() Checks { return p.checks }

// PageBytes is the size of one page.
func (p *Pool) PageBytes() int64 { return p.cache.Geometry().PageBytes() }

// NumFree is how many pages can be claimed now.
func (p *Pool) NumFree() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reap()
	return p.arena.NumFree()
}

// Claim appends n free pages to dst, all or nothing. A full pool refuses with a
// *page.FullError, whose Shortfall says how many pages are missing.
func (p *Pool) Claim(dst []page.ID, n int) ([]page.ID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return dst, errClosed()
	}
	p.reap()
	before := len(dst)
	dst, err := p.arena.Acquire(dst, n)
	if err != nil {
		return dst[:before], fmt.Errorf("host pool: %w", err)
	}
	for _, id := range dst[before:] {
		p.state[id] = claimed
	}
	return dst, nil
}

// CopyIn enqueues on s the copy of device pages (Src) into claimed host pages
// (Dst). t is completed when the copies have run; after an error it is too, with
// that error, once whatever was enqueued has drained. Until then the pages of both
// sides are in use. Kinds: fault.Invalid (not claimed, or twice in pairs),
// fault.Busy (a copy is in flight), those of the stream, fault.Closed.
func (p *Pool) CopyIn(s device.Stream, pairs []page.Pair, t *device.Ticket) (copier.Moved, error) {
	return p.copyIn(s, pairs, nil, t)
}

// CopyOut enqueues on s the copy of kept host pages (Src) onto device pages
// (Dst). t is completed as in CopyIn.
func (p *Pool) CopyOut(s device.Stream, pairs []page.Pair, t *device.Ticket) (copier.Moved, error) {
	p.mu.Lock()
	err := p.use(len(pairs), func(i int) page.ID { return pairs[i].Src }, t, kept)
	p.mu.Unlock()
	if err != nil {
		t.Complete(err)
		return copier.Moved{}, err
	}
	return p.start(s, p.reload, pairs, nil, t)
}

// copyIn is CopyIn with digests for the pages, or none.
func (p *Pool) copyIn(s device.Stream, pairs []page.Pair, digests []device.Digest, t *device.Ticket) (copier.Moved, error) {
	p.mu.Lock()
	err := p.use(len(pairs), func(i int) page.ID { return pairs[i].Dst }, t, claimed)
	p.mu.Unlock()
	if err != nil {
		t.Complete(err)
		return copier.Moved{}, err
	}
	return p.start(s, p.offload, pairs, digests, t)
}

// start enqueues a copy whose host pages are marked as used by t, with digests for
// the pages, or none.
func (p *Pool) start(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest, t *device.Ticket) (copier.Moved, error) {
	if r.PageBytes() == 0 { // nothing to move, nothing to wait for
		t.Complete(nil)
		return copier.Moved{Pages: len(pairs)}, nil
	}
	p.order.Lock()
	defer p.order.Unlock()
	var moved copier.Moved
	err := p.behindEngine(s)
	switch {
	case err != nil:
	case len(digests) > 0:
		moved, err = p.summer.CopySummed(s, r, pairs, digests)
	default:
		moved, err = p.copyPages(s, r, pairs)
	}
	if err == nil {
		err = p.fence(s)
	}
	drained := t
	if err != nil { // the stream may be well, and say so when it gets there; the copy is not
		drained = device.NewTicket()
	}
	switch signalErr := s.Signal(drained); {
	case signalErr != nil:
		if err == nil {
			err = signalErr
		}
		completeIdle(s, t, err)
	case err != nil:
		go func() { // ends with the stream's work
			<-drained.Done()
			t.Complete(err)
		}()
	}
	return moved, err
}

// completeIdle completes t with err when all that was enqueued on s has run, without
// the stream's help: it has failed, or is closed.
func completeIdle(s device.Stream, t *device.Ticket, err error) {
	now, end := context.WithCancel(context.Background())
	end()
	if !errors.Is(s.Sync(now), context.Canceled) {
		t.Complete(err)
		return
	}
	go func() { // ends with the stream's work
		_ = s.Sync(context.Background())
		t.Complete(err)
	}()
}

// behindEngine makes s wait for what the engine has enqueued.
func (p *Pool) behindEngine(s device.Stream) (err error) {
	if p.compute == nil {
		return nil
	}
	if p.engine == nil {
		if p.engine, err = p.device.NewEvent(); err != nil {
			return err
		}
	}
	if err := p.compute.Record(p.engine); err != nil {
		return err
	}
	return s.Wait(p.engine)
}

// fence puts an event behind what is enqueued on s, and makes the engine wait for it.
func (p *Pool) fence(s device.Stream) (err error) {
	e := p.fences[s]
	if e == nil {
		if e, err = p.device.NewEvent(); err != nil {
			return err
		}
		p.fences[s] = e
	}
	if err := s.Record(e); err != nil || p.compute == nil {
		return err
	}
	return p.compute.Wait(e)
}

// Sync makes work enqueued on s from now on run behind every copy that was enqueued
// before, in both directions: the pages that an offload has read may then be
// written, and those that a reload writes may be read. It does not wait. Only an
// engine that works on other streams than Options.Compute needs it.
func (p *Pool) Sync(s device.Stream) error {
	p.order.Lock()
	defer p.order.Unlock()
	for of, e := range p.fences {
		if e.Done() { // nothing to wait for, and perhaps never again: its stream may be closed
			delete(p.fences, of)
			continue
		}
		if of == s {
			continue
		}
		if err := s.Wait(e); err != nil {
			return fmt.Errorf("host pool: sync: %w", err)
		}
	}
	return nil
}

// use marks n host pages as used by the copy of t.
func (p *Pool) use(n int, id func(i int) page.ID, t *device.Ticket, want state) error {
	if p.closed {
		return errClosed()
	}
	for i := range n {
		if err := p.checkState(id(i), want); err != nil {
			return err
		}
	}
	for i := range n {
		p.last[id(i)] = t
	}
	return nil
}

// Commit keeps claimed pages: from now on their bytes do not change. All or
// nothing. Kinds: fault.Invalid (not claimed), fault.Busy (a copy is in flight),
// fault.Device (its copy failed: abandon it instead).
func (p *Pool) Commit(ids ...page.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.keep(ids)
}

func (p *Pool) keep(ids []page.ID) error {
	for _, id := range ids {
		if err := p.checkState(id, claimed); err != nil {
			return err
		}
		if t := p.last[id]; t != nil {
			if _, err := t.Poll(); err != nil {
				return fault.Wrap(fault.Device, fmt.Sprintf("host page %d: its copy failed", id), err)
			}
		}
	}
	if err := p.arena.Seal(ids); err != nil {
		return err
	}
	for _, id := range ids {
		p.state[id], p.last[id] = kept, nil
	}
	return nil
}

// Abandon gives claimed pages back. All or nothing. Kinds: fault.Invalid,
// fault.Busy.
func (p *Pool) Abandon(ids ...page.ID) error { return p.giveBack(ids, claimed) }

// Release gives kept pages back. All or nothing. Kinds: fault.Invalid,
// fault.Busy.
func (p *Pool) Release(ids ...page.ID) error { return p.giveBack(ids, kept) }

func (p *Pool) giveBack(ids []page.ID, want state) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		if err := p.checkState(id, want); err != nil {
			return err
		}
	}
	return p.free(ids)
}

func (p *Pool) free(ids []page.ID) error {
	if _, err := p.arena.Release(ids); err != nil {
		return err
	}
	for _, id := range ids {
		p.state[id], p.last[id] = free, nil
	}
	return nil
}

// checkState reports why page id is not in the wanted state, or not idle.
func (p *Pool) checkState(id page.ID, want state) error {
	if int(id) < 0 || int(id) >= p.pages {
		return fault.New(fault.Invalid, fmt.Sprintf("host page %d", id), "the pool has pages 0 to %d", p.pages-1)
	}
	if p.state[id] != want {
		return fault.New(fault.Invalid, fmt.Sprintf("host page %d", id), "is %s, must be %s", stateNames[p.state[id]], stateNames[want])
	}
	if t := p.last[id]; t != nil {
		if done, _ := t.Poll(); !done {
			return fault.New(fault.Busy, fmt.Sprintf("host page %d", id), "a copy of it is in flight").
				Hint("wait for the ticket of that copy")
		}
	}
	return nil
}

// Check verifies the pool's books: every page that exists is free or owned once,
// as its state says.
func (p *Pool) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.arena.Check(func(id page.ID) int {
		if p.state[id] == free {
			return 0
		}
		return 1
	})
}

// Wait waits until every copy enqueued so far is done, however it ends, or ctx ends.
// It returns ctx's error only.
func (p *Pool) Wait(ctx context.Context) error {
	var flying []*device.Ticket
	p.mu.Lock()
	for _, t := range p.last {
		if t == nil {
			continue
		}
		if done, _ := t.Poll(); !done && (len(flying) == 0 || flying[len(flying)-1] != t) {
			flying = append(flying, t)
		}
	}
	p.mu.Unlock()
	for _, t := range flying {
		select {
		case <-t.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Close ends the growth, and unpins and frees the memory. Every copy must be done: a pool
// with one in flight is fault.Busy, and stays open; afterwards it is fault.Closed.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed()
	}
	for id := range p.state {
		if p.state[id] != free {
			if err := p.checkState(page.ID(id), p.state[id]); err != nil {
				return err
			}
		}
	}
	p.reap()
	p.stop()
	<-p.grown.Done()
	// A stream that failed completes tickets before it has come to the end of its
	// queue, which still names the memory.
	if err := p.memory.Free(); err != nil {
		return err
	}
	p.closed = true
	return nil
}

func errClosed() error { return fault.New(fault.Closed, "host pool", "is closed") }
