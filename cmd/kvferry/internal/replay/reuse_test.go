package replay

import (
	"errors"
	"math"
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/evict"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// numbered is a trace in pages that are numbered as they first come. It is made
// here once more, so that what is under test is not its own witness.
type numbered struct {
	paths  [][]int32
	limits []int // pages of a path that can be hit
	pages  int
}

func number(t *Trace, pageSize int) *numbered {
	n := &numbered{}
	known := map[page.Key]int32{}
	for i := range t.Requests {
		var path []int32
		for _, k := range AppendKeys(nil, page.Key{}, &t.Requests[i], pageSize) {
			if _, ok := known[k]; !ok {
				known[k] = int32(len(known))
			}
			path = append(path, known[k])
		}
		n.paths, n.limits = append(n.paths, path), append(n.limits, (t.Requests[i].Input-1)/pageSize)
	}
	n.pages = len(known)
	return n
}

// hits counts the prefix of a path that is there.
func hits(path []int32, limit int, there func(int32) bool) (n int64) {
	for i, p := range path {
		if i >= limit || !there(p) {
			break
		}
		n++
	}
	return n
}

// lruByHand keeps one list, and is asked one size at a time.
func (n *numbered) lruByHand(capacity int) (total int64) {
	var l evict.LRU
	for i, path := range n.paths {
		total += hits(path, n.limits[i], l.Contains)
		for _, slot := range slices.Backward(path) {
			l.Insert(slot)
		}
		l.AppendOldest(nil, l.Len()-capacity)
	}
	return total
}

// optimumByHand tries everything: which pages to keep after each request, of those
// that are there and those of the request.
func (n *numbered) optimumByHand(capacity int) int64 {
	best := map[uint32]int64{0: 0}
	for i, path := range n.paths {
		var own uint32
		for _, p := range path {
			own |= 1 << p
		}
		after := map[uint32]int64{}
		for kept, sum := range best {
			sum += hits(path, n.limits[i], func(p int32) bool { return kept>>p&1 == 1 })
			all := kept | own
			for some := all; ; some = (some - 1) & all {
				if bits.OnesCount32(some) <= capacity {
					after[some] = max(after[some], sum)
				}
				if some == 0 {
					break
				}
			}
		}
		best = after
	}
	var most int64
	for _, sum := range best {
		most = max(most, sum)
	}
	return most
}

// smallTrace draws a trace of short paths with much in common. Some end with a
// partial page, some with a whole one, which cannot be hit.
func smallTrace(t *rapid.T, requests int) *Trace {
	trace := &Trace{Name: "drawn"}
	for range rapid.IntRange(1, requests).Draw(t, "requests") {
		ids := rapid.SliceOfN(rapid.Int64Range(1, 2), 1, 4).Draw(t, "ids")
		input := len(ids) * IDTokens
		if rapid.Bool().Draw(t, "partial") {
			input--
		}
		trace.Requests = append(trace.Requests, Request{Input: input, IDs: ids})
	}
	return trace
}

func TestUses_OptimumIsTheBestOfAllChoices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		trace := smallTrace(t, 7)
		u, n := newUses(trace, IDTokens), number(trace, IDTokens)
		if n.pages > 12 { // too many choices
			t.Skip()
		}
		for capacity := range 5 {
			if got, want := u.optimum(capacity), n.optimumByHand(capacity); got != want {
				t.Fatalf("%d pages: %d hits, the best choice has %d", capacity, got, want)
			}
		}
	})
}

func TestUses_OneListOfAnySizeHitsWhatTheDistancesSay(t *testing.T) {
	check := func(t rapid.TB, trace *Trace, pageSize int, capacities ...int) {
		u, n := newUses(trace, pageSize), number(trace, pageSize)
		if u.distinct != n.pages {
			t.Errorf("%d different pages, want %d", u.distinct, n.pages)
		}
		for _, c := range append(capacities, n.pages-1, n.pages, n.pages+1) {
			if got, want := u.lru(max(c, 0)), n.lruByHand(max(c, 0)); got != want {
				t.Errorf("page size %d, %d pages: %d hits, one list has %d", pageSize, c, got, want)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) { check(t, smallTrace(t, 20), IDTokens, 0, 1, 2, 3, 5, 8) })
	for _, pageSize := range []int{IDTokens, 128, 1024} {
		check(t, Generate(3, 400), pageSize, 1, 50, 247, 1000, 2500)
	}
}

// The distances against their definition.
func TestUses_DistanceCountsThePagesUsedSince(t *testing.T) {
	trace := Generate(5, 60)
	u, n := newUses(trace, IDTokens), number(trace, IDTokens)
	var stack []int32 // the most recent first
	place := 0
	for _, path := range n.paths {
		for _, p := range path {
			if got, want := int(u.distance[place]), slices.Index(stack, p)+1; got != want {
				t.Fatalf("place %d: distance %d, want %d", place, got, want)
			}
			place++
		}
		stack = slices.DeleteFunc(stack, func(p int32) bool { return slices.Contains(path, p) })
		stack = append(slices.Clone(path), stack...)
	}
}

// The figures of two independent simulators for the public trace; a partial last
// page is not kept. Ratios are per page looked up, partial pages included.
func TestUses_OfTheRealTraceAreTheKnownOnes(t *testing.T) {
	u := newUses(realTrace(t), IDTokens)
	if u.lookedUp != 288_500 || len(u.next) != 276_491 {
		t.Errorf("%d pages looked up, %d whole", u.lookedUp, len(u.next))
	}
	for _, x := range []struct {
		pages    int
		lru, opt float64
	}{
		{1_000, 0.0450, 0.1906},
		{3_000, 0.0673, 0.2942},
		{5_000, 0.1185, 0.3409},
		{10_000, 0.2149, 0.3660},
		{20_000, 0.2936, 0.3660},
		{30_000, 0.3305, 0.3660},
		{50_000, 0.3561, 0.3660},
		{100_000, 0.3637, 0.3660},
		{u.distinct, 0.3660, 0.3660},
	} {
		lru, opt := *u.ratio(u.lru(x.pages)), *u.ratio(u.optimum(x.pages))
		if math.Abs(lru-x.lru) > 0.00006 || math.Abs(opt-x.opt) > 0.00006 {
			t.Errorf("%d pages: LRU %.5f, want %.4f; optimum %.5f, want %.4f", x.pages, lru, x.lru, opt, x.opt)
		}
	}
	for pages, want := range map[int]int64{10_000: 62_005, 30_000: 95_337, 50_000: 102_724, u.distinct: 105_592} {
		if got := u.lru(pages); got != want {
			t.Errorf("%d pages: %d hits, want %d", pages, got, want)
		}
	}
}

// The same simulators kept partial last pages, and let all of a prompt be hit.
func TestUses_OptimumWithPartialPagesIsTheKnownOne(t *testing.T) {
	trace := realTrace(t)
	for i := range trace.Requests {
		trace.Requests[i].Input = len(trace.Requests[i].IDs) * IDTokens
	}
	u := newUses(trace, IDTokens)
	copy(u.limits, u.ends)
	u.lookAhead(slices.Concat(number(trace, IDTokens).paths...))
	for pages, want := range map[int]float64{1_000: 0.1907, 3_000: 0.2945, 5_000: 0.3412, 10_000: 0.3664, 50_000: 0.3664} {
		if got := *u.ratio(u.optimum(pages)); math.Abs(got-want) > 0.00006 {
			t.Errorf("%d pages: %.5f, want %.4f", pages, got, want)
		}
	}
}

func TestCheckUses_TooManyPagesAreRefusedWithARemedy(t *testing.T) {
	trace := &Trace{Requests: []Request{{Input: MaxTokens}, {Input: 1}}}
	if err := checkUses(trace, 1, "--sweep"); !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
		t.Errorf("%d pages: error %v, remedy %q", wholePages(trace, 1), err, fault.RemedyOf(err))
	}
	trace.Requests = trace.Requests[:1]
	if err := checkUses(trace, 1, "--sweep"); err != nil {
		t.Errorf("%d pages: %v", wholePages(trace, 1), err)
	}
}

func BenchmarkUses(b *testing.B) {
	trace := realTrace(b)
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			newUses(trace, IDTokens)
		}
	})
	u := newUses(trace, IDTokens)
	b.Run("optimum", func(b *testing.B) {
		for b.Loop() {
			u.optimum(10_000)
		}
	})
}
