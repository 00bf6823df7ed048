package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// TestOrderCopies_Plans runs transcripts of the order of copies.
func TestOrderCopies_Plans(t *testing.T) {
	name := func(id page.ID) string {
		if id == page.None {
			return "scratch"
		}
		return fmt.Sprint(id)
	}
	datadriven.RunTest(t, "testdata/copies", func(_ *testing.T, d *datadriven.TestData) string {
		var pairs []page.Pair
		for field := range strings.FieldsSeq(d.Input) {
			var p page.Pair
			if _, err := fmt.Sscanf(field, "%d<-%d", &p.Dst, &p.Src); err != nil {
				return err.Error()
			}
			pairs = append(pairs, p)
		}
		steps, err := orderCopies(pairs)
		if err != nil {
			return err.Error()
		}
		if len(steps) == 0 {
			return "nothing to do"
		}
		var s strings.Builder
		for i, step := range steps {
			fmt.Fprintf(&s, "%d:", i+1)
			for _, p := range step {
				fmt.Fprintf(&s, " %s<-%s", name(p.Dst), name(p.Src))
			}
			fmt.Fprintln(&s)
		}
		return s.String()
	})
}

// drawPairs draws pairs of distinct destinations among n pages.
func drawPairs(t *rapid.T, n int) (pairs []page.Pair) {
	var ids []page.ID
	for i := range n {
		ids = append(ids, page.ID(i))
	}
	dst := rapid.Permutation(ids).Draw(t, "destinations")[:rapid.IntRange(0, n).Draw(t, "pairs")]
	src := rapid.Permutation(dst).Draw(t, "cycles")
	for i, d := range dst {
		p := page.Pair{Dst: d, Src: src[i]}
		if rapid.IntRange(0, 2).Draw(t, "elsewhere") == 0 {
			p.Src = rapid.SampledFrom(ids).Draw(t, "source")
		}
		pairs = append(pairs, p)
	}
	return pairs
}

func TestOrderCopies_AnyOrderInsideAStepIsRight(t *testing.T) {
	cycles := 0
	rapid.Check(t, func(t *rapid.T) {
		pairs := drawPairs(t, 8)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
		given := slices.Clone(pairs)
		steps, err := orderCopies(pairs)
		if err != nil || !slices.Equal(pairs, given) {
			t.Fatalf("%v, pairs now %v", err, pairs)
		}
		held := map[page.ID]page.ID{}
		for i := range page.ID(8) {
			held[i] = i
		}
		for _, step := range steps {
			for _, p := range step {
				if slices.ContainsFunc(step, func(q page.Pair) bool { return q.Src == p.Dst }) {
					t.Fatalf("step %v reads a page that it writes", step)
				}
				if p.Src == page.None {
					cycles++
				}
			}
			rng.Shuffle(len(step), func(i, j int) { step[i], step[j] = step[j], step[i] })
			for _, p := range step {
				held[p.Dst] = held[p.Src]
			}
		}
		want := map[page.ID]page.ID{}
		for i := range page.ID(8) {
			want[i] = i
		}
		for _, p := range pairs {
			want[p.Dst] = p.Src
		}
		for i := range page.ID(8) {
			if held[i] != want[i] {
				t.Fatalf("page %d holds %d, want %d", i, held[i], want[i])
			}
		}
	})
	if cycles == 0 {
		t.Error("no cycle was met")
	}
}

func TestCache_CopyPagesIsAsIfAllWereReadFirst(t *testing.T) { onSites(t, checkCopyPages) }

func checkCopyPages(t *testing.T, x *site) {
	h := x.dev
	s := openStream(t, h)
	rapid.Check(t, func(t *rapid.T) {
		g := drawPlaced(t, drawModel(t))
		c, done := x.cache(t, g, 1)
		defer done()
		before := wrapped(t, g, 1)
		if rapid.Bool().Draw(t, "owned") {
			owned, err := NewCache(g, h)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = owned.Close() }()
			for i, m := range before.regions {
				x.put(t, owned.regions[i], m.Bytes())
			}
			c = owned
		}
		want := x.snapshot(t, c)
		for range rapid.IntRange(1, 2).Draw(t, "calls") {
			pairs := drawPairs(t, g.Pages())
			for i, b := range want {
				copy(before.regions[i].Bytes(), b)
			}
			for _, p := range pairs {
				copySlowly(want, c, before, page.Run{Dst: p.Dst, Src: p.Src, N: 1}, 0, g.PageSize())
			}
			if err := c.CopyPages(s, pairs); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		for i, b := range x.snapshot(t, c) {
			if !bytes.Equal(b, want[i]) {
				t.Fatalf("region %d differs from the model", i)
			}
		}
	})
}

func TestCache_CopyPagesRefusesWithoutCopying(t *testing.T) {
	h := openHost(t)
	s := openStream(t, h)
	c := openCache(t, h, must(small.LayerMajor())(t))
	for _, x := range []struct {
		pairs    []page.Pair
		mentions string
	}{
		{[]page.Pair{{Dst: 0, Src: 1}, {Dst: 7, Src: 0}}, "7 is not in 0 … 6"},
		{[]page.Pair{{Dst: 0, Src: -1}}, "-1 is not in 0 … 6"},
		{[]page.Pair{{Dst: 3, Src: 1}, {Dst: 4, Src: 1}, {Dst: 3, Src: 2}}, "3 is the destination of two pairs"},
		{[]page.Pair{{Dst: 3, Src: 3}, {Dst: 3, Src: 2}}, "3 is the destination of two pairs"},
	} {
		c.regions[0].Bytes()[160] = 99 // page 1
		faulttest.Refused(t, c.CopyPages(s, x.pairs), fault.Invalid, x.mentions)
		drain(t, s)
		if b := c.regions[0].Bytes(); b[0] != 0 || b[3*160] != 0 || b[4*160] != 0 {
			t.Errorf("%v: a page was copied", x.pairs)
		}
	}
	zero := openCache(t, h, must(Config{Pages: 3, PageSize: 1}.LayerMajor())(t))
	if err := zero.CopyPages(s, []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}}); err != nil {
		t.Error("pages without bytes: ", err)
	}
	faulttest.Refused(t, zero.CopyPages(s, []page.Pair{{Dst: 0, Src: 3}}), fault.Invalid, "3 is not in 0 … 2")
}

func TestCache_CopySlotsCopiesTheFirstTokensOfEveryLayer(t *testing.T) { onSites(t, checkCopySlots) }

func checkCopySlots(t *testing.T, x *site) {
	s := openStream(t, x.dev)
	for end := range 5 {
		g := must(small.with(func(c *Config) { c.Layout = []Layout{NHD, HND}[end%2] }).PerLayerKVFirst())(t)
		c, done := x.cache(t, g, 5)
		defer done()
		want := x.snapshot(t, c)
		copySlowly(want, c, wrapped(t, g, 5), page.Run{Dst: 6, Src: 2, N: 1}, 0, end)
		if err := c.CopySlots(s, page.Pair{Dst: 6, Src: 2}, end); err != nil {
			t.Fatal(err)
		}
		drain(t, s)
		for i, b := range x.snapshot(t, c) {
			if !bytes.Equal(b, want[i]) {
				t.Errorf("end %d: region %d differs", end, i)
			}
		}
	}
	c, done := x.cache(t, must(small.LayerMajor())(t), 5)
	defer done()
	if err := c.CopySlots(s, page.Pair{Dst: 2, Src: 2}, 3); err != nil {
		t.Error("a page onto itself is nothing: ", err)
	}
	for pair, end := range map[page.Pair]int{{Dst: 7, Src: 7}: 1, {Dst: 1, Src: 7}: 1, {Dst: 1, Src: 2}: 5, {Dst: 2, Src: 2}: -1} {
		faulttest.Refused(t, c.CopySlots(s, pair, end), fault.Invalid)
	}
	whole, done := x.cache(t, must(small.with(func(c *Config) { c.StateBytes = 3 }).LayerMajor())(t), 5)
	defer done()
	faulttest.Refused(t, whole.CopySlots(s, page.Pair{Dst: 1, Src: 2}, 3), fault.Unsupported, "layer 20", "state")
	if err := whole.CopySlots(s, page.Pair{Dst: 1, Src: 2}, 4); err != nil {
		t.Error("a whole page with a state: ", err)
	}
	drain(t, s)
}

func TestCache_CopiesAreOnlyEnqueued(t *testing.T) {
	h := openHost(t)
	s := openStream(t, h)
	c := openCache(t, h, must(small.PageMajor())(t))
	for i := range 7 {
		fill(t, c, page.ID(i), byte(10+i))
	}
	release := h.Hold(s)
	if err := c.CopyPages(s, []page.Pair{{Dst: 1, Src: 2}, {Dst: 2, Src: 1}}); err != nil {
		t.Fatal(err)
	}
	for _, id := range []page.ID{1, 2} { // the scratch page comes first, so these are whole
		if got := held(t, c, id); got != byte(10+id) {
			t.Errorf("page %d holds %d before its stream ran", id, got)
		}
	}
	release()
	drain(t, s)
	if held(t, c, 1) != 12 || held(t, c, 2) != 11 {
		t.Errorf("pages 1 and 2 hold %d and %d", held(t, c, 1), held(t, c, 2))
	}
}

func TestCache_MemoryInUseIsFreedByALaterClose(t *testing.T) {
	h := openHost(t)
	s := openStream(t, h)
	c := openCache(t, h, must(small.PageMajor())(t))
	release := h.Hold(s)
	swap := []page.Pair{{Dst: 1, Src: 2}, {Dst: 2, Src: 1}}
	if err := c.CopyPages(s, swap); err != nil {
		t.Fatal(err)
	}
	faulttest.Refused(t, c.Close(), fault.Busy)
	faulttest.Refused(t, c.CopyPages(s, swap), fault.Closed)
	release()
	drain(t, s)
	if err := c.Close(); err != nil {
		t.Error("nothing is in flight now: ", err)
	}
	faulttest.Refused(t, c.Close(), fault.Closed)
}

// fill sets all bytes of a page of a page-major cache; held returns their value.
func fill(t *testing.T, c *Cache, id page.ID, value byte) {
	t.Helper()
	b := must(c.Page(id))(t)
	for i := range b {
		b[i] = value
	}
}

func held(t *testing.T, c *Cache, id page.ID) byte {
	t.Helper()
	b := must(c.Page(id))(t)
	if slices.ContainsFunc(b, func(x byte) bool { return x != b[0] }) {
		t.Fatalf("page %d is mixed", id)
	}
	return b[0]
}

// gated waits for an event before its second copy: behind "save to scratch".
type gated struct {
	device.Stream
	gate   device.Event
	saved  device.Event // the point at which it waits
	copies int
}

func (s *gated) Copy(ops []device.Op) error {
	if s.copies++; s.copies == 2 {
		if err := errors.Join(s.Record(s.saved), s.Wait(s.gate)); err != nil {
			return err
		}
	}
	return s.Stream.Copy(ops)
}

// deaf waits for nothing.
type deaf struct{ device.Stream }

func (deaf) Wait(device.Event) error { return nil }

func TestCache_StreamsTakeTurnsWithTheScratchPage(t *testing.T) {
	for _, waits := range []bool{true, false} {
		t.Run(fmt.Sprintf("waits=%v", waits), func(t *testing.T) {
			h := openHost(t)
			c := openCache(t, h, must(small.PageMajor())(t))
			for i := range 7 {
				fill(t, c, page.ID(i), byte(10+i))
			}
			first, second, gateway := openStream(t, h), openStream(t, h), openStream(t, h)
			release := h.Hold(gateway)
			if err := gateway.Copy(must(c.ops(5, 6))(t)); err != nil {
				t.Fatal(err)
			}
			gate := must(h.NewEvent())(t)
			if err := gateway.Record(gate); err != nil {
				t.Fatal(err)
			}
			// The first swap stands still with page 0 in the scratch page.
			saved := must(h.NewEvent())(t)
			if err := c.CopyPages(&gated{Stream: first, gate: gate, saved: saved}, []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}}); err != nil {
				t.Fatal(err)
			}
			if err := saved.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			pairs := []page.Pair{{Dst: 2, Src: 3}, {Dst: 3, Src: 2}}
			if waits {
				if err := c.CopyPages(second, pairs); err != nil {
					t.Fatal(err)
				}
			} else {
				// The control: it overwrites what the first stream has saved.
				if err := c.CopyPages(deaf{second}, pairs); err != nil {
					t.Fatal(err)
				}
				drain(t, second)
			}
			release()
			for _, s := range []device.Stream{first, second, gateway} {
				drain(t, s)
			}
			got := [4]byte{held(t, c, 0), held(t, c, 1), held(t, c, 2), held(t, c, 3)}
			if right := got == [4]byte{11, 10, 13, 12}; right != waits {
				t.Errorf("pages hold %v", got)
			}
		})
	}
}

// ops copies one page onto another.
func (c *Cache) ops(dst, src page.ID) ([]device.Op, error) {
	boxes, err := c.self.AppendBoxes(nil, page.Run{Dst: dst, Src: src, N: 1})
	return c.self.AppendOps(nil, boxes), err
}

// failing refuses its n-th copy.
type failing struct {
	device.Stream
	n int
}

var errRefused = errors.New("refused")

func (s *failing) Copy(ops []device.Op) error {
	if s.n--; s.n == 0 {
		return errRefused
	}
	return s.Stream.Copy(ops)
}

func TestCache_AScratchPageInDoubtIsNotUsedAgain(t *testing.T) {
	h := openHost(t)
	s := openStream(t, h)
	c := openCache(t, h, must(small.PageMajor())(t))
	swap := []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}}
	if err := c.CopyPages(s, swap); err != nil {
		t.Fatal(err)
	}
	used := c.stage
	if err := c.CopyPages(s, swap); err != nil || c.stage != used {
		t.Fatalf("a healthy scratch page is kept: %v", err)
	}
	if err := c.CopyPages(&failing{s, 2}, swap); !errors.Is(err, errRefused) {
		t.Fatal(err)
	}
	if err := c.CopyPages(s, swap); err != nil || c.stage == used {
		t.Fatalf("the scratch page of a failed call is used again: %v", err)
	}
	drain(t, s)
}

// miser gives memory once.
type miser struct {
	*device.Host
	given int
}

func (d *miser) Alloc(bytes int64) (*device.Memory, error) {
	if d.given++; d.given > 1 {
		return nil, fault.New(fault.Memory, "host", "no more")
	}
	return d.Host.Alloc(bytes)
}

func TestCache_ACycleWithoutMemoryForItsScratchPageCopiesNothing(t *testing.T) {
	h := openHost(t)
	s := openStream(t, h)
	c := must(NewCache(must(small.PageMajor())(t), &miser{Host: h}))(t)
	fill(t, c, 0, 10)
	faulttest.Refused(t, c.CopyPages(s, []page.Pair{{Dst: 0, Src: 1}, {Dst: 1, Src: 0}, {Dst: 2, Src: 0}}), fault.Memory)
	drain(t, s)
	if held(t, c, 0) != 10 || held(t, c, 1) != 0 || held(t, c, 2) != 0 {
		t.Error("pages were copied")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
