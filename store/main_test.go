package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ended is a context that ended before: calls enqueue, and do not wait.
func ended() context.Context {
	ctx, end := context.WithCancel(context.Background())
	end()
	return ctx
}

// setup says what a rig is made of.
type setup struct {
	checks            hostpool.Checks
	scrubAfter        time.Duration
	device, host      int  // pages; no pool without host pages
	bytes             bool // pages have bytes
	inclusive         bool
	through           bool // write through
	compute           bool // give the store the compute stream
	history, jobPages int
	copier            copier.Copier
}

// rig is a store with its tiers, and an engine that uses it. When the test ends
// it closes them; that fails if anything is still in use, or if the store's books
// disagreed.
type rig struct {
	testing.TB
	setup
	dev      *device.Host
	cache    *kv.Cache
	arena    *page.Arena
	pool     *hostpool.Pool
	copies   device.Stream
	compute  device.Stream // the engine's; the store knows of it if setup.compute
	store    *Store
	mu       sync.Mutex
	names    map[page.Key]string // guarded by mu
	complain strings.Builder     // what the store logged
}

func newRig(t testing.TB, o setup) *rig {
	t.Helper()
	r := &rig{TB: t, setup: o, names: map[page.Key]string{}}
	c := kv.Config{Pages: o.device, PageSize: 4}
	if o.bytes {
		c.Layout, c.DType, c.Layers, c.KVHeads, c.HeadDim = kv.NHD, kv.FP8, 2, 1, 8 // 128 bytes a page
	}
	g, err := c.PageMajor()
	noError(t, err)
	r.dev, err = device.OpenHost(device.HostOptions{})
	noError(t, err)
	t.Cleanup(func() { noError(t, r.dev.Close()) })
	r.cache, err = kv.NewCache(g, r.dev)
	noError(t, err)
	t.Cleanup(func() { noError(t, r.cache.Close()) })
	r.arena, err = page.NewArena(page.ArenaOptions{Pages: o.device})
	noError(t, err)
	r.copies, r.compute = r.stream("copies"), r.stream("compute")
	if o.host > 0 {
		pool := hostpool.Options{Cache: r.cache, Pages: o.host, Host: r.dev, Copier: o.copier, Checks: o.checks}
		if o.compute {
			pool.Compute = r.compute
		}
		r.pool, err = hostpool.Open(pool)
		noError(t, err)
		t.Cleanup(func() {
			_ = r.copies.Close() // a failed stream's queue may still name the pool's memory
			noError(t, r.pool.Check())
			noError(t, r.pool.Close())
		})
		noError(t, r.pool.Grown().Wait(context.Background()))
	}
	options := Options{
		Cache: r.cache, Arena: r.arena, Pool: r.pool, Copies: r.copies, Inclusive: o.inclusive, WriteThrough: o.through,
		History: o.history, ScrubAfter: o.scrubAfter, JobPages: o.jobPages, Logger: slog.New(slog.NewTextHandler(&r.complain, nil)),
	}
	r.store, err = Open(options)
	noError(t, err)
	t.Cleanup(func() {
		if err := r.store.Close(context.Background()); err != nil && !errors.Is(err, fault.Closed) {
			t.Error(err)
		}
		if r.pool != nil && r.pool.NumFree() != o.host {
			t.Errorf("%d of %d host pages are free after Close", r.pool.NumFree(), o.host)
		}
		noError(t, r.arena.Check(nil))
		if strings.Contains(r.complain.String(), "books disagree") {
			t.Error(r.complain.String())
		}
	})
	return r
}

func (r *rig) stream(name string) device.Stream {
	s, err := r.dev.NewStream(name)
	noError(r, err)
	r.Cleanup(func() { _ = s.Close() }) // a failed stream says so again
	return s
}

// hold holds a stream back until release, or the end of the test at the latest.
func (r *rig) hold(s device.Stream) (release func()) {
	release = r.dev.Hold(s)
	r.Cleanup(release)
	return release
}

// key is the key of the last page of path, a byte for each page: it covers the
// path as a chained hash would.
func (r *rig) key(path string) page.Key {
	k := page.Key(sha256.Sum256([]byte(path)))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[k] = path
	return k
}

// keys are the keys of the pages of path, root first.
func (r *rig) keys(path string) (keys []page.Key) {
	for i := range path {
		keys = append(keys, r.key(path[:i+1]))
	}
	return keys
}

// contents is what a page of that key holds.
func (r *rig) contents(k page.Key) []byte {
	b := make([]byte, r.cache.Geometry().PageBytes())
	rng := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(k[:]), binary.LittleEndian.Uint64(k[8:])))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func (r *rig) bytesOf(id page.ID) []byte {
	b, err := r.cache.Page(id)
	noError(r, err)
	return b
}

// write is the engine's: at once, or on its stream when the store knows of it.
func (r *rig) write(id page.ID, k page.Key) {
	if !r.bytes {
		return
	}
	if r.setup.compute {
		r.enqueueWrite(id, k)
		return
	}
	copy(r.bytesOf(id), r.contents(k))
}

func (r *rig) pageMemory(id page.ID) (mem *device.Memory, off, n int64) {
	mem, err := r.cache.Region(0)
	noError(r, err)
	n = r.cache.Geometry().PageBytes()
	return mem, int64(id) * n, n
}

func (r *rig) enqueueWrite(id page.ID, k page.Key) {
	mem, off, n := r.pageMemory(id)
	noError(r, r.compute.Copy([]device.Op{{Dst: mem, DstOff: off, Src: device.WrapHost(r.contents(k)), Bytes: n}}))
}

// enqueueRead reads a page on the engine's stream. The answer is good once that
// stream has come so far.
func (r *rig) enqueueRead(id page.ID) []byte {
	mem, off, n := r.pageMemory(id)
	b := make([]byte, n)
	noError(r, r.compute.Copy([]device.Op{{Dst: device.WrapHost(b), Src: mem, SrcOff: off, Bytes: n}}))
	return b
}

// holds reports whether a device page has the bytes of k, as the engine sees them.
func (r *rig) holds(id page.ID, k page.Key) bool {
	if !r.bytes {
		return true
	}
	got := r.bytesOf(id)
	if r.setup.compute {
		got = r.enqueueRead(id)
		noError(r, r.compute.Sync(context.Background()))
	}
	return bytes.Equal(got, r.contents(k))
}

// acquire gets n device pages, evicting as need be.
func (r *rig) acquire(n int) ([]page.ID, error) {
	for {
		ids, err := r.arena.Acquire(nil, n)
		var full *page.FullError
		if !errors.As(err, &full) {
			return ids, err
		}
		if _, err := r.store.Evict(context.Background(), full.Shortfall()); err != nil {
			return nil, err
		}
	}
}

// use is one use of a path by the engine: pins, and pages of its own.
type use struct {
	path    string
	keys    []page.Key
	refs    []Ref     // pinned
	pages   []page.ID // owned: the pages of keys, then spare ones
	answers []Answer
	tickets []*device.Ticket
	hits    int
}

// begin matches path and loads what is stored of it.
func (r *rig) begin(path string) (*use, error) {
	u := &use{path: path, keys: r.keys(path)}
	var m Match
	if err := r.store.Match(u.keys, len(u.keys), &m); err != nil {
		return nil, err
	}
	u.refs, u.answers, u.hits = m.Refs, m.Answers, len(m.Refs)
	fresh, err := r.acquire(r.store.Missing(m.Refs))
	if err == nil {
		var l Loaded
		if err = r.store.Load(m.Refs, fresh, &l); err == nil {
			u.pages, u.tickets = l.Pages, l.Tickets
			fresh = fresh[l.Used:]
		}
		_, releaseErr := r.arena.Release(fresh)
		err = errors.Join(err, releaseErr)
	}
	if err != nil {
		r.store.Unpin(m.Refs)
		return nil, err
	}
	return u, nil
}

// verify waits for the use's pages and looks at the bytes of all of them.
func (r *rig) verify(u *use) error {
	if !r.setup.compute {
		for _, t := range u.tickets {
			if err := t.Wait(context.Background()); err != nil {
				return err
			}
		}
	}
	for i, k := range u.keys[:min(len(u.keys), len(u.pages))] {
		if !r.holds(u.pages[i], k) {
			err := fmt.Errorf("device page %d does not hold the bytes of %q", u.pages[i], u.path[:i+1])
			if i < len(u.refs) && u.refs[i] != NoRef {
				err = fmt.Errorf("%w: %s", err, r.store.History(u.refs[i]))
			}
			return err
		}
	}
	return nil
}

// commit computes the pages of u that were not stored, and commits them.
func (r *rig) commit(u *use) error {
	fresh, err := r.acquire(len(u.keys) - u.hits)
	if err != nil {
		return err
	}
	for i, id := range fresh {
		r.write(id, u.keys[u.hits+i])
	}
	u.pages = append(u.pages, fresh...) // after an error too
	refs, err := r.store.Reserve(nil, u.keys[u.hits:])
	if err != nil {
		return err
	}
	if err := r.store.Commit(refs, fresh); err != nil {
		r.store.Abandon(refs)
		return err
	}
	u.refs = append(u.refs, refs...)
	return nil
}

// end gives everything back, pages first: see the package comment on owners.
func (r *rig) end(u *use) {
	r.Helper()
	_, err := r.arena.Release(u.pages)
	noError(r, err)
	r.store.Unpin(u.refs)
}

// put is a whole use of path, the pages of which are in use until end.
func (r *rig) put(path string) *use {
	r.Helper()
	u, err := r.begin(path)
	noError(r, err)
	noError(r, r.commit(u))
	return u
}

// fill puts paths that nobody uses any more, the first the oldest.
func (r *rig) fill(paths ...string) {
	r.Helper()
	for _, p := range paths {
		r.end(r.put(p))
	}
}

func (r *rig) match(path string) *Match {
	r.Helper()
	var m Match
	noError(r, r.store.Match(r.keys(path), len(path), &m))
	return &m
}

func (r *rig) evict(n int) {
	r.Helper()
	freed, err := r.store.Evict(context.Background(), n)
	noError(r, err)
	if freed != n {
		r.Fatalf("%d pages freed, want %d", freed, n)
	}
}

// settled waits for every copy enqueued so far.
func (r *rig) settled() {
	r.store.mu.Lock()
	j := r.store.latest
	r.store.mu.Unlock()
	if j != nil {
		_ = j.done.Wait(context.Background())
	}
}

// where says where each page of path is, or why not.
func (r *rig) where(path string) string {
	var words []string
	for _, a := range r.store.Why(nil, r.keys(path), len(path)) {
		words = append(words, a.word())
	}
	return strings.Join(words, ", ")
}

func (a Answer) word() string {
	if a.Reason == fault.Hit {
		return a.Tier.String()
	}
	return a.Reason.String()
}

func (r *rig) wantWhere(path, want string) {
	r.Helper()
	if got := r.where(path); got != want {
		r.Errorf("pages of %q: %s; want %s", path, got, want)
	}
}

// check verifies all books at once. held says how many owners of each device page
// are the engine.
func (r *rig) check(held map[page.ID]int) error {
	s := r.store
	s.mu.Lock()
	owners, onHost, claimed := map[page.ID]int{}, 0, 0
	for i := range s.entries {
		e := &s.entries[i]
		if e.state != kept {
			continue
		}
		if e.part.device != page.None {
			owners[e.part.device]++
		}
		if e.part.host != page.None {
			onHost++
		} else if j := e.part.flight; j != nil && j.kind != promotion {
			claimed++
		}
	}
	err := r.arena.Check(func(id page.ID) int { return owners[id] + held[id] })
	if r.pool != nil {
		if free := r.pool.NumFree(); free+onHost+claimed != r.host {
			err = errors.Join(err, fmt.Errorf("%d host pages free, %d kept, %d claimed, %d in all", free, onHost, claimed, r.host))
		}
	}
	s.mu.Unlock()
	if r.pool != nil {
		err = errors.Join(err, r.pool.Check())
	}
	return errors.Join(err, s.Check())
}

func (r *rig) free(want int) {
	r.Helper()
	if got := r.arena.NumFree(); got != want {
		r.Errorf("%d device pages are free, want %d", got, want)
	}
}

func (r *rig) hostFree(want int) {
	r.Helper()
	if got := r.pool.NumFree(); got != want {
		r.Errorf("%d host pages are free, want %d", got, want)
	}
}
