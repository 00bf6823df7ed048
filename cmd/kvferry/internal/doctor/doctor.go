// Package doctor looks at a machine as kvferry will use it, and says what is well, what
// is in the way, and what can be done about it. It is what a user runs first on a new
// node, and sends with a bug report.
//
// It reads: /proc, /sys, folders of Python packages. It tries: a lock on memory, taking
// a descriptor, handing memory to itself, a connection over loopback, opening libraries
// and devices, copies. It runs nobody's code but the vendors' libraries, and Mooncake's
// if that is named, and leaves nothing behind. A vendor's library makes device nodes
// where they are missing and it is root, so it is not started on a machine that shows no
// driver of that vendor, unless the user names the library.
//
// # Levels
//
// Green is well, or not there and not missed. Yellow works, but less than it could, or not
// for everybody. Red does not work though it is there, or though the user asked for it. A
// yellow or red finding has a remedy, and only red makes the command fail.
//
// # Traps
//
//   - What is told is true for this process: a container's limits, not the machine's, and
//     this environment's variables, not an engine's.
//   - Rates are measured in a fraction of a second, for the order of magnitude. bench is
//     for figures.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
)

// Level says how well something is.
type Level uint8

// The levels, the best first.
const (
	Green Level = iota
	Yellow
	Red
)

func (l Level) String() string { return [...]string{"green", "yellow", "red"}[l] }

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Finding is one thing that was looked at.
type Finding struct {
	Name   string `json:"name"`
	Level  Level  `json:"level"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"` // of every yellow and red one

	kind fault.Kind // of the error that a red one is; 0 for fault.Device
}

// Section is what was found about one thing.
type Section struct {
	Title    string    `json:"title"`
	Findings []Finding `json:"findings"`
	Rates    []Rate    `json:"rates,omitempty"` // of a device
	Whole    string    `json:"whole,omitempty"` // what rates are shares of
	// Crossovers says which way of copying is best for which rows: bytes a row downwards,
	// rows of one rectangle across; in brackets what was not measured.
	Crossovers string `json:"crossovers,omitempty"`
}

// Report is what the doctor says.
type Report struct {
	Version  string    `json:"version"`
	OS       string    `json:"os"`
	Arch     string    `json:"arch"`
	Level    Level     `json:"level"` // the worst there is
	Sections []Section `json:"sections"`
	Seconds  float64   `json:"seconds"`
}

// Options are the choices of the user.
type Options struct {
	accel.Libraries
	Copier   string   // "" = the first that works
	Mooncake []string // files of its library; none = it is not looked at

	// Budget bounds the time of measuring; 0 is 12 s. PoolBytes is the memory on each side
	// of what is measured, a power of 2; 0 is 128 MiB.
	Budget    time.Duration
	PoolBytes int64
}

// Run looks at this machine. What is wrong is in the report. Kind: fault.Invalid (no such
// copier); and the error of ctx.
func Run(ctx context.Context, o Options) (*Report, error) {
	began := time.Now()
	if o.Copier != "" && !slices.Contains(copiers(), o.Copier) {
		return nil, fault.New(fault.Invalid, "--copier", "no such choice: %q", o.Copier).Hint("there are %s", strings.Join(copiers(), ", "))
	}
	o.Budget = cmp.Or(o.Budget, 12*time.Second)
	o.PoolBytes = cmp.Or(o.PoolBytes, 2*wholeBytes)
	m := ThisMachine()
	r := &Report{OS: runtime.GOOS, Arch: runtime.GOARCH, Sections: append(Examine(m), m.transfers(ctx, o))}
	at := len(r.Sections) - 1
	if err := r.devices(ctx, m, o); err != nil {
		return nil, err
	}
	r.Sections[at].Findings = append(r.Sections[at].Findings, deviceEngines(r.Sections)...)
	r.Level = worst(r.Sections)
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// Examine says what the machine is like, without its devices.
func Examine(m *Machine) []Section {
	return []Section{
		{Title: "memory", Findings: []Finding{m.memory(), m.lock(), m.hugePages(), m.numa()}},
		{Title: "processes", Findings: []Finding{m.sharedMemory(), m.pidNamespace(), m.ptrace(), m.takeFD(), m.expandable()}},
		{Title: "engines", Findings: m.engines()},
		{Title: "cards", Findings: m.cards()},
	}
}

func worst(sections []Section) (l Level) {
	for _, s := range sections {
		for _, f := range s.Findings {
			l = max(l, f.Level)
		}
	}
	return l
}

// Err returns nil unless something is red: then an error of the first red finding's kind.
func (r *Report) Err() error {
	var first *Finding
	n := 0
	for _, s := range r.Sections {
		for i, f := range s.Findings {
			if f.Level == Red {
				if n++; first == nil {
					first = &s.Findings[i]
				}
			}
		}
	}
	if first == nil {
		return nil
	}
	kind := first.kind
	if kind == 0 {
		kind = fault.Device
	}
	what := first.Name + ": " + oneLine(first.Text)
	if n > 1 {
		what = fmt.Sprintf("%s (and %d more)", what, n-1)
	}
	return fault.New(kind, "", "%s", what).Hint("%s", first.Remedy)
}

func green(name, format string, args ...any) Finding {
	return Finding{Name: name, Text: fmt.Sprintf(format, args...)}
}

func yellow(name, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: Yellow, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

func red(name, remedy, format string, args ...any) Finding {
	return Finding{Name: name, Level: Red, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}
