package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// How much of what was read is compared with the seed's contents.
const (
	VerifyFull = "full"
	VerifyOff  = "off"
)

// ReadOptions say what is read. Start from [DefaultRead].
type ReadOptions struct {
	Descriptor  string // a file, or Stdio; "" = DefaultDescriptor
	Tokens      string // a:b; "" = all that is published
	Repeat      int
	Verify      string
	Seed        *uint64 // nil = the descriptor's
	Arrangement string  // of the cache that is read into
	Deadline    time.Duration
	Device      string // a name that accel.Parse knows; "" = the host
	Libraries   accel.Libraries
	Copier      string
	Engines     engines.Options
}

// DefaultRead reads everything once.
func DefaultRead() ReadOptions {
	return ReadOptions{Repeat: 1, Verify: VerifyFull, Deadline: 30 * time.Second}
}

const (
	maxRepeat   = 1_000_000
	maxDeadline = time.Hour
	// pieceBytes is about how much one read takes: enough for its rate, and a step of
	// the progress.
	pieceBytes = 256 << 20
)

func (o *ReadOptions) check() error {
	switch {
	case o.Repeat < 1 || o.Repeat > maxRepeat:
		return fault.New(fault.Invalid, "--repeat", "%d is not in 1…%d", o.Repeat, maxRepeat)
	case o.Deadline <= 0 || o.Deadline > maxDeadline:
		return fault.New(fault.Invalid, "--deadline", "%v is not more than 0 and at most %v", o.Deadline, maxDeadline)
	case o.Verify != VerifyFull && o.Verify != VerifyOff:
		return fault.New(fault.Invalid, "--verify", "no such choice: %q", o.Verify).Hint("there are %s, %s", VerifyFull, VerifyOff)
	}
	if o.Descriptor == "" {
		o.Descriptor = DefaultDescriptor()
	}
	return nil
}

// tokens returns the range that is read of all tokens. Kind: fault.Invalid.
func (o *ReadOptions) tokens(all int) (start, end int, err error) {
	if o.Tokens == "" {
		return 0, all, nil
	}
	from, to, found := strings.Cut(o.Tokens, ":")
	start, err1 := strconv.Atoi(from)
	end, err2 := strconv.Atoi(to)
	switch {
	case !found || err1 != nil || err2 != nil:
		return 0, 0, fault.New(fault.Invalid, "--tokens", "%q is not like 100:200", o.Tokens).Hint("the first token, and the one behind the last")
	}
	var what string
	switch {
	case end < start:
		what = "ends before it begins"
	case end == start:
		what = "is empty"
	case start < 0 || end > all:
		what = fmt.Sprintf("is not in the %d tokens that are published", all)
	default:
		return start, end, nil
	}
	return 0, 0, fault.New(fault.Invalid, "--tokens", "%q %s", o.Tokens, what).Hint("give a range in 0:%d", all)
}

// Read reads what a descriptor publishes into a cache of its own, compares every byte, and
// acknowledges. The result is there also beside an error, which it has too: it tells how
// far the read has come.
//
// Kinds: fault.Corrupt (a wrong byte), fault.Invalid, fault.NotFound (no descriptor, or
// what it publishes is no longer there), fault.Unsupported, fault.Busy (the deadline),
// fault.Memory, fault.Device; or ctx's error. What the other side, or the way to it, may
// have mended by the next try is a *[PeerError].
func Read(ctx context.Context, o ReadOptions, stdin io.Reader, terminal io.Writer) (*Result, error) {
	r := &readRun{o: o}
	err := r.run(ctx, stdin, terminal)
	x := r.result()
	err = errors.Join(err, r.close())
	x.Error = failureOf(err)
	return x, err
}

// readRun is a read that runs.
type readRun struct {
	o          ReadOptions
	d          *transfer.Descriptor
	start, end int // tokens

	opened  *accel.Opened
	engines *engines.Set
	pages   *pages
	local   []page.ID // of all that is published, in the order of the sequence
	reader  *transfer.Reader
	seconds []float64 // of each pass
	opens   opens

	before              []*transfer.Descriptor // that were read by before d
	compared, untouched int64                  // bytes
	acknowledged        bool
	unacknowledged      string // why
}

func (r *readRun) run(ctx context.Context, stdin io.Reader, terminal io.Writer) (err error) {
	if err := r.o.check(); err != nil {
		return err
	}
	if r.d, err = readDescriptor(ctx, r.o.Descriptor, stdin); err != nil {
		return err
	}
	if err := r.open(ctx); err != nil {
		return err
	}
	bar := newProgress(terminal, "reading", r.bytes()*int64(r.o.Repeat))
	defer bar.close()
	for i := range r.o.Repeat {
		if i > 0 {
			if err := r.renew(ctx, stdin); err != nil {
				return err
			}
		}
		if err := r.pass(ctx, bar); err != nil {
			return err
		}
	}
	bar.close()
	return r.acknowledge(ctx)
}

func (r *readRun) close() error {
	var errs []error
	if r.reader != nil {
		errs = append(errs, r.reader.Close())
	}
	if r.engines != nil {
		errs = append(errs, r.engines.Close())
	}
	if r.pages != nil {
		errs = append(errs, r.pages.close())
	}
	if r.opened != nil {
		errs = append(errs, r.opened.Close())
	}
	return errors.Join(errs...)
}

func (r *readRun) open(ctx context.Context) (err error) {
	o, d := &r.o, r.d
	if len(d.Pages) == 0 {
		return fault.New(fault.Invalid, "--descriptor "+o.Descriptor, "publishes no pages").Hint("publish some: kvferry transfer serve")
	}
	if r.start, r.end, err = o.tokens(len(d.Pages) * d.Geometry.PageSize()); err != nil {
		return err
	}
	seed, known := seedOf(d)
	if o.Seed != nil {
		seed, known = *o.Seed, true
	}
	if !known && o.Verify != VerifyOff {
		return fault.New(fault.Invalid, "--descriptor "+o.Descriptor, "its owner is %q, and doesn't say by which seed its pages are filled", d.Entity).
			Hint("read from kvferry transfer serve, or give --seed or --verify off")
	}
	g, err := like(d.Geometry, len(d.Pages), o.Arrangement)
	if err != nil {
		return err
	}
	if r.opened, err = accel.Open(ctx, o.Device, accel.Options{Libraries: o.Libraries, Copier: o.Copier}); err != nil {
		return err
	}
	if r.engines, err = engines.Open(ctx, o.Engines, engines.Reader, r.opened); err != nil {
		return err
	}
	if r.pages, err = newPages(g, seed, r.opened); err != nil {
		return err
	}
	for id := range page.ID(len(d.Pages)) {
		r.local = append(r.local, id)
	}
	r.reader, err = transfer.NewReader(transfer.Options{
		Cache: r.pages.cache, Device: r.opened.Device, Copier: r.opened.Copier, Host: r.opened.Host,
		Engines: r.seen(r.engines.Engines), Deadline: o.Deadline,
	})
	return err
}

// bytes is what one pass moves.
func (r *readRun) bytes() int64 {
	g := r.pages.cache.Geometry()
	return g.PageBytes() * int64(r.end-r.start) / int64(g.PageSize())
}

// pieces calls f for parts of the range that are not too large.
func (r *readRun) pieces(f func(start, end int) error) error {
	g := r.pages.cache.Geometry()
	tokens := int(max(1, pieceBytes/max(1, g.PageBytes()))) * g.PageSize()
	for from := r.start; from < r.end; {
		to := min(r.end, (from/tokens+1)*tokens)
		if err := f(from, to); err != nil {
			return err
		}
		from = to
	}
	return nil
}

// pass reads the range once, and compares it.
func (r *readRun) pass(ctx context.Context, bar *progress) error {
	if r.o.Verify == VerifyFull {
		// Also of pages that are not read: they must stay as they are.
		err := r.pages.write(ctx, r.local, func(at page.ID, i int) error { return r.pages.fill(at, r.d.Pages[i], wrong) })
		if err != nil {
			return err
		}
	}
	g := r.pages.cache.Geometry()
	began, spent := time.Now(), time.Duration(0)
	err := r.pieces(func(start, end int) error {
		r.opens.begin()
		if err := r.reader.Retrieve(ctx, start, end, r.local, r.d.Pages, r.d); err != nil {
			return r.explain(err)
		}
		spent += time.Since(began)
		bar.step(g.PageBytes() * int64(end-start) / int64(g.PageSize()))
		began = time.Now()
		return nil
	})
	if err != nil {
		return err
	}
	r.seconds = append(r.seconds, max(spent, 1).Seconds())
	if r.o.Verify == VerifyFull {
		return r.verify(ctx)
	}
	return nil
}

// verify compares all pages: those that were read with the seed's contents, the others,
// and other tokens of theirs, with what they held before.
func (r *readRun) verify(ctx context.Context) error {
	size := r.pages.cache.PageSize()
	return r.pages.look(ctx, r.local, func(at page.ID, i int) error {
		t0, t1 := min(max(r.start-i*size, 0), size), min(max(r.end-i*size, 0), size)
		n, err := r.pages.verify(at, r.d.Pages[i], t0, t1)
		read := n / int64(size) * int64(t1-t0)
		r.compared += read
		r.untouched += n - read
		return r.explainSeed(err)
	})
}

// renew looks whether the owner has published anew.
func (r *readRun) renew(ctx context.Context, stdin io.Reader) error {
	if onlyOnce(r.o.Descriptor) {
		return nil
	}
	d, err := readDescriptor(ctx, r.o.Descriptor, stdin)
	if errors.Is(err, fault.NotFound) { // it was there
		return &PeerError{fault.Wrap(fault.NotFound, "", err).Hint("%s", stillRunning)}
	}
	if err != nil {
		return err
	}
	if d.Epoch == r.d.Epoch && d.Owner == r.d.Owner {
		return nil
	}
	if d.Owner != r.d.Owner || d.Geometry.Fingerprint() != r.d.Geometry.Fingerprint() || len(d.Pages) != len(r.d.Pages) {
		return &PeerError{fault.New(fault.NotFound, "--descriptor "+r.o.Descriptor, "is now that of another owner, or of other pages").Hint("read again")}
	}
	r.before, r.d = append(r.before, r.d), d
	return nil
}

// acknowledge tells the owner that this reader has what it wants. An engine that can't is
// no failure.
func (r *readRun) acknowledge(ctx context.Context) error {
	r.opens.begin()
	err := r.reader.Ack(ctx, r.d)
	r.acknowledged = err == nil
	if errors.Is(err, fault.Unsupported) {
		r.unacknowledged = err.Error()
		return nil
	}
	if err != nil {
		return fmt.Errorf("acknowledgement: %w", r.explain(err))
	}
	for _, d := range r.before {
		_ = r.reader.Ack(ctx, d) // its lease may be over, and an owner that serves once has ended
	}
	return nil
}
