package transfer

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func TestPublisher_LeaseEndsOnce(t *testing.T) {
	for _, test := range []struct {
		name string
		end  func(p *Publisher, d *Descriptor) error
	}{
		{"by expiry", func(*Publisher, *Descriptor) error {
			<-time.After(time.Minute)
			synctest.Wait()
			return nil
		}},
		{"by an acknowledgement", func(p *Publisher, d *Descriptor) error { return p.Ack(d.Owner, d.Epoch) }},
		{"by its owner", func(p *Publisher, d *Descriptor) error { return p.End(d.Epoch) }},
		{"by Close", func(p *Publisher, _ *Descriptor) error { return p.Close() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pair := newPair(t)
				p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
				began := time.Now()
				d := must(p.Publish(Lease{Pages: []page.ID{5, 2, 9}, Sums: []Sum{{5, 5}, {2, 2}, {9, 9}}, TTL: time.Minute}))(t)
				if !d.Leases || !d.Expires.Equal(began.Add(time.Minute)) || !slices.Equal(d.Pages, []page.ID{5, 2, 9}) ||
					!slices.Equal(d.Sums, []Sum{{5, 5}, {2, 2}, {9, 9}}) {
					t.Errorf("leases %t until %v of pages %v with sums %v", d.Leases, d.Expires, d.Pages, d.Sums)
				}
				must(pair.arena.Release(pair.pages))(t)
				<-time.After(time.Minute - 1)
				synctest.Wait()
				if n := pair.arena.NumFree(); n != shape.Pages-3 || p.Leased() != 1 {
					t.Errorf("%d pages are free and %d publications live, while 3 pages are leased", n, p.Leased())
				}
				noError(t, test.end(p, d))
				if n := pair.arena.NumFree(); n != shape.Pages || p.Leased() != 0 {
					t.Errorf("%d pages are free and %d publications live after all have ended", n, p.Leased())
				}
				if err := p.End(d.Epoch); !errors.Is(err, fault.NotFound) {
					t.Errorf("ended again: error %v, want kind not found", err)
				}
				<-time.After(time.Hour)
			})
		})
	}
}

// orderly is a holder that looks at the epoch word while pages are held and released.
type orderly struct {
	word      func() uint64
	held      uint64
	released  []uint64
	fail      error
	heldPages []page.ID
}

func (h *orderly) Hold(pages []page.ID) error {
	if h.fail == nil {
		h.held, h.heldPages = h.word(), slices.Clone(pages)
	}
	return h.fail
}

func (h *orderly) Release([]page.ID) error {
	h.released = append(h.released, h.word())
	return h.fail
}

func TestPublisher_WordGrowsBeforePagesAreReleased(t *testing.T) {
	pair := newPair(t)
	h := &orderly{}
	p := pair.publish(PublisherOptions{Holder: h, Publications: 1})
	h.word = func() uint64 { return must(pair.engine.words.LoadUint64(0))(t) }
	for n := range 3 {
		i := uint64(n + 1)
		d := must(p.Publish(Lease{Pages: []page.ID{3, 1}, TTL: time.Minute}))(t)
		if d.Epoch != (Epoch{Word: 0, Count: i}) || h.held != i || !slices.Equal(h.heldPages, []page.ID{3, 1}) {
			t.Errorf("publication %d has epoch %v; pages %v were held at %d", i, d.Epoch, h.heldPages, h.held)
		}
		if _, err := p.Publish(Lease{Pages: []page.ID{4}, TTL: time.Minute}); !errors.Is(err, fault.Full) {
			t.Errorf("more than Publications: error %v, want kind full", err)
		}
		noError(t, p.End(d.Epoch))
		if h.released[n] != i+1 {
			t.Errorf("pages were released at %d, want %d", h.released[n], i+1)
		}
	}
}

func TestPublisher_HolderThatFails(t *testing.T) {
	pair := newPair(t)
	h := &orderly{word: func() uint64 { return 0 }}
	p := must(NewPublisher(PublisherOptions{Cache: pair.far, Host: pair.host, Engines: []Engine{pair.engine}, Holder: h}))(t)
	h.fail = errors.New("no")
	if _, err := p.Publish(Lease{Pages: []page.ID{3}, TTL: time.Minute}); !errors.Is(err, h.fail) || p.Leased() != 0 {
		t.Errorf("error %v, want %v", err, h.fail)
	}
	h.fail = nil
	d := must(p.Publish(Lease{Pages: []page.ID{3}, TTL: time.Minute}))(t)
	h.fail = errors.New("still in use")
	if err := p.End(d.Epoch); !errors.Is(err, h.fail) || p.Leased() != 0 {
		t.Errorf("error %v, want %v; %d publications", err, h.fail, p.Leased())
	}
	if err := p.Close(); !errors.Is(err, h.fail) {
		t.Errorf("Close does not say that pages are still held: %v", err)
	}
	noError(t, p.Close())
}

func TestPublisher_PagesOfAnArenaMustBeSealed(t *testing.T) {
	pair := newPair(t)
	must(pair.arena.Release(pair.pages[:2]))(t)
	mine := must(pair.arena.Acquire(nil, 1))(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	if _, err := p.Publish(Lease{Pages: append(mine, pair.pages[5]), TTL: time.Minute}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "not sealed") {
		t.Errorf("a page still being written: error %v", err)
	}
	if n := pair.arena.Owners(pair.pages[5]); n != 1 || p.Leased() != 0 {
		t.Errorf("a publication that failed holds a page: %d owners, %d publications", n, p.Leased())
	}
}

func TestPublisher_Refuses(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{MaxTTL: time.Minute})
	for name, publish := range map[string]func() (*Descriptor, error){
		"no time":      func() (*Descriptor, error) { return p.Publish(Lease{Pages: []page.ID{1}, TTL: 0}) },
		"too long":     func() (*Descriptor, error) { return p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute + 1}) },
		"out of range": func() (*Descriptor, error) { return p.Publish(Lease{Pages: []page.ID{1, 12}, TTL: time.Second}) },
		"below":        func() (*Descriptor, error) { return p.Publish(Lease{Pages: []page.ID{1, -1}, TTL: time.Second}) },
		"twice":        func() (*Descriptor, error) { return p.Publish(Lease{Pages: []page.ID{2, 1, 2}, TTL: time.Second}) },
		"too few sums": func() (*Descriptor, error) {
			return p.Publish(Lease{Pages: []page.ID{2, 1}, Sums: make([]Sum, 1), TTL: time.Second})
		},
		"sums of nobody": func() (*Descriptor, error) {
			return p.Publish(Lease{Pages: nil, Sums: make([]Sum, 1), TTL: time.Second})
		},
	} {
		if _, err := publish(); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	d := must(p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}))(t)
	if d.Leases {
		t.Error("leases without a holder")
	}
	if err := p.Ack(NewOwnerID(), d.Epoch); !errors.Is(err, fault.Invalid) || p.Leased() != 1 {
		t.Errorf("an acknowledgement for somebody else: error %v, want kind invalid", err)
	}
	noError(t, p.Close())
	if _, err := p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}); !errors.Is(err, fault.Closed) {
		t.Errorf("published after Close: error %v, want kind closed", err)
	}

	quiet := pair.publish(PublisherOptions{Engines: []Engine{&fakeEngine{name: "quiet", silent: true}}})
	if _, err := quiet.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}); !errors.Is(err, fault.Unsupported) {
		t.Errorf("published where nobody can read: error %v, want kind unsupported", err)
	}
}

func TestNewPublisher_Refuses(t *testing.T) {
	pair := newPair(t)
	for name, o := range map[string]PublisherOptions{
		"no cache":    {Host: pair.host},
		"no host":     {Cache: pair.far},
		"less than 0": {Cache: pair.far, Host: pair.host, Publications: -1},
		"too many":    {Cache: pair.far, Host: pair.host, Publications: maxPublications + 1},
		"ttl":         {Cache: pair.far, Host: pair.host, MaxTTL: -1},
		"entity":      {Cache: pair.far, Host: pair.host, Entity: strings.Repeat("x", 256)},
		"same engine": {Cache: pair.far, Host: pair.host, Engines: []Engine{pair.engine, pair.engine}},
	} {
		if _, err := NewPublisher(o); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}

func TestPublisher_EndsWithItsReaders(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Grace: time.Millisecond})
	lease := Lease{Pages: []page.ID{1}, TTL: time.Minute, Readers: 2}

	t.Run("both acknowledge", func(t *testing.T) {
		d := must(p.Publish(lease))(t)
		a, b := pair.engine.join(d.Epoch), pair.engine.join(d.Epoch)
		a(true)
		if p.Leased() != 1 {
			t.Error("it ended with one reader to come")
		}
		b(true)
		if p.Leased() != 0 {
			t.Error("it has not ended")
		}
		if pair.engine.join(d.Epoch) != nil {
			t.Error("somebody joins what has ended")
		}
	})
	t.Run("one acknowledges on another channel", func(t *testing.T) {
		d := must(p.Publish(lease))(t)
		noError(t, p.Ack(d.Owner, d.Epoch))
		if p.Leased() != 1 {
			t.Error("it ended with one reader to come")
		}
		pair.engine.join(d.Epoch)(true)
		if p.Leased() != 0 {
			t.Error("it has not ended")
		}
	})
	t.Run("they go", func(t *testing.T) {
		d := must(p.Publish(lease))(t)
		word := int64(d.Epoch.Word) * wordBytes
		a, b := pair.engine.join(d.Epoch), pair.engine.join(d.Epoch)
		a(false)
		if must(pair.engine.words.LoadUint64(word))(t) != d.Epoch.Count {
			t.Error("it ended while a reader was there")
		}
		b(false)
		for p.Leased() != 0 { // hangs if a reader that has gone holds pages
			runtime.Gosched()
		}
	})
}

// A reader that dies takes nothing from those that are still to come, and holds nothing
// once they are done.
func TestPublisher_OutlastsOneOfTwoReaders(t *testing.T) {
	for _, test := range []struct {
		name string
		last func(t *testing.T, p *Publisher, d *Descriptor, join func() func(bool))
	}{
		{"the other one joins and leaves", func(_ *testing.T, _ *Publisher, _ *Descriptor, join func() func(bool)) { join()(true) }},
		{"the other one acknowledges elsewhere", func(t *testing.T, p *Publisher, d *Descriptor, _ func() func(bool)) {
			t.Helper()
			noError(t, p.Ack(d.Owner, d.Epoch))
		}},
		{"the other one dies too", func(_ *testing.T, _ *Publisher, _ *Descriptor, join func() func(bool)) { join()(false) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pair := newPair(t)
				p := pair.publish(PublisherOptions{Grace: time.Second})
				d := must(p.Publish(Lease{Pages: []page.ID{1}, TTL: 10 * time.Minute, Readers: 2}))(t)
				join := func() func(bool) { return pair.engine.join(d.Epoch) }
				join()(false)
				<-time.After(time.Minute)
				if p.Leased() != 1 {
					t.Fatal("one reader's death has ended what the other one was promised")
				}
				test.last(t, p, d, join)
				<-time.After(2 * time.Second)
				if p.Leased() != 0 {
					t.Error("a dead reader holds pages")
				}
			})
		})
	}
}

// A descriptor is the caller's as soon as it is there.
func TestPublisher_ExpiresWhateverBecomesOfTheDescriptor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		p := pair.publish(PublisherOptions{})
		d := must(p.Publish(Lease{Pages: []page.ID{1, 2}, TTL: time.Minute}))(t)
		d.Epoch, d.Pages[0], d.Expires = Epoch{Word: 9, Count: 9}, 7, time.Time{}
		<-time.After(time.Minute)
		synctest.Wait()
		if p.Leased() != 0 {
			t.Error("the lease has not expired")
		}
	})
}

// Memory that nobody wrote is no publication's word, and an epoch that nobody filled in
// names none.
func TestPublisher_CountsFromOne(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Publications: 2})
	for range 2 {
		if d := must(p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}))(t); d.Epoch.Count != 1 {
			t.Errorf("a first publication has the epoch %v", d.Epoch)
		}
	}
	if pair.engine.join(Epoch{}) != nil {
		t.Error("somebody joins the epoch zero")
	}
}

// Who comes back within the grace has the lease as it was.
func TestPublisher_TakesReadersBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		p := pair.publish(PublisherOptions{Grace: time.Second})
		d := must(p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}))(t)
		pair.engine.join(d.Epoch)(false)
		<-time.After(time.Second / 2)
		leave := pair.engine.join(d.Epoch)
		<-time.After(50 * time.Second)
		if leave == nil || p.Leased() != 1 {
			t.Fatal("the publication ended in spite of its reader")
		}
		leave(false)
		<-time.After(2 * time.Second)
		if p.Leased() != 0 {
			t.Error("the publication has outlasted its reader")
		}
	})
}

func TestPublisher_LeavesEnginesOutThatCannotReachTheCache(t *testing.T) {
	pair := newPair(t)
	blind := &fakeEngine{name: "blind", blind: true}
	d := must(pair.publish(PublisherOptions{Engines: []Engine{blind, pair.engine}}).Descriptor())(t)
	if len(d.Offers) != 1 || d.Offers[0].Engine != "fake" {
		t.Errorf("offers %v, want that of fake alone", d.Offers)
	}
	_, err := pair.publish(PublisherOptions{Engines: []Engine{blind}}).Descriptor()
	if !errors.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), "blind") || fault.RemedyOf(err) != "move it" {
		t.Errorf("error %v, remedy %q", err, fault.RemedyOf(err))
	}
}
