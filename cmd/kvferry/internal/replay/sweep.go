package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/guptarohit/asciigraph"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
)

// Sweep is what pools of other sizes would hit on a trace, device and host
// together. Its JSON keys are stable, and those that a replay has too mean the
// same.
type Sweep struct {
	Version       string   `json:"version"`
	Trace         string   `json:"trace"`
	TraceSHA256   *string  `json:"trace_sha256"`
	Seed          uint64   `json:"seed"`
	Requests      int64    `json:"requests"`
	Tokens        int64    `json:"tokens"`
	PageSize      int64    `json:"page_size"`
	PageBytes     int64    `json:"page_bytes"`
	DevicePages   int64    `json:"device_pages"`
	HostPages     int64    `json:"host_pages"`
	PagesLookedUp int64    `json:"pages_looked_up"`
	PagesWhole    int64    `json:"pages_whole"`
	PagesDistinct int64    `json:"pages_distinct"` // of the whole ones
	Points        []Point  `json:"sweep"`
	Warnings      []string `json:"warnings"`

	about *Result // the same for the head of the text, and the geometry
}

// Point is one size of the pools.
type Point struct {
	Pages           int64    `json:"pages"`
	Bytes           int64    `json:"bytes"`
	HitRatio        *float64 `json:"hit_ratio"` // least recently used, deepest page first
	OptimumHitRatio *float64 `json:"optimum_hit_ratio"`
}

// RunSweep works out what pools of other sizes would hit, and does not replay: no
// pool is made and no byte is moved. Sizes double from the least power of two that
// holds the largest request to all pages of the trace; the size that o asks for is
// one of them. Kinds: fault.Invalid, fault.NotFound; or ctx's error.
func RunSweep(ctx context.Context, o Options) (*Sweep, error) {
	o, err := o.Resolve()
	if err != nil {
		return nil, err
	}
	t, err := o.load(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkUses(t, o.PageSize, "--sweep"); err != nil {
		return nil, err
	}
	one, err := o.geometry(1)
	if err != nil {
		return nil, err
	}
	_, largest := t.Largest(o.PageSize)
	o = o.withDefaultPages(largest)
	r := NewResult(o, t)
	r.PageBytes, r.DevicePages, r.HostPages = one.PageBytes(), int64(o.DevicePages), int64(o.HostPages)

	u := newUses(t, o.PageSize)
	s := &Sweep{
		Trace: r.Trace, TraceSHA256: r.TraceSHA256, Seed: r.Seed, Requests: r.Requests, Tokens: r.Tokens,
		PageSize: r.PageSize, PageBytes: r.PageBytes, DevicePages: r.DevicePages, HostPages: r.HostPages,
		PagesLookedUp: u.lookedUp, PagesWhole: int64(len(u.next)), PagesDistinct: int64(u.distinct),
		Warnings: r.Warnings, about: r,
	}
	for _, pages := range sweepSizes(largest, u.distinct, o.DevicePages+o.HostPages) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.Points = append(s.Points, Point{
			Pages: int64(pages), Bytes: int64(pages) * s.PageBytes,
			HitRatio: u.ratio(u.lru(pages)), OptimumHitRatio: u.ratio(u.optimum(pages)),
		})
	}
	return s, nil
}

// sweepSizes returns the sizes to look at, in pages, growing.
func sweepSizes(largest, distinct, current int) []int {
	var sizes []int
	add := func(n int) {
		if len(sizes) > 0 && sizes[len(sizes)-1] < current && current < n {
			sizes = append(sizes, current)
		}
		sizes = append(sizes, n)
	}
	n := 1
	for n < largest {
		n *= 2
	}
	if current < n {
		sizes = append(sizes, current)
	}
	for ; n < distinct; n *= 2 {
		add(n)
	}
	add(max(distinct, largest))
	if sizes[len(sizes)-1] < current {
		sizes = append(sizes, current)
	}
	return sizes
}

// current is the size that was asked for.
func (s *Sweep) current() int64 { return s.DevicePages + s.HostPages }

// WriteJSON writes the sweep as one indented JSON object.
func (s *Sweep) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(s)
}

// WriteText writes the sweep for people.
func (s *Sweep) WriteText(w io.Writer) error {
	t := text{r: s.about}
	t.title("replay --sweep")
	t.page()
	t.line("pages", count(s.PagesLookedUp)+" looked up", count(s.PagesWhole)+" whole", count(s.PagesDistinct)+" different")
	t.b.WriteByte('\n')

	fmt.Fprintf(&t.b, "%11s  %10s  %7s  %7s  %7s\n", "pages", "memory", "LRU", "optimum", "share")
	for _, p := range s.Points {
		if p.HitRatio == nil || p.OptimumHitRatio == nil {
			continue
		}
		row := fmt.Sprintf("%11s  %10s  %7.4f  %7.4f  %7s  %s", count(p.Pages), figures.Size(p.Bytes), *p.HitRatio, *p.OptimumHitRatio,
			shareOf(*p.HitRatio, *p.OptimumHitRatio), bar(parts(*p.HitRatio), parts(1)))
		row = strings.TrimRight(row, " ")
		if p.Pages == s.current() {
			row += fmt.Sprintf("  ◀ --device-pages %d --host-pages %d", s.DevicePages, s.HostPages)
		}
		t.b.WriteString(row + "\n")
	}
	t.b.WriteByte('\n')
	s.plot(&t.b)
	t.b.WriteString("pages    of device and host together; each page in one place, as --tiers exclusive keeps them\n" +
		"LRU      the least recently used page goes first, of one request the deepest\n" +
		"optimum  knows what comes: an upper bound for every policy\n")
	t.warnings()
	_, err := w.Write(t.b.Bytes())
	return err
}

// plot draws hit ratio against size; a step to the right doubles the size.
func (s *Sweep) plot(b *bytes.Buffer) {
	const width, height = 64, 10
	var x, lru, optimum []float64
	for _, p := range s.Points {
		if p.HitRatio == nil || p.Pages == 0 {
			return
		}
		x = append(x, math.Log2(float64(p.Pages)))
		lru, optimum = append(lru, *p.HitRatio), append(optimum, *p.OptimumHitRatio)
	}
	first, last := x[0], x[len(x)-1]
	if len(x) < 2 || first == last {
		return
	}
	graph := asciigraph.PlotMany([][]float64{evenly(x, lru, width), evenly(x, optimum, width)},
		asciigraph.Height(height), asciigraph.Offset(3), asciigraph.LowerBound(0), asciigraph.Precision(2),
		asciigraph.SeriesChars(asciigraph.DefaultCharSet, asciigraph.CreateCharSet("·")),
		asciigraph.XAxisRange(first, last), asciigraph.XAxisTickCount(5),
		asciigraph.XAxisValueFormatter(func(v float64) string { return count(int64(math.Round(math.Exp2(v)))) }),
		asciigraph.Caption("hit ratio against pages: ─ LRU, · optimum"))
	for line := range strings.Lines(graph) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	b.WriteString("\n")
}

// evenly returns n values of the line through (x, y), x growing, at even steps.
func evenly(x, y []float64, n int) []float64 {
	out := make([]float64, n)
	k := 0
	for i := range out {
		at := x[0] + (x[len(x)-1]-x[0])*float64(i)/float64(n-1)
		for k < len(x)-2 && x[k+1] < at {
			k++
		}
		part := min(max((at-x[k])/(x[k+1]-x[k]), 0), 1)
		out[i] = y[k] + (y[k+1]-y[k])*part
	}
	return out
}
