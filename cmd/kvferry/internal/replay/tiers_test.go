package replay

import (
	"math"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/evict"
)

// twoTiers is what a device pool and a host pool hold when nothing is ever in
// flight: one list each, the oldest page goes first. It says what the ways of
// keeping a page in both are meant to hit, without the store's machinery.
type twoTiers struct {
	tiers        string
	device, host int // pages of the pools
	onDevice     evict.LRU
	onHost       evict.LRU
}

// request looks a path up and uses it. It returns how many of its pages were
// there.
func (s *twoTiers) request(path []int32, limit int) int64 {
	found := hits(path, len(path), func(p int32) bool { return s.onDevice.Contains(p) || s.onHost.Contains(p) })
	// The pages of the running request are nobody's victims: they leave the lists
	// and take their room along.
	copies := 0
	hasCopy := make([]bool, len(path))
	for i, p := range path {
		s.onDevice.Remove(p)
		hasCopy[i] = s.onHost.Remove(p)
		if hasCopy[i] && s.tiers != Exclusive { // where a promotion moves the page
			copies++
		}
	}
	// The device makes room for the whole path: what leaves it is the most recent
	// page of the host, whether or not the host had it.
	for _, v := range s.onDevice.AppendOldest(nil, s.onDevice.Len()+len(path)-s.device) {
		s.putOnHost(v, copies)
	}
	for i, p := range slices.Backward(path) {
		s.onDevice.Insert(p)
		switch {
		case s.tiers == WriteThrough: // a page that is used has a copy, old or new
			if hasCopy[i] {
				copies--
			}
			s.putOnHost(p, copies)
		case s.tiers == Inclusive && hasCopy[i]: // the copy that there is was used too
			copies--
			s.putOnHost(p, copies)
		}
	}
	return min(found, int64(limit))
}

// putOnHost makes p the most recent page of the host, whose oldest pages make
// room; held pages are not in its list.
func (s *twoTiers) putOnHost(p int32, held int) {
	s.onHost.Remove(p)
	s.onHost.AppendOldest(nil, s.onHost.Len()+held+1-s.host)
	if s.onHost.Len()+held < s.host {
		s.onHost.Insert(p)
	}
}

func TestTiers_TheRuleOfEachGivesItsReference(t *testing.T) {
	n := number(realTrace(t), IDTokens)
	for _, x := range []struct {
		tiers                string
		small, middle, large float64 // device 1,024, 2,048, 5,000 pages, 10,000 with the host
		hits                 [3]int64
	}{
		{Exclusive, 0.2149, 0.2149, 0.2149, [3]int64{62_005, 62_005, 62_005}},
		{Inclusive, 0.2134, 0.2115, 0.2091, [3]int64{61_560, 61_010, 60_332}},
		{WriteThrough, 0.2004, 0.1845, 0.1729, [3]int64{57_828, 53_230, 49_885}},
	} {
		for i, device := range []int{1_024, 2_048, 5_000} {
			want := [...]float64{x.small, x.middle, x.large}[i]
			s := &twoTiers{tiers: x.tiers, device: device, host: 10_000 - device}
			var total int64
			for r, path := range n.paths {
				total += s.request(path, n.limits[r])
			}
			if got := float64(total) / 288_500; math.Abs(got-want) > 0.00006 || total != x.hits[i] {
				t.Errorf("%s, %d device pages: %d hits, ratio %.5f, the reference is %.4f (%d)", x.tiers, device, total, got, want, x.hits[i])
			}
		}
	}
}
