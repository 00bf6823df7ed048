package page

import (
	"fmt"
	"math/bits"
)

// runlist is a set of disjoint runs of pages, no two of them adjacent: put joins
// what touches. Everything in it is O(1), except among the runs that are longer
// than exactLen pages, of which there are fewer than pages/exactLen.
//
// What must hold: tags[id].size is the length of the run that starts or ends at
// id, and 0 for every other page, in the set or not; each run is in the list of
// its class, by its first page; present has the bit of each class that is not
// empty.
type runlist struct {
	tags    []tag
	heads   [numClasses]int32 // first run of each class; meaningless when empty
	present [2]uint64
}

// tag is what a page says about the run it starts or ends.
type tag struct {
	size       int32
	prev, next int32 // first pages of the neighbours in the class; noRun at its ends
}

const (
	// Runs of up to exactLen pages have a class for each length, so the best fit
	// is the first run of a class; longer ones a class for each power of two.
	exactLen   = 64
	numClasses = exactLen + 25
	noRun      = -1
)

// class returns the class of runs of n pages, n ≥ 1. It never falls as n grows.
func class(n int32) int {
	if n <= exactLen {
		return int(n) - 1
	}
	return exactLen + bits.Len32(uint32(n)) - 7
}

func (r *runlist) init(capacity int) { r.tags = make([]tag, capacity) }

// take removes n pages, or as many as the longest run has, from the front of one
// run, and returns the first of them and their number. The set is not empty.
func (r *runlist) take(n int32) (first, got int32) {
	first = r.fit(n)
	if first == noRun {
		first = r.longest() // may still be long enough: fit does not look at all
	}
	size := r.tags[first].size
	r.unlink(first)
	if size <= n {
		return first, size
	}
	r.link(first+n, size-n)
	return first, n
}

// put adds the n pages from first on. None of them is in the set.
func (r *runlist) put(first, n int32) {
	if first > 0 {
		if left := r.tags[first-1].size; left != 0 {
			first -= left
			n += left
			r.unlink(first)
		}
	}
	if end := int(first) + int(n); end < len(r.tags) {
		if right := r.tags[end].size; right != 0 {
			r.unlink(int32(end))
			n += right
		}
	}
	r.link(first, n)
}

// fit returns a run that has n pages: if n is up to exactLen, the shortest there
// is. Longer ones share a class with runs that are too short; the first few of it
// are looked at, and then a run of a higher class is preferred to a long search.
func (r *runlist) fit(n int32) int32 {
	c := class(n)
	if c >= exactLen {
		const few = 16
		run := int32(noRun)
		if r.has(c) {
			run = r.heads[c]
		}
		for range few {
			if run == noRun {
				break
			}
			if r.tags[run].size >= n {
				return run
			}
			run = r.tags[run].next
		}
		c++
	}
	if c = r.nextClass(c); c != noRun {
		return r.heads[c]
	}
	return noRun
}

// has reports whether class c has a run.
func (r *runlist) has(c int) bool { return r.present[c/64]&(1<<(c%64)) != 0 }

// nextClass returns the lowest class from c on that is not empty, or noRun.
func (r *runlist) nextClass(c int) int {
	if c < 64 {
		if w := r.present[0] >> c; w != 0 {
			return c + bits.TrailingZeros64(w)
		}
		c = 64
	}
	if w := r.present[1] >> (c - 64); w != 0 {
		return c + bits.TrailingZeros64(w)
	}
	return noRun
}

// longest returns a run than which none is longer, or noRun.
func (r *runlist) longest() int32 {
	if r.present[1] == 0 {
		if r.present[0] == 0 {
			return noRun
		}
		return r.heads[bits.Len64(r.present[0])-1]
	}
	best := r.heads[64+bits.Len64(r.present[1])-1]
	for run := r.tags[best].next; run != noRun; run = r.tags[run].next {
		if r.tags[run].size > r.tags[best].size {
			best = run
		}
	}
	return best
}

func (r *runlist) largest() int {
	if run := r.longest(); run != noRun {
		return int(r.tags[run].size)
	}
	return 0
}

// link makes the n pages from first on a run. The one that came last is handed
// out first: its pages are the likeliest to be in the processor's caches.
func (r *runlist) link(first, n int32) {
	c := class(n)
	next := int32(noRun)
	if r.has(c) {
		next = r.heads[c]
		r.tags[next].prev = first
	}
	r.present[c/64] |= 1 << (c % 64)
	r.heads[c] = first
	r.tags[first+n-1].size = n
	r.tags[first] = tag{size: n, prev: noRun, next: next}
}

func (r *runlist) unlink(first int32) {
	t := r.tags[first]
	switch c := class(t.size); {
	case t.prev != noRun:
		r.tags[t.prev].next = t.next
	case t.next != noRun:
		r.heads[c] = t.next
	default:
		r.present[c/64] &^= 1 << (c % 64)
	}
	if t.next != noRun {
		r.tags[t.next].prev = t.prev
	}
	r.tags[first].size = 0
	r.tags[first+t.size-1].size = 0
}

// check compares the runs with the pages that should be in them.
func (r *runlist) check(in []bool) error {
	runs := 0
	for id := 0; id < len(in); id++ {
		if !in[id] {
			if r.tags[id].size != 0 {
				return fmt.Errorf("page %d ends a free run and is not free", id)
			}
			continue
		}
		first := id
		for id+1 < len(in) && in[id+1] {
			id++
			if last := id+1 == len(in) || !in[id+1]; !last && r.tags[id].size != 0 {
				return fmt.Errorf("page %d is inside a free run and ends another", id)
			}
		}
		if n := int32(id - first + 1); r.tags[first].size != n || r.tags[id].size != n {
			return fmt.Errorf("page %d starts a free run of %d pages, which says %d and %d",
				first, n, r.tags[first].size, r.tags[id].size)
		}
		runs++
	}
	for c := r.nextClass(0); c != noRun; c = r.nextClass(c + 1) {
		prev := int32(noRun)
		for run := r.heads[c]; run != noRun; prev, run = run, r.tags[run].next {
			if runs--; runs < 0 || !in[run] || run > 0 && in[run-1] || r.tags[run].size == 0 || class(r.tags[run].size) != c || r.tags[run].prev != prev {
				return fmt.Errorf("page %d is in the list of class %d and should not be there", run, c)
			}
		}
	}
	if runs != 0 {
		return fmt.Errorf("%d free runs are in no list", runs)
	}
	return nil
}
