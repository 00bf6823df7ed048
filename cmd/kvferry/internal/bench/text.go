package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
)

// WriteJSON writes the report as one indented JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// WriteText writes the report for people: a table a section, with a bar for the
// value, which is as long as the largest of the section says.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "kvferry bench %s · %d %s after %d to warm up · %d %s, %s time · %s/%s\n", r.Verb, r.Runs, figures.Plural(r.Runs, "run", "runs"),
		r.WarmUps, r.Threads, figures.Plural(r.Threads, "thread", "threads"), r.Clock, r.OS, r.Arch)
	for _, s := range r.Settings {
		fmt.Fprintf(&b, "%-9s%s\n", s.Name, s.Value)
	}
	for i := range r.Sections {
		r.Sections[i].write(&b)
	}
	if r.Crossovers != "" {
		fmt.Fprintf(&b, "\nbest way of copying, by bytes a row and rows of a rectangle; in brackets what was not measured\n%s", r.Crossovers)
	}
	fmt.Fprintf(&b, "\nMedians of the runs, and (least–most). A ratio is made in each run.\n%s\n", r.legend)
	if r.Unjudged != "" {
		fmt.Fprintf(&b, "Goals are not judged: %s.\n", r.Unjudged)
	}
	fmt.Fprintf(&b, "Took %.1f s. For machines: --json\n", r.Seconds)
	for _, s := range r.Warnings {
		fmt.Fprintf(&b, "warning  %s\n", s)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// barWidth is the length of the longest bar, in characters.
const barWidth = 10

func (s *Section) write(b *bytes.Buffer) {
	fmt.Fprintf(b, "\n%s\n", s.Title)
	most := 0.0
	for _, l := range s.Lines {
		most = max(most, l.Value.Median)
	}
	heading := []string{"", s.Unit, "", ""}
	var others []string // columns of comparisons, in the order of their first use
	for _, l := range s.Lines {
		for _, x := range l.Beside {
			if !slices.Contains(others, x.Of) {
				others = append(others, x.Of)
			}
		}
	}
	for _, o := range others {
		heading = append(heading, "of "+o)
	}
	rows := [][]string{append(heading, "goal")}
	for _, l := range s.Lines {
		row := []string{"  " + l.Name, figure(l.Value.Median), l.Value.spread(figure), bar(l.Value.Median / most)}
		for _, o := range others {
			row = append(row, l.share(o))
		}
		rows = append(rows, append(row, l.goals()))
	}
	writeTable(b, rows)
}

// share shows the ratio to another figure, and that figure.
func (l *Line) share(of string) string {
	for _, x := range l.Beside {
		if x.Of == of {
			return strings.Join(strings.Fields(ratio(x.Ratio.Median)+" "+x.Ratio.spread(ratio)+" of "+figure(x.Value.Median)), " ")
		}
	}
	return ""
}

func (l *Line) goals() string {
	var all []string
	for _, g := range l.Goals {
		sign, bound := "≥", g.Least
		if g.Most != nil {
			sign, bound = "≤", g.Most
		}
		text := sign + " " + figure(*bound)
		if g.Of != "" {
			text = g.Of + " " + sign + " " + strconv.FormatFloat(*bound, 'g', 4, 64)
		}
		all = append(all, text+g.verdict())
	}
	return strings.Join(all, "  ")
}

// verdict says whether a goal is met, and what it got where the figure beside it is
// rounded to the other side of the bound.
func (g *Goal) verdict() string {
	if g.Met == nil {
		return ""
	}
	mark := " ✗"
	if *g.Met {
		mark = " ✓"
	}
	shown := ratio(g.Got)
	if g.Of == "" {
		shown = strings.ReplaceAll(figure(g.Got), ",", "")
	}
	says := func(text string) bool {
		x, err := strconv.ParseFloat(text, 64)
		return err == nil && (g.Least == nil || x >= *g.Least) && (g.Most == nil || x <= *g.Most)
	}
	if says(shown) == *g.Met {
		return mark
	}
	for digits := 3; says(shown) != *g.Met && digits <= 17; digits++ {
		shown = strconv.FormatFloat(g.Got, 'f', digits, 64)
	}
	return mark + " (" + shown + ")"
}

func (s Stat) spread(show func(float64) string) string {
	if s.Low == s.High {
		return ""
	}
	return "(" + show(s.Low) + "–" + show(s.High) + ")"
}

// ratio shows two digits after the point, and more of what is nearly nothing.
func ratio(x float64) string {
	if x > 0 && x < 0.1 {
		return strconv.FormatFloat(x, 'f', 4, 64)
	}
	return strconv.FormatFloat(x, 'f', 2, 64)
}

// figure shows three digits or so, with separators from ten thousand on.
func figure(x float64) string {
	switch {
	case x < 10:
		return strconv.FormatFloat(x, 'f', 2, 64)
	case x < 100:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	s := strconv.FormatFloat(math.Round(x), 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// bar is a bar for part of 1, in eighths of a character.
func bar(part float64) string {
	if !(part > 0) {
		return ""
	}
	eighths := int(math.Round(min(part, 1) * barWidth * 8))
	s := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		s += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return s
}

// writeTable writes rows in columns as wide as their widest cell. The second
// column, the figure, is flushed right.
func writeTable(b *bytes.Buffer, rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			if widths[i] == 0 {
				continue
			}
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i == 1 {
				cell, pad = pad+cell, ""
			}
			line.WriteString(cell + pad + "  ")
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}

// size shows bytes.
func size(n int64) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.FormatInt(n>>20, 10) + " MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.FormatInt(n>>10, 10) + " KiB"
	}
	return strconv.FormatInt(n, 10) + " B"
}
