package page

import (
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/fault"
)

// Order decides which free pages are handed out first.
type Order uint8

const (
	// Runs prefers adjacent pages: the smallest free run that holds all that was
	// asked for, and otherwise the largest runs there are, so that pages come in
	// as few runs as possible.
	Runs Order = iota
	// FIFO hands out pages in the order in which they became free, at first
	// ascending. Adjacency is left to chance.
	FIFO
)

func (o Order) String() string {
	switch o {
	case Runs:
		return "runs"
	case FIFO:
		return "fifo"
	}
	return fmt.Sprintf("order %d", uint8(o))
}

// AllocatorOptions says how many pages there are. Numbers are at most 2^31 − 1.
type AllocatorOptions struct {
	Pages    int   // pages at first; 0 is legal: every Alloc but that of 0 pages is refused until Grow
	Capacity int   // how many pages Grow may reach; 0 means Pages
	Order    Order // Runs unless set
}

// FullError says that fewer pages are free than were asked for. Nothing was
// taken. Its kind is fault.Full.
type FullError struct {
	Asked      int // pages asked for
	Free       int // pages that were free
	LargestRun int // the most of them that were adjacent
}

// Shortfall is how many pages must become free before the same call can succeed.
func (e *FullError) Shortfall() int { return e.Asked - e.Free }

func (e *FullError) Error() string {
	return fmt.Sprintf("asked for %d pages, free %d, largest run %d", e.Asked, e.Free, e.LargestRun)
}

// Unwrap gives the error its kind and its remedy.
func (e *FullError) Unwrap() error {
	return fault.New(fault.Full, "pages", "%d too few", e.Shortfall()).
		Hint("%d more must be released or evicted first", e.Shortfall())
}

// Allocator hands out the pages of one cache: all that were asked for or none.
// All methods may be called from any goroutine.
type Allocator struct {
	mu   sync.Mutex
	free freelist // guarded by mu
}

// NewAllocator returns an allocator all of whose pages are free. Options that
// contradict each other are refused (fault.Invalid).
func NewAllocator(o AllocatorOptions) (*Allocator, error) {
	a := new(Allocator)
	if err := a.free.init(o); err != nil {
		return nil, err
	}
	return a, nil
}

// Alloc appends n free pages to dst; each run among them is ascending. When
// fewer are free it takes none, returns dst as it was, and the error is a
// *[FullError]. A negative n is refused (fault.Invalid).
func (a *Allocator) Alloc(dst []ID, n int) ([]ID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.alloc(dst, n)
}

// TryAlloc is Alloc for callers who only want to know whether: it makes no error.
func (a *Allocator) TryAlloc(dst []ID, n int) ([]ID, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.tryAlloc(dst, n)
}

// Free gives pages back, in the order given, all or none. An id out of range, a
// page that is free already and an id named twice are refused (fault.Invalid).
func (a *Allocator) Free(ids []ID) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.put(ids)
}

// NumFree returns how many pages are free.
func (a *Allocator) NumFree() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.count
}

// LargestRun returns the length of the longest run of adjacent free pages. With
// FIFO it looks at every page.
func (a *Allocator) LargestRun() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.largestRun()
}

// Pages returns how many pages there are, free or not.
func (a *Allocator) Pages() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.pages
}

// Grow adds n free pages, numbered on from the last. More than the capacity, and
// a negative n, are refused (fault.Invalid) and nothing is added.
func (a *Allocator) Grow(n int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.grow(n)
}
