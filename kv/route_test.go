package kv

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// copySlowly copies tokens [t0, t1) of pages of src, byte by byte and plane by
// plane, onto pages of dst, whose regions are given.
func copySlowly(dst [][]byte, to *Cache, from *Cache, run page.Run, t0, t1 int) {
	for _, l := range from.g.spec.Layers {
		for _, m := range to.g.spec.Layers {
			if l.ID != m.ID {
				continue
			}
			seen := map[PlaneKind]int{}
			for _, p := range l.Planes {
				seen[p.Kind]++
				nth := 0
				for _, q := range m.Planes {
					if q.Kind != p.Kind {
						continue
					}
					if nth++; nth != seen[p.Kind] {
						continue
					}
					for i := range run.N {
						for b := range p.Bytes {
							if t1-t0 < from.g.spec.PageSize {
								if token := tokenOf(p, b); token < t0 || token >= t1 {
									continue
								}
							}
							dst[q.Region][q.Offset+int64(int(run.Dst)+i)*q.PageStride+b] = from.regions[p.Region].Bytes()[p.Offset+int64(int(run.Src)+i)*p.PageStride+b]
						}
					}
				}
			}
		}
	}
}

// tokenOf is the token that byte b of a page of the plane belongs to: in HND the
// tokens begin anew with each head, and in blocks with each head's V.
func tokenOf(p Plane, b int64) int {
	if p.HeadStride > p.TokenStride {
		b %= p.HeadStride
	}
	if p.KVStride > p.TokenStride {
		b %= p.KVStride
	}
	return int(b / p.TokenStride)
}

// execute runs ops at once.
func execute(ops []device.Op) (bytes int64) {
	for _, op := range ops {
		copy(op.Dst.Bytes()[op.DstOff:op.DstOff+op.Bytes], op.Src.Bytes()[op.SrcOff:op.SrcOff+op.Bytes])
		bytes += op.Bytes
	}
	return bytes
}

// checkBoxes compares copying by boxes with want, and the boxes with their
// promises.
func checkBoxes(t *rapid.T, r *Route, boxes []Box, want [][]byte, bytesWanted int64) {
	var sum int64
	for _, b := range boxes {
		if b.Width < 1 || b.Rows < 1 || b.Slices < 1 {
			t.Fatalf("box of nothing: %v", b)
		}
		for _, d := range []struct {
			n        int
			dst, src int64
		}{{b.Rows, b.DstPitch, b.SrcPitch}, {b.Slices, b.DstSlice, b.SrcSlice}} {
			if d.n == 1 && (d.dst != 0 || d.src != 0) || d.n > 1 && (d.dst < b.Width || d.src < b.Width) {
				t.Fatalf("strides that are no strides: %v", b)
			}
		}
		sum += b.Bytes()
	}
	if moved := execute(r.AppendOps(nil, boxes)); moved != bytesWanted || sum != moved {
		t.Fatalf("boxes of %d bytes became ops of %d, want %d", sum, moved, bytesWanted)
	}
	for i, b := range snapshot(r.dst) {
		if !bytes.Equal(b, want[i]) {
			t.Fatalf("region %d differs from a copy byte by byte; boxes %v", i, boxes)
		}
	}
}

func TestRoute_CopyingByBoxesEqualsCopyingByteByByte(t *testing.T) {
	runs, widened, cut := 0, 0, 0
	check := func(t *rapid.T) {
		model := drawModel(t)
		dst, src := wrapped(t, drawPlaced(t, model), 1), wrapped(t, drawPlaced(t, model), 2)
		r, err := NewRoute(dst, src)
		if err != nil {
			t.Fatal(err)
		}
		if r.Dst() != dst || r.Src() != src || r.PageBytes() != src.g.PageBytes() {
			t.Fatal("accessors")
		}
		run := page.Run{N: rapid.IntRange(1, min(dst.Pages(), src.Pages())).Draw(t, "n")}
		run.Dst = page.ID(rapid.IntRange(0, dst.Pages()-run.N).Draw(t, "dst"))
		run.Src = page.ID(rapid.IntRange(0, src.Pages()-run.N).Draw(t, "src"))
		want := snapshot(dst)
		copySlowly(want, dst, src, run, 0, src.PageSize())
		kept := Box{Width: 77}
		boxes, err := r.AppendBoxes([]Box{kept}, run)
		if err != nil || boxes[0] != kept {
			t.Fatal(err)
		}
		checkBoxes(t, r, boxes[1:], want, src.g.PageBytes()*int64(run.N))
		for _, b := range boxes[1:] {
			if b.Slices > 1 {
				runs++
			}
			if b.Rows == 1 && b.Slices == 1 && run.N > 1 {
				widened++
			}
		}

		t0 := rapid.IntRange(0, src.PageSize()).Draw(t, "t0")
		t1 := rapid.IntRange(t0, src.PageSize()).Draw(t, "t1")
		boxes, err = r.AppendTokenBoxes([]Box{kept}, run.Dst, run.Src, t0, t1)
		if err != nil {
			if fault.KindOf(err) != fault.Unsupported || len(boxes) != 1 {
				t.Fatal(err)
			}
			return
		}
		if t0 < t1 {
			copySlowly(want, dst, src, page.Run{Dst: run.Dst, Src: run.Src, N: 1}, t0, t1)
		}
		checkBoxes(t, r, boxes[1:], want, src.g.PageBytes()*int64(t1-t0)/int64(src.PageSize()))
		if 0 < t1-t0 && t1-t0 < src.PageSize() && len(boxes) > 1 {
			cut++
		}
	}
	for round := 0; round == 0 || round < 20 && runs*widened*cut == 0; round++ { // rare cases too
		rapid.Check(t, check)
	}
	if runs == 0 || widened == 0 || cut == 0 {
		t.Errorf("%d boxes with slices, %d widened, %d cut to tokens: a case was never met", runs, widened, cut)
	}
}

func TestRoute_PairsByLayerAndKindNeverByPosition(t *testing.T) {
	a, b := base(), base()
	b.Layers[0], b.Layers[1] = b.Layers[1], b.Layers[0]
	planes := b.Layers[1].Planes
	planes[0], planes[1] = planes[1], planes[0] // V first in the list; offsets as they were
	dst, src := wrapped(t, must(NewGeometry(a))(t), 1), wrapped(t, must(NewGeometry(b))(t), 2)
	r := must(NewRoute(dst, src))(t)
	want := snapshot(dst)
	run := page.Run{Dst: 1, Src: 2, N: 1}
	copySlowly(want, dst, src, run, 0, 2)
	execute(r.AppendOps(nil, must(r.AppendBoxes(nil, run))(t)))
	for i, got := range snapshot(dst) {
		if !bytes.Equal(got, want[i]) {
			t.Errorf("region %d differs", i)
		}
	}
	b.Layers[0].ID = 99
	_, err := NewRoute(dst, wrapped(t, must(NewGeometry(b))(t), 2))
	faulttest.Refused(t, err, fault.Invalid, "layer 0", "layer 1")
}

func TestRoute_IdsAndRangesAreAlwaysChecked(t *testing.T) {
	g := must(small.LayerMajor())(t)
	src := wrapped(t, g, 1)
	dst := wrapped(t, must(g.Packed(4))(t), 2)
	r, self := must(NewRoute(dst, src))(t), must(NewRoute(src, src))(t)
	for _, c := range []struct {
		route    *Route
		run      page.Run
		mentions string
	}{
		{r, page.Run{Dst: 0, Src: 0, N: 0}, "0 is not in 1 … 4"},
		{r, page.Run{Dst: 0, Src: 0, N: -1}, "-1 is not in 1 … 4"},
		{r, page.Run{Dst: -1, Src: 0, N: 1}, "destination: pages -1 … -1"},
		{r, page.Run{Dst: 0, Src: -1, N: 1}, "source: pages -1 … -1"},
		{r, page.Run{Dst: 3, Src: 0, N: 2}, "destination: pages 3 … 4 are not in 0 … 3"},
		{r, page.Run{Dst: 0, Src: 6, N: 2}, "source: pages 6 … 7 are not in 0 … 6"},
		{r, page.Run{Dst: 2147483647, Src: 0, N: 2147483647}, "destination"},
		{self, page.Run{Dst: 1, Src: 0, N: 2}, "overlaps itself"},
		{self, page.Run{Dst: 0, Src: 2, N: 3}, "overlaps itself"},
		{self, page.Run{Dst: 2, Src: 2, N: 1}, "overlaps itself"},
	} {
		boxes, err := c.route.AppendBoxes(nil, c.run)
		faulttest.Refused(t, err, fault.Invalid, c.mentions)
		if len(boxes) > 0 {
			t.Errorf("%v: boxes were appended", err)
		}
	}
	if _, err := self.AppendBoxes(nil, page.Run{Dst: 2, Src: 0, N: 2}); err != nil {
		t.Error("neighbours do not overlap: ", err)
	}
	for _, c := range []struct {
		route    *Route
		dst, src page.ID
		t0, t1   int
		mentions string
	}{
		{r, 0, 0, -1, 1, "[-1, 1) is not in [0, 4)"},
		{r, 0, 0, 2, 1, "[2, 1) is not in [0, 4)"},
		{r, 0, 0, 0, 5, "[0, 5) is not in [0, 4)"},
		{r, 4, 0, 0, 1, "destination: pages 4"},
		{r, 0, 7, 0, 1, "source: pages 7"},
		{r, 0, 7, 2, 2, "source: pages 7"},
		{self, 3, 3, 0, 1, "3 is copied onto itself"},
	} {
		_, err := c.route.AppendTokenBoxes(nil, c.dst, c.src, c.t0, c.t1)
		faulttest.Refused(t, err, fault.Invalid, c.mentions)
	}
}

// TestRoute_Plans runs transcripts of the boxes that runs become.
//
//	geometry NAME layout=… layers=… pages=… page-size=… heads=… dim=… as=LayerMajor
//	         [join=rows|blocks] [dtype=…] [first-head=…] [token-head-scales=BYTES] [state=BYTES]
//	packed NAME of=NAME pages=… [layer-major]
//	boxes dst=NAME src=NAME run=(DST,SRC,N) [heads]
//	tokens dst=NAME src=NAME pages=(DST,SRC) range=(T0,T1) [heads]
//
// With heads, the route is one of the heads that both hold.
func TestRoute_Plans(t *testing.T) {
	geometries := map[string]*Geometry{}
	datadriven.RunTest(t, "testdata/boxes", func(t *testing.T, d *datadriven.TestData) string {
		number := func(key string) int {
			var n int
			d.ScanArgs(t, key, &n)
			return n
		}
		word := func(key string) string {
			var s string
			d.ScanArgs(t, key, &s)
			return s
		}
		add := func(g *Geometry, err error) string {
			if err != nil {
				return err.Error()
			}
			geometries[d.CmdArgs[0].Key] = g
			return fmt.Sprintf("%d pages of %d bytes in %d regions, %d bytes", g.Pages(), g.PageBytes(), g.Regions(), g.Bytes())
		}
		route := func() *Route {
			dst, src := geometries[word("dst")], geometries[word("src")]
			if d.HasArg("heads") {
				return must(NewHeadRoute(wrapped(t, dst, 1), wrapped(t, src, 2)))(t)
			}
			return must(NewRoute(wrapped(t, dst, 1), wrapped(t, src, 2)))(t)
		}
		list := func(boxes []Box, err error) string {
			if err != nil {
				return err.Error()
			}
			var s strings.Builder
			for _, b := range boxes {
				fmt.Fprintln(&s, b)
			}
			if len(boxes) == 0 {
				return "no boxes"
			}
			return s.String()
		}
		switch d.Cmd {
		case "geometry":
			c := Config{DType: BF16, Layers: number("layers"), Pages: number("pages"), PageSize: number("page-size")}
			c.Layout = must(ParseLayout(word("layout")))(t)
			if c.Layout == MLA {
				c.LatentDim = number("dim")
			} else {
				c.KVHeads, c.HeadDim = number("heads"), number("dim")
			}
			if d.HasArg("join") {
				c.Join = map[string]Join{"rows": JoinRows, "blocks": JoinBlocks}[word("join")]
			}
			if d.HasArg("dtype") {
				c.DType = must(ParseDType(word("dtype")))(t)
			}
			if d.HasArg("token-head-scales") {
				c.Scale, c.ScaleBytes = PerTokenHead, number("token-head-scales")
			}
			d.MaybeScanArgs(t, "first-head", &c.FirstHead)
			d.MaybeScanArgs(t, "state", &c.StateBytes)
			as := word("as")
			for _, a := range arrangements {
				if a.name == as {
					return add(a.make(c))
				}
			}
			return "no such arrangement"
		case "packed":
			if d.HasArg("layer-major") {
				return add(geometries[word("of")].PackedLayerMajor(number("pages")))
			}
			return add(geometries[word("of")].Packed(number("pages")))
		case "boxes":
			var dst, src, n int
			d.ScanArgs(t, "run", &dst, &src, &n)
			return list(route().AppendBoxes(nil, page.Run{Dst: page.ID(dst), Src: page.ID(src), N: n}))
		case "tokens":
			var dst, src, t0, t1 int
			d.ScanArgs(t, "pages", &dst, &src)
			d.ScanArgs(t, "range", &t0, &t1)
			return list(route().AppendTokenBoxes(nil, page.ID(dst), page.ID(src), t0, t1))
		}
		return "no such command"
	})
}
