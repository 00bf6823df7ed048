package page

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// AppendRuns sorts pairs by destination, in place, and appends to runs the
// fewest runs that copy the same pages: ascending, disjoint, and none could be
// joined to the next. A destination named twice is refused (fault.Invalid) and
// runs comes back as it was.
//
// Ids are not compared with any cache: whoever turns runs into addresses checks
// their range.
func AppendRuns(runs []Run, pairs []Pair) ([]Run, error) {
	sortByDst(pairs)
	n := len(runs)
	for i, p := range pairs {
		if i > 0 {
			if pairs[i-1].Dst == p.Dst {
				return runs[:n], fault.New(fault.Invalid, object(p.Dst),
					"is the destination of two pairs, from pages %d and %d", pairs[i-1].Src, p.Src)
			}
			last := &runs[len(runs)-1]
			if int(last.Dst)+last.N == int(p.Dst) && int(last.Src)+last.N == int(p.Src) {
				last.N++
				continue
			}
		}
		runs = append(runs, Run{Dst: p.Dst, Src: p.Src, N: 1})
	}
	return runs, nil
}

// CheckDisjoint refuses (fault.Invalid) pairs of which one writes a page that
// another, or the pair itself, reads. Copies inside one cache may run in any
// order, so such pairs would make the result depend on it. It sorts pairs by
// destination, in place.
func CheckDisjoint(pairs []Pair) error {
	if len(pairs) == 0 {
		return nil
	}
	sortByDst(pairs)
	first, last := pairs[0].Dst, pairs[len(pairs)-1].Dst
	for _, p := range pairs {
		if p.Src < first || p.Src > last {
			continue // the usual case: sources and destinations lie apart
		}
		i, found := slices.BinarySearchFunc(pairs, p.Src, func(q Pair, id ID) int { return cmp.Compare(q.Dst, id) })
		if found {
			return fault.New(fault.Invalid, object(p.Src),
				"is copied to page %d and is itself the destination of page %d", p.Dst, pairs[i].Src).
				Hint("copy in two steps, or through a page that is in neither list")
		}
	}
	return nil
}

func byDst(a, b Pair) int { return cmp.Compare(a.Dst, b.Dst) }

func sortByDst(pairs []Pair) {
	switch {
	case slices.IsSortedFunc(pairs, byDst):
	case len(pairs) < leastRadix:
		slices.SortFunc(pairs, byDst)
	default:
		lo, hi := pairs[0].Dst, pairs[0].Dst
		for _, p := range pairs {
			lo, hi = min(lo, p.Dst), max(hi, p.Dst)
		}
		radixSort(pairs, lo, bits.Len32(uint32(hi)-uint32(lo)))
	}
}

// leastRadix is the number of pairs from which sorting by digits is faster than by
// comparisons, which is several times as slow for a hundred thousand of them.
const leastRadix = 64

// radixSort sorts pairs, whose destinations less lo differ in their lowest width bits
// only, by these: by the highest digit first, in place (it swaps each pair to the
// stretch of its digit), and then each stretch by the rest. That takes no memory but
// the stack's, as a sort from the lowest digit would.
func radixSort(pairs []Pair, lo ID, width int) {
	const digit = 8
	shift := max(0, width-digit)
	at := func(p Pair) uint8 { return uint8((uint32(p.Dst) - uint32(lo)) >> shift) }
	var next, end [1 << digit]int // of the stretch of each digit: what is not in its place yet
	for _, p := range pairs {
		end[at(p)]++
	}
	sum := 0
	for d, n := range end {
		next[d] = sum
		sum += n
		end[d] = sum
	}
	for d := range next {
		for next[d] < end[d] {
			p := pairs[next[d]]
			for to := at(p); int(to) != d; to = at(p) {
				p, pairs[next[to]] = pairs[next[to]], p
				next[to]++
			}
			pairs[next[d]] = p
			next[d]++
		}
	}
	if shift == 0 {
		return
	}
	from := 0
	for _, to := range end {
		if stretch := pairs[from:to]; len(stretch) < leastRadix {
			slices.SortFunc(stretch, byDst)
		} else {
			radixSort(stretch, lo, shift)
		}
		from = to
	}
}

// object is how errors name a page.
func object(id ID) string { return fmt.Sprintf("page %d", id) }
