package device_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// A ticket may be taken for work that the reaper has found to be over and has not
// finished: then a second event is recorded at the point of the first. Close waits for
// both, or nobody would ask about the event of a stream that is gone.
func TestClose_WaitsForATicketTakenWhileTheWorkIsFinished(t *testing.T) {
	d := &script{}
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(t, err)
	page, err := a.Alloc(100)
	must(t, err)
	s, err := a.NewStream("s")
	must(t, err)
	first, second := device.NewTicket(), device.NewTicket()
	enqueued, closing := make(chan struct{}), make(chan struct{})
	late := false // of the reaper's goroutine alone, as asked is
	asked := 0
	d.done = func(device.EventHandle) (bool, error) {
		wait := enqueued
		if late {
			wait = closing
		}
		select {
		case <-wait:
			asked++
			return !late || asked > 1000, nil
		default:
			return false, nil
		}
	}
	var once sync.Once
	d.learned = func() {
		once.Do(func() { // the reaper finishes the copy
			must(t, s.Signal(second))
			late = true
		})
	}
	must(t, s.Copy(half(page)))
	first.Done()
	must(t, s.Signal(first))
	close(enqueued)
	must(t, first.Wait(context.Background()))
	close(closing)
	must(t, s.Close())
	if done, err := second.Poll(); !done || err != nil {
		t.Fatalf("the stream is closed, its ticket is done: %v, %v", done, err)
	}
	must(t, errors.Join(page.Free(), a.Close()))
}

// A stream that neither an event nor SyncStream says anything of is asked again. If that
// does not help, nobody can know when its work is over, and the device is given up.
func TestDrain_ThatFailsIsTriedAgainAndThenLosesTheDevice(t *testing.T) {
	broken := &device.DriverError{Call: "SyncStream", Name: "BROKEN", Class: device.Failed}
	for _, test := range []struct {
		fails int
		lost  bool
	}{{0, false}, {1, false}, {2, false}, {1000, true}} {
		d := &script{}
		d.done = func(device.EventHandle) (bool, error) { return false, broken }
		var page *device.Memory
		var wrong []error
		asked := 0
		d.drain = func(device.StreamHandle) (bool, error) {
			if err := page.Free(); !errors.Is(err, fault.Busy) {
				wrong = append(wrong, err)
			}
			if asked++; asked > test.fails {
				return true, nil
			}
			return false, broken
		}
		a, s, _, p := play(t, d, "s", "other")
		page = p
		ticket := device.NewTicket()
		must(t, s[0].Copy(half(page)))
		if err := s[0].Signal(ticket); err != nil {
			ticket.Complete(err)
		}
		if err := ticket.Wait(context.Background()); !errors.Is(err, broken) {
			t.Errorf("ticket: %v", err)
		}
		if err := s[0].Sync(context.Background()); !errors.Is(err, broken) {
			t.Errorf("sync: %v", err)
		}
		if err := a.Lost(); (err != nil) != test.lost || test.lost && !errors.Is(err, broken) {
			t.Errorf("%d failures: the device is lost by %v", test.fails, err)
		}
		if (s[1].Copy(nil) != nil) != test.lost {
			t.Errorf("%d failures: the other stream says %v", test.fails, s[1].Copy(nil))
		}
		if len(wrong) > 0 {
			t.Errorf("%d failures: the memory could be freed: %v", test.fails, wrong)
		}
	}
}

// Whoever is making a stream is in the driver, which must not be closed meanwhile.
func TestClose_IsBusyWhileAStreamIsMade(t *testing.T) {
	d := &script{}
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(t, err)
	var closed error
	d.made = func() { closed = a.Close() }
	s, err := a.NewStream("s")
	if !errors.Is(closed, fault.Busy) {
		t.Fatalf("close while a stream is made: %v", closed)
	}
	must(t, err)
	must(t, errors.Join(s.Close(), a.Close()))
}

// A copy of nothing lets no other copy pass: AnyOrder is for host memory alone.
func TestCopyBatch_InAnyOrderLooksAtEachSource(t *testing.T) {
	a, s, _, page := play(t, &script{}, "s")
	for _, ops := range [][]device.Op{half(page), append([]device.Op{{Dst: page, Src: page}}, half(page)...)} {
		if err := a.CopyBatch(s[0], a.Engines()[0], ops, device.AnyOrder, 0); !errors.Is(err, fault.Invalid) {
			t.Errorf("%d ops with a source on the device: %v", len(ops), err)
		}
	}
}

// The event that the reaper's helper waits for belongs to its point until the helper has
// come back, which may be long after the point is known to be over.
func TestReaper_KeepsTheEventThatItsHelperWaitsFor(t *testing.T) {
	d := &script{}
	var held atomic.Bool
	held.Store(true)
	asleep, awake := make(chan device.EventHandle, 10), make(chan struct{})
	d.done = func(device.EventHandle) (bool, error) { return !held.Load(), nil }
	d.sync = func(e device.EventHandle) error {
		asleep <- e
		<-awake
		return nil
	}
	_, s, h, page := play(t, d, "a", "b")
	must(t, s[0].Copy(half(page)))
	e := <-asleep
	for n := range 3 {
		for range 1 + 3*n { // more than before, which takes all events that are free
			must(t, s[1].Copy(half(page)))
		}
		held.Store(false)
		must(t, errors.Join(s[0].Sync(context.Background()), s[1].Sync(context.Background())))
		held.Store(true)
	}
	if on := d.recordedOn(e); on != h[0] {
		t.Errorf("the event was recorded again, on %v", on)
	}
	held.Store(false)
	close(awake)
}

// A stream of another device of the kind may be in the driver with an event of this one,
// which is not closed then.
func TestClose_WaitsForWhoWaitsForAnEventOfTheDevice(t *testing.T) {
	ours, theirs := &script{}, &script{}
	a, err := device.OpenAccelerator(ours, device.AcceleratorOptions{})
	must(t, err)
	page, err := a.Alloc(100)
	must(t, err)
	s, err := a.NewStream("ours")
	must(t, err)
	over := make(chan struct{})
	ours.done = func(device.EventHandle) (bool, error) {
		select {
		case <-over:
			return true, nil
		default:
			return false, nil
		}
	}
	_, other, _, _ := play(t, theirs, "theirs")
	e, err := a.NewEvent()
	must(t, err)
	must(t, s.Copy(half(page)))
	must(t, s.Record(e))
	var inWait atomic.Bool
	closed := make(chan error, 1)
	ours.closed = func() {
		if inWait.Load() {
			t.Error("the driver is closed under a wait")
		}
	}
	theirs.wait = func(device.StreamHandle, device.EventHandle) error {
		inWait.Store(true)
		close(over)
		err := errors.Join(s.Close(), page.Free())
		go func() { closed <- a.Close() }()
		for range 10_000 {
			runtime.Gosched()
		}
		inWait.Store(false)
		return err
	}
	must(t, other[0].Wait(e))
	must(t, <-closed)
}
