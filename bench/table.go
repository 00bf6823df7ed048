package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// write shows an outcome as a table for people. "Ours to it" is how many times as
// fast ours was.
func (o *outcome) write(w io.Writer) error {
	rows := [][]string{{"", o.Unit, "", "ours to it", "goal", ""}}
	for _, r := range o.Results {
		rows = append(rows, r.cells())
	}
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			if i > 0 && len(row) == 2 {
				continue // a remark runs through all columns
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s\n", o.Title)
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell)))
			if i == 1 && len(row) > 2 {
				cell, pad = pad+cell, ""
			}
			if widths[i] > 0 {
				line.WriteString(cell + pad + "  ")
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *result) cells() []string {
	if r.Value == nil {
		return []string{"  " + r.Name, r.Missing}
	}
	cells := []string{"  " + r.Name, figure(r.Value.Median), spread(*r.Value), "", "", r.Note}
	if r.Faster != nil {
		cells[3] = fmt.Sprintf("%s× %s", figure(r.Faster.Median), spread(*r.Faster))
	}
	if r.Goal != nil {
		mark := "✗"
		if *r.Met {
			mark = "✓"
		}
		cells[4] = fmt.Sprintf("≥ %g× %s", *r.Goal, mark)
	}
	return cells
}

func spread(s stat) string { return "(" + figure(s.Low) + "–" + figure(s.High) + ")" }

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
