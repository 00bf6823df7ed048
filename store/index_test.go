package store

import (
	"encoding/binary"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// testKey is a key that differs from others in its last word only, so that all of
// it must be hashed and compared.
func testKey(n int) (k page.Key) {
	binary.BigEndian.PutUint64(k[24:], uint64(n))
	return k
}

// clustered is testKey with a few homes only: keys are chosen so that their cells
// run into each other, over the end of the table too.
func clustered(seed [2]uint64, shift uint, n int) []page.Key {
	var keys []page.Key
	for i := 0; len(keys) < n; i++ {
		k := testKey(i)
		if home := hash(&k, seed) >> shift; home < 2 || home >= 1<<(64-shift)-2 {
			keys = append(keys, k)
		}
	}
	return keys
}

// TestIndex_IsAMap compares the index with a map, with keys that share their homes.
func TestIndex_IsAMap(t *testing.T) {
	const most = 24
	rapid.Check(t, func(t *rapid.T) {
		x := newIndex(most)
		keys := clustered(x.seed, x.shift, most)
		model := map[page.Key]Ref{}
		refOf := func(i int) Ref { return Ref(i) }
		for range rapid.IntRange(1, 120).Draw(t, "operations") {
			i := rapid.IntRange(0, most-1).Draw(t, "key")
			k := keys[i]
			_, there := model[k]
			switch {
			case !there && rapid.Bool().Draw(t, "insert"):
				x.insert(&k, x.hash(&k), refOf(i))
				model[k] = refOf(i)
			default: // removing what is not there changes nothing
				x.remove(&k, x.hash(&k))
				delete(model, k)
			}
			if x.n != len(model) {
				t.Fatalf("%d keys, want %d", x.n, len(model))
			}
			for _, k := range keys {
				want, there := model[k]
				if !there {
					want = NoRef
				}
				if got := x.lookup(&k, x.hash(&k)); got != want {
					t.Fatalf("key %v is of entry %d, want %d", k, got, want)
				}
			}
		}
	})
}

func TestIndex_ComparesWholeKeys(t *testing.T) {
	x := newIndex(8)
	k := testKey(1)
	x.insert(&k, x.hash(&k), 3)
	for bit := range 256 {
		other := k
		other[bit/8] ^= 1 << (bit % 8)
		if got := x.lookup(&other, x.hash(&other)); got != NoRef {
			t.Fatalf("a key that differs in bit %d is of entry %d", bit, got)
		}
	}
	// The same home and tag: only the comparison of keys tells them apart.
	other := testKey(2)
	x.cells[x.find(&other, hash(&other, x.seed))] = cell{tag: uint32(x.hash(&other) >> 32), ref: 3}
	if got := x.lookup(&other, x.hash(&other)); got != NoRef {
		t.Fatalf("a key is found by its tag alone, as entry %d", got)
	}
}

// ghostHash is the hash of k in these tests.
func ghostHash(k page.Key) uint64 { return hash(&k, [2]uint64{0x2545f4914f6cdd1d, 7}) }

// TestGhosts_AreTheNewestReasons compares ghosts with a list of departures.
func TestGhosts_AreTheNewestReasons(t *testing.T) {
	why := []fault.Reason{fault.Evicted, fault.Corrupted, fault.CopyFailed}
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 8).Draw(t, "size")
		g := newGhosts(size)
		// slots mirrors the ring: a forgotten key keeps its place until that is used.
		slots, next, overflowed := make([]int, size), 0, false
		reasons := map[int]fault.Reason{}
		for range rapid.IntRange(1, 80).Draw(t, "operations") {
			n := rapid.IntRange(1, 12).Draw(t, "key")
			k := testKey(n)
			if rapid.IntRange(0, 3).Draw(t, "forget") == 0 {
				g.forget(ghostHash(k))
				for i := range slots {
					if slots[i] == n {
						slots[i] = 0
					}
				}
				delete(reasons, n)
			} else {
				reason := rapid.SampledFrom(why).Draw(t, "why")
				g.remember(ghostHash(k), reason)
				if _, there := reasons[n]; !there {
					if old := slots[next]; old != 0 {
						overflowed = true
						delete(reasons, old)
					}
					slots[next] = n
					next = (next + 1) % size
				}
				reasons[n] = reason
			}
			if g.overflowed != overflowed {
				t.Fatalf("overflowed: %v, want %v", g.overflowed, overflowed)
			}
			for n := 1; n <= 13; n++ {
				k := testKey(n)
				want, there := reasons[n]
				switch {
				case there:
				case overflowed:
					want = fault.HistoryFull
				default:
					want = fault.NeverStored
				}
				if got := g.why(ghostHash(k)); got != want {
					t.Fatalf("key %d: %v, want %v", n, got, want)
				}
			}
		}
	})
}

// TestGhosts_SurviveClusters runs ghosts at their fullest for long, with prints
// that share their homes.
func TestGhosts_SurviveClusters(t *testing.T) {
	const size = 14
	g := newGhosts(size) // 32 cells
	var keys []page.Key
	for i := 0; len(keys) < 3*size; i++ {
		k := testKey(i)
		if home := int(print(ghostHash(k)) >> 32 >> g.shift); home < 2 || home >= len(g.table)-2 {
			keys = append(keys, k)
		}
	}
	for round := range 40 {
		for i := range keys {
			g.remember(ghostHash(keys[(i*(2*round+1))%len(keys)]), fault.Evicted)
		}
		known := 0
		for i := range keys {
			if g.why(ghostHash(keys[i])) == fault.Evicted {
				known++
			}
		}
		cells := 0
		for _, c := range g.table {
			if c.place != 0 {
				cells++
			}
		}
		if known != size || cells != size {
			t.Fatalf("round %d: %d keys known in %d cells, want %d", round, known, cells, size)
		}
	}
}

func TestGhosts_TakeFixedMemory(t *testing.T) {
	g := newGhosts(1 << 18)
	if got, want := g.bytes(), int64(6<<20); got != want {
		t.Errorf("the default history takes %d bytes, the documentation says %d", got, want)
	}
	before := g.bytes()
	for i := range 1 << 19 {
		g.remember(ghostHash(testKey(i)), fault.Evicted)
	}
	if g.bytes() != before || !g.overflowed {
		t.Errorf("%d bytes after %d, overflowed: %v", g.bytes(), before, g.overflowed)
	}
}
