package replay

import (
	"math"
	"slices"
)

// mostOf is the part of the evicted pages that a suggested pool would have kept.
const mostOf = 0.9

// suggestHostPages works out a host pool that would have kept most of the pages
// that were evicted before they were asked for again, nil when none were: a
// quantile of how long ago they had been used. evicted lists their places.
func suggestHostPages(u *uses, o Options, evicted []int32) *int64 {
	var distances []int32
	for _, place := range evicted {
		if d := u.distance[place]; d > 0 {
			distances = append(distances, d)
		}
	}
	if len(distances) == 0 {
		return nil
	}
	slices.Sort(distances)
	need := int64(distances[int(mostOf*float64(len(distances)-1))]) - int64(o.DevicePages)
	if need <= int64(o.HostPages) {
		return nil
	}
	// Two digits say as much as the estimate is worth.
	unit := int64(math.Pow10(max(0, int(math.Log10(float64(need)))-1)))
	return new((need + unit - 1) / unit * unit)
}
