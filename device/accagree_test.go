package device_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/device"
)

// Whoever sees that a ticket is done finds its event done as well, and a Sync that may
// not wait does not give up on what is over.
func TestTicket_AgreesWithEventsAndSync(t *testing.T) {
	d := &script{}
	dev, s, _, page := play(t, d, "s")
	enqueued := make(chan struct{})
	d.done = func(device.EventHandle) (bool, error) {
		select {
		case <-enqueued:
			return true, nil
		default:
			return false, nil
		}
	}
	e, err := dev.NewEvent()
	must(t, err)
	ticket, ended := device.NewTicket(), make(chan error, 1)
	var told atomic.Bool
	d.learned = func() {
		if !told.CompareAndSwap(false, true) {
			return
		}
		// The ticket is completed at this moment.
		if !e.Done() {
			t.Error("the event is not done")
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		go func() { ended <- s[0].Sync(ctx) }()
		for range 1000 {
			runtime.Gosched()
		}
	}
	must(t, s[0].Copy(half(page)))
	must(t, s[0].Record(e))
	ticket.Done()
	must(t, s[0].Signal(ticket))
	close(enqueued)
	must(t, <-ended)
}
