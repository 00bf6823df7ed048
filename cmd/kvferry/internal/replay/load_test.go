package replay

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/page"
)

// simulator is an LRU cache of pages that has nothing in common with the product
// but the rules: whole pages are looked up until the first miss, and afterwards
// all whole pages of the request are the most recent, deepest first, so that
// the deepest of them goes first.
type simulator struct {
	room  int // pages; 0 = no limit
	nodes map[page.Key]*node
	head  node // ring: head.next is the most recent
}

type node struct {
	key        page.Key
	prev, next *node
}

func newSimulator(room int) *simulator {
	s := &simulator{room: room, nodes: map[page.Key]*node{}}
	s.head.prev, s.head.next = &s.head, &s.head
	return s
}

func (n *node) unlink() { n.prev.next, n.next.prev = n.next, n.prev }

func (s *simulator) serve(keys []page.Key) (hits int) {
	for hits < len(keys) && s.nodes[keys[hits]] != nil {
		hits++
	}
	for _, key := range slices.Backward(keys) {
		n := s.nodes[key]
		if n == nil {
			n = &node{key: key}
			s.nodes[key] = n
		} else {
			n.unlink()
		}
		n.prev, n.next = &s.head, s.head.next
		n.prev.next, n.next.prev = n, n
	}
	for s.room > 0 && len(s.nodes) > s.room {
		old := s.head.prev
		old.unlink()
		delete(s.nodes, old.key)
	}
	return hits
}

// simulate returns the pages hit and looked up over a whole trace.
func simulate(t *Trace, pageSize, room int) (hits, lookups int) {
	s := newSimulator(room)
	var keys []page.Key
	for i := range t.Requests {
		req := &t.Requests[i]
		keys = AppendKeys(keys[:0], page.Key{}, req, pageSize)
		if req.Input%pageSize == 0 {
			// One token is always computed, so the last page can't be a hit.
			h := s.serve(keys)
			hits += min(h, len(keys)-1)
		} else {
			hits += s.serve(keys)
		}
		needed, _ := Pages(req.Input, pageSize)
		lookups += needed
	}
	return hits, lookups
}

func TestGenerate_HasTheShapeOfRealChatAndOutlivesTheDefaultPools(t *testing.T) {
	for seed := uint64(1); seed <= 2; seed++ {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			load := Generate(seed, 0)
			if len(load.Requests) != DefaultRequests {
				t.Fatalf("%d requests, want %d", len(load.Requests), DefaultRequests)
			}
			all, lookups := simulate(load, IDTokens, 0)
			few, _ := simulate(load, IDTokens, DefaultDevicePages+DefaultHostPages)
			ratio, ratioFew := float64(all)/float64(lookups), float64(few)/float64(lookups)
			mean := float64(lookups) / DefaultRequests
			last := load.Requests[len(load.Requests)-1].Time
			_, largest := load.Largest(IDTokens)
			t.Logf("hit ratio %.4f without limit, %.4f in the default pools; %.1f ids a request, largest %d; %d s", ratio, ratioFew, mean, largest, last/1000)
			if ratio < 0.35 || ratio > 0.45 {
				t.Errorf("hit ratio without limit is %.4f, want 0.35…0.45", ratio)
			}
			if ratio-ratioFew < 0.05 {
				t.Errorf("the default pools lose only %.4f of the hit ratio, want 0.05 or more", ratio-ratioFew)
			}
			if mean < 20 || mean > 28 {
				t.Errorf("%.1f ids a request, want about 24", mean)
			}
			if largest > DefaultDevicePages/4 {
				t.Errorf("the largest request needs %d pages, more than a quarter of the default device pool", largest)
			}
		})
	}
}

func TestGenerate_KeepsTheRulesOfATrace(t *testing.T) {
	load := Generate(7, 3000)
	var tokens int64
	for i, r := range load.Requests {
		tokens += int64(r.Input)
		if want, _ := Pages(r.Input, IDTokens); len(r.IDs) != want || r.Input < 1 || r.Output < 1 {
			t.Fatalf("%s: %d tokens in, %d out, %d ids", load.Where(i), r.Input, r.Output, len(r.IDs))
		}
		if i > 0 && r.Time < load.Requests[i-1].Time {
			t.Fatalf("%s: time goes back", load.Where(i))
		}
	}
	if tokens != load.Tokens {
		t.Errorf("Tokens is %d, the requests have %d", load.Tokens, tokens)
	}
}

func TestGenerate_IsTheSameForOneSeedAndGrowsAtItsEnd(t *testing.T) {
	short, long, other := Generate(3, 200), Generate(3, 500), Generate(4, 200)
	if d := cmp.Diff(short.Requests, long.Requests[:200]); d != "" {
		t.Errorf("the longer load does not begin with the shorter one:\n%s", d)
	}
	if cmp.Equal(short.Requests, other.Requests) {
		t.Error("two seeds give the same load")
	}
	// Committed so that a change of the load, or of a generator below it, is seen.
	if got, want := digest(Generate(1, 0)), "1336af707fbfe289"; got != want {
		t.Errorf("the load of seed 1 has digest %s, want %s", got, want)
	}
}

// digest names the contents of a trace.
func digest(t *Trace) string {
	h := sha256.New()
	if err := json.NewEncoder(h).Encode(t.Requests); err != nil {
		panic(err)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}
