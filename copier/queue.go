package copier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Direction is the way that a job of a [Queue] goes.
type Direction uint8

// The directions. Each has its own stream and submitter.
const (
	Store Direction = iota // from the device caches to the host caches
	Load                   // from the host caches to the device caches
)

var directionNames = [...]string{"store", "load"}

func (d Direction) String() string {
	if int(d) >= len(directionNames) {
		return fmt.Sprintf("direction %d", uint8(d))
	}
	return directionNames[d]
}

const (
	queueLimit = 1 << 16         // see QueueOptions.Limit
	queueDrain = 5 * time.Second // see QueueOptions.Drain
)

// QueueOptions say what a queue copies between, and how. The caches, and streams that
// are given, must outlive the queue: see [Queue.Shutdown].
type QueueOptions struct {
	// Device is the device that copies: it makes events and, unless they are given,
	// the streams.
	Device device.Device

	// DeviceCaches and HostCaches have the same names: a page of a job is copied in
	// every cache, onto the cache of the same name. Caches of one name must agree in
	// the bytes of a page and whatever else kv.NewRoute compares; names may differ in
	// it. No two caches may share bytes, but for one: both sides of a name may be the
	// same memory.
	//
	// With an accelerator the host caches must be memory that it has pinned: kv.Wrap
	// over memory of [device.Accelerator.AllocHost], which its owner frees after the
	// cache was closed. A job onto other host memory fails.
	DeviceCaches, HostCaches map[string]*kv.Cache

	// LoadStream and StoreStream are streams of Device that stay the caller's. Nil: the
	// queue makes its own, of low priority where there are priorities.
	LoadStream, StoreStream device.Stream

	// Copier, if there is one, copies the pages. Nil: by batches of linear copies, where
	// the device has them, else by [device.Stream.Copy].
	Copier Copier

	// Engine is the engine whose batches are used. Nil: the first of the device that has
	// batches, unless [Select] has found that they must not be used.
	Engine device.Engine

	// Linear makes no batches, and one call of the driver a copy: for a driver whose
	// batches can't be trusted.
	Linear bool

	// BatchOps is the most copies of one call of the driver: by default DefaultBatchOps.
	BatchOps int

	// Limit is the most jobs of one direction that are unfinished, or finished and not
	// yet read by [Queue.Completed]. By default 65536.
	Limit int

	// Drain bounds [Queue.Shutdown]. By default 5 s.
	Drain time.Duration
}

// Job is the copy of pages in all caches of a [Queue]: of page Src[i] onto page Dst[i].
type Job struct {
	// Index is the caller's name of the job.
	Index int64

	// Src and Dst are copied by Submit. No page may be named twice by Dst and, where
	// both sides of a name are the same memory, by both lists.
	Src, Dst []page.ID

	// Wait is waited for by the stream before it copies, in both directions: a store
	// must not read what a kernel still writes, a load must not overwrite what a kernel
	// still reads. It must be recorded before Submit is called. Recording it again
	// before the job's turn only makes the job wait for that. Nil: nothing to wait for.
	Wait device.Event

	// Sealed, of a load, promises that nobody writes the pages of Src until the job is
	// done, and that no work that is still queued does: the device may read them, where
	// they are pinned, before it has come to the job. A store always reads in the order of
	// its stream.
	Sealed bool

	// Done, if there is one, is completed with the outcome of the job, which is then
	// not reported by [Queue.Completed].
	Done *device.Ticket
}

// Completion is how a job has ended. After an error the pages of Dst hold undefined
// bytes.
type Completion struct {
	Index int64
	Err   error
}

// Queue copies pages between device caches and host caches in the background.
//
// [Queue.Submit] only puts a job in a list. A goroutine for each direction, so that a
// large store never delays a load, takes the jobs of its list in turn: it has the stream
// wait for the job's event, enqueues the copies and then a ticket. Only a job whose ticket
// is enqueued can be seen to end. One more goroutine looks for tickets that are done, and
// reports the jobs of each direction in the order in which they were submitted, each
// exactly once.
//
// Pages of a job are sorted and merged into runs; a run that is adjacent in both memories
// is one copy. No batch has more than QueueOptions.BatchOps copies.
//
// A fault of the job itself (a destination named twice, memory that the device can't
// reach, an event of another device), or want of something that may be there later, fails
// that job alone. Any other error is the end of the queue: the first is kept
// ([Queue.Err]), Submit refuses with it, jobs that have not started fail with it, and jobs
// that have may still succeed. A job that failed halfway is over only when its stream has
// drained, since its pages may be in use until then.
//
// The package comment has a table of public faults of backends of this kind, and of the
// tests that hold this one to better. All methods may be called from any goroutine.
type Queue struct {
	device   device.Device
	acc      *device.Accelerator // nil: another device
	engine   device.Engine
	linear   bool
	copier   Copier // nil: see rows
	sealed   sealedCopier
	batchOps int
	limit    int
	drain    time.Duration
	names    []string // of the caches, sorted
	pages    [2]int   // by side: of the cache that has fewest
	lanes    [2]queueLane

	wake   chan struct{} // cap 1: some ticket is done, or a job was given up
	done   chan struct{} // closed when nothing is left to do
	gaveUp atomic.Bool   // a Shutdown ran out of time: no more copies are enqueued

	mu       sync.Mutex
	closed   bool      // guarded by mu
	cause    error     // guarded by mu; the first failure
	progress sync.Cond // a job was reported, or closed was set
}

// sealedCopier is a copier that can read sealed pages in any order: see [Accelerated].
type sealedCopier interface {
	CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error)
}

// OpenQueue starts a queue. [Queue.Shutdown] ends it. Kinds: fault.Invalid (no device;
// caches that do not fit each other, by name; a stream or an engine of another device; an
// option out of range), and those of [device.Device].NewStream.
func OpenQueue(o QueueOptions) (*Queue, error) {
	switch {
	case o.Device == nil:
		return nil, fault.New(fault.Invalid, "copy queue", "no device")
	case o.BatchOps < 0 || o.Limit < 0 || o.Drain < 0:
		return nil, fault.New(fault.Invalid, "copy queue", "%d copies a batch, %d jobs, %v to drain: none may be negative", o.BatchOps, o.Limit, o.Drain)
	}
	q := &Queue{
		device: o.Device, copier: o.Copier, engine: o.Engine, linear: o.Linear,
		batchOps: orDefault(o.BatchOps, DefaultBatchOps), limit: orDefault(o.Limit, queueLimit), drain: orDefault(o.Drain, queueDrain),
		wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	q.progress.L = &q.mu
	if err := q.takeCaches(o.DeviceCaches, o.HostCaches); err != nil {
		return nil, err
	}
	q.sealed, _ = o.Copier.(sealedCopier)
	if acc, ok := o.Device.(*device.Accelerator); ok {
		q.acc = acc
		if q.engine == nil {
			q.engine = batchEngine(acc.Engines())
			q.linear = q.linear || !acc.UsesBatches()
		}
	}
	if q.engine != nil && (q.acc == nil || !slices.Contains(q.acc.Engines(), q.engine)) {
		return nil, fault.New(fault.Invalid, "engine "+q.engine.Name(), "is none of %s", o.Device.Name())
	}
	for dir, given := range [...]device.Stream{Store: o.StoreStream, Load: o.LoadStream} {
		l := &q.lanes[dir]
		l.q, l.dir, l.stream = q, Direction(dir), given
		l.work.L = &q.mu
		l.ready = make(chan struct{}, 1)
		if err := l.takeStream(); err != nil {
			return nil, errors.Join(err, q.closeStreams())
		}
	}
	for i := range q.lanes {
		go q.lanes[i].serve()
	}
	go q.serve()
	return q, nil
}

func orDefault[N int | time.Duration](n, otherwise N) N {
	if n == 0 {
		return otherwise
	}
	return n
}

// batchEngine returns the first engine with batches, or else the first, which is there.
func batchEngine(engines []device.Engine) device.Engine {
	for _, e := range engines {
		if e.Limits().Batch > 0 {
			return e
		}
	}
	return engines[0]
}

// Submit queues a job. It may be called from any goroutine, and never waits for the
// device: it copies the lists of pages and returns. A job that is refused is not reported
// elsewhere.
//
// Kinds: fault.Invalid (lists of different length; ids out of range; a sealed store),
// fault.Full (QueueOptions.Limit), fault.Closed, and after a failure the kind of that.
func (q *Queue) Submit(dir Direction, job Job) error {
	switch {
	case dir > Load:
		return fault.New(fault.Invalid, "job", "%v: want store or load", dir)
	case len(job.Src) != len(job.Dst):
		return fault.New(fault.Invalid, dir.job(job.Index), "%d source pages and %d destinations", len(job.Src), len(job.Dst))
	case dir == Store && job.Sealed:
		return fault.New(fault.Invalid, dir.job(job.Index), "a store reads pages that change: they are not sealed")
	}
	l := &q.lanes[dir]
	j, err := l.take()
	if err != nil {
		return err
	}
	if err := l.fill(j, &job); err != nil {
		q.mu.Lock()
		l.giveBack(j)
		q.mu.Unlock()
		return err
	}
	return l.push(j)
}

// Completed appends to done how jobs of one direction have ended, in the order in which
// they were submitted, each job once: those that have ended and whose predecessors have.
// It never waits. Only after a [Queue.Shutdown] that ran out of time may jobs that never
// started be reported before earlier ones that the device still has.
func (q *Queue) Completed(dir Direction, done []Completion) []Completion {
	if dir > Load {
		return done
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	l := &q.lanes[dir]
	done = append(done, l.ended...)
	clear(l.ended)
	l.ended = l.ended[:0]
	return done
}

// Ready returns a channel that has something whenever [Queue.Completed] may have
// something new.
func (q *Queue) Ready(dir Direction) <-chan struct{} {
	if dir > Load {
		return nil
	}
	return q.lanes[dir].ready
}

// Err returns the failure that has ended the queue, nil while it is well.
func (q *Queue) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.cause
}

// Barrier waits until every job submitted before has ended, whether well or not: also
// those that have not reached the device yet. It returns ctx's error if that ends first.
func (q *Queue) Barrier(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		q.mu.Lock()
		q.progress.Broadcast()
		q.mu.Unlock()
	})()
	q.mu.Lock()
	defer q.mu.Unlock()
	var last [2]uint64
	for i := range q.lanes {
		last[i] = q.lanes[i].pushed
	}
	for i := range q.lanes {
		for q.lanes[i].oldest() <= last[i] {
			if err := ctx.Err(); err != nil {
				return err
			}
			q.progress.Wait()
		}
	}
	return nil
}

// Shutdown ends the queue: Submit refuses from now on (fault.Closed), and jobs are
// finished. When that takes longer than QueueOptions.Drain, or ctx ends, jobs that have
// not started fail (fault.Closed), and if the device still has others, the error says
// which (fault.Busy). Then the caches and the streams stay reserved: these jobs may touch
// them until they end, which is reported as ever. Calling Shutdown again waits for them
// again. Once everything has ended it returns nil, every time.
func (q *Queue) Shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, q.drain)
	defer cancel()
	q.mu.Lock()
	q.closed = true
	for i := range q.lanes {
		q.lanes[i].work.Signal()
	}
	q.mu.Unlock()
	select {
	case <-q.done:
		return nil
	case <-ctx.Done():
	}
	q.gaveUp.Store(true)
	if err := q.giveUp(); err != nil {
		return err
	}
	<-q.done // nothing is left to wait for
	return nil
}
