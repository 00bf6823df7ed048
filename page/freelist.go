package page

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// freelist is the free pages of one pool, in either order. It is not safe for
// concurrent use: Allocator and Arena put their lock around it.
//
// What must hold: isFree has count pages set, all below pages; with Runs, they
// are exactly the pages of runs; with FIFO, exactly the ids of queue.
type freelist struct {
	order  Order
	pages  int
	count  int    // free pages
	isFree []bool // as long as the capacity

	runs  runlist // order Runs
	queue []ID    // order FIFO: a ring as long as the capacity
	head  int     // where in queue the next page to leave is
}

func (f *freelist) init(o AllocatorOptions) error {
	capacity := o.Capacity
	if capacity == 0 {
		capacity = o.Pages
	}
	switch {
	case o.Pages < 0 || o.Pages > math.MaxInt32:
		return fault.New(fault.Invalid, "pages", "%d is not in 0 to %d", o.Pages, math.MaxInt32)
	case capacity < o.Pages || capacity > math.MaxInt32:
		return fault.New(fault.Invalid, "capacity", "%d is not in %d (pages) to %d", o.Capacity, o.Pages, math.MaxInt32)
	case o.Order > FIFO:
		return fault.New(fault.Invalid, "order", "%v is neither %v nor %v", o.Order, Runs, FIFO)
	}
	f.order = o.Order
	f.isFree = make([]bool, capacity)
	if f.order == FIFO {
		f.queue = make([]ID, capacity)
	} else {
		f.runs.init(capacity)
	}
	return f.grow(o.Pages)
}

func (f *freelist) grow(n int) error {
	if n < 0 || n > len(f.isFree)-f.pages {
		return fault.New(fault.Invalid, "grow", "%d pages more is not in 0 to %d: there are %d and the capacity is %d",
			n, len(f.isFree)-f.pages, f.pages, len(f.isFree)).Hint("make the pool with a larger capacity")
	}
	first := f.pages
	f.pages += n
	for id := first; id < f.pages; id++ {
		f.isFree[id] = true
		if f.order == FIFO {
			f.push(ID(id))
		}
	}
	if f.order == Runs && n > 0 {
		f.runs.put(int32(first), int32(n))
		f.count += n
	}
	return nil
}

func (f *freelist) alloc(dst []ID, n int) ([]ID, error) {
	if n < 0 {
		return dst, fault.New(fault.Invalid, "alloc", "%d pages: a number of pages is not negative", n)
	}
	dst, ok := f.tryAlloc(dst, n)
	if !ok {
		return dst, &FullError{Asked: n, Free: f.count, LargestRun: f.largestRun()}
	}
	return dst, nil
}

func (f *freelist) tryAlloc(dst []ID, n int) ([]ID, bool) {
	if n < 0 || n > f.count {
		return dst, false
	}
	dst = slices.Grow(dst, n)
	f.count -= n
	if f.order == FIFO {
		for ; n > 0; n-- {
			id := f.queue[f.head]
			if f.head++; f.head == len(f.queue) {
				f.head = 0
			}
			f.isFree[id] = false
			dst = append(dst, id)
		}
		return dst, true
	}
	for n > 0 {
		lo, got := f.runs.take(int32(n))
		clear(f.isFree[lo : lo+got])
		from := len(dst)
		dst = dst[:from+int(got)]
		for i := range dst[from:] {
			dst[from+i] = ID(lo) + ID(i)
		}
		n -= int(got)
	}
	return dst, true
}

// put makes pages free, in the order given, all or none.
func (f *freelist) put(ids []ID) error {
	for i, id := range ids {
		if uint(id) >= uint(f.pages) || f.isFree[id] {
			err := f.refuse(ids[:i], id)
			for _, undo := range ids[:i] {
				f.isFree[undo] = false
			}
			return err
		}
		f.isFree[id] = true
	}
	if f.order == FIFO {
		for _, id := range ids {
			f.push(id)
		}
		return nil
	}
	f.count += len(ids)
	// Neighbours in the list are joined before they touch the books: pages come
	// back ascending, as they were handed out, or descending, deepest page first.
	for i := 0; i < len(ids); {
		lo, hi := ids[i], ids[i]
		j := i + 1
		for ; j < len(ids) && ids[j] == hi+1; j++ {
			hi++
		}
		if j == i+1 {
			for ; j < len(ids) && ids[j] == lo-1; j++ {
				lo--
			}
		}
		f.runs.put(int32(lo), int32(hi-lo+1))
		i = j
	}
	return nil
}

// refuse says why id cannot become free after the pages before it in one call.
func (f *freelist) refuse(before []ID, id ID) error {
	switch {
	case uint(id) >= uint(f.pages):
		return f.outOfRange(id)
	case slices.Contains(before, id):
		return fault.New(fault.Invalid, object(id), "is named twice in one call")
	}
	return fault.New(fault.Invalid, object(id), "is free already")
}

func (f *freelist) outOfRange(id ID) error {
	return fault.New(fault.Invalid, object(id), "is not in this pool of %d pages, which counts from 0", f.pages)
}

// push appends id to the ring and counts it.
func (f *freelist) push(id ID) {
	tail := f.head + f.count
	if tail >= len(f.queue) {
		tail -= len(f.queue)
	}
	f.queue[tail] = id
	f.count++
}

func (f *freelist) largestRun() int {
	if f.order == Runs {
		return f.runs.largest()
	}
	longest, run := 0, 0
	for _, free := range f.isFree[:f.pages] {
		if !free {
			run = 0
			continue
		}
		run++
		longest = max(longest, run)
	}
	return longest
}

// check compares the books with each other and names the first page that is
// wrong. It looks at every page.
func (f *freelist) check() error {
	count := 0
	for _, free := range f.isFree {
		if free {
			count++
		}
	}
	if count != f.count {
		return fmt.Errorf("%d pages are free, %d are counted", count, f.count)
	}
	if f.order == Runs {
		return f.runs.check(f.isFree[:f.pages])
	}
	queued := make([]bool, f.pages)
	for i := range f.count {
		id := f.queue[(f.head+i)%len(f.queue)]
		if uint(id) >= uint(f.pages) || !f.isFree[id] || queued[id] {
			return fmt.Errorf("page %d is queued as free and is not, or is queued twice", id)
		}
		queued[id] = true
	}
	return nil
}
