package transfertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

const (
	farSeed, localSeed, otherSeed = 1, 2, 3

	lease = time.Minute // of a publication that is to outlast its case

	// patience is how long a case waits for what must happen. Nothing passes by it: it
	// only turns a hang into a message.
	patience = 30 * time.Second
)

// rig is an owner, a reader, and what the case knows about both.
type rig struct {
	testing.TB
	harness Harness
	owner   Owner
	engine  *tapped
	reader  *transfer.Reader
	ground  *ground // of the reader
	cache   *kv.Cache
	arena   *page.Arena // of the reader's pages
	far     *kv.Geometry
	image   *kv.Cache // what the owner's pages hold
	opts    transfer.Options
	seeds   *rand.Rand
	reading atomic.Int64 // engines' copies that are running
}

// newRig opens both sides. The reader's pages are free, and filled by localSeed.
func newRig(t testing.TB, h Harness, local, far func() (*kv.Geometry, error), sabotage sabotage) *rig {
	t.Helper()
	r := &rig{TB: t, seeds: rand.New(rand.NewPCG(1, 2))}
	r.harness = h
	host := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, host.Close()) })
	side := must(h.Reader())(t)
	if side.Close != nil {
		t.Cleanup(func() { noError(t, side.Close()) })
	}
	r.engine = &tapped{Engine: side.Engine, rig: r, sabotage: sabotage}
	r.ground = must(newGround(side, host, must(local())(t)))(t)
	t.Cleanup(func() { noError(t, r.ground.close()) })
	r.cache = r.ground.cache
	r.far = must(far())(t)
	r.image = must(kv.NewCache(r.far, host))(t)
	t.Cleanup(func() { noError(t, r.image.Close()) })
	g := r.cache.Geometry()
	r.arena = must(page.NewArena(page.ArenaOptions{Pages: g.Pages(), Sink: g.Sink()}))(t)
	noError(t, r.ground.fill(localSeed, allPages(g)))
	noError(t, Fill(r.image, farSeed, allPages(r.far)))

	r.owner = must(h.owner(r.far, farSeed))(t)
	t.Cleanup(func() { noError(t, r.owner.Close()) })
	t.Cleanup(func() { noError(t, r.engine.Close()) })
	r.opts = transfer.Options{
		Cache: r.cache, Device: r.ground.dev, Copier: side.Copier, Host: host,
		Engines: []transfer.Engine{r.engine}, Deadline: patience,
	}
	r.reader = must(transfer.NewReader(r.opts))(t)
	t.Cleanup(func() {
		noError(t, r.reader.Close())
		if n := r.arena.NumFree(); n != r.arena.Usable() {
			t.Errorf("the reader has %d pages free of %d", n, r.arena.Usable())
		}
	})
	return r
}

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

// run is a sequence of n pages on both sides, in random order, published.
type run struct {
	local, remote []page.ID
	d             *transfer.Descriptor
}

// publish publishes n pages of the owner's, and takes as many of the reader's.
func (r *rig) publish(n int, sums bool, ttl time.Duration) *run {
	r.Helper()
	s := &run{local: must(r.arena.Acquire(nil, n))(r), remote: allPages(r.far)}
	r.seeds.Shuffle(len(s.remote), func(i, j int) { s.remote[i], s.remote[j] = s.remote[j], s.remote[i] })
	r.seeds.Shuffle(n, func(i, j int) { s.local[i], s.local[j] = s.local[j], s.local[i] })
	s.remote = s.remote[:n]
	s.d = must(transfer.Decode(must(r.owner.Publish(s.remote, sums, ttl))(r)))(r)
	return s
}

// end gives the pages of a run back, on both sides.
func (r *rig) end(s *run) {
	r.Helper()
	if err := r.owner.End(s.d.Epoch); err != nil && !errors.Is(err, fault.NotFound) {
		r.Fatal(err)
	}
	must(r.arena.Release(s.local))(r)
}

// owner makes an owner of a cache of that geometry, filled by seed.
func (h *Harness) owner(g *kv.Geometry, seed uint64) (Owner, error) {
	if h.Role != "" {
		return startOwner(h.Role, g, seed)
	}
	side, err := h.Owner()
	if err != nil {
		return nil, err
	}
	return Serve(side, g, seed)
}

// snapshot returns the bytes of the reader's cache.
func (r *rig) snapshot() [][]byte {
	r.Helper()
	return must(r.ground.bytes())(r)
}

// compare tells how the reader's cache differs from want.
func (r *rig) compare(want [][]byte) error {
	is, err := r.ground.bytes()
	if err != nil {
		return err
	}
	for i, b := range want {
		for off := range b {
			if is[i][off] != b[off] {
				return fmt.Errorf("byte %d of region %d is %#02x, want %#02x", off, i, is[i][off], b[off])
			}
		}
	}
	return nil
}

// expect writes into regions what a read of tokens [start, end) brings: read by read and
// chunk by chunk, by nothing that the reader uses.
func (r *rig) expect(regions [][]byte, start, end int, s *run) {
	r.Helper()
	g := r.cache.Geometry()
	far := map[int]int{}
	for i, l := range r.far.Spec().Layers {
		far[l.ID] = i
	}
	reads := must(transfer.AppendReads(nil, g.Layers(), start, end, s.local, s.remote, g.PageSize()))(r)
	for _, x := range reads {
		to := must(r.cache.Chunks(nil, x.Layer, x.Local, x.T0, x.T1))(r)
		from := must(r.image.Chunks(nil, far[must(g.Layer(x.Layer))(r).ID], x.Remote, x.T0, x.T1))(r)
		for i, c := range to {
			src := must(r.image.Region(from[i].Region))(r).Bytes()
			copy(regions[c.Region][c.Off:][:c.Bytes], src[from[i].Off:][:from[i].Bytes])
		}
	}
}

// retrieve reads, and holds the outcome and every byte against what they must be.
func (r *rig) retrieve(start, end int, s *run) error {
	want := r.snapshot()
	r.expect(want, start, end, s)
	if err := r.reader.Retrieve(r.Context(), start, end, s.local, s.remote, s.d); err != nil {
		return err
	}
	return r.compare(want)
}

// refused starts a read that must be refused with that kind, before a byte is touched.
func (r *rig) refused(kind fault.Kind, start, end int, local, remote []page.ID, d *transfer.Descriptor) error {
	want := r.snapshot()
	if err := r.reader.Retrieve(r.Context(), start, end, local, remote, d); !errors.Is(err, kind) {
		return fmt.Errorf("error %w, want kind %s", orNone(err), kind.Error())
	}
	return r.compare(want)
}

func orNone(err error) error {
	if err == nil {
		return errors.New("none")
	}
	return err
}

// wait waits for a ticket.
func (r *rig) wait(t *device.Ticket) error {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	return t.Wait(ctx)
}

// tapped is an engine that a case can stop before and after a copy, and that can be made
// to break a rule.
type tapped struct {
	transfer.Engine
	rig           *rig
	sabotage      sabotage
	before, after func(ctx context.Context) // set while no read is in flight
}

func (e *tapped) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	s, err := e.Engine.Open(ctx, t, d, offer)
	if err != nil {
		return nil, err
	}
	s = &tappedSource{s, e}
	if e.sabotage != nil {
		s = e.sabotage(s, t, d)
	}
	return s, nil
}

type tappedSource struct {
	transfer.Source
	engine *tapped
}

func (s *tappedSource) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	s.engine.rig.reading.Add(1)
	defer s.engine.rig.reading.Add(-1)
	if s.engine.before != nil {
		s.engine.before(ctx)
	}
	err := s.Source.Copy(ctx, on, p)
	if s.engine.after != nil {
		s.engine.after(ctx)
	}
	return err
}
