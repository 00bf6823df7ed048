package copier

import (
	"fmt"
	"math/bits"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
)

// Way is how an accelerator copies the rows of a box. All ways move the same bytes.
type Way uint8

// The ways.
const (
	InRectangles Way = iota // 2-D and 3-D copies: the fewest calls
	InBatches               // linear copies, thousands in one call
	OneByOne                // a linear copy, and a call, a row
)

func (w Way) String() string { return [...]string{"rectangle", "batch", "loop"}[w] }

// Link is what a copy goes over: each has its own costs.
type Link uint8

// The links.
const (
	ToDevice Link = iota // from host memory
	ToHost
	OnDevice // and between devices
)

func (l Link) String() string {
	return [...]string{"host to device", "device to host", "device to device"}[l]
}

// linkOf returns the link of a copy between memories of these devices.
func linkOf(dst, src string) Link {
	const host = "host"
	switch {
	case src == host && dst != host:
		return ToDevice
	case dst == host && src != host:
		return ToHost
	}
	return OnDevice
}

const (
	links  = 3
	widths = 5 // classes of bytes a row
	counts = 4 // classes of rows a call
)

// widthOf is the class of rows of n bytes: up to 4 KiB, 16 KiB, 64 KiB, 256 KiB, more.
func widthOf(n int64) int { return min(max(0, bits.Len64(uint64(n-1))-11)/2, widths-1) }

// countOf is the class of calls of n rows: 1, 2 to 7, 8 to 31, more.
func countOf(n int) int {
	switch {
	case n < 2:
		return 0
	case n < 8:
		return 1
	case n < 32:
		return 2
	}
	return 3
}

var (
	widthNames = [widths]string{"4 KiB", "16 KiB", "64 KiB", "256 KiB", "more"}
	countNames = [counts]string{"1", "2-7", "8-31", "32+"}
)

// Crossovers say which way is best for a row of so many bytes in a rectangle of so
// many rows, over each link. A way that the engine lacks is never taken, whatever they
// say. [Calibrate] measures them; the zero value, like [DefaultCrossovers], is a guess.
type Crossovers struct {
	ways     [links][widths][counts]Way
	measured [links][widths][counts]bool
}

// DefaultCrossovers are a guess that is good where calls cost much more than rows: what
// is a rectangle of 2 rows or more is copied as one, single rows in batches.
func DefaultCrossovers() Crossovers {
	var c Crossovers
	for l := range links {
		for w := range widths {
			c.ways[l][w][0] = InBatches
		}
	}
	return c
}

// every is w for all boxes.
func every(w Way) Crossovers {
	var c Crossovers
	for l := range links {
		for i := range widths {
			c.ways[l][i] = [counts]Way{w, w, w, w}
		}
	}
	return c
}

// Way returns the way for rectangles of rows of width bytes over l.
func (c *Crossovers) Way(l Link, width int64, rows int) Way {
	return c.ways[l][widthOf(width)][countOf(rows)]
}

// Measured says how many of the table's cells were measured, and how many there are.
func (c *Crossovers) Measured() (cells, of int) {
	for l := range links {
		for w := range widths {
			for n := range counts {
				if c.measured[l][w][n] {
					cells++
				}
			}
		}
	}
	return cells, links * widths * counts
}

// String is the table for people: bytes a row downwards, rows a rectangle across. A
// guess is in brackets.
func (c *Crossovers) String() string {
	var b strings.Builder
	for l := range Link(links) {
		fmt.Fprintf(&b, "%-18s", l)
		for _, n := range countNames {
			fmt.Fprintf(&b, "%-13s", n)
		}
		b.WriteString("rows\n")
		for w := range widths {
			fmt.Fprintf(&b, "  %-16s", widthNames[w])
			for n := range counts {
				name := c.ways[l][w][n].String()
				if !c.measured[l][w][n] {
					name = "(" + name + ")"
				}
				fmt.Fprintf(&b, "%-13s", name)
			}
			b.WriteByte('\n')
		}
	}
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

// rowsOfACall returns how many rows of a box one call of an engine can copy: all of
// them where two axes nest alike on both sides, or the longer axis.
func rowsOfACall(b *kv.Box, l *device.EngineLimits) int {
	rows, slices := b.Rows, b.Slices
	switch {
	case l.MaxPitch == 0:
		return 1
	case rows == 1 || slices == 1:
		if !l.Boxes && (rows > 1 && max(b.DstPitch, b.SrcPitch) > l.MaxPitch || slices > 1 && max(b.DstSlice, b.SrcSlice) > l.MaxPitch) {
			return 1 // too far apart for a pitch, and no third axis to step over it
		}
		return rows * slices
	case l.Boxes && (nests(b.DstPitch, b.DstSlice, rows) && nests(b.SrcPitch, b.SrcSlice, rows) ||
		nests(b.DstSlice, b.DstPitch, slices) && nests(b.SrcSlice, b.SrcPitch, slices)):
		return rows * slices
	}
	return max(rows, slices)
}

// nests reports whether steps of outer bytes each hold n steps of inner ones, as a 3-D
// copy has it.
func nests(inner, outer int64, n int) bool { return outer%inner == 0 && outer/inner >= int64(n) }

// best returns the way that took the least time. Ways with more calls must gain more than
// noise. A time of 0 is of a way that there is not.
func best(times [3]float64) (way Way, ok bool) {
	const least = 1.05
	for w, t := range times {
		if t > 0 && (!ok || t*least < times[way]) {
			way, ok = Way(w), true
		}
	}
	return way, ok
}
