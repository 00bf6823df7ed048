package devicetest

import (
	"math/rand/v2"
	"runtime"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
)

// queue is a stream of a [Driver]. Everything in it is guarded by the driver's mu.
type queue struct {
	d      *Driver
	h      device.StreamHandle
	rnd    *rand.Rand
	exited chan struct{}

	commands []command // not run
	queued   uint64    // commands so far
	ran      uint64
	wanted   uint64 // a lazy driver runs so many
	holds    int
	running  bool
	closed   bool
	armed    *device.DriverError // the next copy fails with it
	err      error               // the first failure

	actor   int
	clock   clock
	records []clock // of each recording
}

// command is one entry of a queue: one of its fields.
type command struct {
	record *point
	wait   *point
	arm    *device.DriverError
	copy   *transfer
}

// transfer is a copy that was queued.
type transfer struct {
	rows     []row
	read     [][]byte // what rows hold, when the sources were read at the call
	regions  []*region
	prepared bool
}

type row struct {
	dst, src uint64
	n        int64
	to, from *region
}

func (q *queue) push(c command) {
	q.commands = append(q.commands, c)
	q.queued++
	if q.d.o.Mode != Lazy {
		q.wanted = q.queued
	}
	q.d.changed.Broadcast()
}

// want has a lazy driver run the first n commands.
func (q *queue) want(n uint64) {
	if n > q.wanted {
		q.wanted = n
		q.d.changed.Broadcast()
	}
}

// serve runs the queue until it is closed and empty.
func (q *queue) serve() {
	defer close(q.exited)
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	for q.next() {
		c := q.commands[0]
		q.running = true
		switch {
		case c.record != nil:
			c.record.done, c.record.err = true, q.err
		case c.arm != nil:
			q.armed = c.arm
		case c.copy != nil:
			q.copy(c.copy)
		}
		q.running = false
		q.commands[0] = command{}
		q.commands = q.commands[1:]
		q.ran++
		q.d.changed.Broadcast()
	}
}

// next waits until the first command may run. False: there will be none.
func (q *queue) next() bool {
	for {
		if q.d.lost != nil {
			q.skipAll()
		}
		switch c := q.first(); {
		case c == nil && q.closed:
			return false
		case c == nil, q.ran >= q.wanted && !q.closed:
		case c.wait != nil && !c.wait.done:
			c.wait.q.want(c.wait.index)
		case c.copy != nil && !c.copy.prepared && q.err == nil:
			q.prepare(c.copy)
			continue // anything may have changed
		case q.holds == 0:
			return true
		}
		q.d.changed.Wait()
	}
}

func (q *queue) first() *command {
	if len(q.commands) == 0 {
		return nil
	}
	return &q.commands[0]
}

// skipAll ends everything queued on a device that was lost.
func (q *queue) skipAll() {
	if len(q.commands) == 0 {
		return
	}
	for _, c := range q.commands {
		if c.record != nil {
			c.record.done, c.record.err = true, fault.Wrap(fault.Device, "stream", q.d.lost)
		}
		if c.copy != nil {
			c.copy.leave()
		}
	}
	q.ran += uint64(len(q.commands))
	q.commands = nil
	q.d.changed.Broadcast()
}

// prepare scribbles over what t is about to write, and lets others go first.
func (q *queue) prepare(t *transfer) {
	t.prepared = true
	for _, r := range t.rows {
		if !r.to.gone {
			b := r.to.at(r.dst, r.n)
			for i := range b {
				b[i] = invariants.Poison
			}
		}
	}
	if q.d.o.Mode != Random {
		return
	}
	q.rnd.Shuffle(len(t.rows), func(i, j int) {
		t.rows[i], t.rows[j] = t.rows[j], t.rows[i]
		if t.read != nil {
			t.read[i], t.read[j] = t.read[j], t.read[i]
		}
	})
	for range q.rnd.IntN(4) {
		q.yield()
	}
}

func (q *queue) yield() {
	q.d.mu.Unlock()
	runtime.Gosched()
	q.d.mu.Lock()
}

// copy runs t, or fails when it is to. Others may run between its rows.
func (q *queue) copy(t *transfer) {
	defer t.leave()
	if q.err == nil && q.armed != nil {
		if q.armed.Class == device.Lost {
			q.d.lose(q.armed)
			return
		}
		q.err = fault.Wrap(fault.Device, "stream", q.armed)
	}
	if q.err != nil {
		return
	}
	const breath = 64 << 10
	since := int64(0)
	for i, r := range t.rows {
		if q.d.lost != nil {
			return
		}
		if r.to.gone || r.from.gone {
			_ = q.d.violate("copy", "%d bytes from %#x to %#x, of which one was freed", r.n, r.src, r.dst)
			continue
		}
		from := r.from.at(r.src, r.n)
		if t.read != nil {
			from = t.read[i]
		}
		copy(r.to.at(r.dst, r.n), from)
		if since += r.n; since > breath || q.d.o.Mode == Random && q.rnd.IntN(8) == 0 {
			since = 0
			q.yield()
		}
	}
}

// enter and leave count the copies queued on regions.
func (t *transfer) enter() {
	for _, r := range t.regions {
		r.users++
	}
}

func (t *transfer) leave() {
	for _, r := range t.regions {
		r.users--
	}
	t.regions = nil
}

// Hold keeps what is queued on s from running until release is called. When it returns,
// what was running has finished; the copy at the head has scribbled.
func (d *Driver) Hold(s device.StreamHandle) (release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q, err := d.queue("Hold", s)
	if err != nil {
		return func() {}
	}
	q.holds++
	for q.running {
		d.changed.Wait()
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if q.holds > 0 {
			q.holds--
		}
		d.changed.Broadcast()
	})
}

// FailCopy makes the next copy queued on s fail when its turn comes, and returns the
// error: of class Failed it fails the stream, of class Lost it takes the device.
func (d *Driver) FailCopy(s device.StreamHandle, c device.Class) *device.DriverError {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := newError("copy", 700, "BROKEN_ON_PURPOSE", c)
	if q, err := d.queue("FailCopy", s); err == nil {
		q.push(command{arm: e})
	}
	return e
}

// Peek and Poke read and write bytes of any memory that the driver knows, as if by
// nobody: no stream, no order.
func (d *Driver) Peek(addr uintptr, b []byte) { d.peek(addr, b, false) }

// Poke is the other direction: see Peek.
func (d *Driver) Poke(addr uintptr, b []byte) { d.peek(addr, b, true) }

func (d *Driver) peek(addr uintptr, b []byte, write bool) {
	if len(b) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.find(uint64(addr))
	if r == nil || uint64(addr)+uint64(len(b)) > r.hi {
		_ = d.violate("Peek or Poke", "%d bytes at %#x", len(b), addr)
		return
	}
	if m := r.at(uint64(addr), int64(len(b))); write {
		copy(m, b)
	} else {
		copy(b, m)
	}
}
