package devicetest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/device"
)

// The order of accesses is checked by vector clocks, one entry for each stream and one
// for the host: what somebody knows to have happened. A stream knows what the host knew
// when it enqueued, and what it waited for; the host knows what it has waited for, or
// looked at. Two accesses of the same bytes, one of which writes, must be ordered when
// the second is enqueued, however the copies happen to run.

// clock says for each actor how much of what it did is known.
type clock []uint64

// joined returns what is known by c and by d. It may be c.
func (c clock) joined(d clock) clock {
	for len(c) < len(d) {
		c = append(c, 0)
	}
	for i, n := range d {
		c[i] = max(c[i], n)
	}
	return c
}

func (c clock) of(actor int) uint64 {
	if actor < len(c) {
		return c[actor]
	}
	return 0
}

func (c clock) clone() clock { return slices.Clone(c) }

// order is what was accessed, when.
type order struct {
	actors   int // streams so far; actor 0 is the host
	host     clock
	accesses []access
	races    []string
}

type access struct {
	actor int
	at    uint64 // by the actor's own entry
	write bool
	spans spans
}

func (o *order) actor() int {
	o.actors++
	return o.actors
}

// see checks an access against those before it. known is what it comes after.
func (o *order) see(x access, known clock) {
	kept := o.accesses[:0]
	for _, a := range o.accesses {
		after := a.actor == x.actor && x.actor > 0 && known.of(x.actor) >= a.at || known.of(a.actor) >= a.at
		if (a.write || x.write) && !after && a.spans.overlap(x.spans) && len(o.races) < 100 {
			o.races = append(o.races, fmt.Sprintf("%s, not ordered after %s", x, a))
		}
		switch {
		case o.host.of(a.actor) >= a.at: // whatever comes is after it
		case after && (x.write || !a.write) && x.spans.cover(a.spans): // whatever comes after x is after it
		default:
			kept = append(kept, a)
		}
	}
	clear(o.accesses[len(kept):])
	o.accesses = kept
	if x.actor > 0 {
		o.accesses = append(o.accesses, x)
	}
}

func (x access) String() string {
	who, what := "the host", "reads"
	if x.actor > 0 {
		who = fmt.Sprint("stream ", x.actor)
	}
	if x.write {
		what = "writes"
	}
	return fmt.Sprintf("%s %s bytes of [%#x, %#x)", who, what, x.spans.lo(), x.spans.hi())
}

// forget drops what was accessed of [lo, hi), which is gone.
func (o *order) forget(lo, hi uint64) {
	o.accesses = slices.DeleteFunc(o.accesses, func(a access) bool { return lo <= a.spans.lo() && a.spans.hi() <= hi })
}

// access notes what a copy of q touches.
func (q *queue) access(reads, writes spans, o device.SourceOrder) {
	order := &q.d.order
	q.clock = q.clock.joined(order.host)
	for len(q.clock) <= q.actor {
		q.clock = append(q.clock, 0)
	}
	before := q.clock.clone()
	q.clock[q.actor]++
	at := q.clock[q.actor]
	known := before
	if o == device.AnyOrder { // it may be read at once, before anything that is queued
		known = order.host
	}
	order.see(access{q.actor, at, false, reads}, known)
	order.see(access{q.actor, at, true, writes}, q.clock)
}

// record returns what is known behind all that is queued on q.
func (q *queue) record() clock {
	q.clock = q.clock.joined(q.d.order.host)
	c := q.clock.clone()
	q.records = append(q.records, c)
	return c
}

// Learned says that the program knows that the work before the n-th recording on s has
// run. The accelerator calls it: a driver can't tell who asks.
func (d *Driver) Learned(s device.StreamHandle, n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.order.host = d.order.host.joined(d.recorded(s, n))
}

// WaitedFor says that s has come after the n-th recording on another stream without a
// wait, since that was over.
func (d *Driver) WaitedFor(s, on device.StreamHandle, n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q := d.known(s); q != nil {
		q.clock = q.clock.joined(d.recorded(on, n))
	}
}

func (d *Driver) known(s device.StreamHandle) *queue {
	if s == device.LegacyStream {
		s = device.DefaultStream
	}
	return d.streams[s]
}

func (d *Driver) recorded(s device.StreamHandle, n uint64) clock {
	q := d.known(s)
	if q == nil || n == 0 || n > uint64(len(q.records)) {
		return nil
	}
	return q.records[n-1]
}

// HostRead declares that the program now reads bytes [off, off+n) of host memory m. It
// is a race unless every copy that writes them is known to have run. HostWrite declares
// a write.
func (d *Driver) HostRead(m *device.Memory, off, n int64) { d.hostAccess(m, off, n, false) }

// HostWrite declares a write: see HostRead.
func (d *Driver) HostWrite(m *device.Memory, off, n int64) { d.hostAccess(m, off, n, true) }

func (d *Driver) hostAccess(m *device.Memory, off, n int64, write bool) {
	if n <= 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	lo := uint64(m.Base()) + uint64(off)
	d.order.see(access{write: write, spans: spans{{lo, lo + uint64(n)}}}, d.order.host)
}

// Races returns the accesses of the same bytes, one of which writes, that nothing has
// ordered: on two streams without an event between them, or by the host and a stream
// that it has not waited for. They are found when the second is enqueued, even if the
// copies then run in the right order by chance.
func (d *Driver) Races() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.order.races)
}

// TakeRaces returns the races, and forgets them: for tests that make some.
func (d *Driver) TakeRaces() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.order.races
	d.order.races = nil
	return r
}

// spans are ranges of addresses, ascending, that neither overlap nor touch.
type spans []span

type span struct{ lo, hi uint64 }

func (s spans) lo() uint64 { return s[0].lo }
func (s spans) hi() uint64 { return s[len(s)-1].hi }

// spansOf returns the bytes that rows touch from where start says, and whether any is
// touched twice.
func spansOf(rows []row, start func(*row) uint64) (s spans, twice bool) {
	s = make(spans, len(rows))
	for i := range rows {
		lo := start(&rows[i])
		s[i] = span{lo, lo + uint64(rows[i].n)}
	}
	byStart := func(a, b span) int { return cmp.Compare(a.lo, b.lo) }
	if !slices.IsSortedFunc(s, byStart) {
		slices.SortFunc(s, byStart)
	}
	n := 0
	for _, x := range s[1:] {
		last := &s[n]
		twice = twice || x.lo < last.hi
		if x.lo <= last.hi {
			last.hi = max(last.hi, x.hi)
		} else {
			n++
			s[n] = x
		}
	}
	return slices.Clone(s[:n+1]), twice
}

func (s spans) overlap(t spans) bool {
	if s.hi() <= t.lo() || t.hi() <= s.lo() {
		return false
	}
	for i, j := 0, 0; i < len(s) && j < len(t); {
		switch {
		case s[i].hi <= t[j].lo:
			i++
		case t[j].hi <= s[i].lo:
			j++
		default:
			return true
		}
	}
	return false
}

// cover reports whether s is known to hold all of t: a cheap look, which may say no.
func (s spans) cover(t spans) bool {
	if len(s) == 1 {
		return s[0].lo <= t.lo() && t.hi() <= s[0].hi
	}
	return slices.Equal(s, t)
}
