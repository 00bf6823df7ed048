package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

const (
	hostName        = "host" // of the device whose memory the processor addresses
	defaultWorkers  = 3
	maxWorkers      = 256
	defaultDeadline = 30 * time.Second
)

// Options are the choices of a reader.
type Options struct {
	// Cache has the pages that are read into. Required.
	Cache *kv.Cache
	// Device has the streams on which pages are copied into Cache. Required.
	Device device.Device
	// Compute is the stream on which the engine uses its pages. When set, a read waits
	// for what was enqueued on it before StartRetrieve, so that no page is overwritten
	// that is still being read. Nil: the engine waits itself.
	Compute device.Stream
	// Copier moves pages where the engine reads by copies of the device. Nil means the
	// portable one.
	Copier copier.Copier
	// Host has memory for pages on their way into Device, where an engine can't write
	// there itself. Nil where Device is the host, or all engines can.
	Host *device.Host
	// Engines read other owners' memory. They are the caller's to close, after the reader.
	Engines []Engine
	// Publisher publishes the pages of the same cache, for Descriptor, and so that the
	// cache's own descriptors are known when they come back. It is the caller's to close.
	Publisher *Publisher
	// AcceptUnleased has the reader read pages that nobody promises to keep. A page
	// that is reused without a word from its engine is then read as if it were right.
	AcceptUnleased bool
	// MaxWorkers is how many reads copy at the same time, besides those that were given up
	// and whose copy goes on: at most 256; 0 means 3.
	MaxWorkers int
	// Deadline is how long a read may take, waiting included; 0 means 30 s.
	Deadline time.Duration
}

// Reader reads pages of other owners into one cache. All methods may be called from any
// goroutine.
//
// # A read
//
//  1. StartRetrieve checks all that it was given, and plans the copy. What it refuses
//     has touched no byte.
//  2. A goroutine waits for its turn, for what Compute does with the pages, and opens
//     the owner, unless that is open already: by the owner's first choice of the engines
//     that both sides have or, where that fails, by the next.
//  3. It reads the epoch word, has the engine copy, and reads the word again. If either
//     differs from the descriptor's count, or the deadline has passed, or a checksum
//     differs, the read has failed, whatever arrived.
//  4. The ticket is done, with the outcome, when the copy is over. Until then the local
//     pages stay reserved: they are in quarantine, and no deadline shortens that.
//
// A failure is the read's own: it is latched in its ticket, and the same read can be
// tried again by another call. An owner whose engine failed is opened anew then.
type Reader struct {
	o      Options
	target Target
	slots  chan struct{}   // one entry for each read that copies
	ctx    context.Context //nolint:containedctx // ends when the reader is closed
	cancel context.CancelFunc
	reads  sync.WaitGroup
	jobs   sync.Pool // of *job
	whole  error     // why parts of pages can't be read; nil when they can

	mu      sync.Mutex
	closed  bool             // guarded by mu
	streams []device.Stream  // guarded by mu; idle, at most MaxWorkers
	peers   map[peerID]*peer // guarded by mu; see peers.go
	turn    uint64           // guarded by mu; counts uses of peers
	stats   Stats            // guarded by mu
}

// job is one read.
type job struct {
	tokens [2]int
	plan   Plan
	d      *Descriptor
	ways   []way        // to the owner, in its order
	engine string       // of the way that was taken
	fence  device.Event // of Compute; nil without

	checked int // whole pages whose checksums were compared
}

// Stats count the reads that are over, but for those that were refused.
type Stats struct {
	Reads, Failures uint64
	// Of those that succeeded: Pages and parts of them, of which Checked were compared
	// with their owner's checksums. The others are what the package comment says.
	Pages, Checked uint64
}

// NewReader returns a reader with no read in flight. Kind: fault.Invalid.
func NewReader(o Options) (*Reader, error) {
	switch {
	case o.Cache == nil:
		return nil, fault.New(fault.Invalid, "Cache", "is missing").Hint("give the cache that is read into")
	case o.Device == nil:
		return nil, fault.New(fault.Invalid, "Device", "is missing").Hint("give the device that has the memory of Cache")
	case o.MaxWorkers < 0 || o.MaxWorkers > maxWorkers:
		return nil, fault.New(fault.Invalid, "MaxWorkers", "%d is not in 0 … %d", o.MaxWorkers, maxWorkers)
	case o.Deadline < 0:
		return nil, fault.New(fault.Invalid, "Deadline", "%v is negative", o.Deadline)
	case o.Publisher != nil && o.Publisher.o.Cache != o.Cache:
		return nil, fault.New(fault.Invalid, "Publisher", "publishes another cache")
	}
	if o.MaxWorkers == 0 {
		o.MaxWorkers = defaultWorkers
	}
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	if o.Copier == nil {
		o.Copier = copier.NewPortable()
	}
	r := &Reader{
		o: o, target: Target{Cache: o.Cache, Device: o.Device, Copier: o.Copier, Host: o.Host},
		slots: make(chan struct{}, o.MaxWorkers), jobs: sync.Pool{New: func() any { return new(job) }},
		peers: map[peerID]*peer{},
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	for _, l := range o.Cache.Geometry().Spec().Layers {
		for _, p := range l.Planes {
			if p.TokenStride == 0 && r.whole == nil {
				r.whole = fault.New(fault.Unsupported, "tokens", "part of a page: layer %d has a plane (%v) that moves as whole pages only", l.ID, p.Kind).
					Hint("read whole pages")
			}
		}
	}
	return r, nil
}

// Descriptor says how others reach this cache, with no pages published:
// [Publisher.Descriptor]. Kind: fault.Unsupported, also without a publisher.
func (r *Reader) Descriptor() (*Descriptor, error) {
	if r.o.Publisher == nil {
		return nil, fault.New(fault.Unsupported, "reader", "no publisher: others can't read this cache")
	}
	return r.o.Publisher.Descriptor()
}

// StartRetrieve starts to read tokens [start, end) of a sequence, and doesn't wait.
// local and remote are the pages of the whole sequence on either side, in its order;
// those of the range are published by d. The lists may be reused when it returns; d must
// not be changed before the ticket is done.
//
// The ticket is done when nothing writes the local pages any more, and says how the
// read ended; they hold undefined bytes in the range if it failed. Until then they stay
// reserved. ctx ends a read early, as the deadline does. A range whose end is not behind
// its start is empty, and done at once.
//
// Kinds of outcomes: fault.Invalid (range, pages, a descriptor of another geometry or of
// this very cache), fault.Unsupported (no engine on both sides; no lease), fault.NotFound
// (what was published is no longer there), fault.Busy (the deadline, or ctx, ended first),
// fault.Corrupt (a page arrived with another checksum), fault.Closed, and the engine's.
func (r *Reader) StartRetrieve(ctx context.Context, start, end int, local, remote []page.ID, d *Descriptor) *device.Ticket {
	if start >= 0 && end <= start {
		return device.Completed(nil)
	}
	j := r.jobs.Get().(*job) //nolint:errcheck // made by NewReader and put back by done
	err := r.prepare(j, start, end, local, remote, d)
	if err == nil {
		err = r.enter()
	}
	if err != nil {
		r.done(j)
		return device.Completed(err)
	}
	t := device.NewTicket()
	go func() {
		defer r.reads.Done()
		err := r.read(ctx, j)
		r.count(j, err)
		r.done(j)
		t.Complete(err)
	}()
	return t
}

func (r *Reader) done(j *job) {
	clear(j.ways) // its engines and offers are others'
	j.d, j.ways, j.engine, j.fence, j.checked = nil, j.ways[:0], "", nil, 0
	r.jobs.Put(j)
}

func (r *Reader) count(j *job, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stats.Reads++
	if err != nil {
		r.stats.Failures++
		return
	}
	r.stats.Pages += uint64(len(j.plan.Pairs) + len(j.plan.Parts))
	r.stats.Checked += uint64(j.checked)
}

// Stats returns what the reader has done so far.
func (r *Reader) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stats
}

// prepare checks a read and fills in its job.
func (r *Reader) prepare(j *job, start, end int, local, remote []page.ID, d *Descriptor) error {
	g := r.o.Cache.Geometry()
	if err := j.plan.Set(start, end, local, remote, g.PageSize()); err != nil {
		return err
	}
	switch {
	case d == nil || d.Geometry == nil:
		return fault.New(fault.Invalid, "descriptor", "there is none")
	case !d.whole():
		return fault.New(fault.Invalid, "descriptor", "its pages or sums are others than when it was made: %d and %d", len(d.Pages), len(d.Sums)).
			Hint("read some of its pages by naming these: StartRetrieve's remote")
	case r.o.Publisher != nil && d.Owner == r.o.Publisher.o.Owner:
		return fault.New(fault.Invalid, "descriptor", "is this cache's own: its pages are here already")
	case !d.Leases && !r.o.AcceptUnleased:
		return fault.New(fault.Unsupported, "descriptor", "its owner doesn't promise to keep the pages").
			Hint("have the owner's engine implement transfer.Holder, or take the risk: Options.AcceptUnleased")
	case !d.Expires.IsZero() && !time.Now().Before(d.Expires):
		return fault.New(fault.NotFound, "descriptor", "its lease expired at %v", d.Expires).Hint("ask the owner to publish again")
	}
	if err := kv.Exchangeable(g, d.Geometry); err != nil {
		return fault.Wrap(fault.Invalid, "descriptor, whose owner's value comes second", err)
	}
	if r.target.Device.Name() == hostName && !hostCache(r.o.Cache) {
		return fault.New(fault.Closed, "cache", "its memory was freed").Hint("close the reader first, then its cache")
	}
	if err := checkPages(&j.plan, g, d); err != nil {
		return err
	}
	if r.whole != nil && len(j.plan.Parts) > 0 {
		return r.whole
	}
	if j.ways = r.appendWays(j.ways[:0], d); len(j.ways) == 0 {
		return r.errNoEngine(d)
	}
	if r.o.Compute != nil {
		var err error
		if j.fence, err = r.o.Device.NewEvent(); err == nil {
			err = r.o.Compute.Record(j.fence)
		}
		if err != nil {
			return err
		}
	}
	j.tokens, j.d = [2]int{start, end}, d
	return nil
}

// checkPages refuses local pages that are not the cache's, and remote ones that are not
// published.
func checkPages(p *Plan, g *kv.Geometry, d *Descriptor) error {
	first, at := firstPage(g), -1
	one := func(local, remote page.ID) error {
		if local < first || int(local) >= g.Pages() {
			return fault.New(fault.Invalid, "local pages", "page %d is not in %d … %d", local, first, g.Pages()-1)
		}
		var ok bool
		if at, ok = d.published(remote, at); !ok {
			return fault.New(fault.Invalid, "remote pages", "page %d is not among the %d that are published", remote, len(d.Pages)).
				Hint("see whether local and remote pages have changed places, or have the owner publish it")
		}
		return nil
	}
	for _, x := range p.Pairs {
		if err := one(x.Dst, x.Src); err != nil {
			return err
		}
	}
	for _, x := range p.Parts {
		if err := one(x.Local, x.Remote); err != nil {
			return err
		}
	}
	return nil
}

// read runs a job. When it returns, nothing writes the local pages.
func (r *Reader) read(ctx context.Context, j *job) error {
	ctx, cancel := context.WithTimeout(ctx, r.o.Deadline)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()

	err := r.transfer(ctx, j)
	if late := ctx.Err(); late != nil {
		// Also when all is there: whoever asked was told otherwise, or will be.
		if r.ctx.Err() != nil {
			err = fault.New(fault.Closed, "reader", "closed")
		} else if err == nil || fault.KindOf(err) == 0 {
			err = late
		}
	}
	if err == nil {
		return nil
	}
	what := fmt.Sprintf("read of tokens [%d, %d) from %v", j.tokens[0], j.tokens[1], j.d.Owner)
	if j.engine != "" {
		what += " by " + j.engine
	}
	failed := fault.Wrap(kindOr(err, fault.Busy), what, err)
	if errors.Is(err, context.DeadlineExceeded) && fault.RemedyOf(err) == "" {
		return failed.Hint("see whether the owner runs, or allow more time: Options.Deadline is %v", r.o.Deadline)
	}
	return failed
}

// transfer takes a turn, and does what the comment of [Reader] says.
func (r *Reader) transfer(ctx context.Context, j *job) (err error) {
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	// A copy that is not over at the deadline goes on in quarantine, and others take its
	// turn: one stopped peer doesn't stop them all.
	leave := sync.OnceFunc(func() { <-r.slots })
	defer leave()
	defer context.AfterFunc(ctx, leave)()

	if j.fence != nil {
		if err := j.fence.Sync(ctx); err != nil {
			return err
		}
	}
	p, err := r.open(ctx, j)
	if err != nil {
		return err
	}
	failed := true
	defer func() { // a read that nobody wants any more says nothing of its owner, unless that failed too
		r.put(p, failed && (!errors.Is(ctx.Err(), context.Canceled) || errors.Is(err, fault.Device)))
	}()
	if err := p.source.Join(j.d.Epoch); err != nil {
		return err
	}
	if err := checkEpoch(ctx, p.source, j.d); err != nil {
		failed = !errors.Is(err, errEnded)
		return err
	}
	s, err := r.stream()
	if err != nil {
		failed = false
		return err
	}
	err = p.source.Copy(ctx, s, &j.plan)
	r.keep(s, err == nil && ctx.Err() == nil)
	if err == nil {
		err = ctx.Err()
	}
	if errors.Is(err, fault.Corrupt) { // what is written while it is sent has no right sum
		if moved := checkEpoch(ctx, p.source, j.d); errors.Is(moved, fault.NotFound) {
			err = moved
		}
	}
	if err != nil {
		return err
	}
	if err := checkEpoch(ctx, p.source, j.d); err != nil {
		failed = !errors.Is(err, errEnded)
		return err
	}
	failed = false
	j.checked, err = checkSums(ctx, r.o.Cache, &j.plan, j.d)
	return err
}

// errEnded says that an owner who is there has ended a publication.
var errEnded = errors.New("has ended")

// checkEpoch refuses what is no longer what d named. Kinds: fault.NotFound, and is
// errEnded, when the word has moved; those of the source.
func checkEpoch(ctx context.Context, s Source, d *Descriptor) error {
	count, err := s.Epoch(ctx, d.Epoch.Word)
	if err != nil {
		return err
	}
	if count != d.Epoch.Count {
		return fault.Wrap(fault.NotFound, fmt.Sprintf("publication %d.%d, whose epoch word is at %d", d.Epoch.Word, d.Epoch.Count, count), errEnded).
			Hint("ask the owner to publish again")
	}
	return nil
}

// stream returns an idle stream.
func (r *Reader) stream() (device.Stream, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.streams); n > 0 {
		s := r.streams[n-1]
		r.streams = r.streams[:n-1]
		return s, nil
	}
	return r.o.Device.NewStream("reads")
}

// keep takes a stream back, and closes one that failed, or that is one too many.
func (r *Reader) keep(s device.Stream, good bool) {
	r.mu.Lock()
	good = good && len(r.streams) < r.o.MaxWorkers
	if good {
		r.streams = append(r.streams, s)
	}
	r.mu.Unlock()
	if !good {
		_ = s.Close() // its failure was the read's
	}
}

// UnfinishedError is the error of a read that was given up while its copy went on: its
// pages are in quarantine until Ticket is done.
type UnfinishedError struct {
	Ticket *device.Ticket
	Err    error // why it was given up
}

func (e *UnfinishedError) Error() string {
	return "read given up while its copy goes on: " + e.Err.Error()
}

// Unwrap makes errors.Is match fault.Busy and the reason.
func (e *UnfinishedError) Unwrap() []error { return []error{fault.Busy, e.Err} }

// Retrieve is StartRetrieve, and waits: until the deadline or the end of ctx, not
// longer. A read that is not over then is an *[UnfinishedError].
func (r *Reader) Retrieve(ctx context.Context, start, end int, local, remote []page.ID, d *Descriptor) error {
	if err := ctx.Err(); err != nil {
		return fault.Wrap(fault.Busy, "read, before it began", err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.Deadline)
	defer cancel()
	t := r.StartRetrieve(ctx, start, end, local, remote, d)
	err := t.Wait(ctx)
	if over, outcome := t.Poll(); over {
		return outcome
	}
	return &UnfinishedError{Ticket: t, Err: err}
}

// Ack tells the owner of d that this reader has what it wants of what d published: where
// no other reader is awaited, the owner releases the pages. It opens the owner unless that
// is open, doesn't wait for an answer, and says it once, however often it is called.
// Without it the pages are released when this reader closes or the lease expires. Kinds:
// fault.Invalid (no descriptor, or one that publishes nothing), fault.Unsupported (no
// engine on both sides, or one with no channel to the owner: give the descriptor's owner
// and epoch to [Publisher.Ack] there), fault.Closed, and the engine's.
func (r *Reader) Ack(ctx context.Context, d *Descriptor) error {
	if d == nil || d.Geometry == nil {
		return fault.New(fault.Invalid, "descriptor", "there is none")
	}
	if d.Expires.IsZero() && len(d.Pages) == 0 {
		return fault.New(fault.Invalid, "descriptor", "publishes nothing that could be acknowledged")
	}
	j := &job{d: d, ways: r.appendWays(nil, d)}
	if len(j.ways) == 0 {
		return r.errNoEngine(d)
	}
	if err := r.enter(); err != nil {
		return err
	}
	defer r.reads.Done()
	ctx, cancel := context.WithTimeout(ctx, r.o.Deadline)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	p, err := r.open(ctx, j)
	if err != nil {
		return err
	}
	p.acks.Lock()
	if count, ok := p.acked[d.Epoch.Word]; !ok || count < d.Epoch.Count {
		err = errors.Join(p.source.Join(d.Epoch), p.source.Leave(d.Epoch))
		if err == nil && d.Epoch.Word < maxPublications { // so there are only so many
			if p.acked == nil {
				p.acked = map[uint32]uint64{}
			}
			p.acked[d.Epoch.Word] = d.Epoch.Count
		}
	}
	p.acks.Unlock()
	r.put(p, err != nil && !errors.Is(err, fault.Unsupported))
	return err
}

// enter begins what Close waits for: reads.Done ends it. Kind: fault.Closed.
func (r *Reader) enter() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fault.New(fault.Closed, "reader", "closed before")
	}
	r.reads.Add(1)
	return nil
}

// Close ends all reads, waits until no copy writes the cache any more, and closes what
// the reader has opened. Closing again does nothing.
func (r *Reader) Close() error {
	r.mu.Lock()
	closed := r.closed
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.reads.Wait()
	if closed {
		return nil
	}
	for _, s := range r.streams {
		_ = s.Close() // idle, and good when it was kept
	}
	r.streams = nil
	return r.closePeers()
}
