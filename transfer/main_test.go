package transfer

import (
	"context"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var shape = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 12, PageSize: 8, KVHeads: 2, HeadDim: 4}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		return v
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair is two caches of shape on one host device, all pages of the first held and sealed.
type pair struct {
	testing.TB
	host      *device.Host
	near, far *kv.Cache
	arena     *page.Arena // of far
	pages     []page.ID   // of far
	publisher *Publisher
	engine    *fakeEngine
}

func newPair(t testing.TB) *pair {
	t.Helper()
	p := &pair{TB: t, engine: &fakeEngine{name: "fake"}}
	p.host = must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, p.host.Close()) })
	for _, c := range []**kv.Cache{&p.near, &p.far} {
		*c = must(kv.NewCache(must(shape.LayerMajor())(t), p.host))(t)
		t.Cleanup(func() { noError(t, (*c).Close()) })
	}
	p.arena = must(page.NewArena(page.ArenaOptions{Pages: shape.Pages}))(t)
	p.pages = must(p.arena.Acquire(nil, shape.Pages))(t)
	noError(t, p.arena.Seal(p.pages))
	return p
}

func (p *pair) publish(o PublisherOptions) *Publisher {
	p.Helper()
	o.Cache, o.Host = p.far, p.host
	if o.Engines == nil {
		o.Engines = []Engine{p.engine}
	}
	pub := must(NewPublisher(o))(p)
	p.Cleanup(func() { noError(p, pub.Close()) })
	return pub
}

func (p *pair) read(o Options) *Reader {
	p.Helper()
	o.Cache, o.Device = p.near, p.host
	if o.Engines == nil {
		o.Engines = []Engine{p.engine}
	}
	r := must(NewReader(o))(p)
	p.Cleanup(func() { noError(p, r.Close()) })
	return r
}

// fakeEngine copies nothing, and does as it is told.
type fakeEngine struct {
	name   string
	silent bool // offers nothing
	blind  bool // can't reach the memory
	words  *device.Memory
	join   func(Epoch) func(bool)
	offers func(Export) ([]byte, func(), error)
	opened int
	closed int
	fail   error // of Open
	gone   error // of Epoch
	opens  func(ctx context.Context) error
	copies func(ctx context.Context, s device.Stream) error
}

func (e *fakeEngine) Name() string { return e.name }

func (e *fakeEngine) Offer(x Export) ([]byte, func(), error) {
	if e.silent {
		return nil, nil, nil
	}
	if e.offers != nil {
		return e.offers(x)
	}
	if e.blind {
		return nil, nil, fault.New(fault.Unsupported, "cache", "is elsewhere").Hint("move it")
	}
	e.words, e.join = x.Words, x.Join
	return []byte(e.name), func() {}, nil
}

func (e *fakeEngine) Open(ctx context.Context, _ Target, _ *Descriptor, _ []byte) (Source, error) {
	if e.opens != nil {
		if err := e.opens(ctx); err != nil {
			return nil, err
		}
	}
	if e.fail != nil {
		return nil, e.fail
	}
	e.opened++
	return &fakeSource{e: e}, nil
}

func (*fakeEngine) Close() error { return nil }

type fakeSource struct {
	e     *fakeEngine
	leave func(done bool)
}

func (s *fakeSource) Epoch(_ context.Context, word uint32) (uint64, error) {
	if s.e.gone != nil {
		return 0, s.e.gone
	}
	return s.e.words.LoadUint64(int64(word) * wordBytes)
}

func (s *fakeSource) Copy(ctx context.Context, on device.Stream, _ *Plan) error {
	if s.e.copies != nil {
		return s.e.copies(ctx, on)
	}
	return nil
}

func (s *fakeSource) Join(e Epoch) error {
	if s.leave == nil {
		s.leave = s.e.join(e)
	}
	return nil
}

func (s *fakeSource) Leave(Epoch) error {
	if s.leave != nil {
		s.leave(true)
		s.leave = nil
	}
	return nil
}

func (s *fakeSource) Close() error {
	if s.leave != nil {
		s.leave(false)
	}
	s.e.closed++
	return nil
}
