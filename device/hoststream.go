package device

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
)

const (
	// copySlice bounds one call of Go's copy, which cannot be preempted: a longer
	// one would make the garbage collector, and with it everybody, wait for it.
	copySlice = 1 << 20

	// burstGap is how long a queue must be empty for what comes next to be a new
	// burst: long enough that a submitter that waits for each job does not make one.
	burstGap = 2 * time.Millisecond

	// keepOps is the largest backlog whose buffer is kept for the next one.
	keepOps = 1 << 16
)

// hostStream is a queue and the goroutine that serves it.
//
// Callers append commands and ops to one pair of buffers under mu; the goroutine
// takes the pair and leaves the one that it has finished with, so that neither
// side allocates once the buffers have grown. Each command has a number: the
// count of commands enqueued up to and with it. A point in the queue is such a
// number, and is over when ran has reached it. Points exist only once the work
// before them is enqueued, so streams cannot wait for each other in a circle.
type hostStream struct {
	host   *Host
	name   string
	exited chan struct{} // closed when the goroutine has ended

	mu       sync.Mutex
	work     sync.Cond // there are commands, or closed was set
	progress sync.Cond // ran has grown, running or holds have changed
	cmds     []command // guarded by mu
	ops      []Op      // guarded by mu; those of the copies in cmds, in order
	backlog  int64     // guarded by mu; their bytes
	enqueued uint64    // guarded by mu
	closed   bool      // guarded by mu
	holds    int       // guarded by mu
	running  bool      // guarded by mu; the goroutine is past the gate
	err      error     // guarded by mu; the first failure; set by the goroutine only

	ran atomic.Uint64 // written by the goroutine under mu; read by anybody

	copied, busy atomic.Int64 // bytes copied, and nanoseconds spent at it; see Host.Copied

	armed error // the goroutine's own: what the next copy fails with
	crew  *crew // the goroutine and its helpers
}

// command is one entry of the queue.
type command struct {
	kind   commandKind
	ops    int         // of a copy: how many entries of hostStream.ops
	bytes  int64       // of a copy
	on     *hostStream // of a wait
	point  uint64      // of a wait
	ticket *Ticket     // of a signal
	err    error       // of an arm
}

type commandKind uint8

const (
	doCopy commandKind = iota
	doWait
	doSignal
	doArm // make the next copy fail
)

// hostEvent is a point in the queue of a stream.
type hostEvent struct {
	mu    sync.Mutex
	on    *hostStream // guarded by mu; nil until recorded
	point uint64      // guarded by mu
}

func newHostStream(h *Host, name string) *hostStream {
	s := &hostStream{host: h, name: name, exited: make(chan struct{}), crew: newCrew(&h.limits, h.workers)}
	s.work.L = &s.mu
	s.progress.L = &s.mu
	go s.serve()
	return s
}

func (s *hostStream) Name() string { return s.name }

func (s *hostStream) Copy(ops []Op) error {
	var bytes int64
	for i := range ops {
		if err := checkOp(i, &ops[i]); err != nil {
			return err
		}
		bytes += ops[i].Bytes
	}
	if err := use(ops); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused(); err != nil {
		unuse(ops)
		return err
	}
	if len(ops) > 0 {
		s.ops = append(s.ops, ops...)
		s.backlog += bytes
		s.enqueue(command{kind: doCopy, ops: len(ops), bytes: bytes})
	}
	return nil
}

func checkOp(i int, op *Op) error {
	for _, side := range [...]struct {
		name string
		mem  *Memory
		off  int64
	}{{"destination", op.Dst, op.DstOff}, {"source", op.Src, op.SrcOff}} {
		switch {
		case side.mem == nil:
			return fault.New(fault.Invalid, "copy", "op %d: no %s", i, side.name)
		case op.Bytes < 0 || side.off < 0 || side.off > side.mem.size-op.Bytes:
			return fault.New(fault.Invalid, "copy", "op %d: %s bytes [%d, %d+%d) of a memory of %d",
				i, side.name, side.off, side.off, op.Bytes, side.mem.size)
		case side.mem.bytes == nil:
			return fault.New(fault.Unsupported, "copy", "op %d: the host cannot address the %s, on device %s", i, side.name, side.mem.device)
		}
	}
	return nil
}

// use takes a use of the memories of ops: one for each stretch of ops with the
// same memory, since most calls name only two. unuse gives them back; both must
// see the same ops.
func use(ops []Op) error {
	for i := range ops {
		newDst := i == 0 || ops[i].Dst != ops[i-1].Dst
		newSrc := i == 0 || ops[i].Src != ops[i-1].Src
		side := "destination"
		ok := !newDst || ops[i].Dst.use()
		if ok && newSrc && !ops[i].Src.use() {
			side, ok = "source", false
			if newDst {
				ops[i].Dst.unuse()
			}
		}
		if !ok {
			unuse(ops[:i])
			return fault.New(fault.Closed, "copy", "op %d: the memory of its %s was freed", i, side)
		}
	}
	return nil
}

func unuse(ops []Op) {
	for i := range ops {
		if i == 0 || ops[i].Dst != ops[i-1].Dst {
			ops[i].Dst.unuse()
		}
		if i == 0 || ops[i].Src != ops[i-1].Src {
			ops[i].Src.unuse()
		}
	}
}

func (s *hostStream) Record(e Event) error {
	he, ok := e.(*hostEvent)
	if !ok || he == nil {
		return fault.New(fault.Invalid, "stream "+s.name, "record of a %T, which is no event of a host device", e)
	}
	s.mu.Lock()
	point, err := s.enqueued, s.refused()
	s.mu.Unlock()
	if err == nil {
		he.mu.Lock()
		he.on, he.point = s, point
		he.mu.Unlock()
	}
	return err
}

func (s *hostStream) Wait(e Event) error {
	he, ok := e.(*hostEvent)
	if !ok || he == nil {
		return fault.New(fault.Invalid, "stream "+s.name, "wait for a %T, which is no event of a host device", e)
	}
	on, point := he.latest()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused(); err != nil {
		return err
	}
	// A stream that waits for itself finds its point over when it gets there.
	if on != nil && on.ran.Load() < point {
		s.enqueue(command{kind: doWait, on: on, point: point})
	}
	return nil
}

func (s *hostStream) Signal(t *Ticket) error {
	if t == nil {
		return fault.New(fault.Invalid, "stream "+s.name, "signal of no ticket")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused(); err != nil {
		return err
	}
	s.enqueue(command{kind: doSignal, ticket: t})
	return nil
}

func (s *hostStream) Sync(ctx context.Context) error {
	s.mu.Lock()
	point, closed := s.enqueued, s.closed
	s.mu.Unlock()
	if err := s.await(ctx, point); err != nil {
		return err
	}
	if closed {
		return s.errClosed()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *hostStream) Close() error {
	s.mu.Lock()
	s.closed = true
	s.work.Signal()
	s.mu.Unlock()
	<-s.exited
	return s.err // nobody writes it any more
}

// refused returns why nothing can be enqueued. The caller holds mu.
func (s *hostStream) refused() error {
	if s.closed {
		return s.errClosed()
	}
	return s.err
}

func (s *hostStream) errClosed() error {
	return fault.New(fault.Closed, "stream "+s.name, "closed before")
}

// enqueue appends c. The caller holds mu.
func (s *hostStream) enqueue(c command) {
	s.cmds = append(s.cmds, c)
	s.enqueued++
	s.work.Signal()
}

// await waits until point has run, or ctx ends. Work that is over wins.
func (s *hostStream) await(ctx context.Context, point uint64) error {
	if s.ran.Load() >= point {
		return nil
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			s.mu.Lock()
			s.progress.Broadcast()
			s.mu.Unlock()
		})()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.ran.Load() < point {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.progress.Wait()
	}
	return nil
}

// hold closes the gate and waits for what is past it.
func (s *hostStream) hold() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds++
	for s.running {
		s.progress.Wait()
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		s.holds--
		s.progress.Broadcast()
		s.mu.Unlock()
	})
}

func (s *hostStream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused() == nil {
		s.enqueue(command{kind: doArm, err: err})
	}
}

// serve runs the queue until the stream is closed and the queue is empty.
func (s *hostStream) serve() {
	defer func() {
		s.crew.close()
		s.host.mu.Lock()
		s.host.streams--
		s.host.mu.Unlock()
		close(s.exited)
	}()
	var cmds []command
	var ops []Op
	var burst int64 // bytes since the queue was last empty for a while: small jobs without end turn the cache over too
	for {
		s.mu.Lock()
		if len(s.cmds) == 0 && !s.closed {
			began := time.Now()
			for len(s.cmds) == 0 && !s.closed {
				s.work.Wait()
			}
			if time.Since(began) > burstGap {
				burst = 0
			}
		}
		cmds, s.cmds = s.cmds, cmds
		ops, s.ops = s.ops, ops
		burst += s.backlog
		s.backlog = 0
		s.mu.Unlock()
		if len(cmds) == 0 {
			return
		}
		rest := ops
		for i := range cmds {
			s.run(&cmds[i], rest[:cmds[i].ops], burst)
			rest = rest[cmds[i].ops:]
		}
		if cap(ops) > keepOps || cap(cmds) > keepOps {
			cmds, ops = nil, nil
		}
		clear(cmds) // hold on to no memory and no ticket
		clear(ops)
		cmds, ops = cmds[:0], ops[:0]
	}
}

// run runs one command, in three steps: what may happen while the stream is
// held, the gate, and the command itself. A failed stream still waits where it
// was told to: whoever waits for it in turn counts on that.
func (s *hostStream) run(c *command, ops []Op, burst int64) {
	switch {
	case c.kind == doWait:
		_ = c.on.await(context.Background(), c.point) // never ends early
	case c.kind == doCopy && invariants.Enabled && s.err == nil:
		for i := range ops {
			poison(ops[i].Dst.bytes[ops[i].DstOff:][:ops[i].Bytes])
		}
	}

	s.mu.Lock()
	for s.holds > 0 {
		s.progress.Wait()
	}
	s.running = true
	s.mu.Unlock()

	failure := s.err
	switch c.kind {
	case doCopy:
		if failure == nil && s.armed != nil {
			failure = fault.Wrap(fault.Device, "stream "+s.name, s.armed)
		}
		if failure == nil {
			s.copyAll(ops, c.bytes, burst)
		}
		unuse(ops)
	case doSignal:
		c.ticket.Complete(failure)
	case doWait: // waited for above
	case doArm:
		s.armed = c.err
	}

	s.mu.Lock()
	s.err = failure
	s.running = false
	s.ran.Add(1)
	s.progress.Broadcast()
	s.mu.Unlock()
}

func (s *hostStream) copyAll(ops []Op, bytes, burst int64) {
	var c choices
	if bytes >= s.host.limits.smallJob {
		c, _ = s.host.kernels()
	}
	began := time.Now()
	s.crew.own.digested = 0
	s.crew.copy(ops, bytes, s.host.limits.kernel(c, bytes, burst))
	s.copied.Add(bytes)
	s.busy.Add((time.Since(began) - s.crew.own.digested).Nanoseconds())
}

func poison(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = invariants.Poison
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

func (e *hostEvent) latest() (on *hostStream, point uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.on, e.point
}

func (e *hostEvent) Done() bool {
	on, point := e.latest()
	return on == nil || on.ran.Load() >= point
}

func (e *hostEvent) Sync(ctx context.Context) error {
	on, point := e.latest()
	if on == nil {
		return nil
	}
	return on.await(ctx, point)
}
