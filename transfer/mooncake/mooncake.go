package mooncake

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// Name is what the engine is called in descriptors.
const Name = "mooncake"

// Options are the choices of an engine.
type Options struct {
	// Libraries are the files to open, in this order: what the loader must have before
	// it, then Mooncake's libtransfer_engine.so. A build without etcd needs no other.
	// Required.
	Libraries []string
	// Listen is the address of this host at which others reach what is offered. Nothing
	// is offered without: whoever reaches the ports of an owner reads its cache. In this
	// process its family is that of all peers, and the library listens on every address.
	Listen string
	// Metadata is how owners find each other: "" means that they ask each other, the only
	// other choice is an HTTP server of Mooncake's metadata, as http://host:port/metadata.
	Metadata string
	// Protocol is "tcp", which "" means too, or "rdma".
	Protocol string
	// Executable is the program whose verb [Verb] calls [Serve]: kvferry. "" means this
	// process's own.
	Executable string
	// InProcess has the library in this process, whose environment (MC_…) is then the
	// library's, and which its crashes end.
	InProcess bool
	// Stall is how long an owner may stand still in a read before the library gives it
	// up: whole seconds, 1 s … 1 h; 0 means 5 s.
	Stall time.Duration
	// Patience is how long a read whose context has ended may take to end by itself
	// before its child is killed; 0 means 1 s. In this process nothing can be killed.
	Patience time.Duration
	// MaxStuck is how many reads that were given up may not have ended before others from
	// that owner are refused; 0 means 4.
	MaxStuck int
	// Log gets warnings, and what children write. Nil means nobody.
	Log *slog.Logger
}

const (
	defaultStall    = 5 * time.Second
	defaultPatience = time.Second
	defaultMaxStuck = 4

	librariesMost = 32 << 10 // bytes of all names: they are one frame

	infiniband = "/sys/class/infiniband"
)

// withDefaults checks o and fills it in. Kinds: fault.Invalid, fault.Unsupported.
func withDefaults(o Options) (Options, error) {
	if o.Stall == 0 {
		o.Stall = defaultStall
	}
	if o.Patience == 0 {
		o.Patience = defaultPatience
	}
	if o.MaxStuck == 0 {
		o.MaxStuck = defaultMaxStuck
	}
	if o.Metadata == "" {
		o.Metadata = peerToPeer
	}
	if o.Protocol == "" {
		o.Protocol = protocolTCP
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	switch {
	case len(o.Libraries) == 0 || len(o.Libraries) > maxLibraries || slices.Contains(o.Libraries, ""):
		return o, fault.New(fault.Invalid, "Libraries", "%d files: at least Mooncake's is needed, at most %d, and none is empty", len(o.Libraries), maxLibraries).
			Hint("name libtransfer_engine.so, behind what it is to find loaded")
	case len(slices.MaxFunc(o.Libraries, byLength)) >= maxText || len(strings.Join(o.Libraries, "")) > librariesMost:
		return o, fault.New(fault.Invalid, "Libraries", "%d bytes of names, and at most %d can be handed over", len(strings.Join(o.Libraries, "")), librariesMost)
	case o.Stall < time.Second || o.Stall > time.Hour:
		return o, fault.New(fault.Invalid, "Stall", "%v is not in 1s … 1h", o.Stall)
	case o.Patience < 0:
		return o, fault.New(fault.Invalid, "Patience", "%v is negative", o.Patience)
	case o.MaxStuck < 0:
		return o, fault.New(fault.Invalid, "MaxStuck", "%d is negative", o.MaxStuck)
	}
	if o.Listen != "" {
		if a, err := netip.ParseAddr(o.Listen); err != nil || a.Unmap().IsUnspecified() || a.Unmap().IsMulticast() || a.Zone() != "" {
			return o, fault.New(fault.Invalid, "Listen", "%.80q is not an address of this host", o.Listen).
				Hint("name one address: 127.0.0.1 for this host only")
		}
	}
	if err := checkMetadata(o.Metadata); err != nil {
		return o, err
	}
	switch o.Protocol {
	case protocolTCP:
	case protocolRDMA: // the library dies where there is no card
		if cards, err := os.ReadDir(infiniband); err != nil || len(cards) == 0 {
			return o, fault.New(fault.Unsupported, "Protocol", "rdma: %s has no card", infiniband).Hint("use tcp")
		}
	default:
		return o, fault.New(fault.Invalid, "Protocol", "%.20q is neither tcp nor rdma", o.Protocol)
	}
	return o, nil
}

func byLength(a, b string) int { return cmp.Compare(len(a), len(b)) }

// checkListen refuses an address at which nobody can be reached here: the library takes
// any. Kind: fault.Invalid.
func checkListen(ctx context.Context, addr string) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		return fault.Wrap(fault.Invalid, "Listen", err).Hint("name an address that a network interface of this host has: 127.0.0.1 for this host only")
	}
	return l.Close()
}

// host is the address of an engine. A reader has no use for one that others reach.
func (o *Options) host() string {
	if o.Listen == "" {
		return "127.0.0.1"
	}
	return o.Listen
}

// config is what a worker is made of: one that serves offers, or one that reads.
func (o *Options) config(serves bool) config {
	c := config{libraries: o.Libraries, metadata: o.Metadata, protocol: o.Protocol, maxStuck: o.MaxStuck}
	c.name = net.JoinHostPort(o.host(), "12345") // a free port is taken instead
	if o.Metadata != peerToPeer {
		c.name = "kvferry-" + transfer.NewOwnerID().String()
	}
	if serves {
		c.listen, _ = netip.ParseAddr(o.Listen) // was checked
	}
	return c
}

// Engine reads caches of other owners by Mooncake, and lets others read. All methods may
// be called from any goroutine.
type Engine struct {
	o       Options
	numbers atomic.Uint32 // of regions
	host    *device.Host  // has the headers of offers

	starts starts

	// starting has one entry while a worker is started that all have in common.
	starting chan struct{}
	serving  *child  // of offers; guarded by starting; nil until the first
	inside   *inside // of everything in this process; guarded by starting

	mu      sync.Mutex
	closed  bool             // guarded by mu; set when nothing is being started
	headers []*device.Memory // guarded by mu; of all offers so far
}

var _ transfer.Engine = (*Engine)(nil)

// New returns an engine. The libraries are opened at its first use: [Check] does it now.
// Kinds: fault.Invalid (options), fault.Unsupported (RDMA without a card).
func New(o Options) (*Engine, error) {
	o, err := withDefaults(o)
	if err != nil {
		return nil, err
	}
	host, err := device.OpenHost(device.HostOptions{Workers: 1})
	if err != nil {
		return nil, err
	}
	return &Engine{o: o, host: host, starting: make(chan struct{}, 1)}, nil
}

// Name returns "mooncake".
func (*Engine) Name() string { return Name }

func (e *Engine) number() uint32 { return e.numbers.Add(1) }

// Offer implements [transfer.Engine]. Without Options.Listen nothing is offered. When the
// child ends that serves it, the offer is lost. Kinds:
// fault.Unsupported (memory that no other process can map), and those of a start.
func (e *Engine) Offer(x transfer.Export) (b []byte, withdraw func(), err error) {
	if e.o.Listen == "" {
		return nil, nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	if err := checkListen(ctx, e.o.Listen); err != nil {
		return nil, nil, err
	}
	w, err := e.server(ctx)
	if err != nil {
		return nil, nil, err
	}
	p := &export{engine: e, worker: w}
	defer func() {
		if err != nil {
			p.withdraw()
		}
	}()
	o := &Offer{Owner: x.Owner, Fingerprint: x.Cache.Geometry().Fingerprint()}
	o.Segment, _ = w.named()
	if p.header, err = e.newHeader(x.Owner); err != nil {
		return nil, nil, err
	}
	// The header stays when all else is withdrawn: readers learn from it that it was.
	if o.Header, err = w.add(ctx, e.number(), p.header, true); err != nil {
		return nil, nil, err
	}
	if o.Words, err = p.add(ctx, x.Words); err != nil {
		return nil, nil, err
	}
	for i := range x.Cache.Geometry().Regions() {
		m, err := x.Cache.Region(i)
		if err != nil {
			return nil, nil, err
		}
		s, err := p.add(ctx, m)
		if err != nil {
			return nil, nil, err
		}
		o.Regions = append(o.Regions, s)
	}
	if b, err = o.AppendBinary(nil); err != nil {
		return nil, nil, err
	}
	if _, err := p.header.AddUint64(headerState, stateOffered); err != nil {
		return nil, nil, err
	}
	e.o.Log.LogAttrs(ctx, slog.LevelWarn, "mooncake: whoever reaches these ports reads this cache: nothing asks who they are",
		slog.String("at", o.Segment), slog.String("listen", e.o.Listen), slog.String("owner", x.Owner.String()))
	c, ok := w.(*child)
	if !ok || x.Lost == nil { // what is in this process doesn't end before it
		return b, p.withdraw, nil
	}
	withdrawn := make(chan struct{})
	go func() {
		select {
		case <-c.gone:
			e.o.Log.LogAttrs(context.Background(), slog.LevelWarn, "mooncake: an offer is lost with its process, and is made again",
				slog.String("at", o.Segment), slog.String("owner", x.Owner.String()), slog.Any("err", c.death))
			x.Lost(c.death)
		case <-withdrawn:
		}
	}()
	return b, func() { close(withdrawn); p.withdraw() }, nil
}

// newHeader returns a header in a state of no offer.
func (e *Engine) newHeader(owner transfer.OwnerID) (*device.Memory, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m, err := e.host.Alloc(HeaderBytes)
	if err != nil {
		return nil, err
	}
	copy(m.Bytes()[:headerState], AppendHeader(nil, owner))
	e.headers = append(e.headers, m)
	return m, nil
}

func (e *Engine) freeHeader(m *device.Memory) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := slices.Index(e.headers, m); i >= 0 && !e.closed {
		e.headers = slices.Delete(e.headers, i, i+1)
		_ = m.Free() // once
	}
}

// export is an offer that was made.
type export struct {
	engine  *Engine
	worker  worker
	header  *device.Memory
	numbers []uint32 // of the regions that withdraw ends
}

func (p *export) add(ctx context.Context, m *device.Memory) (Stretch, error) {
	if m.Size() == 0 {
		return Stretch{}, nil
	}
	number := p.engine.number()
	base, err := p.worker.add(ctx, number, m, true)
	if err == nil {
		p.numbers = append(p.numbers, number)
	}
	return Stretch{base, m.Size()}, err
}

// withdraw ends an offer: first its readers can know, then there is nothing to read.
func (p *export) withdraw() {
	if p.header != nil {
		_, _ = p.header.AddUint64(headerState, stateWithdrawn) // it is freed by Close, which comes after
	}
	ctx, cancel := context.WithTimeout(context.Background(), p.engine.o.Patience)
	defer cancel()
	for _, number := range p.numbers {
		if err := p.worker.remove(ctx, number); err != nil && ctx.Err() != nil {
			// A child that doesn't answer has the memory until it is no more.
			if c, ok := p.worker.(*child); ok {
				c.end("killed: it did not withdraw an offer")
			}
			return
		}
	}
	p.numbers = nil
	if c, ok := p.worker.(*child); ok && closed(c.gone) {
		p.engine.freeHeader(p.header) // which nobody can read any more
	}
}

// server returns the worker of offers, and starts one if there is none, or none any more.
func (e *Engine) server(ctx context.Context) (worker, error) {
	if e.o.InProcess {
		return e.insideWorker(ctx)
	}
	if err := e.enter(ctx); err != nil {
		return nil, err
	}
	defer e.leave()
	if e.serving != nil && !closed(e.serving.gone) {
		return e.serving, nil
	}
	c, err := e.starts.start(ctx, &e.o, purpose{serves: true, ipv6: isIPv6(e.o.Listen)}, "")
	if err != nil {
		return nil, err
	}
	e.serving = c
	return c, nil
}

// enter waits for its turn to start a worker: leave ends it. Kind: fault.Closed.
func (e *Engine) enter(ctx context.Context) error {
	select {
	case e.starting <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := e.alive(); err != nil {
		e.leave()
		return err
	}
	return nil
}

func (e *Engine) leave() { <-e.starting }

// alive refuses what comes after Close. Kind: fault.Closed.
func (e *Engine) alive() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fault.New(fault.Closed, "engine "+Name, "was closed")
	}
	return nil
}

// insideWorker returns the worker in this process. Its start takes as long as the library
// wants, and goes on when ctx ends: the next one finds it.
func (e *Engine) insideWorker(ctx context.Context) (worker, error) {
	if err := e.enter(ctx); err != nil {
		return nil, err
	}
	if w := e.inside; w != nil {
		e.leave()
		return w, nil
	}
	type outcome struct {
		w   *inside
		err error
	}
	over := make(chan outcome, 1)
	go func() {
		defer e.leave()
		w, err := newInside(&e.o)
		if err == nil {
			e.inside = w
		}
		over <- outcome{w, err}
	}()
	select {
	case o := <-over:
		if o.err != nil {
			return nil, o.err
		}
		return o.w, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Open implements [transfer.Engine]: each owner that is opened has a child of its own, so
// that what ends it is felt by nobody else. Pages of a device pass through host memory.
// Kinds: fault.Invalid, fault.Corrupt, fault.Unsupported (an offer that is none, or not
// the descriptor's; a target that no other process can map), fault.NotFound (the owner has
// closed), fault.Device (the owner, the way to it or a child failed), fault.Closed.
func (e *Engine) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, data []byte) (transfer.Source, error) {
	o, err := ParseOffer(data)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(o.check(d), checkSegment(o.Segment, e.o.Metadata)); err != nil {
		return nil, err
	}
	return transfer.Staged(t, func(t transfer.Target) (transfer.Source, error) { return e.open(ctx, t, d, o) })
}

func (e *Engine) open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, o *Offer) (transfer.Source, error) {
	w, err := e.reader(ctx, o.Segment)
	if err != nil {
		return nil, given(ctx, err)
	}
	s, err := newSource(ctx, e, w, t, d, o)
	if err != nil {
		return nil, errors.Join(given(ctx, err), s.Close())
	}
	return s, nil
}

// given is err, of kind busy when it is because ctx has ended: nothing else has failed.
func given(ctx context.Context, err error) error {
	if late := ctx.Err(); late != nil && errors.Is(err, late) {
		return fault.Wrap(fault.Busy, "", err)
	}
	return err
}

// reader returns a worker for one owner.
func (e *Engine) reader(ctx context.Context, owner string) (worker, error) {
	if err := errors.Join(ctx.Err(), e.alive()); err != nil {
		return nil, err
	}
	if e.o.InProcess {
		return e.insideWorker(ctx)
	}
	c, err := e.starts.start(ctx, &e.o, purpose{ipv6: isIPv6(owner)}, owner)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Close implements [transfer.Engine].
func (e *Engine) Close() error {
	e.starting <- struct{}{} // what is being started is there then, and is closed
	defer e.leave()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	if e.serving != nil {
		e.serving.close()
	}
	if e.inside != nil {
		e.inside.close()
	}
	var errs []error
	for _, m := range e.headers {
		errs = append(errs, m.Free())
	}
	return errors.Join(append(errs, e.host.Close())...)
}
