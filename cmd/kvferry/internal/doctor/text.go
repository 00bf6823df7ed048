package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// WriteJSON writes the report as one indented JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// WriteText writes the report for people, with colours if asked.
func (r *Report) WriteText(w io.Writer, colours bool) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "kvferry doctor · %s · %s/%s\n", r.Version, r.OS, r.Arch)
	writeSections(&b, r.Sections, colours)
	counts := map[Level]int{}
	for _, s := range r.Sections {
		for _, f := range s.Findings {
			counts[f.Level]++
		}
	}
	fmt.Fprintf(&b, "\n%d green, %d yellow, %d red. Took %.1f s. For machines: --json\n", counts[Green], counts[Yellow], counts[Red], r.Seconds)
	_, err := w.Write(b.Bytes())
	return err
}

// writeSections writes a line for each finding, and one for its remedy.
func writeSections(b *bytes.Buffer, sections []Section, colours bool) {
	width := 0
	for _, s := range sections {
		for _, f := range s.Findings {
			width = max(width, utf8.RuneCountInString(f.Name))
		}
	}
	for _, s := range sections {
		fmt.Fprintf(b, "\n%s\n", s.Title)
		for _, f := range s.Findings {
			fmt.Fprintf(b, "  %s  %s  %s\n", level(f.Level, colours), pad(f.Name, width), oneLine(f.Text))
			if f.Remedy != "" {
				fmt.Fprintf(b, "  %s  → %s\n", strings.Repeat(" ", width+8), oneLine(f.Remedy))
			}
		}
		writeRates(b, s.Rates, s.Whole)
		writeCrossovers(b, s.Crossovers)
	}
}

// writeCrossovers writes the table of the ways of copying.
func writeCrossovers(b *bytes.Buffer, table string) {
	if table == "" {
		return
	}
	b.WriteString("\n  best way of copying, by bytes a row and rows of a rectangle; in brackets what was not measured\n")
	for line := range strings.Lines(table) {
		b.WriteString("  " + line)
	}
}

// level writes a level in its own colour.
func level(l Level, colours bool) string {
	s := pad(l.String(), 6)
	if !colours {
		return s
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", [...]int{32, 33, 31}[l], s)
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// oneLine writes the causes of an error, which may be one a line, behind each other. What
// would move the cursor or change the terminal, in the name of a file, is written out.
func oneLine(s string) string {
	s = strings.Join(strings.FieldsFunc(s, isBreak), "; ")
	if !strings.ContainsFunc(s, unicode.IsControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.IsControl(r) {
			fmt.Fprintf(&b, "\\x%02x", r)
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}

func isBreak(r rune) bool { return r == '\n' || r == '\r' }

// writeRates writes a line for each way and a column for each size.
func writeRates(b *bytes.Buffer, rates []Rate, whole string) {
	if len(rates) == 0 {
		return
	}
	fmt.Fprintf(b, "\n  %-16s", "GB/s, copies of")
	first := rates[0].Way
	for _, r := range rates {
		if r.Way == first {
			fmt.Fprintf(b, "%12s", size(r.Bytes))
		}
	}
	way := ""
	for _, r := range rates {
		if r.Way != way {
			way = r.Way
			fmt.Fprintf(b, "\n  %-16s", way)
		}
		fmt.Fprintf(b, "%12s", fmt.Sprintf("%s %3.0f%%", figure(r.GBs), 100*r.OfWhole))
	}
	fmt.Fprintf(b, "\n  (%s)\n", whole)
}

// seconds writes a time as kvferry replay does: 0.31 s, 8.9 s, 125 s; short ones in
// milliseconds.
func seconds(d time.Duration) string {
	switch s := d.Seconds(); {
	case s < 0.00995:
		return fmt.Sprintf("%.2f ms", 1000*s)
	case s < 0.995:
		return fmt.Sprintf("%.2f s", s)
	case s < 99.95:
		return fmt.Sprintf("%.1f s", s)
	default:
		return fmt.Sprintf("%.0f s", s)
	}
}

// figure writes a rate with three digits.
func figure(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}
