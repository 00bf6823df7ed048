package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// TransferOwner is the hidden verb of the child that owns the pages which bench transfer
// reads.
const TransferOwner = "transfer-owner"

// The layers and tokens of a page do not matter to engines when both sides are page-major:
// a page is one row.
const (
	transferLayers = 4
	transferTokens = 4
	transferRun    = 16 // pages
	leaseFor       = 10 * time.Minute
)

// transferShape is what is read: pages of so many bytes.
type transferShape struct {
	PageBytes int64  `json:"page_bytes"`
	Pages     int    `json:"pages"` // of each cache
	Run       int    `json:"run"`   // so many are adjacent on both sides: 1 = none
	Reads     int    `json:"reads"` // into which they are divided
	Seed      uint64 `json:"seed"`
}

func (s transferShape) geometry() (*kv.Geometry, error) {
	return kv.Config{
		Layout: kv.MLA, DType: kv.FP8, Layers: transferLayers, PageSize: transferTokens, Pages: s.Pages,
		LatentDim: int(s.PageBytes / (transferLayers * transferTokens)),
	}.PageMajor()
}

// orders returns the pages of each read on both sides: runs in any order.
func (s transferShape) orders() (local, remote [][]page.ID) {
	rng := rand.New(rand.NewPCG(s.Seed, uint64(s.PageBytes)))
	side := func() (ids []page.ID) {
		for _, run := range rng.Perm(s.Pages / s.Run) {
			for k := range s.Run {
				ids = append(ids, page.ID(run*s.Run+k))
			}
		}
		return ids
	}
	a, b := side(), side()
	for i := range s.Reads {
		from, to := len(a)*i/s.Reads/s.Run*s.Run, len(a)*(i+1)/s.Reads/s.Run*s.Run
		local, remote = append(local, a[from:to:to]), append(remote, b[from:to:to])
	}
	return local, remote
}

// What the owner is asked, and answers: one JSON object a line.
type (
	ownerRequest struct {
		transferShape
		Engines []ownerEngines `json:"engines"`
	}
	// ownerEngines are engines of one publication: each name once.
	ownerEngines struct {
		Name    string          `json:"name"`
		Options engines.Options `json:"options"`
	}
	ownerAnswer struct {
		Error     string           `json:"error,omitempty"`
		Kind      fault.Kind       `json:"kind,omitempty"`
		Hint      string           `json:"hint,omitempty"`
		Published []ownerPublished `json:"published"` // of each of the request's engines
		Raw       string           `json:"raw"`       // where the raw stream is
	}
	ownerPublished struct {
		Plain  []byte `json:"plain"`  // the descriptor without checksums
		Summed []byte `json:"summed"` // and with them
		Error  string `json:"error,omitempty"`
	}
)

// ServeTransfer answers what a bench asks of the owner of its pages, until in ends.
func ServeTransfer(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	requests := json.NewDecoder(bufio.NewReader(in))
	answers := json.NewEncoder(out)
	var owner *transferOwner
	defer func() { err = errors.Join(err, owner.close()) }()
	for ctx.Err() == nil {
		var q ownerRequest
		if err := requests.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fault.Wrap(fault.Invalid, "request", err)
		}
		if err := owner.close(); err != nil {
			return err
		}
		a := &ownerAnswer{}
		owner, err = openOwner(ctx, q, a)
		if err != nil {
			a.Error, a.Kind, a.Hint = err.Error(), fault.KindOf(err), fault.RemedyOf(err)
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// transferOwner is the owner of one shape's pages.
type transferOwner struct {
	opened     *accel.Opened
	cache      *kv.Cache
	arena      *page.Arena
	sets       []*engines.Set
	publishers []*transfer.Publisher
	raw        *rawServer
}

func (w *transferOwner) close() error {
	if w == nil {
		return nil
	}
	var errs []error
	if w.raw != nil {
		errs = append(errs, w.raw.close())
	}
	for _, p := range w.publishers {
		errs = append(errs, p.Close())
	}
	for _, s := range w.sets {
		errs = append(errs, s.Close())
	}
	if w.cache != nil {
		errs = append(errs, w.cache.Close())
	}
	if w.opened != nil {
		errs = append(errs, w.opened.Close())
	}
	return errors.Join(errs...)
}

// openOwner makes the pages, and publishes them by each of the engines. An engine that
// does not work is said to be so, and the others go on.
func openOwner(ctx context.Context, q ownerRequest, a *ownerAnswer) (w *transferOwner, err error) {
	w = &transferOwner{}
	defer func() {
		if err != nil {
			err, w = errors.Join(err, w.close()), nil
		}
	}()
	g, err := q.geometry()
	if err != nil {
		return w, err
	}
	if w.opened, err = accel.Open(ctx, "", accel.Options{Workers: 1}); err != nil {
		return w, err
	}
	if w.cache, err = touchedOn(w.opened.Host, g, q.Seed); err != nil {
		return w, err
	}
	if w.arena, err = page.NewArena(page.ArenaOptions{Pages: q.Pages}); err != nil {
		return w, err
	}
	ids, err := w.arena.Acquire(nil, q.Pages)
	if err == nil {
		err = w.arena.Seal(ids)
	}
	if err != nil {
		return w, err
	}
	sums, err := transfer.AppendSums(nil, w.cache, ids)
	if err != nil {
		return w, err
	}
	for _, e := range q.Engines {
		p, err := w.publish(ctx, e, ids, sums)
		if err != nil {
			p = ownerPublished{Error: err.Error()}
		}
		a.Published = append(a.Published, p)
	}
	if w.raw, err = serveRaw(ctx, w.cache, q.transferShape); err != nil {
		return w, err
	}
	a.Raw = w.raw.listener.Addr().String()
	return w, nil
}

// publish publishes all pages by one engine, twice.
func (w *transferOwner) publish(ctx context.Context, e ownerEngines, ids []page.ID, sums []transfer.Sum) (p ownerPublished, err error) {
	set, err := engines.Open(ctx, e.Options, engines.Owner, w.opened)
	if err != nil {
		return p, err
	}
	w.sets = append(w.sets, set)
	publisher, err := transfer.NewPublisher(transfer.PublisherOptions{
		Cache: w.cache, Holder: transfer.HoldArena(w.arena), Host: w.opened.Host, Engines: set.Engines, Entity: "kvferry bench transfer", Grace: leaseFor,
	})
	if err != nil {
		return p, err
	}
	w.publishers = append(w.publishers, publisher)
	for _, f := range []struct {
		to   *[]byte
		sums []transfer.Sum
	}{{&p.Plain, nil}, {&p.Summed, sums}} {
		d, err := publisher.Publish(transfer.Lease{Pages: ids, Sums: f.sums, TTL: leaseFor})
		if err != nil {
			return p, err
		}
		if *f.to, err = d.AppendBinary(nil); err != nil {
			return p, err
		}
	}
	return p, nil
}

// touchedOn returns a cache on the host device whose memory is there, and holds
// something.
func touchedOn(host *device.Host, g *kv.Geometry, seed uint64) (*kv.Cache, error) {
	c, err := kv.NewCache(g, host)
	if err != nil {
		return nil, err
	}
	m, err := c.Region(0)
	if err == nil {
		err = m.Populate(0, m.Size())
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	scribble(m.Bytes(), seed)
	return c, nil
}

// err is the error that the owner has said.
func (a *ownerAnswer) err() error {
	if a.Error == "" {
		return nil
	}
	kind := a.Kind
	if kind == 0 {
		kind = fault.Device
	}
	return fault.New(kind, "owner", "%s", a.Error).Hint("%s", a.Hint)
}
