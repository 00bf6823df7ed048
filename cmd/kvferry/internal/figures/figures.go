// Package figures writes numbers for people, in the same way in all verbs.
package figures

import (
	"fmt"
	"math"
)

// Size writes an amount of memory: 128 KiB, 1.25 GiB. One that is not whole has as many
// digits as it takes to tell 1.30 GiB from 1.25 GiB.
func Size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, u := float64(n), 0
	for ; v >= 1024 && u < len(units)-1; u++ {
		v /= 1024
	}
	if v == math.Trunc(v) {
		return fmt.Sprintf("%.0f %s", v, units[u])
	}
	return Three(v) + " " + units[u]
}

// Three writes a number with three digits or, if it is 1,000 or more, all of those before
// the point.
func Three(v float64) string {
	switch {
	case v < 9.995:
		return fmt.Sprintf("%.2f", v)
	case v < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// Plural returns the word for n things.
func Plural[N int | int64](n N, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
