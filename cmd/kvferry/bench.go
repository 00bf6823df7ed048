package main

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/bench"
)

// newBench returns the verb bench and its own verbs.
func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure copies, transfers, allocation, look-ups and calls beside their ceilings",
		Long: `Measures how fast pages are copied, transferred, allocated and looked up, and libraries called, on this machine, each beside a ceiling
measured in the same runs, in turns with it. Medians, spread and the goals of the project are shown.`,
		Example: "  kvferry bench copy\n  kvferry bench alloc --json",
		Args:    cobra.ArbitraryArgs, // so that an unknown verb reaches RunE
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownVerb(cmd, args[0])
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(newBenchCopy(), newBenchTransfer(), newBenchAlloc(), newBenchStore(), newBenchCall(), newBenchOwner())
	return cmd
}

func newBenchCopy() *cobra.Command {
	cmd := benchVerb(&cobra.Command{
		Use:   "copy",
		Short: "Copies between a device pool and a host pool",
		Long: `Measures demotion and promotion of pages between a device pool and a host pool, both in host memory, in jobs of 16
pages, two in flight, on one stream: models × arrangements × fresh and churned pools × checks on and off. Then cold
rows in any place beside Go's copy, and runs of pages with small rows beside bare loops row by row.

Two ceilings are measured in turns with it: C, Go's copy of 64 MiB pieces in the same kind of memory, and R, the
better of two bare loops over the same rows (Go's copy, the device's) with no books, and with the same checks. Everything runs on --threads.

With --model, --arrangement or --row-bytes only those demotions and promotions are measured.

With --device the device pool is the memory of an accelerator and the host pool is pinned: rows and boxes of all
sizes go down, up and both ways at once, beside one ceiling, the link: linear copies of 64 MiB pieces of pinned memory.`,
		Example: `  kvferry bench copy
  kvferry bench copy --model llama-3-8b --arrangement kv-first
  kvferry bench copy --row-bytes 8192 --layers 24 --size 512 --json
  kvferry bench copy --device cuda:0 --json`,
	}, bench.Copy, func(f *pflag.FlagSet, o *bench.Options) {
		f.Var(&number{value: &o.MiB, least: 1}, "size", "`MiB` of each pool; much more than the last-level cache, or hot copies are measured (default 256)")
		deviceFlags(f, &o.Device, &o.Copier, &o.Libraries)
		f.StringVar(&o.Model, "model", "", "pages of 16 tokens of this `model`: llama-3-8b, qwen2.5-0.5b or deepseek-v3 (default all)")
		f.StringVar(&o.Arrangement, "arrangement", "", "`choice` of how the device cache lies: layer-major, page-major or kv-first (default all)")
		f.Int64Var(&o.RowBytes, "row-bytes", 0, "`bytes` of a page in one layer, with --layers, instead of a model")
		f.Var(&number{value: &o.Layers, least: 1}, "layers", "`layers` of a page, with --row-bytes")
	})
	cmd.Flags().Lookup("clock").Usage = "`choice` of cpu (other load counts little) or wall time (default cpu with one thread on the host; with --device only wall)"
	return cmd
}

func newBenchTransfer() *cobra.Command {
	cmd := benchVerb(&cobra.Command{
		Use:   "transfer",
		Short: "Reads of another process's pages, by every engine that works here",
		Long: `Measures how fast the pages of a cache in another process are read, by shared memory, by TCP over loopback with and
without TLS, and, with --mooncake-library, by Mooncake in a child process and in this one: pages of 4 KiB to 4 MiB, in
any order and in runs, with and without their owner's checksums. Then what it costs to open a peer, and to plan a read.

Three ceilings are measured in turns with it: C, Go's copy of 64 MiB pieces, R, the better of two bare loops over the
same rows in one process, and, for what comes by TCP, a raw stream of as many bytes that are checked too. Each process
has --threads. Time is that of the wall; but with one thread what copies from memory (local, hostipc) and the ceilings
beside it are timed by the CPU time of this process, which other load changes little.

Goals are judged by 9 runs or more, with pools of 128 MiB or more.`,
		Example: `  kvferry bench transfer
  kvferry bench transfer --engine hostipc --runs 3
  kvferry bench transfer --mooncake-library libtransfer_engine.so --json`,
	}, bench.Transfer, func(f *pflag.FlagSet, o *bench.Options) {
		o.MiB = bench.TransferMiB
		f.Var(&number{value: &o.MiB, least: 1}, "size", "`MiB` of each pool; much more than the last-level cache, or hot copies are measured (default 128)")
		f.StringSliceVar(&o.Engines.Names, "engine", nil, "measure these `engines`, with commas: hostipc, tcp, mooncake (default all that work here)")
		mooncakeFlags(f, &o.Engines)
	})
	cmd.Flags().Lookup("clock").Usage = "`choice` of how time is told: only wall, for there are two processes; see above for one thread"
	return cmd
}

// newBenchOwner returns the hidden verb of the process whose pages bench transfer reads.
func newBenchOwner() *cobra.Command {
	return &cobra.Command{
		Use:    bench.TransferOwner,
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeTransfer(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

func newBenchAlloc() *cobra.Command {
	return benchVerb(&cobra.Command{
		Use:   "alloc",
		Short: "Allocation of pages, and into how many runs they come",
		Long: `Measures what a pair of allocate and free costs on a fresh and on a churned pool, and counts the runs into which
pages come when a pool stays four fifths full, each beside the same books that hand pages out in the order in which
they became free.`,
		Example: "  kvferry bench alloc\n  kvferry bench alloc --allocations 100000 --runs 3",
	}, bench.Alloc, func(f *pflag.FlagSet, o *bench.Options) {
		f.Var(&number{value: &o.Allocations, least: 1}, "allocations", "count runs in `n` allocations (default 1000000)")
	})
}

func newBenchStore() *cobra.Command {
	return benchVerb(&cobra.Command{
		Use:   "store",
		Short: "Look-ups, puts and evictions, without bytes",
		Long: `Measures the books: look-ups a second for the requests of a trace, keys included, in a device pool and a host
pool; single calls of the store; and apart from them what it costs to make keys.`,
		Example: "  kvferry bench store\n  kvferry bench store --trace chat.jsonl --json",
	}, bench.Store, func(f *pflag.FlagSet, o *bench.Options) {
		f.Var(&number{value: &o.DevicePages, least: 1}, "device-pages", "`pages` on the device (default 2048)")
		f.Var(&number{value: &o.HostPages, least: 1}, "host-pages", "`pages` in host memory (default 7952)")
		f.StringVar(&o.Trace, "trace", "", "replay this `file` instead of the built-in chat load")
		f.Var(&number{value: &o.Requests, least: 0}, "requests", "replay the first `n` requests (default all of a trace, 12,000 of the built-in load)")
	})
}

func newBenchCall() *cobra.Command {
	return benchVerb(&cobra.Command{
		Use:   "call",
		Short: "Calls into C libraries that are opened at run time",
		Long: `Measures what a call into a C library costs that was opened at run time, as those of CUDA and HIP are: every
copy on an accelerator makes one. Beside it the same call by purego.`,
		Example: "  kvferry bench call\n  kvferry bench call --runs 3 --json",
	}, bench.Call, func(*pflag.FlagSet, *bench.Options) {})
}

// benchVerb makes cmd run measure, with the flags that all have and those of own.
func benchVerb(cmd *cobra.Command, measure func(context.Context, bench.Options) (*bench.Report, error), own func(*pflag.FlagSet, *bench.Options)) *cobra.Command {
	o := bench.DefaultOptions()
	var asJSON bool
	f := cmd.Flags()
	f.SortFlags = false
	own(f, &o)
	f.Var(&number{value: &o.Runs, least: 1}, "runs", "measure `n` times (default 9)")
	f.Var(&number{value: &o.Threads, least: 1}, "threads", "`threads` that may run at once, ours and the ceilings' alike (default 1)")
	f.StringVar(&o.Clock, "clock", "", "`choice` of cpu (other load counts little) or wall time (default cpu with one thread)")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`seed` of orders and page ids")
	f.BoolVar(&asJSON, "json", false, "write the answer as JSON")
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		report, err := measure(cmd.Context(), o)
		if err != nil {
			return err
		}
		info, _ := debug.ReadBuildInfo()
		report.Version = versionOf(info).Version
		write := report.WriteText
		if asJSON {
			write = report.WriteJSON
		}
		if err := write(cmd.OutOrStdout()); err != nil {
			return fmt.Errorf("cannot write the answer: %w", err)
		}
		return nil
	}
	return cmd
}
