package transfer

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestAppendReads(t *testing.T) {
	type part struct{ position, t0, t1 int }
	for _, test := range []struct {
		size, start, end int
		want             []part
	}{
		{128, 0, 128, []part{{0, 0, 128}}},
		{128, 100, 300, []part{{0, 100, 128}, {1, 0, 128}, {2, 0, 44}}},
		{128, 128, 256, []part{{1, 0, 128}}},
		{8, 5, 7, []part{{0, 5, 7}}},
		{8, 5, 8, []part{{0, 5, 8}}},
		{8, 7, 8, []part{{0, 7, 8}}},
		{8, 7, 9, []part{{0, 7, 8}, {1, 0, 1}}},
		{8, 16, 17, []part{{2, 0, 1}}},
		{8, 0, 24, []part{{0, 0, 8}, {1, 0, 8}, {2, 0, 8}}},
		{1, 1, 3, []part{{1, 0, 1}, {2, 0, 1}}},
		{8, 0, 0, nil},
		{8, 24, 24, nil},
		{8, 1000, 1000, nil}, // the lists needn't cover what is not read
		{8, 9, 3, nil},
	} {
		local, remote := []page.ID{10, 5, 11}, []page.ID{7, 3, 4}
		var want []Read
		for _, p := range test.want {
			for layer := range 2 {
				want = append(want, Read{Layer: layer, Local: local[p.position], Remote: remote[p.position], T0: p.t0, T1: p.t1})
			}
		}
		before := []Read{{Layer: 77}}
		got, err := AppendReads(before, 2, test.start, test.end, local, remote, test.size)
		if err != nil || !slices.Equal(got, append(before, want...)) {
			t.Errorf("[%d, %d) in pages of %d: %v, error %v; want %v", test.start, test.end, test.size, got, err, want)
		}
	}
}

func TestAppendReads_RefusesWhatTheListsDoNotCover(t *testing.T) {
	three, two := make([]page.ID, 3), make([]page.ID, 2)
	for _, test := range []struct {
		size, start, end int
		local, remote    []page.ID
	}{
		{8, -1, 3, three, three},
		{8, -5, -8, three, three},
		{8, 0, 25, three, three},
		{8, 0, 17, two, three},
		{8, 0, 17, three, two},
		{8, 30, 31, three, three},
		{8, 0, 1, nil, three},
		{0, 0, 1, three, three},
		{-8, 0, 1, three, three},
	} {
		before := []Read{{Layer: 77}}
		got, err := AppendReads(before, 2, test.start, test.end, test.local, test.remote, test.size)
		if fault.KindOf(err) != fault.Invalid || len(got) != 1 {
			t.Errorf("[%d, %d) in %d and %d pages of %d: %v, error %v, want kind invalid", test.start, test.end, len(test.local), len(test.remote), test.size, got, err)
		}
		var p Plan
		if err := p.Set(test.start, test.end, test.local, test.remote, test.size); fault.KindOf(err) != fault.Invalid || !p.Empty() {
			t.Errorf("the plan of [%d, %d): %v, error %v, want kind invalid", test.start, test.end, p, err)
		}
	}
}

// A plan says what the list of reads says.
func TestPlan_IsTheReads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size, n := rapid.IntRange(1, 5).Draw(t, "size"), rapid.IntRange(1, 8).Draw(t, "pages")
		local := rapid.Permutation(ids(n)).Draw(t, "local")
		remote := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) page.ID { return page.ID(rapid.IntRange(0, 9).Draw(t, "id")) }), n, n).Draw(t, "remote")
		start, end := rapid.IntRange(0, n*size).Draw(t, "start"), rapid.IntRange(0, n*size).Draw(t, "end")
		var p Plan
		if err := p.Set(start, end, local, remote, size); err != nil {
			t.Fatal(err)
		}
		var got []Read
		for _, r := range p.Runs {
			for i := range page.ID(r.N) {
				got = append(got, Read{Local: r.Dst + i, Remote: r.Src + i, T1: size})
			}
		}
		if len(got) != len(p.Pairs) {
			t.Fatalf("%d pages in runs, and %d pairs", len(got), len(p.Pairs))
		}
		for i, x := range p.Pairs {
			if got[i].Local != x.Dst || got[i].Remote != x.Src {
				t.Fatalf("pair %d is %v, and the runs are %v", i, x, p.Runs)
			}
		}
		for _, x := range p.Parts {
			if x.T1-x.T0 >= size || x.T1 <= x.T0 {
				t.Fatalf("%v is no part of a page", x)
			}
			got = append(got, Read{Local: x.Local, Remote: x.Remote, T0: x.T0, T1: x.T1})
		}
		want, err := AppendReads(nil, 1, start, end, local, remote, size)
		if err != nil {
			t.Fatal(err)
		}
		byLocal := func(a, b Read) int { return int(a.Local) - int(b.Local) }
		slices.SortFunc(got, byLocal)
		slices.SortFunc(want, byLocal)
		if !slices.Equal(got, want) {
			t.Fatalf("the plan reads %v, want %v", got, want)
		}
	})
}

func ids(n int) []page.ID {
	list := make([]page.ID, n)
	for i := range list {
		list[i] = page.ID(i)
	}
	return list
}

func TestPlan_RefusesAPageTwice(t *testing.T) {
	for _, test := range []struct {
		start, end int
		local      []page.ID
	}{
		{0, 32, []page.ID{1, 2, 3, 1}}, // whole and whole
		{1, 32, []page.ID{2, 1, 2, 3}}, // part and whole
		{1, 32, []page.ID{4, 3, 2, 4}}, // part and the end of a run
		{0, 31, []page.ID{1, 2, 3, 2}},
		{1, 31, []page.ID{1, 2, 3, 1}}, // part and part
	} {
		var p Plan
		if err := p.Set(test.start, test.end, test.local, ids(4), 8); fault.KindOf(err) != fault.Invalid || !p.Empty() {
			t.Errorf("[%d, %d) into %v: %v, error %v, want kind invalid", test.start, test.end, test.local, p, err)
		}
	}
}

// rig80 is a plan of 10^4 pages and a route over 80 layers.
func rig80(tb testing.TB, shuffle bool) (local, remote []page.ID, r *kv.Route) {
	tb.Helper()
	const n = 10_000
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 80, Pages: n + 1, PageSize: 16, KVHeads: 8, HeadDim: 128}
	// The memory is never touched: addresses are all that is planned.
	cache := func(g *kv.Geometry, err error) *kv.Cache {
		noError(tb, err)
		m := device.NewMemory(device.MemoryOptions{Device: "far", Base: 1 << 40, Size: g.Bytes()})
		return must(kv.Wrap(g, []*device.Memory{m}))(tb)
	}
	near := cache(c.LayerMajor())
	c.Pages += 7
	m := device.NewMemory(device.MemoryOptions{Device: "other", Base: 1 << 40, Size: must(c.PageMajor())(tb).Bytes()})
	far := must(kv.Wrap(must(c.PageMajor())(tb), []*device.Memory{m}))(tb)
	local, remote = ids(n), ids(n)
	if shuffle {
		order := rand.New(rand.NewPCG(1, 2))
		order.Shuffle(n, func(i, j int) { remote[i], remote[j] = remote[j], remote[i] })
		order.Shuffle(n, func(i, j int) { local[i], local[j] = local[j], local[i] })
	}
	return local, remote, must(kv.NewRoute(near, far))(tb)
}

func TestPlan_AllocatesNothing(t *testing.T) {
	local, remote, r := rig80(t, true)
	var p Plan
	var boxes []kv.Box
	plan := func() {
		noError(t, p.Set(3, 16*len(local)-3, local, remote, 16))
		boxes = must(p.AppendBoxes(boxes[:0], r))(t)
	}
	plan()
	var bytes int64
	for _, b := range boxes {
		bytes += b.Bytes()
	}
	if want := r.PageBytes() / 16 * int64(16*len(local)-6); bytes != want || p.Bytes(r) != want {
		t.Errorf("boxes of %d bytes, a plan of %d, want %d", bytes, p.Bytes(r), want)
	}
	if n := testing.AllocsPerRun(5, func() {
		_ = p.Set(3, 16*len(local)-3, local, remote, 16)
		boxes, _ = p.AppendBoxes(boxes[:0], r)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if _, err := p.AppendBoxes(nil, must(kv.NewRoute(r.Dst(), r.Src()))(t)); err != nil {
		t.Error(err)
	}
	p.Runs[len(p.Runs)-1].Src = 1 << 30
	if got, err := p.AppendBoxes(boxes[:1], r); fault.KindOf(err) != fault.Invalid || len(got) != 1 {
		t.Errorf("%d boxes, error %v, want kind invalid", len(got), err)
	}
}

// BenchmarkPlan plans 10^4 pages of 80 layers, to the boxes that a device copies.
func BenchmarkPlan(b *testing.B) {
	for _, order := range []string{"runs", "scattered"} {
		b.Run(order, func(b *testing.B) {
			local, remote, r := rig80(b, order == "scattered")
			var p Plan
			var boxes []kv.Box
			b.ReportAllocs()
			for b.Loop() {
				noError(b, p.Set(3, 16*len(local)-3, local, remote, 16))
				boxes = must(p.AppendBoxes(boxes[:0], r))(b)
			}
			b.ReportMetric(float64(len(boxes)), "boxes")
		})
	}
}

// BenchmarkPrepare does all that StartRetrieve does before it returns.
func BenchmarkPrepare(b *testing.B) {
	for _, order := range []string{"runs", "scattered"} {
		b.Run(order, func(b *testing.B) {
			local, remote, route := rig80(b, order == "scattered")
			e := &fakeEngine{name: "fake"}
			host := must(device.OpenHost(device.HostOptions{}))(b)
			b.Cleanup(func() { noError(b, host.Close()) })
			r := must(NewReader(Options{Cache: route.Dst(), Device: host, Engines: []Engine{e}}))(b)
			b.Cleanup(func() { noError(b, r.Close()) })
			d := &Descriptor{Leases: true, Geometry: route.Src().Geometry(), Pages: ids(len(remote)), Offers: []Offer{{Engine: "fake"}}}
			var j job
			b.ReportAllocs()
			for b.Loop() {
				noError(b, r.prepare(&j, 3, 16*len(local)-3, local, remote, d))
			}
		})
	}
}
