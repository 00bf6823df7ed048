package copier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

const (
	// keepPairs is how many pairs the buffers of idle jobs have room for, in all of one
	// direction: 8 MiB.
	keepPairs = 1 << 20

	// ticketSlab is how many tickets are made at once. None is used twice: a stream that
	// completed a ticket late, or twice, would end another job.
	ticketSlab = 64

	// mostNamed is how many unfinished jobs an error names.
	mostNamed = 8
)

// queueJob is a job from Submit to its report. It is in one place at a time: one of its
// lane's lists, or in the hands of Submit or of the lane's goroutine.
type queueJob struct {
	next   *queueJob
	seq    uint64 // from 1, by order of submission
	index  int64
	pairs  []page.Pair
	wait   device.Event
	sealed bool
	done   *device.Ticket // the caller's

	ticket *device.Ticket // enqueued behind the copies; nil: nothing of the job is queued
	err    error          // with which the job ends, whatever the ticket says
}

// jobList is a queue of jobs.
type jobList struct{ head, tail *queueJob }

func (l *jobList) push(j *queueJob) {
	j.next = nil
	if l.head == nil {
		l.head = j
	} else {
		l.tail.next = j
	}
	l.tail = j
}

func (l *jobList) pop() *queueJob {
	j := l.head
	l.head = j.next
	return j
}

// queueLane is one direction of a queue.
type queueLane struct {
	q      *Queue
	dir    Direction
	stream device.Stream
	own    bool // the stream is the queue's
	plans  []queuePlan
	ready  chan struct{} // cap 1

	// The goroutine's own.
	runs    []page.Run
	ops     []device.Op
	boxes   []device.Box // of ops, where they are linear
	tickets []device.Ticket

	// All below is guarded by q.mu.
	work    sync.Cond // there are jobs, or q.closed was set
	queued  jobList   // submitted
	current *queueJob // in the hands of the goroutine
	flying  jobList   // on the device, or ended behind one that is
	ended   []Completion
	free    *queueJob
	room    int    // pairs that the buffers of free jobs have room for
	held    int    // jobs that are neither free nor ended
	pushed  uint64 // seq of the newest job
	exited  bool   // the goroutine has ended
}

// takeStream makes a stream unless one was given, and sees that it is of the device.
func (l *queueLane) takeStream() (err error) {
	name := "copy queue " + l.dir.String()
	acc := l.q.acc
	switch {
	case l.stream != nil && acc != nil && !acc.On(l.stream):
		return fault.New(fault.Invalid, l.dir.String()+" stream", "%s is no stream of %s", l.stream.Name(), acc.Name())
	case l.stream != nil && acc == nil:
		e, err := l.q.device.NewEvent()
		if err != nil {
			return err
		}
		if err := l.stream.Record(e); errors.Is(err, fault.Invalid) {
			return fault.Wrap(fault.Invalid, l.dir.String()+" stream", err)
		}
		return nil
	case l.stream != nil:
		return nil
	case acc != nil:
		l.stream, err = acc.NewStreamOf(name, device.LowPriority)
	default:
		l.stream, err = l.q.device.NewStream(name)
	}
	l.own = err == nil
	return err
}

// closeStreams closes the streams that the queue has made. They are idle.
func (q *Queue) closeStreams() error {
	var errs []error
	for i := range q.lanes {
		if q.lanes[i].own {
			errs = append(errs, q.lanes[i].stream.Close())
		}
	}
	return errors.Join(errs...)
}

// refused returns why no job is taken. The caller holds mu.
func (q *Queue) refused() error {
	switch {
	case q.closed:
		return fault.New(fault.Closed, "copy queue", "shut down before")
	case q.cause != nil:
		return fault.Wrap(kindOf(q.cause), "copy queue: failed before", q.cause)
	}
	return nil
}

// fail keeps the first failure. The caller holds mu.
func (q *Queue) fail(cause error) {
	if q.cause == nil {
		q.cause = cause
	}
}

func kindOf(err error) fault.Kind {
	if k := fault.KindOf(err); k != 0 {
		return k
	}
	return fault.Device
}

// job is how errors name a job.
func (d Direction) job(index int64) string { return fmt.Sprintf("%v %d", d, index) }

// take returns an idle job.
func (l *queueLane) take() (*queueJob, error) {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	if err := l.q.refused(); err != nil {
		return nil, err
	}
	if n := l.held + len(l.ended); n >= l.q.limit {
		return nil, fault.New(fault.Full, "copy queue", "%d %vs are unfinished and %d were not read, of at most %d", l.held, l.dir, len(l.ended), l.q.limit).
			Hint("read Completed, or wait for jobs to end")
	}
	l.held++
	j := l.free
	if j == nil {
		return new(queueJob), nil
	}
	l.free = j.next
	l.room -= cap(j.pairs)
	return j, nil
}

// giveBack makes j idle. The caller holds mu.
func (l *queueLane) giveBack(j *queueJob) {
	pairs := j.pairs[:0]
	if l.room+cap(pairs) > keepPairs {
		pairs = nil
	}
	l.room += cap(pairs)
	*j = queueJob{pairs: pairs, next: l.free}
	l.free = j
	l.held--
}

// fill has j hold job, which has as many sources as destinations.
func (l *queueLane) fill(j *queueJob, job *Job) error {
	j.index, j.wait, j.sealed, j.done = job.Index, job.Wait, job.Sealed, job.Done
	j.pairs = slices.Grow(j.pairs[:0], len(job.Dst))
	dst, src := l.q.pages[1-l.dir], l.q.pages[l.dir]
	for i, d := range job.Dst {
		s := job.Src[i]
		if uint32(d) >= uint32(dst) || uint32(s) >= uint32(src) {
			return l.outside(j.index, page.Pair{Dst: d, Src: s})
		}
		j.pairs = append(j.pairs, page.Pair{Dst: d, Src: s})
	}
	return nil
}

// outside names the cache that p is not in.
func (l *queueLane) outside(index int64, p page.Pair) error {
	for i := range l.plans {
		r := l.plans[i].route
		for _, end := range []struct {
			what  string
			id    page.ID
			pages int
		}{{"destination", p.Dst, r.Dst().Pages()}, {"source", p.Src, r.Src().Pages()}} {
			if end.id < 0 || int(end.id) >= end.pages {
				return fault.New(fault.Invalid, l.dir.job(index), "%s page %d of %s is not in 0 … %d",
					end.what, end.id, cacheObject(l.plans[i].name), end.pages-1)
			}
		}
	}
	return nil // not reached: the range that failed is that of one of the caches
}

// push submits a job that take gave.
func (l *queueLane) push(j *queueJob) error {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	if err := l.q.refused(); err != nil { // since take
		l.giveBack(j)
		return err
	}
	l.pushed++
	j.seq = l.pushed
	l.queued.push(j)
	l.work.Signal()
	return nil
}

// oldest returns the seq of the first job that has not ended. The caller holds mu.
func (l *queueLane) oldest() uint64 {
	switch {
	case l.flying.head != nil:
		return l.flying.head.seq
	case l.current != nil:
		return l.current.seq
	case l.queued.head != nil:
		return l.queued.head.seq
	}
	return l.pushed + 1
}

// serve enqueues the jobs of a lane until the queue is closed and none is left.
func (l *queueLane) serve() {
	for {
		j, cause := l.next()
		if j == nil {
			break
		}
		if cause != nil {
			j.err = &fault.Error{Kind: kindOf(cause), Object: l.dir.job(j.index), Detail: "not started", Err: cause}
		} else {
			l.enqueue(j)
		}
		l.publish(j)
	}
	l.q.mu.Lock()
	l.exited = true
	l.q.mu.Unlock()
	l.q.poke()
}

// next waits for a job. It returns the failure that the job must not start after, or no
// job at the end.
func (l *queueLane) next() (j *queueJob, cause error) {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	for l.queued.head == nil {
		if l.q.closed {
			return nil, nil
		}
		l.work.Wait()
	}
	l.current = l.queued.pop()
	return l.current, l.q.cause
}

// publish lets j, of which all that ever will be is enqueued, be seen to end.
func (l *queueLane) publish(j *queueJob) {
	l.q.mu.Lock()
	l.current = nil
	l.flying.push(j)
	over := j.over()
	l.q.mu.Unlock()
	if over { // perhaps before it was published, so that the ticket told nobody
		l.q.poke()
	}
}

// enqueue gives j to the stream: the wait, the copies, a ticket. When it returns without
// having set j.ticket, nothing of j is queued.
func (l *queueLane) enqueue(j *queueJob) {
	queued, err := l.copies(j)
	if err != nil {
		j.err = fault.Wrap(kindOf(err), l.dir.job(j.index), err)
		if !l.jobsOwn(err) {
			l.fails(j.err)
		}
		if !queued {
			return
		}
	}
	ticket := l.newTicket()
	if err := l.stream.Signal(ticket); err != nil {
		if j.err == nil {
			j.err = fault.Wrap(kindOf(err), l.dir.job(j.index), err)
		}
		l.fails(j.err)
		// No ticket will tell when the device is through with the pages; the stream does.
		// Its error is that of the job, or comes from it.
		_ = l.stream.Sync(context.Background())
		return
	}
	j.ticket = ticket
}

func (l *queueLane) fails(cause error) {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	l.q.fail(cause)
}

// jobsOwn reports whether err is a fault of the job alone, and the stream is well.
func (l *queueLane) jobsOwn(err error) bool {
	switch kindOf(err) {
	case fault.Invalid, fault.Unsupported, fault.Full, fault.Memory:
		return true
	case fault.Closed:
		return l.q.gaveUp.Load() // between two batches
	default:
		return false
	}
}

// copies enqueues the wait and the copies of j, and reports whether any of it may be
// queued.
func (l *queueLane) copies(j *queueJob) (queued bool, err error) {
	if l.runs, err = page.AppendRuns(l.runs[:0], j.pairs); err != nil {
		return false, err
	}
	for i := range l.plans {
		if l.plans[i].route.Same() {
			if err := page.CheckDisjoint(j.pairs); err != nil {
				return false, fault.Wrap(fault.Invalid, cacheObject(l.plans[i].name), err)
			}
		}
	}
	if j.wait != nil {
		if err := l.stream.Wait(j.wait); err != nil {
			return false, err
		}
		queued = true
	}
	if len(j.pairs) == 0 {
		return queued, nil
	}
	order := device.StreamOrder
	if j.sealed {
		order = device.AnyOrder
	}
	for i := range l.plans {
		p := &l.plans[i]
		if len(p.rows) == 0 {
			continue
		}
		queued = true
		switch {
		case l.q.copier == nil:
			err = l.rows(p, order)
		case j.sealed && l.q.sealed != nil:
			_, err = l.q.sealed.CopySealed(l.stream, p.route, j.pairs)
		default:
			_, err = l.q.copier.Copy(l.stream, p.route, j.pairs)
		}
		if err != nil {
			return true, fault.Wrap(kindOf(err), cacheObject(p.name), err)
		}
	}
	return queued, nil
}

// rows enqueues l.runs in one cache, row after row of a page. Where pages follow each
// other on both sides a run is one copy.
func (l *queueLane) rows(p *queuePlan, order device.SourceOrder) error {
	l.ops = l.ops[:0]
	for i := range p.rows {
		r := &p.rows[i]
		dense := r.dstStride == r.bytes && r.srcStride == r.bytes
		for _, run := range l.runs {
			op := device.Op{
				Dst: r.dst, DstOff: r.dstOff + int64(run.Dst)*r.dstStride,
				Src: r.src, SrcOff: r.srcOff + int64(run.Src)*r.srcStride, Bytes: r.bytes,
			}
			n := run.N
			if dense {
				op.Bytes *= int64(n)
				n = 1
			}
			for range n {
				l.ops = append(l.ops, op)
				op.DstOff += r.dstStride
				op.SrcOff += r.srcStride
				if len(l.ops) == l.q.batchOps {
					if err := l.flush(order); err != nil {
						return err
					}
				}
			}
		}
	}
	return l.flush(order)
}

// flush enqueues l.ops as one batch.
func (l *queueLane) flush(order device.SourceOrder) error {
	if len(l.ops) == 0 {
		return nil
	}
	if l.q.gaveUp.Load() {
		return fault.New(fault.Closed, "copy queue", "shut down before all of the job was enqueued")
	}
	var err error
	switch acc := l.q.acc; {
	case acc == nil:
		err = l.stream.Copy(l.ops)
	case l.q.linear:
		l.boxes = l.boxes[:0]
		for _, op := range l.ops {
			l.boxes = append(l.boxes, device.Box{
				Dst: op.Dst, DstOff: op.DstOff, Src: op.Src, SrcOff: op.SrcOff, Width: op.Bytes, Rows: 1, Slices: 1,
			})
		}
		err = acc.CopyBoxes(l.stream, l.q.engine, l.boxes)
	default:
		err = acc.CopyBatch(l.stream, l.q.engine, l.ops, order, l.q.batchOps)
		if order == device.AnyOrder && errors.Is(err, fault.Invalid) {
			// Refused whole: a source is not pinned, so it is read in the order of the stream.
			err = acc.CopyBatch(l.stream, l.q.engine, l.ops, device.StreamOrder, l.q.batchOps)
		}
	}
	l.ops = l.ops[:0]
	return err
}

func (l *queueLane) newTicket() *device.Ticket {
	if len(l.tickets) == 0 {
		l.tickets = make([]device.Ticket, ticketSlab)
	}
	t := &l.tickets[0]
	l.tickets = l.tickets[1:]
	t.Notify(l.q.wake)
	return t
}

// poke has the queue look for jobs that have ended.
func (q *Queue) poke() {
	select {
	case q.wake <- struct{}{}:
	default: // it is about to
	}
}

// serve reports jobs until all have ended and no more can come.
func (q *Queue) serve() {
	for over := false; !over; {
		<-q.wake
		over = q.reap()
	}
	if err := q.closeStreams(); err != nil {
		q.mu.Lock()
		q.fail(err)
		q.mu.Unlock()
	}
	close(q.done)
}

// reap reports the jobs that have ended, as far as their predecessors have, and whether
// the queue has come to its end.
func (q *Queue) reap() (over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	over = true
	for i := range q.lanes {
		l := &q.lanes[i]
		for l.flying.head != nil && l.flying.head.over() {
			j := l.flying.pop()
			if j.ticket != nil {
				if _, err := j.ticket.Poll(); err != nil {
					err = fault.Wrap(kindOf(err), l.dir.job(j.index), err)
					q.fail(err)
					if j.err == nil {
						j.err = err
					}
				}
			}
			l.report(j)
		}
		over = over && l.exited && l.flying.head == nil
	}
	return over
}

// over reports whether the device is through with j, which is published.
func (j *queueJob) over() bool {
	if j.ticket == nil {
		return true
	}
	done, _ := j.ticket.Poll()
	return done
}

// report ends j. The caller holds mu.
func (l *queueLane) report(j *queueJob) {
	if j.done != nil {
		j.done.Complete(j.err)
	} else {
		l.ended = append(l.ended, Completion{Index: j.index, Err: j.err})
		select {
		case l.ready <- struct{}{}:
		default: // nobody has looked since
		}
	}
	l.giveBack(j)
	l.q.progress.Broadcast()
}

// giveUp fails the jobs that have not started, and names those that the device may still
// have (fault.Busy); nil when there is none.
func (q *Queue) giveUp() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	var names []string
	n := 0
	for i := range q.lanes {
		l := &q.lanes[i]
		for l.queued.head != nil {
			j := l.queued.pop()
			j.err = fault.New(fault.Closed, l.dir.job(j.index), "not started, the queue was shut down")
			l.report(j)
		}
		unfinished := func(j *queueJob) {
			if n++; n <= mostNamed {
				names = append(names, l.dir.job(j.index))
			}
		}
		for j := l.flying.head; j != nil; j = j.next {
			if !j.over() {
				unfinished(j)
			}
		}
		if l.current != nil {
			unfinished(l.current)
		}
	}
	if n == 0 {
		return nil
	}
	if n > mostNamed {
		names = append(names, fmt.Sprintf("%d more", n-mostNamed))
	}
	return fault.New(fault.Busy, "copy queue", "the device still has %s; all pages of the caches %s stay reserved",
		strings.Join(names, ", "), strings.Join(q.names, ", ")).
		Hint("free neither caches nor streams, and call Shutdown again once the device goes on")
}
