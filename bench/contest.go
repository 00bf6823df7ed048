package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// warmUps are the runs of each rival that are not counted.
const warmUps = 1

// rival is one way of doing a contest's work.
type rival struct {
	name    string
	run     func(context.Context) (seconds float64, err error) // CPU time of one run; nil when missing
	close   func() error                                       // nil: nothing to close
	note    func() string                                      // what else it found out; nil: nothing
	missing string                                             // why it can't run here, and what would help
	goal    float64                                            // ours is to be so many times faster; 0: no goal
}

// contest is one kind of work, done by ours and by its rivals. Ours comes first.
type contest struct {
	title  string
	unit   string
	rate   func(seconds float64) float64 // in unit; more seconds are never better
	rivals []*rival
}

// stat is the median over the runs, the least and the most.
type stat struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func statOf(samples []float64) stat {
	s := slices.Sorted(slices.Values(samples))
	n := len(s)
	return stat{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1]}
}

// result is what became of one rival.
type result struct {
	Name    string   `json:"name"`
	Value   *stat    `json:"value"`   // nil when missing
	Faster  *stat    `json:"faster"`  // how many times faster ours was, run by run; nil for ours
	Goal    *float64 `json:"goal"`    // of Faster's median
	Met     *bool    `json:"met"`     // nil without a goal
	Note    string   `json:"note"`    // "" when there is nothing to say
	Missing string   `json:"missing"` // "" unless the rival could not run
}

// outcome is what became of a contest.
type outcome struct {
	Title   string   `json:"title"`
	Unit    string   `json:"unit"`
	Results []result `json:"results"`
}

// hold lets all rivals of c do the work in turns: in every run each of them once,
// and who begins moves on by one from run to run.
func (c *contest) hold(ctx context.Context, runs int, progress io.Writer) (outcome, error) {
	out := outcome{Title: c.title, Unit: c.unit}
	seconds := make([][]float64, len(c.rivals))
	for run := range warmUps + runs {
		for k := range c.rivals {
			i := (run + k) % len(c.rivals)
			r := c.rivals[i]
			if r.run == nil {
				continue
			}
			_, _ = fmt.Fprintf(progress, "\r\x1b[K%s: run %d of %d: %s", c.title, run+1, warmUps+runs, r.name)
			s, err := r.run(ctx)
			if err != nil {
				return out, fmt.Errorf("%s: %s: %w", c.title, r.name, err)
			}
			if run >= warmUps {
				seconds[i] = append(seconds[i], max(s, 1e-9))
			}
		}
	}
	_, _ = fmt.Fprint(progress, "\r\x1b[K")
	for i, r := range c.rivals {
		x := result{Name: r.name, Missing: r.missing}
		if r.run != nil {
			x.Value = new(statOf(each(seconds[i], c.rate)))
			if i > 0 {
				x.Faster = new(statOf(ratios(seconds[i], seconds[0])))
			}
			if r.note != nil {
				x.Note = r.note()
			}
		}
		if r.goal > 0 {
			x.Goal = &r.goal
			if x.Faster != nil {
				x.Met = new(x.Faster.Median >= r.goal)
			}
		}
		out.Results = append(out.Results, x)
	}
	return out, nil
}

func (c *contest) close() (err error) {
	for _, r := range c.rivals {
		if r.close == nil {
			continue
		}
		if cerr := r.close(); err == nil {
			err = cerr
		}
	}
	return err
}

func each(samples []float64, f func(float64) float64) []float64 {
	out := make([]float64, len(samples))
	for i, s := range samples {
		out[i] = f(s)
	}
	return out
}

// ratios returns a[i] / b[i]: each made inside one run.
func ratios(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] / b[i]
	}
	return out
}

// timed returns how much CPU time f takes. Go's collector is in it, as Python's is
// in that of the Python rivals.
func timed(f func() error) (seconds float64, err error) {
	began := cpu()
	err = f()
	return (cpu() - began).Seconds(), err
}

// cpu is the CPU time of this process. What else the machine does counts little.
func cpu() time.Duration {
	var t unix.Timespec
	// It fails only for a clock that the kernel does not have.
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

func gbps(bytes int64) func(float64) float64 {
	return func(s float64) float64 { return float64(bytes) / s / 1e9 }
}

func nanos(n int) func(float64) float64 {
	return func(s float64) float64 { return s / float64(n) * 1e9 }
}
