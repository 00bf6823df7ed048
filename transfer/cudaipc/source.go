package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// source is an owner's cache, opened in this process.
//
// Its memory is closed by who comes last of: the copies that run, and what ends them,
// which is Close, the owner's recall, or its death. The connection is closed after that,
// which tells the owner.
type source struct {
	e      *Engine
	conn   *handoff.Conn
	copier copier.Copier
	route  *kv.Route
	event  *event // nil: work is over when it is published
	watch  sync.WaitGroup
	joins  handoff.Joins

	mapped []byte // the epoch words
	words  *device.Memory

	memory
}

// memory is what a source has open.
type memory struct {
	cache   *kv.Cache
	regions []*device.Memory
	allocs  []opened
	handles []handle

	using sync.Mutex
	uses  int   // guarded by using
	over  bool  // guarded by using; no use begins any more
	freed bool  // guarded by using
	err   error // guarded by using; of what could not be closed
}

// Open implements [transfer.Engine].
//
// Kinds: fault.Invalid (an offer or a grant that is none, or another owner's; this very
// process), fault.Unsupported (a target elsewhere than on the engine's device; another
// device than the owner's; an owner in another PID namespace), fault.NotFound (the owner has gone), fault.Busy (memory of a
// dead process, whose handle was given again, is still being read), fault.Device (the
// library doesn't open it).
func (e *Engine) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (_ transfer.Source, err error) {
	if a, ok := t.Device.(*device.Accelerator); !ok || a != e.device || t.Cache.Device() != a.Name() {
		return nil, fault.New(fault.Unsupported, "read", "its pages are memory of %s, and the owner's are opened on %s alone", t.Cache.Device(), e.device.Name()).
			Hint("read into a cache on %s and copy from there, or give both sides another engine", e.device.Name())
	}
	conn, hello, err := handoff.Dial(ctx, string(offer), handoff.DialOptions{Dir: e.o.Dir, AllowUIDs: e.o.AllowUIDs, MaxFiles: maxPieces + 1})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fault.Wrap(fault.Busy, "owner: has not answered in time", err).Hint("see whether its process is stopped")
	case err != nil:
		return nil, err
	}
	s := &source{e: e, conn: conn, copier: t.Copier}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	defer hello.Close()
	if conn.Peer().PID == e.pid {
		return nil, fault.New(fault.Invalid, "offer", "is this process's own, and no library opens memory of its own process").
			Hint("give both sides engine local")
	}
	if conn.Peer().PID == 0 {
		return nil, errUnseen()
	}
	g, err := parseGrant(hello.Payload)
	if err != nil {
		return nil, err
	}
	if err := g.check(d, len(hello.Files)); err != nil {
		return nil, err
	}
	if err := g.device.check(idOf(e.device), e.device.Name()); err != nil {
		return nil, err
	}
	if s.mapped, err = handoff.MapSealed(hello.Files[0], g.wordBytes); err != nil {
		return nil, err
	}
	s.words = device.WrapHost(s.mapped)
	if g.event != nil {
		ev, err := e.driver.openEvent(*g.event)
		if err != nil {
			return nil, s.errForeign("event", err)
		}
		s.event = &ev
	}
	if err := s.open(g, d.Geometry, hello.Files[1:]); err != nil {
		return nil, err
	}
	if s.route, err = kv.NewRoute(t.Cache, s.cache); err != nil {
		return nil, err
	}
	s.watch.Go(s.await)
	return s, nil
}

// errUnseen is about an owner whose number no process here knows it by. Libraries and
// handles know processes by their numbers, and two such owners can have one number.
func errUnseen() error {
	return fault.New(fault.Unsupported, "owner", "is in a PID namespace that this process does not see, so its handles may name another's memory").
		Hint("run both sides in one PID namespace, or give them another engine, such as hostipc or tcp")
}

// errForeign says of whose memory or event err is.
func (s *source) errForeign(what string, err error) error {
	kind := fault.KindOf(err)
	if kind == 0 {
		kind = fault.Device
	}
	return fault.Wrap(kind, fmt.Sprintf("%s of process %d", what, s.conn.Peer().PID), err).
		Hint("the owner has freed it, or the two processes are in different PID namespaces: ask the owner to publish again, and let containers share theirs")
}

// open opens all allocations, and makes a cache of them.
func (s *source) open(g *grant, geometry *kv.Geometry, files []int) error {
	for i := range g.allocs {
		a := &g.allocs[i]
		var o opened
		var err error
		if a.pieces == nil {
			o, err = s.openHandle(a.handle)
		} else {
			pieces := make([]piece, len(a.pieces))
			for j, n := range a.pieces {
				pieces[j] = piece{files[j], n}
			}
			files = files[len(a.pieces):]
			o, err = s.e.driver.openPieces(pieces)
		}
		if err != nil {
			return s.errForeign("memory", err)
		}
		s.allocs = append(s.allocs, o)
		a.bytes = min(a.bytes, o.bytes) // the library knows
	}
	for i, need := range geometry.Spec().RegionBytes {
		if err := g.holds(i, need); err != nil {
			return err
		}
		var base uintptr
		if need > 0 {
			base = s.allocs[g.regions[i].alloc].addr + uintptr(g.regions[i].offset)
		}
		m, err := s.e.device.Wrap(base, need)
		if err != nil {
			return err
		}
		s.regions = append(s.regions, m)
	}
	var err error
	s.cache, err = kv.WrapOn(geometry, s.regions, s.e.device)
	return err
}

// openHandle opens a handle that no other process has given us. Kinds: fault.Busy, and
// the driver's.
func (s *source) openHandle(h handle) (opened, error) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	for _, x := range s.e.held[h] {
		if x.conn.Peer() != s.conn.Peer() || !x.conn.Alive() {
			// Its number and its handle are another process's now: the library would take
			// the old memory, which is still open, for the new.
			return opened{}, fault.New(fault.Busy, "handle", "names memory of an earlier process %d, which is still being read", x.conn.Peer().PID).
				Hint("try again when those reads are over")
		}
	}
	o, err := s.e.driver.openMemory(h)
	if err != nil {
		return opened{}, err
	}
	s.e.held[h] = append(s.e.held[h], s)
	s.handles = append(s.handles, h)
	return o, nil
}

// await ends the use of the memory when its owner asks for it back, closes, or dies.
func (s *source) await() {
	for {
		f, err := s.conn.Receive(context.Background())
		if err == nil && f.Kind != recalled {
			continue // nothing else is said to readers
		}
		s.end()
		return
	}
}

// end has no use of the memory begin any more, and closes it when none is left.
func (s *source) end() {
	s.using.Lock()
	defer s.using.Unlock()
	s.over = true
	s.free()
}

// use keeps the memory open until unuse. Kind: fault.NotFound.
func (s *source) use() error {
	s.using.Lock()
	defer s.using.Unlock()
	if s.over {
		return s.errGone()
	}
	s.uses++
	return nil
}

func (s *source) unuse() {
	s.using.Lock()
	defer s.using.Unlock()
	s.uses--
	s.free()
}

// free closes the memory, once, when its last use is over. The caller holds using.
func (s *source) free() {
	if !s.over || s.uses > 0 || s.freed {
		return
	}
	s.freed = true
	var errs []error
	if s.cache != nil {
		errs = append(errs, s.cache.Close())
	}
	for _, m := range s.regions {
		errs = append(errs, m.Free())
	}
	if s.err = errors.Join(errs...); s.err == nil {
		// Else a device that was given up may still read what is mapped.
		for _, o := range s.allocs {
			s.err = errors.Join(s.err, o.close())
		}
		s.drop()
	}
	if s.event != nil {
		s.err = errors.Join(s.err, s.event.close())
	}
	s.err = errors.Join(s.err, s.conn.Close())
}

// drop forgets the handles that were closed.
func (s *source) drop() {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	for _, h := range s.handles {
		at := slices.Index(s.e.held[h], s)
		if s.e.held[h] = slices.Delete(s.e.held[h], at, at+1); len(s.e.held[h]) == 0 {
			delete(s.e.held, h)
		}
	}
}

func (s *source) errGone() error {
	return fault.New(fault.NotFound, "owner", "process %d has closed its publisher, or has ended", s.conn.Peer().PID).Hint("ask it to publish again")
}

// Epoch implements [transfer.Source]: the word is an atomic load away. Whoever waits for
// a copy's stream has seen all that the copy has. That the owner lives is asked behind the
// word: what was read before was read from a process that kept its promise.
func (s *source) Epoch(_ context.Context, word uint32) (uint64, error) {
	n, err := s.words.LoadUint64(int64(word) * 8)
	if err != nil {
		return 0, err
	}
	if !s.conn.Alive() {
		return 0, s.errGone()
	}
	return n, nil
}

// Copy implements [transfer.Source]. What is enqueued can't be called back, so ctx is
// looked at before, and the stream is waited for whatever happens.
func (s *source) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	if err := s.use(); err != nil {
		return err
	}
	defer s.unuse()
	if err := s.ready(ctx); err != nil {
		return err
	}
	return errors.Join(s.enqueue(on, p), on.Sync(context.WithoutCancel(ctx)))
}

// ready waits for the owner's event.
func (s *source) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil || s.event == nil {
		return err
	}
	if err := s.event.wait(ctx); err != nil && ctx.Err() == nil {
		return s.errForeign("event", err)
	}
	return ctx.Err()
}

func (s *source) enqueue(on device.Stream, p *transfer.Plan) error {
	if _, err := s.copier.Copy(on, s.route, p.Pairs); err != nil {
		return err
	}
	for _, x := range p.Parts {
		if _, err := copier.CopyTokens(s.copier, on, s.route, x.Local, x.Remote, x.T0, x.T1); err != nil {
			return err
		}
	}
	return nil
}

// Join implements [transfer.Source].
func (s *source) Join(e transfer.Epoch) error {
	if int64(e.Word) >= s.words.Size()/8 {
		return nil // what never was is found out by its word
	}
	return s.told(s.joins.Join(s.conn, e.Word, e.Count))
}

// Leave implements [transfer.Source].
func (s *source) Leave(e transfer.Epoch) error { return s.told(s.joins.Leave(s.conn, e.Word, e.Count)) }

func (s *source) told(err error) error {
	if errors.Is(err, fault.Closed) {
		return s.errGone()
	}
	return err
}

// Close implements [transfer.Source].
func (s *source) Close() error {
	s.end()
	_ = s.conn.Close() // also where the memory could not be closed: await waits in it
	s.watch.Wait()
	s.using.Lock()
	err := s.err
	s.err = nil
	s.using.Unlock()
	if s.mapped != nil {
		err = errors.Join(err, s.words.Free(), handoff.Unmap(s.mapped))
		s.mapped = nil
	}
	return err
}
