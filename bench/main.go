// Command bench lets kvferry and its rivals do the same work in turns and prints how
// they fare: page copies beside torch, allocation beside an allocator in Python and
// vLLM's BlockPool, look-ups beside Go's cache libraries and Python's OrderedDict.
//
// It is a module of its own; README.md says how to run it.
//
// A rival that can't run here is named with what would help; it is never left out in
// silence. Every rival is timed by the CPU time of its own process, on one thread, so
// that what else the machine does counts little. One file holds one rival.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are those of the command line.
type options struct {
	runs, mib, requests, capacity int
	seed                          uint64
	python, trace                 string
	asJSON                        bool
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&o.runs, "runs", 9, "counted runs of each rival")
	f.IntVar(&o.mib, "size", 256, "MiB of each pool of the copies; much more than the last-level cache")
	f.IntVar(&o.requests, "requests", 12_000, "requests of the trace that is made without -trace")
	f.IntVar(&o.capacity, "capacity", 10_000, "pages that the caches hold")
	f.Uint64Var(&o.seed, "seed", 1, "of page orders and of the made trace")
	f.StringVar(&o.python, "python", "python3", "the Python whose packages are used")
	f.StringVar(&o.trace, "trace", "", "serve the requests of this file: JSON lines with hash_ids")
	f.BoolVar(&o.asJSON, "json", false, "write JSON")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("takes no arguments, yet %q was given", f.Arg(0))
	case o.runs < 1 || o.mib < 1 || o.requests < 1 || o.capacity < 1:
		return o, errors.New("-runs, -size, -requests and -capacity must be 1 or more")
	}
	return o, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	var t *trace
	if o.trace == "" {
		t = makeTrace(o.requests, o.seed)
	} else if t, err = openTrace(o.trace); err != nil {
		return err
	}
	if n := t.longest(); n > o.capacity {
		return fmt.Errorf("-capacity %d is less than the %d pages of the longest request", o.capacity, n)
	}
	p, err := openPython(o.python)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	// One thread for everybody; Python's rivals have one by nature or by setting.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))

	if !o.asJSON {
		_, _ = fmt.Fprintf(stdout, "%d runs after %d to warm up, in turns · one thread, CPU time · medians and (least–most) · %s/%s\n",
			o.runs, warmUps, runtime.GOOS, runtime.GOARCH)
	}
	var outcomes []outcome
	for _, open := range contests(ctx, o, p, t) {
		out, err := hold(ctx, o, open, stderr)
		if err != nil {
			return err
		}
		outcomes = append(outcomes, out)
		if !o.asJSON {
			if err := out.write(stdout); err != nil {
				return err
			}
		}
	}
	if !o.asJSON {
		return nil
	}
	e := json.NewEncoder(stdout)
	e.SetIndent("", "  ")
	return e.Encode(map[string]any{
		"runs": o.runs, "warm_ups": warmUps, "seed": o.seed, "clock": "cpu", "os": runtime.GOOS, "arch": runtime.GOARCH, "contests": outcomes,
	})
}

// contests are all of them, in the order of the table. Each is opened when its turn
// comes, so that only its own memory is held.
func contests(ctx context.Context, o options, p *python, t *trace) []func() (*contest, error) {
	all := []func() (*contest, error){
		func() (*contest, error) {
			return copies(ctx, p, "as Llama-3-8B", 32, 64<<10, o.mib, o.seed, 2.5)
		},
		func() (*contest, error) {
			return copies(ctx, p, "as Qwen2.5-0.5B", 24, 8<<10, o.mib, o.seed, 4)
		},
	}
	for _, n := range []int{1, 8, 64, 512} {
		all = append(all, func() (*contest, error) { return allocations(ctx, p, n) })
	}
	return append(all, func() (*contest, error) { return lookups(ctx, p, t, o.capacity) })
}

// hold opens a contest, holds it and closes it.
func hold(ctx context.Context, o options, open func() (*contest, error), stderr io.Writer) (out outcome, err error) {
	progress := io.Discard
	if f, file := stderr.(*os.File); file {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			progress = f
		}
	}
	c, err := open()
	if err == nil {
		out, err = c.hold(ctx, o.runs, progress)
	}
	return out, errors.Join(err, c.close())
}
