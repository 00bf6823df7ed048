package hostpool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// This file keeps suspended runs of tokens: the pages of one (request, label) that
// leave the device together, under a name, and come back together. The pool keeps
// the pages and the numbers that must survive the stay. Which run to suspend, and
// when, is the caller's decision, and so is what becomes of the device's pages.
//
//	absent    → copying    Offload: host pages claimed, copy enqueued
//	copying   → offloaded  Settle: the copy is done, its pages are summed and kept
//	copying   → absent     Settle of a failed copy, Discard: the device's pages stay the only ones
//	offloaded → absent     Reload, Discard, Remove
//	absent    → offloaded  the copy of a Reload failed, and nobody wanted the run gone meanwhile
//
// Host pages go back when whoever touches them last (a copy, a sum) is done,
// whatever happened to the name meanwhile. The pages of a Reload are the only good
// ones until its copy is done, so they go back only then, and only if it succeeded.

// Name names a run of tokens. A request with one run needs no label.
type Name struct{ Request, Label string }

func (n Name) String() string {
	if n.Label == "" {
		return fmt.Sprintf("%q", n.Request)
	}
	return fmt.Sprintf("%q/%q", n.Request, n.Label)
}

// Offloaded is a run on the host.
type Offloaded struct {
	Pages     []page.ID // its host pages, in order
	StoredLen int       // tokens committed
	Position  int       // the caller's position, kept as it was given
	Released  int       // tokens dropped from the front, kept as it was given
}

// suspended is what is kept under a name.
type suspended struct {
	Offloaded
	copied *device.Ticket
	sums   []Sum        // nil until settled
	wrong  atomic.Int32 // the place of a page that is not what it was, + 1
}

// leaving is a run that is off its name, and whose pages go back once copied is done.
type leaving struct {
	name   Name
	run    *suspended
	copied *device.Ticket
	again  bool // should the copy fail, the run is back under its name
}

// Offload enqueues on s the copy of device pages under name, into host pages that
// it claims, and keeps o's numbers with them; o.Pages is ignored. It never waits:
// Settle does. A run without pages is legal. A full pool refuses with a
// *page.FullError, and nothing has moved. Kinds: fault.Full, fault.Exists (the name
// is here already), fault.Invalid (negative numbers, pages out of range),
// fault.Closed, and those of the stream, after which nothing is kept.
func (p *Pool) Offload(s device.Stream, name Name, pages []page.ID, o Offloaded) error {
	if o.StoredLen < 0 || o.Position < 0 || o.Released < 0 {
		return fault.New(fault.Invalid, "offload of "+name.String(), "stored %d, position %d, released %d: none may be negative", o.StoredLen, o.Position, o.Released)
	}
	host, err := p.Claim(make([]page.ID, 0, len(pages)), len(pages))
	if err != nil {
		return fmt.Errorf("offload of %v: %w", name, err)
	}
	x := &suspended{Offloaded: o, copied: device.NewTicket()}
	x.Pages = host
	if err := p.enter(name, x); err != nil {
		return err
	}
	pairs := make([]page.Pair, len(pages))
	for i := range pages {
		pairs[i] = page.Pair{Dst: host[i], Src: pages[i]}
	}
	if _, err := p.CopyIn(s, pairs, x.copied); err != nil {
		p.discard(name, x)
		return fmt.Errorf("offload of %v: %w", name, err)
	}
	return nil
}

// enter puts x under name, or gives its pages back.
func (p *Pool) enter(name Name, x *suspended) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reap()
	if p.suspended[name] == nil {
		p.suspended[name] = x
		p.notAgain(name)
		return nil
	}
	return errors.Join(p.free(x.Pages),
		fault.New(fault.Exists, "offload of "+name.String(), "it is on the host already").Hint("reload or remove it first"))
}

// Settle waits until the pages offloaded under name have arrived, sums and keeps
// them: from then on the device's pages may be given up. When the copy failed, or
// somebody discarded the run meanwhile, nothing is kept and the device's pages are
// the only ones. When ctx ends first, nothing has changed. A settled run is settled
// at once. Kinds: fault.NotFound, fault.Busy (another Settle is summing it),
// fault.Device, ctx's error.
func (p *Pool) Settle(ctx context.Context, name Name) error {
	x, err := p.find(name)
	if err != nil {
		return err
	}
	if err := x.copied.Wait(ctx); err != nil {
		if done, _ := x.copied.Poll(); !done {
			return err
		}
		p.discard(name, x)
		return fmt.Errorf("offload of %v: %w", name, err)
	}
	// Held by summed, as by a copy: nobody gives these pages to somebody else, or the
	// memory back, while they are read.
	summed := device.NewTicket()
	if settled, err := p.holdToSum(name, x, summed); err != nil || settled {
		return err
	}
	sums := make([]Sum, len(x.Pages))
	for i, id := range x.Pages {
		if p.checks != ChecksOff {
			sums[i] = p.Sum(id)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	summed.Complete(nil)
	if p.suspended[name] != x {
		return p.errNotFound(name)
	}
	if err := p.keep(x.Pages); err != nil {
		return fmt.Errorf("offload of %v: %w", name, err)
	}
	x.sums = sums
	return nil
}

// holdToSum marks the pages of x as used by t, unless x was settled before.
func (p *Pool) holdToSum(name Name, x *suspended, t *device.Ticket) (settled bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.suspended[name] != x:
		return false, p.errNotFound(name)
	case x.sums != nil:
		return true, nil
	}
	return false, p.use(len(x.Pages), func(i int) page.ID { return x.Pages[i] }, t, claimed)
}

// Reload checks the pages offloaded under name, enqueues on s their copy onto as
// many device pages, and returns the numbers that were kept. t is completed when
// the pages have arrived; the host's pages go back then, and the name is free at
// once. Should the copy fail, t says so, and the run is back under its name, unless
// that was discarded or taken meanwhile: it can be reloaded again, on a stream that
// is well. After any error t is completed too, once the device pages are idle.
//
// Kinds: fault.NotFound, fault.Busy (not settled, or used by another call),
// fault.Invalid (other number of pages), fault.Corrupt (a page failed its check: the
// run is gone, and must be computed again), and those of the stream, after which the
// run is still here.
func (p *Pool) Reload(s device.Stream, name Name, pages []page.ID, t *device.Ticket) (Offloaded, error) {
	x, err := p.hold(name, len(pages), t)
	if err != nil {
		t.Complete(err)
		return Offloaded{}, fmt.Errorf("reload of %v: %w", name, err)
	}
	// Held by t: nobody gives these pages to somebody else until it is done.
	if x.wrong.Load() == 0 && p.checks == ChecksAlways {
		p.compare(name, x)
	}
	if i := int(x.wrong.Load()) - 1; i >= 0 {
		err := fault.New(fault.Corrupt, "reload of "+name.String(), "host page %d (page %d of the run) is not what it was: all of it is discarded", x.Pages[i], i).
			Hint("compute the run again")
		t.Complete(err)
		p.discard(name, x)
		return Offloaded{}, err
	}
	pairs := make([]page.Pair, len(pages))
	for i := range pages {
		pairs[i] = page.Pair{Dst: pages[i], Src: x.Pages[i]}
	}
	if _, err := p.start(s, p.reload, pairs, nil, t); err != nil {
		return Offloaded{}, fmt.Errorf("reload of %v: %w", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.suspended[name] == x {
		p.forget(name, x, true)
	}
	return x.Offloaded, nil
}

// hold finds a settled run of n pages and marks its pages as used by the copy of t.
func (p *Pool) hold(name Name, n int, t *device.Ticket) (*suspended, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reap()
	x := p.suspended[name]
	switch {
	case p.closed:
		return nil, errClosed()
	case x == nil:
		return nil, p.errNotFound(name)
	case x.sums == nil:
		return nil, fault.New(fault.Busy, name.String(), "its copy to the host is not settled")
	case n != len(x.Pages):
		return nil, fault.New(fault.Invalid, name.String(), "%d device pages for %d host pages", n, len(x.Pages))
	}
	return x, p.use(n, func(i int) page.ID { return x.Pages[i] }, t, kept)
}

// compare compares the pages of a settled run with their sums, and notes the first that
// is not what it was. Should the run leave meanwhile, what is noted means nothing.
func (p *Pool) compare(name Name, x *suspended) {
	for i, id := range x.Pages {
		if p.Sum(id) == x.sums[i] {
			continue
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		// Its pages are its own as long as it is here: what was read was theirs.
		if p.suspended[name] == x {
			x.wrong.Store(int32(i + 1))
			p.log.LogAttrs(context.Background(), slog.LevelError, "host pool: checksum mismatch in a suspended run",
				slog.String("run", name.String()), slog.Int("page", i), slog.Any("host", id))
		}
		return
	}
}

// Scrub looks at the pages of every settled run, and returns how many it looked at and
// how many runs are wrong: Reload refuses those. It is in nobody's way: a run that
// leaves meanwhile is passed over. The pool must not be closed under it.
func (p *Pool) Scrub(ctx context.Context) (pages, wrong int, err error) {
	if p.checks == ChecksOff || p.PageBytes() == 0 {
		return 0, 0, nil
	}
	p.mu.Lock()
	runs := maps.Clone(p.suspended)
	maps.DeleteFunc(runs, func(_ Name, x *suspended) bool { return x.sums == nil || x.wrong.Load() != 0 })
	p.mu.Unlock()
	for name, x := range runs {
		if err := ctx.Err(); err != nil {
			return pages, wrong, err
		}
		p.compare(name, x)
		pages += len(x.Pages)
		if x.wrong.Load() != 0 {
			wrong++
		}
	}
	return pages, wrong, nil
}

// Discard drops what is under name, settled or not, or on its way back. Its pages go
// back when its copy is done. An unknown name is nothing to drop.
func (p *Pool) Discard(name Name) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed()
	}
	if x := p.suspended[name]; x != nil {
		p.forget(name, x, false)
	}
	p.notAgain(name)
	p.reap()
	return nil
}

// discard drops x, unless another run is under its name by now.
func (p *Pool) discard(name Name, x *suspended) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed && p.suspended[name] == x {
		p.forget(name, x, false)
	}
}

// forget takes a run off its name. Its pages go back when the last that touches
// them is done; all of them have the same one.
func (p *Pool) forget(name Name, x *suspended, again bool) {
	delete(p.suspended, name)
	if len(x.Pages) == 0 {
		return
	}
	copied := p.last[x.Pages[0]]
	if copied == nil { // no copy was begun
		copied = device.Completed(nil)
	}
	p.leaving = append(p.leaving, leaving{name, x, copied, again})
	p.reap()
}

// notAgain ends the claim to name of the runs that are on their way back.
func (p *Pool) notAgain(name Name) {
	for i := range p.leaving {
		if p.leaving[i].name == name {
			p.leaving[i].again = false
		}
	}
}

// Remove drops every run of request.
func (p *Pool) Remove(request string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed()
	}
	for name, x := range p.suspended {
		if name.Request == request {
			p.forget(name, x, false)
		}
	}
	for i := range p.leaving {
		if p.leaving[i].name.Request == request {
			p.leaving[i].again = false
		}
	}
	p.reap()
	return nil
}

// IsOffloaded reports whether any run of request is on the host, or on its way.
func (p *Pool) IsOffloaded(request string) bool { return len(p.Labels(request)) > 0 }

// Labels returns the labels of request's runs on the host, sorted.
func (p *Pool) Labels(request string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reap()
	var labels []string
	for name := range maps.Keys(p.suspended) {
		if name.Request == request {
			labels = append(labels, name.Label)
		}
	}
	slices.Sort(labels)
	return labels
}

// NumPages is how many host pages are kept under name; 0 for an unknown one.
func (p *Pool) NumPages(name Name) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reap()
	if x := p.suspended[name]; x != nil {
		return len(x.Pages)
	}
	return 0
}

func (p *Pool) find(name Name) (*suspended, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errClosed()
	}
	p.reap()
	if x := p.suspended[name]; x != nil {
		return x, nil
	}
	return nil, p.errNotFound(name)
}

func (p *Pool) errNotFound(name Name) error {
	return fault.New(fault.NotFound, name.String(), "is not on the host")
}

// reap gives back the pages whose last copy is done, or puts their run back under
// its name if that copy was to take it to the device and failed.
func (p *Pool) reap() {
	p.leaving = slices.DeleteFunc(p.leaving, func(l leaving) bool {
		done, failure := l.copied.Poll()
		switch {
		case !done:
			return false
		case failure != nil && l.again: // its name is free: see notAgain
			p.suspended[l.name] = l.run
			return true
		}
		if err := p.free(l.run.Pages); err != nil { // books that disagree: a bug in this package
			p.log.LogAttrs(context.Background(), slog.LevelError, "host pool: pages lost", slog.Any("error", err))
		}
		return true
	})
}
