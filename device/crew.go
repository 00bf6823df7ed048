package device

import "sync"

// crew is the goroutines that copy the jobs of one stream: the stream's own, and
// helpers for large jobs. Of such a job each claims a part, copies it, and comes
// back for more, so that a helper that the OS gives no time to holds nobody up:
// the job is over when nothing is left to claim and nobody is in it.
type crew struct {
	limits  *limits
	helpers int // how many there are, or will be from the first large job on
	own     worker
	claim   func(*worker) bool // c.claimNext, bound once: binding allocates
	exited  sync.WaitGroup     // the helpers

	mu      sync.Mutex
	work    sync.Cond // there is something to claim, or closed was set
	idle    sync.Cond // in has become 0
	ops     []Op      // guarded by mu; what nobody has claimed
	off     int64     // guarded by mu; how much of the first of ops is claimed
	kernel  *kernel   // guarded by mu; of the job
	in      int       // guarded by mu; helpers in the job
	started bool      // guarded by mu
	closed  bool      // guarded by mu
}

func newCrew(l *limits, workers int) *crew {
	c := &crew{limits: l, helpers: workers - 1, own: worker{limits: l}}
	c.claim = c.claimNext
	c.work.L = &c.mu
	c.idle.L = &c.mu
	return c
}

// copy copies ops, at least one and of bytes in all, with k. The bytes are in
// place, for everybody, when it returns.
func (c *crew) copy(ops []Op, bytes int64, k *kernel) {
	if c.helpers == 0 || bytes < c.limits.crewJob {
		c.own.ops, c.own.from, c.own.to = ops, 0, ops[len(ops)-1].Bytes
		c.own.run(k, func(*worker) bool { return false })
		return
	}
	c.mu.Lock()
	c.ops, c.off, c.kernel = ops, 0, k
	if !c.started {
		c.started = true
		for range c.helpers {
			c.exited.Go(c.help)
		}
	}
	c.work.Broadcast()
	c.mu.Unlock()

	c.own.run(k, c.claim)

	c.mu.Lock()
	for c.in > 0 {
		c.idle.Wait()
	}
	c.mu.Unlock()
}

// help is a helper: it joins every job that it finds something left of.
func (c *crew) help() {
	w := &worker{limits: c.limits}
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for len(c.ops) == 0 && !c.closed {
			c.work.Wait()
		}
		if c.closed {
			return
		}
		k := c.kernel
		c.in++
		c.mu.Unlock()
		w.run(k, c.claim)
		c.mu.Lock()
		c.in--
		if c.in == 0 {
			c.idle.Signal()
		}
	}
}

// claimNext gives w, which has used up what it had, its next part of the job: as
// many ops as fit into claimBytes, or so much of one that is longer; of ops with a
// digest all that share it. It reports false when there is nothing left.
func (c *crew) claimNext(w *worker) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ops) == 0 {
		return false
	}
	w.from = c.off
	n, room := 0, c.limits.claimBytes
	if d := c.ops[0].Digest; d != nil { // bytes in order: all of them are one worker's
		for n < len(c.ops) && c.ops[n].Digest == d {
			n++
		}
	}
	for n < len(c.ops) && c.ops[n].Digest == nil && c.ops[n].Bytes-c.off <= room {
		room -= c.ops[n].Bytes - c.off
		c.off = 0
		n++
	}
	if n > 0 {
		w.to = c.ops[n-1].Bytes
		w.ops, c.ops = c.ops[:n], c.ops[n:]
	} else {
		c.off += room
		w.to, w.ops = c.off, c.ops[:1]
	}
	if len(c.ops) == 0 {
		c.ops = nil // hold on to no buffer
	}
	return true
}

// close ends the helpers. No job may be running.
func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.work.Broadcast()
	c.mu.Unlock()
	c.exited.Wait()
}
