package evict

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// insertPath makes the slots of one path, root first, the most recent: the root most
// of all.
func insertPath(l *LRU, path []int32) {
	for _, slot := range slices.Backward(path) {
		l.Insert(slot)
	}
}

// contents returns the list, oldest first, read forwards and checked backwards.
func contents(t tb, l *LRU) []int32 {
	t.Helper()
	if l.links == nil {
		if l.n != 0 {
			t.Fatalf("%d slots in no list", l.n)
		}
		return nil
	}
	var slots []int32
	for i := l.links[0].next; i != 0; i = l.links[i].next {
		if len(slots) == l.n {
			t.Fatalf("more than %d slots: %v", l.n, slots)
		}
		slots = append(slots, i-1)
	}
	back := 0
	for i := l.links[0].prev; i != 0; i = l.links[i].prev {
		if back++; back > len(slots) || slots[len(slots)-back] != i-1 {
			t.Fatalf("slot %d is not at place %d from the end of %v", i-1, back, slots)
		}
	}
	if back != len(slots) || len(slots) != l.n {
		t.Fatalf("%d slots forwards, %d backwards, %d counted", len(slots), back, l.n)
	}
	for slot := int32(-1); int(slot) < len(l.links)+1; slot++ {
		if l.Contains(slot) != slices.Contains(slots, slot) {
			t.Fatalf("slot %d: Contains is %t, list %v", slot, l.Contains(slot), slots)
		}
	}
	return slots
}

type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// TestLRU_Transcript runs the calls of testdata/lru and compares the list after
// each, oldest first. Slots are named by single letters, which read better than
// numbers.
func TestLRU_Transcript(t *testing.T) {
	datadriven.Walk(t, "testdata/lru", func(t *testing.T, path string) {
		var l LRU
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			answer := runLRU(t, &l, d)
			return fmt.Sprintf("%soldest [%s] %d\n", answer, letters(contents(t, &l)), l.Len())
		})
	})
}

func letters(slots []int32) string {
	var b strings.Builder
	for _, s := range slots {
		b.WriteByte('a' + byte(s))
	}
	return b.String()
}

func runLRU(t *testing.T, l *LRU, d *datadriven.TestData) string {
	var slots []int32
	for _, c := range strings.TrimSpace(d.Input) {
		slots = append(slots, c-'a')
	}
	n, times := 0, 1
	d.MaybeScanArgs(t, "n", &n)
	d.MaybeScanArgs(t, "times", &times)
	switch d.Cmd {
	case "new":
		*l = LRU{}
		if n > 0 {
			l.Grow(n)
		}
	case "insert":
		for _, s := range slots {
			l.Insert(s)
		}
	case "path":
		for range times {
			insertPath(l, slots)
		}
	case "remove":
		var b strings.Builder
		for _, s := range slots {
			fmt.Fprintf(&b, "%t ", l.Remove(s))
		}
		return b.String()
	case "evict":
		return fmt.Sprintf("evicted [%s] ", letters(l.AppendOldest(nil, n)))
	case "child-churn":
		// A new child under the same path, time and again, each evicted before
		// the next one comes.
		for i := range int32(times) {
			child := 'z' - 'a' + i%2
			insertPath(l, append(slices.Clone(slots), child))
			if got := l.AppendOldest(nil, 1); !slices.Equal(got, []int32{child}) {
				t.Fatalf("round %d evicted %v, want %d", i, got, child)
			}
		}
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	return ""
}

func TestLRU_AgreesWithASlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l LRU
		var model []int32 // oldest first
		slot := rapid.Int32Range(0, 20)
		remove := func(s int32) bool {
			i := slices.Index(model, s)
			if i >= 0 {
				model = slices.Delete(model, i, i+1)
			}
			return i >= 0
		}
		insert := func(s int32) {
			remove(s)
			model = append(model, s)
		}
		t.Repeat(map[string]func(*rapid.T){
			"insert": func(t *rapid.T) {
				s := slot.Draw(t, "slot")
				l.Insert(s)
				insert(s)
			},
			"path": func(t *rapid.T) {
				path := rapid.SliceOfNDistinct(slot, 0, 6, rapid.ID).Draw(t, "path")
				insertPath(&l, path)
				for _, s := range slices.Backward(path) {
					insert(s)
				}
			},
			"remove": func(t *rapid.T) {
				s := rapid.Int32Range(-1, 30).Draw(t, "slot")
				if got, want := l.Remove(s), remove(s); got != want {
					t.Fatalf("Remove(%d) is %t, want %t", s, got, want)
				}
			},
			"grow": func(t *rapid.T) { l.Grow(rapid.IntRange(0, 40).Draw(t, "slots")) },
			"pop": func(t *rapid.T) {
				n := rapid.IntRange(-1, 8).Draw(t, "n")
				got := l.AppendOldest([]int32{99}, n)
				k := min(max(n, 0), len(model))
				if d := cmp.Diff(append([]int32{99}, model[:k]...), got); d != "" {
					t.Fatalf("popped (-want +got):\n%s", d)
				}
				model = model[k:]
			},
			"": func(t *rapid.T) {
				got := contents(t, &l)
				if !slices.Equal(got, model) {
					t.Fatalf("list %v, want %v", got, model)
				}
			},
		})
	})
}

// tree is the other way to do it: a prefix tree of which the least recently used
// leaf goes first; of two leaves that were used in the same request (which one
// path cannot have) any.
type tree struct {
	parent map[int32]int32
	used   map[int32]int // request of the last use; holds the resident pages
}

func (tr *tree) evict() int32 {
	children := map[int32]int{}
	for page := range tr.used {
		children[tr.parent[page]]++
	}
	victim, oldest := int32(-1), 0
	for page, at := range tr.used {
		if children[page] == 0 && (victim < 0 || at < oldest) {
			victim, oldest = page, at
		}
	}
	delete(tr.used, victim)
	return victim
}

// requests draws prompts that share prefixes: each is the path to a page of a
// random tree.
func requests(t *rapid.T) (parent map[int32]int32, paths [][]int32) {
	pages := rapid.Int32Range(1, 25).Draw(t, "pages")
	parent = map[int32]int32{}
	for p := range pages {
		// -1 is the root of all. Most pages continue the one before them.
		parent[p] = p - 1
		if rapid.IntRange(0, 2).Draw(t, "fork") == 0 {
			parent[p] = rapid.Int32Range(-1, p-1).Draw(t, "parent")
		}
	}
	for range rapid.IntRange(1, 40).Draw(t, "requests") {
		var path []int32
		for p := rapid.Int32Range(0, pages-1).Draw(t, "last page"); p >= 0; p = parent[p] {
			path = append(path, p)
		}
		slices.Reverse(path)
		paths = append(paths, path)
	}
	return parent, paths
}

// serve runs one request: it makes room for what is not there by evicting, after
// touching what is there, and reports the victims.
func serve(l *LRU, path []int32, capacity int, insert func([]int32)) (victims []int32) {
	hits := 0
	for hits < len(path) && l.Contains(path[hits]) {
		hits++
	}
	insert(path[:hits])
	if need := l.Len() + len(path) - hits - capacity; need > 0 {
		victims = l.AppendOldest(nil, need)
	}
	insert(path)
	return victims
}

func TestLRU_PathsEvictWhatATreeWouldEvict(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parent, paths := requests(t)
		capacity := rapid.IntRange(25, 40).Draw(t, "capacity") - rapid.IntRange(0, 20).Draw(t, "less")
		var l LRU
		tr := &tree{parent: parent, used: map[int32]int{}}
		for at, path := range paths {
			if len(path) > capacity {
				continue
			}
			for _, p := range path {
				if _, ok := tr.used[p]; !ok {
					break
				}
				tr.used[p] = at
			}
			got := serve(&l, path, capacity, func(path []int32) { insertPath(&l, path) })
			var want []int32
			for range got {
				want = append(want, tr.evict())
			}
			if !slices.Equal(got, want) {
				t.Fatalf("request %d %v evicted %v, a tree evicts %v", at, path, got, want)
			}
			for _, p := range path {
				tr.used[p] = at
			}
		}
	})
}

// orphans counts resident pages that lack the page before them.
func orphans(l *LRU, parent map[int32]int32) (n int) {
	for page, before := range parent {
		if before >= 0 && l.Contains(page) && !l.Contains(before) {
			n++
		}
	}
	return n
}

func TestLRU_NoResidentPageLacksThePageBeforeIt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parent, paths := requests(t)
		capacity := rapid.IntRange(1, 25).Draw(t, "capacity")
		var l LRU
		for at, path := range paths {
			if len(path) > capacity {
				continue
			}
			serve(&l, path, capacity, func(path []int32) { insertPath(&l, path) })
			if n := orphans(&l, parent); n != 0 {
				t.Fatalf("request %d %v left %d pages without the page before them: %v", at, path, n, contents(t, &l))
			}
		}
	})
}

// The control of the test above: root first, the order is wrong and it shows.
func TestLRU_RootFirstLeavesPagesWithoutThePageBeforeThem(t *testing.T) {
	var l LRU
	rootFirst := func(path []int32) {
		for _, p := range path {
			l.Insert(p)
		}
	}
	serve(&l, []int32{0, 1, 2}, 4, rootFirst)
	serve(&l, []int32{3, 4}, 4, rootFirst)
	if orphans(&l, map[int32]int32{0: -1, 1: 0, 2: 1, 3: -1, 4: 3}) == 0 {
		t.Fatalf("nothing was left behind: %v", contents(t, &l))
	}
}

func TestLRU_DoesNotAllocateOnceGrown(t *testing.T) {
	var l LRU
	l.Grow(64)
	path := make([]int32, 64)
	for i := range path {
		path[i] = int32(i)
	}
	buf := make([]int32, 0, 64)
	if n := testing.AllocsPerRun(20, func() {
		insertPath(&l, path)
		buf = l.AppendOldest(buf[:0], 32)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkLRU(b *testing.B) {
	const slots = 1 << 16
	var l LRU
	l.Grow(slots)
	path := make([]int32, 32)
	next := int32(0)
	buf := make([]int32, 0, len(path))
	b.ReportAllocs()
	for b.Loop() { // one request of 32 new pages, 32 evicted
		for i := range path {
			path[i] = next
			next = (next + 7919) % slots
		}
		insertPath(&l, path)
		if l.Len() > slots/2 {
			buf = l.AppendOldest(buf[:0], len(path))
		}
	}
}
