package store

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/internal/invariants"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestOpen_RefusesWhatCannotBe(t *testing.T) {
	r := newRig(t, setup{device: 2, host: 1, bytes: true})
	for _, c := range []struct {
		name   string
		change func(o *Options)
		word   string
	}{
		{"no cache", func(o *Options) { o.Cache = nil }, "cache"},
		{"no arena", func(o *Options) { o.Arena = nil }, "arena"},
		{"a pool and no stream", func(o *Options) { o.Copies = nil }, "stream"},
		{"negative history", func(o *Options) { o.History = -1 }, "-1"},
		{"too much history", func(o *Options) { o.History = maxGhosts + 1 }, fmt.Sprint(maxGhosts)},
		{"negative jobs", func(o *Options) { o.JobPages = -1 }, "-1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Cache: r.cache, Arena: r.arena, Pool: r.pool, Copies: r.copies}
			c.change(&o)
			s, err := Open(o)
			if err == nil {
				_ = s.Close(context.Background())
			}
			faulttest.Refused(t, err, fault.Invalid, c.word)
		})
	}
}

func TestCommit_SealsAndIsASecondOwner(t *testing.T) {
	r := newRig(t, setup{device: 4})
	u := r.put("ab")
	for _, id := range u.pages {
		if !r.arena.Sealed(id) || r.arena.Owners(id) != 2 {
			t.Errorf("page %d: sealed %v, %d owners", id, r.arena.Sealed(id), r.arena.Owners(id))
		}
	}
	r.end(u)
	for _, id := range u.pages {
		if !r.arena.Sealed(id) || r.arena.Owners(id) != 1 {
			t.Errorf("page %d, given back: sealed %v, %d owners", id, r.arena.Sealed(id), r.arena.Owners(id))
		}
	}
}

func TestCommit_OfAKeyThatIsThereRetainsNothing(t *testing.T) {
	r := newRig(t, setup{device: 4})
	u := r.put("a")
	refs, err := r.store.Reserve(nil, r.keys("a"))
	noError(t, err)
	mine, err := r.acquire(1)
	noError(t, err)
	noError(t, r.store.Commit(refs, mine))
	if r.arena.Sealed(mine[0]) || r.arena.Owners(mine[0]) != 1 || r.store.Stats().Refused != 1 {
		t.Errorf("page %d: sealed %v, %d owners; %d refused", mine[0], r.arena.Sealed(mine[0]), r.arena.Owners(mine[0]), r.store.Stats().Refused)
	}
	_, err = r.arena.Release(mine)
	noError(t, err)
	r.store.Unpin(refs)
	r.end(u)
	r.evict(1)
	r.free(4)
}

// TestCommit_RefusesPagesItCannotShare: and the keys before the bad one are not
// committed either.
func TestCommit_RefusesPagesItCannotShare(t *testing.T) {
	r := newRig(t, setup{device: 6})
	taken := r.put("x")
	own, err := r.acquire(2)
	noError(t, err)
	free := page.ID(5)
	for _, c := range []struct {
		name  string
		pages []page.ID
		words string
	}{
		{"a free page", []page.ID{own[0], free}, "no owner"},
		{"no page", []page.ID{own[0], page.None}, "-1"},
		{"a page out of range", []page.ID{own[0], 99}, "99"},
		{"a page under another key", []page.ID{own[0], taken.pages[0]}, "under another key"},
		{"one page twice", []page.ID{own[0], own[0]}, "under another key"},
		{"too few pages", own[:1], "2 refs with 1 pages"},
	} {
		t.Run(c.name, func(t *testing.T) {
			refs, err := r.store.Reserve(nil, r.keys("ab"))
			noError(t, err)
			faulttest.Refused(t, r.store.Commit(refs, c.pages), fault.Invalid, c.words)
			r.wantWhere("ab", "pending, pending")
			for _, id := range own {
				if r.arena.Owners(id) != 1 {
					t.Errorf("page %d has %d owners", id, r.arena.Owners(id))
				}
			}
			r.store.Abandon(refs)
			r.wantWhere("ab", "never stored, never stored")
			noError(t, r.check(map[page.ID]int{own[0]: 1, own[1]: 1, taken.pages[0]: 1}))
		})
	}
	// The pages are none the worse for it.
	refs, err := r.store.Reserve(nil, r.keys("ab"))
	noError(t, err)
	noError(t, r.store.Commit(refs, own))
	r.wantWhere("ab", "device, device")
	r.end(taken)
	r.end(&use{refs: refs, pages: own})
}

func TestLoad_RefusesPagesItCannotShare(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 2, bytes: true})
	r.fill("ab")
	r.evict(2)
	taken, m := r.put("x"), r.match("ab")
	own, err := r.acquire(1)
	noError(t, err)
	for _, fresh := range [][]page.ID{{own[0], 3}, {own[0], own[0]}, {own[0], taken.pages[0]}, {99, own[0]}} {
		var l Loaded
		faulttest.Refused(t, r.store.Load(m.Refs, fresh, &l), fault.Invalid)
		r.wantWhere("ab", "host, host")
		noError(t, r.check(map[page.ID]int{own[0]: 1, taken.pages[0]: 1}))
		if len(l.Pages) != 0 || l.Used != 0 {
			t.Errorf("a refused load gave pages %v, used %d", l.Pages, l.Used)
		}
	}
	r.end(taken)
	r.end(&use{refs: m.Refs, pages: own})
}

// TestLoad_OfARefTwiceLoadsItOnce: keys come from outside, and may repeat.
func TestLoad_OfARefTwiceLoadsItOnce(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 2, bytes: true})
	r.fill("a")
	r.evict(1)
	var m Match
	noError(t, r.store.Match([]page.Key{r.key("a"), r.key("a")}, 2, &m))
	fresh, err := r.acquire(2)
	noError(t, err)
	var l Loaded
	noError(t, r.store.Load(m.Refs, fresh, &l))
	if l.Used != 1 || !slices.Equal(l.Pages, []page.ID{fresh[0], fresh[0]}) {
		t.Fatalf("pages %v, %d used of %v", l.Pages, l.Used, fresh)
	}
	_, err = r.arena.Release(fresh[1:])
	noError(t, err)
	u := &use{path: "aa", keys: []page.Key{r.key("a"), r.key("a")}, refs: m.Refs, pages: l.Pages, tickets: l.Tickets}
	noError(t, r.verify(u))
	noError(t, r.check(map[page.ID]int{fresh[0]: 2}))
	r.end(u)
	r.evict(1)
	r.free(4)
}

// TestEvict_CountsPagesThatAreFree: an owner without a pin does not keep a page in
// the store, but it is not freed either.
func TestEvict_CountsPagesThatAreFree(t *testing.T) {
	for _, host := range []int{0, 4} {
		t.Run(fmt.Sprintf("host=%d", host), func(t *testing.T) {
			r := newRig(t, setup{device: 4, host: host, bytes: true})
			u := r.put("ab")
			r.store.Unpin(u.refs)
			freed, err := r.store.Evict(context.Background(), 2)
			faulttest.Refused(t, err, fault.Full, "0 of 2")
			if freed != 0 {
				t.Errorf("%d pages freed", freed)
			}
			u.refs = nil
			r.free(2)
			for i, k := range u.keys { // the owner's bytes are its own
				if !r.holds(u.pages[i], k) {
					t.Errorf("page %d lost its bytes", u.pages[i])
				}
			}
			noError(t, r.check(map[page.ID]int{u.pages[0]: 1, u.pages[1]: 1}))
			r.end(u)
			r.free(4)
		})
	}
}

func TestEvict_PassesPinnedPagesOver(t *testing.T) {
	r := newRig(t, setup{device: 6, host: 6, bytes: true})
	u := r.put("ab")
	r.fill("xy")
	freed, err := r.store.Evict(context.Background(), 4)
	faulttest.Refused(t, err, fault.Full, "2 of 4")
	if freed != 2 {
		t.Errorf("%d pages freed, want 2", freed)
	}
	r.wantWhere("ab", "device, device")
	r.wantWhere("xy", "host, host")
	noError(t, r.verify(u))
	r.end(u)
}

// TestMatch_TenThousandHitsGrowNothing counts what could grow with use: the slab, the
// lists, the index, and allocations.
func TestMatch_TenThousandHitsGrowNothing(t *testing.T) {
	r := newRig(t, setup{device: 8, host: 4})
	r.fill("abcd", "abxy")
	r.evict(3)
	keys := r.keys("abcd")
	var m Match
	hit := func() {
		noError(t, r.store.Match(keys, len(keys), &m))
		r.store.Unpin(m.Refs)
	}
	hit()
	s := r.store
	size := func() [5]int {
		return [5]int{len(s.entries), len(s.unused), s.index.n, s.device.Len(), s.host.Len()}
	}
	before := size()
	for range 10_000 {
		hit()
	}
	if got := size(); got != before {
		t.Errorf("slab, unused, index and lists are %v after 10,000 hits, %v before", got, before)
	}
	if !invariants.Enabled { // audits and the race detector allocate
		if n := testing.AllocsPerRun(100, hit); n != 0 {
			t.Errorf("a hit allocates %v times", n)
		}
	}
	noError(t, r.check(nil))
}

// TestPut_ChildChurnGrowsNothing puts ever new children behind one prefix.
func TestPut_ChildChurnGrowsNothing(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 2, bytes: true})
	r.fill("ab")
	for i := range 500 {
		r.fill("ab" + string(rune('c'+i%20)))
		if n := len(r.store.entries); n > 4+2+1 {
			t.Fatalf("%d entries in the slab for 6 pages", n)
		}
		if r.store.index.n != r.store.Stats().Entries {
			t.Fatalf("%d keys in the index, %d entries", r.store.index.n, r.store.Stats().Entries)
		}
		// It is a child that goes, never the prefix under it.
		r.wantWhere("ab", "device, device")
	}
	noError(t, r.check(nil))
}

func TestUnpin_TwiceIsNoticedAndTakesNoPinOfOthers(t *testing.T) {
	r := newRig(t, setup{device: 4})
	r.fill("a")
	m := r.match("a")
	r.store.Unpin(m.Refs)
	r.store.Unpin(m.Refs)
	if !strings.Contains(r.complain.String(), "unpinned twice") {
		t.Errorf("the log says %q", r.complain.String())
	}
	r.complain.Reset() // or the end of the test finds it
	noError(t, r.check(nil))
	r.evict(1)
}

func TestStore_AnswersNothingOnceClosed(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 2, bytes: true})
	r.fill("ab")
	r.evict(1)
	m := r.match("ab")
	noError(t, r.store.Close(context.Background()))
	r.free(4)
	r.hostFree(2)
	fresh, err := r.arena.Acquire(nil, 2)
	noError(t, err)
	ctx := context.Background()
	var l Loaded
	_, reserveErr := r.store.Reserve(nil, r.keys("x"))
	_, evictErr := r.store.Evict(ctx, 1)
	for name, err := range map[string]error{
		"Match": r.store.Match(r.keys("ab"), 2, &Match{}), "Reserve": reserveErr, "Evict": evictErr,
		"Commit": r.store.Commit(nil, nil), "Load": r.store.Load(m.Refs, fresh, &l),
		"Check": r.store.Check(), "Close": r.store.Close(ctx),
	} {
		if fault.KindOf(err) != fault.Closed {
			t.Errorf("%s: %v, want it closed", name, err)
		}
	}
	r.store.Unpin(m.Refs) // gives nothing back twice
	_, err = r.arena.Release(fresh)
	noError(t, err)
}

func TestClose_GivesBackWhatIsPinnedToo(t *testing.T) {
	r := newRig(t, setup{device: 4, host: 2, bytes: true})
	u := r.put("ab")
	r.fill("x")
	r.evict(1)
	noError(t, r.store.Close(context.Background()))
	r.free(2) // u's own
	r.hostFree(2)
	r.end(u)
	r.free(4)
}

func TestHistory_TellsTheLastMoves(t *testing.T) {
	r := newRig(t, setup{device: 1, host: 1, bytes: true})
	r.fill("a")
	for range 4 {
		r.evict(1)
		u, err := r.begin("a")
		noError(t, err)
		noError(t, r.verify(u))
		r.end(u)
	}
	m := r.match("a")
	got := r.store.History(m.Refs[0])
	want := "4 earlier moves; promoted to device page 0 after look-up 3; demoted to host page 0 after look-up 3; " +
		"promoted to device page 0 after look-up 4; demoted to host page 0 after look-up 4; promoted to device page 0 after look-up 5"
	if !strings.HasSuffix(got, strings.TrimPrefix(want, "4 earlier moves; ")) || !strings.HasPrefix(got, "4 earlier moves; ") {
		t.Errorf("history %q, want %q", got, want)
	}
	r.store.Unpin(m.Refs)
}

// TestCheck_SeesBooksThatAreWrong breaks the books in every way that Check knows.
func TestCheck_SeesBooksThatAreWrong(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(s *Store)
		word   string
	}{
		{"a key lost from the index", func(s *Store) { s.index.remove(&s.index.keys[0], s.index.hash(&s.index.keys[0])) }, "is found as"},
		{"a count that is off", func(s *Store) { s.stats.HostPages++ }, "are counted as"},
		{"a key too many", func(s *Store) { k := testKey(1); s.index.insert(&k, s.index.hash(&k), 5) }, "keys"},
		{"an entry lost from its list", func(s *Store) { s.device.Remove(0) }, "device list"},
		{"an entry listed that is gone", func(s *Store) { s.device.Insert(7) }, "lists of"},
		{"an entry listed and pinned", func(s *Store) { s.entries[0].pins++ }, "device list"},
		{"an entry in the wrong list", func(s *Store) { s.host.Insert(0) }, "host list"},
		{"an entry in no tier", func(s *Store) { s.entries[0].part.device = page.None }, "in no tier"},
		{"an entry in both tiers", func(s *Store) { s.entries[0].part.host = 0 }, "both tiers"},
		{"two entries with one page", func(s *Store) { s.entries[0].part.device = s.entries[1].part.device }, "which is of entry"},
		{"a page that nobody owns", func(s *Store) { _, _ = s.arena.Release([]page.ID{s.entries[0].part.device}) }, "0 owners"},
		{"a page of nobody's", func(s *Store) { s.at[3] = 1 }, "does not have it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, setup{device: 4, host: 2})
			r.fill("ab", "x")
			noError(t, r.store.Check())
			c.damage(r.store)
			if err := r.store.Check(); err == nil || !strings.Contains(err.Error(), c.word) {
				t.Errorf("the check says %v, want %q", err, c.word)
			}
			// Leave nothing to complain about when the test ends.
			r.store.entries = r.store.entries[:0]
			r.complain.Reset()
		})
	}
}

// TestStore_TakesAnyLayout moves pages between a device cache of a region for each
// layer and the packed pool.
func TestStore_TakesAnyLayout(t *testing.T) {
	g, err := kv.Config{Layout: kv.HND, DType: kv.BF16, Layers: 3, Pages: 3, PageSize: 2, KVHeads: 2, HeadDim: 4}.PerLayerKVFirst()
	noError(t, err)
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	cache, err := kv.NewCache(g, host)
	noError(t, err)
	arena, err := page.NewArena(page.ArenaOptions{Pages: 3})
	noError(t, err)
	copies, err := host.NewStream("copies")
	noError(t, err)
	pool, err := hostpool.Open(hostpool.Options{Cache: cache, Pages: 2, Host: host})
	noError(t, err)
	noError(t, pool.Grown().Wait(t.Context()))
	s, err := Open(Options{Cache: cache, Arena: arena, Pool: pool, Copies: copies})
	noError(t, err)

	fill := func(id page.ID, with byte) { // returns nothing: the bytes are 'with' everywhere
		for layer := range 3 {
			chunks, err := cache.Chunks(nil, layer, id, 0, 2)
			noError(t, err)
			for _, c := range chunks {
				mem, err := cache.Region(c.Region)
				noError(t, err)
				copy(mem.Bytes()[c.Off:][:c.Bytes], bytes.Repeat([]byte{with + byte(layer)*2 + byte(c.Kind)}, int(c.Bytes)))
			}
		}
	}
	ids, err := arena.Acquire(nil, 1)
	noError(t, err)
	fill(ids[0], 10)
	refs, err := s.Reserve(nil, []page.Key{testKey(1)})
	noError(t, err)
	noError(t, s.Commit(refs, ids))
	s.Unpin(refs)
	_, err = arena.Release(ids)
	noError(t, err)
	if n, err := s.Evict(t.Context(), 1); n != 1 || err != nil {
		t.Fatalf("%d freed, error %v", n, err)
	}
	fill(0, 90)
	fill(1, 90)
	fill(2, 90)
	var m Match
	noError(t, s.Match([]page.Key{testKey(1)}, 1, &m))
	fresh, err := arena.Acquire(nil, 2)
	noError(t, err)
	var l Loaded
	noError(t, s.Load(m.Refs, fresh[1:], &l))
	noError(t, l.Tickets[0].Wait(t.Context()))
	for layer := range 3 {
		chunks, err := cache.Chunks(nil, layer, fresh[1], 0, 2)
		noError(t, err)
		for _, c := range chunks {
			mem, err := cache.Region(c.Region)
			noError(t, err)
			for _, b := range mem.Bytes()[c.Off:][:c.Bytes] {
				if want := 10 + byte(layer)*2 + byte(c.Kind); b != want {
					t.Fatalf("layer %d, %v: %d, want %d", layer, c.Kind, b, want)
				}
			}
		}
	}
	noError(t, s.Close(t.Context()))
	noError(t, copies.Close())
	noError(t, pool.Close())
	noError(t, cache.Close())
	noError(t, host.Close())
}
