package replay

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
)

// WriteText writes the result for people. Lines about what was not measured are
// left out.
func (r *Result) WriteText(w io.Writer) error {
	t := text{r: r}
	t.heading()
	t.pages()
	t.compare()
	t.bytes()
	t.speed()
	t.footnotes()
	_, err := w.Write(t.b.Bytes())
	return err
}

// text lays a result out. Labels take nine columns.
type text struct {
	b bytes.Buffer
	r *Result
}

// line writes a label and the parts that are not empty, three spaces apart.
func (t *text) line(label string, parts ...string) {
	var known []string
	for _, p := range parts {
		if p != "" {
			known = append(known, p)
		}
	}
	if len(known) == 0 {
		return
	}
	fmt.Fprintf(&t.b, "%-8s %s\n", label, strings.Join(known, "   "))
}

func (t *text) heading() {
	t.title("replay")
	t.page()
	t.device()
	t.pools()
	t.b.WriteByte('\n')
}

func (t *text) title(verb string) {
	r := t.r
	trace := r.Trace
	if r.TraceSHA256 == nil {
		trace += fmt.Sprintf(", seed %d", r.Seed)
	}
	fmt.Fprintf(&t.b, "kvferry %s · %s · %s requests · %s tokens\n", verb, trace, count(r.Requests), millions(r.Tokens))
}

func (t *text) page() {
	r := t.r
	if r.Bookkeeping {
		t.line("page", fmt.Sprintf("%s tokens, no bytes: bookkeeping only", count(r.PageSize)))
	} else {
		t.line("page", fmt.Sprintf("%s tokens, %s: %s; 1 token = %s", count(r.PageSize), figures.Size(r.PageBytes), t.geometry(), figures.Size(r.PageBytes/max(r.PageSize, 1))))
	}
}

// device says on what the pages are, when that is not the host.
func (t *text) device() {
	r := t.r
	if r.DeviceModel == nil {
		return
	}
	pinned := ""
	if r.PinnedBytes != nil && r.PageableBytes != nil {
		pinned = fmt.Sprintf("host pool pinned: %s of %s", figures.Size(*r.PinnedBytes), figures.Size(*r.PinnedBytes+*r.PageableBytes))
	}
	t.line("device", fmt.Sprintf("%s, %s", r.Device, *r.DeviceModel), "copier "+r.Copier, pinned)
}

func (t *text) pools() {
	r := t.r
	ready := ""
	if r.WarmupSeconds != nil {
		ready = "ready in " + seconds(*r.WarmupSeconds)
	}
	pool := func(name string, pages int64) string {
		s := fmt.Sprintf("%s %s pages", name, count(pages))
		if r.PageBytes > 0 {
			s += fmt.Sprintf(" (%s)", figures.Size(pages*r.PageBytes))
		}
		return s
	}
	t.line("pools", pool("device", r.DevicePages), pool("host", r.HostPages), r.Tiers, ready)
}

func (t *text) geometry() string {
	r := t.r
	var s strings.Builder
	if r.Model != nil {
		s.WriteString(*r.Model + ", ")
	}
	fmt.Fprintf(&s, "%d %s", r.Layers, figures.Plural(r.Layers, "layer", "layers"))
	if r.KVHeads != nil && r.HeadDim != nil {
		fmt.Fprintf(&s, " × %d KV %s × %d %s", *r.KVHeads, figures.Plural(*r.KVHeads, "head", "heads"), *r.HeadDim, figures.Plural(*r.HeadDim, "dim", "dims"))
	}
	if r.LatentDim != nil {
		fmt.Fprintf(&s, " × %d latent %s", *r.LatentDim, figures.Plural(*r.LatentDim, "dim", "dims"))
	}
	for _, name := range []*string{r.DType, r.Layout} {
		if name != nil {
			s.WriteString(", " + *name)
		}
	}
	return s.String()
}

// pages says what became of every page that was looked up.
func (t *text) pages() {
	r := t.r
	row := func(label string, n int64, rest string) {
		s := fmt.Sprintf("%-16s %11s  %7s  %s", label, count(n), percent(n, r.PagesLookedUp), rest)
		t.b.WriteString(strings.TrimRight(s, " ") + "\n")
	}
	ratio := ""
	if r.HitRatio != nil {
		ratio = fmt.Sprintf("hit ratio %.4f", *r.HitRatio)
	}
	s := fmt.Sprintf("%-16s %11s pages   %s", "looked up", count(r.PagesLookedUp), ratio)
	t.b.WriteString(strings.TrimRight(s, " ") + "\n")
	row("hit", r.Hits(), "")
	row("  device", r.PagesHitDevice, bar(r.PagesHitDevice, r.PagesLookedUp))
	row("  host", r.PagesHitHost, bar(r.PagesHitHost, r.PagesLookedUp))
	row("missed", r.Misses(), "")
	row("  never stored", r.MissNeverStored, "the first time that these tokens were seen")
	row("  evicted", r.MissEvicted, t.whyEvicted())
	row("  beyond prefix", r.MissBeyondPrefix, "there, but an earlier page was missing")
	row("  held back", r.MissHeldBack, "there, but one token must be computed")
	row("  partial", r.MissPartial, "the last page of a prompt, never shared")
	if r.MissHistoryFull > 0 {
		row("  history full", r.MissHistoryFull, "never stored or evicted: the history of evictions overflowed")
	}
	if r.MissOther > 0 {
		row("  other", r.MissOther, "being written, corrupted, or not copied")
	}
	t.b.WriteByte('\n')
}

// compare sets the hit ratio beside those of other policies over as many pages.
func (t *text) compare() {
	r := t.r
	if r.HitRatio == nil || r.LRUHitRatio == nil || r.OptimumHitRatio == nil {
		return
	}
	fmt.Fprintf(&t.b, "%-16s %11s  %7s  for %s pages, device and host together\n", "compare", "hit ratio", "share", count(r.DevicePages+r.HostPages))
	for _, p := range []struct {
		name  string
		ratio float64
	}{{"this run", *r.HitRatio}, {"LRU", *r.LRUHitRatio}, {"optimum", *r.OptimumHitRatio}} {
		s := fmt.Sprintf("  %-14s %11.4f  %7s  %s", p.name, p.ratio, shareOf(p.ratio, *r.OptimumHitRatio), bar(parts(p.ratio), parts(1)))
		t.b.WriteString(strings.TrimRight(s, " ") + "\n")
	}
	t.b.WriteString("  LRU: one list, of one request the deepest page first.  Optimum: knows what comes, an upper bound.\n\n")
}

func (t *text) whyEvicted() string {
	r := t.r
	why := "the host pool was full"
	if r.HostPages == 0 {
		why = "the device was full, and there is no host pool"
	}
	switch {
	case r.MissEvicted == 0:
		return "stored once, and gave way to others"
	case r.HostPagesSuggested != nil:
		return fmt.Sprintf("%s: --host-pages %d would keep most of them", why, *r.HostPagesSuggested)
	}
	return why
}

// bytes says what was written, moved and compared.
func (t *text) bytes() {
	r := t.r
	moved := func(what string, n *int64) string {
		if n == nil {
			return ""
		}
		return what + " " + volume(*n)
	}
	t.line("bytes", moved("written", r.BytesWritten), moved("offloaded", r.BytesOffloaded), moved("reloaded", r.BytesReloaded))
	switch {
	case r.Verify == VerifyOff && !r.Bookkeeping:
		t.line("verify", "off: what came back was not looked at")
	case r.BytesVerified != nil && r.Mismatches != nil:
		what := "every byte"
		if r.Verify == VerifySample {
			what = "three lines a chunk"
		}
		t.line("verify", fmt.Sprintf("%s of %s hit pages: %s, %s %s", what, count(r.Hits()), volume(*r.BytesVerified),
			count(*r.Mismatches), figures.Plural(*r.Mismatches, "mismatch", "mismatches")))
	}
	if r.CheckBytes != nil && r.CheckSeconds != nil {
		when := map[string]string{"always": "xxh3-128 at arrival and departure", "arrival": "xxh3-128 at arrival"}[r.Checks]
		if when == "" {
			t.line("checks", "off: host pages were not looked at")
		} else {
			t.line("checks", fmt.Sprintf("%s: %s in %s", when, volume(*r.CheckBytes), seconds(*r.CheckSeconds)))
		}
	}
	if r.BytesWritten != nil || r.BytesVerified != nil || r.CheckBytes != nil {
		t.b.WriteByte('\n')
	}
}

// speed says how fast it was, against what is possible, and where time went.
func (t *text) speed() {
	r := t.r
	if r.CopyGBps != nil {
		share := func(of *float64, name string, ceiling *float64) string {
			if of == nil || ceiling == nil {
				return ""
			}
			return fmt.Sprintf("%.2f of %s (%.1f GB/s)", *of, name, *ceiling)
		}
		t.line("copy", fmt.Sprintf("%.1f GB/s on one stream", *r.CopyGBps),
			share(r.ShareOfC, "C", r.CeilingCGBps), share(r.ShareOfR, "R", r.CeilingRGBps))
	}
	if r.LookupsPerS != nil && r.Bookkeeping { // else it is mostly the time of copies
		t.line("books", millions(int64(*r.LookupsPerS))+" look-ups a second")
	}
	quantiles := func(p50, p99 *float64) string {
		if p50 == nil || p99 == nil {
			return ""
		}
		return fmt.Sprintf("p50 %s  p99 %s", micros(*p50), micros(*p99))
	}
	reload := quantiles(r.ReloadP50us, r.ReloadP99us)
	if reload != "" {
		reload = "reload " + reload
	}
	t.line("match", quantiles(r.MatchP50us, r.MatchP99us), reload)
	t.line("time", t.time())

	var memory []string
	if r.PeakRSSBytes != nil {
		memory = append(memory, "peak "+figures.Size(*r.PeakRSSBytes))
	}
	if r.PoolBytes > 0 {
		memory = append(memory, "pools "+figures.Size(r.PoolBytes))
	}
	if r.GhostTableBytes != nil {
		memory = append(memory, "history of evictions "+figures.Size(*r.GhostTableBytes))
	}
	t.line("memory", memory...)
}

func (t *text) time() string {
	r := t.r
	if r.Seconds == nil {
		return ""
	}
	s := seconds(*r.Seconds)
	rest := "books"
	if r.CheckSeconds != nil && r.WaitSeconds == nil {
		rest = "checks and books"
	}
	var parts []string
	for _, p := range []struct {
		what string
		s    *float64
	}{
		{"write", r.WriteSeconds},
		{"copy", r.CopySeconds},
		{"waiting for copies", r.WaitSeconds},
		{"verify", r.VerifySeconds},
		{rest, r.BooksSeconds},
	} {
		if p.s != nil {
			parts = append(parts, p.what+" "+strings.TrimSuffix(seconds(*p.s), " s"))
		}
	}
	if len(parts) > 0 {
		s += " (" + strings.Join(parts, ", ") + ")"
	}
	return s
}

func (t *text) footnotes() {
	r := t.r
	if r.ShareOfC != nil || r.ShareOfR != nil {
		t.b.WriteString("\nC: Go's copy, 64 MiB pieces.  R: the same rows with no bookkeeping.  Same run, one thread.\n")
	}
	t.warnings()
}

func (t *text) warnings() {
	for i, w := range t.r.Warnings {
		if i == 0 {
			t.b.WriteByte('\n')
		}
		t.line("warning", w)
	}
}
