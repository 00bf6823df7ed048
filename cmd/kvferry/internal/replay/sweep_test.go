package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestSweepSizes(t *testing.T) {
	for _, x := range []struct {
		largest, distinct, current int
		want                       []int
	}{
		{3, 20, 10, []int{4, 8, 10, 16, 20}},
		{3, 20, 8, []int{4, 8, 16, 20}},
		{3, 20, 20, []int{4, 8, 16, 20}},
		{3, 20, 2, []int{2, 4, 8, 16, 20}},
		{3, 20, 30, []int{4, 8, 16, 20, 30}},
		{4, 16, 18, []int{4, 8, 16, 18}},
		{4, 3, 4, []int{4}}, // the largest request has a partial page
		{1, 0, 5, []int{1, 5}},
	} {
		if got := sweepSizes(x.largest, x.distinct, x.current); !slices.Equal(got, x.want) {
			t.Errorf("largest %d, distinct %d, current %d: %v, want %v", x.largest, x.distinct, x.current, got, x.want)
		}
	}
}

func sweep(t *testing.T, change func(*Options)) *Sweep {
	t.Helper()
	s, err := RunSweep(t.Context(), with(func(o *Options) {
		o.Sweep = true
		change(o)
	}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSweep_MorePagesNeverHitLessAndTheOptimumIsNeverBeaten(t *testing.T) {
	for _, pageSize := range []int{128, 512, 2048} {
		s := sweep(t, func(o *Options) { o.Requests, o.PageSize = 1500, pageSize })
		for i, p := range s.Points {
			if *p.HitRatio > *p.OptimumHitRatio {
				t.Errorf("page size %d, %d pages: %f beats the optimum %f", pageSize, p.Pages, *p.HitRatio, *p.OptimumHitRatio)
			}
			if i == 0 {
				continue
			}
			if q := s.Points[i-1]; q.Pages >= p.Pages || *q.HitRatio > *p.HitRatio || *q.OptimumHitRatio > *p.OptimumHitRatio {
				t.Errorf("page size %d: %d pages hit %f, %d hit %f", pageSize, q.Pages, *q.HitRatio, p.Pages, *p.HitRatio)
			}
		}
		if last := s.Points[len(s.Points)-1]; *last.HitRatio != *last.OptimumHitRatio || *last.HitRatio == 0 {
			t.Errorf("page size %d, room for all: %f, and the optimum %f", pageSize, *last.HitRatio, *last.OptimumHitRatio)
		}
	}
}

// The manager itself, with pools of sizes that the sweep names.
func TestSweep_FollowsWhatAReplayHits(t *testing.T) {
	s := sweep(t, func(o *Options) { o.Requests, o.DevicePages, o.HostPages = 150, 247, 500 })
	trace := Generate(1, 150)
	tried := 0
	for _, p := range s.Points {
		if p.Pages < 512 {
			continue
		}
		x := begin(t, trace, bookkeeping(300, int(p.Pages)-300))
		if err := x.run(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		x.finish()
		// The page that a running request borrows for its partial page costs a hit at times.
		if d := *p.HitRatio - *x.r.HitRatio; d < -0.0005 || d > 0.005 {
			t.Errorf("%d pages: the sweep says %.4f, the replay %.4f", p.Pages, *p.HitRatio, *x.r.HitRatio)
		}
		tried++
	}
	if tried < 4 {
		t.Errorf("only %d sizes were tried", tried)
	}
}

func TestSweep_TextAndJSON(t *testing.T) {
	s := sweep(t, func(o *Options) {
		o.Requests, o.Model, o.DevicePages, o.HostPages = 600, "llama-3-8b", 300, 1500
	})
	s.Version = "v0.1.0"
	var b bytes.Buffer
	if err := s.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "sweep.txt", b.Bytes())
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(line); n > 132 {
			t.Errorf("a line of %d characters: %s", n, line)
		}
		if strings.TrimRight(line, " \n") != strings.TrimRight(line, "\n") {
			t.Errorf("blanks at the end of %q", line)
		}
	}
	b.Reset()
	if err := s.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "sweep.json", b.Bytes())
	var back Sweep
	d := json.NewDecoder(&b)
	d.DisallowUnknownFields()
	if err := d.Decode(&back); err != nil {
		t.Fatal(err)
	}
	s.about = nil
	if d := cmp.Diff(s, &back, cmp.AllowUnexported(Sweep{})); d != "" {
		t.Errorf("reads back differently:\n%s", d)
	}
}

// Nothing here can be hit, doubled or drawn.
func TestSweep_OfNextToNothingIsDefined(t *testing.T) {
	for _, input := range []int{1, 511, 512} {
		trace := &Trace{Name: "one", Requests: []Request{{Input: input, IDs: []int64{1}}}}
		u := newUses(trace, IDTokens)
		s := &Sweep{about: &Result{}, DevicePages: 1}
		for _, n := range sweepSizes(1, u.distinct, 1) {
			s.Points = append(s.Points, Point{Pages: int64(n), HitRatio: u.ratio(u.lru(n)), OptimumHitRatio: u.ratio(u.optimum(n))})
		}
		if len(s.Points) != 1 || *s.Points[0].HitRatio != 0 || *s.Points[0].OptimumHitRatio != 0 {
			t.Errorf("%d tokens: %+v", input, s.Points)
		}
		if err := s.WriteText(io.Discard); err != nil {
			t.Error(err)
		}
	}
}

func TestSweep_EndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := RunSweep(ctx, with(func(o *Options) { o.Sweep, o.Requests = true, 10 }))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
