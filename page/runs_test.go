package page

import (
	order "cmp"
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

func TestAppendRuns_MergesWhatIsAdjacentOnBothSides(t *testing.T) {
	whole := make([]Pair, 1000)
	for i := range whole {
		whole[i] = Pair{ID(i), ID(i)}
	}
	for _, c := range []struct {
		name  string
		pairs []Pair
		want  []Run
	}{
		{"none", nil, nil},
		{"one", []Pair{{7, 3}}, []Run{{7, 3, 1}}},
		{"ascending in both", []Pair{{4, 10}, {5, 11}, {6, 12}}, []Run{{4, 10, 3}}},
		{"ascending in both, not in order", []Pair{{6, 12}, {4, 10}, {5, 11}}, []Run{{4, 10, 3}}},
		{"descending in both is one run", []Pair{{6, 12}, {5, 11}, {4, 10}}, []Run{{4, 10, 3}}},
		{"ascending in the destination only", []Pair{{4, 10}, {5, 20}, {6, 30}}, []Run{{4, 10, 1}, {5, 20, 1}, {6, 30, 1}}},
		{"ascending in the source only", []Pair{{9, 10}, {4, 11}, {7, 12}}, []Run{{4, 11, 1}, {7, 12, 1}, {9, 10, 1}}},
		{"opposite directions", []Pair{{4, 12}, {5, 11}, {6, 10}}, []Run{{4, 12, 1}, {5, 11, 1}, {6, 10, 1}}},
		{"gap in both", []Pair{{1, 1}, {2, 2}, {4, 4}, {5, 5}}, []Run{{1, 1, 2}, {4, 4, 2}}},
		{"gap in the source", []Pair{{1, 1}, {2, 2}, {3, 4}}, []Run{{1, 1, 2}, {3, 4, 1}}},
		{"gap in the destination", []Pair{{1, 1}, {2, 2}, {4, 3}}, []Run{{1, 1, 2}, {4, 3, 1}}},
		{"one source for two destinations", []Pair{{1, 5}, {2, 5}}, []Run{{1, 5, 1}, {2, 5, 1}}},
		{"whole pool", whole, []Run{{0, 0, 1000}}},
		{"highest ids", []Pair{{math.MaxInt32, math.MaxInt32}, {math.MaxInt32 - 1, math.MaxInt32 - 1}}, []Run{{math.MaxInt32 - 1, math.MaxInt32 - 1, 2}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := must[[]Run](t)(AppendRuns(nil, c.pairs))
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("runs (-want +got):\n%s", d)
			}
		})
	}
}

func TestAppendRuns_KeepsWhatWasThere(t *testing.T) {
	// The last run that was there must not be joined to the first new one.
	before := []Run{{0, 0, 4}}
	got := must[[]Run](t)(AppendRuns(before, []Pair{{4, 4}}))
	if d := cmp.Diff([]Run{{0, 0, 4}, {4, 4, 1}}, got); d != "" {
		t.Errorf("runs (-want +got):\n%s", d)
	}
}

func TestAppendRuns_RefusesADestinationNamedTwice(t *testing.T) {
	before := []Run{{9, 9, 1}}
	got, err := AppendRuns(before, []Pair{{3, 1}, {1, 1}, {3, 8}})
	faulttest.Refused(t, err, fault.Invalid, "page 3", "pages 1 and 8")
	if d := cmp.Diff(before, got); d != "" {
		t.Errorf("runs changed (-want +got):\n%s", d)
	}
}

func TestCheckDisjoint(t *testing.T) {
	for _, c := range []struct {
		name  string
		pairs []Pair
		bad   string
	}{
		{"none", nil, ""},
		{"apart", []Pair{{0, 10}, {1, 11}}, ""},
		{"interleaved", []Pair{{0, 1}, {2, 3}, {4, 5}}, ""},
		{"one source twice", []Pair{{0, 1}, {2, 1}}, ""},
		{"swap", []Pair{{0, 1}, {1, 0}}, "page 1"},
		{"chain", []Pair{{5, 4}, {6, 5}}, "page 5"},
		{"page onto itself", []Pair{{3, 3}}, "page 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := CheckDisjoint(c.pairs)
			if c.bad == "" {
				noError(t, err)
				return
			}
			faulttest.Refused(t, err, fault.Invalid, c.bad)
			if fault.RemedyOf(err) == "" {
				t.Error("no remedy")
			}
		})
	}
}

func genPairs(t *rapid.T) []Pair {
	// Few ids, so that neighbours, duplicates and overlaps are common.
	id := rapid.Int32Range(0, 30)
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Pair {
		return Pair{ID(id.Draw(t, "dst")), ID(id.Draw(t, "src"))}
	}), 0, 20).Draw(t, "pairs")
}

func TestAppendRuns_CopiesTheSamePagesInTheFewestRuns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs := genPairs(t)
		want := map[ID]ID{}
		for _, p := range pairs {
			want[p.Dst] = p.Src
		}
		runs, err := AppendRuns(nil, pairs)
		if len(want) != len(pairs) {
			faulttest.Refused(t, err, fault.Invalid)
			return
		}
		noError(t, err)
		got := map[ID]ID{}
		for i, r := range runs {
			for j := range r.N {
				got[r.Dst+ID(j)] = r.Src + ID(j)
			}
			if i == 0 {
				continue
			}
			last := runs[i-1]
			end := last.Dst + ID(last.N)
			if r.Dst < end {
				t.Fatalf("%v is not behind %v", r, last)
			}
			if r.Dst == end && r.Src == last.Src+ID(last.N) {
				t.Fatalf("%v could be joined to %v", r, last)
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("pages copied (-want +got):\n%s", d)
		}
	})
}

func TestCheckDisjoint_RefusesExactlyWhatOrderCouldChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs := genPairs(t)
		dst := map[ID]bool{}
		for _, p := range pairs {
			dst[p.Dst] = true
		}
		bad := slices.ContainsFunc(pairs, func(p Pair) bool { return dst[p.Src] })
		if err := CheckDisjoint(pairs); (err != nil) != bad {
			t.Fatalf("pairs %v: got %v, overlap is %t", pairs, err, bad)
		}
	})
}

func TestRuns_DoNotAllocate(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	pairs := make([]Pair, 512)
	for i := range pairs {
		pairs[i] = Pair{ID(i), ID(1000 + i*2)}
	}
	runs := make([]Run, 0, len(pairs))
	if n := testing.AllocsPerRun(20, func() {
		rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		runs, _ = AppendRuns(runs[:0], pairs)
		_ = CheckDisjoint(pairs)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// genSort draws lists that are long enough to be sorted by digits: dense and sparse
// ids, few and many, negative ones too, which only whoever reads the runs refuses.
func genSort(t *rapid.T) []Pair {
	lo := rapid.SampledFrom([]int64{0, 1, -7, math.MinInt32, math.MaxInt32 - 70000}).Draw(t, "lowest")
	span := rapid.SampledFrom([]int64{1, 100, 1000, 70000, math.MaxUint32}).Draw(t, "span")
	n := rapid.SampledFrom([]int{leastRadix - 1, leastRadix, 300, 5000}).Draw(t, "pairs")
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	pairs := make([]Pair, n)
	for i := range pairs {
		pairs[i] = Pair{ID(min(lo+rng.Int64N(span), math.MaxInt32)), ID(i)}
	}
	return pairs
}

func TestSortByDst_SortsAndLosesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pairs := genSort(t)
		want := slices.Clone(pairs)
		whole := func(a, b Pair) int { return order.Or(order.Compare(a.Dst, b.Dst), order.Compare(a.Src, b.Src)) }
		slices.SortFunc(want, whole)
		sortByDst(pairs)
		if !slices.IsSortedFunc(pairs, func(a, b Pair) int { return order.Compare(a.Dst, b.Dst) }) {
			t.Fatalf("not sorted: %v", pairs)
		}
		slices.SortFunc(pairs, whole)
		if d := cmp.Diff(want, pairs); d != "" {
			t.Fatalf("pairs (-want +got):\n%s", d)
		}
	})
}

// BenchmarkAppendRuns prints what a pair costs; package copier has the benchmark of a
// whole plan.
func BenchmarkAppendRuns(b *testing.B) {
	for _, c := range []struct {
		name string
		make func(pairs []Pair)
	}{
		{"ascending", func([]Pair) {}},
		{"descending", slices.Reverse[[]Pair]},
		{"shuffled", func(pairs []Pair) {
			rand.New(rand.NewPCG(1, 1)).Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		}},
	} {
		for _, n := range []int{16, 512, 100_000} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				from := make([]Pair, n)
				for i := range from {
					from[i] = Pair{ID(i), ID(i + i/4)}
				}
				c.make(from)
				pairs, runs := make([]Pair, len(from)), make([]Run, 0, len(from))
				b.ReportAllocs()
				for b.Loop() {
					copy(pairs, from)
					runs, _ = AppendRuns(runs[:0], pairs)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/pair")
			})
		}
	}
}
