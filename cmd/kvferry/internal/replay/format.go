package replay

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
)

// How numbers are written for people. Sizes of memory are binary (KiB), bytes
// that moved are decimal (GB), as in every other text of kvferry.

// count writes a number with thousands separators: 1,234,567.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if n < 0 {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// millions writes a large count briefly: 144.8 M.
func millions(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.1f G", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f M", float64(n)/1e6)
	}
	return count(n)
}

// volume writes an amount of bytes that moved: 29.5 GB.
func volume(n int64) string {
	units := []string{"B", "kB", "MB", "GB", "TB", "PB"}
	v, u := float64(n), 0
	for v >= 1000 && u < len(units)-1 {
		v /= 1000
		u++
	}
	if u == 0 {
		return fmt.Sprintf("%.0f B", v)
	}
	return figures.Three(v) + " " + units[u]
}

// micros writes a time given in microseconds: 95 µs, 1.90 ms.
func micros(us float64) string {
	switch {
	case us < 9.995:
		return fmt.Sprintf("%.1f µs", us)
	case us < 999.5:
		return fmt.Sprintf("%.0f µs", us)
	case us < 999.5e3:
		return figures.Three(us/1e3) + " ms"
	}
	return seconds(us / 1e6)
}

// seconds writes a time given in seconds: 0.31 s, 8.9 s, 125 s.
func seconds(s float64) string {
	switch {
	case s < 0.995:
		return fmt.Sprintf("%.2f s", s)
	case s < 99.95:
		return fmt.Sprintf("%.1f s", s)
	}
	return fmt.Sprintf("%.0f s", s)
}

// percent writes part of whole: 5.5 %. It is blank when there is no whole.
func percent(part, whole int64) string {
	if whole == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// bar draws part of whole in eighths of a character; all of it is barWidth
// characters. Anything that is not nothing shows.
func bar(part, whole int64) string {
	const barWidth = 50
	if whole <= 0 || part <= 0 {
		return ""
	}
	eighths := int(math.Round(float64(part) / float64(whole) * barWidth * 8))
	eighths = min(max(eighths, 1), barWidth*8)
	s := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		s += string([]rune("▏▎▍▌▋▊▉")[rest-1])
	}
	return s
}

// parts writes a part of 1 as a whole number, for bar.
func parts(v float64) int64 { return int64(math.Round(v * 1e6)) }

// shareOf writes part of whole, both hit ratios: 59.7 %.
func shareOf(part, whole float64) string { return percent(parts(part), parts(whole)) }
