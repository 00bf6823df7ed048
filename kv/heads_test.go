package kv

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// rank is a config and how it is arranged: what one tensor-parallel rank holds.
type rank struct {
	c Config
	a arrangement
	g *Geometry
}

func drawRank(t *rapid.T, c Config) rank {
	c.Pages = rapid.IntRange(1, 4).Draw(t, "pages")
	c.PageAlign = rapid.SampledFrom([]int{0, 0, 32}).Draw(t, "align")
	g, a := drawGeometry(t, c)
	return rank{c, a, g}
}

// copyHeads is the slow reference: it copies tokens [t0, t1) of the pages of run,
// element by element, from one rank's bytes to another's, where both hold the
// element. It returns the bytes copied.
func copyHeads(dst [][]byte, to rank, src [][]byte, from rank, run page.Run, t0, t1 int) (bytes int64) {
	where := walk(from.c, from.a)
	for e, at := range walk(to.c, to.a) {
		var p part
		for _, p = range to.c.parts() {
			if p.number == e.part {
				break
			}
		}
		i := e.page - int(run.Dst)
		if i < 0 || i >= run.N || (strings.Contains(p.axes, "t") && (e.token < t0 || e.token >= t1)) {
			continue
		}
		e.page = int(run.Src) + i
		if strings.Contains(p.axes, "h") {
			e.head += to.c.FirstHead - from.c.FirstHead
		}
		if other, ok := where[e]; ok {
			copy(dst[at.region][at.off:at.off+p.bytes], src[other.region][other.off:])
			bytes += p.bytes
		}
	}
	return bytes
}

func TestNewHeadRoute_CopiesTheHeadsThatBothHold(t *testing.T) {
	whole, parts, refused, cut := 0, 0, 0, 0
	check := func(t *rapid.T) {
		c := drawConfig(t)
		d := c
		if c.Layout != MLA && rapid.Bool().Draw(t, "other heads") {
			d.KVHeads = rapid.IntRange(1, 4).Draw(t, "its heads")
			d.FirstHead = max(0, c.FirstHead+rapid.IntRange(-3, 3).Draw(t, "its first head"))
		}
		to, from := drawRank(t, d), drawRank(t, c)
		dst, src := wrapped(t, to.g, 1), wrapped(t, from.g, 2)
		same := c.KVHeads == d.KVHeads && c.FirstHead == d.FirstHead
		r, err := NewHeadRoute(dst, src)
		switch {
		case c.Layout != MLA && (d.FirstHead >= c.FirstHead+c.KVHeads || c.FirstHead >= d.FirstHead+d.KVHeads):
			if refused++; fault.KindOf(err) != fault.Invalid {
				t.Fatalf("no head is shared: %v", err)
			}
			return
		case !same && (c.StateBytes > 0 || c.Scale == PerPage || c.Scale == PerToken):
			if refused++; fault.KindOf(err) != fault.Unsupported {
				t.Fatalf("a plane can't be cut by head: %v", err)
			}
			return
		case err != nil:
			t.Fatal(err)
		}
		if same {
			whole++
		} else {
			parts++
		}
		run := page.Run{N: rapid.IntRange(1, min(dst.Pages(), src.Pages())).Draw(t, "n")}
		run.Dst = page.ID(rapid.IntRange(0, dst.Pages()-run.N).Draw(t, "dst"))
		run.Src = page.ID(rapid.IntRange(0, src.Pages()-run.N).Draw(t, "src"))
		want := snapshot(dst)
		bytes := copyHeads(want, to, snapshot(src), from, run, 0, c.PageSize)
		if bytes != r.PageBytes()*int64(run.N) {
			t.Fatalf("%d bytes a page, want %d in %d pages", r.PageBytes(), bytes, run.N)
		}
		boxes, err := r.AppendBoxes(nil, run)
		if err != nil {
			t.Fatal(err)
		}
		checkBoxes(t, r, boxes, want, bytes)

		t0 := rapid.IntRange(0, c.PageSize).Draw(t, "t0")
		t1 := rapid.IntRange(t0, c.PageSize).Draw(t, "t1")
		run.N = 1
		boxes, err = r.AppendTokenBoxes(nil, run.Dst, run.Src, t0, t1)
		part := 0 < t1-t0 && t1-t0 < c.PageSize
		if part && !c.cuts() {
			if fault.KindOf(err) != fault.Unsupported || len(boxes) > 0 {
				t.Fatalf("part of what moves whole: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		bytes = 0
		if t0 < t1 {
			bytes = copyHeads(want, to, snapshot(src), from, run, t0, t1)
		}
		checkBoxes(t, r, boxes, want, bytes)
		if part && !same {
			cut++
		}
	}
	for round := 0; round == 0 || round < 20 && whole*parts*refused*cut == 0; round++ { // rare cases too
		rapid.Check(t, check)
	}
	if whole == 0 || parts == 0 || refused == 0 || cut == 0 {
		t.Errorf("%d whole, %d in part, %d refused, %d cut to tokens: a case was never met", whole, parts, refused, cut)
	}
}

// TestNewHeadRoute_EveryPairOfArrangements moves 2 of 3 heads: a run of pages,
// and some tokens.
func TestNewHeadRoute_EveryPairOfArrangements(t *testing.T) {
	for _, layers := range []int{2, 5} {
		for _, layout := range []Layout{NHD, HND} {
			for _, join := range []Join{Apart, JoinRows, JoinBlocks} {
				c := Config{
					Layout: layout, DType: BF16, Join: join, Layers: layers, Pages: 4, PageSize: 4, KVHeads: 3, HeadDim: 2, FirstHead: 5,
					Scale: PerTokenHead, ScaleBytes: 2,
				}
				d := c.with(func(c *Config) { c.Pages, c.FirstHead, c.KVHeads = 6, 2, 5 })
				for _, a := range arrangements {
					for _, b := range arrangements {
						if a.takes(d) && b.takes(c) {
							checkHeads(t, rank{d, a, must(a.make(d))(t)}, rank{c, b, must(b.make(c))(t)})
						}
					}
				}
			}
		}
	}
}

func checkHeads(t *testing.T, to, from rank) {
	dst, src := wrapped(t, to.g, 1), wrapped(t, from.g, 2)
	r := must(NewHeadRoute(dst, src))(t)
	run := page.Run{Dst: 2, Src: 1, N: 3}
	want := snapshot(dst)
	copyHeads(want, to, snapshot(src), from, run, 0, 4)
	one := page.Run{Dst: 0, Src: 2, N: 1}
	copyHeads(want, to, snapshot(src), from, one, 1, 4)
	boxes := must(r.AppendBoxes(nil, run))(t)
	boxes = must(r.AppendTokenBoxes(boxes, one.Dst, one.Src, 1, 4))(t)
	execute(r.AppendOps(nil, boxes))
	for i, b := range snapshot(dst) {
		if !bytes.Equal(b, want[i]) {
			t.Fatalf("%s of %+v from %s: region %d differs", to.a.name, to.c, from.a.name, i)
		}
	}
}

func TestNewHeadRoute_NamesWhatDiffers(t *testing.T) {
	two := small // heads 8 and 9
	make := func(change func(*Config)) *Cache { return wrapped(t, must(two.with(change).LayerMajor())(t), 1) }
	for _, c := range []struct {
		dst, src func(*Config)
		kind     fault.Kind
		mentions string
	}{
		{func(c *Config) { c.FirstHead = 10 }, func(*Config) {}, fault.Invalid, "layer 20|10 … 11|8 … 9|none is shared"},
		{func(c *Config) { c.HeadDim = 6 }, func(c *Config) { c.KVHeads = 1 }, fault.Invalid, "layer 20: head dim|6 and 5"},
		{func(c *Config) { c.Layers = 2 }, func(c *Config) { c.KVHeads = 1 }, fault.Invalid, "number of layers|2 and 3"},
		{func(c *Config) { c.Join = JoinRows }, func(c *Config) { c.Join = JoinBlocks }, fault.Invalid, "plane KV: head stride|20 and 10"},
		{
			func(c *Config) { c.Layout, c.Join = HND, JoinRows },
			func(c *Config) { c.Layout, c.Join = HND, JoinBlocks },
			fault.Invalid, "plane KV: token stride|20 and 10",
		},
		{
			func(c *Config) { c.Scale, c.ScaleBytes = PerTokenHead, 4 },
			func(c *Config) { c.Scale, c.ScaleBytes = PerHead, 4 },
			fault.Invalid, "plane scale: token stride|8 and 0",
		},
		{
			func(c *Config) { c.Scale, c.ScaleBytes = PerTokenHead, 4 },
			func(c *Config) { c.Scale, c.ScaleBytes = PerToken, 4 },
			fault.Invalid, "plane scale",
		},
		{
			func(c *Config) { c.Scale, c.ScaleBytes = PerToken, 4 },
			func(c *Config) { c.Scale, c.ScaleBytes, c.KVHeads = PerToken, 4, 1 },
			fault.Unsupported, "layer 20|8 … 9|8 … 8|scale|by head",
		},
		{
			func(c *Config) { c.StateBytes, c.KVHeads = 4, 1 },
			func(c *Config) { c.StateBytes = 4 },
			fault.Unsupported, "layer 20|state",
		},
	} {
		_, err := NewHeadRoute(make(c.dst), make(c.src))
		faulttest.Refused(t, err, c.kind, strings.Split(c.mentions, "|")...)
	}
	_, err := NewRoute(make(func(c *Config) { c.KVHeads = 1 }), make(func(*Config) {}))
	faulttest.Refused(t, err, fault.Invalid, "number of heads", "1 and 2")
}
