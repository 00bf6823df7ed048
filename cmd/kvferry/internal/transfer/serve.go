package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// ServeOptions say what is served. Start from [DefaultServe].
type ServeOptions struct {
	Shape
	Seed       uint64
	Publish    int // pages; 0 = all
	Lease      time.Duration
	Descriptor string // a file, or Stdio; "" = DefaultDescriptor
	Once       bool   // end after the first acknowledgement
	Device     string // a name that accel.Parse knows; "" = the host
	Libraries  accel.Libraries
	Copier     string
	Engines    engines.Options
}

// DefaultServe are options for a laptop.
func DefaultServe() ServeOptions {
	return ServeOptions{Shape: Shape{Pages: defaultPages, PageSize: defaultPageSize}, Seed: 1, Lease: time.Minute}
}

// Limits of a lease.
const (
	minLease = time.Second
	maxLease = 24 * time.Hour
)

// entity is how serve calls itself in descriptors: read finds the seed in it.
const entity = "kvferry transfer serve, seed "

// check refuses options that can't be served. Kind: fault.Invalid.
func (o *ServeOptions) check() error {
	if o.Lease < minLease || o.Lease > maxLease {
		return fault.New(fault.Invalid, "--lease", "%v is not in %v…%v", o.Lease, minLease, maxLease).
			Hint("give a time from 1s to 24h; a reader that comes later needs a new copy of the descriptor")
	}
	if o.Publish == 0 {
		o.Publish = o.Pages
	}
	if o.Publish < 0 || o.Publish > min(o.Pages, transfer.MaxPublished) {
		return fault.New(fault.Invalid, "--publish", "%d pages of %d, and %d at most are published", o.Publish, o.Pages, transfer.MaxPublished).
			Hint("give --publish %d or less", min(o.Pages, transfer.MaxPublished))
	}
	if o.Descriptor == "" {
		o.Descriptor = DefaultDescriptor()
	}
	return nil
}

// Serve publishes a cache that is filled by a seed, until ctx ends, which is no error, or,
// with Once, a reader has acknowledged; then the end of ctx before that is one. What
// happens goes to log, and it ends when that can't be written any more; the descriptor to
// its file, or to stdout; progress, on a terminal, to terminal.
//
// Kinds: fault.Invalid, fault.NotFound, fault.Unsupported (options, engines, a device),
// fault.Busy (the descriptor's file), fault.Memory, fault.Device.
func Serve(ctx context.Context, o ServeOptions, stdout, terminal io.Writer, log *Log) (err error) {
	if err := o.check(); err != nil {
		return err
	}
	g, err := o.geometry()
	if err != nil {
		return err
	}
	s := &server{o: o, log: log, readers: make(chan reader, 64), refused: make(refusals, 16), changes: make(chan change, 16), done: make(chan struct{}, 1)}
	o.Engines.Logger = slog.New(s.refused)
	defer func() { err = errors.Join(err, s.close()) }()
	if s.opened, err = accel.Open(ctx, o.Device, accel.Options{Libraries: o.Libraries, Copier: o.Copier}); err != nil {
		return err
	}
	if s.engines, err = engines.Open(ctx, o.Engines, engines.Owner, s.opened); err != nil {
		return err
	}
	if names := s.engines.Names(); o.Once && len(names) == 1 && names[0] == engines.Mooncake {
		return fault.New(fault.Invalid, "--once", "would never end: by %s nobody acknowledges", engines.Mooncake).Hint("leave --once out, or add another engine")
	}
	if s.file, err = publishTo(o.Descriptor, stdout); err != nil {
		return err
	}
	if err := s.fill(ctx, g, terminal); err != nil {
		if errors.Is(err, context.Canceled) && !o.Once {
			return nil
		}
		return err
	}
	return s.serve(ctx)
}

// server is a serve that runs.
type server struct {
	o       ServeOptions
	log     *Log
	opened  *accel.Opened
	engines *engines.Set
	file    *published
	pages   *pages
	sums    []transfer.Sum
	ids     []page.ID
	arena   *page.Arena

	publisher *transfer.Publisher
	readers   chan reader
	refused   refusals
	changes   chan change
	done      chan struct{} // a reader has acknowledged
}

func (s *server) close() error {
	var errs []error
	if s.file != nil { // first of all: nobody is to find what ends
		errs = append(errs, s.file.close())
	}
	if s.publisher != nil {
		errs = append(errs, s.publisher.Close())
	}
	if s.engines != nil {
		errs = append(errs, s.engines.Close())
	}
	if s.pages != nil {
		errs = append(errs, s.pages.close())
	}
	if s.opened != nil {
		errs = append(errs, s.opened.Close())
	}
	return errors.Join(errs...)
}

// fill makes the cache and its publisher. All pages are sealed.
func (s *server) fill(ctx context.Context, g *kv.Geometry, terminal io.Writer) (err error) {
	if s.pages, err = newPages(g, s.o.Seed, s.opened); err != nil {
		return err
	}
	if s.arena, err = page.NewArena(page.ArenaOptions{Pages: g.Pages()}); err != nil {
		return err
	}
	all, err := s.arena.Acquire(nil, g.Pages())
	if err != nil {
		return err
	}
	bar := newProgress(terminal, "filling", g.PageBytes()*int64(len(all)))
	defer bar.close()
	s.ids = all[:s.o.Publish]
	s.sums = make([]transfer.Sum, 0, len(all))
	err = s.pages.write(ctx, all, func(at page.ID, i int) error {
		if err := s.pages.fill(at, all[i], right); err != nil {
			return err
		}
		bar.step(g.PageBytes())
		var err error
		// While the host sees the bytes, also of pages that go on to a device.
		s.sums, err = transfer.AppendSums(s.sums, s.pages.contents.cache, []page.ID{at})
		return err
	})
	if err != nil {
		return err
	}
	s.sums = s.sums[:len(s.ids)]
	if err := s.arena.Seal(all); err != nil {
		return err
	}
	s.publisher, err = transfer.NewPublisher(transfer.PublisherOptions{
		Cache: s.pages.cache, Holder: transfer.HoldArena(s.arena), Host: s.opened.Host, Engines: s.watched(s.engines.Engines),
		Entity: entity + strconv.FormatUint(s.o.Seed, 10), MaxTTL: s.o.Lease,
		Grace: s.o.Lease, // who goes without a word may come back as long as the lease lasts
		Changed: func(engine string, lost error) {
			select {
			case s.changes <- change{engine, lost}:
			default: // several are there that have it published anew
			}
		},
	})
	return err
}

// publish publishes the pages anew, and writes the descriptor. Publications overlap: one
// that somebody reads from goes on until its own lease ends.
func (s *server) publish() (*transfer.Descriptor, error) {
	d, err := s.publisher.Publish(transfer.Lease{
		Pages: s.ids, Sums: s.sums, TTL: s.o.Lease,
		Readers: math.MaxInt32, // as many as come: no acknowledgement takes the pages from the others
	})
	if err != nil {
		return nil, err
	}
	return d, s.file.write(d)
}

// renew publishes anew, unless no engine lets others read at the moment: then there is a
// change to come.
func (s *server) renew() error {
	d, err := s.publish()
	if errors.Is(err, fault.Device) {
		return nil
	}
	if err == nil {
		s.log.Renewed(d)
	}
	return err
}

// serve publishes and tells of readers until it ends.
func (s *server) serve(ctx context.Context) error {
	d, err := s.publish()
	if err != nil {
		return err
	}
	s.log.Started(s.started(d))
	renew := time.NewTicker(s.o.Lease / 2)
	defer renew.Stop()
	var joined, acknowledged int
	defer func() {
		for len(s.refused) > 0 {
			s.log.Refused(<-s.refused)
		}
		s.log.Ended(joined, acknowledged)
	}()
	tell := func(r reader) {
		switch r.state {
		case readerJoined:
			joined++
		case readerDone:
			acknowledged++
		case readerGone:
		}
		s.log.Reader(r)
	}
	done := s.done
	if !s.o.Once {
		done = nil
	}
	for s.log.Err() == nil { // else nobody knows that it runs
		select {
		case <-ctx.Done():
			if s.o.Once {
				return ctx.Err()
			}
			return nil
		case <-done:
			for len(s.readers) > 0 {
				tell(<-s.readers)
			}
			return nil
		case c := <-s.changes:
			s.log.Changed(c)
			if err := s.renew(); err != nil {
				return err
			}
		case <-renew.C:
			if err := s.renew(); err != nil {
				return err
			}
		case r := <-s.readers:
			tell(r)
		case r := <-s.refused:
			s.log.Refused(r)
		}
	}
	return nil
}

func (s *server) started(d *transfer.Descriptor) Started {
	g := s.pages.cache.Geometry()
	x := Started{
		Owner: d.Owner.String(), Epoch: epochText(d.Epoch), Seed: s.o.Seed, Pages: len(d.Pages), PageBytes: g.PageBytes(), Cache: describe(g),
		Device: s.opened.Device.Name(), Engines: s.engines.Names(), Reached: s.engines.Reached(), Warnings: s.engines.Warnings,
		LeaseSeconds: s.o.Lease.Seconds(), Expires: d.Expires, Descriptor: s.file.path,
	}
	if x.Warnings == nil {
		x.Warnings = []string{} // for JSON
	}
	x.far = s.engines.Far()
	x.farFlags = s.engines.ReadFlags(x.far, func(file string) string {
		if file == s.o.Engines.KeyFile {
			file = filepath.Base(file) // of the copy
		}
		return shellWord(file)
	})
	if s.opened.Accelerator != nil { // only a device reads from it
		x.flags = []string{"--device " + s.opened.Device.Name()}
		for _, l := range []struct{ flag, file string }{
			{"--cuda-library", s.o.Libraries.CUDA}, {"--cudart-library", s.o.Libraries.CUDART}, {"--hip-library", s.o.Libraries.HIP},
		} {
			if l.file != "" {
				x.flags = append(x.flags, l.flag+" "+shellWord(l.file))
			}
		}
	}
	x.flags = append(x.flags, s.engines.ReadFlags(s.engines.Names(), shellWord)...)
	return x
}

func epochText(e transfer.Epoch) string { return fmt.Sprintf("%d.%d", e.Word, e.Count) }

// seedOf finds the seed of an owner's contents in what it calls itself.
func seedOf(d *transfer.Descriptor) (uint64, bool) {
	text, ok := strings.CutPrefix(d.Entity, entity)
	seed, err := strconv.ParseUint(text, 10, 64)
	return seed, ok && err == nil
}

// The states of a reader, as an owner's engine sees it.
type readerState string

const (
	readerJoined readerState = "joined"
	readerDone   readerState = "acknowledged"
	readerGone   readerState = "gone"
)

// reader is something that happened to a reader.
type reader struct {
	state  readerState
	engine string
	epoch  transfer.Epoch
}

// change is an engine that has lost its offer, or of no error, made another.
type change struct {
	engine string
	lost   error
}

// watched returns the engines, which now say who comes and goes.
func (s *server) watched(all []transfer.Engine) (out []transfer.Engine) {
	for _, e := range all {
		out = append(out, watchedEngine{e, s})
	}
	return out
}

type watchedEngine struct {
	transfer.Engine
	s *server
}

// Offer implements [transfer.Engine].
func (w watchedEngine) Offer(e transfer.Export) ([]byte, func(), error) {
	join := e.Join
	e.Join = func(epoch transfer.Epoch) func(done bool) {
		leave := join(epoch)
		if leave == nil {
			return nil
		}
		w.tell(reader{readerJoined, w.Name(), epoch})
		return func(done bool) {
			leave(done)
			state := readerGone
			if done {
				state = readerDone
			}
			w.tell(reader{state, w.Name(), epoch})
		}
	}
	offer, withdraw, err := w.Engine.Offer(e)
	if kind, hint := fault.KindOf(err), w.s.engines.Remedy(w.Name(), err); kind != 0 && hint != "" {
		err = fault.Wrap(kind, "", err).Hint("%s", hint)
	}
	return offer, withdraw, err
}

// tell doesn't wait: what nobody hears in a crowd is not worth stopping readers for. That
// a reader has acknowledged is heard all the same.
func (w watchedEngine) tell(r reader) {
	select {
	case w.s.readers <- r:
	default:
	}
	if r.state == readerDone {
		select {
		case w.s.done <- struct{}{}:
		default: // one is enough
		}
	}
}
