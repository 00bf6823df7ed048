package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/replay"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
	"github.com/kvferry/kvferry/store"
)

// prefixPages is the length of the prefixes that the store is asked for.
const prefixPages = 24

// Store measures the books: look-ups in a whole replay without bytes, keys
// included, the calls of the store one by one, and apart from them what the keys
// cost. Kinds: those of replay.Run; or ctx's error.
func Store(ctx context.Context, o Options) (*Report, error) {
	o, err := o.check()
	if err != nil {
		return nil, err
	}
	r := newReport("store", o)
	r.legend = "Pages have no bytes here: this is what the books cost."
	r.Settings = append(r.Settings,
		Setting{"tiers", fmt.Sprintf("%d device pages, %d host pages", o.DevicePages, o.HostPages)})
	return r, o.measured(r, func() error {
		lookups, trace, err := lookups(ctx, o)
		if err != nil {
			return err
		}
		r.Settings = append(r.Settings, Setting{"trace", trace})
		calls, err := calls(ctx, o)
		if err != nil {
			return err
		}
		keys, err := keyCosts(ctx, o)
		if err != nil {
			return err
		}
		r.Sections = append(r.Sections, lookups, calls, keys)
		return nil
	})
}

// lookups serves a trace as replay --bookkeeping does: each request's pages are
// matched, the rest put, and evicted when there is no room.
func lookups(ctx context.Context, o Options) (out Section, about string, err error) {
	out = Section{Title: "match, put and evict for the requests of a trace, keys included", Unit: "look-ups a second"}
	var t *replay.Trace
	if o.Trace == "" {
		t = replay.Generate(o.Seed, o.Requests)
	} else if t, err = replay.Open(o.Trace, o.Requests); err != nil {
		return out, "", err
	}
	if err := replay.CheckFits(t, replay.IDTokens, o.DevicePages); err != nil {
		return out, "", err
	}
	g, err := kv.Config{Pages: o.DevicePages + 1, PageSize: replay.IDTokens, Sink: true}.LayerMajor()
	if err != nil {
		return out, "", err
	}
	host, err := o.openHost()
	if err != nil {
		return out, "", err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	cache, err := kv.NewCache(g, host)
	if err != nil {
		return out, "", err
	}
	defer func() { err = errors.Join(err, cache.Close()) }()

	// Every run begins with empty tiers; making and closing them is not timed.
	s := server{trace: t, options: kvferry.Options{Cache: cache, Device: host, HostPages: o.HostPages}}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.renew(); err != nil {
		return out, "", err
	}
	seconds, err := o.interleave(ctx, []contestant{{run: func() error { return s.serve(ctx) }, after: s.renew}})
	if err != nil {
		return out, "", err
	}
	rate := func(seconds float64) float64 { return float64(s.looked) / seconds }
	l := newLine("requests of the trace", statOf(each(seconds[0][0], rate)), map[string]any{
		"device_pages": o.DevicePages, "host_pages": o.HostPages, "looked_up": s.looked, "hit": s.hit,
	})
	l.atLeast("", 2e6)
	out.Lines = append(out.Lines, l)
	return out, fmt.Sprintf("%s, %d requests, %d pages looked up, %d hit", t.Name, len(t.Requests), s.looked, s.hit), nil
}

// server serves the requests of a trace, one at a time.
type server struct {
	trace       *replay.Trace
	options     kvferry.Options
	manager     *kvferry.Manager
	looked, hit int // in one go through the trace
	keys        []page.Key
}

func (s *server) renew() (err error) {
	if err := s.close(); err != nil {
		return err
	}
	s.manager, err = kvferry.Open(s.options)
	return err
}

func (s *server) close() error {
	m := s.manager
	if m == nil {
		return nil
	}
	s.manager = nil
	return m.Close(context.Background())
}

func (s *server) serve(ctx context.Context) error {
	s.looked, s.hit = 0, 0
	for i := range s.trace.Requests {
		if err := s.request(ctx, i); err != nil {
			return fmt.Errorf("%s: %w", s.trace.Where(i), err)
		}
	}
	return nil
}

func (s *server) request(ctx context.Context, i int) error {
	r := &s.trace.Requests[i]
	s.keys = replay.AppendKeys(s.keys[:0], page.Key{}, r, replay.IDTokens)
	seq, err := s.manager.Ingest(kvferry.ID{Request: strconv.Itoa(i)}, kvferry.Prompt{Tokens: r.Input, Keys: s.keys})
	if err != nil {
		return err
	}
	match, err := seq.Match()
	if err != nil {
		return err
	}
	needed, _ := replay.Pages(r.Input, replay.IDTokens)
	s.looked, s.hit = s.looked+needed, s.hit+match.Pages
	span := r.Input - match.Tokens
	admitted, err := seq.Admit(ctx, span)
	if err == nil {
		err = admitted.Wait(ctx)
	}
	if err == nil {
		err = seq.Commit(span)
	}
	return errors.Join(err, seq.Remove())
}

// books are a store over pages without bytes.
type books struct {
	host  *device.Host
	cache *kv.Cache
	pool  *hostpool.Pool
	arena *page.Arena
	store *store.Store

	match store.Match
	refs  []store.Ref
	fresh []page.ID
	load  store.Loaded
}

func (o Options) openBooks() (b *books, err error) {
	b = &books{}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	g, err := kv.Config{Pages: o.DevicePages, PageSize: replay.IDTokens}.LayerMajor()
	if err != nil {
		return b, err
	}
	if b.host, err = o.openHost(); err != nil {
		return b, err
	}
	if b.cache, err = kv.NewCache(g, b.host); err != nil {
		return b, err
	}
	if b.pool, err = hostpool.Open(hostpool.Options{Cache: b.cache, Pages: o.HostPages, Host: b.host}); err != nil {
		return b, err
	}
	if b.arena, err = page.NewArena(page.ArenaOptions{Pages: o.DevicePages}); err != nil {
		return b, err
	}
	b.store, err = store.Open(store.Options{Cache: b.cache, Arena: b.arena, Pool: b.pool})
	return b, err
}

func (b *books) close() error {
	var errs []error
	if b.store != nil {
		errs = append(errs, b.store.Close(context.Background()))
	}
	if b.pool != nil {
		errs = append(errs, b.pool.Close())
	}
	if b.cache != nil {
		errs = append(errs, b.cache.Close())
	}
	if b.host != nil {
		errs = append(errs, b.host.Close())
	}
	return errors.Join(errs...)
}

// acquire takes n device pages, demoting others if it must.
func (b *books) acquire(ctx context.Context, n int) (err error) {
	b.fresh, err = b.arena.Acquire(b.fresh[:0], n)
	var full *page.FullError
	if !errors.As(err, &full) {
		return err
	}
	if _, err := b.store.Evict(ctx, full.Shortfall()); err != nil {
		return err
	}
	b.fresh, err = b.arena.Acquire(b.fresh[:0], n)
	return err
}

// put stores keys, each on a page of its own, and lets go of them.
func (b *books) put(ctx context.Context, keys []page.Key) (err error) {
	if err = b.acquire(ctx, len(keys)); err != nil {
		return err
	}
	if b.refs, err = b.store.Reserve(b.refs[:0], keys); err != nil {
		return err
	}
	if err = b.store.Commit(b.refs, b.fresh); err != nil {
		return err
	}
	b.store.Unpin(b.refs)
	_, err = b.arena.Release(b.fresh)
	return err
}

// get matches keys, all of which are stored, brings them to the device, and lets go
// of them.
func (b *books) get(ctx context.Context, keys []page.Key) error {
	if err := b.find(keys); err != nil {
		return err
	}
	missing := b.store.Missing(b.match.Refs)
	if err := b.acquire(ctx, missing); err != nil {
		return err
	}
	if err := b.store.Load(b.match.Refs, b.fresh, &b.load); err != nil {
		return err
	}
	for _, t := range b.load.Tickets {
		if err := t.Wait(ctx); err != nil {
			return err
		}
	}
	b.store.Unpin(b.match.Refs)
	_, err := b.arena.Release(b.load.Pages)
	return err
}

// find matches keys and keeps the pins.
func (b *books) find(keys []page.Key) error {
	if err := b.store.Match(keys, len(keys), &b.match); err != nil {
		return err
	}
	if len(b.match.Refs) != len(keys) {
		return fault.New(fault.NotFound, "bench", "%d of %d stored pages were matched", len(b.match.Refs), len(keys)).
			Hint("this is a bug in kvferry: please report it with the command line")
	}
	return nil
}

// chains returns n chains of keys with nothing in common.
func chains(n int, seed uint64) [][]page.Key {
	all := make([][]page.Key, n)
	for i := range all {
		key := prefix.Fingerprint([]byte("kvferry bench"))
		key = prefix.NextID(key, seed)
		for k := range prefixPages {
			key = prefix.NextID(key, uint64(i*prefixPages+k))
			all[i] = append(all[i], key)
		}
	}
	return all
}

// calls measures the calls of the store one by one, on prefixes of prefixPages
// pages. A put demotes as many pages as it stores, and so evicts as many from the
// host; a get from the host demotes as many as it promotes.
func calls(ctx context.Context, o Options) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("calls of the store on %d pages of one prefix, in full tiers", prefixPages), Unit: "ns a page"}
	b, err := o.openBooks()
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, b.close()) }()

	loops := (o.DevicePages + o.HostPages) / prefixPages / 2 // prefixes of one run: half of what the tiers hold
	all := chains((o.Runs+warmUps+4)*loops, o.Seed)
	for _, keys := range all[:3*loops] { // more than both tiers hold
		if err := b.put(ctx, keys); err != nil {
			return out, err
		}
	}
	stored, next := 2*loops, 3*loops
	absent := chains(loops, o.Seed+1)
	rng := rand.New(rand.NewPCG(o.Seed, 4))

	put := func() error {
		for range loops {
			if err := b.put(ctx, all[next]); err != nil {
				return err
			}
			next++
		}
		stored = next - loops
		return nil
	}
	get := func() error {
		for i := range loops {
			if err := b.get(ctx, all[stored+i]); err != nil {
				return err
			}
		}
		return nil
	}
	recent := func() []page.Key { return all[next-1-rng.IntN(max(1, loops/4))] }
	match := func() error {
		for range loops {
			if err := b.find(recent()); err != nil {
				return err
			}
			b.store.Unpin(b.match.Refs)
		}
		return nil
	}
	miss := func() error {
		for _, keys := range absent {
			if err := b.store.Match(keys, len(keys), &b.match); err != nil {
				return err
			}
			b.store.Unpin(b.match.Refs)
		}
		return nil
	}
	seconds, err := o.interleave(ctx, []contestant{{run: put}, {run: get}, {run: match}, {run: miss}})
	if err != nil {
		return out, err
	}
	for i, name := range []string{"put, demote and evict", "get: match, promote, demote", "match and unpin, hit", "match, never stored"} {
		out.Lines = append(out.Lines, newLine(name, statOf(each(seconds[0][i], nanos(loops*prefixPages))), map[string]any{"pages": prefixPages}))
	}
	return out, nil
}

// keyCosts measures the hashes that name pages: of ids, as a trace has them, and of
// real tokens.
func keyCosts(ctx context.Context, o Options) (Section, error) {
	out := Section{Title: "keys", Unit: "ns a page"}
	const ids, tokens = 20_000, 1 << 17
	rng := rand.New(rand.NewPCG(o.Seed, 5))
	prompt := make([]uint32, tokens)
	for i := range prompt {
		prompt[i] = rng.Uint32N(128_256)
	}
	var keys []page.Key
	chain := func(size int) contestant {
		return contestant{run: func() error {
			keys = prefix.AppendChain(keys[:0], page.Key{}, prompt, size)
			return nil
		}}
	}
	seconds, err := o.interleave(ctx, []contestant{
		{run: func() error {
			var key page.Key
			for i := range uint64(ids) {
				key = prefix.NextID(key, i)
			}
			keys = append(keys[:0], key)
			return nil
		}},
		chain(16), chain(512),
	})
	if err != nil {
		return out, err
	}
	for i, l := range []struct {
		name  string
		pages int
	}{{"of an id of a trace", ids}, {"of 16 tokens", tokens / 16}, {"of 512 tokens", tokens / 512}} {
		out.Lines = append(out.Lines, newLine(l.name, statOf(each(seconds[0][i], nanos(l.pages))), map[string]any{"pages": l.pages}))
	}
	return out, nil
}
