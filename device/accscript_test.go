package device_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// script is a driver that does what a test says at the calls that matter.
type script struct {
	nullDriver
	done    func(e device.EventHandle) (bool, error)
	wait    func(s device.StreamHandle, e device.EventHandle) error
	record  func(e device.EventHandle, s device.StreamHandle) error
	drain   func(s device.StreamHandle) (bool, error)
	sync    func(e device.EventHandle) error
	learned func()
	made    func() // a stream is about to be
	closed  func() // the driver is
	mu      sync.Mutex
	next    uintptr                                    // guarded by mu
	on      map[device.EventHandle]device.StreamHandle // guarded by mu; where each was recorded last
	finish  []device.StreamHandle                      // guarded by mu; in the order of their tickets
}

func (d *script) handle() uintptr {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next++
	return 1000 + d.next
}

func (d *script) NewStream(device.Priority) (device.StreamHandle, error) {
	if d.made != nil {
		d.made()
	}
	return device.StreamHandle(d.handle()), nil
}

func (d *script) NewEvent() (device.EventHandle, error) { return device.EventHandle(d.handle()), nil }

func (d *script) Record(e device.EventHandle, s device.StreamHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.on == nil {
		d.on = map[device.EventHandle]device.StreamHandle{}
	}
	d.on[e] = s
	if d.record != nil {
		return d.record(e, s)
	}
	return nil
}

func (d *script) SyncStream(s device.StreamHandle) (bool, error) {
	if d.drain == nil {
		return true, nil
	}
	return d.drain(s)
}

func (d *script) Close() error {
	if d.closed != nil {
		d.closed()
	}
	return nil
}

func (d *script) SyncEvent(e device.EventHandle) error {
	if d.sync == nil {
		return nil
	}
	return d.sync(e)
}

func (d *script) recordedOn(e device.EventHandle) device.StreamHandle {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.on[e]
}

func (d *script) EventDone(e device.EventHandle) (bool, error) {
	if d.done == nil {
		return true, nil
	}
	return d.done(e)
}

func (d *script) Wait(s device.StreamHandle, e device.EventHandle) error {
	if d.wait == nil {
		return nil
	}
	return d.wait(s, e)
}

// Learned is called at the end of a ticket whose channel was asked for.
func (d *script) Learned(s device.StreamHandle, _ uint64) {
	d.mu.Lock()
	d.finish = append(d.finish, s)
	d.mu.Unlock()
	if d.learned != nil {
		d.learned()
	}
}

func (d *script) WaitedFor(device.StreamHandle, device.StreamHandle, uint64) {}

// play opens an accelerator over d, with streams and a page, and closes it after.
func play(t *testing.T, d *script, streams ...string) (a *device.Accelerator, s []device.Stream, h []device.StreamHandle, page *device.Memory) {
	t.Helper()
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(t, err)
	page, err = a.Alloc(100)
	must(t, err)
	for _, name := range streams {
		x, err := a.NewStream(name)
		must(t, err)
		hx, _ := a.Handle(x)
		s, h = append(s, x), append(h, hx)
	}
	t.Cleanup(func() {
		for _, x := range s {
			_ = x.Close() // its error is the test's to look at
		}
		err := page.Free()
		if a.Lost() != nil && errors.Is(err, fault.Device) { // given up
			device.Abandon(a)
			return
		}
		must(t, errors.Join(err, a.Close()))
	})
	return a, s, h, page
}

func half(m *device.Memory) []device.Op {
	return []device.Op{{Dst: m, Src: m, DstOff: 50, Bytes: 50}}
}

// The reaper asks about a, then about b. Between the two questions a's work has run, and
// b's behind it. When b's ticket is done, all of a's must be over.
func TestReaper_FinishesWhatCameBeforeFirst(t *testing.T) {
	d := &script{}
	_, s, h, page := play(t, d, "a", "b")
	ta, tb := device.NewTicket(), device.NewTicket()
	asked := map[device.StreamHandle]int{}
	enqueued := make(chan struct{})
	var wrong []string
	d.done = func(e device.EventHandle) (bool, error) {
		select {
		case <-enqueued:
		default:
			return false, nil
		}
		on := d.recordedOn(e)
		asked[on]++
		if on == h[1] || asked[h[1]] == 0 {
			return on == h[1], nil
		}
		if done, _ := tb.Poll(); done {
			wrong = append(wrong, "b is finished, and a is asked about")
		}
		return true, nil
	}
	must(t, s[0].Copy(half(page)))
	must(t, s[0].Signal(ta))
	must(t, s[1].Copy(half(page)))
	must(t, s[1].Signal(tb))
	ta.Done()
	tb.Done()
	close(enqueued)
	must(t, tb.Wait(context.Background()))
	if done, err := ta.Poll(); !done || err != nil {
		t.Errorf("b's ticket is done, a's is not: %v, %v", done, err)
	}
	must(t, s[0].Sync(context.Background()))
	if len(wrong) > 0 {
		t.Error(wrong)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(d.finish[:2], h) {
		t.Errorf("finished in the order %v, want %v", d.finish, h)
	}
}

// The event that a stream is being told to wait for belongs to its point until the
// driver knows: it must not be recorded again by somebody else meanwhile.
func TestWait_KeepsTheEventUntilTheDriverKnows(t *testing.T) {
	d := &script{}
	dev, s, _, page := play(t, d, "a", "b", "c")
	hold := make(chan struct{})
	d.done = func(device.EventHandle) (bool, error) {
		select {
		case <-hold:
			return true, nil
		default:
			return false, nil
		}
	}
	a, ticket := s[0], device.NewTicket()
	must(t, a.Copy(half(page)))
	e, err := dev.NewEvent()
	must(t, err)
	must(t, a.Record(e))
	must(t, a.Signal(ticket))
	waited := false
	d.wait = func(_ device.StreamHandle, e device.EventHandle) error {
		waited = true
		before := d.recordedOn(e)
		close(hold) // now a's work is over, and its event free but for this call
		err := ticket.Wait(context.Background())
		for range 10 {
			err = errors.Join(err, s[2].Copy(half(page)))
		}
		if after := d.recordedOn(e); after != before {
			err = errors.Join(err, fmt.Errorf("the event that is waited for was recorded on %v meanwhile", after))
		}
		return err
	}
	must(t, s[1].Wait(e))
	if !waited {
		t.Error("the driver was not told to wait")
	}
}

// A ticket that is taken after a stream has failed says so, even if no work is left.
func TestSignal_OfAFailedStreamIsRefused(t *testing.T) {
	d := &script{}
	broken := &device.DriverError{Call: "EventDone", Name: "BROKEN", Class: device.Failed}
	d.done = func(device.EventHandle) (bool, error) { return true, broken }
	dev, s, _, page := play(t, d, "s")
	must(t, s[0].Copy(half(page)))
	if err := s[0].Sync(context.Background()); !errors.Is(err, broken) {
		t.Errorf("sync: %v", err)
	}
	e, err := dev.NewEvent()
	must(t, err)
	ticket := device.NewTicket()
	for what, err := range map[string]error{"signal": s[0].Signal(ticket), "record": s[0].Record(e), "wait": s[0].Wait(e)} {
		if !errors.Is(err, broken) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if done, _ := ticket.Poll(); done {
		t.Error("the ticket was taken")
	}
}
