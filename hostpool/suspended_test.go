package hostpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

var (
	ann      = Name{"ann", ""}
	annDraft = Name{"ann", "draft"}
	bob      = Name{"bob", "main"}
)

// suspend takes device pages, which it fills with keys, to the host under name.
func (r *rig) suspend(p *Pool, name Name, o Offloaded, keys map[page.ID]uint64, pages ...page.ID) {
	r.Helper()
	for _, id := range pages {
		r.write(id, keys[id])
	}
	noError(r, p.Offload(r.copies, name, pages, o))
	noError(r, p.Settle(context.Background(), name))
}

// resume brings name back onto pages, and waits.
func (r *rig) resume(p *Pool, name Name, pages ...page.ID) (Offloaded, error) {
	r.Helper()
	t := device.NewTicket()
	o, err := p.Reload(r.copies, name, pages, t)
	return o, errors.Join(err, wait(t))
}

// abandoned is a context that ended before.
func abandoned() context.Context {
	ctx, end := context.WithCancel(context.Background())
	end()
	return ctx
}

func (r *rig) wantFree(p *Pool, want int) {
	r.Helper()
	noError(r, p.Check())
	if got := p.NumFree(); got != want {
		r.Errorf("%d host pages are free, want %d", got, want)
	}
}

// pulled breaks the copies stream for good at its next copy, and gives the rig another.
func (r *rig) pulled() (again device.Stream) {
	r.breaks(r.copies)
	return r.stream("another")
}

func TestSuspended_ComeBackWithTheirBytesAndNumbers(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(5)
	keys := map[page.ID]uint64{0: 100, 1: 101, 2: 102, 4: 104, 5: 105}
	r.suspend(p, ann, Offloaded{StoredLen: 9, Position: 17, Released: 8}, keys, 4, 0, 1)
	r.suspend(p, annDraft, Offloaded{StoredLen: 1}, keys, 5)
	r.suspend(p, bob, Offloaded{StoredLen: 4, Pages: []page.ID{77}}, keys, 2) // Pages is ignored
	r.poison()
	r.wantFree(p, 0)
	if got := p.Labels("ann"); !slices.Equal(got, []string{"", "draft"}) {
		t.Errorf("labels %q", got)
	}
	for name, want := range map[Name]int{ann: 3, annDraft: 1, bob: 1, {"bob", ""}: 0, {"eve", ""}: 0} {
		if got := p.NumPages(name); got != want {
			t.Errorf("%v has %d pages, want %d", name, got, want)
		}
	}
	if !p.IsOffloaded("ann") || !p.IsOffloaded("bob") || p.IsOffloaded("eve") {
		t.Error("IsOffloaded is wrong")
	}

	o, err := r.resume(p, ann, 2, 3, 5) // other pages than before
	noError(t, err)
	if o.StoredLen != 9 || o.Position != 17 || o.Released != 8 || len(o.Pages) != 3 {
		t.Errorf("got back %+v", o)
	}
	r.wantDevice(2, 104)
	r.wantDevice(3, 100)
	r.wantDevice(5, 101)
	r.wantFree(p, 3)
	_, err = r.resume(p, annDraft, 0)
	noError(t, err)
	r.wantDevice(0, 105)
	_, err = r.resume(p, bob, 1)
	noError(t, err)
	r.wantDevice(1, 102)
	r.wantFree(p, 5)
	if p.IsOffloaded("ann") || p.IsOffloaded("bob") {
		t.Error("what came back is still said to be on the host")
	}
	r.suspend(p, ann, Offloaded{}, keys, 1) // the name is free again
	noError(t, p.Remove("ann"))
	r.wantFree(p, 5)
}

func TestSuspended_OfNoPagesKeepItsNumbers(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(1)
	r.suspend(p, ann, Offloaded{Position: 3}, nil)
	if !p.IsOffloaded("ann") || p.NumPages(ann) != 0 {
		t.Error("it is not on the host")
	}
	faulttest.Refused(t, p.Offload(r.copies, ann, nil, Offloaded{}), fault.Exists)
	o, err := r.resume(p, ann)
	noError(t, err)
	if o.Position != 3 || p.IsOffloaded("ann") {
		t.Errorf("got back %+v", o)
	}
}

func TestOffload_RefusesWhatCannotBe(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(3)
	for _, o := range []Offloaded{{StoredLen: -1}, {Position: -1}, {Released: -1}} {
		faulttest.Refused(t, p.Offload(r.copies, ann, []page.ID{0}, o), fault.Invalid, "-1")
	}
	faulttest.Refused(t, p.Offload(r.copies, ann, []page.ID{6}, Offloaded{}), fault.Invalid, `offload of "ann"`)
	faulttest.Refused(t, p.Settle(t.Context(), ann), fault.NotFound, `"ann"`)
	noError(t, p.Wait(t.Context()))
	r.wantFree(p, 3)

	r.suspend(p, ann, Offloaded{}, map[page.ID]uint64{0: 7}, 0)
	r.wantFree(p, 2)
	faulttest.Refused(t, p.Offload(r.copies, ann, []page.ID{1}, Offloaded{}), fault.Exists, `"ann"`)
	r.wantFree(p, 2)
	noError(t, p.Settle(t.Context(), ann)) // settled before: nothing to do

	err := p.Offload(r.copies, bob, []page.ID{1, 2, 3, 4}, Offloaded{})
	var full *page.FullError
	if !errors.As(err, &full) || full.Shortfall() != 2 {
		t.Fatalf("got error %v, want a shortfall of 2", err)
	}
	faulttest.Refused(t, err, fault.Full, `"bob"/"main"`)
	if p.IsOffloaded("bob") {
		t.Error("a refused run is on the host")
	}
	r.wantFree(p, 2)
	if _, err := r.resume(p, ann, 5); err != nil {
		t.Fatal(err)
	}
	r.wantDevice(5, 7)
}

func TestReload_RefusesWhatCannotBe(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(2)
	_, err := r.resume(p, ann, 0)
	faulttest.Refused(t, err, fault.NotFound)
	r.write(3, 8)
	release := r.hold(r.copies)
	noError(t, p.Offload(r.copies, ann, []page.ID{3}, Offloaded{}))
	_, err = r.resume(p, ann, 0)
	faulttest.Refused(t, err, fault.Busy, "not settled")
	if err := p.Settle(abandoned(), ann); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	release()
	noError(t, p.Settle(t.Context(), ann))
	for _, pages := range [][]page.ID{nil, {0, 1}} {
		_, err = r.resume(p, ann, pages...)
		faulttest.Refused(t, err, fault.Invalid, "1 host pages")
	}
	_, err = r.resume(p, ann, 6)
	faulttest.Refused(t, err, fault.Invalid)
	_, err = r.resume(p, ann, 0) // in spite of all
	noError(t, err)
	r.wantDevice(0, 8)
	r.wantFree(p, 2)
}

// Whatever is done to a run in whatever order, while its copies are held or not: pages
// go back once, and not before their copy is done.
func TestSuspended_InEveryOrder(t *testing.T) {
	verbs := []string{"settle", "reload", "discard", "remove", "offload", "release"}
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := newShapeRig(t)
			p := r.pool(4)
			rng := rand.New(rand.NewPCG(seed, 0))
			release := r.hold(r.copies)
			held, flying := true, 0
			for range 60 {
				switch verb := verbs[rng.IntN(len(verbs))]; verb {
				case "settle":
					_ = p.Settle(abandoned(), ann)
				case "reload":
					ticket := device.NewTicket()
					if _, err := p.Reload(r.copies, ann, []page.ID{0, 1}, ticket); err == nil {
						flying++
					}
				case "discard":
					noError(t, p.Discard(ann))
				case "remove":
					noError(t, p.Remove("ann"))
				case "offload":
					r.write(3, seed)
					if p.Offload(r.copies, ann, []page.ID{3, 4}, Offloaded{}) == nil {
						flying++
					}
				case "release":
					if release(); !held {
						release = r.hold(r.copies)
					} else {
						noError(t, r.copies.Sync(t.Context()))
					}
					held = !held
				}
				noError(t, p.Check())
				if owned := 4 - p.NumFree(); held && owned < p.NumPages(ann) {
					t.Fatalf("%d pages are owned, and the run has %d", owned, p.NumPages(ann))
				}
			}
			if flying == 0 {
				t.Error("nothing was ever copied")
			}
			release()
			noError(t, r.copies.Sync(t.Context()))
			noError(t, p.Remove("ann"))
			r.wantFree(p, 4)
		})
	}
}

func TestDiscard_KeepsThePagesUntilTheirCopyIsDone(t *testing.T) {
	for _, remove := range []bool{false, true} {
		t.Run(fmt.Sprint("remove=", remove), func(t *testing.T) {
			r := newShapeRig(t)
			p := r.pool(2)
			drop := func() error { return p.Discard(ann) }
			if remove {
				drop = func() error { return p.Remove("ann") }
			}
			noError(t, drop()) // an unknown name is nothing to drop
			release := r.hold(r.copies)
			noError(t, p.Offload(r.copies, ann, []page.ID{0, 1}, Offloaded{}))
			noError(t, drop())
			if p.IsOffloaded("ann") {
				t.Error("still there")
			}
			r.wantFree(p, 0) // a copy may write them yet
			faulttest.Refused(t, p.Settle(t.Context(), ann), fault.NotFound)
			faulttest.Refused(t, p.Close(), fault.Busy)
			release()
			noError(t, p.Wait(t.Context()))
			r.wantFree(p, 2)

			r.suspend(p, ann, Offloaded{}, nil, 0, 1)
			release = r.hold(r.copies)
			ticket := device.NewTicket()
			_, err := p.Reload(r.copies, ann, []page.ID{2, 3}, ticket)
			noError(t, err)
			if p.IsOffloaded("ann") {
				t.Error("on its way back, and still there")
			}
			noError(t, drop())
			r.wantFree(p, 0) // a copy reads them
			release()
			noError(t, wait(ticket))
			r.wantFree(p, 2)
		})
	}
}

func TestSettle_OfAFailedCopyKeepsNothing(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(2)
	r.write(0, 1)
	again := r.pulled()
	release := r.hold(r.copies) // until the ticket is in the queue: a stream known to have failed takes none
	noError(t, p.Offload(r.copies, ann, []page.ID{0}, Offloaded{}))
	release()
	faulttest.Refused(t, p.Settle(t.Context(), ann), fault.Device, r.cable, `"ann"`)
	if p.IsOffloaded("ann") {
		t.Error("a run of which nothing arrived is kept")
	}
	r.wantFree(p, 2)
	faulttest.Refused(t, p.Offload(r.copies, ann, []page.ID{0}, Offloaded{}), fault.Device, r.cable)
	noError(t, p.Wait(t.Context()))
	r.wantFree(p, 2)
	noError(t, p.Offload(again, ann, []page.ID{0}, Offloaded{}))
	noError(t, p.Settle(t.Context(), ann))
	r.wantFree(p, 1)
}

// The host has the only good copy until the pages have arrived on the device.
func TestReload_WhoseCopyFailsCanBeTriedAgain(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(3)
	keys := map[page.ID]uint64{0: 10, 1: 11}
	r.suspend(p, ann, Offloaded{StoredLen: 7, Position: 5}, keys, 0, 1)
	r.poison()
	again := r.pulled()
	release := r.hold(r.copies)
	ticket := device.NewTicket()
	_, err := p.Reload(r.copies, ann, []page.ID{2, 3}, ticket)
	noError(t, err)
	r.wantFree(p, 1)
	release()
	faulttest.Refused(t, wait(ticket), fault.Device, r.cable)
	if p.NumPages(ann) != 2 || !p.IsOffloaded("ann") {
		t.Fatal("the only good copy is gone")
	}
	r.wantFree(p, 1)
	// Refused at once, it is still there.
	ticket = device.NewTicket()
	_, err = p.Reload(r.copies, ann, []page.ID{2, 3}, ticket)
	faulttest.Refused(t, err, fault.Device)
	faulttest.Refused(t, wait(ticket), fault.Device)
	ticket = device.NewTicket()
	o, err := p.Reload(again, ann, []page.ID{4, 5}, ticket)
	noError(t, errors.Join(err, wait(ticket)))
	if o.StoredLen != 7 || o.Position != 5 {
		t.Errorf("got back %+v", o)
	}
	r.wantDevice(4, 10)
	r.wantDevice(5, 11)
	r.wantFree(p, 3)
}

// A run that nobody wants any more does not come back when its reload fails.
func TestReload_WhoseCopyFailsLeavesTheNameToOthers(t *testing.T) {
	for _, meanwhile := range []string{"discard", "remove", "offload"} {
		t.Run(meanwhile, func(t *testing.T) {
			r := newShapeRig(t)
			p := r.pool(3)
			r.suspend(p, ann, Offloaded{StoredLen: 1}, map[page.ID]uint64{0: 10}, 0)
			again := r.pulled()
			release := r.hold(r.copies)
			ticket := device.NewTicket()
			_, err := p.Reload(r.copies, ann, []page.ID{2}, ticket)
			noError(t, err)
			want := 3
			switch meanwhile {
			case "discard":
				noError(t, p.Discard(ann))
			case "remove":
				noError(t, p.Remove("ann"))
			case "offload":
				noError(t, p.Offload(again, ann, []page.ID{1}, Offloaded{StoredLen: 2}))
				noError(t, p.Settle(t.Context(), ann))
				want = 2
			}
			release()
			faulttest.Refused(t, wait(ticket), fault.Device)
			r.wantFree(p, want)
			if p.IsOffloaded("ann") != (meanwhile == "offload") {
				t.Error("the old run is back")
			}
			if meanwhile == "offload" {
				ticket = device.NewTicket()
				o, err := p.Reload(again, ann, []page.ID{2}, ticket)
				noError(t, errors.Join(err, wait(ticket)))
				if o.StoredLen != 2 {
					t.Errorf("the old run is back: %+v", o)
				}
			}
		})
	}
}

// A copy that is refused halfway is still writing when the refusal comes back.
func TestSuspended_RefusedHalfwayHoldTheirPagesUntilTheStreamIsDone(t *testing.T) {
	r := newShapeRig(t)
	p, err := Open(r.options(Options{Pages: 4, Copier: half{copier.NewPortable()}}))
	noError(t, err)
	r.closeAtEnd(p)
	noError(t, wait(p.Grown()))
	release := r.hold(r.copies)
	faulttest.Refused(t, p.Offload(r.copies, ann, []page.ID{0, 1}, Offloaded{}), fault.Device, "ran out of ops")
	if p.IsOffloaded("ann") {
		t.Error("kept")
	}
	r.wantFree(p, 2)
	release()
	noError(t, p.Wait(t.Context()))
	r.wantFree(p, 4)

	p.copier = copier.NewPortable()
	r.suspend(p, ann, Offloaded{}, map[page.ID]uint64{0: 5, 1: 6}, 0, 1)
	p.copier = half{copier.NewPortable()}
	release = r.hold(r.copies)
	ticket := device.NewTicket()
	_, err = p.Reload(r.copies, ann, []page.ID{2, 3}, ticket)
	faulttest.Refused(t, err, fault.Device, "ran out of ops")
	if done, _ := ticket.Poll(); done || p.NumPages(ann) != 2 {
		t.Errorf("ticket done: %v, %d pages kept", done, p.NumPages(ann))
	}
	_, err = r.resumeLater(p, ann, 2, 3)
	faulttest.Refused(t, err, fault.Busy) // until the first has ended
	release()
	faulttest.Refused(t, wait(ticket), fault.Device)
	p.copier = copier.NewPortable()
	_, err = r.resume(p, ann, 4, 5)
	noError(t, err)
	r.wantDevice(4, 5)
	r.wantDevice(5, 6)
	r.wantFree(p, 4)
}

// resumeLater is resume without waiting.
func (r *rig) resumeLater(p *Pool, name Name, pages ...page.ID) (*device.Ticket, error) {
	t := device.NewTicket()
	_, err := p.Reload(r.copies, name, pages, t)
	return t, err
}

func TestReload_OfACorruptPageDiscardsTheRun(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(4)
	keys := map[page.ID]uint64{0: 1, 1: 2, 2: 3}
	r.suspend(p, ann, Offloaded{}, keys, 0, 1)
	r.suspend(p, bob, Offloaded{}, keys, 2)
	hostBytes(t, p, p.suspended[ann].Pages[1])[9] ^= 4
	r.poison()
	_, err := r.resume(p, ann, 3, 4)
	faulttest.Refused(t, err, fault.Corrupt, "page 1 of the run", `"ann"`)
	for _, dev := range []page.ID{3, 4} {
		if b := r.read(dev); !bytes.Equal(b, bytes.Repeat([]byte{0xAB}, len(b))) {
			t.Errorf("bytes of a corrupt run are on device page %d", dev)
		}
	}
	_, err = r.resume(p, ann, 3, 4)
	faulttest.Refused(t, err, fault.NotFound)
	r.wantFree(p, 3)
	_, err = r.resume(p, bob, 5)
	noError(t, err)
	r.wantDevice(5, 3)
}

// Sync orders a stream behind the copies, both ways; without it the stream runs ahead,
// and is seen to.
func TestSync_OrdersAStreamBehindCopiesOfBothDirections(t *testing.T) {
	for _, synced := range []bool{true, false} {
		for _, direction := range []string{"offload", "reload"} {
			t.Run(fmt.Sprintf("%s/synced=%v", direction, synced), func(t *testing.T) {
				r := newShapeRig(t)
				p := r.pool(2)
				engine := r.stream("engine")
				noError(t, p.Sync(engine)) // no copy yet: nothing to wait for
				r.suspend(p, ann, Offloaded{}, map[page.ID]uint64{0: 1}, 0)
				r.write(0, 2)
				noError(t, engine.Sync(t.Context()))
				release := r.hold(r.copies)
				var ticket *device.Ticket
				var err error
				if direction == "offload" {
					err = p.Offload(r.copies, bob, []page.ID{0}, Offloaded{})
				} else {
					ticket, err = r.resumeLater(p, ann, 0)
				}
				noError(t, err)
				if synced {
					noError(t, p.Sync(engine))
				}
				// The engine uses page 0 again: an event says whether it has.
				e, err := r.dev.NewEvent()
				noError(t, err)
				noError(t, engine.Record(e))
				if !synced {
					noError(t, e.Sync(t.Context()))
				}
				if e.Done() == synced {
					t.Errorf("the engine's stream has run ahead: %v", !synced)
				}
				release()
				noError(t, e.Sync(t.Context()))
				if synced && ticket != nil {
					r.wantDevice(0, 1)
				}
				if ticket != nil {
					noError(t, wait(ticket))
				}
				if direction == "offload" {
					noError(t, p.Settle(t.Context(), bob))
				}
			})
		}
	}
}

func TestClose_WithRunsOnTheHost(t *testing.T) {
	r := newShapeRig(t)
	p, err := Open(r.options(Options{Pages: 3}))
	noError(t, err)
	noError(t, wait(p.Grown()))
	r.suspend(p, ann, Offloaded{}, nil, 0)
	release := r.hold(r.copies)
	noError(t, p.Offload(r.copies, bob, []page.ID{1}, Offloaded{}))
	faulttest.Refused(t, p.Close(), fault.Busy)
	if err := p.Wait(abandoned()); !errors.Is(err, context.Canceled) {
		t.Errorf("waited for a copy that is held: %v", err)
	}
	release()
	noError(t, p.Wait(t.Context()))
	noError(t, p.Close())
	faulttest.Refused(t, p.Offload(r.copies, ann, nil, Offloaded{}), fault.Closed)
	faulttest.Refused(t, p.Settle(t.Context(), bob), fault.Closed)
	faulttest.Refused(t, p.Discard(bob), fault.Closed)
	faulttest.Refused(t, p.Remove("bob"), fault.Closed)
	_, err = r.resumeLater(p, ann, 0)
	faulttest.Refused(t, err, fault.Closed)
}

// A page that is being summed is nobody else's to write, nor to unmap.
func TestSettle_HoldsThePagesThatItSums(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(1)
	noError(t, p.Offload(r.copies, ann, []page.ID{0}, Offloaded{}))
	noError(t, p.Wait(t.Context()))
	x, summed := p.suspended[ann], device.NewTicket()
	settled, err := p.holdToSum(ann, x, summed)
	if settled || err != nil {
		t.Fatalf("settled %v, error %v", settled, err)
	}
	faulttest.Refused(t, p.Settle(t.Context(), ann), fault.Busy)
	faulttest.Refused(t, p.Close(), fault.Busy)
	noError(t, p.Discard(ann))
	r.wantFree(p, 0)
	summed.Complete(nil)
	r.wantFree(p, 1)
}

func TestSuspended_FromManyGoroutines(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(4)
	var settled, reloaded, wrong int
	for round := range 200 {
		r.write(0, uint64(round))
		noError(t, p.Offload(r.copies, ann, []page.ID{0, 1}, Offloaded{StoredLen: round}))
		var all sync.WaitGroup
		var mu sync.Mutex
		count := func(n *int) { mu.Lock(); *n++; mu.Unlock() }
		for i := range 2 {
			all.Go(func() {
				if err := p.Settle(context.Background(), ann); err == nil {
					count(&settled)
				} else if !errors.Is(err, fault.NotFound) && !errors.Is(err, fault.Busy) {
					count(&wrong)
				}
			})
			all.Go(func() { // two reloads, of which one at most gets it
				ticket := device.NewTicket()
				o, err := p.Reload(r.copies, ann, []page.ID{page.ID(2 * (i + 1)), page.ID(2*(i+1) + 1)}, ticket)
				if err == nil && ticket.Wait(context.Background()) == nil {
					count(&reloaded)
					if o.StoredLen != round || !r.holds(r.read(page.ID(2*(i+1))), uint64(round)) {
						count(&wrong)
					}
				}
			})
		}
		if round%2 == 0 {
			all.Go(func() {
				if err := p.Discard(ann); err != nil {
					count(&wrong)
				}
			})
		}
		all.Wait()
		noError(t, p.Discard(ann))
		noError(t, p.Wait(t.Context()))
		r.wantFree(p, 4)
	}
	if settled == 0 || wrong > 0 || reloaded > 200 {
		t.Errorf("%d settled, %d reloaded, %d wrong", settled, reloaded, wrong)
	}
}
