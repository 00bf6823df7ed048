package page

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/internal/invariants"
)

func newArena(t tb, o ArenaOptions) *Arena {
	t.Helper()
	return must[*Arena](t)(NewArena(o))
}

// TestArena_Transcript runs the calls of testdata/arena and compares what they
// answer and the state of all pages after each: '.' is free, 'S' the sink, a
// number of owners, '*' a seal. Negative numbers of pages are written as such.
func TestArena_Transcript(t *testing.T) {
	datadriven.Walk(t, "testdata/arena", func(t *testing.T, path string) {
		var a *Arena
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			answer := runArena(t, &a, d)
			if a == nil {
				return answer + "\n"
			}
			noError(t, a.Check(nil))
			return fmt.Sprintf("%s\n%s\n", answer, arenaState(a))
		})
	})
}

func runArena(t *testing.T, arena **Arena, d *datadriven.TestData) string {
	outcome := func(err error) string {
		switch {
		case err == nil:
			return "ok"
		case fault.RemedyOf(err) != "":
			return fmt.Sprintf("%v: %v; %s", fault.KindOf(err), err, fault.RemedyOf(err))
		}
		return fmt.Sprintf("%v: %v", fault.KindOf(err), err)
	}
	var list []ID
	for f := range strings.FieldsSeq(d.Input) {
		var id ID
		if _, err := fmt.Sscan(f, &id); err != nil {
			d.Fatalf(t, "%v", err)
		}
		list = append(list, id)
	}
	n := 0
	d.MaybeScanArgs(t, "n", &n)
	a := *arena
	switch d.Cmd {
	case "new":
		o := ArenaOptions{Sink: d.HasArg("sink")}
		d.ScanArgs(t, "pages", &o.Pages)
		d.MaybeScanArgs(t, "capacity", &o.Capacity)
		if d.HasArg("fifo") {
			o.Order = FIFO
		}
		var err error
		*arena, err = NewArena(o)
		return outcome(err)
	case "acquire":
		got, err := a.Acquire(nil, n)
		if err != nil {
			return outcome(err)
		}
		return fmt.Sprint("got ", got)
	case "try":
		got, ok := a.TryAcquire(nil, n)
		return fmt.Sprint("got ", got, ", ", ok)
	case "seal":
		return outcome(a.Seal(list))
	case "retain":
		return outcome(a.Retain(list))
	case "release":
		freed, err := a.Release(list)
		return fmt.Sprintf("%s, %d freed", outcome(err), freed)
	case "grow":
		return outcome(a.Grow(n))
	case "any-sealed":
		return fmt.Sprint(a.AnySealed(list))
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return ""
}

func arenaState(a *Arena) string {
	var b strings.Builder
	for id := range ID(a.Pages()) {
		switch {
		case id < a.usable:
			b.WriteString("S")
		case a.Owners(id) == 0:
			b.WriteString(".")
		default:
			fmt.Fprintf(&b, "%d", a.Owners(id))
		}
		if a.Sealed(id) {
			b.WriteString("*")
		}
		b.WriteString(" ")
	}
	return fmt.Sprintf("%s| %d of %d free, largest run %d", b.String(), a.NumFree(), a.Usable(), a.LargestRun())
}

func TestNewArena_RefusesImpossibleOptions(t *testing.T) {
	_, err := NewArena(ArenaOptions{Pages: 0, Capacity: 4, Sink: true})
	faulttest.Refused(t, err, fault.Invalid, "sink")
	_, err = NewArena(ArenaOptions{Pages: 4, Capacity: 2})
	faulttest.Refused(t, err, fault.Invalid, "capacity")
}

func TestArena_AcquiredPagesHaveOneOwner(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 4})
	got := must[[]ID](t)(a.Acquire([]ID{None}, 3))
	wantIDs(t, got, []ID{None, 0, 1, 2})
	for _, id := range got[1:] {
		if a.Owners(id) != 1 || a.Sealed(id) {
			t.Errorf("page %d: %d owners, sealed %t", id, a.Owners(id), a.Sealed(id))
		}
	}
	got, err := a.Acquire(got[:1], 2)
	faulttest.Refused(t, err, fault.Full, "free 1")
	wantIDs(t, got, []ID{None})
}

func TestArena_APageWithAnOwnerLeftStaysOffTheFreeList(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 1})
	p := must[[]ID](t)(a.Acquire(nil, 1))
	noError(t, a.Seal(p))
	noError(t, a.Retain(p))
	if freed := must[int](t)(a.Release(p)); freed != 0 {
		t.Fatalf("%d freed, want 0", freed)
	}
	if _, ok := a.TryAcquire(nil, 1); ok {
		t.Fatal("a page with an owner was handed out")
	}
	if freed := must[int](t)(a.Release(p)); freed != 1 || a.Sealed(p[0]) {
		t.Fatalf("%d freed, sealed %t", freed, a.Sealed(p[0]))
	}
	if _, ok := a.TryAcquire(nil, 1); !ok {
		t.Fatal("a page without owners was not handed out")
	}
}

func TestArena_RefusedCallsChangeNothing(t *testing.T) {
	for _, order := range []Order{Runs, FIFO} {
		// Page 0 is the sink; 1 private, 2 sealed, 3 has two owners, 4 is free.
		a := newArena(t, ArenaOptions{Pages: 5, Capacity: 8, Order: order, Sink: true})
		must[[]ID](t)(a.Acquire(nil, 3))
		noError(t, a.Seal([]ID{2, 3}))
		noError(t, a.Retain([]ID{3}))
		before := arenaState(a)
		for _, c := range []struct {
			name  string
			call  func(ids []ID) error
			ids   []ID
			words []string
		}{
			{"retain private", a.Retain, []ID{2, 3, 1}, []string{"page 1", "not sealed"}},
			{"retain free", a.Retain, []ID{2, 4}, []string{"page 4", "no owner"}},
			{"retain sink", a.Retain, []ID{2, 0}, []string{"page 0", "sink"}},
			{"retain out of range", a.Retain, []ID{2, 5}, []string{"page 5", "5 pages"}},
			{"retain none", a.Retain, []ID{2, None}, []string{"page -1"}},
			{"seal free", a.Seal, []ID{1, 4}, []string{"page 4", "no owner"}},
			{"seal sink", a.Seal, []ID{1, 0}, []string{"page 0", "sink"}},
			{"seal out of range", a.Seal, []ID{1, math.MinInt32}, []string{"page -2147483648"}},
			{"release free", release(a), []ID{1, 4}, []string{"page 4", "no owner"}},
			{"release sink", release(a), []ID{1, 0}, []string{"page 0", "sink"}},
			{"release out of range", release(a), []ID{1, math.MaxInt32}, []string{"page 2147483647"}},
			{"release once too often", release(a), []ID{1, 3, 3, 3}, []string{"page 3", "no owner"}},
			{"release private twice", release(a), []ID{2, 1, 1}, []string{"page 1", "no owner"}},
		} {
			t.Run(order.String()+"/"+c.name, func(t *testing.T) {
				faulttest.Refused(t, c.call(c.ids), fault.Invalid, c.words...)
				if after := arenaState(a); after != before {
					t.Fatalf("was %s\nis  %s", before, after)
				}
				noError(t, a.Check(nil))
			})
		}
	}
}

func release(a *Arena) func([]ID) error {
	return func(ids []ID) error {
		_, err := a.Release(ids)
		return err
	}
}

func TestArena_QuestionsAboutPagesThatAreNotThere(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 2, Capacity: 4})
	for _, id := range []ID{None, 2, 3, 4, math.MaxInt32, math.MinInt32} {
		if a.Owners(id) != 0 || a.Sealed(id) || a.AnySealed([]ID{id}) {
			t.Errorf("page %d has an owner or a seal", id)
		}
	}
}

func TestArena_CheckNamesTheFirstPageThatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(a *Arena)
		words []string
	}{
		{"several owners, no seal", func(a *Arena) { a.owners[2] = 2; a.owners[3] = 2 }, []string{"page 2", "no seal"}},
		{"owned and free", func(a *Arena) { a.owners[6] = 1 }, []string{"page 6", "free and owned"}},
		{"neither", func(a *Arena) { a.owners[4] = 0 }, []string{"page 4", "lost"}},
		{"fewer than none", func(a *Arena) { a.owners[4] = -1 }, []string{"page 4", "fewer"}},
		{"seal without owner", func(a *Arena) { a.sealed[7] = true }, []string{"page 7", "sealed"}},
		{"sink shared", func(a *Arena) { a.sealed[0] = true }, []string{"page 0", "sink"}},
		{"not there yet", func(a *Arena) { a.owners[9] = 1 }, []string{"page 9", "not in the pool"}},
		{"free list", func(a *Arena) { a.free.runs.tags[6].size++ }, []string{"free list", "page 6"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newArena(t, ArenaOptions{Pages: 9, Capacity: 10, Sink: true})
			must[[]ID](t)(a.Acquire(nil, 5))
			noError(t, a.Check(nil))
			c.spoil(a)
			faulttest.Refused(t, a.Check(nil), fault.Invalid, c.words...)
		})
	}
}

func TestArena_CheckComparesWithTheOwnersThereShouldBe(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 6, Sink: true})
	must[[]ID](t)(a.Acquire(nil, 3))
	noError(t, a.Seal([]ID{2}))
	noError(t, a.Retain([]ID{2}))
	want := []int{-1, 1, 2, 1, 0, 0} // the sink is not asked for
	noError(t, a.Check(func(id ID) int { return want[id] }))
	want[2] = 1
	faulttest.Refused(t, a.Check(func(id ID) int { return want[id] }), fault.Invalid, "page 2", "has 2 owners", "should have 1")
}

// arenaCalls are all calls that change an arena, on pages 1 (private) and 2
// (sealed).
func arenaCalls() map[string]func(a *Arena) {
	return map[string]func(a *Arena){
		"acquire":     func(a *Arena) { _, _ = a.Acquire(nil, 1) },
		"acquire all": func(a *Arena) { _, _ = a.Acquire(nil, 1000) },
		"try acquire": func(a *Arena) { a.TryAcquire(nil, 1) },
		"seal":        func(a *Arena) { _ = a.Seal([]ID{1}) },
		"retain":      func(a *Arena) { _ = a.Retain([]ID{2}) },
		"release":     func(a *Arena) { _, _ = a.Release([]ID{1}) },
		"grow":        func(a *Arena) { _ = a.Grow(1) },
	}
}

func panics(f func()) (what any) {
	defer func() { what = recover() }()
	f()
	return nil
}

func TestArena_AuditCatchesACorruptedCountInTheVeryCall(t *testing.T) {
	for name, call := range arenaCalls() {
		t.Run(name, func(t *testing.T) {
			spoiled := func(audits bool) *Arena {
				a := newArena(t, ArenaOptions{Pages: 8, Capacity: 9})
				must[[]ID](t)(a.Acquire(nil, 4))
				noError(t, a.Seal([]ID{2}))
				a.audits = audits
				return a
			}
			a := spoiled(true)
			if what := panics(func() { call(a) }); what != nil {
				t.Fatalf("the books were right: %v", what)
			}
			a = spoiled(true)
			a.owners[3]++
			if what := fmt.Sprint(panics(func() { call(a) })); !strings.Contains(what, "page 3") {
				t.Fatalf("got %s", what)
			}
			a.NumFree() // the lock is not held
		})
	}
}

func TestArena_AuditsAreOnInDebugBuildsOnly(t *testing.T) {
	if a := newArena(t, ArenaOptions{Pages: 1}); a.audits != invariants.Enabled {
		t.Errorf("audits %t, invariants %t", a.audits, invariants.Enabled)
	}
}

func TestArena_LargeArenasAreAuditedNowAndThen(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: auditAll + 1})
	a.audits = true
	a.ops = 0
	a.sealed[17] = true
	for call := 1; call < auditEvery; call++ {
		if what := panics(func() { noError(t, a.Grow(0)) }); what != nil {
			t.Fatalf("call %d: %v", call, what)
		}
	}
	if what := fmt.Sprint(panics(func() { _ = a.Grow(0) })); !strings.Contains(what, "page 17") {
		t.Fatalf("call %d: got %s", auditEvery, what)
	}
}

// A seeded life of holders that take, seal, share and drop pages of a pool that
// is too small for them, with the owners of every page recounted after each step.
func TestArena_LifeOfManyHoldersConservesPages(t *testing.T) {
	for seed := range uint64(4) {
		for _, order := range []Order{Runs, FIFO} {
			t.Run(fmt.Sprintf("seed %d, %v", seed, order), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 5))
				a := newArena(t, ArenaOptions{Pages: 20, Capacity: 40, Order: order, Sink: true})
				var holders [][]ID // what each owns; a page in several is sealed
				for step := range 400 {
					switch op := rng.IntN(10); {
					case op < 4:
						got, err := a.Acquire(nil, 1+rng.IntN(6))
						if errors.Is(err, fault.Full) {
							break
						}
						noError(t, err)
						holders = append(holders, got)
					case op < 6 && len(holders) > 0:
						h := holders[rng.IntN(len(holders))]
						noError(t, a.Seal(h))
						noError(t, a.Retain(h))
						holders = append(holders, slices.Clone(h))
					case op < 9 && len(holders) > 0:
						i := rng.IntN(len(holders))
						h := holders[i]
						holders = slices.Delete(holders, i, i+1)
						before := a.NumFree()
						if freed := must[int](t)(a.Release(h)); a.NumFree() != before+freed {
							t.Fatalf("step %d: %d free, then %d freed, now %d free", step, before, freed, a.NumFree())
						}
					case op == 9 && a.Pages() < 40 && rng.IntN(10) == 0:
						noError(t, a.Grow(1))
					}
					owners := map[ID]int{}
					for _, h := range holders {
						for _, id := range h {
							owners[id]++
						}
					}
					if err := a.Check(func(id ID) int { return owners[id] }); err != nil {
						t.Fatalf("step %d: %v", step, err)
					}
				}
				for _, h := range holders {
					must[int](t)(a.Release(h))
				}
				if a.NumFree() != a.Usable() || a.LargestRun() != a.Usable() {
					t.Errorf("%d of %d free, largest run %d", a.NumFree(), a.Usable(), a.LargestRun())
				}
			})
		}
	}
}

func TestArena_DoesNotAllocate(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 1 << 12})
	a.audits = false
	buf := make([]ID, 0, 64)
	if n := testing.AllocsPerRun(100, func() {
		buf, _ = a.Acquire(buf[:0], 64)
		_ = a.Seal(buf)
		_ = a.Retain(buf)
		_, _ = a.Release(buf)
		_, _ = a.Release(buf)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkArena(b *testing.B) {
	for _, n := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("acquire and release/n=%d", n), func(b *testing.B) {
			a := newArena(b, ArenaOptions{Pages: 1 << 16})
			buf := make([]ID, 0, n)
			b.ReportAllocs()
			for b.Loop() {
				buf, _ = a.Acquire(buf[:0], n)
				_, _ = a.Release(buf)
			}
		})
	}
}
