package device

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// bytesOf returns for each byte that rects write where it comes from. Two of one byte
// are an error.
func bytesOf(rects []Rect) (map[uintptr]uintptr, error) {
	from := map[uintptr]uintptr{}
	for _, r := range rects {
		for i := range r.Slices {
			for j := range r.Rows {
				dst, src := r.Dst+uintptr(i*r.DstSlice+j*r.DstPitch), r.Src+uintptr(i*r.SrcSlice+j*r.SrcPitch)
				for b := range uintptr(r.Width) {
					if _, twice := from[dst+b]; twice {
						return nil, fmt.Errorf("byte %#x is written twice", dst+b)
					}
					from[dst+b] = src + b
				}
			}
		}
	}
	return from, nil
}

// sameBytes says how got, which is to copy what want does, falls short.
func sameBytes(got []Rect, want Rect) error {
	a, err := bytesOf(got)
	if err != nil {
		return err
	}
	b, err := bytesOf([]Rect{want})
	if err != nil {
		return err
	}
	if len(a) != len(b) {
		return fmt.Errorf("%d bytes, want %d", len(a), len(b))
	}
	for dst, src := range b {
		if a[dst] != src {
			return fmt.Errorf("byte %#x is from %#x, want %#x", dst, a[dst], src)
		}
	}
	return nil
}

// fits says what is wrong with r for an engine, as the documentation of Rect has it.
func fits(r Rect, l *EngineLimits) error {
	flat := r.DstPitch >= r.Width && r.SrcPitch >= r.Width && r.DstPitch <= l.MaxPitch && r.SrcPitch <= l.MaxPitch
	boxed := l.Boxes && flat && r.DstSlice%r.DstPitch == 0 && r.SrcSlice%r.SrcPitch == 0 &&
		r.DstSlice >= r.Rows*r.DstPitch && r.SrcSlice >= r.Rows*r.SrcPitch
	if r.Width > 0 && (r.Rows == 1 && r.Slices == 1 || r.Rows > 1 && r.Slices == 1 && flat || r.Rows > 0 && r.Slices > 1 && boxed) {
		return nil
	}
	return fmt.Errorf("%+v is outside %+v", r, *l)
}

// drawRect draws a box whose rows share no byte on either side: on each, one dimension
// lies inside the other, densely or with gaps.
func drawRect(t *rapid.T) Rect {
	r := Rect{
		Dst: uintptr(rapid.IntRange(0, 5000).Draw(t, "dst")), Src: uintptr(rapid.IntRange(0, 5000).Draw(t, "src")),
		Width: rapid.Int64Range(1, 20).Draw(t, "width"), Rows: rapid.Int64Range(1, 9).Draw(t, "rows"), Slices: rapid.Int64Range(1, 9).Draw(t, "slices"),
	}
	side := func(name string) (pitch, slice int64) {
		gap := rapid.SampledFrom([]int64{0, 0, 0, 1, 7, 64, 1000, 4096, 1 << 31})
		inner := r.Rows
		turned := rapid.Bool().Draw(t, name+" turned")
		if turned {
			inner = r.Slices
		}
		a := r.Width + gap.Draw(t, name+" gap")
		b := a * inner
		if rapid.Bool().Draw(t, name+" multiple") {
			b += a * rapid.Int64Range(0, 5).Draw(t, name+" more")
		} else {
			b += gap.Draw(t, name+" outer gap")
		}
		if turned {
			return b, a
		}
		return a, b
	}
	r.DstPitch, r.DstSlice = side("dst")
	r.SrcPitch, r.SrcSlice = side("src")
	return r
}

func drawLimits(t *rapid.T) *EngineLimits {
	return &EngineLimits{
		MaxPitch: rapid.SampledFrom([]int64{0, 16, 64, 1000, 4096, 1<<31 - 1}).Draw(t, "max pitch"),
		Boxes:    rapid.Bool().Draw(t, "boxes"),
	}
}

func TestCutBox_CopiesWhatTheBoxDoesWithinTheLimits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, l := drawRect(t), drawLimits(t)
		got := cutBox(nil, r, l)
		for _, x := range got {
			if err := fits(x, l); err != nil {
				t.Fatal(err)
			}
		}
		if err := sameBytes(got, r); err != nil {
			t.Fatalf("%+v: %v", got, err)
		}
		if most := r.Rows * r.Slices; int64(len(got)) > most {
			t.Fatalf("%d rects for %d rows", len(got), most)
		}
	})
}

// The check of the test above sees what it is there for.
func TestSameBytes_SeesWhatIsMissingOrWrong(t *testing.T) {
	r := Rect{Dst: 100, Src: 900, Width: 4, Rows: 3, Slices: 2, DstPitch: 10, SrcPitch: 8, DstSlice: 100, SrcSlice: 64}
	l := &EngineLimits{MaxPitch: 64}
	good := cutBox(nil, r, l)
	if err := sameBytes(good, r); err != nil {
		t.Fatal(err)
	}
	short, off, twice := append([]Rect(nil), good...), append([]Rect(nil), good...), append([]Rect(nil), good...)
	short[0].Width--
	off[1].Src++
	twice = append(twice, twice[0])
	for i, bad := range [][]Rect{short, off, twice, good[1:]} {
		if sameBytes(bad, r) == nil {
			t.Errorf("case %d passes", i)
		}
	}
	if fits(Rect{Width: 8, Rows: 2, Slices: 1, DstPitch: 100, SrcPitch: 8}, l) == nil || fits(good[0], &EngineLimits{}) == nil {
		t.Error("a rect outside the limits passes")
	}
}

func TestCutBox_MakesAsFewCallsAsTheLimitsAllow(t *testing.T) {
	const most = 1<<31 - 1
	all, flat, line := &EngineLimits{MaxPitch: most, Boxes: true}, &EngineLimits{MaxPitch: most}, &EngineLimits{}
	for _, c := range []struct {
		name          string
		r             Rect
		all, flat, of int // calls with boxes, without, and of an engine with neither
	}{
		{"nothing", Rect{Width: 0, Rows: 3, Slices: 3}, 0, 0, 0},
		{"one row", Rect{Width: 9, Rows: 1, Slices: 1}, 1, 1, 1},
		{"adjacent rows", Rect{Width: 9, Rows: 100, Slices: 1, DstPitch: 9, SrcPitch: 9}, 1, 1, 1},
		{"adjacent rows and slices", Rect{Width: 9, Rows: 100, Slices: 7, DstPitch: 9, SrcPitch: 9, DstSlice: 900, SrcSlice: 900}, 1, 1, 1},
		{"adjacent slices of one row", Rect{Width: 9, Rows: 1, Slices: 100, DstSlice: 9, SrcSlice: 9}, 1, 1, 1},
		{"adjacent slices, rows outside", Rect{Width: 8, Rows: 4, Slices: 3, DstPitch: 24, SrcPitch: 24, DstSlice: 8, SrcSlice: 8}, 1, 1, 1},
		{"a page of all layers", Rect{Width: 4096, Rows: 32, Slices: 1, DstPitch: 4096, SrcPitch: 1 << 20}, 1, 1, 32},
		{"slices of one row", Rect{Width: 4096, Rows: 1, Slices: 32, DstSlice: 4096, SrcSlice: 1 << 20}, 1, 1, 32},
		{"slices that go on as rows", Rect{Width: 8, Rows: 4, Slices: 5, DstPitch: 16, SrcPitch: 32, DstSlice: 64, SrcSlice: 128}, 1, 1, 20},
		{"a run of pages between pools of one order", Rect{Width: 4096, Rows: 32, Slices: 5, DstPitch: 4096, SrcPitch: 8192, DstSlice: 64 * 4096, SrcSlice: 64 * 8192}, 1, 5, 160},
		// The order of the axes differs: no box can turn them.
		{"a run of pages from layer-major to page-major", Rect{Width: 4096, Rows: 32, Slices: 5, DstPitch: 4096, SrcPitch: 1 << 20, DstSlice: 32 * 4096, SrcSlice: 4096}, 5, 5, 160},
		{"the same, turned", Rect{Width: 4096, Rows: 5, Slices: 32, DstPitch: 32 * 4096, SrcPitch: 4096, DstSlice: 4096, SrcSlice: 1 << 20}, 5, 5, 160},
		{"a slice stride of no pitch", Rect{Width: 8, Rows: 40, Slices: 3, DstPitch: 16, SrcPitch: 16, DstSlice: 1001, SrcSlice: 1001}, 3, 3, 120},
		{"a pitch beyond the limit", Rect{Width: 4096, Rows: 32, Slices: 1, DstPitch: 4096, SrcPitch: 1 << 31}, 1, 32, 32},
		{"both beyond it", Rect{Width: 4096, Rows: 32, Slices: 1, DstPitch: 3 << 31, SrcPitch: 1 << 31}, 1, 32, 32},
		{"beyond it, and prime", Rect{Width: 4096, Rows: 32, Slices: 1, DstPitch: 4096, SrcPitch: 2147483659}, 32, 32, 32},
		{"slices beyond it", Rect{Width: 4096, Rows: 32, Slices: 3, DstPitch: 4096, SrcPitch: 8192, DstSlice: 1 << 33, SrcSlice: 1 << 34}, 1, 3, 96},
		{"rows beyond it, slices inside", Rect{Width: 64, Rows: 32, Slices: 3, DstPitch: 1 << 33, SrcPitch: 1 << 34, DstSlice: 64, SrcSlice: 128}, 1, 32, 96},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, x := range []struct {
				l    *EngineLimits
				want int
			}{{all, c.all}, {flat, c.flat}, {line, c.of}} {
				got := cutBox(nil, c.r, x.l)
				for _, r := range got {
					if err := fits(r, x.l); err != nil {
						t.Error(err)
					}
				}
				if len(got) != x.want {
					t.Errorf("%d calls with %+v, want %d: %+v", len(got), *x.l, x.want, got)
				}
			}
		})
	}
}

// drawFence draws a memory of size bytes with pinned stretches, which touch or leave
// gaps, and whether bytes may lie in the gaps.
func drawFence(t *rapid.T, name string, base uintptr, size int64) *fence {
	f := &fence{base: base, size: size}
	if rapid.Bool().Draw(t, name+" on the device") {
		return f
	}
	f.pins = &pins{pageable: true}
	for off := int64(0); off < size; {
		n := rapid.Int64Range(1, 1000).Draw(t, name+" stretch")
		if rapid.IntRange(0, 4).Draw(t, name+" gap") > 0 {
			f.pins.stretches = append(f.pins.stretches, span{off, min(size, off+n)})
		}
		off += n
	}
	return f
}

func TestSplit_CrossesNoFenceAndCopiesTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &EngineLimits{MaxPitch: 1<<31 - 1, Boxes: rapid.Bool().Draw(t, "boxes")}
		r := drawRect(t)
		d, _ := extent(r.Width, r.Rows, r.DstPitch, r.Slices, r.DstSlice)
		s, _ := extent(r.Width, r.Rows, r.SrcPitch, r.Slices, r.SrcSlice)
		if max(d, s) > 1<<20 {
			t.Skip("so many stretches take long")
		}
		dst, src := drawFence(t, "dst", r.Dst, d+3), drawFence(t, "src", r.Src, s+3)
		var got []Rect
		for _, x := range cutBox(nil, r, l) {
			got = split(got, x, dst, src)
		}
		for _, x := range got {
			if err := fits(x, l); err != nil {
				t.Fatal(err)
			}
			d, _ := extent(x.Width, x.Rows, x.DstPitch, x.Slices, x.DstSlice)
			s, _ := extent(x.Width, x.Rows, x.SrcPitch, x.Slices, x.SrcSlice)
			if x.Dst+uintptr(d) > dst.end(x.Dst) || x.Src+uintptr(s) > src.end(x.Src) {
				t.Fatalf("%+v crosses a fence", x)
			}
		}
		if err := sameBytes(got, r); err != nil {
			t.Fatalf("%+v: %v", got, err)
		}
	})
}

func TestExtent_RefusesWhatDoesNotFit(t *testing.T) {
	const most = 1<<63 - 1
	for _, c := range []struct {
		width, rows, pitch, slices, slice int64
		want                              int64
		ok                                bool
	}{
		{5, 1, most, 1, most, 5, true},
		{5, 3, 10, 2, 100, 125, true},
		{5, 2, 1 << 40, 1, 0, 1<<40 + 5, true},
		{5, 2, most, 1, 0, 0, false},
		{5, 1 << 32, 1 << 32, 1, 0, 0, false},
		{5, most, 1 << 20, 1, 0, 0, false},
		{5, 2, -1, 1, 0, 0, false},
		{5, 1, 0, 2, -1, 0, false},
		{most, 1, 0, 1, 0, 0, false},
		{most, 2, 1, 1, 0, 0, false},
		{1<<62 - 1, 2, 1<<62 - 1, 2, 1<<62 - 1, 0, false},
	} {
		if n, ok := extent(c.width, c.rows, c.pitch, c.slices, c.slice); ok != c.ok || ok && n != c.want {
			t.Errorf("%+v: %d, %v", c, n, ok)
		}
	}
}
