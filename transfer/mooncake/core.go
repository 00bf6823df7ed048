package mooncake

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
)

const (
	sliceBytes   = 1 << 20 // of one request at most: the library cuts none
	batchMost    = 128     // requests of one batch: polling a batch costs their square
	batchInside  = 16      // the same where what an owner stops can't be killed, see doc.go
	batchesRead  = 2       // of one read in flight, so that the link never waits
	batchesOwner = 6       // of all reads from one owner: 768 requests, and over 1024 fail
	lanes        = 8       // connections to one owner, each with one request at a time
	wordsMost    = 64      // of one call
	wordMost     = 64      // bytes of a word

	smallBytes = 64 << 10 // a request that may be tried again when it fails
	tries      = 3
	retryPause = 2 * time.Millisecond // before the second try; four times that before the third

	// A batch is looked at less and less often, but for small ones, which are over sooner:
	// each look takes time from the library's thread.
	pollFirst = 20 * time.Microsecond
	pollLeast = 100 * time.Microsecond
	pollMost  = time.Millisecond
	pollBytes = 16 // a nanosecond; more than any link has
)

// request is one read: bytes at remote, an address of the owner's worker, to local, an
// offset in a region of ours.
type request struct {
	region, bytes uint32
	local, remote uint64
}

// word is a stretch of an owner's memory that is read for its value.
type word struct {
	remote uint64
	bytes  uint32
}

// config is what a core is made of. What the library takes from the environment is set
// before: see environ.go.
type config struct {
	libraries []string
	metadata  string
	name      string // as peers know it, or what a free port is added to
	protocol  string
	maxStuck  int
	listen    netip.Addr // a child's ports are kept to it; zero: to nobody
	batch     int        // requests of one; up to the worker
}

// core is an engine of the library's, and all that is known of it. It lives where the
// library does: in this process, or in a child. All methods may be called from any
// goroutine, close after all others.
type core struct {
	config
	lib    *library
	engine uintptr
	blocks *dl.Pool // of one batch: its requests, and a status behind them

	mu       sync.Mutex
	regions  map[uint32]*region // guarded by mu
	segments []*segment         // guarded by mu; by number
	vacated  []*region          // guarded by mu
	ones     ones               // guarded by mu
}

// segment is an owner that was opened.
type segment struct {
	id    int32
	name  string
	slots chan struct{} // one entry for each batch in flight

	mu    sync.Mutex
	stuck int // guarded by mu; reads that were given up and are not over
}

// newCore opens the library and makes an engine. Kinds: those of openLibrary, and
// fault.Device.
func newCore(c config) (*core, error) {
	lib, err := openLibrary(c.libraries)
	if err != nil {
		return nil, err
	}
	x := &core{config: c, lib: lib, blocks: dl.NewPool(batchMost*requestWords + statusWords), regions: map[uint32]*region{}}
	if x.engine, err = lib.newEngine(c.metadata, c.name, c.protocol); err != nil {
		return nil, err
	}
	if c.metadata == peerToPeer {
		port, err := lib.name(x.engine)
		if err == nil {
			x.name, err = withPort(c.name, port)
		}
		if err != nil {
			lib.destroy.Call(x.engine)
			return nil, err
		}
	}
	return x, nil
}

// add makes r known by a number of the caller's choice, and to peers if remote says so.
// Kinds: fault.Exists, and those of the library.
func (c *core) add(number uint32, r *region, remote bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.regions[number] != nil {
		return fault.New(fault.Exists, fmt.Sprintf("region %d", number), "is there already")
	}
	// What only this side writes need not be registered, but with RDMA: and what is not
	// registered is out of everybody's reach.
	if remote || c.protocol != protocolTCP {
		if err := c.lib.remember(c.engine, r.base, r.bytes, remote); err != nil {
			return err
		}
		r.registered = true
	}
	c.regions[number] = r
	return nil
}

// remove ends a region. No read into it is running; reads of peers may be: they find zeros.
// Kind: fault.NotFound.
func (c *core) remove(number uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.regions[number]
	if r == nil {
		return fault.New(fault.NotFound, fmt.Sprintf("region %d", number), "there is none")
	}
	delete(c.regions, number)
	if !r.registered {
		r.unmap()
		return nil
	}
	err := errors.Join(c.lib.forget(c.engine, r.base), r.vacate(&c.ones))
	c.vacated = append(c.vacated, r)
	return err
}

// open opens an owner by its name. Kinds: fault.NotFound, fault.Busy (too many reads from
// it don't end).
func (c *core) open(name string) (uint32, error) {
	id, err := c.lib.open(c.engine, name)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// The library has one number for one name, but for what has ended.
	for i, s := range c.segments {
		if s.id == id && s.name == name {
			return uint32(i), s.refuse(c.maxStuck)
		}
	}
	c.segments = append(c.segments, &segment{id: id, name: name, slots: make(chan struct{}, batchesOwner)})
	return uint32(len(c.segments) - 1), nil
}

// refuse refuses an owner from which too many reads don't end.
func (s *segment) refuse(most int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stuck >= most {
		return fault.New(fault.Busy, "owner at "+s.name, "%d reads from it were given up and have not ended", s.stuck)
	}
	return nil
}

func (c *core) segment(number uint32) (*segment, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if uint64(number) >= uint64(len(c.segments)) {
		return nil, fault.New(fault.NotFound, fmt.Sprintf("owner %d", number), "was not opened")
	}
	return c.segments[number], nil
}

// address returns where a request writes. The caller holds mu. Kind: fault.Invalid.
func (c *core) address(q *request) (uintptr, error) {
	r := c.regions[q.region]
	if r == nil || q.bytes == 0 || q.bytes > sliceBytes || q.local > uint64(r.bytes) || uint64(q.bytes) > uint64(r.bytes)-q.local {
		return 0, fault.New(fault.Invalid, "read", "%d bytes to byte %d of region %d, which isn't there", q.bytes, q.local, q.region)
	}
	return r.base + uintptr(q.local), nil
}

// read runs requests, and returns when nothing of them is in flight, however long that
// takes. When stop is closed it submits no more: what is in flight ends by itself, at the
// latest when the library's own limits say so. Requests are put into another order.
//
// Kinds: fault.Busy (stop; too many reads that don't end), fault.Invalid, fault.Device
// (the owner, or the way to it, failed).
func (c *core) read(stop <-chan struct{}, number uint32, requests []request) error {
	s, err := c.segment(number)
	if err != nil {
		return err
	}
	if err := s.refuse(c.maxStuck); err != nil {
		return err
	}
	defer s.watch(stop)()
	return c.run(stop, s, requests, nil)
}

// watch counts a read as stuck from stop on, until it calls over.
func (s *segment) watch(stop <-chan struct{}) (over func()) {
	ended, counted := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(counted)
		select {
		case <-ended:
			return
		case <-stop:
		}
		s.count(1)
		<-ended
		s.count(-1)
	}()
	return func() {
		close(ended)
		<-counted // or the next read would be refused for this one
	}
}

func (s *segment) count(n int) {
	s.mu.Lock()
	s.stuck += n
	s.mu.Unlock()
}

// words reads words into answer, all after what was read before. answer is complete when
// it returns no error. Kinds: those of read.
func (c *core) words(stop <-chan struct{}, number uint32, at []word, answer []byte) error {
	s, err := c.segment(number)
	if err != nil {
		return err
	}
	if err := s.refuse(c.maxStuck); err != nil {
		return err
	}
	// A block for this call alone: what never ends keeps it.
	b, err := dl.NewBlock(len(answer)/8 + 1)
	if err != nil {
		return err
	}
	defer b.Free()
	defer s.watch(stop)()
	requests, sum := make([]request, len(at)), 0
	for i, w := range at {
		requests[i] = request{local: uint64(sum), remote: w.remote, bytes: w.bytes}
		sum += int(w.bytes)
	}
	if sum != len(answer) {
		return fault.New(fault.Invalid, "words", "%d bytes, and room for %d", sum, len(answer))
	}
	if err := c.run(stop, s, requests, b); err != nil {
		return err
	}
	copy(answer, b.Bytes)
	return nil
}

// batch is a batch in flight.
type batch struct {
	id       uintptr
	block    *dl.Block
	requests []request // in the block's order
	left     int       // tasks that were not seen to end: the first ones
	failed   []request // that ended, and badly
	attempt  int
	refused  bool // in part or whole, when it was submitted
	began    time.Time
	longest  time.Duration // pause between two looks at it
}

// run is read, to regions or into a block.
func (c *core) run(stop <-chan struct{}, s *segment, requests []request, into *dl.Block) (err error) {
	var room [batchesRead]batch
	flying, again := room[:0], []batch(nil) // again: to be tried once more
	pause := pollFirst
	for {
		if err == nil && closed(stop) && len(requests)+len(again) > 0 {
			err = fault.New(fault.Busy, "read", "was given up")
		}
		more := err == nil && len(requests)+len(again) > 0
		switch {
		case !more && len(flying) == 0:
			return err
		case more && len(flying) < batchesRead && s.slot(stop, len(flying) > 0):
			var b batch
			if len(again) > 0 {
				b, again = again[0], again[1:]
			} else {
				n := min(len(requests), c.batch)
				b.requests, requests = requests[:n], requests[n:]
			}
			if err = c.start(s, &b, into); err != nil {
				<-s.slots
				continue
			}
			flying = append(flying, b)
		case len(flying) == 0: // stop ended the wait for a slot
		case !c.over(&flying[0]):
			nap(pause)
			pause = min(2*pause, flying[0].longest)
		default:
			b := flying[0]
			flying = append(flying[:0], flying[1:]...)
			pause = pollFirst
			c.blocks.Put(b.block)
			<-s.slots
			if len(b.failed) == 0 || err != nil {
				continue
			}
			if b.mayTryAgain() {
				nap(retryPause << (2 * b.attempt))
				again = append(again, batch{requests: b.failed, attempt: b.attempt + 1})
				continue
			}
			err = fault.New(fault.Device, "owner at "+s.name, "%d of %d requests failed: %d bytes at %#x was one",
				len(b.failed), len(b.requests), b.failed[0].bytes, b.failed[0].remote)
		}
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// slot takes a slot for one more batch. With batches in flight it doesn't wait.
func (s *segment) slot(stop <-chan struct{}, busy bool) bool {
	if busy {
		select {
		case s.slots <- struct{}{}:
			return true
		default:
			return false
		}
	}
	select {
	case s.slots <- struct{}{}:
		return true
	case <-stop:
		return false
	}
}

// start submits a batch. Kinds: fault.Invalid, fault.Device, fault.Memory.
func (c *core) start(s *segment, b *batch, into *dl.Block) (err error) {
	if b.block, err = c.blocks.Get(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.blocks.Put(b.block)
		}
	}()
	w, bytes := b.block.Words, 0
	c.mu.Lock()
	for i := range b.requests {
		q := &b.requests[i]
		var to uintptr
		if into != nil {
			to = into.Addr + uintptr(q.local)
		} else if to, err = c.address(q); err != nil {
			c.mu.Unlock()
			return err
		}
		bytes += int(q.bytes)
		at := w[i*requestWords:][:requestWords]
		at[0], at[1], at[2], at[3], at[4] = opRead, uint64(to), uint64(uint32(s.id)), q.remote, uint64(q.bytes)
	}
	c.mu.Unlock()
	b.longest = min(max(time.Duration(bytes/pollBytes), pollLeast), pollMost)
	n := uintptr(len(b.requests))
	if b.id = c.lib.newBatch.Call(c.engine, n); b.id == invalidBatch {
		return fault.New(fault.Memory, "mooncake", "a batch of %d requests can't be made", n)
	}
	b.left, b.began = len(b.requests), time.Now()
	if rc := int32(c.lib.submit.Call(c.engine, b.id, b.block.Addr, n)); rc != 0 {
		// Which of them were taken is not said. None was, when the batch can be given back.
		if int32(c.lib.freeBatch.Call(c.engine, b.id)) == 0 {
			return fault.New(fault.Device, "owner at "+s.name, "a batch of %d requests was refused: code %d", n, rc)
		}
		b.refused = true
	}
	return nil
}

// over polls the last task that was not seen to end: its answer is the only way to learn
// that, and each costs a look at the whole batch.
func (c *core) over(b *batch) bool {
	const at = batchMost * requestWords
	for b.left > 0 {
		task := b.left - 1
		b.block.Words[at] = 0
		if rc := int32(c.lib.status.Call(c.engine, b.id, uintptr(task), b.block.Addr+at*8)); rc != 0 {
			if !b.refused {
				return false // never of a task that is there
			}
			b.block.Words[at] = statusFailed // of a task that never was
		}
		switch int32(b.block.Words[at]) {
		case statusCompleted:
		case statusFailed, statusInvalid, statusCanceled:
			b.failed = append(b.failed, b.requests[task])
		default: // a task that timed out is not over: its bytes can still come
			return false
		}
		b.left--
	}
	return int32(c.lib.freeBatch.Call(c.engine, b.id)) == 0
}

// mayTryAgain says whether what failed is worth another try: a link that is too busy
// fails some small requests at once, and a peer that is gone all of them. The whole batch
// has ended, and a read changes nothing but our own pages, so it is safe.
func (b *batch) mayTryAgain() bool {
	large := slices.ContainsFunc(b.failed, func(q request) bool { return q.bytes > smallBytes })
	all := b.attempt == 0 && len(b.failed) == len(b.requests)
	return !large && !all && !b.refused && b.attempt+1 < tries && time.Since(b.began) < time.Second
}

// nap stops this thread. The library has no event to wait for, and Go's own timers are
// too coarse for what takes 100 µs.
func nap(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil) // a signal ends it early, which is no harm
}

// close ends the engine. The library waits for its threads.
func (c *core) close() {
	c.lib.destroy.Call(c.engine)
	c.blocks.Close()
	c.lib.scratch.Free()
	c.ones.close()
	for _, r := range c.vacated {
		r.unmap()
	}
	for _, r := range c.regions {
		r.unmap()
	}
}
