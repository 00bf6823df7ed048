package transfer

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Limits of a descriptor: far above any use, and low enough that a hostile one costs
// its reader a few MiB at most.
const (
	MaxPublished       = 1 << 18 // pages of one publication
	MaxNameBytes       = 255     // of an entity, a session, an engine's name
	MaxOffers          = 8       // engines of one descriptor
	MaxOfferBytes      = 1 << 20 // of one engine
	MaxDescriptorBytes = 16 << 20
)

// OwnerID is the boot id of an owner: random, and new whenever it starts.
type OwnerID [16]byte

// NewOwnerID returns an id that nobody else has.
func NewOwnerID() (id OwnerID) {
	_, _ = rand.Read(id[:]) // never fails
	return id
}

func (id OwnerID) String() string { return hex.EncodeToString(id[:]) }

// Epoch says which contents a list of pages named: those that lie there while the
// owner's word number Word has the value Count. A word only grows.
type Epoch struct {
	Word  uint32
	Count uint64
}

// Sum is the xxh3-128 of a page's bytes, as [AppendSums] takes it.
type Sum struct{ Hi, Lo uint64 }

// Offer is how one engine reaches the owner's memory. Its bytes mean something to the
// engine of that name only.
type Offer struct {
	Engine string
	Data   []byte
}

// Descriptor is what another process needs to read pages of a cache. It is plain data,
// and nothing of it but its form was checked: whoever reads by it believes it about the
// owner's memory, and about nothing local.
type Descriptor struct {
	Owner    OwnerID
	Entity   string // who the owner is, for people and logs
	Session  string // where it is, for an engine that looks peers up by name
	Epoch    Epoch
	Leases   bool      // the pages keep their bytes until the epoch moves or the lease expires
	Expires  time.Time // by the owner's clock; zero when no pages are published
	Geometry *kv.Geometry
	Pages    []page.ID // published, in the order in which they were named
	Sums     []Sum     // of Pages, where the owner's host has seen their bytes; else none
	Offers   []Offer   // in the owner's order of preference

	order []uint32 // positions of Pages by ascending id; nil where they ascend anyway
}

// check refuses a descriptor that is out of its limits. Kind: fault.Invalid.
func (d *Descriptor) check() error {
	if d.Geometry == nil {
		return fault.New(fault.Invalid, "descriptor", "no geometry")
	}
	for _, f := range []struct {
		name     string
		is, most int
	}{
		{"Entity", len(d.Entity), MaxNameBytes},
		{"Session", len(d.Session), MaxNameBytes},
		{"Pages", len(d.Pages), min(MaxPublished, d.Geometry.Pages())},
		{"Offers", len(d.Offers), MaxOffers},
	} {
		if f.is > f.most {
			return fault.New(fault.Invalid, "descriptor."+f.name, "%d are more than %d", f.is, f.most)
		}
	}
	if len(d.Sums) != 0 && len(d.Sums) != len(d.Pages) {
		return fault.New(fault.Invalid, "descriptor.Sums", "%d sums of %d pages", len(d.Sums), len(d.Pages))
	}
	first := firstPage(d.Geometry)
	for i, id := range d.Pages {
		if id < first || int(id) >= d.Geometry.Pages() {
			return fault.New(fault.Invalid, "descriptor.Pages", "page %d, number %d of the list, is not in %d … %d", id, i, first, d.Geometry.Pages()-1)
		}
	}
	if _, err := orderOf(d.Pages); err != nil {
		return err
	}
	for i, o := range d.Offers {
		switch at := fmt.Sprintf("descriptor.Offers[%d]", i); {
		case o.Engine == "" || len(o.Engine) > MaxNameBytes:
			return fault.New(fault.Invalid, at, "a name of %d bytes is not of 1 … %d", len(o.Engine), MaxNameBytes)
		case len(o.Data) > MaxOfferBytes:
			return fault.New(fault.Invalid, at, "%d bytes are more than %d", len(o.Data), MaxOfferBytes)
		case slices.ContainsFunc(d.Offers[:i], func(x Offer) bool { return x.Engine == o.Engine }):
			return fault.New(fault.Invalid, at, "%q offers twice", o.Engine)
		}
	}
	return nil
}

// orderOf returns the positions of pages by ascending id, nil where they ascend anyway.
// Kind: fault.Invalid (a page that is named twice).
func orderOf(pages []page.ID) ([]uint32, error) {
	ascend := true
	for i := 1; i < len(pages) && ascend; i++ {
		ascend = pages[i-1] < pages[i]
	}
	if ascend {
		return nil, nil
	}
	order := make([]uint32, len(pages))
	for i := range order {
		order[i] = uint32(i)
	}
	slices.SortFunc(order, func(a, b uint32) int { return cmp.Compare(pages[a], pages[b]) })
	for i := 1; i < len(order); i++ {
		if id := pages[order[i]]; id == pages[order[i-1]] {
			return nil, fault.New(fault.Invalid, "descriptor.Pages", "page %d is named twice", id)
		}
	}
	return order, nil
}

// whole reports whether the lists of d go together, as they do when it is made or
// decoded: its fields are anybody's to change.
func (d *Descriptor) whole() bool {
	return (len(d.order) == 0 || len(d.order) == len(d.Pages)) && (len(d.Sums) == 0 || len(d.Sums) == len(d.Pages))
}

// published returns the position of page id in d.Pages, given where the page before it
// was found: most reads are of pages in the order in which they were published.
func (d *Descriptor) published(id page.ID, after int) (int, bool) {
	if next := after + 1; next < len(d.Pages) && d.Pages[next] == id {
		return next, true
	}
	if d.order == nil {
		return slices.BinarySearch(d.Pages, id)
	}
	at, ok := slices.BinarySearchFunc(d.order, id, func(i uint32, id page.ID) int { return cmp.Compare(d.Pages[i], id) })
	if !ok {
		return 0, false
	}
	return int(d.order[at]), true
}

// firstPage returns the first page that tokens lie in: the sink is nobody's.
func firstPage(g *kv.Geometry) page.ID {
	if g.Sink() {
		return page.Sink + 1
	}
	return 0
}
