package copiertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func everyPlan(t *testing.T, h Harness) {
	for _, at := range h.places() {
		for _, x := range routes() {
			t.Run(at.name+"/"+strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
				r := openAt(t, h, at, x.dst, x.src)
				ways := map[string]pageCopy{"": h.Copier.Copy}
				if do, ok := h.sealed(); ok {
					ways["sealed: "] = do
				}
				for way, do := range ways {
					for name, pairs := range plans(r.pages()) {
						want, untouched := r.expect(pairs), r.read(r.src)
						if _, err := r.copyBy(do, pairs); err != nil {
							t.Fatalf("%s%s: %v", way, name, err)
						}
						r.compare(way+name+": destination", r.dst, want)
						r.compare(way+name+": source", r.src, untouched)
						r.clear()
					}
				}
			})
		}
	}
}

// clear gives the destination its first bytes back, so that each plan starts anew.
func (r *rig) clear() {
	r.t.Helper()
	for i := range r.dst.Geometry().Regions() {
		m, _ := r.dst.Region(i)
		r.write(m, pattern("destination", i, m.Size()))
	}
}

func randomPlans(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 50 {
		var pairs []page.Pair
		for _, d := range rng.Perm(r.dst.Pages())[:rng.IntN(r.dst.Pages())] {
			pairs = append(pairs, page.Pair{Dst: page.ID(d), Src: page.ID(rng.IntN(r.src.Pages()))})
		}
		want := r.expect(pairs)
		if _, err := r.copyAndWait(pairs); err != nil {
			t.Fatal(err)
		}
		r.compare(fmt.Sprintf("list %d: %v", i, pairs), r.dst, want)
	}
}

// manyPages copies as many pages as no batch and no queue takes at once.
func manyPages(t *testing.T, h Harness) {
	const n = 10_000
	c := with(func(c *kv.Config) { c.Layers, c.Pages, c.PageSize, c.KVHeads, c.HeadDim = 2, n, 1, 1, 8 })
	r := open(t, h, packed(c, n+3), c.LayerMajor)
	rng := rand.New(rand.NewPCG(5, 6))
	pairs := make([]page.Pair, n)
	for i, d := range rng.Perm(n + 3)[:n] {
		pairs[i] = page.Pair{Dst: page.ID(d), Src: page.ID(i)}
	}
	want := r.expect(pairs)
	moved, err := r.copyAndWait(pairs)
	if err != nil {
		t.Fatal(err)
	}
	if moved.Pages != n || moved.Bytes != n*r.route.PageBytes() {
		t.Errorf("moved %+v, want %d pages of %d bytes", moved, n, r.route.PageBytes())
	}
	r.compare("destination", r.dst, want)
}

func reportsMoved(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	pairs := []page.Pair{{Dst: 5, Src: 2}, {Dst: 4, Src: 1}, {Dst: 9, Src: 11}}
	moved, err := r.copyAndWait(pairs)
	if err != nil {
		t.Fatal(err)
	}
	if moved.Pages != 3 || moved.Runs != 2 || moved.Bytes != 3*r.route.PageBytes() || moved.Rows < 2 {
		t.Errorf("moved %+v, want 3 pages in 2 runs, %d bytes", moved, 3*r.route.PageBytes())
	}
}

func refusesWhole(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	same := openAt(t, h, place{}, small.LayerMajor, small.LayerMajor)
	same.dst = same.src
	twice := openAt(t, h, place{}, small.LayerMajor, small.LayerMajor)
	var err error
	if same.route, err = kv.NewRoute(same.src, same.src); err != nil {
		t.Fatal(err)
	}
	mem, _ := twice.src.Region(0)
	if twice.dst, err = kv.Wrap(twice.src.Geometry(), []*device.Memory{mem}); err != nil {
		t.Fatal(err)
	}
	if twice.route, err = kv.NewRoute(twice.dst, twice.src); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name  string
		r     *rig
		pairs []page.Pair
		names string // what the error must name
	}{
		{"destination twice", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 2, Src: 2}, {Dst: 1, Src: 3}}, "1"},
		{"destination beyond the pool", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 20, Src: 2}}, "20"},
		{"source beyond the cache", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: 2, Src: 12}}, "12"},
		{"negative page", r, []page.Pair{{Dst: 1, Src: 1}, {Dst: -1, Src: 2}}, "-1"},
		{"run over the end", r, []page.Pair{{Dst: 1, Src: 10}, {Dst: 2, Src: 11}, {Dst: 3, Src: 12}}, "12"},
		{"destination is a source of one cache", same, []page.Pair{{Dst: 1, Src: 2}, {Dst: 2, Src: 3}}, "2"},
		{"destination is a source of one memory", twice, []page.Pair{{Dst: 1, Src: 2}, {Dst: 2, Src: 3}}, "2"},
		{"page onto itself", same, []page.Pair{{Dst: 4, Src: 4}}, "4"},
	} {
		t.Run(strings.ReplaceAll(x.name, " ", "_"), func(t *testing.T) {
			before := x.r.read(x.r.dst)
			_, err := x.r.copyAndWait(x.pairs)
			if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), x.names) {
				t.Errorf("error %v, want kind invalid, naming %s", err, x.names)
			}
			x.r.sync(x.r.s)
			x.r.compare("destination", x.r.dst, before)
		})
	}
}

// refusesCrossing has caches that share bytes, and no pages.
func refusesCrossing(t *testing.T, h Harness) {
	r := &rig{t: t, h: h}
	g, err := small.LayerMajor()
	if err != nil {
		t.Fatal(err)
	}
	large, err := with(func(c *kv.Config) { c.Pages = 2 * small.Pages }).LayerMajor()
	if err != nil {
		t.Fatal(err)
	}
	mem := r.memory(false, large.Bytes())
	var caches [2]*kv.Cache
	for i, g := range [...]*kv.Geometry{g, large} {
		if caches[i], err = kv.Wrap(g, []*device.Memory{mem}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := kv.NewRoute(caches[0], caches[1]); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "share bytes") {
		t.Errorf("error %v, want kind invalid, of caches that share bytes", err)
	}
}

func refusesForeign(t *testing.T, h Harness) {
	if h.Foreign == nil {
		t.Skip("this harness has no stream of another device")
	}
	r := open(t, h, packed(small, 20), small.LayerMajor)
	before := r.read(r.dst)
	if _, err := h.Copier.Copy(h.Foreign, r.route, []page.Pair{{Dst: 1, Src: 1}}); !is(err, fault.Invalid, fault.Unsupported) {
		t.Errorf("pages: error %v, want kind invalid or unsupported", err)
	}
	dst, _ := r.dst.Region(0)
	src, _ := r.src.Region(0)
	rows := func(m *device.Memory) copier.Rows { return copier.Rows{Mem: m, Width: 8, Pitch: 16, N: 3} }
	if _, err := h.Copier.CopyRows(h.Foreign, rows(dst), rows(src)); !is(err, fault.Invalid, fault.Unsupported) {
		t.Errorf("rows: error %v, want kind invalid or unsupported", err)
	}
	r.sync(h.Foreign, r.s)
	r.compare("destination", r.dst, before)
}

func onlyEnqueues(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	pairs := plans(r.pages())["descending in both"]
	want := r.expect(pairs)
	release := r.hold()
	ticket := device.NewTicket()
	_, err := h.Copier.Copy(r.s, r.route, pairs) // returns although nothing can run
	if err = errors.Join(err, r.s.Signal(ticket)); err != nil {
		t.Fatal(err)
	}
	if done, _ := ticket.Poll(); done {
		t.Error("the ticket was done while the stream was held")
	}
	release()
	if err := ticket.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.compare("destination", r.dst, want)
}

// negativeControl breaks the rule that a destination is read only after its
// ticket, and must see the wrong bytes: otherwise the suite could not tell.
func negativeControl(t *testing.T, h Harness) {
	r := openAt(t, h, place{}, packed(small, 20), small.LayerMajor)
	pairs := plans(r.pages())["whole pool one run"]
	want := r.expect(pairs)
	release := r.hold()
	defer func() {
		release()
		r.sync(r.s)
	}()
	if _, err := h.Copier.Copy(r.s, r.route, pairs); err != nil {
		t.Fatal(err)
	}
	for i, got := range r.read(r.dst) {
		if bytes.Equal(got, want[i]) {
			t.Errorf("region %d holds the copied bytes although the stream is held", i)
		}
	}
}

// ordered copies behind an event of another stream, and in front of it again, while that
// one is held back: the copy must not run before, nor what follows it.
func ordered(t *testing.T, h Harness) {
	r := openAt(t, h, place{}, packed(small, 20), small.LayerMajor)
	pairs := plans(r.pages())["ascending in source only"]
	engine, s := r.s, r.stream("behind") // hold holds r.s
	release := r.hold()
	mem, _ := r.src.Region(0)
	fresh := r.memory(false, mem.Size())
	r.write(fresh, pattern("written late", 0, mem.Size()))
	written, copied := r.event(), r.event()
	err := errors.Join(engine.Copy([]device.Op{{Dst: mem, Src: fresh, Bytes: mem.Size()}}), engine.Record(written), s.Wait(written))
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Copier.Copy(s, r.route, append([]page.Pair(nil), pairs...))
	if err = errors.Join(err, s.Record(copied), engine.Wait(copied)); err != nil {
		t.Fatal(err)
	}
	dst, _ := r.dst.Region(0)
	kept := r.memory(false, dst.Size())
	if err := engine.Copy([]device.Op{{Dst: kept, Src: dst, Bytes: dst.Size()}}); err != nil {
		t.Fatal(err)
	}
	if copied.Done() {
		t.Error("the copy has run before what it waits for")
	}
	release()
	r.sync(engine, s)
	want := r.expect(pairs)
	r.compare("destination", r.dst, want)
	if !bytes.Equal(r.bytes(kept), want[0]) {
		t.Error("work behind the copy has not seen it")
	}
}

func nothingToDo(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	none := with(func(c *kv.Config) { c.Layers = 0 })
	empty := open(t, h, none.LayerMajor, none.PageMajor)
	release := r.hold()
	defer release()
	before := r.read(r.dst)
	for name, f := range map[string]func() (copier.Moved, error){
		"no pairs":       func() (copier.Moved, error) { return h.Copier.Copy(r.s, r.route, nil) },
		"pages no bytes": func() (copier.Moved, error) { return h.Copier.Copy(r.s, empty.route, []page.Pair{{Dst: 1, Src: 2}}) },
		"no rows":        func() (copier.Moved, error) { return h.Copier.CopyRows(r.s, copier.Rows{}, copier.Rows{}) },
	} {
		if moved, err := f(); err != nil || moved.Bytes != 0 || moved.Rows != 0 {
			t.Errorf("%s: moved %+v, error %v", name, moved, err)
		}
	}
	r.compare("destination", r.dst, before)
}

// manyGoroutines copies disjoint pages from many goroutines over two streams.
func manyGoroutines(t *testing.T, h Harness) {
	c := with(func(c *kv.Config) { c.Pages = 64 })
	r := open(t, h, packed(c, 64), c.LayerMajor)
	var all []page.Pair
	for i := range 64 {
		all = append(all, page.Pair{Dst: page.ID(63 - i), Src: page.ID(i)})
	}
	want := r.expect(all)
	second := r.stream("second")
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			s := [...]device.Stream{r.s, second}[i%2]
			if _, err := h.Copier.Copy(s, r.route, append([]page.Pair(nil), all[4*i:4*i+4]...)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.sync(r.s, second)
	r.compare("destination", r.dst, want)
}
