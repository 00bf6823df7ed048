package kvferry

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

var (
	flagOps  = flag.Int("ops", 50_000, "operations of each of the metamorphic tests, over all configurations")
	flagSeed = flag.Uint64("seed", 1, "seed of the metamorphic tests")
)

// config is one way to set up a manager. What an engine can observe must be the
// same in all of them.
type config struct {
	name      string
	c         kv.Config // Pages are worked out from the operations
	make      func(kv.Config) (*kv.Geometry, error)
	host      int
	inclusive bool
	through   bool
	slack     int    // device pages more than the operations need at most
	streams   bool   // the engine works on Options.Compute and waits for nothing; streams are late
	device    string // "": that of the flag
}

func configs() []config {
	of := func(change func(c *kv.Config)) kv.Config {
		c := shape
		change(&c)
		return c
	}
	sized := func(n int) kv.Config { return of(func(c *kv.Config) { c.PageSize = n }) }
	hnd := of(func(c *kv.Config) { c.Layout, c.PageSize = kv.HND, 5 })
	mla := of(func(c *kv.Config) { c.Layout, c.KVHeads, c.HeadDim, c.LatentDim = kv.MLA, 0, 0, 16 })
	sink := of(func(c *kv.Config) { c.Sink, c.PageSize = true, 3 })
	half := of(func(c *kv.Config) { c.DType, c.KVHeads = kv.BF16, 1 })
	all := []config{
		{name: "reference", c: shape, make: kv.Config.LayerMajor, slack: 1000},
		{name: "no-host-pool", c: shape, make: kv.Config.LayerMajor},
		{name: "host-1", c: shape, make: kv.Config.PageMajor, host: 1},
		{name: "host-7-inclusive", c: shape, make: kv.Config.PerLayerKVFirst, host: 7, inclusive: true},
		{name: "host-64", c: shape, make: kv.Config.PerLayerPageFirst, host: 64},
		{name: "host-64-inclusive", c: half, make: kv.Config.LayerMajor, host: 64, inclusive: true, slack: 3},
		{name: "write-through", c: shape, make: kv.Config.LayerMajor, host: 64, through: true},
		{name: "write-through-host-7", c: sized(2), make: kv.Config.PageMajor, host: 7, through: true},
		{name: "page-size-1", c: sized(1), make: kv.Config.LayerMajor, host: 64},
		{name: "page-size-3-sink", c: sink, make: kv.Config.PageMajor, host: 7},
		{name: "page-size-16", c: sized(16), make: kv.Config.LayerMajor, host: 64, inclusive: true},
		{name: "page-size-64", c: sized(64), make: kv.Config.LayerMajor, host: 7},
		{name: "hnd", c: hnd, make: kv.Config.PerLayerPageFirst, host: 7},
		{name: "mla", c: mla, make: kv.Config.LayerMajor, host: 64, slack: 1},
		{name: "streams", c: shape, make: kv.Config.LayerMajor, host: 64, streams: true},
		{name: "streams-host-1", c: hnd, make: kv.Config.PageMajor, host: 1, streams: true},
		{name: "streams-no-host-pool", c: sized(2), make: kv.Config.PerLayerKVFirst, streams: true},
		{name: "streams-write-through", c: sized(2), make: kv.Config.LayerMajor, host: 64, through: true, streams: true},
		{name: "accelerator", c: shape, make: kv.Config.LayerMajor, host: 64, device: "random"},
		{name: "accelerator-streams", c: hnd, make: kv.Config.PerLayerKVFirst, host: 7, streams: true, device: "random"},
		{name: "accelerator-write-through", c: sized(2), make: kv.Config.LayerMajor, host: 64, through: true, streams: true, device: "lazy"},
		{name: "cuda", c: sized(16), make: kv.Config.LayerMajor, host: 64, device: "cuda"},
		{name: "cuda-streams", c: half, make: kv.Config.LayerMajor, host: 64, streams: true, device: "cuda"},
		{name: "hip-streams", c: mla, make: kv.Config.PageMajor, host: 7, streams: true, device: "hip"},
		{name: "streams-inclusive", c: mla, make: kv.Config.PageMajor, host: 7, inclusive: true, streams: true},
	}
	if strings.Contains(*flagDevice, ":") { // a real one: that, and no other
		all = slices.DeleteFunc(all, func(c config) bool { return c.device != "" })
	}
	return all
}

// open makes an engine with as many device pages as ops need. in is nil unless things
// are to go wrong.
func (c config) open(t *testing.T, ops []op, in *devicetest.Injector) *engine {
	t.Helper()
	c.c.Pages = devicePages(ops, c.c.PageSize) + c.slack
	if c.c.Sink {
		c.c.Pages++
	}
	o := Options{HostPages: c.host, Inclusive: c.inclusive, WriteThrough: c.through}
	return newEngineOn(t, openGround(t, cmp.Or(c.device, *flagDevice)), must(c.make(c.c))(t), o, c.streams, in)
}

// player does ops on one engine, beside the model.
type player struct {
	e       *engine
	m       model
	runs    [maxSequences]*run
	rng     *rand.Rand // decides only when streams are late: nothing that can be observed
	release func()     // of a stream held back
	seen    []uint64   // what was observed: a digest of all bytes for each verify
	still   bool       // nothing is summed but by calls that wait
	away    int        // how often a sequence was offloaded
	again   int        // how often a sequence was struck, and computed again
	after   func(i int, p *player)
}

// play does ops, checks the books after each, and compares every byte looked at. It
// returns what was observed.
func (p *player) play(ops []op) ([]uint64, error) {
	defer p.hurry()
	for i, o := range ops {
		if !p.m.legal(o) {
			return nil, fmt.Errorf("operation %d: %v: is not legal here", i, o)
		}
		p.flip()
		err := p.do(o)
		p.m.do(o, p.e.size)
		if p.e.in != nil && struck(err) {
			err = p.compute(o.seq)
		}
		if err = errors.Join(err, p.e.m.Check()); err != nil {
			return nil, fmt.Errorf("operation %d: %v: %w", i, o, err)
		}
		if p.after != nil {
			p.after(i, p)
		}
	}
	return p.seen, nil
}

func (p *player) do(o op) (err error) {
	ctx, r := p.e.t.Context(), p.runs[o.seq]
	switch o.verb {
	case doIngest:
		p.runs[o.seq], err = p.e.ingest(fmt.Sprint(o.seq), document(o.doc), o.tokens)
	case doMatch:
		var m Matched
		if m, err = r.match(); err == nil {
			err = p.answered(r, m)
		}
	case doAdmit:
		p.hurry()
		p.dawdle((o.tokens + p.e.size - 1) / p.e.size)
		if err = r.admit(ctx, o.tokens); errors.Is(err, fault.Full) && p.e.compute != nil {
			// Pages of removed sequences that are still arriving cannot go yet.
			if err = p.settle(); err == nil {
				err = r.admit(ctx, o.tokens)
			}
		}
	case doCommit:
		err = r.commit(o.tokens)
	case doExtend:
		err = r.extend()
	case doOffload:
		err = p.offload(r)
	case doReload:
		err = p.reload(r, p.m.seqs[o.seq])
	case doPosition:
		err = r.s.SetPosition(o.tokens, o.tokens/2)
	case doReset:
		err = r.reset(!o.keep)
		s := p.m.seqs[o.seq]
		r.tokens = spoken(s.doc, s.prompt, s.life+1)
		r.trail = trailOf(r.tokens)
	case doRemove:
		err = r.s.Remove()
	case doVerify:
		if err = p.settle(); err == nil && p.e.in != nil {
			if err = r.s.Commit(0); struck(err) { // its prefix has not arrived
				err = p.compute(o.seq)
			}
		}
		if err != nil {
			return err
		}
		var digest uint64
		if digest, err = r.digest(p.m.seqs[o.seq].committed); err == nil {
			p.seen = append(p.seen, digest)
			err = r.verify()
		}
	}
	return err
}

// answered checks that every keyed page of the prompt has one answer, and that the
// hits are the prefix.
func (p *player) answered(r *run, m Matched) error {
	if len(m.Answers) != r.prompt/p.e.size || m.Tokens != m.Pages*p.e.size || m.Tokens >= max(r.prompt, 1) {
		return fmt.Errorf("match of a prompt of %d tokens: %+v", r.prompt, m)
	}
	for i, a := range m.Answers {
		hit := i < m.Pages
		if hit != (a.Reason == fault.Hit) || hit == (a.Tier == store.Nowhere) {
			return fmt.Errorf("match of %d pages: answer %d is %+v", m.Pages, i, a)
		}
	}
	return nil
}

// offload suspends a sequence, if there is room: where there is none it stays.
func (p *player) offload(r *run) error {
	if err := p.settle(); err != nil {
		return err
	}
	was := r.s.IsOffloaded()
	_, err := r.s.Offload(p.e.t.Context())
	if err == nil && !was {
		p.away++
	}
	if is := r.s.IsOffloaded(); is != (err == nil || was) {
		return fmt.Errorf("offloaded: %v, after: %w", is, err)
	}
	if errors.Is(err, fault.Full) || errors.Is(err, fault.Unsupported) {
		return nil
	}
	return err
}

func (p *player) reload(r *run, s modelSequence) error {
	if !r.s.IsOffloaded() {
		return nil
	}
	p.hurry()
	pages := (s.committed + p.e.size - 1) / p.e.size
	p.dawdle(pages)
	back, err := r.reload(p.e.t.Context())
	if errors.Is(err, fault.Full) && p.e.compute != nil {
		if err = p.settle(); err == nil {
			back, err = r.reload(p.e.t.Context())
		}
	}
	if err != nil {
		return err
	}
	if len(back.Pages) != pages || back.StoredLen != s.committed || back.Position != s.position || back.Released != s.position/2 {
		return fmt.Errorf("reloaded %d tokens on %d pages, position %d, released %d; want %d, %d, %d, %d",
			back.StoredLen, len(back.Pages), back.Position, back.Released, s.committed, pages, s.position, s.position/2)
	}
	return nil
}

// dawdle holds the copies back, sometimes, unless somebody must wait for them now.
func (p *player) dawdle(pages int) {
	switch {
	case p.e.compute == nil || !p.e.g.holds() || p.e.in != nil || p.e.m.NumFree() < pages || p.rng.IntN(2) == 0:
	case p.e.m.Copies() != nil && p.rng.IntN(2) == 0:
		p.release = p.e.g.hold(p.e.m.Copies())
	default:
		p.release = p.e.g.hold(p.e.compute)
	}
}

func (p *player) hurry() {
	if p.release != nil {
		p.release()
		p.release = nil
	}
}

// settle waits for all that is on its way up. What does not arrive is told by the
// sequences that wanted it.
func (p *player) settle() error {
	p.hurry()
	if err := p.e.settle(); p.e.in == nil || !struck(err) {
		return err
	}
	return nil
}

// digest sums the bytes of the first n tokens as they are read, whatever is right.
func (r *run) digest(n int) (uint64, error) {
	h := fnv.New64a()
	for l := range r.e.layers {
		b, err := r.read(l, n)
		if err != nil {
			return 0, err
		}
		h.Write(b)
	}
	return h.Sum64(), nil
}

// expected is what every configuration must observe.
func expected(ops []op) []uint64 {
	var m model
	var seen []uint64
	for _, o := range ops {
		if s := m.seqs[o.seq]; o.verb == doVerify {
			h := fnv.New64a()
			for l := range shape.Layers {
				h.Write(wanted(trailOf(spoken(s.doc, s.prompt, s.life))[:s.committed], l, 2*shape.KVHeads*shape.HeadDim))
			}
			seen = append(seen, h.Sum64())
		}
		m.do(o, 1)
	}
	return seen
}

// TestMetamorphic plays the same random operations on managers of every kind.
//
//	go test . -run TestMetamorphic -seed=7 -ops=1000000
func TestMetamorphic(t *testing.T) {
	all := configs()
	ops := generate(rand.New(rand.NewPCG(*flagSeed, 0)), max(1, *flagOps/len(all)))
	want := expected(ops)
	var moved store.Stats
	played, away := 0, 0
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			e := c.open(t, ops, nil)
			p := &player{e: e, rng: rand.New(rand.NewPCG(*flagSeed, 1))}
			got, err := p.play(ops)
			if err == nil {
				err = same(got, want)
			}
			if err == nil {
				err = p.finish()
			}
			if err != nil {
				t.Fatalf("%v\nreplay it: go test . -run '%s' -seed=%d -ops=%d", err, "^TestMetamorphic$/^"+c.name+"$", *flagSeed, *flagOps)
			}
			played, away = played+1, away+p.away
			st := e.m.store.Stats()
			moved.Demoted += st.Demoted
			moved.Promoted += st.Promoted
			moved.EvictedHost += st.EvictedHost
			moved.DroppedCold += st.DroppedCold
			moved.Refused += st.Refused
			moved.Written += st.Written
			equal(t, "corrupted or failed", st.Corrupted+st.CopyFailed, 0)
		})
	}
	quiet := moved.Demoted == 0 || moved.Promoted == 0 || moved.EvictedHost == 0 || moved.DroppedCold == 0 || moved.Refused == 0 || moved.Written == 0 || away == 0
	if played == len(all) && *flagOps >= 10_000 && quiet {
		t.Errorf("too little happened: %+v", moved)
	}
}

func same(got, want []uint64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d looks, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("look %d saw other bytes than everywhere else", i)
		}
	}
	return nil
}

// finish removes what is left and empties the device: all pages must come back.
func (p *player) finish() error {
	if err := p.settle(); err != nil {
		return err
	}
	for i, s := range p.m.seqs {
		if s.live {
			if err := p.runs[i].s.Remove(); err != nil {
				return err
			}
		}
	}
	p.e.m.NumFree() // takes back what was still being written when its sequence was removed
	n := p.e.m.store.Stats().DevicePages
	// A page on its way may not arrive, and is none then: all that counts is what is free.
	if freed, err := p.e.m.store.Evict(p.e.t.Context(), n); err != nil && (p.e.in == nil || !errors.Is(err, fault.Full)) {
		return fmt.Errorf("evicting all %d pages: %d: %w", n, freed, err)
	}
	if free, all := p.e.m.NumFree(), usable(p.e.cache.Geometry()); free != all {
		return fmt.Errorf("%d of %d pages are free in the end", free, all)
	}
	return p.e.m.Check()
}

// Lists of operations that once went wrong, or might, on every configuration.
func TestMetamorphic_Kept(t *testing.T) {
	files := must(filepath.Glob("testdata/metamorphic/*.ops"))(t)
	if len(files) == 0 {
		t.Fatal("no lists of operations in testdata/metamorphic")
	}
	for _, file := range files {
		ops := must(parseOps(string(must(os.ReadFile(file))(t))))(t)
		want := expected(ops)
		if len(want) == 0 {
			t.Fatalf("%s looks at nothing", file)
		}
		for _, c := range configs() {
			t.Run(strings.TrimSuffix(filepath.Base(file), ".ops")+"/"+c.name, func(t *testing.T) {
				p := &player{e: c.open(t, ops, nil), rng: rand.New(rand.NewPCG(1, 1))}
				got := must(p.play(ops))(t)
				noError(t, same(got, want))
				noError(t, p.finish())
			})
		}
	}
}

// What the test is there to find, it finds.
func TestMetamorphic_SeesWhatIsWrong(t *testing.T) {
	ops := must(parseOps(`
		ingest s0 doc=0 tokens=9
		admit s0 tokens=9
		commit s0 tokens=9
		verify s0
		remove s0
		ingest s1 doc=0 tokens=12
		match s1
		admit s1 tokens=12
		commit s1 tokens=12
		verify s1
	`))(t)
	for _, test := range []struct {
		name  string
		wrong func(i int, p *player)
		says  string
	}{
		{"nothing", func(int, *player) {}, ""},
		{"a byte of a page that nobody holds", func(i int, p *player) {
			if i == 4 {
				for id := range page.ID(p.e.cache.Pages()) {
					chunks, _ := p.e.cache.Chunks(nil, 1, id, 0, p.e.size)
					region, _ := p.e.cache.Region(chunks[0].Region)
					p.e.g.poke(region, chunks[0].Off, []byte{0x10})
				}
			}
		}, "wrong byte"},
		{"an owner too many", func(i int, p *player) {
			if i == 3 {
				_ = p.e.m.arena.Retain(p.runs[0].s.pages[:1])
			}
		}, "owners"},
		{"a page that is never given back", func(i int, p *player) {
			if i == 2 {
				_, _ = p.e.m.arena.Acquire(nil, 1)
			}
		}, "owners"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := configs()[0]
			p := &player{e: c.open(t, ops, nil), after: test.wrong}
			_, err := p.play(ops)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Fatalf("got %v, want %q", err, test.says)
			}
		})
	}
}
