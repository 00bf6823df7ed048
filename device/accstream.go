package device

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/fault"
)

// accStream is a stream of the driver, and the books over it.
//
// Calls enqueue under mu, so that the order in the driver's queue is the program's. A
// point in the queue is the count of the work enqueued up to it. Points that somebody
// will ask for are marked: a mark is an event of the driver, and what is to be done when
// it has run. Marks wait in fifo, where the device's reaper finds them; it finishes them
// in the order in which they were recorded on any stream of the device, so that what
// comes after something is never over before it.
type accStream struct {
	a      *Accelerator
	name   string
	handle StreamHandle
	owned  bool
	gone   chan struct{} // closed when the stream is

	mu       sync.Mutex
	closed   bool      // guarded by mu
	work     uint64    // guarded by mu
	marked   uint64    // guarded by mu; the point of the latest mark
	recorded uint64    // guarded by mu; how often an event was recorded here
	uses     []*Memory // guarded by mu; of work that has no mark yet
	buffers            // guarded by mu

	qmu      sync.Mutex
	progress sync.Cond // ran has grown
	fifo     []*mark   // guarded by qmu; from first on
	first    int       // guarded by qmu
	err      error     // guarded by qmu; the first failure

	// The last point that was found to be over, guarded by qmu; that is over for events,
	// its memory given back; and whose tickets are completed. They are not far apart.
	found     uint64
	ran, told atomic.Uint64 // written under qmu
}

// mark is a marked point. Its event is the driver's for as long as it lives; marks are
// used again and again.
type mark struct {
	s        *accStream
	point    uint64
	seq      uint64 // among all marks of the device, in the order of recording
	recorded uint64 // which recording on the stream it was; 0 when it has no event
	event    EventHandle
	drained  *atomic.Bool // instead of an event: set when the stream has drained
	uses     []*Memory
	tickets  []*Ticket
	err      error // of the stream, when the mark was found to be over

	kept    bool // the reaper's: its work may run yet, so that uses stay in use
	waits   int  // guarded by s.qmu; who is in the driver with event
	retired bool // guarded by s.qmu; over
}

// Of what a burst needed, so many marks are kept for the next, and lists of so many
// entries.
const (
	keepMarks = 4096
	keepUses  = 1 << 16
)

func (s *accStream) Name() string { return s.name }

// refused returns why nothing can be enqueued. The caller holds mu.
func (s *accStream) refused() error {
	if s.closed {
		return s.errClosed()
	}
	return s.failure()
}

func (s *accStream) errClosed() error {
	return fault.New(fault.Closed, "stream "+s.name, "closed before")
}

func (s *accStream) failure() error {
	s.qmu.Lock()
	defer s.qmu.Unlock()
	return s.err
}

// fail makes err the stream's error, unless it has one.
func (s *accStream) fail(err error) {
	s.qmu.Lock()
	defer s.qmu.Unlock()
	if s.err == nil {
		s.err = fault.Wrap(fault.Device, "stream "+s.name, err)
	}
}

// refusal makes an error of the driver one of a call on s.
func (s *accStream) refusal(what string, err error) error {
	if s.a.blame(err) {
		return s.failure()
	}
	return fault.Wrap(kindOf(err), "stream "+s.name+": "+what, err)
}

// settle returns a mark with an event that stands for all work so far, or nil when all of
// it is over and a mark of that is not wanted; either way with qmu locked, so that this
// stays so. On an error, which is one of a call to do what, nothing is locked. The caller
// holds mu.
func (s *accStream) settle(what string, wanted bool) (*mark, error) {
	s.qmu.Lock()
	if err := s.err; err != nil {
		s.qmu.Unlock()
		return nil, err
	}
	if m := s.tail(); m != nil && m.point == s.work && m.recorded > 0 {
		return m, nil
	}
	if s.ran.Load() >= s.work && !wanted {
		return nil, nil
	}
	s.qmu.Unlock()
	m, err := s.a.newMark()
	if err != nil {
		return nil, s.refusal(what, err)
	}
	if err := s.a.driver.Record(m.event, s.handle); err != nil {
		s.a.keepMark(m)
		return nil, s.refusal(what, err)
	}
	s.recorded++
	m.recorded = s.recorded
	s.push(m)
	return m, nil
}

// settleOpen is settle for a call that a closed stream refuses.
func (s *accStream) settleOpen(what string, wanted bool) (*mark, error) {
	if s.closed {
		return nil, s.errClosed()
	}
	return s.settle(what, wanted)
}

// push enqueues m, with the uses so far, as the mark of all work so far. No two marks
// have one point, so that who waits for the latest has waited for all: a mark of work
// that has one, which tells nothing any more, counts as work. It returns with qmu locked.
// The caller holds mu.
func (s *accStream) push(m *mark) {
	if s.work == s.marked {
		s.work++
	}
	m.s, m.point, m.seq = s, s.work, s.a.seq.Add(1)
	m.uses, s.uses = s.uses, m.uses[:0]
	s.marked = s.work
	s.qmu.Lock()
	if s.first == len(s.fifo) {
		s.fifo, s.first = s.fifo[:0], 0
	} else if s.first > 64 && s.first > len(s.fifo)/2 {
		n := copy(s.fifo, s.fifo[s.first:])
		clear(s.fifo[n:])
		s.fifo, s.first = s.fifo[:n], 0
	}
	s.fifo = append(s.fifo, m)
	s.a.reap.added(s)
}

// tail returns the latest mark, if it is not over. The caller holds qmu.
func (s *accStream) tail() *mark {
	if s.first == len(s.fifo) {
		return nil
	}
	return s.fifo[len(s.fifo)-1]
}

// head returns the first mark that is not over.
func (s *accStream) head() *mark {
	s.qmu.Lock()
	defer s.qmu.Unlock()
	if s.first == len(s.fifo) {
		return nil
	}
	return s.fifo[s.first]
}

// pop takes the head, which is over.
func (s *accStream) pop() {
	s.qmu.Lock()
	defer s.qmu.Unlock()
	m := s.fifo[s.first]
	s.fifo[s.first] = nil
	s.first++
	s.found = m.point
	m.err = s.err
}

// mustSettle marks all work so far, by an event if there can be one, else by a goroutine
// that waits until the stream has drained. The caller holds mu.
func (s *accStream) mustSettle() {
	if s.work == s.marked {
		return
	}
	if _, err := s.settle("record of an event", true); err != nil {
		s.push(&mark{drained: s.drain()})
	}
	s.qmu.Unlock()
}

// drainTries is how often a stream is asked to drain before its device is given up.
const drainTries = 3

// drain has a goroutine wait until what is queued has run. A lost device runs nothing.
// Where neither an event nor the stream itself can tell when that is, the device is given
// up, and the memory that its work uses stays in use: that is all that is safe.
func (s *accStream) drain() *atomic.Bool {
	over := new(atomic.Bool)
	if s.a.Lost() != nil {
		return over
	}
	s.a.calm.Go(func() {
		var err error
		for range drainTries {
			var drained bool
			drained, err = s.a.driver.SyncStream(s.handle)
			if err != nil && s.a.blame(err) {
				return // the reaper finds all work over
			}
			if err != nil {
				s.fail(err)
			}
			if drained {
				over.Store(true)
				s.a.reap.kick()
				return
			}
		}
		s.a.lose(err)
	})
	return over
}

// finish ends m, whose uses were given back: for events, then for tickets, then for who
// waits for both.
func (s *accStream) finish(m *mark) {
	s.qmu.Lock()
	s.ran.Store(m.point)
	s.progress.Broadcast()
	s.qmu.Unlock()
	for i, t := range m.tickets {
		s.complete(t, m.err, m.recorded)
		m.tickets[i] = nil
	}
	m.tickets = m.tickets[:0]
	s.qmu.Lock()
	s.told.Store(m.point)
	s.progress.Broadcast()
	m.retired = true
	kept := m.recorded > 0 && m.waits == 0
	s.qmu.Unlock()
	if kept {
		s.a.keepMark(m)
	}
}

func (s *accStream) complete(t *Ticket, err error, recorded uint64) {
	if s.a.learns == nil {
		t.Complete(err)
		return
	}
	t.complete(err, func() { s.a.learns.Learned(s.handle, recorded) })
}

// hold keeps the event of m, the mark of point, until unhold, and the driver open; false
// when the point is over, as all of a lost device is.
func (s *accStream) hold(m *mark, point uint64) bool {
	s.qmu.Lock()
	defer s.qmu.Unlock()
	if s.ran.Load() >= point || s.a.Lost() != nil {
		return false
	}
	m.waits++
	s.a.calm.Add(1) // the stream is open, so nobody waits for calm yet
	return true
}

func (s *accStream) unhold(m *mark) {
	s.qmu.Lock()
	m.waits--
	kept := m.retired && m.waits == 0
	s.qmu.Unlock()
	if kept {
		s.a.keepMark(m)
	}
	s.a.calm.Done()
}

// newMark returns a mark with an event.
func (a *Accelerator) newMark() (*mark, error) {
	a.mu.Lock()
	if n := len(a.freeMarks); n > 0 {
		m := a.freeMarks[n-1]
		a.freeMarks = a.freeMarks[:n-1]
		a.mu.Unlock()
		return m, nil
	}
	a.mu.Unlock()
	e, err := a.driver.NewEvent()
	if err != nil {
		return nil, err
	}
	return &mark{event: e}, nil
}

// keepMark takes m back, which nobody uses any more.
func (a *Accelerator) keepMark(m *mark) {
	*m = mark{event: m.event, uses: m.uses, tickets: m.tickets}
	if cap(m.uses) > keepUses {
		m.uses = nil
	}
	a.mu.Lock()
	kept := len(a.freeMarks) < keepMarks
	if kept {
		a.freeMarks = append(a.freeMarks, m)
	}
	a.mu.Unlock()
	if !kept && !a.gone.Load() {
		_ = a.driver.CloseEvent(m.event) // the driver's own Close ends what is left
	}
}

func (s *accStream) Record(e Event) error {
	ae, ok := e.(*accEvent)
	if !ok || ae == nil || !ae.a.akin(s.a) {
		return fault.New(fault.Invalid, "stream "+s.name, "record of a %T, which is no event of a device of this kind", e)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m, err := s.settleOpen("record of an event", false)
	if err != nil {
		return err
	}
	s.qmu.Unlock()
	ae.mu.Lock()
	ae.at = accPoint{on: s, point: s.work, mark: m, recorded: s.recorded}
	ae.mu.Unlock()
	return nil
}

func (s *accStream) Wait(e Event) error {
	ae, ok := e.(*accEvent)
	if !ok || ae == nil || !ae.a.akin(s.a) {
		return fault.New(fault.Invalid, "stream "+s.name, "wait for a %T, which is no event of a device of this kind", e)
	}
	at := ae.latest()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused(); err != nil {
		return err
	}
	if at.on == nil || at.on == s { // its own point is over when the stream gets there
		return nil
	}
	if !at.on.hold(at.mark, at.point) {
		if by := at.on.a; by != s.a && by.givenUp() { // the work before e may run yet
			return fault.Wrap(fault.Device, "stream "+s.name+": wait for an event", by.Lost())
		}
		if s.a.learns != nil {
			s.a.learns.WaitedFor(s.handle, at.on.handle, at.recorded)
			s.work++ // so that an event recorded behind it passes on what it knows
		}
		return nil
	}
	defer at.on.unhold(at.mark)
	if err := s.a.driver.Wait(s.handle, at.mark.event); err != nil {
		return s.refusal("wait for an event", err)
	}
	s.work++
	return nil
}

func (s *accStream) Signal(t *Ticket) error {
	if t == nil {
		return fault.New(fault.Invalid, "stream "+s.name, "signal of no ticket")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m, err := s.settleOpen("signal of a ticket", true)
	if err != nil {
		return err
	}
	m.tickets = append(m.tickets, t)
	s.qmu.Unlock()
	return nil
}

func (s *accStream) Sync(ctx context.Context) error {
	s.mu.Lock()
	s.mustSettle()
	point, closed, recorded := s.marked, s.closed, s.recorded
	s.mu.Unlock()
	if err := s.await(ctx, &s.told, point); err != nil {
		return err
	}
	if s.a.learns != nil {
		s.a.learns.Learned(s.handle, recorded)
	}
	if closed {
		return s.errClosed()
	}
	return s.failure()
}

// await waits until at, ran or told, has come to point, or ctx ends. Work that is over
// wins: once it is found to be, the rest is waited for.
func (s *accStream) await(ctx context.Context, at *atomic.Uint64, point uint64) error {
	if at.Load() >= point {
		return nil
	}
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			s.qmu.Lock()
			s.progress.Broadcast()
			s.qmu.Unlock()
		})()
	}
	s.qmu.Lock()
	defer s.qmu.Unlock()
	for at.Load() < point {
		if err := ctx.Err(); err != nil && s.found < point {
			return err
		}
		s.progress.Wait()
	}
	return nil
}

func (s *accStream) Close() error {
	s.mu.Lock()
	again := s.closed
	s.closed = true
	s.mustSettle()
	point, recorded := s.marked, s.recorded
	s.mu.Unlock()
	if again {
		<-s.gone
		return s.failure()
	}
	_ = s.await(context.Background(), &s.told, point) // never ends early
	if s.a.learns != nil {
		s.a.learns.Learned(s.handle, recorded)
	}
	if s.owned && !s.a.gone.Load() {
		if err := s.a.driver.CloseStream(s.handle); err != nil && !s.a.blame(err) {
			s.fail(err)
		}
	}
	s.a.dropStream(s)
	close(s.gone)
	return s.failure()
}

// accEvent is a point in the queue of a stream.
type accEvent struct {
	a  *Accelerator
	mu sync.Mutex
	at accPoint // guarded by mu
}

type accPoint struct {
	on       *accStream // nil until recorded
	point    uint64
	mark     *mark // of point, for as long as that is not over
	recorded uint64
}

func (e *accEvent) latest() accPoint {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at
}

func (e *accEvent) Done() bool {
	at := e.latest()
	if at.on == nil {
		return true
	}
	over := at.on.ran.Load() >= at.point
	if over {
		at.learn()
	}
	return over
}

func (e *accEvent) Sync(ctx context.Context) error {
	at := e.latest()
	if at.on == nil {
		return nil
	}
	err := at.on.await(ctx, &at.on.ran, at.point)
	if err == nil {
		at.learn()
	}
	return err
}

func (at *accPoint) learn() {
	if learns := at.on.a.learns; learns != nil {
		learns.Learned(at.on.handle, at.recorded)
	}
}
