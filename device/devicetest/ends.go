package devicetest

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// endCases are about streams that failed and things that were closed.
var endCases = []testCase{
	{"FailedStream_SkipsWhatIsBehindAndKeepsItsFirstError", func(r *rig) {
		src, ok, dst, s := r.page(64, 's'), r.alloc(64), r.page(64, 'd'), r.stream("s")
		e2 := r.event()
		release := r.hold(s)
		r.copy(s, whole(ok, src))
		before := r.signal(s)
		r.sabotage(s)
		r.copy(s, whole(r.alloc(64), src))
		failed := r.signal(s)
		second := r.Fail(s)
		r.copy(s, whole(dst, src))
		skipped := r.signal(s)
		e := r.record(s)
		release()

		if err := r.outcome(before); r.FailsDevice && err != nil {
			r.broken("copy that had run when the device was lost", err)
		} else {
			r.must(err)
			r.want("copy before the failure", ok, 0, contents('s', 0, 64))
		}
		first := r.outcome(failed)
		r.broken("failed copy", first)
		behind := r.outcome(skipped)
		r.broken("copy behind it", behind)
		if !errors.Is(r.cause, second) && errors.Is(behind, second) {
			r.Errorf("a second failure has changed the error: %v", behind)
		}
		r.broken("sync", s.Sync(context.Background()))
		if !e.Done() {
			r.Error("the event behind skipped work is not done, and never will be")
		}
		if r.holds(dst, 's') {
			r.Error("the copy behind the failure has run")
		}

		t := device.NewTicket()
		r.broken("copy", s.Copy([]device.Op{whole(dst, src)}))
		r.broken("copy of nothing", s.Copy(nil))
		r.broken("record", s.Record(e2))
		r.broken("wait", s.Wait(e))
		r.broken("signal", s.Signal(t))
		r.broken("second sync", s.Sync(context.Background()))
		r.broken("close", s.Close())
		if done, _ := t.Poll(); done {
			r.Error("a ticket that signal refused was completed")
		}
		if again := s.Close(); again == nil || again.Error() != first.Error() {
			r.Errorf("the error was %v and is now %v", first, again)
		}
	}},
	{"FailedStream_LeavesOtherStreamsAlone", func(r *rig) {
		r.alone()
		src, dst, a, b := r.page(64, 's'), r.alloc(64), r.stream("a"), r.stream("b")
		release := r.hold(a)
		r.sabotage(a)
		r.copy(a, whole(r.alloc(64), src))
		e := r.record(a)
		release()
		r.broken("sync", a.Sync(context.Background()))
		r.must(b.Wait(e))
		r.copy(b, whole(dst, src))
		r.must(r.outcome(r.signal(b)))
		r.want("destination on the other stream", dst, 0, contents('s', 0, 64))
	}},
	{"FailedDevice_FailsEveryStream", func(r *rig) {
		if !r.FailsDevice {
			r.Skip("a failure is one of a stream alone")
		}
		src, a, b, c := r.page(64, 's'), r.stream("a"), r.stream("b"), r.stream("c")
		dst, waits := r.alloc(64), r.alloc(64)
		releaseA, releaseB := r.hold(a), r.hold(b)
		r.copy(b, whole(r.alloc(64), src)) // held until the end
		held := r.signal(b)
		r.must(c.Wait(r.record(b)))
		r.copy(c, whole(waits, src))
		waiting := r.signal(c)
		e := r.record(c)
		r.sabotage(a)
		r.copy(a, whole(dst, src))
		failed := r.signal(a)
		releaseA()

		r.broken("failed copy", r.outcome(failed))
		r.broken("copy of a held stream", r.outcome(held))
		r.broken("copy that waits for it", r.outcome(waiting))
		for _, s := range []device.Stream{a, b, c} {
			r.broken("sync of "+s.Name(), s.Sync(context.Background()))
			r.broken("copy on "+s.Name(), s.Copy([]device.Op{whole(dst, src)}))
			r.broken("record on "+s.Name(), s.Record(e))
			r.broken("wait on "+s.Name(), s.Wait(e))
			r.broken("signal on "+s.Name(), s.Signal(device.NewTicket()))
		}
		if !e.Done() {
			r.Error("an event of a failed device is not done, and never will be")
		}
		_, err := r.Device.Alloc(64)
		r.broken("alloc", err)
		_, err = r.Device.NewStream("late")
		r.broken("new stream", err)
		for _, m := range r.memories {
			r.must(m.Free()) // nothing uses it any more
		}
		r.broken("close of a held stream", b.Close())
		releaseB()
	}},
	{"FailedStream_StillWaitsWhereItWasTold", func(r *rig) {
		r.alone()
		// b fails; a's read of the page is still to come; c overwrites the page
		// after b, which was to come after a.
		a, b, c := r.stream("a"), r.stream("b"), r.stream("c")
		page, in, out := r.page(64, 'p'), r.page(64, 'i'), r.alloc(64)
		releaseA, releaseB := r.hold(a), r.hold(b)
		r.copy(a, whole(out, page))
		read := r.record(a)
		r.sabotage(b)
		r.copy(b, whole(r.alloc(64), in))
		failed := r.signal(b)
		r.must(b.Wait(read))
		after := r.record(b)
		releaseB()
		r.broken("b", r.outcome(failed))
		r.must(c.Wait(after))
		r.copy(c, whole(page, in))
		t := r.signal(c)
		r.stillOpen("behind a failed stream", t)
		releaseA()
		r.must(r.outcome(t))
		r.sync(a)
		r.want("what a has read", out, 0, contents('p', 0, 64))
	}},
	{"Close_RunsWhatWasEnqueued", func(r *rig) {
		const n, size = 200, 512
		src, dst, s := r.page(n*size, 's'), r.alloc(n*size), r.stream("s")
		for i := range int64(n) {
			r.copy(s, device.Op{Dst: dst, Src: src, DstOff: i * size, SrcOff: i * size, Bytes: size})
		}
		e, t := r.record(s), r.signal(s)
		r.must(s.Close())
		r.want("destination", dst, 0, contents('s', 0, n*size))
		if done, err := t.Poll(); !done || err != nil {
			r.Errorf("ticket after close: done %v, error %v", done, err)
		}
		other := r.stream("other")
		r.must(other.Wait(e))
		r.must(r.outcome(r.signal(other)))
	}},
	{"Close_EndsAStream", func(r *rig) {
		src, dst, s := r.page(64, 's'), r.alloc(64), r.stream("s")
		r.must(s.Close())
		t := device.NewTicket()
		r.wantKind("copy", s.Copy([]device.Op{whole(dst, src)}), fault.Closed)
		r.wantKind("record", s.Record(r.event()), fault.Closed)
		r.wantKind("wait", s.Wait(r.event()), fault.Closed)
		r.wantKind("signal", s.Signal(t), fault.Closed)
		r.wantKind("sync", s.Sync(context.Background()), fault.Closed)
		r.must(s.Close())
		if done, _ := t.Poll(); done {
			r.Error("a ticket that signal refused was completed")
		}
	}},
	{"Close_OfADeviceInUseIsRefused", func(r *rig) {
		m, s := r.page(64, 'm'), r.stream("s")
		r.wantKind("with memory and a stream", r.Device.Close(), fault.Busy)
		r.copy(s, whole(r.alloc(64), m)) // nothing has changed
		r.must(s.Close())
		r.wantKind("with memory", r.Device.Close(), fault.Busy)
		for _, m := range r.memories {
			r.must(m.Free())
		}
		s = r.stream("late")
		r.wantKind("with a stream", r.Device.Close(), fault.Busy)
		r.must(s.Close())
		r.must(r.Device.Close())
	}},
	{"Close_EndsADevice", func(r *rig) {
		r.must(r.Device.Close())
		_, err := r.Device.Alloc(1)
		r.wantKind("alloc", err, fault.Closed)
		_, err = r.Device.NewStream("s")
		r.wantKind("stream", err, fault.Closed)
		_, err = r.Device.NewEvent()
		r.wantKind("event", err, fault.Closed)
		r.must(r.Device.Close())
	}},
}

// broken checks that err is the injected failure, as a device error.
func (r *rig) broken(what string, err error) {
	r.Helper()
	if !errors.Is(err, fault.Device) || !errors.Is(err, r.cause) {
		r.Errorf("%s: got error %v, want kind %q and cause %q", what, err, fault.Device, r.cause)
	}
}
