package page

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

func newAllocator(t tb, o AllocatorOptions) *Allocator {
	t.Helper()
	return must[*Allocator](t)(NewAllocator(o))
}

func ids(lo, n int) []ID {
	s := make([]ID, n)
	for i := range s {
		s[i] = ID(lo + i)
	}
	return s
}

func wantIDs(t tb, got, want []ID) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("ids (-want +got):\n%s", d)
	}
}

func TestNewAllocator_RefusesImpossibleOptions(t *testing.T) {
	for _, c := range []struct {
		o     AllocatorOptions
		words []string
	}{
		{AllocatorOptions{Pages: -1}, []string{"pages", "-1"}},
		{AllocatorOptions{Pages: math.MaxInt32 + 1}, []string{"pages", "2147483648"}},
		{AllocatorOptions{Pages: 8, Capacity: 7}, []string{"capacity", "7", "8"}},
		{AllocatorOptions{Pages: 8, Capacity: -1}, []string{"capacity", "-1"}},
		{AllocatorOptions{Pages: 8, Capacity: math.MaxInt32 + 1}, []string{"capacity", "2147483648"}},
		{AllocatorOptions{Pages: 8, Order: 2}, []string{"order 2", "runs", "fifo"}},
	} {
		t.Run(fmt.Sprint(c.o), func(t *testing.T) {
			_, err := NewAllocator(c.o)
			faulttest.Refused(t, err, fault.Invalid, c.words...)
		})
	}
}

func TestAllocator_HandsOutAFreshPoolAscending(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		t.Run(order.String(), func(t *testing.T) {
			a := newAllocator(t, AllocatorOptions{Pages: 300, Order: order})
			var got []ID
			for _, n := range []int{1, 2, 0, 64, 65, 100, 68} {
				got = must[[]ID](t)(a.Alloc(got, n))
			}
			wantIDs(t, got, ids(0, 300))
		})
	}
}

func TestAllocator_FullSaysWhatThereIsAndTakesNothing(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		t.Run(order.String(), func(t *testing.T) {
			a := newAllocator(t, AllocatorOptions{Pages: 10, Order: order})
			must[[]ID](t)(a.Alloc(nil, 10))
			noError(t, a.Free([]ID{2, 7, 8, 5}))
			dst := []ID{99}
			got, err := a.Alloc(dst, 6)
			faulttest.Refused(t, err, fault.Full, "6", "free 4", "largest run 2")
			wantIDs(t, got, []ID{99})
			var full *FullError
			if !errors.As(err, &full) || *full != (FullError{Asked: 6, Free: 4, LargestRun: 2}) || full.Shortfall() != 2 {
				t.Fatalf("got %#v", err)
			}
			if fault.KindOf(err) != fault.Full || fault.RemedyOf(err) == "" {
				t.Fatalf("kind %v, remedy %q", fault.KindOf(err), fault.RemedyOf(err))
			}
			got, ok := a.TryAlloc(dst, 6)
			wantIDs(t, got, []ID{99})
			if ok || a.NumFree() != 4 || a.LargestRun() != 2 {
				t.Fatalf("ok %t, %d free, largest %d", ok, a.NumFree(), a.LargestRun())
			}
			if _, ok := a.TryAlloc(nil, 4); !ok {
				t.Fatal("4 free pages were not handed out")
			}
		})
	}
}

func TestAllocator_ZeroIsFineAndNegativeIsRefused(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		for _, pages := range []int{0, 1} {
			a := newAllocator(t, AllocatorOptions{Pages: pages, Order: order})
			wantIDs(t, must[[]ID](t)(a.Alloc(nil, 0)), nil)
			noError(t, a.Free(nil))
			_, err := a.Alloc(nil, -1)
			faulttest.Refused(t, err, fault.Invalid, "-1")
			if _, ok := a.TryAlloc(nil, -1); ok {
				t.Fatal("TryAlloc took -1 pages")
			}
			_, err = a.Alloc(nil, pages+1)
			faulttest.Refused(t, err, fault.Full)
			_, err = a.Alloc(nil, math.MaxInt)
			faulttest.Refused(t, err, fault.Full)
		}
	}
}

func TestAllocator_FreeRefusesAndFreesNothing(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		for _, c := range []struct {
			name  string
			ids   []ID
			words []string
		}{
			{"free already", []ID{0, 1, 6}, []string{"page 6", "free already"}},
			{"named twice", []ID{0, 1, 0}, []string{"page 0", "twice"}},
			{"negative", []ID{0, -1}, []string{"page -1", "8 pages"}},
			{"one too high", []ID{0, 8}, []string{"page 8", "8 pages"}},
			{"not grown to yet", []ID{0, 9}, []string{"page 9", "8 pages"}},
			{"far too high", []ID{math.MaxInt32}, []string{"page 2147483647"}},
			{"far too low", []ID{math.MinInt32}, []string{"page -2147483648"}},
		} {
			t.Run(order.String()+"/"+c.name, func(t *testing.T) {
				a := newAllocator(t, AllocatorOptions{Pages: 8, Capacity: 16, Order: order})
				must[[]ID](t)(a.Alloc(nil, 6))
				faulttest.Refused(t, a.Free(c.ids), fault.Invalid, c.words...)
				if a.NumFree() != 2 {
					t.Fatalf("%d are free, want 2", a.NumFree())
				}
				noError(t, a.free.check())
				noError(t, a.Free(ids(0, 6))) // each of them was still taken
			})
		}
	}
}

func TestAllocator_FreeTwiceIsRefused(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		a := newAllocator(t, AllocatorOptions{Pages: 4, Order: order})
		got := must[[]ID](t)(a.Alloc(nil, 3))
		noError(t, a.Free(got))
		faulttest.Refused(t, a.Free(got), fault.Invalid, "page 0", "free already")
	}
}

func TestAllocator_FIFOReusesPagesInTheOrderGivenBack(t *testing.T) {
	a := newAllocator(t, AllocatorOptions{Pages: 6, Capacity: 8, Order: FIFO})
	must[[]ID](t)(a.Alloc(nil, 4))
	noError(t, a.Free([]ID{3, 1, 2}))
	wantIDs(t, must[[]ID](t)(a.Alloc(nil, 3)), []ID{4, 5, 3})
	noError(t, a.Free([]ID{5}))
	noError(t, a.Grow(2))
	wantIDs(t, must[[]ID](t)(a.Alloc(nil, 5)), []ID{1, 2, 5, 6, 7})
}

func TestAllocator_TakesTheSmallestRunThatFits(t *testing.T) {
	// Free runs of 9, 3 and 5 pages, and a long tail.
	a := newAllocator(t, AllocatorOptions{Pages: 400})
	must[[]ID](t)(a.Alloc(nil, 200))
	noError(t, a.Free(ids(10, 9)))
	noError(t, a.Free(ids(30, 3)))
	noError(t, a.Free(ids(50, 5)))
	for _, c := range []struct{ n, want int }{{3, 30}, {4, 50}, {9, 10}, {1, 54}, {150, 200}} {
		wantIDs(t, must[[]ID](t)(a.Alloc(nil, c.n)), ids(c.want, c.n))
	}
}

func TestAllocator_FindsALongRunBehindManyShorterOnesOfItsClass(t *testing.T) {
	// 40 free runs of 70 pages and one of 100 are all of one class, and the one
	// that fits is the last in the list.
	a := newAllocator(t, AllocatorOptions{Pages: 101 + 40*71})
	must[[]ID](t)(a.Alloc(nil, a.Pages()))
	noError(t, a.Free(ids(0, 100)))
	for i := range 40 {
		noError(t, a.Free(ids(101+i*71, 70)))
	}
	if a.LargestRun() != 100 {
		t.Fatalf("largest run %d, want 100", a.LargestRun())
	}
	wantIDs(t, must[[]ID](t)(a.Alloc(nil, 90)), ids(0, 90))
	noError(t, a.free.check())
}

func TestAllocator_TakesTheLargestRunsWhenNoneFits(t *testing.T) {
	a := newAllocator(t, AllocatorOptions{Pages: 60})
	must[[]ID](t)(a.Alloc(nil, 60))
	noError(t, a.Free(ids(0, 2)))
	noError(t, a.Free(ids(10, 8)))
	noError(t, a.Free(ids(30, 5)))
	noError(t, a.Free(ids(50, 1)))
	wantIDs(t, must[[]ID](t)(a.Alloc(nil, 14)), slices.Concat(ids(10, 8), ids(30, 5), ids(50, 1)))
	wantIDs(t, must[[]ID](t)(a.Alloc(nil, 2)), ids(0, 2))
}

func TestAllocator_JoinsPagesThatComeBack(t *testing.T) {
	for _, c := range []struct {
		name  string
		order func(ids []ID)
	}{
		{"ascending", func([]ID) {}},
		{"descending", slices.Reverse[[]ID]},
		{"shuffled", func(ids []ID) {
			rand.New(rand.NewPCG(7, 7)).Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		}},
	} {
		for _, step := range []int{1, 7, 100} {
			t.Run(fmt.Sprintf("%s/%d at a time", c.name, step), func(t *testing.T) {
				a := newAllocator(t, AllocatorOptions{Pages: 100})
				got := must[[]ID](t)(a.Alloc(nil, 100))
				c.order(got)
				for batch := range slices.Chunk(got, step) {
					noError(t, a.Free(batch))
					noError(t, a.free.check())
				}
				if a.LargestRun() != 100 {
					t.Fatalf("largest run %d, want 100", a.LargestRun())
				}
			})
		}
	}
}

func TestAllocator_GrowJoinsTheLastRunAndStopsAtTheCapacity(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		t.Run(order.String(), func(t *testing.T) {
			a := newAllocator(t, AllocatorOptions{Pages: 4, Capacity: 10, Order: order})
			must[[]ID](t)(a.Alloc(nil, 2))
			noError(t, a.Grow(3))
			if a.Pages() != 7 || a.NumFree() != 5 || a.LargestRun() != 5 {
				t.Fatalf("%d pages, %d free, largest run %d", a.Pages(), a.NumFree(), a.LargestRun())
			}
			wantIDs(t, must[[]ID](t)(a.Alloc(nil, 5)), ids(2, 5))
			faulttest.Refused(t, a.Grow(4), fault.Invalid, "4 pages more", "capacity is 10")
			faulttest.Refused(t, a.Grow(-1), fault.Invalid, "-1")
			faulttest.Refused(t, a.Grow(math.MaxInt), fault.Invalid)
			noError(t, a.Grow(0))
			noError(t, a.Grow(3))
			wantIDs(t, must[[]ID](t)(a.Alloc(nil, 3)), ids(7, 3))
		})
	}
}

// model is an allocator that is obviously right: a set of free ids and, for
// FIFO, their order.
type model struct {
	order Order
	free  []bool
	queue []ID
}

// runs returns the lengths of the free runs, longest first.
func (m *model) runs() []int {
	var runs []int
	for i := 0; i < len(m.free); i++ {
		n := 0
		for ; i < len(m.free) && m.free[i]; i++ {
			n++
		}
		if n > 0 {
			runs = append(runs, n)
		}
	}
	slices.SortFunc(runs, func(a, b int) int { return b - a })
	return runs
}

// fewest is how many runs n pages need at least.
func (m *model) fewest(n int) (count int) {
	for _, r := range m.runs() {
		if n <= 0 {
			break
		}
		n -= r
		count++
	}
	return count
}

func (m *model) numFree() (n int) {
	for _, free := range m.free {
		if free {
			n++
		}
	}
	return n
}

func (m *model) grow(n int) {
	for range n {
		m.queue = append(m.queue, ID(len(m.free)))
		m.free = append(m.free, true)
	}
}

func TestAllocator_AgreesWithASetOfFreeIDs(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		t.Run(order.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { checkAgainstModel(t, order) })
		})
	}
}

func checkAgainstModel(t *rapid.T, order Order) {
	capacity := rapid.IntRange(0, 200).Draw(t, "capacity")
	pages := rapid.IntRange(0, capacity).Draw(t, "pages")
	a := newAllocator(t, AllocatorOptions{Pages: pages, Capacity: capacity, Order: order})
	m := &model{order: order}
	m.grow(pages)
	var held []ID
	t.Repeat(map[string]func(*rapid.T){
		"alloc": func(t *rapid.T) {
			n := rapid.OneOf(rapid.IntRange(-1, 8), rapid.IntRange(0, 210)).Draw(t, "n")
			got, err := a.Alloc([]ID{None}, n)
			switch {
			case n < 0:
				faulttest.Refused(t, err, fault.Invalid)
				return
			case n > m.numFree():
				largest := 0
				if runs := m.runs(); len(runs) > 0 {
					largest = runs[0]
				}
				var full *FullError
				if !errors.As(err, &full) || *full != (FullError{n, m.numFree(), largest}) || len(got) != 1 {
					t.Fatalf("got %v, %v; want %d of %d, largest %d", got, err, n, m.numFree(), largest)
				}
				return
			}
			noError(t, err)
			if got[0] != None || len(got) != n+1 {
				t.Fatalf("got %v, want %d ids behind what was there", got, n)
			}
			got = got[1:]
			runs := 0
			for i, id := range got {
				if !m.free[id] {
					t.Fatalf("page %d was not free", id)
				}
				if i == 0 || id != got[i-1]+1 {
					runs++
				}
			}
			if order == FIFO {
				wantIDs(t, got, append([]ID{}, m.queue[:n]...))
				m.queue = m.queue[n:]
			} else if fewest := m.fewest(n); runs != fewest {
				t.Fatalf("%d pages came in %d runs, %d would do: %v", n, runs, fewest, got)
			}
			for _, id := range got {
				m.free[id] = false
			}
			held = append(held, got...)
		},
		"free": func(t *rapid.T) {
			n := rapid.IntRange(0, len(held)).Draw(t, "n")
			if rapid.Bool().Draw(t, "shuffle") {
				held = rapid.Permutation(held).Draw(t, "held")
			}
			back := held[:n]
			noError(t, a.Free(back))
			for _, id := range back {
				m.free[id] = true
			}
			m.queue = append(m.queue, back...)
			held = held[n:]
		},
		"free wrongly": func(t *rapid.T) {
			bad := rapid.Int32Range(-2, int32(len(m.free))+2).Draw(t, "bad")
			list := append(slices.Clone(held), ID(bad)) // held already, free, or no page
			faulttest.Refused(t, a.Free(list), fault.Invalid, object(ID(bad)))
		},
		"grow": func(t *rapid.T) {
			n := rapid.IntRange(-1, 20).Draw(t, "n")
			if err := a.Grow(n); n < 0 || n > capacity-len(m.free) {
				faulttest.Refused(t, err, fault.Invalid)
				return
			}
			m.grow(n)
		},
		"": func(t *rapid.T) {
			noError(t, a.free.check())
			if a.Pages() != len(m.free) || a.NumFree() != m.numFree() || a.NumFree()+len(held) != a.Pages() {
				t.Fatalf("%d pages, %d free, %d held; the model has %d and %d", a.Pages(), a.NumFree(), len(held), len(m.free), m.numFree())
			}
			largest := 0
			if runs := m.runs(); len(runs) > 0 {
				largest = runs[0]
			}
			if a.LargestRun() != largest {
				t.Fatalf("largest run %d, want %d", a.LargestRun(), largest)
			}
		},
	})
}

// The checks of the free list are what other tests trust, so each of its rules
// is broken once.
func TestFreelist_CheckNoticesBrokenBooks(t *testing.T) {
	for _, c := range []struct {
		name  string
		order Order
		spoil func(f *freelist)
	}{
		{"count", Runs, func(f *freelist) { f.count++ }},
		{"flag set", Runs, func(f *freelist) { f.isFree[2] = true; f.count++ }},
		{"flag lost", Runs, func(f *freelist) { f.isFree[20] = false; f.count-- }},
		{"head of run", Runs, func(f *freelist) { f.runs.tags[16].size-- }},
		{"tail of run", Runs, func(f *freelist) { f.runs.tags[31].size++ }},
		{"inside of run", Runs, func(f *freelist) { f.runs.tags[20].size = 3 }},
		{"tag of a page in use", Runs, func(f *freelist) { f.runs.tags[1].size = 1 }},
		{"run in no list", Runs, func(f *freelist) { f.runs.present[0] &^= 1 << 3 }},
		{"run in the wrong list", Runs, func(f *freelist) { f.runs.present[0] |= 1 << 5; f.runs.heads[5] = 4 }},
		{"back link", Runs, func(f *freelist) { f.runs.tags[4].prev = 16 }},
		{"queued twice", FIFO, func(f *freelist) { f.queue[f.head] = f.queue[f.head+1] }},
		{"queued in use", FIFO, func(f *freelist) { f.queue[f.head] = 0 }},
		{"queued out of range", FIFO, func(f *freelist) { f.queue[f.head] = 99 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newAllocator(t, AllocatorOptions{Pages: 32, Capacity: 40, Order: c.order})
			must[[]ID](t)(a.Alloc(nil, 16))
			noError(t, a.Free(ids(4, 4)))
			noError(t, a.free.check())
			c.spoil(&a.free)
			if err := a.free.check(); err == nil {
				t.Fatal("the check saw nothing")
			}
		})
	}
}

func TestAllocator_DoesNotAllocate(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		a := newAllocator(t, AllocatorOptions{Pages: 1 << 12, Order: order})
		buf := make([]ID, 0, 64)
		if n := testing.AllocsPerRun(100, func() {
			buf, _ = a.Alloc(buf[:0], 64)
			_ = a.Free(buf)
			buf, _ = a.TryAlloc(buf[:0], 1<<13)
		}); n != 0 {
			t.Errorf("%v: %v allocations", order, n)
		}
	}
}

func BenchmarkAllocator(b *testing.B) {
	for _, order := range []Order{Runs, FIFO} {
		for _, n := range []int{1, 8, 64, 512} {
			b.Run(fmt.Sprintf("%v/pair/n=%d", order, n), func(b *testing.B) {
				a := newAllocator(b, AllocatorOptions{Pages: 1 << 16, Order: order})
				buf := make([]ID, 0, n)
				b.ReportAllocs()
				for b.Loop() {
					buf, _ = a.Alloc(buf[:0], n)
					_ = a.Free(buf)
				}
			})
			// Every round frees the pages of a random holder and takes 1 to 2n-1 for
			// it anew, in a pool of which about seven eighths are taken.
			b.Run(fmt.Sprintf("%v/churned/n=%d", order, n), func(b *testing.B) {
				rng := rand.New(rand.NewPCG(1, uint64(n)))
				a := newAllocator(b, AllocatorOptions{Pages: 1 << 16, Order: order})
				held := make([][]ID, 7<<13/n)
				for i := range held {
					held[i] = make([]ID, 0, 2*n)
				}
				churn := func() {
					h := &held[rng.IntN(len(held))]
					_ = a.Free(*h)
					*h, _ = a.TryAlloc((*h)[:0], 1+rng.IntN(2*n-1))
				}
				for range 8 * len(held) {
					churn()
				}
				b.ReportAllocs()
				for b.Loop() {
					churn()
				}
			})
		}
		b.Run(fmt.Sprintf("%v/no two adjacent/n=64", order), func(b *testing.B) {
			a := newAllocator(b, AllocatorOptions{Pages: 1 << 16, Order: order})
			all := must[[]ID](b)(a.Alloc(nil, 1<<16))
			for i := 0; i < len(all); i += 2 {
				noError(b, a.Free(all[i:i+1]))
			}
			buf := make([]ID, 0, 64)
			b.ReportAllocs()
			for b.Loop() {
				buf, _ = a.Alloc(buf[:0], 64)
				_ = a.Free(buf)
			}
		})
	}
}
