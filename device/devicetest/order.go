package devicetest

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// hazard is two copies of one page on two streams, in this order.
type hazard struct {
	name          string
	first, second func(x *hazardPages) device.Op
	want          func(r *rig, x *hazardPages) bool // after both
}

type hazardPages struct{ page, in, in2, out *device.Memory }

var hazards = []hazard{
	{
		name:   "ReadAfterWrite",
		first:  func(x *hazardPages) device.Op { return whole(x.page, x.in) },
		second: func(x *hazardPages) device.Op { return whole(x.out, x.page) },
		want:   func(r *rig, x *hazardPages) bool { return r.holds(x.out, 'i') },
	},
	{
		name:   "WriteAfterRead",
		first:  func(x *hazardPages) device.Op { return whole(x.out, x.page) },
		second: func(x *hazardPages) device.Op { return whole(x.page, x.in) },
		want:   func(r *rig, x *hazardPages) bool { return r.holds(x.out, 'p') && r.holds(x.page, 'i') },
	},
	{
		name:   "WriteAfterWrite",
		first:  func(x *hazardPages) device.Op { return whole(x.page, x.in) },
		second: func(x *hazardPages) device.Op { return whole(x.page, x.in2) },
		want:   func(r *rig, x *hazardPages) bool { return r.holds(x.page, 'j') },
	},
}

// holds reports whether m holds what who writes, everywhere.
func (r *rig) holds(m *device.Memory, who byte) bool {
	return firstDiff(r.read(m, 0, m.Size()), contents(who, 0, m.Size())) < 0
}

func orderCases() []testCase {
	var all []testCase
	for _, h := range hazards {
		all = append(all,
			testCase{"Wait_Orders" + h.name, func(r *rig) { h.run(r, true) }},
			testCase{"NegativeControl_WithoutWait" + h.name + "GoesWrong", func(r *rig) { h.run(r, false) }},
		)
	}
	return append(all, eventCases...)
}

// run holds the first stream back, enqueues both copies, and checks the bytes:
// right when the second stream waits, wrong when it does not.
func (h *hazard) run(r *rig, wait bool) {
	const size = 8 << 10
	x := &hazardPages{r.page(size, 'p'), r.page(size, 'i'), r.page(size, 'j'), r.page(size, 'o')}
	a, b := r.stream("first"), r.stream("second")
	release := r.hold(a)
	r.copy(a, h.first(x))
	e := r.record(a)
	if wait {
		r.must(b.Wait(e))
	}
	r.copy(b, h.second(x))
	t := r.signal(b)
	if wait {
		r.stillOpen("second copy", t)
	} else {
		r.must(r.outcome(t))
	}
	release()
	r.must(r.outcome(t))
	r.sync(a)
	if got := h.want(r, x); got != wait {
		r.Errorf("bytes right: %v, want %v", got, wait)
	}
}

var eventCases = []testCase{
	{"Stream_RunsWorkInOrder", func(r *rig) {
		// A chain in which each copy reads what the one before has written.
		const links, size = 200, 1 << 10
		m, s := r.alloc(links*size), r.stream("s")
		r.write(m, contents('a', 0, size))
		for i := int64(1); i < links; i++ {
			r.copy(s, device.Op{Dst: m, Src: m, DstOff: i * size, SrcOff: (i - 1) * size, Bytes: size})
		}
		r.sync(s)
		r.want("last link", m, (links-1)*size, contents('a', 0, size))
	}},
	{"Stream_HoldsNoOtherStreamBack", func(r *rig) {
		a, b := r.stream("a"), r.stream("b")
		src, dst := r.page(64, 's'), r.alloc(64)
		r.hold(a)
		r.copy(a, whole(r.alloc(64), src))
		r.copy(b, whole(dst, src))
		r.must(r.outcome(r.signal(b)))
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Signal_CompletesOnlyAfterTheCopies", func(r *rig) {
		src, dst, s := r.page(64, 's'), r.page(64, 'd'), r.stream("s")
		release := r.hold(s)
		r.copy(s, whole(dst, src))
		t := r.signal(s)
		r.stillOpen("held", t)
		if r.holds(dst, 's') {
			r.Error("the copy of a held stream has run")
		}
		release()
		r.must(r.outcome(t))
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Signal_OfAnIdleStreamCompletes", func(r *rig) {
		r.must(r.outcome(r.signal(r.stream("s"))))
	}},
	{"Signal_LeavesAFinishedTicketAlone", func(r *rig) {
		first := errors.New("first")
		s, t := r.stream("s"), device.Completed(first)
		r.must(s.Signal(t))
		r.sync(s)
		if err := r.outcome(t); !errors.Is(err, first) {
			r.Errorf("outcome is %v, want the first one", err)
		}
	}},
	{"Wait_OfAnEventNeverRecordedIsNoWait", func(r *rig) {
		s, e := r.stream("s"), r.event()
		if !e.Done() {
			r.Error("an event never recorded is not done")
		}
		r.must(e.Sync(context.Background()))
		r.must(s.Wait(e))
		r.must(r.outcome(r.signal(s)))
	}},
	{"Wait_ForItsOwnStreamIsNoWait", func(r *rig) {
		s := r.stream("s")
		release := r.hold(s)
		r.copy(s, whole(r.alloc(64), r.alloc(64)))
		r.must(s.Wait(r.record(s)))
		t := r.signal(s)
		release()
		r.must(r.outcome(t))
	}},
	{"Wait_HoldsOnlyLaterWorkBack", func(r *rig) {
		a, b := r.stream("a"), r.stream("b")
		release := r.hold(a)
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		e := r.record(a)
		before := r.signal(b)
		r.must(b.Wait(e))
		after := r.signal(b)
		r.must(r.outcome(before))
		r.stillOpen("behind the wait", after)
		release()
		r.must(r.outcome(after))
	}},
	{"Wait_ReachesThroughOtherStreams", func(r *rig) {
		a, b, c := r.stream("a"), r.stream("b"), r.stream("c")
		src, mid, dst := r.page(64, 's'), r.alloc(64), r.alloc(64)
		release := r.hold(a)
		r.copy(a, whole(mid, src))
		r.must(b.Wait(r.record(a)))
		r.must(c.Wait(r.record(b))) // b has nothing but its wait
		r.copy(c, whole(dst, mid))
		t := r.signal(c)
		r.stillOpen("two streams on", t)
		release()
		r.must(r.outcome(t))
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Event_StandsForWorkBeforeTheRecordOnly", func(r *rig) {
		// Stream a is stopped between its record and its next copy by c.
		a, b, c := r.stream("a"), r.stream("b"), r.stream("c")
		release := r.hold(c)
		r.copy(c, whole(r.alloc(64), r.alloc(64)))
		gate := r.record(c)
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		e := r.record(a)
		r.must(a.Wait(gate))
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		t := r.signal(a)
		r.must(b.Wait(e))
		r.must(r.outcome(r.signal(b)))
		if !e.Done() {
			r.Error("the event waits for work enqueued after it was recorded")
		}
		r.stillOpen("behind the gate", t)
		release()
		r.must(r.outcome(t))
	}},
	{"Event_RecordedAgainChangesNoEarlierWait", func(r *rig) {
		a, b := r.stream("a"), r.stream("b")
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		r.sync(a)
		release := r.hold(a)
		e := r.record(a) // a point that is over
		r.must(b.Wait(e))
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		r.must(a.Record(e)) // now one that is not
		r.must(r.outcome(r.signal(b)))
		if e.Done() {
			r.Error("the event stands for its first recording")
		}
		r.must(b.Wait(e))
		t := r.signal(b)
		r.stillOpen("a wait for the second recording", t)
		release()
		r.must(r.outcome(t))
	}},
	{"Event_RecordedOnAnotherStreamStandsForThatOne", func(r *rig) {
		a, b, c := r.stream("a"), r.stream("b"), r.stream("c")
		release := r.hold(a)
		r.copy(a, whole(r.alloc(64), r.alloc(64)))
		e := r.record(a)
		r.must(b.Record(e))
		r.must(c.Wait(e))
		r.must(r.outcome(r.signal(c)))
		if !e.Done() {
			r.Error("the event still stands for the first stream")
		}
		release()
		r.sync(a)

		// And the other way: from a point that is over to one that is not.
		release = r.hold(b)
		r.must(a.Record(e))
		r.copy(b, whole(r.alloc(64), r.alloc(64)))
		r.must(b.Record(e))
		r.must(c.Wait(e))
		t := r.signal(c)
		r.stillOpen("a wait for the second stream", t)
		release()
		r.must(r.outcome(t))
	}},
	{"Event_SyncWaitsForItsWork", func(r *rig) {
		src, dst, s := r.page(64, 's'), r.alloc(64), r.stream("s")
		release := r.hold(s)
		r.copy(s, whole(dst, src))
		e := r.record(s)
		if e.Done() {
			r.Error("the event of a held copy is done")
		}
		r.gaveUp("event", e.Sync)
		release()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		r.must(e.Sync(ctx))
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Event_OfAnotherKindOfDeviceIsRefused", func(r *rig) {
		s := r.stream("s")
		for _, e := range []device.Event{nil, foreignEvent{}} {
			r.wantKind(fmt.Sprintf("record of %T", e), s.Record(e), fault.Invalid)
			r.wantKind(fmt.Sprintf("wait for %T", e), s.Wait(e), fault.Invalid)
		}
		r.wantKind("signal of no ticket", s.Signal(nil), fault.Invalid)
		r.sync(s)
	}},
	{"Sync_EndsWithItsContext", func(r *rig) {
		src, dst, s := r.page(64, 's'), r.alloc(64), r.stream("s")
		release := r.hold(s)
		r.copy(s, whole(dst, src))
		r.gaveUp("stream", s.Sync)
		release()
		r.sync(s) // giving up has changed nothing
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Sync_OfFinishedWorkNeedsNoContext", func(r *rig) {
		s := r.stream("s")
		r.copy(s, whole(r.alloc(64), r.alloc(64)))
		r.sync(s)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		r.must(s.Sync(ended))
	}},
}

// gaveUp checks that wait, on something that does not happen, ends with a
// context that ends meanwhile and with one that has ended already.
func (r *rig) gaveUp(what string, wait func(context.Context) error) {
	r.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- wait(ctx) }()
	r.settle()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		r.Errorf("sync of a held %s: got %v, want %v", what, err, context.Canceled)
	}
	if err := wait(ctx); !errors.Is(err, context.Canceled) {
		r.Errorf("sync of a held %s, too late: got %v, want %v", what, err, context.Canceled)
	}
}

type foreignEvent struct{}

func (foreignEvent) Done() bool                 { return true }
func (foreignEvent) Sync(context.Context) error { return nil }
