package bench

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Stat is the median of a figure over the runs, and how far it spread.
type Stat struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// statOf returns the statistics of samples, of which there is at least one. It
// leaves their order alone.
func statOf(samples []float64) Stat {
	s := slices.Sorted(slices.Values(samples))
	n := len(s)
	return Stat{Median: (s[(n-1)/2] + s[n/2]) / 2, Low: s[0], High: s[n-1]}
}

// ratiosOf returns a[i] / b[i]: each ratio inside its own run.
func ratiosOf(a, b []float64) []float64 {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = a[i] / b[i]
	}
	return r
}

// leastOf returns the least of a[i] and b[i]: the better of two ways, run by run.
func leastOf(a, b []float64) []float64 {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = min(a[i], b[i])
	}
	return r
}

func each(samples []float64, f func(float64) float64) []float64 {
	out := make([]float64, len(samples))
	for i, s := range samples {
		out[i] = f(s)
	}
	return out
}

// contestant is one of the things that are measured side by side. run is timed,
// after is not, and may be nil.
type contestant struct{ run, after func() error }

// The clocks by which a run can be timed.
const (
	CPU  = "cpu"  // the time that the process was running, on all its threads
	Wall = "wall" // the time that went by
)

// clock returns what tells the time. By CPU time the figures of one thread hardly
// suffer from whatever else the machine does; with several threads it would count
// the time of all of them.
func (o Options) clock() func() time.Duration {
	if o.Clock == Wall {
		began := time.Now()
		return func() time.Duration { return time.Since(began) }
	}
	return func() time.Duration {
		var t unix.Timespec
		// It fails only for a clock that the kernel does not have.
		_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
		return time.Duration(t.Nano())
	}
}

// interleave measures groups of contestants: each run goes through all groups, and
// inside a group through all contestants, in turns. Which of them begins moves on by
// one from run to run; the first begins the first run, so that the others find what
// it leaves behind. The warm-ups are not counted. It returns the seconds of the
// counted runs by group and contestant.
func (o Options) interleave(ctx context.Context, groups ...[]contestant) ([][][]float64, error) {
	now := o.clock()
	seconds := make([][][]float64, len(groups))
	for g := range groups {
		seconds[g] = make([][]float64, len(groups[g]))
	}
	for run := range warmUps + o.Runs {
		for g, contestants := range groups {
			for k := range contestants {
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				i := (run + k) % len(contestants)
				began := now()
				err := contestants[i].run()
				took := now() - began
				if err == nil && contestants[i].after != nil {
					err = contestants[i].after()
				}
				if err != nil {
					return nil, err
				}
				if run >= warmUps {
					// A clock that stands still must not make a rate infinite.
					seconds[g][i] = append(seconds[g][i], max(took, 1).Seconds())
				}
			}
		}
	}
	return seconds, nil
}

// split calls f for as many equal parts of n things as there are threads, at once.
func (o Options) split(n int, f func(from, to int)) {
	if o.Threads == 1 {
		f(0, n)
		return
	}
	var parts sync.WaitGroup
	for i := range o.Threads {
		parts.Go(func() { f(n*i/o.Threads, n*(i+1)/o.Threads) })
	}
	parts.Wait()
}
