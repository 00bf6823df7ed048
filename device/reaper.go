package device

import (
	"cmp"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// Having found nothing, the reaper looks again so often at once, and then at such
	// intervals: about what it costs to be woken.
	reapSpins = 64
	reapNap   = 20 * time.Microsecond
	reapDoze  = 50 * time.Microsecond
)

// reaper finds out which marks of a device are over, and finishes them. It is one
// goroutine, which asks the driver about the first mark of every stream: in a loop for a
// moment, then now and then. While only one stream has marks, a helper blocks in the
// driver instead; while none has, both sleep.
type reaper struct {
	a       *Accelerator
	wake    chan struct{}
	stop    chan struct{}
	exited  chan struct{}
	ask     chan *mark    // to the helper; held
	answers chan struct{} // from it; room for one
	helped  chan struct{} // closed when the helper has ended

	marks  atomic.Int64              // that are not finished
	parked atomic.Bool               // the reaper sleeps until it is woken
	on     atomic.Pointer[accStream] // the stream that the helper blocks on, while parked for it

	// The reaper's own.
	streams []*accStream
	changes uint64
	only    *accStream // the one stream that has marks, after a pass
	helping bool
	over    []*mark
}

func newReaper(a *Accelerator) *reaper {
	return &reaper{
		a: a, wake: make(chan struct{}, 1), stop: make(chan struct{}), exited: make(chan struct{}),
		ask: make(chan *mark, 1), answers: make(chan struct{}, 1), helped: make(chan struct{}),
		changes: ^uint64(0),
	}
}

// added says that s has one more mark.
func (r *reaper) added(s *accStream) {
	r.marks.Add(1)
	if r.parked.Load() && r.on.Load() != s {
		r.kick()
	}
}

// kick wakes the reaper if it is parked.
func (r *reaper) kick() {
	if r.parked.CompareAndSwap(true, false) {
		select {
		case r.wake <- struct{}{}:
		default: // it was woken already
		}
	}
}

// close ends the reaper and its helper, once no marks are left. Of a lost device, the
// helper may never return from the driver: then close gives up, and returns false.
func (r *reaper) close(lost bool) bool {
	close(r.stop)
	<-r.exited
	return within(r.helped, lost)
}

func (r *reaper) help() {
	defer close(r.helped)
	for m := range r.ask {
		if err := r.a.driver.SyncEvent(m.event); err != nil {
			r.a.blame(err) // what else went wrong is found by EventDone
		}
		m.s.unhold(m)
		r.answers <- struct{}{}
	}
}

func (r *reaper) run() {
	defer close(r.exited)
	go r.help()
	defer close(r.ask)
	timer := time.NewTimer(reapDoze)
	defer timer.Stop()
	idle := 0
	for {
		if r.pass() {
			idle = 0
			continue
		}
		switch {
		case r.marks.Load() == 0:
			if !r.park(nil) {
				return
			}
			idle = 0
		case idle < reapSpins:
			idle++
			runtime.Gosched()
		case r.only != nil && r.mayBlock(r.only):
			if !r.park(r.only) {
				return
			}
			idle = 0
		default:
			idle++
			nap := reapNap
			if idle > 2*reapSpins {
				nap = reapDoze
			}
			timer.Reset(nap)
			select {
			case <-timer.C:
			case <-r.answers:
				r.helping = false
			}
		}
	}
}

// mayBlock reports whether the reaper can leave the first mark of s, the only stream
// that has any, to the helper.
func (r *reaper) mayBlock(s *accStream) bool {
	if r.helping || r.a.Lost() != nil {
		return false
	}
	m := s.head()
	if m == nil || m.drained != nil || !s.hold(m, m.point) {
		return false
	}
	r.helping = true
	r.ask <- m
	return true
}

// park sleeps until there are marks that it knows nothing of: on any stream, or on
// another than s, on whose first mark the helper blocks. It returns false when the
// reaper is to end.
func (r *reaper) park(s *accStream) bool {
	r.on.Store(s)
	r.parked.Store(true)
	defer r.parked.Store(false)
	if s == nil && r.marks.Load() > 0 || s != nil && r.others(s) {
		return true // too late to be woken
	}
	select {
	case <-r.wake:
	case <-r.answers:
		r.helping = false
	case <-r.stop:
		return false
	}
	return true
}

// others reports whether another stream than s has marks, or the device was lost.
func (r *reaper) others(s *accStream) bool {
	for _, x := range r.open() {
		if x != s && x.head() != nil {
			return true
		}
	}
	return r.a.Lost() != nil
}

// open returns the streams of the device.
func (r *reaper) open() []*accStream {
	r.a.mu.Lock()
	defer r.a.mu.Unlock()
	if r.changes != r.a.changes {
		clear(r.streams)
		r.streams, r.changes = append(r.streams[:0], r.a.streams...), r.a.changes
	}
	return r.streams
}

// pass finishes all marks that are over, and reports whether there were any. What is
// over is collected first: when a mark is over, so are all that it came after, on
// whatever stream. Finished in the order of recording, they never look otherwise. Marks
// recorded after the pass began are left for the next, so that it ends.
func (r *reaper) pass() bool {
	last := r.a.seq.Load()
	streams := r.open()
	for again := true; again; {
		again = false
		busy := 0
		r.only = nil
		for _, s := range streams {
			for {
				m := s.head()
				if m == nil {
					break
				}
				if m.seq > last || !r.isOver(m) {
					busy++
					r.only = s
					break
				}
				s.pop()
				r.over = append(r.over, m)
				again = true
			}
		}
		if busy > 1 {
			r.only = nil
		}
	}
	if len(r.over) == 0 {
		return false
	}
	slices.SortFunc(r.over, func(x, y *mark) int { return cmp.Compare(x.seq, y.seq) })
	for _, m := range r.over {
		for i, used := range m.uses {
			if m.kept {
				used.kept.Store(true)
			} else {
				used.unuse()
			}
			m.uses[i] = nil
		}
		m.uses = m.uses[:0]
	}
	for _, m := range r.over {
		m.s.finish(m)
	}
	r.marks.Add(-int64(len(r.over)))
	clear(r.over)
	r.over = r.over[:0]
	return true
}

// isOver asks whether the work before m has run. Of a lost device all work is over: it
// runs nothing any more, or nobody can tell.
func (r *reaper) isOver(m *mark) bool {
	if err := r.a.Lost(); err != nil {
		m.s.fail(err) // whoever found out may not have come to this stream
		m.kept = r.a.givenUp()
		return true
	}
	if m.drained != nil {
		return m.drained.Load()
	}
	done, err := r.a.driver.EventDone(m.event)
	if err == nil {
		return done
	}
	if r.a.blame(err) {
		return true
	}
	m.s.fail(err)
	if !done {
		// Nobody knows what the stream does now. What it uses stays in use until it
		// has drained.
		m.drained = m.s.drain()
	}
	return done
}
