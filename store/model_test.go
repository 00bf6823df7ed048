package store

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

var seedFlag = flag.Uint64("seed", 0, "of TestStore_AgainstAModel: run this seed alone")

// TestStore_AgainstAModel makes random calls for several engines at once, and
// compares every answer with a model that is not told what was evicted. It is
// reconciled instead: a hit must have the bytes of its key; a miss is learnt, unless
// a pin forbade it; a page that was learnt to be gone stays gone until it is put
// again; and what is missing has the one reason that its history allows. All books
// are checked after every call.
//
// A failure names its seed: go test ./store -run AgainstAModel -seed N
func TestStore_AgainstAModel(t *testing.T) {
	seeds := make([]uint64, 30)
	for i := range seeds {
		seeds[i] = uint64(i) + 1
	}
	if *seedFlag != 0 {
		seeds = []uint64{*seedFlag}
	}
	total := map[string]int{}
	for _, seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			m := &model{
				rng: rng, keys: map[string]*modelKey{}, engines: make([]*engine, 4), did: total,
				rig: newRig(t, setup{
					device: 6 + rng.IntN(8), host: []int{0, 1, 4, 12}[seed%4], bytes: true,
					inclusive: seed%3 == 0, through: seed%7 == 0, compute: seed%5 == 0, jobPages: 1 + rng.IntN(4),
				}),
			}
			for op := range 500 {
				what, err := m.step()
				m.did[what]++
				if err == nil {
					err = m.check(m.owned())
				}
				if err != nil {
					t.Fatalf("seed %d, operation %d (%s): %v", seed, op, what, err)
				}
			}
			for i := range m.engines {
				noError(t, m.finish(i))
			}
			noError(t, m.check(nil))
		})
	}
	if *seedFlag == 0 {
		for _, what := range []string{
			"hit", "hit on the host", "learnt miss", "corrupt", "full", "commit", "abandon", "evict", "evict later",
			"go away", "return", "evict from the host",
			"never stored", "evicted", "beyond prefix", "held back", "pending", "corrupted",
		} {
			if total[what] == 0 {
				t.Errorf("%q never happened: the test is too easy", what)
			}
		}
	}
}

// modelKey is what the model knows of a key, from when it was lost to when it is lost
// again: engines that pin or hold what is lost go on with the old one.
type modelKey struct {
	stored   bool // put, and not learnt to be gone
	reserved bool // by an engine
	pins     int
	holds    int          // by engines that are away
	gone     fault.Reason // why it is not stored
	bad      bool         // its host page was damaged: it may be found out, and only it
}

type model struct {
	*rig
	rng     *rand.Rand
	keys    map[string]*modelKey // by path
	engines []*engine
	did     map[string]int
}

// engine is one sequence of the embedding engine, in one of five states: none,
// matched, loaded, reserved, away.
type engine struct {
	use
	loaded   bool
	away     bool
	known    []*modelKey // of refs, and behind them of reserved
	mine     []bool      // of reserved: by this engine
	reserved []Ref       // behind refs
	paths    []string    // of reserved
}

func (m *model) key1(path string) *modelKey {
	k := m.keys[path]
	if k == nil {
		k = &modelKey{gone: fault.NeverStored}
		m.keys[path] = k
	}
	return k
}

// lose makes path unknown, for why. Who reserved it has still done so.
func (m *model) lose(path string, why fault.Reason) *modelKey {
	k := &modelKey{gone: why}
	m.keys[path] = k
	return k
}

func (m *model) owned() map[page.ID]int {
	owned := map[page.ID]int{}
	for _, e := range m.engines {
		if e != nil {
			for _, id := range e.pages {
				owned[id]++
			}
		}
	}
	return owned
}

// step makes one call. It returns what it did.
func (m *model) step() (string, error) {
	i := m.rng.IntN(len(m.engines))
	e := m.engines[i]
	switch n := m.rng.IntN(100); {
	case n < 8:
		_, err := m.store.Evict(context.Background(), 1+m.rng.IntN(4))
		return "evict", full(err)
	case n < 12: // enqueues, and does not wait
		_, err := m.store.Evict(ended(), 1+m.rng.IntN(2))
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		return "evict later", full(err)
	case n < 22:
		path := randomPath(m.rng, 3, 4)
		limit := m.rng.IntN(6)
		return "why", m.answers(m.store.Why(nil, m.rig.keys(path), limit), path, limit)
	case n < 26:
		m.damage()
		return "damage", nil
	case e == nil:
		return "match", m.match(i)
	case n < 40:
		return "finish", m.finish(i)
	case e.away && n < 60: // pages are wanted by others meanwhile
		m.store.EvictHost(m.rng.IntN(3))
		return "evict from the host", nil
	case e.away:
		return "return", m.comeBack(e)
	case e.loaded && e.reserved == nil && n < 70 && !slices.Contains(e.refs, NoRef):
		return "go away", m.goAway(e)
	case !e.loaded:
		return "load", m.load(i)
	case e.reserved == nil:
		return "reserve", m.reserve(e)
	case n < 50:
		m.store.Abandon(e.reserved)
		m.unreserve(e)
		return "abandon", nil
	default:
		return "commit", m.commit(i)
	}
}

func full(err error) error {
	if errors.Is(err, fault.Full) {
		return nil
	}
	return err
}

// answers reconciles the model with what the store says of path.
func (m *model) answers(answers []Answer, path string, limit int) error {
	if len(answers) != len(path) {
		return fmt.Errorf("%d answers for %d pages", len(answers), len(path))
	}
	prefix := true
	for i, a := range answers {
		k := m.key1(path[:i+1])
		m.did[a.Reason.String()]++
		there := a.Reason == fault.Hit || a.Reason == fault.BeyondPrefix || a.Reason == fault.HeldBack
		want := fault.Hit
		switch {
		case there && !k.stored:
			return fmt.Errorf("page %q is there, and is gone by the model: %v", path[:i+1], k.gone)
		case there && !prefix:
			want = fault.BeyondPrefix
		case there && i >= limit:
			want = fault.HeldBack
		case there:
		case k.reserved:
			want = fault.Pending
		case k.stored && k.pins+k.holds > 0:
			return fmt.Errorf("page %q is pinned or held, and gone: %v", path[:i+1], a.Reason)
		case k.stored: // learnt: nobody pinned it
			m.did["learnt miss"]++
			want = fault.Evicted
			if k.bad && a.Reason == fault.Corrupted { // found out by a page that arrived again
				want = fault.Corrupted
			}
			m.lose(path[:i+1], want)
		default:
			want = k.gone
		}
		if a.Reason != want {
			return fmt.Errorf("page %q: %v, want %v", path[:i+1], a.Reason, want)
		}
		if hit := a.Reason == fault.Hit; hit != (a.Tier != Nowhere) {
			return fmt.Errorf("page %q: %v, tier %v", path[:i+1], a.Reason, a.Tier)
		}
		prefix = prefix && there
	}
	return nil
}

func (m *model) match(i int) error {
	path := randomPath(m.rng, 3, 4)
	limit := max(m.rng.IntN(6), 1)
	var got Match
	if err := m.store.Match(m.rig.keys(path), limit, &got); err != nil {
		return err
	}
	hits := 0
	for _, a := range got.Answers {
		if a.Reason == fault.Hit {
			hits++
		}
		if a.Tier == Host {
			m.did["hit on the host"]++
		}
	}
	if hits != len(got.Refs) {
		return fmt.Errorf("%d hits, %d refs", hits, len(got.Refs))
	}
	e := &engine{use: use{path: path, keys: m.rig.keys(path), refs: got.Refs, hits: hits}}
	m.engines[i] = e
	if err := m.answers(got.Answers, path, limit); err != nil {
		return err
	}
	for n := range hits {
		k := m.keys[path[:n+1]]
		k.pins++
		e.known = append(e.known, k)
	}
	return nil
}

// load promotes what the engine matched; a page that is damaged ends the engine.
func (m *model) load(i int) error {
	e := m.engines[i]
	fresh, err := m.acquire(m.store.Missing(e.refs))
	if errors.Is(err, fault.Full) {
		m.did["full"]++
		return m.finish(i)
	} else if err != nil {
		return err
	}
	var l Loaded
	err = m.store.Load(e.refs, fresh, &l)
	if _, err := m.arena.Release(fresh[l.Used:]); err != nil {
		return err
	}
	if corrupt, ok := errors.AsType[*CorruptError](err); ok {
		path, k := e.path[:corrupt.Index+1], e.known[corrupt.Index]
		if !k.bad {
			return fmt.Errorf("page %q is called corrupt, and nobody damaged it: %w", e.path[:corrupt.Index+1], err)
		}
		m.did["corrupt"]++
		if m.keys[path] == k {
			m.lose(path, fault.Corrupted)
		}
		return m.finish(i)
	}
	if err != nil {
		return err
	}
	e.pages, e.tickets, e.loaded = l.Pages, l.Tickets, true
	if m.rng.IntN(4) == 0 {
		return nil // they may still be on their way
	}
	return m.verify(&e.use)
}

func (m *model) reserve(e *engine) error {
	keys := e.keys[e.hits:]
	if len(keys) == 0 {
		return m.verify(&e.use)
	}
	refs, err := m.store.Reserve(nil, keys)
	if err != nil {
		return full(err)
	}
	e.reserved = refs
	for n, r := range refs {
		path := e.path[:e.hits+n+1]
		k := m.key1(path)
		e.paths = append(e.paths, path)
		e.mine = append(e.mine, false)
		m.store.mu.Lock()
		mine := r != NoRef && m.store.entries[r].state == reserved
		why := m.store.ghosts.why(m.store.index.hash(&keys[n])) // what Why would have said
		m.store.mu.Unlock()
		switch {
		case r == NoRef:
			if !k.reserved {
				return fmt.Errorf("page %q is somebody else's, whose?", path)
			}
		case mine:
			if k.reserved {
				return fmt.Errorf("page %q was reserved twice", path)
			}
			if k.stored && k.pins+k.holds > 0 {
				return fmt.Errorf("page %q is pinned or held, and was reserved", path)
			}
			if k.stored {
				if why != fault.Evicted && (why != fault.Corrupted || !k.bad) {
					return fmt.Errorf("page %q is gone: %v", path, why)
				}
				k = m.lose(path, why)
			}
			k.reserved, e.mine[n] = true, true
		default: // pinned
			if !k.stored {
				return fmt.Errorf("page %q was pinned, and is gone by the model: %v", path, k.gone)
			}
			k.pins++
		}
		e.known = append(e.known, k)
	}
	return nil
}

// unreserve makes the model forget what e reserved.
func (m *model) unreserve(e *engine) {
	for n, r := range e.reserved {
		k := e.known[len(e.refs)+n]
		switch {
		case r == NoRef:
		case e.mine[n]:
			k.reserved = false
		default:
			k.pins--
		}
	}
	e.reserved, e.paths, e.mine, e.known = nil, nil, nil, e.known[:len(e.refs)]
}

func (m *model) commit(i int) error {
	e := m.engines[i]
	own, err := m.acquire(len(e.reserved))
	if errors.Is(err, fault.Full) {
		m.did["full"]++
		return m.finish(i)
	} else if err != nil {
		return err
	}
	for n, id := range own {
		m.write(id, e.keys[e.hits+n])
	}
	if err := m.store.Commit(e.reserved, own); err != nil {
		return err
	}
	for n := range e.reserved {
		if k := e.known[len(e.refs)+n]; e.mine[n] {
			k.reserved, k.stored, k.pins = false, true, 1
		}
	}
	e.pages = append(e.pages, own...)
	e.refs = append(e.refs, e.reserved...)
	e.reserved, e.paths, e.mine, e.hits = nil, nil, nil, len(e.keys)
	return m.verify(&e.use)
}

// goAway gives the engine's pages up, and holds its entries; sometimes they go down at
// once.
func (m *model) goAway(e *engine) error {
	if err := m.verify(&e.use); err != nil {
		return err
	}
	if _, err := m.arena.Release(e.pages); err != nil {
		return err
	}
	m.store.Suspend(e.refs)
	e.pages, e.tickets, e.loaded, e.away = nil, nil, false, true
	for _, k := range e.known {
		k.pins, k.holds = k.pins-1, k.holds+1
	}
	ctx := context.Background()
	switch m.rng.IntN(3) {
	case 0:
		_, err := m.store.Demote(ctx, e.refs)
		return err
	case 1:
		if _, err := m.store.Demote(ended(), e.refs); err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
	}
	return nil
}

// comeBack makes an engine that was away one that has matched what it held.
func (m *model) comeBack(e *engine) error {
	for n, r := range e.refs {
		k := e.known[n]
		k.pins, k.holds = k.pins+1, k.holds-1
		m.store.mu.Lock()
		gone := m.store.entries[r].state != kept
		m.store.mu.Unlock()
		if gone && !k.bad {
			return fmt.Errorf("page %q was held, and is gone", e.path[:n+1])
		}
	}
	m.store.Resume(e.refs)
	e.away, e.hits = false, len(e.refs)
	return nil
}

// finish verifies what the engine has and gives all of it back.
func (m *model) finish(i int) error {
	e := m.engines[i]
	if e == nil {
		return nil
	}
	if e.reserved != nil {
		m.store.Abandon(e.reserved)
		m.unreserve(e)
	}
	if e.away {
		m.store.Unhold(e.refs)
		for _, k := range e.known {
			k.holds--
		}
		m.engines[i] = nil
		return nil
	}
	if e.loaded {
		m.did["hit"] += e.hits
		if err := m.verify(&e.use); err != nil {
			return err
		}
	}
	if m.rng.IntN(2) == 0 { // in either order: owners without pins are legal
		m.end(&e.use)
	} else {
		m.store.Unpin(e.refs)
		if _, err := m.arena.Release(e.pages); err != nil {
			return err
		}
	}
	for n, r := range e.refs {
		if r != NoRef {
			e.known[n].pins--
		}
	}
	m.engines[i] = nil
	return nil
}

// damage flips a bit of a page that is on the host alone, and idle.
func (m *model) damage() {
	s := m.store
	s.mu.Lock()
	defer s.mu.Unlock()
	paths := slices.Sorted(maps.Keys(m.keys))
	m.rng.Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	for _, path := range paths {
		k := m.key(path)
		r := s.index.lookup(&k, s.index.hash(&k))
		if r == NoRef || s.entries[r].state != kept {
			continue
		}
		p := &s.entries[r].part
		if p.host == page.None || p.device != page.None || p.flight != nil || m.keys[path].bad {
			continue
		}
		b, err := m.pool.Cache().Page(p.host)
		noError(m, err)
		b[m.rng.IntN(len(b))] ^= 1 << m.rng.IntN(8)
		m.keys[path].bad = true
		return
	}
}
