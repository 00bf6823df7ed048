package kvferry

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
)

// shape is the geometry that most tests use: 2 layers, 16 bytes a token in each.
var shape = kv.Config{Layout: kv.NHD, DType: kv.INT8, Layers: 2, Pages: 8, PageSize: 4, KVHeads: 2, HeadDim: 4}

// root is the key before the first page of every prompt.
var root = prefix.Namespace{Model: "test", HashScheme: prefix.SchemeTokens}.Root()

// engine plays the engine that embeds a manager. What it computes is a function of
// the tokens up to a place, the layer and the byte: nothing to remember, the same
// whatever the page size and layout, and a stale or foreign byte shows.
type engine struct {
	t       testing.TB
	g       *ground
	dev     device.Device
	cache   *kv.Cache
	compute device.Stream // nil: the engine works on the calling goroutine, and waits
	m       *Manager
	size    int // tokens a page
	layers  []kv.Layer
	row     int                  // bytes a token in one layer: [2, heads, dim] elements, or [latent]
	in      *devicetest.Injector // nil: nothing goes wrong
	failed  bool                 // a stream failed: Close reports it
	cable   error                // with which

	mu    sync.Mutex
	loads []*device.Ticket // guarded by mu: everything that nobody waited for
}

// newEngine opens a manager over a cache of g, and closes both when the test ends.
// With streams, the engine reads and writes pages by work on Options.Compute.
func newEngine(t testing.TB, g *kv.Geometry, o Options, streams bool) *engine {
	t.Helper()
	return newPlaguedEngine(t, g, o, streams, nil)
}

// newPlaguedEngine is newEngine with things that go wrong between device and host.
func newPlaguedEngine(t testing.TB, g *kv.Geometry, o Options, streams bool, in *devicetest.Injector) *engine {
	t.Helper()
	return newEngineOn(t, openGround(t, *flagDevice), g, o, streams, in)
}

// newEngineOn is newPlaguedEngine on a device.
func newEngineOn(t testing.TB, on *ground, g *kv.Geometry, o Options, streams bool, in *devicetest.Injector) *engine {
	t.Helper()
	e := &engine{t: t, g: on, dev: on.dev, size: g.PageSize(), in: in, failed: in != nil}
	e.cache = must(kv.NewCache(g, e.dev))(t)
	for l := range g.Layers() {
		e.layers = append(e.layers, must(g.Layer(l))(t))
	}
	if g.Layers() > 0 {
		e.row = int(g.PageBytes()) / g.Layers() / e.size
	}
	o.Cache, o.Device, o.Host = e.cache, e.dev, on.host
	if o.Copier == nil {
		o.Copier = on.copier
	}
	if in != nil {
		o.Device, o.Copier = on.plagued(in), copiertest.Inject(copier.NewPortable(), in)
	}
	if streams {
		e.compute = must(e.dev.NewStream("compute"))(t)
		o.Compute = e.compute
	}
	e.m = must(Open(o))(t)
	noError(t, e.m.Ready().Wait(t.Context()))
	t.Cleanup(e.close)
	return e
}

func (e *engine) close() {
	e.t.Helper()
	if err := e.m.Close(context.Background()); err != nil && !errors.Is(err, fault.Closed) && (!e.failed || !errors.Is(err, fault.Device)) {
		e.t.Error(err)
	}
	if e.compute != nil {
		if err := e.compute.Close(); err != nil && !e.failed {
			e.t.Error(err)
		}
	}
	if err := e.cache.Close(); err != nil {
		e.t.Error(err)
	}
}

// hold holds s back until release is called, or the test ends.
func (e *engine) hold(s device.Stream) (release func()) {
	release = e.g.hold(s)
	e.t.Cleanup(release) // runs before close, which waits for s
	return release
}

// check verifies the conservation of pages.
func (e *engine) check() {
	e.t.Helper()
	noError(e.t, e.m.Check())
}

// evict makes the store give up n device pages.
func (e *engine) evict(n int) {
	e.t.Helper()
	equal(e.t, "evicted", must(e.m.store.Evict(e.t.Context(), n))(e.t), n)
}

// run is one sequence as the engine sees it.
type run struct {
	e      *engine
	s      *Sequence
	tokens []uint32 // the prompt, and what decoding will make of it
	trail  []uint64 // by token: a hash of all tokens up to it
	keys   int
	prompt int
	stored int
	adm    Admission
}

// ingest makes a sequence whose prompt is the first n of tokens, all whole pages
// with keys.
func (e *engine) ingest(name string, tokens []uint32, n int) (*run, error) {
	keys := prefix.AppendChain(nil, root, tokens[:n], e.size)
	s, err := e.m.Ingest(ID{Request: name}, Prompt{Tokens: n, Keys: keys})
	return &run{e: e, s: s, tokens: tokens, trail: trailOf(tokens), keys: len(keys), prompt: n}, err
}

// trailOf hashes every prefix of tokens.
func trailOf(tokens []uint32) []uint64 {
	trail, h := make([]uint64, len(tokens)), uint64(0)
	for i, token := range tokens {
		h = mix(h ^ uint64(token)<<17 ^ uint64(i))
		trail[i] = h
	}
	return trail
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// match is Sequence.Match.
func (r *run) match() (Matched, error) { return r.s.Match() }

// admit admits the tokens up to end, and waits for the prefix when nobody else does.
func (r *run) admit(ctx context.Context, end int) error {
	base := r.stored
	if r.s.matched {
		base = len(r.s.lease.Refs) * r.e.size
	}
	adm, err := r.s.Admit(ctx, end-base)
	if err != nil {
		return err
	}
	r.adm, r.stored = adm, adm.Stored
	return r.arrive(ctx, adm)
}

// reload brings an offloaded sequence back, and waits for it when nobody else does.
func (r *run) reload(ctx context.Context) (Reloaded, error) {
	back, err := r.s.Reload(ctx)
	if err != nil {
		return back, err
	}
	r.adm = back.Admission
	return back, r.arrive(ctx, back.Admission)
}

func (r *run) arrive(ctx context.Context, adm Admission) error {
	r.e.mu.Lock()
	r.e.loads = append(r.e.loads, adm.tickets...)
	r.e.mu.Unlock()
	if r.e.compute == nil {
		return adm.Wait(ctx)
	}
	return nil
}

// settle waits for every page that is on its way to the device, and says whether any
// did not arrive.
func (e *engine) settle() (err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, load := range e.loads {
		err = errors.Join(err, load.Wait(context.Background()))
	}
	e.loads = e.loads[:0]
	return err
}

// commit writes the tokens up to end and commits them.
func (r *run) commit(end int) error {
	if err := r.write(r.stored, end); err != nil {
		return err
	}
	if err := r.s.Commit(max(0, end-r.stored)); err != nil {
		return err
	}
	r.stored = max(r.stored, end)
	return nil
}

// extend gives keys to all whole pages of the admitted tokens.
func (r *run) extend() error {
	keys := prefix.AppendChain(nil, root, r.tokens[:r.adm.Tokens], r.e.size)
	if len(keys) <= r.keys {
		return nil
	}
	err := r.s.Extend(keys[r.keys:]...)
	r.keys = len(keys)
	return err
}

func (r *run) reset(free bool) error {
	r.stored, r.keys, r.adm = 0, r.prompt/r.e.size, Admission{}
	return r.s.Reset(free)
}

// serve takes a prompt of all tokens through its life, up to Commit.
func (e *engine) serve(name string, tokens []uint32) *run {
	e.t.Helper()
	r := must(e.ingest(name, tokens, len(tokens)))(e.t)
	must(r.match())(e.t)
	noError(e.t, r.admit(e.t.Context(), len(tokens)))
	noError(e.t, r.commit(len(tokens)))
	return r
}

// store serves tokens and removes the sequence: its whole pages stay in the store.
func (e *engine) store(tokens []uint32) {
	e.t.Helper()
	noError(e.t, e.serve("stored before", tokens).s.Remove())
}

// verified fails the test when a stored token of r has a wrong byte.
func (r *run) verified() {
	r.e.t.Helper()
	noError(r.e.t, r.verify())
}

// verify reads all stored tokens and compares every byte.
func (r *run) verify() error {
	for l := range r.e.layers {
		got, err := r.read(l, r.stored)
		if err != nil {
			return err
		}
		want := wanted(r.trail[:r.stored], l, r.e.row)
		if len(got) != len(want) {
			return fmt.Errorf("%v: layer %d: %d bytes, want %d", r.s.ID(), l, len(got), len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				return fmt.Errorf("%v: wrong byte: layer %d, token %d, byte %d: %#x, want %#x", r.s.ID(), l, i/r.e.row, i%r.e.row, got[i], want[i])
			}
		}
	}
	return nil
}

// wanted is what the tokens of trail look like in one layer.
func wanted(trail []uint64, layer, row int) []byte {
	b := make([]byte, 0, len(trail)*row+8)
	for i, h := range trail {
		for j := 0; j < row; j += 8 {
			b = binary.LittleEndian.AppendUint64(b, mix(h^uint64(layer)<<40^uint64(j)<<50))
		}
		b = b[:(i+1)*row]
	}
	return b
}

// stretch is contiguous bytes of one token in one layer.
type stretch struct {
	region     int
	off        int64
	logical, n int // of the token's row
}

// stretches says where token t of the sequence on pages lies in a layer.
func (e *engine) stretches(dst []stretch, pages []page.ID, layer, t int) []stretch {
	l, g := &e.layers[layer], e.cache.Geometry()
	id, slot := int64(pages[t/e.size]), int64(t%e.size)
	element := int(g.DType().Bytes(1)) // no 4-bit type here
	at := 0
	for i := range l.Planes {
		p := &l.Planes[i]
		off := p.Offset + id*p.PageStride + slot*p.TokenStride
		heads, n := 1, l.Heads*l.Dim*element
		if g.Layout() == kv.HND {
			heads, n = l.Heads, l.Dim*element
		}
		for h := range heads {
			dst = append(dst, stretch{p.Region, off + int64(h)*p.HeadStride, at, n})
			at += n
		}
	}
	return dst
}

// write computes tokens from to end.
func (r *run) write(from, end int) error {
	e, pages := r.e, r.s.Pages(nil)
	for l := range e.layers {
		var ops []device.Op
		rows := wanted(r.trail[min(from, end):end], l, e.row)
		if e.compute == nil && e.g.acc != nil {
			if err := r.writeTokens(l, from, end, rows); err != nil {
				return err
			}
			continue
		}
		staged, off, free := e.g.stage(rows)
		for t := from; t < end; t++ {
			for _, x := range e.stretches(nil, pages, l, t) {
				region, err := e.cache.Region(x.region)
				if err != nil {
					return err
				}
				src := (t-from)*e.row + x.logical
				if e.compute == nil {
					copy(region.Bytes()[x.off:x.off+int64(x.n)], rows[src:])
					continue
				}
				ops = append(ops, device.Op{Dst: region, DstOff: x.off, Src: staged, SrcOff: off + int64(src), Bytes: int64(x.n)})
			}
		}
		if e.compute == nil || len(ops) == 0 {
			free.Complete(nil)
			continue
		}
		if err := e.compute.Copy(ops); err != nil {
			return err
		}
		if err := e.compute.Signal(free); err != nil {
			return err
		}
	}
	return nil
}

// writeTokens is write for one layer, into memory that the host can't address.
func (r *run) writeTokens(layer, from, end int, rows []byte) error {
	c := r.e.cache
	k, v := kv.Rows{DType: c.DType(), Data: rows}, kv.Rows{DType: c.DType()}
	if c.Layout() != kv.MLA {
		k.Data = nil
		for row := range slices.Chunk(rows, r.e.row) {
			k.Data, v.Data = append(k.Data, row[:len(row)/2]...), append(v.Data, row[len(row)/2:]...)
		}
	}
	pages, slots := r.slots(from, end)
	return c.WriteTokens(layer, k, v, pages, slots)
}

// slots are those of tokens from to end.
func (r *run) slots(from, end int) (pages []page.ID, slots []int32) {
	own := r.s.Pages(nil)
	for t := from; t < end; t++ {
		pages, slots = append(pages, own[t/r.e.size]), append(slots, int32(t%r.e.size))
	}
	return pages, slots
}

// read returns what the first n tokens look like in one layer.
func (r *run) read(layer, n int) ([]byte, error) {
	if r.e.compute != nil {
		wait, err := r.readLater(layer, n)
		if err != nil {
			return nil, err
		}
		return wait()
	}
	pages, slots := r.slots(0, n)
	return r.e.cache.ReadTokens(nil, layer, pages, slots)
}

// readLater enqueues the read on the compute stream; wait returns what was read.
func (r *run) readLater(layer, n int) (wait func() ([]byte, error), err error) {
	e, pages := r.e, r.s.Pages(nil)
	got := make([]byte, n*e.row)
	dst, from, free := e.g.stage(got)
	var ops []device.Op
	for t := range n {
		for _, x := range e.stretches(nil, pages, layer, t) {
			region, err := e.cache.Region(x.region)
			if err != nil {
				return nil, err
			}
			ops = append(ops, device.Op{Dst: dst, DstOff: from + int64(t*e.row+x.logical), Src: region, SrcOff: x.off, Bytes: int64(x.n)})
		}
	}
	if err := e.compute.Copy(ops); err != nil {
		return nil, err
	}
	return func() ([]byte, error) {
		err := e.compute.Sync(context.Background())
		copy(got, dst.Bytes()[from:])
		free.Complete(nil)
		return got, err
	}, nil
}

// hostPage finds the host page that holds page i of r's prompt.
func (r *run) hostPage(i int) page.ID {
	r.e.t.Helper()
	c, size := r.e.m.Pool().Cache(), r.e.size
	slots := make([]int32, size)
	for t := range slots {
		slots[t] = int32(t)
	}
	for id := range page.ID(r.e.m.Pool().Pages()) {
		got := must(c.ReadTokens(nil, 0, slices.Repeat([]page.ID{id}, size), slots))(r.e.t)
		if bytes.Equal(got, wanted(r.trail[i*size:(i+1)*size], 0, r.e.row)) {
			return id
		}
	}
	r.e.t.Fatalf("page %d of %v is on no host page", i, r.s.ID())
	return page.None
}

// text makes n tokens; the first shared of them are the same for every seed.
func text(seed uint32, shared, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
		if i >= shared {
			tokens[i] = seed<<16 | uint32(i)
		}
	}
	return tokens
}

// geometry makes a layer-major geometry of c.
func geometry(t testing.TB, c kv.Config) *kv.Geometry {
	t.Helper()
	return must(c.LayerMajor())(t)
}

// withPages is shape with another number of pages.
func withPages(n int) kv.Config {
	c := shape
	c.Pages = n
	return c
}
