package replay

import (
	"math"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// maxUses is the most whole pages of a trace that can be compared or swept. Each
// takes up to 90 bytes while the trace is read, so it bounds that to some
// 1.4 GiB; the 276,491 pages of an hour of real chat take 25 MiB.
const maxUses = 1 << 24

// never is the next use of a page that is not worth keeping.
const never = math.MaxInt32

// uses says, for every whole page that a trace looks up, how long ago it was last
// used and when it is next. A use has a place: whole pages are numbered request by
// request, root first. It is immutable once made.
//
// What a policy would have hit follows from that alone, without a byte being moved
// and without page ids:
//
//   - Least recently used, deepest page first, is a stack. After each request its
//     pages are the most recent, the root most of all, and a pool of n pages holds
//     the n most recent of all pages, so a page is hit if and only if its distance
//     is at most n. Pages nearer to the root are always more recent than those
//     behind them, so the pages of a request that are hit are a prefix of it, and
//     one pass over the trace answers for pools of every size.
//   - The optimum (Belady's, and a page need not be kept at all) keeps the pages
//     whose next use is nearest. A page is never used before the page in front of
//     it, and places grow towards the deep end, so the farthest place goes first and
//     the pages of a request that are hit are a prefix here too. Nothing is held for
//     the running request. So no pool of that many pages, whatever its policy, can
//     hit more.
type uses struct {
	ends     []int32 // request i has the places from ends[i-1] to ends[i]
	limits   []int32 // of which those before limits[i] can be hit: one token must be computed
	distance []int32 // by place: different pages used since its last use, itself included; 0: the first use
	next     []int32 // by place: where the same page is used next, if it can be hit there, else never
	sorted   []int32 // distances of the uses that can be hit, 0 left out, sorted
	distinct int
	lookedUp int64 // partial last pages included
}

// wholePages returns how many whole pages a trace looks up.
func wholePages(t *Trace, pageSize int) (n int64) {
	for i := range t.Requests {
		_, whole := Pages(t.Requests[i].Input, pageSize)
		n += int64(whole)
	}
	return n
}

// checkUses refuses a trace with more pages than newUses can take.
// Kinds: fault.Invalid.
func checkUses(t *Trace, pageSize int, flag string) error {
	if n := wholePages(t, pageSize); n > maxUses {
		return fault.New(fault.Invalid, flag, "the trace has %d whole pages of %d tokens, and at most %d can be worked out", n, pageSize, maxUses).
			Hint("use a larger --page-size, or a part of the trace: --requests %d", max(1, int64(len(t.Requests))*maxUses/n/2))
	}
	return nil
}

// newUses works out all uses of a trace that passed checkUses.
func newUses(t *Trace, pageSize int) *uses {
	n := int(wholePages(t, pageSize))
	u := &uses{
		ends: make([]int32, 0, len(t.Requests)), limits: make([]int32, 0, len(t.Requests)),
		distance: make([]int32, n), next: make([]int32, n),
	}
	pages := make([]int32, 0, n) // by place: pages numbered as they first come
	number := map[page.Key]int32{}
	var keys []page.Key
	for i := range t.Requests {
		input := t.Requests[i].Input
		needed, _ := Pages(input, pageSize)
		u.lookedUp += int64(needed)
		u.limits = append(u.limits, int32(len(pages)+(input-1)/pageSize))
		keys = AppendKeys(keys[:0], page.Key{}, &t.Requests[i], pageSize)
		for _, k := range keys {
			p, ok := number[k]
			if !ok {
				p = int32(len(number))
				number[k] = p
			}
			pages = append(pages, p)
		}
		u.ends = append(u.ends, int32(len(pages)))
	}
	u.distinct = len(number)
	u.lookBack(pages)
	u.lookAhead(pages)
	return u
}

// lookBack fills in distance. A Fenwick tree holds one mark for each page so far,
// at the time of its last use; the marks from there on are its distance.
func (u *uses) lookBack(pages []int32) {
	marks := make([]int32, len(pages)+1)
	add := func(i, d int32) {
		for i++; int(i) < len(marks); i += i & -i {
			marks[i] += d
		}
	}
	before := func(i int32) (n int32) { // marks before time i
		for ; i > 0; i -= i & -i {
			n += marks[i]
		}
		return n
	}
	last := make([]int32, u.distinct) // 1 + time of the last use
	var seen, begin int32
	for i, end := range u.ends {
		known := seen
		for p := begin; p < end; p++ {
			was := last[pages[p]]
			if was == 0 {
				seen++
				continue
			}
			u.distance[p] = known - before(was-1)
			if p < u.limits[i] {
				u.sorted = append(u.sorted, u.distance[p])
			}
		}
		for p := begin; p < end; p++ { // only now, and the deepest first
			if was := last[pages[p]]; was != 0 {
				add(was-1, -1)
			}
			now := begin + end - 1 - p
			add(now, 1)
			last[pages[p]] = now + 1
		}
		begin = end
	}
	slices.Sort(u.sorted)
}

// lookAhead fills in next.
func (u *uses) lookAhead(pages []int32) {
	coming := make([]int32, u.distinct)
	for i := range coming {
		coming[i] = never
	}
	for i, end := range slices.Backward(u.ends) {
		begin := int32(0)
		if i > 0 {
			begin = u.ends[i-1]
		}
		for p := begin; p < end; p++ {
			u.next[p] = coming[pages[p]]
			coming[pages[p]] = p
			if p >= u.limits[i] { // computed anew, and there again afterwards: nothing is won by keeping it until then
				coming[pages[p]] = never
			}
		}
	}
}

// lru returns how many pages are hit in a pool of so many pages that gives up the
// least recently used, the deepest first.
func (u *uses) lru(pages int) int64 {
	n, _ := slices.BinarySearch(u.sorted, int32(min(pages, never-1))+1)
	return int64(n)
}

// optimum returns the most pages that a pool of so many pages can hit.
func (u *uses) optimum(pages int) int64 {
	kept := make([]bool, len(u.next)) // by the place of a kept page's next use
	var heap farthest                 // those places, and some that are past
	var n, begin int32
	var hits int64
	for _, end := range u.ends {
		for p := begin; p < end; p++ {
			if kept[p] {
				hits++
				n--
			}
		}
		for _, q := range u.next[begin:end] {
			if q != never && !kept[q] {
				kept[q] = true
				n++
				heap.push(q)
			}
		}
		for int(n) > pages { // a kept page is in the heap, and farther than all that are past
			kept[heap.pop()] = false
			n--
		}
		begin = end
	}
	return hits
}

// ratio is hits per page looked up; nil when nothing was.
func (u *uses) ratio(hits int64) *float64 {
	if u.lookedUp == 0 {
		return nil
	}
	return new(float64(hits) / float64(u.lookedUp))
}

// farthest is a heap of places, the greatest on top.
type farthest []int32

func (h *farthest) push(p int32) {
	s := append(*h, p)
	i := len(s) - 1
	for i > 0 && s[(i-1)/2] < p {
		s[i] = s[(i-1)/2]
		i = (i - 1) / 2
	}
	s[i] = p
	*h = s
}

func (h *farthest) pop() int32 {
	s := *h
	top, p := s[0], s[len(s)-1]
	s = s[:len(s)-1]
	i := 0
	for {
		child := 2*i + 1
		if child+1 < len(s) && s[child+1] > s[child] {
			child++
		}
		if child >= len(s) || s[child] <= p {
			break
		}
		s[i] = s[child]
		i = child
	}
	if len(s) > 0 {
		s[i] = p
	}
	*h = s
	return top
}
