// Package bench measures what replay only shows in passing: how fast pages are
// copied, allocated and looked up on this machine, each beside the ceiling or the
// simpler way that it has to be compared with.
//
// What is compared is measured in turns: every run goes through all contestants of
// a group, in an order that moves on by one from run to run, after a warm-up that
// is not counted. A ratio is made inside one run and its median is taken over the
// runs, so that what the machine does meanwhile meets both sides. A figure is never
// shown without its least and its most.
//
// # One thread
//
// By default everything is measured on one thread ([Options.Threads]): the stream,
// the checks and the books of ours as well as the bare loop beside it. A second
// thread would make ours look better than a ceiling that has one. One thread is
// timed by the CPU time of the process, so that what else the machine does counts
// little ([Options.Clock]).
//
// # Traps
//
//   - Pools must be much larger than the last-level cache, or hot copies are
//     measured. The default size is; tests use less, and their figures mean nothing.
//   - Measured code writes only memory of its own run. What a ceiling copies it
//     copies where ours has just copied the same bytes.
package bench

import (
	"math"
	"runtime"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// The ways in which the planes of the device cache can lie.
const (
	LayerMajor = "layer-major" // one tensor, layer after layer
	PageMajor  = "page-major"  // one tensor, page after page, as the host pool has it
	KVFirst    = "kv-first"    // a tensor a layer: K of all pages, then V
)

// Limits of options. They bound what a run costs.
const (
	maxRuns        = 1000
	maxMiB         = 1 << 20
	maxThreads     = 64
	maxAllocations = 100_000_000
	maxStorePages  = 10_000_000
)

// Options say what is measured. Start from [DefaultOptions].
type Options struct {
	Runs    int    // counted runs of each contestant
	Seed    uint64 // of orders and page ids
	Threads int    // that may run at once, of ours and of the ceilings
	Clock   string // "" = CPU with one thread, Wall with more

	// Of copies.
	Device      string // a name that accel.Parse knows; "" = the host
	Libraries   accel.Libraries
	Copier      string // "" = the one that a self-test chooses
	MiB         int    // size of each pool
	Model       string // "" = all that replay knows
	Arrangement string // of the device cache; "" = all
	RowBytes    int64  // with Layers, instead of a model: bytes of a page in one layer
	Layers      int

	Allocations int // of the measurement of runs

	// Of the store.
	DevicePages int
	HostPages   int
	Trace       string // "" = replay's built-in load
	Requests    int    // 0 = all

	// Of transfers.
	Engines engines.Options // Names: those that are measured; none = all that work here
	Owner   []string        // the command that owns the pages; nil = this program's TransferOwner
}

// defaultRuns are what a goal is judged by.
const defaultRuns = 9

// DefaultOptions take well under a minute a verb on an idle machine.
func DefaultOptions() Options {
	return Options{Runs: defaultRuns, Seed: 1, Threads: 1, MiB: 256, Allocations: 1_000_000, DevicePages: 2048, HostPages: 7952}
}

// check refuses options that can't be measured, and returns o with a clock. Kind:
// fault.Invalid.
func (o Options) check() (Options, error) {
	for _, f := range []struct {
		flag        string
		value       int64
		least, most int64
	}{
		{"--runs", int64(o.Runs), 1, maxRuns},
		{"--threads", int64(o.Threads), 1, maxThreads},
		{"--size", int64(o.MiB), 1, maxMiB},
		{"--allocations", int64(o.Allocations), 1, maxAllocations},
		{"--device-pages", int64(o.DevicePages), 4 * prefixPages, maxStorePages},
		{"--host-pages", int64(o.HostPages), 4 * prefixPages, maxStorePages},
		{"--layers", int64(o.Layers), 0, kv.MaxLayers},
		{"--row-bytes", o.RowBytes, 0, kv.MaxDim},
	} {
		if f.value < f.least || f.value > f.most {
			return o, fault.New(fault.Invalid, f.flag, "%d is not in %d…%d", f.value, f.least, f.most)
		}
	}
	if (o.RowBytes == 0) != (o.Layers == 0) {
		return o, fault.New(fault.Invalid, "--row-bytes", "goes with --layers, and only one of the two was given").
			Hint("for example --row-bytes 65536 --layers 32")
	}
	if o.Model != "" && o.RowBytes != 0 {
		return o, fault.New(fault.Invalid, "--model", "%s contradicts --row-bytes %d", o.Model, o.RowBytes).Hint("drop one of the two")
	}
	vendor, _, err := accel.Parse(o.Device)
	if err != nil {
		return o, err
	}
	switch far := vendor != accel.Host; {
	case far && o.Clock == CPU:
		return o, fault.New(fault.Invalid, "--clock", "%s counts the time of the processor, and %s copies without it", CPU, o.Device).
			Hint("use --clock %s", Wall)
	case far:
		o.Clock = Wall
	case o.Clock == "" && o.Threads == 1:
		o.Clock = CPU
	case o.Clock == "":
		o.Clock = Wall
	case o.Clock != CPU && o.Clock != Wall:
		return o, fault.New(fault.Invalid, "--clock", "no such choice: %q", o.Clock).Hint("there are %s, %s", CPU, Wall)
	case o.Clock == CPU && o.Threads > 1:
		return o, fault.New(fault.Invalid, "--clock", "%s counts the time of all %d threads", CPU, o.Threads).
			Hint("use --clock %s with several threads", Wall)
	}
	switch o.Arrangement {
	case "", LayerMajor, PageMajor, KVFirst:
		return o, nil
	}
	return o, fault.New(fault.Invalid, "--arrangement", "no such choice: %q", o.Arrangement).
		Hint("there are %s, %s, %s", LayerMajor, PageMajor, KVFirst)
}

// Report is what one verb found out. JSON keys are stable.
type Report struct {
	Version  string    `json:"version"`
	Verb     string    `json:"verb"`
	OS       string    `json:"os"`
	Arch     string    `json:"arch"`
	CPUs     int       `json:"cpus"`
	Threads  int       `json:"threads"`
	Clock    string    `json:"clock"`
	Runs     int       `json:"runs"`     // counted
	WarmUps  int       `json:"warm_ups"` // before them
	Seed     uint64    `json:"seed"`     //
	Settings []Setting `json:"settings"` // what else the figures depend on
	Sections []Section `json:"sections"` //
	Seconds  float64   `json:"seconds"`  // that all of it took
	// Crossovers says, of an accelerator, which way of copying was best for which rows.
	Crossovers string `json:"crossovers,omitempty"`
	// Unjudged says why no goal is called met or missed.
	Unjudged string   `json:"unjudged,omitempty"`
	Warnings []string `json:"warnings"` //
	legend   string   // under the text
}

// Setting is a fact about the machine or the pools.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Section is a table of figures of one unit.
type Section struct {
	Title string `json:"title"`
	Unit  string `json:"unit"`
	Lines []Line `json:"lines"`
}

// Line is one figure.
type Line struct {
	Name   string         `json:"name"`
	Labels map[string]any `json:"labels"`      // what Name says, for machines
	Bytes  *int64         `json:"bytes_moved"` // by one run; nil when the figure is not about bytes
	Value  Stat           `json:"value"`
	Beside []Share        `json:"beside"`
	Goals  []Goal         `json:"goals"`
}

// Share holds a figure against another one.
type Share struct {
	Of    string `json:"of"`
	Value Stat   `json:"value"` // of the other, in the unit of the section
	Ratio Stat   `json:"ratio"` // ours to the other, run by run
}

// Goal is a bound that a figure, or one of its ratios, is meant to keep.
type Goal struct {
	Of    string   `json:"of"` // "" = the figure itself; else of Beside
	Least *float64 `json:"least"`
	Most  *float64 `json:"most"`
	Got   float64  `json:"got"`
	Met   *bool    `json:"met"` // nil when it is not judged
}

// warmUps are the runs before the counted ones.
const warmUps = 1

func newReport(verb string, o Options) *Report {
	return &Report{
		Verb: verb, OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU(),
		Threads: o.Threads, Clock: o.Clock, Runs: o.Runs, WarmUps: warmUps, Seed: o.Seed,
		Settings: []Setting{}, Sections: []Section{}, Warnings: []string{},
	}
}

// measured runs f with the number of threads that o allows, and times it.
func (o Options) measured(r *Report, f func() error) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(o.Threads))
	began := time.Now()
	err := f()
	r.Seconds = time.Since(began).Seconds()
	return err
}

// openHost opens the device whose streams are measured.
func (o Options) openHost() (*device.Host, error) {
	return device.OpenHost(device.HostOptions{Workers: o.Threads})
}

func newLine(name string, value Stat, labels map[string]any) Line {
	return Line{Name: name, Value: value, Labels: labels, Beside: []Share{}, Goals: []Goal{}}
}

// against adds the comparison with another contestant, run by run, both in the unit
// of the section.
func (l *Line) against(of string, ours, other []float64) {
	l.Beside = append(l.Beside, Share{Of: of, Value: statOf(other), Ratio: statOf(ratiosOf(ours, other))})
}

// atLeast adds a goal for the ratio to of, or for the figure itself.
func (l *Line) atLeast(of string, bound float64) {
	got := l.got(of)
	l.Goals = append(l.Goals, Goal{Of: of, Least: &bound, Got: got, Met: new(got >= bound)})
}

func (l *Line) atMost(of string, bound float64) {
	got := l.got(of)
	l.Goals = append(l.Goals, Goal{Of: of, Most: &bound, Got: got, Met: new(got <= bound)})
}

func (l *Line) got(of string) float64 {
	if of == "" {
		return l.Value.Median
	}
	for _, s := range l.Beside {
		if s.Of == of {
			return s.Ratio.Median
		}
	}
	return math.NaN() // a goal for what was not measured is met by nothing
}

// gbps turns the seconds of a copy of n bytes into GB/s (10^9).
func gbps(n int64) func(seconds float64) float64 {
	return func(s float64) float64 { return float64(n) / s / 1e9 }
}

// nanos turns the seconds of n operations into nanoseconds of one.
func nanos(n int) func(seconds float64) float64 {
	return func(s float64) float64 { return s / float64(n) * 1e9 }
}
