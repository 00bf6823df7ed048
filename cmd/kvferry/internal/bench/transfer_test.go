package bench

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func TestTransferShapes_CutThePoolsIntoReads(t *testing.T) {
	for _, mib := range []int{1, 2, 64, 100, 128, 256} {
		b := &transferBench{o: Options{MiB: mib, Seed: 3}}
		for _, s := range b.shapes() {
			local, remote := s.orders()
			if len(local) != s.Reads || len(remote) != s.Reads || s.Pages*int(s.PageBytes) > mib<<20 {
				t.Errorf("%d MiB: %+v in %d reads", mib, s, len(local))
			}
			for side, lists := range [][][]page.ID{local, remote} {
				all := slices.Concat(lists...)
				seen := map[page.ID]bool{}
				adjacent := 0
				for i, id := range all {
					seen[id] = true
					if i > 0 && id == all[i-1]+1 {
						adjacent++
					}
				}
				if len(all) != s.Pages || len(seen) != s.Pages || int(slices.Max(all)) >= s.Pages {
					t.Errorf("%d MiB: %+v, side %d: %d pages, %d of them different", mib, s, side, len(all), len(seen))
				}
				if least := s.Pages / s.Run * (s.Run - 1); adjacent < least {
					t.Errorf("%d MiB: %+v, side %d: %d pages follow each other, want %d", mib, s, side, adjacent, least)
				}
			}
			for i := range local {
				if len(local[i]) != len(remote[i]) || len(local[i]) == 0 {
					t.Errorf("%d MiB: %+v: read %d has %d and %d pages", mib, s, i, len(local[i]), len(remote[i]))
				}
			}
			if g, err := s.geometry(); err != nil || g.PageBytes() != s.PageBytes {
				t.Errorf("%+v: %v", s, err)
			}
		}
	}
}

// times are those of reads of 128 bytes, in seconds that make their rates easy to see.
func times(pageBytes int64) *transferTimes {
	two := func(a, b float64) [2][]float64 { return [2][]float64{{a, a, a}, {b, b, b}} }
	return &transferTimes{
		shape: transferShape{PageBytes: pageBytes, Run: 1}, bytes: 128, pieceBytes: 256,
		r: []float64{4, 4, 4}, summed: []float64{8, 8, 8}, c: []float64{2, 2, 2}, raw: []float64{10, 10, 10},
		ours: map[string][2][]float64{
			engines.HostIPC: two(4, 10), engines.TCP: two(11, 20), tlsVariant: two(22, 40),
			childVariant: two(22, 22), inProcessVariant: two(20, 20),
		},
	}
}

func TestTransferLines_HoldEachEngineAgainstWhatItHasToReach(t *testing.T) {
	m := times(64 << 10)
	share := func(l Line, of string) float64 {
		for _, x := range l.Beside {
			if x.Of == of {
				return x.Ratio.Median
			}
		}
		return -1
	}
	near := func(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 }
	for _, tc := range []struct {
		name   string
		sums   int
		shares map[string]float64
		goals  map[string]bool // met or not
	}{
		{engines.HostIPC, 0, map[string]float64{"C": 0.25, "R": 1}, map[string]bool{"R": true}},
		{engines.HostIPC, 1, map[string]float64{"C": 0.1, "R": 0.8}, map[string]bool{"R": false}},
		{engines.TCP, 0, map[string]float64{"raw": 10. / 11, "mooncake": 2}, map[string]bool{"raw": true, "mooncake": true}},
		{engines.TCP, 1, map[string]float64{"raw": 0.5, "mooncake": 1.1}, nil},
		{tlsVariant, 0, map[string]float64{"plain": 0.5}, nil},
		{childVariant, 0, map[string]float64{"in process": 20. / 22}, map[string]bool{"in process": false}},
		{inProcessVariant, 0, map[string]float64{"R": 0.2}, nil},
	} {
		l := m.lines(tc.name)[tc.sums]
		for of, want := range tc.shares {
			if got := share(l, of); !near(got, want) {
				t.Errorf("%s, sums %d: %v of %s, want %v", tc.name, tc.sums, got, of, want)
			}
		}
		if len(l.Goals) != len(tc.goals) {
			t.Errorf("%s, sums %d: goals %+v", tc.name, tc.sums, l.Goals)
		}
		for _, g := range l.Goals {
			if met, ok := tc.goals[g.Of]; !ok || met != *g.Met {
				t.Errorf("%s, sums %d: goal %+v", tc.name, tc.sums, g)
			}
		}
	}
	// Small pages have no share of R to reach.
	if l := times(4 << 10).lines(engines.HostIPC)[0]; len(l.Goals) != 0 {
		t.Errorf("goals %+v", l.Goals)
	}
	// Without a library nothing is said of it.
	delete(m.ours, childVariant)
	if l := m.lines(engines.TCP)[0]; share(l, "mooncake") >= 0 || len(l.Goals) != 1 {
		t.Errorf("%+v", l)
	}
}

// ownerVariable tells this test's own binary that it is the owner.
const ownerVariable = "BENCH_TEST_OWNER"

func TestTransfer_ComparesWhatArrives(t *testing.T) {
	t.Setenv(ownerVariable, "1")
	o := DefaultOptions()
	o.Runs, o.MiB, o.Owner = 1, 1, []string{os.Args[0]}
	o.Engines.Names = []string{engines.TCP}
	r, err := Transfer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var titles []string
	for _, s := range r.Sections {
		titles = append(titles, s.Title)
		for _, l := range s.Lines {
			if l.Value.Median < 0 || l.Value.Low > l.Value.High {
				t.Errorf("%s: %s: %+v", s.Title, l.Name, l.Value)
			}
		}
	}
	if len(titles) != 5 || len(r.Warnings) != 0 {
		t.Errorf("sections %q, warnings %q", titles, r.Warnings)
	}

	o.Owner = []string{"/nonexistent/owner"}
	if _, err := Transfer(t.Context(), o); !errors.Is(err, fault.Unsupported) {
		t.Errorf("an owner that can't be started: %v", err)
	}
	o.Owner = []string{os.Args[0], "-test.run=^$", "-test.v"}
	t.Setenv(ownerVariable, "")
	if _, err := Transfer(t.Context(), o); !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "owner of the pages") {
		t.Errorf("an owner that is none: %v", err)
	}
}

func TestTransferCompare_SeesAWrongByte(t *testing.T) {
	t.Setenv(ownerVariable, "1")
	o := DefaultOptions()
	o.Runs, o.MiB, o.Owner = 1, 1, []string{os.Args[0]}
	owner, err := startOwner(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	b := &transferBench{o: o, r: newReport("transfer", o), owner: owner}
	x, err := b.open(t.Context(), b.shapes()[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(x.close(), owner.close()); err != nil {
			t.Error(err)
		}
	}()
	if err := x.parts[0].read(context.Background(), x, 0, x.parts[0].summed); err != nil {
		t.Fatal(err)
	}
	if err := x.compare(0); err != nil {
		t.Errorf("what was read: %v", err)
	}
	p, err := x.cache.Page(x.local[0][3])
	if err != nil {
		t.Fatal(err)
	}
	p[len(p)-1] ^= 1
	if err := x.compare(0); !errors.Is(err, fault.Corrupt) {
		t.Errorf("a wrong byte: %v", err)
	}
}

func TestTransfer_BadUse(t *testing.T) {
	for _, tc := range []struct {
		set  func(*Options)
		want string
	}{
		{func(o *Options) { o.Clock = CPU }, "--clock"},
		{func(o *Options) { o.Engines.Names = []string{"pigeon"} }, "--engine"},
		{func(o *Options) { o.Engines.Names = []string{engines.Mooncake} }, "--engine mooncake"},
	} {
		o := DefaultOptions()
		o.Runs, o.MiB, o.Owner = 1, 1, []string{os.Args[0], "-test.run=^$"}
		tc.set(&o)
		if _, err := Transfer(t.Context(), o); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.want, err)
		}
	}
}

func TestBetter_IsOneLoopAndNotTheLuckOfTwo(t *testing.T) {
	a, b := []float64{1, 9, 5}, []float64{4, 4, 4}
	if got := better(a, b); !slices.Equal(got, b) {
		t.Errorf("got %v", got)
	}
	if got := better(b, a); !slices.Equal(got, b) {
		t.Errorf("got %v", got)
	}
}

func TestVerdict_IsSeenInWhatIsShown(t *testing.T) {
	for _, tc := range []struct {
		g    Goal
		want string
	}{
		{Goal{Of: "raw", Least: new(0.9), Got: 0.8983, Met: new(false)}, " ✗ (0.898)"},
		{Goal{Of: "raw", Least: new(0.9), Got: 0.89999, Met: new(false)}, " ✗ (0.89999)"},
		{Goal{Of: "raw", Least: new(0.9), Got: 0.9, Met: new(true)}, " ✓"},
		{Goal{Of: "raw", Least: new(0.9), Got: 0.85, Met: new(false)}, " ✗"},
		{Goal{Of: "x", Least: new(0.95), Got: 0.952, Met: new(true)}, " ✓"},
		{Goal{Of: "x", Most: new(1.3), Got: 1.304, Met: new(false)}, " ✗ (1.304)"},
		{Goal{Of: "x", Least: new(0.895), Got: 0.8951, Met: new(true)}, " ✓"},
		{Goal{Of: "x", Least: new(0.898), Got: 0.8985, Met: new(true)}, " ✓"},
		{Goal{Of: "x", Most: new(1.297), Got: 1.2966, Met: new(true)}, " ✓ (1.297)"},
		{Goal{Most: new(1.), Got: 1.001, Met: new(false)}, " ✗ (1.001)"},
		{Goal{Most: new(250.), Got: 12345, Met: new(false)}, " ✗"},
		{Goal{Most: new(12345.), Got: 12345, Met: new(true)}, " ✓"},
		{Goal{Of: "raw", Least: new(0.9), Got: 0.8}, ""},
	} {
		if got := tc.g.verdict(); got != tc.want {
			t.Errorf("%+v: %q, want %q", tc.g, got, tc.want)
		}
	}
}

func TestGoals_AreJudgedByEnoughRunsAndPools(t *testing.T) {
	for _, tc := range []struct {
		runs, mib int
		want      string // why not
	}{
		{defaultRuns, TransferMiB, ""},
		{defaultRuns + 1, 2 * TransferMiB, ""},
		{defaultRuns - 1, TransferMiB, "that takes 9 runs, and these are 8"},
		{defaultRuns, TransferMiB - 1, "that takes pools of 128 MiB, and these have 127"},
	} {
		r := newReport("transfer", Options{Runs: tc.runs})
		r.Sections = append(r.Sections, Section{Lines: times(64 << 10).lines(engines.TCP)})
		r.leaveUnjudged(Options{Runs: tc.runs, MiB: tc.mib})
		var b strings.Builder
		if err := r.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		marks := strings.ContainsAny(b.String(), "✓✗")
		if r.Unjudged != tc.want || marks != (tc.want == "") || strings.Contains(b.String(), "Goals are not judged: "+tc.want+".") != (tc.want != "") {
			t.Errorf("%d runs, %d MiB: %q\n%s", tc.runs, tc.mib, r.Unjudged, &b)
		}
	}
}
