package bench

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

func TestStat_MedianOfOddAndEvenNumbersOfRuns(t *testing.T) {
	for _, tc := range []struct {
		samples []float64
		want    Stat
	}{
		{[]float64{5}, Stat{5, 5, 5}},
		{[]float64{9, 1, 4}, Stat{4, 1, 9}},
		{[]float64{8, 1, 4, 2}, Stat{3, 1, 8}},
	} {
		before := slices.Clone(tc.samples)
		if got := statOf(tc.samples); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.samples, got, tc.want)
		}
		if !slices.Equal(before, tc.samples) {
			t.Errorf("%v became %v: ratios by run would be of other runs", before, tc.samples)
		}
	}
}

// A machine that becomes three times slower for some runs changes both sides of
// every pair, so the ratio must not move; the ratio of medians may.
func TestRatios_AreMadeInsideOneRun(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "runs")
		a, b := make([]float64, n), make([]float64, n)
		for i := range a {
			load := rapid.Float64Range(1, 3).Draw(t, "load")
			a[i], b[i] = 2*load, 4*load
		}
		if got := statOf(ratiosOf(a, b)); got != (Stat{0.5, 0.5, 0.5}) {
			t.Fatalf("%v", got)
		}
	})
}

func TestLeastOf_TakesTheBetterRunByRun(t *testing.T) {
	if got := leastOf([]float64{1, 5}, []float64{3, 2}); !slices.Equal(got, []float64{1, 2}) {
		t.Errorf("%v", got)
	}
}

func TestInterleave_TakesTurnsAndMovesOnByOne(t *testing.T) {
	var log strings.Builder
	note := func(s string) contestant {
		return contestant{run: func() error { log.WriteString(s); return nil }, after: func() error { log.WriteString(strings.ToLower(s)); return nil }}
	}
	o := Options{Runs: 3, Threads: 1}
	seconds, err := o.interleave(context.Background(), []contestant{note("A"), note("B"), note("C")}, []contestant{note("X")})
	if err != nil {
		t.Fatal(err)
	}
	// The warm-up, which the first begins, and three runs.
	if got, want := log.String(), "AaBbCcXx"+"BbCcAaXx"+"CcAaBbXx"+"AaBbCcXx"; got != want {
		t.Errorf("order %s, want %s", got, want)
	}
	for g, contestants := range [][]int{{3, 3, 3}, {3}} {
		for i, n := range contestants {
			if len(seconds[g][i]) != n {
				t.Errorf("group %d, contestant %d: %d runs counted, want %d", g, i, len(seconds[g][i]), n)
			}
			for _, s := range seconds[g][i] {
				if s <= 0 {
					t.Errorf("group %d, contestant %d: took %v s, which no rate can be made of", g, i, s)
				}
			}
		}
	}
}

func TestInterleave_EndsWithTheFirstErrorAndWithItsContext(t *testing.T) {
	bad := errors.New("bad")
	fine := contestant{run: func() error { return nil }}
	o := Options{Runs: 3, Threads: 1}
	for _, c := range []contestant{{run: func() error { return bad }}, {run: fine.run, after: func() error { return bad }}} {
		if _, err := o.interleave(context.Background(), []contestant{fine, c}); !errors.Is(err, bad) {
			t.Errorf("got %v", err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := o.interleave(ctx, []contestant{fine}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestSplit_CoversEverythingOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 7} {
		for _, n := range []int{0, 1, 5, 100} {
			counts := make([]atomic.Int32, n)
			Options{Threads: threads}.split(n, func(from, to int) {
				for i := from; i < to; i++ {
					counts[i].Add(1)
				}
			})
			for i := range counts {
				if c := counts[i].Load(); c != 1 {
					t.Errorf("%d threads: thing %d of %d was done %d times", threads, i, n, c)
				}
			}
		}
	}
}

func TestGoal_IsMetOnItsBoundAndNotBeyond(t *testing.T) {
	l := Line{Value: Stat{Median: 90}}
	l.against("R", []float64{95, 95}, []float64{100, 100})
	l.atMost("", 90)
	l.atMost("", 89)
	l.atLeast("R", 0.95)
	l.atLeast("R", 0.96)
	l.atLeast("nobody", 0) // what was not measured meets nothing
	l.atMost("nobody", 1e9)
	for i, want := range []bool{true, false, true, false, false, false} {
		if *l.Goals[i].Met != want {
			t.Errorf("goal %d: %+v", i, l.Goals[i])
		}
	}
}
