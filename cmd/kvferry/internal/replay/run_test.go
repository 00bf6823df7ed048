package replay

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

// begin starts a replay of t for a test that drives it request by request.
func begin(t *testing.T, trace *Trace, change func(*Options)) *replay {
	t.Helper()
	o, err := with(change).Resolve()
	if err != nil {
		t.Fatal(err)
	}
	x, err := start(t.Context(), o, trace)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.pools.close(); err != nil {
			t.Error(err)
		}
	})
	return x
}

func bookkeeping(device, host int) func(*Options) {
	return func(o *Options) { o.Bookkeeping, o.DevicePages, o.HostPages = true, device, host }
}

// The references are those of two independent simulators of "least recently used,
// deepest page first, a partial last page not kept" at the same capacity. The
// manager loses a few hits to the page that a running request borrows for its own
// partial page; how many is pinned down here.
func TestRun_HitsOfTheRealTraceAreTheKnownOnes(t *testing.T) {
	trace := realTrace(t)
	if invariants.Enabled {
		// The audits make this run take minutes; without them it is the same run.
		trace.Requests = trace.Requests[:200]
		run := begin(t, trace, bookkeeping(300, 500))
		if err := run.run(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return
	}
	u := newUses(trace, IDTokens)
	for _, x := range []struct {
		name         string
		device, host int
		tiers        string
		hits         int64
		reference    float64
	}{
		{"room for all", 2048, 182_790, Exclusive, 105_592, 0.3660},
		{"10,000 pages", 2048, 7952, Exclusive, 61_994, 0.2149},
		{"10,000 pages, small device", 1024, 8976, Exclusive, 61_994, 0.2149},
		{"30,000 pages", 2048, 27_952, Exclusive, 95_336, 0.3305},
		{"50,000 pages", 2048, 47_952, Exclusive, 102_723, 0.3561},
		{"inclusive, device 1,024", 1024, 8976, Inclusive, 61_558, 0.2134},
		{"inclusive, device 2,048", 2048, 7952, Inclusive, 61_005, 0.2115},
		{"inclusive, device 5,000", 5000, 5000, Inclusive, 60_328, 0.2091},
		{"write-through, device 1,024", 1024, 8976, WriteThrough, 57_828, 0.2004},
		{"write-through, device 2,048", 2048, 7952, WriteThrough, 53_230, 0.1845},
		{"write-through, device 5,000", 5000, 5000, WriteThrough, 49_882, 0.1729},
	} {
		t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
			run := begin(t, trace, func(o *Options) {
				bookkeeping(x.device, x.host)(o)
				o.Tiers = x.tiers
			})
			if err := run.run(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			run.finish()
			r := run.r
			if err := r.Balance(); err != nil {
				t.Error(err)
			}
			if r.PagesLookedUp != 288_500 || r.MissPartial != 12_009 || r.MissBeyondPrefix != 0 || r.MissHistoryFull != 0 {
				t.Errorf("looked up %d, partial %d, beyond prefix %d, history full %d", r.PagesLookedUp, r.MissPartial, r.MissBeyondPrefix, r.MissHistoryFull)
			}
			if got := r.Hits(); got != x.hits {
				t.Errorf("%d hits, known are %d", got, x.hits)
			}
			if most := u.optimum(x.device + x.host); r.Hits() > most {
				t.Errorf("%d hits, yet the optimum has %d", r.Hits(), most)
			}
			if math.Abs(*r.HitRatio-x.reference) > 0.0005 {
				t.Errorf("hit ratio %.4f, the reference is %.4f", *r.HitRatio, x.reference)
			}
		})
	}
}

// A slice of the real trace with every byte, in pools small enough that pages go
// down and come up all the time.
func TestRun_EveryByteOfARealSlice(t *testing.T) {
	trace := realTrace(t)
	trace.Requests = trace.Requests[:600]
	for name, change := range map[string]func(*Options){
		"nhd":       func(*Options) {},
		"hnd":       func(o *Options) { o.Layout = "HND" },
		"mla":       func(o *Options) { o.LatentDim = 12 },
		"fp32":      func(o *Options) { o.DType = "fp32" },
		"odd rows":  func(o *Options) { o.DType, o.KVHeads, o.HeadDim, o.Layers = "int8", 3, 5, 3 },
		"one layer": func(o *Options) { o.Layers = 1 },
		"page 256":  func(o *Options) { o.PageSize = 256 },
		"page 1024": func(o *Options) { o.PageSize = 1024 },
		"inclusive": func(o *Options) { o.Tiers = Inclusive },
		"through":   func(o *Options) { o.Tiers = WriteThrough },
		"sample":    func(o *Options) { o.Verify = VerifySample },
		"no host":   func(o *Options) { o.HostPages = 0 },
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			x := begin(t, trace, func(o *Options) {
				o.Layers, o.KVHeads, o.HeadDim, o.DevicePages, o.HostPages = 2, 1, 8, 300, 6000
				change(o)
				if o.LatentDim != 0 {
					o.KVHeads, o.HeadDim = 0, 0
				}
				if o.PageSize < IDTokens {
					o.DevicePages, o.HostPages = 2*o.DevicePages, 2*o.HostPages
				}
			})
			if err := x.run(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			x.finish()
			if err := errors.Join(x.r.Balance(), x.pools.manager.Check()); err != nil {
				t.Error(err)
			}
			hits := [2]int64{599, 1554} // on the device, on the host
			if other, ok := map[string][2]int64{
				"no host": {599, 0}, "page 256": {1198, 3081}, "page 1024": {0, 1115}, "inclusive": {599, 1548}, "through": {599, 1461},
			}[name]; ok {
				hits = other
			}
			if got := [2]int64{x.r.PagesHitDevice, x.r.PagesHitHost}; got != hits {
				t.Errorf("%v pages hit on the device and on the host, known are %v", got, hits)
			}
			if x.r.Hits() == 0 || *x.r.Mismatches != 0 || *x.r.BytesVerified == 0 {
				t.Errorf("%d hits, %d mismatches, %d bytes verified", x.r.Hits(), *x.r.Mismatches, *x.r.BytesVerified)
			}
			if x.o.HostPages > 0 && (x.r.PagesReloaded == 0 || x.r.PagesOffloaded == 0) {
				t.Errorf("%d pages offloaded, %d reloaded: the slice was to move both ways", x.r.PagesOffloaded, x.r.PagesReloaded)
			}
		})
	}
}

func TestRun_NoResidentPageLacksAResidentAncestor(t *testing.T) {
	trace := realTrace(t)
	trace.Requests = trace.Requests[:1500]
	if invariants.Enabled {
		trace.Requests = trace.Requests[:300]
	}
	for _, tiers := range []string{Exclusive, Inclusive, WriteThrough} {
		x := begin(t, trace, func(o *Options) {
			bookkeeping(247, 600)(o)
			o.Tiers = tiers
		})
		rng := rand.New(rand.NewPCG(7, 7))
		var keys []page.Key
		var answers []store.Answer
		for i := range trace.Requests {
			if err := x.request(t.Context(), i); err != nil {
				t.Fatal(err)
			}
			for k := range 30 { // this path, and others at random
				path := i
				if k > 0 {
					path = rng.IntN(i + 1)
				}
				keys = AppendKeys(keys[:0], x.root, &trace.Requests[path], x.o.PageSize)
				answers = x.pools.manager.Store().Why(answers[:0], keys, len(keys))
				for p, a := range answers {
					if a.Reason == fault.BeyondPrefix {
						t.Fatalf("%s: after request %d, page %d of request %d is resident and an earlier page is not", tiers, i, p, path)
					}
				}
			}
		}
		if err := x.pools.manager.Check(); err != nil {
			t.Error(err)
		}
	}
}

// chain is a trace of requests that all ask for the same prompt.
func chain(requests, pages int) *Trace {
	t := &Trace{Name: "same prompt"}
	ids := make([]int64, pages)
	for i := range ids {
		ids[i] = int64(i)
	}
	for range requests {
		t.Requests = append(t.Requests, Request{Input: pages*IDTokens - 12, Output: 1, IDs: ids})
		t.Tokens += int64(pages*IDTokens - 12)
	}
	return t
}

// The negative controls of the whole command: a byte that is changed behind its
// back must be found, and named.
func TestRun_AWrongByteOnTheDeviceEndsTheRunAndIsNamed(t *testing.T) {
	for _, layout := range []string{"NHD", "HND"} {
		x := begin(t, chain(2, 4), func(o *Options) { o.DevicePages, o.HostPages, o.Layers, o.Layout = 8, 8, 2, layout })
		if err := x.request(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		// Page 2 of the prompt lies in device page 3: the sink comes first, and a
		// fresh pool gives pages in order. V of layer 1, byte 100.
		plane := x.content.planes[3]
		plane.mem[plane.offset+3*plane.pageStride+100] ^= 0x40
		err := x.request(t.Context(), 1)
		if !errors.Is(err, fault.Corrupt) {
			t.Fatalf("%s: error %v, want kind corrupt", layout, err)
		}
		f := x.r.Error
		if f == nil || *f.Page != 3 || *f.Layer != 1 || f.Tier != "device" || !strings.Contains(f.History, "stored on the device as page 3") {
			t.Errorf("%s: failure %+v", layout, f)
		}
		if layout == "NHD" && *f.Offset != 100 {
			t.Errorf("offset %d, want 100", *f.Offset)
		}
	}
}

func TestRun_AWrongByteOnTheHostIsNeverHandedOut(t *testing.T) {
	trace := chain(1, 4)
	other := chain(1, 7)
	for i := range other.Requests[0].IDs {
		other.Requests[0].IDs[i] += 100
	}
	trace.Requests = append(trace.Requests, other.Requests[0], trace.Requests[0])
	x := begin(t, trace, func(o *Options) { o.DevicePages, o.HostPages = 8, 8 })
	for i := range 2 { // the second request pushes the first one's pages down
		if err := x.request(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
	b, err := x.pools.manager.Pool().Cache().Page(0)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	err = x.request(t.Context(), 2)
	if !errors.Is(err, fault.Corrupt) || x.r.Error == nil || x.r.Error.Tier != "host" || !strings.Contains(x.r.Error.History, "demoted to host page 0") {
		t.Errorf("error %v, failure %+v", err, x.r.Error)
	}
}

func TestRun_PoolsThatDoNotFitAreRefusedWithTheNumbers(t *testing.T) {
	o, err := with(func(o *Options) { o.Model, o.DevicePages, o.HostPages = "llama-3-8b", 1<<20, 1<<24 }).Resolve()
	if err != nil {
		t.Fatal(err)
	}
	_, err = start(t.Context(), o, chain(1, 2))
	if !errors.Is(err, fault.Memory) || !strings.Contains(err.Error(), "there is memory for") || fault.RemedyOf(err) == "" {
		t.Errorf("error %v, remedy %q", err, fault.RemedyOf(err))
	}
}

func TestFit_ShrinksOnlyWhatWasNotAsked(t *testing.T) {
	for _, x := range []struct {
		name         string
		device, host int
		auto         [2]bool
		room         int64
		wantDevice   int
		wantHost     int
		refused      bool
		apart        bool
	}{
		{"all fit", 10, 20, [2]bool{true, true}, 31, 10, 20, false, false},
		{"both give way, to half of the memory", 10, 20, [2]bool{true, true}, 30, 5, 9, false, false},
		{"the device only down to the largest request", 10, 20, [2]bool{true, true}, 6, 5, 0, false, false},
		{"less than the largest request", 10, 20, [2]bool{true, true}, 5, 0, 0, true, false},
		{"a device that was asked for stays", 10, 20, [2]bool{false, true}, 30, 10, 4, false, false},
		{"both asked for", 10, 20, [2]bool{false, false}, 30, 0, 0, true, false},
		{"pages on an accelerator take none of it", 10, 20, [2]bool{false, true}, 20, 10, 20, false, true},
		{"only the host pool gives way to half of it", 10, 20, [2]bool{false, true}, 19, 10, 9, false, true},
		{"a host pool that was asked for", 10, 20, [2]bool{false, false}, 19, 0, 0, true, true},
	} {
		o := Options{DevicePages: x.device, HostPages: x.host}
		r := &Result{PageBytes: 1}
		o, err := o.fit(r, x.auto, 5, x.room, x.apart)
		if x.refused != errors.Is(err, fault.Memory) {
			t.Errorf("%s: error %v", x.name, err)
		}
		if !x.refused && (o.DevicePages != x.wantDevice || o.HostPages != x.wantHost) {
			t.Errorf("%s: %d and %d pages, want %d and %d", x.name, o.DevicePages, o.HostPages, x.wantDevice, x.wantHost)
		}
		if changed := o.DevicePages != x.device || o.HostPages != x.host; !x.refused && changed != (len(r.Warnings) == 1) {
			t.Errorf("%s: warnings %q", x.name, r.Warnings)
		}
	}
}

// Small pages must not make the yardsticks large: they are lists of rows.
func TestMeasure_ListsOfRowsAreBounded(t *testing.T) {
	x := begin(t, chain(1, 1), func(o *Options) {
		o.PageSize, o.DevicePages, o.HostPages, o.Layers, o.KVHeads, o.HeadDim = 1, 40_000, 40_000, 2, 1, 8
	})
	ops, err := x.ops(x.pools.manager.Pool().Cache())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(ops); n < ceiling.MaxRows || n > ceiling.MaxRows+2 {
		t.Errorf("%d ops, want about %d", n, ceiling.MaxRows)
	}
	if n := len(ceiling.Pieces(make([]byte, 64), make([]byte, 64), ceilingBytes)); n > ceiling.MaxRows {
		t.Errorf("%d pieces, want at most %d", n, ceiling.MaxRows)
	}
}

// A pipe that nobody writes into keeps nobody who has been interrupted.
func TestRun_GivesUpOnATraceThatDoesNotComeWhenCtxEnds(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, with(func(o *Options) { o.Trace = pipe }), io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	// Let go of who was left behind.
	f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

// The suggestion against the plainest way to work it out: how many distinct pages
// were touched between two uses.
func TestSuggestHostPages_IsAQuantileOfReuseDistances(t *testing.T) {
	trace := Generate(3, 300)
	x := begin(t, trace, bookkeeping(247, 100))
	if err := x.run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	got := suggestHostPages(newUses(trace, x.o.PageSize), x.o, x.evicted)
	if got == nil {
		t.Fatal("pages were evicted, and nothing is suggested")
	}
	// With the suggested pool, most of what was evicted is kept.
	y := begin(t, trace, bookkeeping(247, int(*got)))
	if err := y.run(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if before, after := x.r.MissEvicted, y.r.MissEvicted; float64(after) > (1-mostOf)*float64(before) {
		t.Errorf("%d pages evicted, and still %d with --host-pages %d", before, after, *got)
	}
	if suggestHostPages(newUses(trace, x.o.PageSize), x.o, nil) != nil {
		t.Error("nothing was evicted, and a pool is suggested")
	}
}

func TestContent_EveryWrongByteIsFound(t *testing.T) {
	b := make([]byte, 200)
	for _, logical := range []int64{0, 8, 64, 3, 13} {
		fill(b, 42, logical)
		if at := differs(b, 42, logical); at != -1 {
			t.Fatalf("offset %d: byte %d differs at once", logical, at)
		}
		for i := range b {
			b[i] ^= 0x10
			if at := differs(b, 42, logical); at != i {
				t.Fatalf("offset %d: byte %d was changed, %d is reported", logical, i, at)
			}
			b[i] ^= 0x10
		}
	}
}

func TestContent_DependsOnKeyLayerAndPlaneAndNotOnTheLayout(t *testing.T) {
	seen := map[uint64]bool{}
	for k := range byte(4) {
		for layer := range 4 {
			for plane := range 2 {
				seen[seedOf(&page.Key{k}, layer, plane)] = true
			}
		}
	}
	if len(seen) != 32 {
		t.Errorf("%d seeds for 32 planes", len(seen))
	}
	// Token 3, head 1 has the same bytes whatever the order of the axes.
	var rows [2][]byte
	for i, layout := range []string{"NHD", "HND"} {
		x := begin(t, chain(1, 1), func(o *Options) { o.DevicePages, o.HostPages, o.Layout = 2, 0, layout })
		x.content.write(&page.Key{9}, 1, 0, x.o.PageSize)
		view, err := x.pools.cache.ChunkView(2, 1, 0, x.o.PageSize)
		if layout == "HND" || err != nil {
			p := x.content.planes[4]
			rows[i] = p.mem[p.offset+p.pageStride+1*p.headStride+3*p.tokenStride:][:16]
			continue
		}
		at, err := view.At(0, 3, 1, 0)
		if err != nil {
			t.Fatal(err)
		}
		rows[i] = view.Mem.Bytes()[at:][:16]
	}
	if string(rows[0]) != string(rows[1]) {
		t.Errorf("NHD %x, HND %x", rows[0], rows[1])
	}
}

func TestRun_SaysNothingWhenTheOutputIsNoTerminal(t *testing.T) {
	o := with(func(o *Options) { o.Requests, o.DevicePages, o.HostPages = 20, 247, 64 })
	var out strings.Builder
	r, err := Run(t.Context(), o, io.Writer(&out))
	if err != nil {
		t.Fatal(err)
	}
	if out.Len() > 0 {
		t.Errorf("wrote %q", out.String())
	}
	if r.PeakRSSBytes == nil || r.ShareOfC == nil && r.PagesOffloaded+r.PagesReloaded > 0 {
		t.Errorf("peak %v, share of C %v", r.PeakRSSBytes, r.ShareOfC)
	}
	if kv.Layout(0) == kv.NHD {
		t.Error("a layout that was not given must not read as NHD")
	}
}
