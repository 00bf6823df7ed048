package tcp

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// patience is how long a test waits for what must happen. Nothing passes by it: it only
// turns a hang into a message.
const patience = 30 * time.Second

// small is a shape whose pages go through a buffer, and direct one whose don't.
func small() kv.Config {
	return kv.Config{Layout: kv.HND, DType: kv.BF16, Layers: 2, Pages: 12, PageSize: 8, KVHeads: 2, HeadDim: 8}
}

func direct() kv.Config {
	return kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 12, PageSize: 64, KVHeads: 8, HeadDim: 64}
}

// pair is an owner and a reader in this process, with caches of one shape.
type pair struct {
	testing.TB
	owner, reader *Engine
	log           *logged // of the owner
	host          *device.Host
	near, far     *kv.Cache
	publisher     *transfer.Publisher
	target        transfer.Target
	d             *transfer.Descriptor
}

// newPair has the owner's pages filled by seed 1, and the reader's by seed 2.
func newPair(tb testing.TB, owner, reader Options, c kv.Config) *pair {
	tb.Helper()
	p := &pair{TB: tb, log: &logged{}}
	for _, o := range []*Options{&owner, &reader} {
		if o.Key == nil {
			o.Key = testKey()
		}
	}
	owner.Logger = slog.New(p.log)
	if owner.Listen == "" {
		owner.Listen = "127.0.0.1:0"
	}
	var err error
	p.reader, err = New(reader)
	noError(tb, err)
	tb.Cleanup(func() { noError(tb, p.reader.Close()) })
	p.owner, err = New(owner)
	noError(tb, err)
	tb.Cleanup(func() { noError(tb, p.owner.Close()) })
	p.host, err = device.OpenHost(device.HostOptions{})
	noError(tb, err)
	tb.Cleanup(func() { noError(tb, p.host.Close()) })
	g, err := c.PageMajor()
	noError(tb, err)
	for i, x := range []**kv.Cache{&p.far, &p.near} {
		*x, err = kv.NewCache(g, p.host)
		noError(tb, err)
		tb.Cleanup(func() { noError(tb, (*x).Close()) })
		noError(tb, transfertest.Fill(*x, uint64(i)+1, ids(g.Pages())))
	}
	p.publisher, err = transfer.NewPublisher(transfer.PublisherOptions{Cache: p.far, Host: p.host, Engines: []transfer.Engine{p.owner}})
	noError(tb, err)
	tb.Cleanup(func() { noError(tb, p.publisher.Close()) })
	p.d, err = p.publisher.Descriptor()
	noError(tb, err)
	p.target = transfer.Target{Cache: p.near, Device: p.host, Host: p.host}
	return p
}

// by has the reader come by another address.
func (p *pair) by(address string) *pair {
	p.d.Offers[0].Data = newOffer(address, p.owner.o.TLS)
	return p
}

func (p *pair) open(ctx context.Context) (transfer.Source, error) {
	return p.reader.Open(ctx, p.target, p.d, p.d.Offers[0].Data)
}

// source opens the owner.
func (p *pair) source() *source {
	p.Helper()
	s, err := p.open(context.Background())
	noError(p, err)
	p.Cleanup(func() { noError(p, s.Close()) })
	return s.(*source)
}

// plan reads all pages but the last into those of the same id, and half of the last.
func (p *pair) plan() *transfer.Plan {
	p.Helper()
	all, size := ids(p.near.Pages()), p.near.PageSize()
	var plan transfer.Plan
	noError(p, plan.Set(0, len(all)*size-size/2, all, all, size))
	return &plan
}

// same tells whether the reader has what plan reads.
func (p *pair) same() bool {
	p.Helper()
	size := p.near.PageSize()
	for i := range p.near.Layers() {
		for id := range page.ID(p.near.Pages()) {
			to := size
			if int(id) == p.near.Pages()-1 {
				to -= size / 2
			}
			a, err := p.near.Chunks(nil, i, id, 0, to)
			noError(p, err)
			for _, c := range a {
				if !bytes.Equal(mem(p, p.near)[c.Off:][:c.Bytes], mem(p, p.far)[c.Off:][:c.Bytes]) {
					return false
				}
			}
		}
	}
	return true
}

func mem(tb testing.TB, c *kv.Cache) []byte {
	tb.Helper()
	m, err := c.Region(0)
	noError(tb, err)
	return m.Bytes()
}

func ids(n int) (ids []page.ID) {
	for id := range page.ID(n) {
		ids = append(ids, id)
	}
	return ids
}

// until waits for what has no event.
func until(tb testing.TB, what string, f func() bool) {
	tb.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("never: %s", what)
		}
	}
}

func noError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// logged keeps the errors that a logger was told.
type logged struct {
	mu     sync.Mutex
	errors []error
}

func (*logged) Enabled(context.Context, slog.Level) bool { return true }

func (l *logged) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok {
			l.mu.Lock()
			l.errors = append(l.errors, err)
			l.mu.Unlock()
		}
		return true
	})
	return nil
}

func (l *logged) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *logged) WithGroup(string) slog.Handler      { return l }

// first returns the first error, once there is one.
func (l *logged) first(tb testing.TB) (err error) {
	tb.Helper()
	until(tb, "the owner's logger is told", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.errors) > 0 {
			err = l.errors[0]
		}
		return err != nil
	})
	return err
}
