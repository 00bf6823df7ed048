package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/page"
)

var update = flag.Bool("update", false, "write testdata anew")

func TestMain(m *testing.M) {
	if os.Getenv(ownerVariable) != "" && len(os.Args) == 1 {
		if err := ServeTransfer(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this process is the owner that a test has started
		}
		return
	}
	leaktest.Main(m)
}

func TestCountRuns(t *testing.T) {
	for _, tc := range []struct {
		ids  []page.ID
		want int
	}{{nil, 0}, {[]page.ID{3}, 1}, {[]page.ID{3, 4, 5}, 1}, {[]page.ID{5, 4, 3}, 3}, {[]page.ID{1, 2, 9, 10, 4}, 3}} {
		if got := countRuns(tc.ids); got != tc.want {
			t.Errorf("%v: %d runs, want %d", tc.ids, got, tc.want)
		}
	}
}

func TestRunsPer64_FIFOScattersWhatRunsKeepsTogether(t *testing.T) {
	o := Options{Allocations: 4_000, Seed: 1}
	for _, whole := range []bool{true, false} {
		var per [2]float64
		for i, order := range []page.Order{page.Runs, page.FIFO} {
			var err error
			if per[i], err = runsPer64(context.Background(), order, whole, o); err != nil {
				t.Fatal(err)
			}
		}
		if per[0] >= per[1] || per[1] > 64 || per[0] <= 0 {
			t.Errorf("freed whole %t: %v runs in order %v, %v in order %v", whole, per[0], page.Runs, per[1], page.FIFO)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := runsPer64(ctx, page.Runs, true, o); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestScatter_EveryRowOnce(t *testing.T) {
	o := Options{Runs: 1, Threads: 1, MiB: 1, Seed: 1}
	b, err := openBench(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}()
	ops := b.scatter(64 << 10)
	dst, src := map[int64]bool{}, map[int64]bool{}
	inOrder := 0
	for i, op := range ops {
		if op.DstOff+op.Bytes > 1<<20 || op.SrcOff < 1<<20 || op.SrcOff+op.Bytes > 2<<20 {
			t.Errorf("%+v is not from one half into the other", op)
		}
		dst[op.DstOff], src[op.SrcOff] = true, true
		if i > 0 && op.SrcOff == ops[i-1].SrcOff+op.Bytes {
			inOrder++
		}
	}
	if len(dst) != 16 || len(src) != 16 || inOrder > 4 {
		t.Errorf("%d destinations and %d sources of 16 rows, %d of them in order", len(dst), len(src), inOrder)
	}
}

func TestLayerAfterLayer_IsTheSameRowsInTheOrderOfMemory(t *testing.T) {
	pages := 2 * runPages
	mem := make([]byte, pages*runLayers)
	var byPage []ceiling.Row
	for p := range pages {
		for l := range runLayers {
			at := l*pages + p
			byPage = append(byPage, ceiling.Row{Src: mem[at : at+1 : at+1]})
		}
	}
	rows := layerAfterLayer(byPage)
	if len(rows) != len(byPage) {
		t.Fatalf("%d rows of %d", len(rows), len(byPage))
	}
	for i, r := range rows {
		run, rest := i/(runPages*runLayers), i%(runPages*runLayers)
		layer, k := rest/runPages, rest%runPages
		if want := &mem[layer*pages+run*runPages+k]; &r.Src[0] != want {
			t.Fatalf("row %d is not page %d of run %d in layer %d", i, k, run, layer)
		}
	}
}

func TestStore_ServesATraceAndFindsWhatItStored(t *testing.T) {
	o := DefaultOptions()
	o.Runs, o.Requests, o.DevicePages, o.HostPages = 1, 100, 256, 256
	r, err := Store(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	labels := r.Sections[0].Lines[0].Labels
	if looked, hit := labels["looked_up"].(int), labels["hit"].(int); looked == 0 || hit == 0 || hit >= looked {
		t.Errorf("%d of %d pages hit", hit, looked)
	}
	if len(r.Sections) != 3 || len(r.Sections[1].Lines) != 4 || len(r.Sections[2].Lines) != 3 {
		t.Errorf("%+v", r.Sections)
	}
}

func TestBench_EndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	o := DefaultOptions()
	o.Runs, o.MiB, o.Allocations, o.Requests = 1, 1, 100, 5
	for _, verb := range []func(context.Context, Options) (*Report, error){Copy, Alloc, Store} {
		if _, err := verb(ctx, o); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
}

func TestOptions_AreRefusedByName(t *testing.T) {
	for _, tc := range []struct {
		change func(*Options)
		flag   string
	}{
		{func(o *Options) { o.Runs = 0 }, "--runs"},
		{func(o *Options) { o.Threads = maxThreads + 1 }, "--threads"},
		{func(o *Options) { o.MiB = -1 }, "--size"},
		{func(o *Options) { o.Allocations = 0 }, "--allocations"},
		{func(o *Options) { o.DevicePages = 95 }, "--device-pages"},
		{func(o *Options) { o.HostPages = 0 }, "--host-pages"},
		{func(o *Options) { o.Layers = -1 }, "--layers"},
		{func(o *Options) { o.RowBytes, o.Layers = 1<<30, 1 }, "--row-bytes"},
		{func(o *Options) { o.Layers = 3 }, "--row-bytes"},
		{func(o *Options) { o.Clock = "sun" }, "--clock"},
		{func(o *Options) { o.Clock, o.Threads = CPU, 2 }, "--clock"},
		{func(o *Options) { o.Arrangement = "x" }, "--arrangement"},
		{func(o *Options) { o.Model, o.RowBytes, o.Layers = "llama-3-8b", 1, 1 }, "--model"},
	} {
		o := DefaultOptions()
		tc.change(&o)
		_, err := o.check()
		if fault.KindOf(err) != fault.Invalid || !strings.Contains(err.Error(), tc.flag+": ") {
			t.Errorf("%s: got %v", tc.flag, err)
		}
	}
}

// sample is a report in which everything occurs.
func sample() *Report {
	o := Options{Runs: 9, Threads: 1, Clock: CPU, Seed: 1}
	r := newReport("copy", o)
	r.OS, r.Arch, r.CPUs, r.Version, r.Seconds, r.legend = "linux", "amd64", 2, "devel", 12.34, "R: the bare loop."
	r.Settings = []Setting{{"pools", "256 MiB each"}}
	bytes := int64(268435456)
	fast := newLine("demote  fresh", Stat{8, 7.5, 8.25}, map[string]any{"checks": "off", "row_bytes": 65536})
	fast.Bytes = &bytes
	fast.against("C", []float64{8, 8}, []float64{16, 12.8})
	fast.against("R", []float64{8, 8}, []float64{8, 10})
	fast.atLeast("R", 0.95)
	fast.atLeast("C", 0.5)
	slow := newLine("promote", Stat{1, 1, 1}, map[string]any{})
	slow.against("R", []float64{1}, []float64{4})
	one := newLine("a pair", Stat{12345, 900, 1234567}, map[string]any{"pages": 64})
	one.atMost("", 250)
	r.Sections = []Section{{"llama", "GB/s", []Line{fast, slow}}, {"allocate", "ns", []Line{one}}}
	r.Warnings = []string{"the pools are small"}
	return r
}

func TestReport_LooksAsItDid(t *testing.T) {
	for name, write := range map[string]func(*Report, *bytes.Buffer) error{
		"report.txt":  func(r *Report, b *bytes.Buffer) error { return r.WriteText(b) },
		"report.json": func(r *Report, b *bytes.Buffer) error { return r.WriteJSON(b) },
	} {
		var got bytes.Buffer
		if err := write(sample(), &got); err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile("testdata/"+name, got.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), got.String()); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

func TestReport_JSONHasListsWhereNothingIs(t *testing.T) {
	r := newReport("alloc", Options{Runs: 1, Threads: 1})
	r.Sections = []Section{{Title: "t", Unit: "ns", Lines: []Line{newLine("n", Stat{1, 1, 1}, map[string]any{})}}}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := json.Unmarshal(b.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	line := back["sections"].([]any)[0].(map[string]any)["lines"].([]any)[0].(map[string]any)
	for _, key := range []string{"beside", "goals"} {
		if _, list := line[key].([]any); !list {
			t.Errorf("%s is %v", key, line[key])
		}
	}
	for _, key := range []string{"settings", "warnings"} {
		if _, list := back[key].([]any); !list {
			t.Errorf("%s is %v", key, back[key])
		}
	}
	if v, there := line["bytes_moved"]; v != nil || !there {
		t.Errorf("bytes_moved is %v: nothing was moved, which is not 0", v)
	}
}
