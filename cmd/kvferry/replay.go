package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/replay"
	"github.com/kvferry/kvferry/fault"
)

func newReplay() *cobra.Command {
	o := replay.DefaultOptions()
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Replay chat requests through the cache and check every byte that comes back",
		Long: `Replays a trace of chat requests, one after the other, through a device pool and a host pool: match the
prompt's pages, bring back those on the host, write the rest, and compare every page that was hit with what was
written. Then says what was hit, what was missed and why, and how fast it was.

A trace has one JSON object a line:

  {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}

timestamp is in milliseconds (it does not pace the replay), the lengths are in tokens, and hash_ids has one id for
each 512 tokens of the prompt and one for what is left: equal ids mean equal tokens up to there. Without --trace a
chat load is made from --seed: shared system prompts, growing conversations, a long tail of documents.

--compare sets the hits beside those of two policies over as many pages: least recently used, and the optimum, which
knows what comes. --sweep does not replay: it works out both for pools from the smallest that can serve the trace to
one that holds all of it, at once and without the memory, so that the pools can be sized.

The geometry is that of --model, or of the flags --layers to --layout.

With --device the device pool is the memory of an accelerator: pages are written and looked at through pinned host
memory, and moved by the copier that passes its self-test there.`,
		Example: `  kvferry replay
  kvferry replay --trace chat.jsonl --host-pages 48000
  kvferry replay --trace chat.jsonl --bookkeeping --json
  kvferry replay --trace chat.jsonl --model llama-3-8b --sweep
  kvferry replay --trace chat.jsonl --bookkeeping --compare
  kvferry replay --model llama-3-8b --page-size 16 --device-pages 2048 --requests 100
  kvferry replay --device cuda:0 --model llama-3-8b --page-size 16 --requests 100`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runReplay(cmd, o, asJSON)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.Trace, "trace", "", "replay this `file` instead of the built-in chat load")
	f.Var(&number{value: &o.Requests, least: 0}, "requests", "replay the first `n` requests (0, the default: all of a trace, 12,000 of the built-in load)")
	f.Var(&number{value: &o.DevicePages, least: 1}, "device-pages", "`pages` on the device (default 2048; as many as the largest request needs, or fewer if there is less memory)")
	f.Var(&number{value: &o.HostPages, least: 0}, "host-pages", "`pages` in host memory, 0 for none (default 8192, fewer if there is less memory)")
	f.Var(&number{value: &o.PageSize, least: 1}, "page-size", "`tokens` of a page: a divisor or a multiple of 512 (default 512)")
	f.StringVar(&o.Tiers, "tiers", o.Tiers, "`choice` of exclusive (a page is on the device or on the host), inclusive (the host keeps what it gave) or write-through (every page that is put is copied to the host at once)")
	f.StringVar(&o.Verify, "verify", "", "`choice` of how much of a hit page is compared: full, sample or off (default full)")
	f.StringVar(&o.Checks, "checks", o.Checks, "`choice` of when the store checks host pages: always, arrival (not before they leave) or off")
	f.BoolVar(&o.Bookkeeping, "bookkeeping", false, "pages have no bytes: only matching, placing and evicting")
	f.BoolVar(&o.Compare, "compare", false, "show what least recently used and the optimum hit with as many pages")
	f.BoolVar(&o.Sweep, "sweep", false, "do not replay: show what they hit with pools of other sizes")
	f.StringVar(&o.Model, "model", "", "geometry of this `model`: llama-3-8b, qwen2.5-0.5b or deepseek-v3")
	f.Var(&number{value: &o.Layers, least: 1}, "layers", "`layers` of a page (default 4)")
	f.Var(&number{value: &o.KVHeads, least: 1}, "kv-heads", "KV `heads` of a layer (default 2)")
	f.Var(&number{value: &o.HeadDim, least: 1}, "head-dim", "`elements` of one head's K or V of a token (default 8)")
	f.Var(&number{value: &o.LatentDim, least: 1}, "latent-dim", "`elements` of a token's latent, for MLA instead of heads")
	f.StringVar(&o.DType, "dtype", "", "`type` of an element: fp8, int8, int4, fp4, bf16, fp16 or fp32 (default bf16)")
	f.StringVar(&o.Layout, "layout", "", "`order` of the axes in a page: NHD, HND or MLA (default NHD)")
	deviceFlags(f, &o.Device, &o.Copier, &o.Libraries)
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`seed` of the built-in load and of --verify sample")
	f.BoolVar(&asJSON, "json", false, "write the answer as JSON")
	return cmd
}

// runReplay replays and writes the answer. With --json an error is part of the
// answer too, once the replay has begun; who interrupts it wants none.
func runReplay(cmd *cobra.Command, o replay.Options, asJSON bool) error {
	if o.Sweep {
		return runSweep(cmd, o, asJSON)
	}
	result, err := replay.Run(cmd.Context(), o, cmd.ErrOrStderr())
	if err != nil && (result == nil || !asJSON || exitStatus(err) == exitInterrupt) {
		return err
	}
	result.Version = ownVersion()
	if err != nil && result.Error == nil {
		result.Error = &replay.Failure{Kind: "other", Message: err.Error()}
		if kind := fault.KindOf(err); kind != 0 {
			result.Error.Kind = kind.Error()
		}
	}
	write := result.WriteText
	if asJSON {
		write = result.WriteJSON
	}
	if werr := write(cmd.OutOrStdout()); werr != nil {
		return errors.Join(err, fmt.Errorf("cannot write the answer: %w", werr))
	}
	return err
}

// runSweep works out what pools of other sizes would hit, and writes it.
func runSweep(cmd *cobra.Command, o replay.Options, asJSON bool) error {
	s, err := replay.RunSweep(cmd.Context(), o)
	if err != nil {
		return err
	}
	s.Version = ownVersion()
	write := s.WriteText
	if asJSON {
		write = s.WriteJSON
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return fmt.Errorf("cannot write the answer: %w", err)
	}
	return nil
}

func ownVersion() string {
	info, _ := debug.ReadBuildInfo()
	return versionOf(info).Version
}

// number is a whole number on the command line with a least value. What was not
// given keeps the value that it had, which is no number that could be given, and
// so help does not show it.
type number struct {
	value *int
	least int
	given string
}

func (n *number) Set(s string) error {
	v, err := strconv.Atoi(s)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return errors.New("out of range")
	case err != nil:
		return errors.New("not a whole number")
	case v < n.least:
		return fmt.Errorf("must be %d or more", n.least)
	}
	*n.value, n.given = v, strconv.Itoa(v)
	return nil
}

func (n *number) String() string { return n.given }
func (*number) Type() string     { return "number" }
