package transfer

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func (p *pair) published(o PublisherOptions) *Descriptor {
	p.Helper()
	if o.Holder == nil {
		o.Holder = HoldArena(p.arena)
	}
	p.publisher = p.publish(o)
	return must(p.publisher.Publish(Lease{Pages: p.pages[:4], TTL: time.Minute}))(p)
}

func TestReader_PromisesAreAskedFor(t *testing.T) {
	pair := newPair(t)
	d := must(pair.publish(PublisherOptions{}).Publish(Lease{Pages: pair.pages[:4], TTL: time.Minute}))(t)
	if err := pair.read(Options{}).Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.Unsupported) {
		t.Errorf("no lease: error %v, want kind unsupported", err)
	}
	noError(t, pair.read(Options{AcceptUnleased: true}).Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
}

func TestReader_ExpiredLeaseIsNotTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		d := pair.published(PublisherOptions{})
		r := pair.read(Options{})
		<-time.After(time.Minute)
		if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.NotFound) || pair.engine.opened != 0 {
			t.Errorf("error %v, want kind not found", err)
		}
	})
}

func TestReader_KnowsItsOwn(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	r := must(NewReader(Options{Cache: pair.far, Device: pair.host, Engines: []Engine{pair.engine}, Publisher: pair.publisher}))(t)
	t.Cleanup(func() { noError(t, r.Close()) })
	if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "own") {
		t.Errorf("error %v, want kind invalid", err)
	}
	own := must(r.Descriptor())(t)
	if own.Owner != d.Owner || len(own.Pages) != 0 || len(own.Offers) != 1 {
		t.Errorf("the reader describes %v", own)
	}
	if _, err := pair.read(Options{}).Descriptor(); !errors.Is(err, fault.Unsupported) {
		t.Errorf("a descriptor without a publisher: error %v, want kind unsupported", err)
	}
	if _, err := NewReader(Options{Cache: pair.near, Device: pair.host, Publisher: pair.publisher}); !errors.Is(err, fault.Invalid) {
		t.Errorf("a publisher of another cache: error %v, want kind invalid", err)
	}
}

func TestReader_TakesTheOwnersFirstChoice(t *testing.T) {
	pair := newPair(t)
	slow, fast, other := &fakeEngine{name: "slow"}, &fakeEngine{name: "fast"}, &fakeEngine{name: "other"}
	d := pair.published(PublisherOptions{Engines: []Engine{&fakeEngine{name: "quiet", silent: true}, fast, slow}})
	noError(t, pair.read(Options{Engines: []Engine{slow, other, fast}}).Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	if fast.opened != 1 || slow.opened != 0 {
		t.Errorf("opened by fast %d times and by slow %d times", fast.opened, slow.opened)
	}
	err := pair.read(Options{Engines: []Engine{other}}).Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d)
	if !errors.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), `["fast" "slow"]`) || !strings.Contains(err.Error(), `["other"]`) {
		t.Errorf("error %v, want kind unsupported and both lists", err)
	}
	alone := pair.read(Options{})
	noError(t, alone.Retrieve(t.Context(), 8, 8, nil, nil, nil))
}

func TestReader_FailureIsLatchedNamedAndCanBeTriedAgain(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	r := pair.read(Options{})
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	pair.engine.copies = func(context.Context, device.Stream) error { return fault.New(fault.Device, "link", "is down") }
	ticket := r.StartRetrieve(t.Context(), 0, 8, pair.pages, pair.pages, d)
	for range 2 {
		err := ticket.Wait(t.Context())
		if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "read of tokens [0, 8) from "+d.Owner.String()+" by fake: link: is down") {
			t.Errorf("error %v", err)
		}
	}
	if pair.engine.closed != 1 {
		t.Errorf("an owner whose copy failed stays open")
	}
	pair.engine.copies = nil
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	if pair.engine.opened != 2 {
		t.Errorf("opened %d times, want 2", pair.engine.opened)
	}
	if want := (Stats{Reads: 3, Failures: 1, Pages: 2}); r.Stats() != want {
		t.Errorf("the reader counts %+v, want %+v", r.Stats(), want)
	}
	fresh := pair.read(Options{})
	pair.engine.fail = errors.New("nobody there")
	if err := fresh.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, pair.engine.fail) || !errors.Is(err, fault.Device) {
		t.Errorf("error %v, want %v", err, pair.engine.fail)
	}
	pair.engine.fail = nil
	noError(t, fresh.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
}

// A stopped owner takes nobody's time beyond the deadline, and gives the pages back only
// when it moves again.
func TestReader_Deadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		d := pair.published(PublisherOptions{})
		r := pair.read(Options{Deadline: 7 * time.Second, MaxWorkers: 1})
		moves := make(chan struct{})
		pair.engine.copies = func(context.Context, device.Stream) error {
			<-moves
			return nil
		}
		began := time.Now()
		var waiting sync.WaitGroup
		for range 2 { // one in the copy, and one that waits for its turn
			waiting.Go(func() {
				err := r.Retrieve(context.Background(), 0, 8, pair.pages, pair.pages, d)
				if !errors.Is(err, fault.Busy) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v, want kind busy, deadline exceeded", err)
				}
				if u, ok := errors.AsType[*UnfinishedError](err); ok && !strings.Contains(u.Error(), "goes on") {
					t.Errorf("a read that is not over says %q", u)
				}
				if waited := time.Since(began); waited != 7*time.Second {
					t.Errorf("waited %v", waited)
				}
			})
		}
		waiting.Wait()
		// The turn is free again, though the copy is not over.
		late := r.StartRetrieve(context.Background(), 0, 8, pair.pages, pair.pages, d)
		synctest.Wait()
		if over, _ := late.Poll(); over {
			t.Error("done while its copy is running")
		}
		close(moves)
		noError(t, late.Wait(context.Background()))
		if len(r.streams) > 1 {
			t.Errorf("%d idle streams of one worker", len(r.streams))
		}
	})
}

// What the engine has enqueued before a read runs before it.
func TestReader_WaitsForCompute(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	compute := must(pair.host.NewStream("compute"))(t)
	t.Cleanup(func() { noError(t, compute.Close()) })
	from, to := must(pair.far.Region(0))(t), must(pair.near.Region(0))(t)
	for _, fenced := range []bool{true, false} {
		copied := make(chan struct{}, 1)
		pair.engine.copies = func(context.Context, device.Stream) error {
			copied <- struct{}{}
			return nil
		}
		o := Options{}
		if fenced {
			o.Compute = compute
		}
		r := pair.read(o)
		release := pair.host.Hold(compute)
		noError(t, compute.Copy([]device.Op{{Dst: to, Src: from, Bytes: 8}}))
		ticket := r.StartRetrieve(t.Context(), 0, 8, pair.pages, pair.pages, d)
		if !fenced { // the control: it does not wait, and is over while compute is held
			noError(t, ticket.Wait(t.Context()))
		}
		if over, err := ticket.Poll(); fenced && (over || len(copied) > 0) {
			t.Errorf("over %t, error %v, while compute is held", over, err)
		}
		release()
		noError(t, ticket.Wait(t.Context()))
		noError(t, compute.Sync(t.Context()))
	}
}

func TestReader_PeersMakeRoom(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	r := pair.read(Options{})
	for i := range maxIdlePeers + 10 {
		other := *d
		other.Owner = OwnerID{byte(i)}
		noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, &other))
	}
	if pair.engine.opened != maxIdlePeers+10 || pair.engine.closed != 10 {
		t.Errorf("opened %d and closed %d", pair.engine.opened, pair.engine.closed)
	}
	noError(t, r.Close())
	if pair.engine.closed != pair.engine.opened {
		t.Errorf("%d of %d stay open", pair.engine.opened-pair.engine.closed, pair.engine.opened)
	}
	noError(t, r.Close())
}

func TestNewReader_Refuses(t *testing.T) {
	pair := newPair(t)
	for name, o := range map[string]Options{
		"no cache":    {Device: pair.host},
		"no device":   {Cache: pair.near},
		"less than 0": {Cache: pair.near, Device: pair.host, MaxWorkers: -1},
		"too many":    {Cache: pair.near, Device: pair.host, MaxWorkers: maxWorkers + 1},
		"deadline":    {Cache: pair.near, Device: pair.host, Deadline: -1},
	} {
		if _, err := NewReader(o); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}

// Allocations are those of a read, whatever its length.
func TestReader_AllocatesNothingForAPage(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	r := pair.read(Options{})
	allocations := func(pages int) float64 {
		return testing.AllocsPerRun(50, func() {
			noError(t, r.Retrieve(context.Background(), 0, pages*shape.PageSize, pair.pages, pair.pages, d))
		})
	}
	if few, many := allocations(2), allocations(len(pair.pages)); many > few+2 {
		t.Errorf("%v allocations for 2 pages, %v for %d", few, many, len(pair.pages))
	}
}

func TestReader_AcknowledgesByItsEngine(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	r := pair.read(Options{})
	d := must(p.Publish(Lease{Pages: pair.pages[:4], TTL: time.Minute}))(t)
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages[:1], pair.pages[:1], d))
	if p.Leased() != 1 {
		t.Error("a read alone ended the publication")
	}
	noError(t, r.Ack(t.Context(), d))
	if p.Leased() != 0 || pair.engine.opened != 1 {
		t.Errorf("%d publications after the acknowledgement, the owner opened %d times", p.Leased(), pair.engine.opened)
	}
	noError(t, r.Close())
	if err := r.Ack(t.Context(), d); !errors.Is(err, fault.Closed) {
		t.Errorf("after Close: %v, want kind closed", err)
	}
}

// Of two reads that want one owner, the one that opens it is given up: the other opens.
func TestReader_OpensAnewWhatAnotherGaveUp(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	opening, second := make(chan struct{}), make(chan struct{})
	var opens atomic.Int64
	pair.engine.opens = func(ctx context.Context) error {
		if opens.Add(1) > 1 {
			return nil
		}
		close(opening)
		<-ctx.Done()
		<-second
		return ctx.Err()
	}
	r := pair.read(Options{})
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	first := r.StartRetrieve(ctx, 0, 8, pair.pages, pair.pages, d)
	<-opening
	other := r.StartRetrieve(t.Context(), 8, 16, pair.pages, pair.pages, d)
	cancel()
	close(second)
	if err := first.Wait(t.Context()); !errors.Is(err, fault.Busy) || !errors.Is(err, context.Canceled) {
		t.Errorf("the first: %v, want kind busy, canceled", err)
	}
	if err := other.Wait(t.Context()); err != nil {
		t.Errorf("the other: %v", err)
	}
	if opens.Load() != 2 {
		t.Errorf("opened %d times", opens.Load())
	}
}

// An engine with sums of its own sees a page that was reused as corrupt: it is gone.
func TestReader_SaysGoneOfAPageThatWasReusedWhileItWasSent(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	r := pair.read(Options{})
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	corrupt := fault.New(fault.Corrupt, "page 1", "arrived with another sum")
	pair.engine.copies = func(context.Context, device.Stream) error { return corrupt }
	if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.Corrupt) {
		t.Errorf("while it is published: %v, want kind corrupt", err)
	}
	pair.engine.copies = func(context.Context, device.Stream) error { return errors.Join(corrupt, p.End(d.Epoch)) }
	if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.NotFound) || errors.Is(err, fault.Corrupt) {
		t.Errorf("when it has ended: %v, want kind not found", err)
	}
}

// A descriptor's fields are anybody's to change. What no longer goes together is refused,
// also for the parts that nobody but this package sees.
func TestReader_RefusesADescriptorThatWasCutShort(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	r := pair.read(Options{})
	remote := []page.ID{9, 5, 2}
	d := must(p.Publish(Lease{Pages: remote, Sums: make([]Sum, 3), TTL: time.Minute}))(t)
	for name, change := range map[string]func(d *Descriptor){
		"sums":           func(d *Descriptor) { d.Sums = d.Sums[:1] },
		"pages":          func(d *Descriptor) { d.Pages = d.Pages[:1] },
		"pages and sums": func(d *Descriptor) { d.Pages, d.Sums = d.Pages[:1], d.Sums[:1] },
		"a page more":    func(d *Descriptor) { d.Pages = append(d.Pages[:3:3], 1); d.Sums = nil },
	} {
		x := *d
		change(&x)
		if err := r.Retrieve(t.Context(), 0, 24, pair.pages, remote, &x); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}

// What names no publication acknowledges none.
func TestReader_AcknowledgesNothingByADescriptorOfNothing(t *testing.T) {
	pair := newPair(t)
	pair.published(PublisherOptions{})
	d := must(pair.publisher.Descriptor())(t)
	if err := pair.read(Options{}).Ack(t.Context(), d); !errors.Is(err, fault.Invalid) || pair.publisher.Leased() != 1 {
		t.Errorf("error %v, want kind invalid; %d publications", err, pair.publisher.Leased())
	}
}

// An owner that is gone is not kept open, and one that has ended a publication is.
func TestReader_LetsGoOfAnOwnerThatIsGone(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	r := pair.read(Options{})
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	noError(t, pair.publisher.End(d.Epoch))
	if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.NotFound) || pair.engine.closed != 0 {
		t.Errorf("a publication has ended: error %v, want kind not found; %d owners closed", err, pair.engine.closed)
	}
	pair.engine.gone = fault.New(fault.NotFound, "owner", "has ended")
	if err := r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d); !errors.Is(err, fault.NotFound) || pair.engine.closed != 1 {
		t.Errorf("the owner has gone: error %v, want kind not found; %d owners closed", err, pair.engine.closed)
	}
}

// Sums of a read that is given up are not taken to the end.
func TestCheckSums_GivesUp(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	d.Sums = must(AppendSums(nil, pair.far, d.Pages))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := &Plan{}
	noError(t, p.Set(0, 16, pair.pages, d.Pages, shape.PageSize))
	if n, err := checkSums(ctx, pair.far, p, d); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d pages were checked: %v", n, err)
	}
}

// ended is a context that ends between one look at it and the next.
type ended struct{ context.Context } //nolint:containedctx // is one

func (ended) Done() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// What an opener is told goes to nobody who comes when it has given up.
func TestReader_TellsNobodyOfAnEarlierFailure(t *testing.T) {
	pair := newPair(t)
	d := pair.published(PublisherOptions{})
	r := pair.read(Options{})
	pair.engine.fail = fault.New(fault.Device, "bus", "gone")
	for range 100 { // of the two that have happened, a select takes either
		if _, err := r.open(ended{t.Context()}, &job{d: d, ways: []way{{engine: pair.engine}}}); len(r.peers) != 0 {
			t.Fatalf("%v; an owner that could not be opened is still in the table", err)
		}
	}
}

// One reader is one of those that are awaited, however often it acknowledges.
func TestReader_AcknowledgesOnce(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute, Readers: 2}))(t)
	r := pair.read(Options{})
	for range 3 {
		noError(t, r.Ack(t.Context(), d))
	}
	if p.Leased() != 1 {
		t.Fatal("one reader has acknowledged for two")
	}
	noError(t, pair.read(Options{}).Ack(t.Context(), d))
	if p.Leased() != 0 {
		t.Error("both have acknowledged, and the publication lives")
	}
}

// An owner's first choice may be an engine of its own host: on another one a read takes
// the next, and stays with it.
func TestReader_TakesTheNextEngineWhenOneCannotOpen(t *testing.T) {
	pair := newPair(t)
	far := &fakeEngine{name: "far"}
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena), Engines: []Engine{pair.engine, far}})
	r := pair.read(Options{Engines: []Engine{far, pair.engine}})
	pair.engine.fail = fault.New(fault.NotFound, "socket", "is on another host").Hint("go there")
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	if far.opened != 1 {
		t.Errorf("opened %d times by the second engine", far.opened)
	}
	pair.engine.fail = nil
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	noError(t, r.Ack(t.Context(), d))
	if pair.engine.opened != 0 || far.opened != 1 || p.Leased() != 0 {
		t.Errorf("opened %d and %d times; %d publications are left", pair.engine.opened, far.opened, p.Leased())
	}

	other := pair.read(Options{Engines: []Engine{far, pair.engine}})
	d = must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	pair.engine.fail = fault.New(fault.NotFound, "socket", "is on another host").Hint("go there")
	far.fail = fault.New(fault.Device, "network", "is down")
	err := other.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d)
	if !errors.Is(err, fault.NotFound) || !errors.Is(err, fault.Device) || fault.RemedyOf(err) == "" ||
		!strings.Contains(err.Error(), "another host") || !strings.Contains(err.Error(), "by far: open: network: is down") {
		t.Errorf("both fail: %v", err)
	}
}

// A request that is aborted costs no other one the connection to the owner.
func TestReader_KeepsAnOwnerWhenAReadIsCancelled(t *testing.T) {
	pair := newPair(t)
	p := pair.publish(PublisherOptions{Holder: HoldArena(pair.arena)})
	r := pair.read(Options{})
	d := must(p.Publish(Lease{Pages: pair.pages, TTL: time.Minute}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	pair.engine.copies = func(ctx context.Context, _ device.Stream) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	if err := r.StartRetrieve(ctx, 0, 8, pair.pages, pair.pages, d).Wait(t.Context()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	pair.engine.copies = nil
	noError(t, r.Retrieve(t.Context(), 0, 8, pair.pages, pair.pages, d))
	if pair.engine.opened != 1 || pair.engine.closed != 0 {
		t.Errorf("opened %d times and closed %d times", pair.engine.opened, pair.engine.closed)
	}
}
