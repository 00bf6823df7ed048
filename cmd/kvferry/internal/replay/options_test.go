package replay

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
)

func with(change func(*Options)) Options {
	o := DefaultOptions()
	change(&o)
	return o
}

func TestResolve_FillsInWhatWasNotGiven(t *testing.T) {
	small := DefaultOptions()
	small.Layers, small.KVHeads, small.HeadDim, small.DType, small.Layout, small.Verify = 4, 2, 8, "bf16", "NHD", VerifyFull
	and := func(o Options, change func(*Options)) Options {
		change(&o)
		return o
	}
	for _, tc := range []struct {
		name     string
		in, want Options
	}{
		{"nothing given", DefaultOptions(), small},
		{"resolved before", small, small},
		{
			"some geometry", with(func(o *Options) { o.Layers, o.HeadDim, o.DType, o.Layout = 7, 128, "FP8", "hnd" }),
			and(small, func(o *Options) { o.Layers, o.HeadDim, o.DType, o.Layout = 7, 128, "fp8", "HND" }),
		},
		{
			"latent dim means MLA", with(func(o *Options) { o.LatentDim = 64 }),
			and(small, func(o *Options) { o.KVHeads, o.HeadDim, o.LatentDim, o.Layout = 0, 0, 64, "MLA" }),
		},
		{
			"model", with(func(o *Options) { o.Model = "llama-3-8b" }),
			and(small, func(o *Options) { o.Model, o.Layers, o.KVHeads, o.HeadDim = "llama-3-8b", 32, 8, 128 }),
		},
		{
			"model of latents", with(func(o *Options) { o.Model = "deepseek-v3" }),
			and(small, func(o *Options) {
				o.Model, o.Layers, o.KVHeads, o.HeadDim, o.LatentDim, o.Layout = "deepseek-v3", 61, 0, 0, 576, "MLA"
			}),
		},
		{
			"model repeated in part, dtype and layout chosen",
			with(func(o *Options) { o.Model, o.Layers, o.DType, o.Layout = "qwen2.5-0.5b", 24, "fp8", "HND" }),
			and(small, func(o *Options) {
				o.Model, o.Layers, o.KVHeads, o.HeadDim, o.DType, o.Layout = "qwen2.5-0.5b", 24, 2, 64, "fp8", "HND"
			}),
		},
		{
			"bookkeeping", with(func(o *Options) { o.Bookkeeping = true }),
			with(func(o *Options) { o.Bookkeeping, o.Verify = true, VerifyOff }),
		},
		{
			"no host pool, one device page", with(func(o *Options) { o.HostPages, o.DevicePages = 0, 1 }),
			and(small, func(o *Options) { o.HostPages, o.DevicePages = 0, 1 }),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.in.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestResolve_RefusesWhatCannotBeAndSaysTheRemedy(t *testing.T) {
	for _, tc := range []struct {
		change       func(*Options)
		want, remedy string
	}{
		{func(o *Options) { o.Requests = -1 }, "--requests: -1 is not in 0…4194304", "0 replays all"},
		{func(o *Options) { o.Requests = 1 << 23 }, "--requests: 8388608 is not in 0…4194304", "0 replays all"},
		{func(o *Options) { o.PageSize = 100 }, "--page-size: 100 tokens neither divides 512 nor is a multiple of it, and a trace has one id for each 512 tokens", "the nearest sizes are --page-size 64 and --page-size 128"},
		{func(o *Options) { o.DevicePages = 0 }, "--device-pages: 0 pages is not in 1…2147483646", "the default is --device-pages 2048"},
		{func(o *Options) { o.DevicePages = 1 << 31 }, "--device-pages: 2147483648 pages is not in 1…2147483646", "the default is --device-pages 2048"},
		{func(o *Options) { o.HostPages = -2 }, "--host-pages: -2 pages is not in 0…2147483646", "0 replays without a host pool; the default is --host-pages 8192"},
		{func(o *Options) { o.Tiers = "both" }, `--tiers: no such choice: "both"`, "there are exclusive, inclusive, write-through"},
		{func(o *Options) { o.Verify = "some" }, `--verify: no such choice: "some"`, "there are full, sample, off"},
		{func(o *Options) { o.Model = "gpt-5" }, `--model: no model "gpt-5"`, "there are llama-3-8b, qwen2.5-0.5b, deepseek-v3; for another, give --layers --kv-heads --head-dim --dtype --layout"},
		{func(o *Options) { o.Model, o.Layers = "llama-3-8b", 31 }, "--layers: 31 contradicts --model llama-3-8b, which has 32", "drop one of the two"},
		{func(o *Options) { o.Model, o.KVHeads = "llama-3-8b", 2 }, "--kv-heads: 2 contradicts --model llama-3-8b, which has 8", "drop one of the two"},
		{func(o *Options) { o.Model, o.HeadDim = "llama-3-8b", 64 }, "--head-dim: 64 contradicts --model llama-3-8b, which has 128", "drop one of the two"},
		{func(o *Options) { o.Model, o.LatentDim = "deepseek-v3", 512 }, "--latent-dim: 512 contradicts --model deepseek-v3, which has 576", "drop one of the two"},
		{func(o *Options) { o.Model, o.Layout = "deepseek-v3", "NHD" }, "--layout: NHD contradicts --model deepseek-v3", "MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim"},
		{func(o *Options) { o.Model, o.Layout = "llama-3-8b", "mla" }, "--layout: MLA contradicts --model llama-3-8b", "MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim"},
		{func(o *Options) { o.Layout, o.LatentDim = "NHD", 64 }, "--layout: NHD contradicts --latent-dim", "MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim"},
		{func(o *Options) { o.Model, o.LatentDim = "llama-3-8b", 64 }, "--latent-dim: layout NHD has none, yet 64 was given", "MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim"},
		{func(o *Options) { o.KVHeads, o.LatentDim = 2, 64 }, "--kv-heads: layout MLA has none, yet 2 was given", "MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim"},
		{func(o *Options) { o.Layout = "MLA" }, "--latent-dim: layout MLA needs it", "for example --latent-dim 576, as --model deepseek-v3 has"},
		{func(o *Options) { o.Layers = -1 }, "--layers: -1 is not in 1…1024", ""},
		{func(o *Options) { o.Bookkeeping, o.Verify = true, VerifyFull }, "--bookkeeping: pages have no bytes, so --verify full has nothing to look at", "drop one of the two"},
		{func(o *Options) { o.Bookkeeping, o.HeadDim = true, 8 }, "--bookkeeping: pages have no bytes, so --head-dim has no effect", "drop one of the two"},
	} {
		_, err := with(tc.change).Resolve()
		if !errors.Is(err, fault.Invalid) || err.Error() != tc.want || fault.RemedyOf(err) != tc.remedy {
			t.Errorf("got  %v (%s)\nwant %s (%s)", err, fault.RemedyOf(err), tc.want, tc.remedy)
		}
	}
	for flag, change := range map[string]func(*Options){
		"--layout": func(o *Options) { o.Layout = "XYZ" },
		"--dtype":  func(o *Options) { o.DType = "int3" },
	} {
		_, err := with(change).Resolve()
		var e *fault.Error
		if !errors.As(err, &e) || e.Object != flag || !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
			t.Errorf("%s: %v (%s)", flag, err, fault.RemedyOf(err))
		}
	}
}

func TestCheckFits_NamesTheLargestRequest(t *testing.T) {
	trace := &Trace{Name: "chat.jsonl", Requests: []Request{{Input: 600}, {Input: 2049}, {Input: 100}}}
	if err := CheckFits(trace, 512, 5); err != nil {
		t.Error(err)
	}
	err := CheckFits(trace, 512, 4)
	want := "--device-pages: 4 pages, but chat.jsonl:2 has 2049 tokens and needs 5 pages of 512 tokens"
	if !errors.Is(err, fault.Invalid) || err.Error() != want || fault.RemedyOf(err) != "give --device-pages 5 or more" {
		t.Errorf("got %v (%s)", err, fault.RemedyOf(err))
	}
	if err := CheckFits(trace, 1024, 3); err != nil {
		t.Error(err)
	}
}
