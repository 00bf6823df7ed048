package page

import (
	"math"
	"sync"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
)

// ArenaOptions says how many pages there are, as [AllocatorOptions] does, and
// whether page 0 is the sink.
type ArenaOptions struct {
	Pages    int
	Capacity int
	Order    Order
	Sink     bool // page 0 belongs to the arena itself, for padding rows
}

// Arena hands out the pages of one cache, counts the owners of each, and keeps
// pages that several may read sealed. All methods may be called from any
// goroutine. The package comment lists the states of a page.
//
// Calls that name several pages do all that was asked or nothing; a page named
// twice in one call counts twice.
type Arena struct {
	mu     sync.Mutex
	free   freelist // guarded by mu, as is all below
	owners []int32
	sealed []bool
	gone   []ID // scratch of Release

	usable ID   // the first page callers may own: 1 with a sink, else 0
	audits bool // check conservation as calls are made
	ops    int  // calls audited or passed over
}

// An arena of up to auditAll pages is audited in every call, a larger one in
// every auditEvery-th: an audit looks at every page.
const (
	auditAll   = 256
	auditEvery = 1024
)

// NewArena returns an arena all of whose pages are free, but for the sink.
// Options that contradict each other are refused (fault.Invalid).
func NewArena(o ArenaOptions) (*Arena, error) {
	a := &Arena{audits: invariants.Enabled}
	if err := a.free.init(AllocatorOptions{Pages: o.Pages, Capacity: o.Capacity, Order: o.Order}); err != nil {
		return nil, err
	}
	a.owners = make([]int32, len(a.free.isFree))
	a.sealed = make([]bool, len(a.free.isFree))
	if o.Sink {
		if o.Pages == 0 {
			return nil, fault.New(fault.Invalid, "pages", "0 pages have none for the sink").Hint("ask for at least 1 page")
		}
		// Both orders hand out page 0 first.
		a.free.tryAlloc(nil, 1)
		a.owners[Sink] = 1
		a.usable = Sink + 1
	}
	return a, nil
}

// Acquire appends n free pages to dst, each with one owner and not sealed. When
// fewer are free it takes none, returns dst as it was, and the error is a
// *[FullError]. A negative n is refused (fault.Invalid).
func (a *Arena) Acquire(dst []ID, n int) ([]ID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := len(dst)
	dst, err := a.free.alloc(dst, n)
	a.own(dst[from:])
	return dst, err
}

// TryAcquire is Acquire for callers who only want to know whether: it makes no
// error.
func (a *Arena) TryAcquire(dst []ID, n int) ([]ID, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := len(dst)
	dst, ok := a.free.tryAlloc(dst, n)
	a.own(dst[from:])
	return dst, ok
}

func (a *Arena) own(ids []ID) {
	for _, id := range ids {
		a.owners[id] = 1
	}
	a.audit()
}

// Seal promises that the pages are never written again, which is what lets them
// have several owners. Sealing twice is allowed; a page without an owner, the
// sink and an id out of range are refused (fault.Invalid).
func (a *Arena) Seal(ids []ID) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range ids {
		if err := a.owned(id); err != nil {
			return err
		}
	}
	for _, id := range ids {
		a.sealed[id] = true
	}
	a.audit()
	return nil
}

// Retain adds an owner to each page. A page that is not sealed, the sink and an
// id out of range are refused (fault.Invalid).
func (a *Arena) Retain(ids []ID) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, id := range ids {
		err := a.owned(id)
		if err == nil && !a.sealed[id] {
			err = fault.New(fault.Invalid, object(id), "is not sealed, so it cannot have a second owner").Hint("seal it first")
		}
		if err == nil && a.owners[id] == math.MaxInt32 {
			err = fault.New(fault.Invalid, object(id), "has %d owners, which is the limit", a.owners[id])
		}
		if err != nil {
			for _, undo := range ids[:i] {
				a.owners[undo]--
			}
			return err
		}
		a.owners[id]++
	}
	a.audit()
	return nil
}

// Release takes one owner from each page and returns how many of the pages it
// left without any: they lost their seal and are free, in the order given. A
// page with fewer owners than ids name it, the sink and an id out of range are
// refused (fault.Invalid).
func (a *Arena) Release(ids []ID) (freed int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gone = a.gone[:0]
	for i, id := range ids {
		if err := a.owned(id); err != nil {
			a.restore(ids[:i])
			return 0, err
		}
		if a.owners[id]--; a.owners[id] == 0 {
			a.gone = append(a.gone, id)
		}
	}
	if err := a.free.put(a.gone); err != nil { // a page was free and owned at once
		a.restore(ids)
		return 0, err
	}
	for _, id := range a.gone {
		a.sealed[id] = false
	}
	a.audit()
	return len(a.gone), nil
}

func (a *Arena) restore(ids []ID) {
	for _, id := range ids {
		a.owners[id]++
	}
}

// owned refuses pages that no caller owns.
func (a *Arena) owned(id ID) error {
	switch {
	case uint(id) >= uint(a.free.pages):
		return a.free.outOfRange(id)
	case id < a.usable:
		return fault.New(fault.Invalid, object(id), "is the sink, which belongs to the arena")
	case a.owners[id] <= 0:
		return fault.New(fault.Invalid, object(id), "has no owner left")
	}
	return nil
}

// Sealed reports whether the page is sealed. An id out of range is not.
func (a *Arena) Sealed(id ID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return uint(id) < uint(len(a.sealed)) && a.sealed[id]
}

// AnySealed reports whether one of the pages is sealed.
func (a *Arena) AnySealed(ids []ID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range ids {
		if uint(id) < uint(len(a.sealed)) && a.sealed[id] {
			return true
		}
	}
	return false
}

// Owners returns how many owners the page has: 0 when it is free or out of
// range. The sink has 1.
func (a *Arena) Owners(id ID) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if uint(id) >= uint(len(a.owners)) {
		return 0
	}
	return int(a.owners[id])
}

// NumFree returns how many pages are free.
func (a *Arena) NumFree() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.count
}

// LargestRun returns the length of the longest run of adjacent free pages. With
// FIFO it looks at every page.
func (a *Arena) LargestRun() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.largestRun()
}

// Pages returns how many pages there are, free or not, the sink included.
func (a *Arena) Pages() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.pages
}

// Usable returns how many pages callers can own: Pages without the sink.
func (a *Arena) Usable() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free.pages - int(a.usable)
}

// Grow adds n free pages, numbered on from the last. More than the capacity, and
// a negative n, are refused (fault.Invalid) and nothing is added.
func (a *Arena) Grow(n int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.free.grow(n)
	a.audit()
	return err
}

// Check looks at every page: it is free or owned and not both, it is sealed if
// it has several owners, and it has want(id) owners. The error (fault.Invalid)
// names the first page for which that is not so. A nil want counts nothing; the
// sink is never asked for. want runs under the arena's lock and must not call
// the arena.
func (a *Arena) Check(want func(ID) int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.check(want)
}

func (a *Arena) check(want func(ID) int) error {
	for i := range a.owners {
		id, owners := ID(i), a.owners[i]
		free, sealed := a.free.isFree[i], a.sealed[i]
		wrong := ""
		switch {
		case i >= a.free.pages:
			if free || sealed || owners != 0 {
				wrong = "is not in the pool yet"
			}
		case owners < 0:
			wrong = "has fewer owners than none"
		case free && owners > 0:
			wrong = "is free and owned"
		case !free && owners == 0:
			wrong = "is lost: neither free nor owned"
		case owners > 1 && !sealed:
			wrong = "has several owners and no seal"
		case owners == 0 && sealed:
			wrong = "is sealed and has no owner"
		case id < a.usable && (owners != 1 || sealed):
			wrong = "is the sink, which has one owner and no seal"
		case id >= a.usable && want != nil && int(owners) != want(id):
			return fault.New(fault.Invalid, object(id), "has %d owners and should have %d", owners, want(id))
		}
		if wrong != "" {
			return fault.New(fault.Invalid, object(id), "%s (owners %d, free %t, sealed %t)", wrong, owners, free, sealed)
		}
	}
	if err := a.free.check(); err != nil {
		return fault.Wrap(fault.Invalid, "free list", err)
	}
	return nil
}

// audit checks conservation at the end of a call, in builds that check
// invariants. Books that are wrong are a defect of this package, not something
// that input can cause, and going on would hand out somebody's page.
func (a *Arena) audit() {
	if !a.audits {
		return
	}
	if a.ops++; len(a.owners) > auditAll && a.ops%auditEvery != 0 {
		return
	}
	if err := a.check(nil); err != nil {
		panic("page: arena is corrupt after this call: " + err.Error())
	}
}
