package transfer

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Holder keeps pages from being freed, moved and overwritten. [page.Arena] has both
// methods under other names: see [HoldArena]. The engine of a wrapped cache implements
// it, or there are no leases. It is called under the publisher's lock, and must not call
// the publisher.
type Holder interface {
	// Hold keeps the pages as they are until Release: all of them, or none and an error.
	Hold(pages []page.ID) error
	// Release ends one Hold of the same pages.
	Release(pages []page.ID) error
}

// HoldArena is the holder for pages of an arena: a lease is one owner more. Only sealed
// pages can have that, and sealing them is their owner's decision, not a publication's.
func HoldArena(a *page.Arena) Holder { return arenaHolder{a} }

type arenaHolder struct{ arena *page.Arena }

func (h arenaHolder) Hold(pages []page.ID) error {
	err := h.arena.Retain(pages)
	if err == nil || fault.RemedyOf(err) != "" {
		return err
	}
	return fault.Wrap(kindOr(err, fault.Busy), "arena of the holder", err).
		Hint("acquire the pages in the arena that HoldArena was given, and seal them")
}

func (h arenaHolder) Release(pages []page.ID) error {
	_, err := h.arena.Release(pages)
	return err
}

const (
	defaultPublications = 512 // as many words as an OS page has
	maxPublications     = 1 << 20
	defaultMaxTTL       = 10 * time.Minute
	defaultGrace        = 2 * time.Second
	wordBytes           = 8
)

// PublisherOptions say whose pages are published, and how peers reach them.
type PublisherOptions struct {
	// Cache has the pages. Required.
	Cache *kv.Cache
	// Holder keeps leased pages. Nil, for a wrapped cache whose engine has no way to
	// keep pages: then descriptors say that there are no leases, and a read finds out
	// that pages were reused only if the engine calls End before it reuses them.
	Holder Holder
	// Host has the memory of the epoch words. Required.
	Host *device.Host
	// Engines let peers read, in order of preference. Those that can't reach the memory of
	// Cache are left out, and one that lost its offer until it has made another. They are
	// the caller's to close, after the publisher.
	Engines []Engine
	// Changed, if there is one, is told that an engine has lost its offer, and why; and of no
	// error, that it has made another. Descriptors of before don't know that one: whoever
	// keeps one ready for readers asks for it anew. It may call all methods but Close.
	Changed func(engine string, lost error)
	// Owner names this publisher. Zero means a new random id, which is what a process
	// should have whenever it starts.
	Owner OwnerID
	// Entity and Session go into descriptors: at most MaxNameBytes each.
	Entity, Session string
	// Publications is how many there may be at a time: at most 1,048,576. 0 means 512.
	Publications int
	// MaxTTL bounds a lease, so that a reader that nobody sees go holds pages for that
	// long at most. 0 means 10 minutes.
	MaxTTL time.Duration
	// Grace is how long a publication stays when nobody reads it any more, and nobody is
	// awaited but readers that have gone without an acknowledgement, where the engine sees
	// that: time enough to come back, and the bound on what dead readers hold. 0 means 2 s.
	Grace time.Duration
}

// Lease is what [Publisher.Publish] is asked for.
type Lease struct {
	Pages []page.ID // in any order, each once; a descriptor keeps it
	Sums  []Sum     // of Pages, in their order; none where the host has not seen the bytes
	TTL   time.Duration
	// Readers is how many will acknowledge, which ends the publication; 0 means 1.
	Readers int
}

// Publisher lends pages of one cache to readers elsewhere. All methods may be called
// from any goroutine.
//
// # A publication
//
// Publish holds the pages and takes an epoch word. The publication ends once, by what
// comes first: its readers' acknowledgements, their end, End, the lease's expiry, Close.
// Then the word grows, and only after that the pages are released: who reads the word
// unchanged behind the last byte has read what was published. The next publication that
// takes the word gets a larger count; none has the count 0, which is what memory has
// that nobody wrote.
type Publisher struct {
	o       PublisherOptions
	words   *device.Memory
	offers  offers
	refused []error // why the other engines can't reach the cache

	mu     sync.Mutex
	closed bool                   // guarded by mu
	free   []uint32               // guarded by mu; words of no publication
	live   map[Epoch]*publication // guarded by mu
	lost   error                  // guarded by mu; what a holder last failed to release
}

type publication struct {
	pages   []page.ID
	timer   *time.Timer // calls expire
	expires time.Time   // by the clock that nobody sets
	ends    time.Time   // what timer is set to: at most expires
	awaited int         // acknowledgements that will come
	joined  int         // readers that are connected
	gone    int         // readers that have gone without an acknowledgement, and not come back
}

// until has the timer end the publication at t, or when the lease is over.
func (pub *publication) until(t time.Time) {
	if pub.ends = t; t.After(pub.expires) {
		pub.ends = pub.expires
	}
	pub.timer.Reset(time.Until(pub.ends))
}

// NewPublisher returns a publisher with nothing published. Kinds: fault.Invalid
// (options), fault.Memory, and those of [Engine.Offer].
func NewPublisher(o PublisherOptions) (*Publisher, error) {
	switch {
	case o.Cache == nil:
		return nil, fault.New(fault.Invalid, "Cache", "is missing").Hint("give the cache whose pages are published")
	case o.Host == nil:
		return nil, fault.New(fault.Invalid, "Host", "is missing").Hint("give a device.Host, for the epoch words")
	case o.Publications < 0 || o.Publications > maxPublications:
		return nil, fault.New(fault.Invalid, "Publications", "%d is not in 0 … %d", o.Publications, maxPublications)
	case o.MaxTTL < 0:
		return nil, fault.New(fault.Invalid, "MaxTTL", "%v is negative", o.MaxTTL)
	case o.Grace < 0:
		return nil, fault.New(fault.Invalid, "Grace", "%v is negative", o.Grace)
	}
	if o.Publications == 0 {
		o.Publications = defaultPublications
	}
	if o.MaxTTL == 0 {
		o.MaxTTL = defaultMaxTTL
	}
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.Owner == (OwnerID{}) {
		o.Owner = NewOwnerID()
	}
	if o.Changed == nil {
		o.Changed = func(string, error) {}
	}
	p := &Publisher{o: o, offers: offers{changed: o.Changed, stop: make(chan struct{})}, live: map[Epoch]*publication{}}
	var err error
	if p.words, err = o.Host.Alloc(int64(o.Publications) * wordBytes); err != nil {
		return nil, err
	}
	for i := range uint32(o.Publications) {
		word := uint32(o.Publications) - 1 - i
		if _, err := p.words.AddUint64(int64(word)*wordBytes, 1); err != nil {
			return nil, errors.Join(err, p.words.Free())
		}
		p.free = append(p.free, word)
	}
	for _, e := range o.Engines {
		err := p.offers.make(e, Export{Owner: o.Owner, Cache: o.Cache, Words: p.words, Join: p.join}, nil)
		if errors.Is(err, fault.Unsupported) {
			p.refused = append(p.refused, err)
		} else if err != nil {
			_ = p.Close()
			return nil, err
		}
	}
	offers, _ := p.offers.list()
	if err := p.describe(offers).check(); err != nil {
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

// describe returns the descriptor of no pages, reached by offers.
func (p *Publisher) describe(offers []Offer) *Descriptor {
	return &Descriptor{
		Owner: p.o.Owner, Entity: p.o.Entity, Session: p.o.Session, Leases: p.o.Holder != nil,
		Geometry: p.o.Cache.Geometry(), Offers: offers,
	}
}

// Descriptor returns how the cache is reached, with no pages: enough to see whether two
// sides can work together. Kinds: fault.Unsupported when no engine lets others read;
// fault.Device when those that do have lost their offers: see [PublisherOptions.Changed].
func (p *Publisher) Descriptor() (*Descriptor, error) {
	offers, lost := p.offers.list()
	switch {
	case len(offers) > 0:
		return p.describe(offers), nil
	case len(lost) > 0:
		return nil, fault.Wrap(fault.Device, "publisher", errors.Join(append(lost, p.refused...)...))
	case len(p.refused) > 0:
		return nil, fault.Wrap(fault.Unsupported, "publisher", errors.Join(p.refused...))
	}
	return nil, fault.New(fault.Unsupported, "publisher", "none of its %d engines lets others read", len(p.o.Engines)).
		Hint("add an engine that both sides have")
}

// Publish leases pages for a time of at most MaxTTL, and returns what a reader needs.
// They hold complete bytes: the work that writes them is over, for no event crosses to
// the reader.
//
// Kinds: fault.Invalid (pages out of range, twice or too many; sums; time; readers),
// fault.Full (too many publications), those of Descriptor, fault.Closed, and those of the
// holder. A publication that fails holds nothing.
func (p *Publisher) Publish(l Lease) (*Descriptor, error) {
	d, err := p.Descriptor()
	if err != nil {
		return nil, err
	}
	switch {
	case l.TTL <= 0 || l.TTL > p.o.MaxTTL:
		return nil, fault.New(fault.Invalid, "lease", "its time is %v, and must be more than 0 and at most %v", l.TTL, p.o.MaxTTL).
			Hint("choose another time, or allow a longer one: PublisherOptions.MaxTTL")
	case len(l.Pages) == 0:
		return nil, fault.New(fault.Invalid, "lease", "of no pages").Hint("use Descriptor to say only how the cache is reached")
	case l.Readers < 0:
		return nil, fault.New(fault.Invalid, "lease", "%d readers", l.Readers)
	}
	d.Pages, d.Sums = slices.Clone(l.Pages), slices.Clone(l.Sums)
	if err := d.check(); err != nil {
		return nil, err
	}
	if d.order, err = orderOf(d.Pages); err != nil {
		return nil, err
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return nil, fault.New(fault.Closed, "publisher", "closed before")
	case len(p.free) == 0:
		return nil, fault.New(fault.Full, "publications", "all %d are in use", p.o.Publications).
			Hint("acknowledge those that were read, or allow more: PublisherOptions.Publications")
	}
	word := p.free[len(p.free)-1]
	count, err := p.words.LoadUint64(int64(word) * wordBytes)
	if err != nil {
		return nil, err
	}
	if p.o.Holder != nil {
		if err := p.o.Holder.Hold(d.Pages); err != nil {
			return nil, fault.Wrap(kindOr(err, fault.Busy), "hold of published pages", err)
		}
	}
	p.free = p.free[:len(p.free)-1]
	e, expires := Epoch{Word: word, Count: count}, time.Now().Add(l.TTL)
	d.Epoch, d.Expires = e, expires.Round(0)
	p.live[e] = &publication{ // of copies: the descriptor is the caller's
		pages: slices.Clone(d.Pages), timer: time.AfterFunc(l.TTL, func() { p.expire(e) }),
		expires: expires, ends: expires, awaited: max(l.Readers, 1),
	}
	return d, nil
}

// Ack is a reader's acknowledgement, as it came on the channel by which descriptors go:
// it has what it wants of e. The last one that is awaited ends the publication. It comes
// from outside, so it must name the owner too. Kinds: those of End, and fault.Invalid for
// another owner's.
func (p *Publisher) Ack(owner OwnerID, e Epoch) error {
	if owner != p.o.Owner {
		return fault.New(fault.Invalid, "acknowledgement", "is for owner %v, and this is %v", owner, p.o.Owner)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	pub := p.live[e]
	if pub == nil {
		return p.end(e)
	}
	pub.awaited--
	return p.settle(e, pub)
}

// join implements [Export.Join].
func (p *Publisher) join(e Epoch) (leave func(done bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pub := p.live[e]
	if pub == nil {
		return nil
	}
	if pub.joined++; pub.joined == 1 {
		pub.until(pub.expires)
	}
	if pub.gone >= pub.awaited {
		pub.gone-- // nobody else is awaited: it has come back
	}
	return func(done bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.live[e] != pub {
			return
		}
		pub.joined--
		if done {
			pub.awaited--
		} else {
			pub.gone++
		}
		_ = p.settle(e, pub) // what a holder failed to release is kept for Close
	}
}

// settle ends a publication that nobody awaits, and soon one that only those await who
// have gone. The caller holds mu.
func (p *Publisher) settle(e Epoch, pub *publication) error {
	switch {
	case pub.awaited <= 0:
		return p.end(e)
	case pub.joined == 0 && pub.gone >= pub.awaited:
		pub.until(time.Now().Add(p.o.Grace))
	}
	return nil
}

// expire ends a publication when its time is over, unless it was given more meanwhile.
func (p *Publisher) expire(e Epoch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pub := p.live[e]; pub != nil && !time.Now().Before(pub.ends) {
		_ = p.end(e) // what a holder failed to release is kept for Close
	}
}

// End ends a publication now: reads of it that are not over fail, and its pages are
// released. An owner that needs the room calls it before the lease is over. Kinds:
// fault.NotFound (there is no such publication, or it has ended), and the holder's: then
// the publication has ended, and its pages are still held.
func (p *Publisher) End(e Epoch) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end(e)
}

// end is End. The caller holds mu.
func (p *Publisher) end(e Epoch) error {
	pub, ok := p.live[e]
	if !ok {
		return fault.New(fault.NotFound, fmt.Sprintf("publication %d.%d", e.Word, e.Count), "has ended, or never was")
	}
	delete(p.live, e)
	pub.timer.Stop()
	if _, err := p.words.AddUint64(int64(e.Word)*wordBytes, 1); err != nil {
		return p.lose(err) // never: the words are freed by Close, after the last publication
	}
	p.free = append(p.free, e.Word)
	if p.o.Holder != nil {
		if err := p.o.Holder.Release(pub.pages); err != nil {
			return p.lose(err)
		}
	}
	return nil
}

func (p *Publisher) lose(err error) error {
	p.lost = fault.Wrap(kindOr(err, fault.Busy), "release of published pages", err)
	return p.lost
}

// Leased returns how many publications there are.
func (p *Publisher) Leased() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.live)
}

// Close ends all publications, which fails reads of them, and withdraws from the
// engines. It returns what a holder failed to release, also when that was long ago.
// Closing again does nothing.
func (p *Publisher) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	for e := range p.live {
		_ = p.end(e) // kept in lost
	}
	p.mu.Unlock()
	p.offers.recall()
	if err := p.words.Free(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// kindOr is the kind of err, or else.
func kindOr(err error, otherwise fault.Kind) fault.Kind {
	if k := fault.KindOf(err); k != 0 {
		return k
	}
	return otherwise
}
