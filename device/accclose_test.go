package device_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
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
