package replay

import (
	"math"
	"slices"

	"github.com/kvferry/kvferry/page"
)

// mostOf is the part of the evicted pages that a suggested pool would have kept.
const mostOf = 0.9

// suggestHostPages works out a host pool that would have kept most of the pages
// that were evicted before they were asked for again, nil when none were. Under
// least recently used a page is kept when no more pages were touched since its
// last use than all pools together hold, so the answer is a quantile of those
// distances. evicted lists the pages by their place among all whole pages.
func suggestHostPages(t *Trace, o Options, evicted []int32) *int64 {
	if len(evicted) == 0 {
		return nil
	}
	total := 0
	for i := range t.Requests {
		_, whole := Pages(t.Requests[i].Input, o.PageSize)
		total += whole
	}
	latest := make([]int32, total+1) // Fenwick tree: 1 at the latest touch of each page
	add := func(i int, d int32) {
		for i++; i < len(latest); i += i & -i {
			latest[i] += d
		}
	}
	upTo := func(i int) (n int64) { // latest touches at place i or before
		for i++; i > 0; i -= i & -i {
			n += int64(latest[i])
		}
		return n
	}
	last := make(map[page.Key]int32, total/2)
	var keys []page.Key
	var distances []int64
	place, distinct := 0, int64(0)
	for i := range t.Requests {
		keys = AppendKeys(keys[:0], page.Key{}, &t.Requests[i], o.PageSize)
		for _, k := range keys {
			was, seen := last[k]
			if seen {
				if len(evicted) > 0 && int(evicted[0]) == place {
					distances = append(distances, distinct-upTo(int(was))+1)
				}
				add(int(was), -1)
			} else {
				distinct++
			}
			if len(evicted) > 0 && int(evicted[0]) == place {
				evicted = evicted[1:]
			}
			add(place, 1)
			last[k] = int32(place)
			place++
		}
	}
	if len(distances) == 0 {
		return nil
	}
	slices.Sort(distances)
	need := distances[int(mostOf*float64(len(distances)-1))] - int64(o.DevicePages)
	if need <= int64(o.HostPages) {
		return nil
	}
	// Two digits say as much as the estimate is worth.
	unit := int64(math.Pow10(max(0, int(math.Log10(float64(need)))-1)))
	return new((need + unit - 1) / unit * unit)
}
