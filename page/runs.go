package page

import (
	"cmp"
	"fmt"
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

func sortByDst(pairs []Pair) {
	byDst := func(a, b Pair) int { return cmp.Compare(a.Dst, b.Dst) }
	if !slices.IsSortedFunc(pairs, byDst) {
		slices.SortFunc(pairs, byDst)
	}
}

// object is how errors name a page.
func object(id ID) string { return fmt.Sprintf("page %d", id) }
