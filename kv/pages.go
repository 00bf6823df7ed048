package kv

import (
	"cmp"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// CopyPages enqueues on s the copies of whole pages (every layer, every plane)
// inside the cache: page Src of each pair onto its page Dst, all as if every
// page had been read before any was written. So one page may be in both roles:
// chains, swaps and permutations are legal, and one source may have several
// destinations. A pair of one page does nothing. Chains become one call of
// [device.Stream.Copy] for each link, cycles go through one page of scratch
// memory.
//
// The pages must stay reserved until a later ticket of s is done. After an error
// of s itself part of the work may be enqueued; every other error comes before
// anything is.
//
// Kinds: fault.Invalid (ids out of range, a destination named twice),
// fault.Unsupported (a cycle in a cache that was wrapped without its device, and that
// the host can't address),
// fault.Closed, fault.Memory (no scratch page) and those of s.
func (c *Cache) CopyPages(s device.Stream, pairs []page.Pair) error {
	if c.closed.Load() {
		return c.errClosed()
	}
	for _, p := range pairs {
		if err := c.g.checkPage(p.Dst); err != nil {
			return err
		}
		if err := c.g.checkPage(p.Src); err != nil {
			return err
		}
	}
	steps, err := orderCopies(pairs)
	if err != nil || c.g.pageBytes == 0 {
		return err
	}
	if slices.ContainsFunc(steps, func(step []page.Pair) bool { return step[0].Dst == page.None }) {
		return c.copyCycles(s, steps)
	}
	return c.copySteps(s, steps, nil)
}

// CopySlots enqueues on s the copy of tokens [0, end) of page pair.Src, in every
// layer, onto the same tokens of page pair.Dst. A pair of one page does nothing.
// The pages must stay reserved until a later ticket of s is done.
//
// Kinds: fault.Invalid (out of range), fault.Unsupported (part of a page with a
// plane that moves whole), fault.Closed and those of s.
func (c *Cache) CopySlots(s device.Stream, pair page.Pair, end int) error {
	if c.closed.Load() {
		return c.errClosed()
	}
	if pair.Dst == pair.Src {
		if err := c.g.checkPage(pair.Dst); err != nil {
			return err
		}
		if end < 0 || end > c.g.spec.PageSize {
			return outside("end", int64(end), 0, int64(c.g.spec.PageSize))
		}
		return nil
	}
	boxes, err := c.self.AppendTokenBoxes(nil, pair.Dst, pair.Src, 0, end)
	if err != nil || len(boxes) == 0 {
		return err
	}
	return s.Copy(c.self.AppendOps(nil, boxes))
}

// orderCopies returns the steps in which pairs are copied so that each source is
// read before it is overwritten. The pairs of one step are independent of each
// other. Page None is the scratch page: pages that form a cycle come last, each
// cycle as "save one page, copy along the cycle, restore".
// Kind: fault.Invalid (a destination named twice).
func orderCopies(pairs []page.Pair) (steps [][]page.Pair, err error) {
	sorted := slices.Clone(pairs)
	slices.SortFunc(sorted, func(a, b page.Pair) int { return cmp.Compare(a.Dst, b.Dst) })
	for i := 1; i < len(sorted); i++ {
		if sorted[i].Dst == sorted[i-1].Dst {
			return nil, fault.New(fault.Invalid, "page", "%d is the destination of two pairs, from pages %d and %d",
				sorted[i].Dst, sorted[i-1].Src, sorted[i].Src)
		}
	}
	sorted = slices.DeleteFunc(sorted, func(p page.Pair) bool { return p.Dst == p.Src })

	writer := func(id page.ID) (int, bool) { // the pair that overwrites page id
		return slices.BinarySearchFunc(sorted, id, func(p page.Pair, id page.ID) int { return cmp.Compare(p.Dst, id) })
	}
	readers := make([]int, len(sorted)) // pairs still to be copied from sorted[i].Dst
	for _, p := range sorted {
		if i, ok := writer(p.Src); ok {
			readers[i]++
		}
	}
	const over = -1 // in readers: the pair has its step
	var ready []int
	for i, n := range readers {
		if n == 0 {
			ready = append(ready, i)
		}
	}
	for len(ready) > 0 {
		var step []page.Pair
		var next []int
		for _, i := range ready {
			step = append(step, sorted[i])
			readers[i] = over
		}
		for _, i := range ready {
			if w, ok := writer(sorted[i].Src); ok {
				if readers[w]--; readers[w] == 0 {
					next = append(next, w)
				}
			}
		}
		steps, ready = append(steps, step), next
	}
	// What is left has one reader each: cycles.
	for i, n := range readers {
		if n == over {
			continue
		}
		first := sorted[i]
		steps = append(steps, []page.Pair{{Dst: page.None, Src: first.Dst}})
		for p, at := first, i; ; {
			readers[at] = over
			if p.Src == first.Dst {
				steps = append(steps, []page.Pair{{Dst: p.Dst, Src: page.None}})
				break
			}
			steps = append(steps, []page.Pair{p})
			at, _ = writer(p.Src)
			p = sorted[at]
		}
	}
	return steps, nil
}

// copySteps enqueues each step as one call, which orders it behind the one
// before. st is needed when a step names the scratch page.
func (c *Cache) copySteps(s device.Stream, steps [][]page.Pair, st *stage) error {
	var (
		runs  []page.Run
		boxes []Box
		ops   []device.Op
		err   error
	)
	for _, step := range steps {
		route := c.self
		switch {
		case step[0].Dst == page.None:
			route, step[0].Dst = st.save, 0
		case step[0].Src == page.None:
			route, step[0].Src = st.restore, 0
		}
		if runs, err = page.AppendRuns(runs[:0], step); err != nil {
			return err
		}
		boxes = boxes[:0]
		for _, run := range runs {
			if boxes, err = route.AppendBoxes(boxes, run); err != nil {
				return err
			}
		}
		ops = route.AppendOps(ops[:0], boxes)
		if err := s.Copy(ops); err != nil {
			return err
		}
	}
	return nil
}

// stage is one page of scratch memory, and the routes into it and out of it.
type stage struct {
	save, restore *Route
	used          device.Event // the last work that used the page; nil when it serves one call
}

// copyCycles enqueues steps some of which go through the scratch page. Streams
// share it: each waits for the one before, and the lock makes the order of
// waiting the order of recording.
func (c *Cache) copyCycles(s device.Stream, steps [][]page.Pair) error {
	if c.dev == nil {
		// Borrowed memory names no device to allocate from. A page of the Go heap
		// does on a host; the ops in the stream's queue keep it alive.
		if c.regions[0].Bytes() == nil {
			return fault.New(fault.Unsupported, "pairs", "form a cycle, and a cache wrapped on %s without its device has no scratch page", c.name).
				Hint("wrap the cache with WrapOn, or copy in two steps through a free page")
		}
		st, err := c.newStage(device.WrapHost(make([]byte, c.g.pageBytes)))
		if err != nil {
			return err
		}
		return c.copySteps(s, steps, st)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return c.errClosed()
	}
	if c.stage == nil {
		mem, err := c.dev.Alloc(c.g.pageBytes)
		if err != nil {
			return err
		}
		c.owned = append(c.owned, mem)
		st, err := c.newStage(mem)
		if err != nil {
			return err
		}
		if st.used, err = c.dev.NewEvent(); err != nil {
			return err
		}
		c.stage = st
	}
	st := c.stage
	if err := s.Wait(st.used); err != nil {
		return err
	}
	err := c.copySteps(s, steps, st)
	if err == nil {
		err = s.Record(st.used)
	}
	if err != nil {
		// Copies may be in flight that no event stands for: this page serves
		// nobody again.
		c.stage = nil
	}
	return err
}

func (c *Cache) newStage(mem *device.Memory) (*stage, error) {
	g, err := c.g.Packed(1)
	if err != nil {
		return nil, err
	}
	one, err := Wrap(g, []*device.Memory{mem})
	if err != nil {
		return nil, err
	}
	save, err := NewRoute(one, c)
	if err != nil {
		return nil, err
	}
	restore, err := NewRoute(c, one)
	if err != nil {
		return nil, err
	}
	return &stage{save: save, restore: restore}, nil
}
