package device

import (
	"context"
	"sync"
)

// Ticket is the handle of work in flight: done or not and, once done, its
// error. Pages that the work reads or writes are released only through it. It
// is completed once: by a stream ([Stream.Signal]) or by software (a socket, a
// foreign engine, a waiter that has settled the books). A Ticket must not be
// copied. All methods may be called from any goroutine.
type Ticket struct {
	mu   sync.Mutex
	over bool            // guarded by mu
	err  error           // guarded by mu; set before over
	done chan struct{}   // guarded by mu; made by the first Done
	tell chan<- struct{} // set before the ticket is handed out
	seen func()          // guarded by mu; called once when somebody gets to know the outcome; see learner
}

// NewTicket returns a ticket of work that is still in flight.
func NewTicket() *Ticket { return &Ticket{} }

// Completed returns a ticket of work that is done, with err as its outcome.
func Completed(err error) *Ticket { return &Ticket{over: true, err: err} }

// Complete ends the ticket with err. Only the first call counts; it reports
// whether this one was.
func (t *Ticket) Complete(err error) bool { return t.complete(err, nil) }

// complete is Complete, with a function to be called when somebody gets to know.
func (t *Ticket) complete(err error, seen func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return false
	}
	t.over, t.err, t.seen = true, err, seen
	if t.done != nil {
		t.look()
		close(t.done)
	}
	if t.tell != nil {
		select {
		case t.tell <- struct{}{}:
		default:
		}
	}
	return true
}

// look says that somebody gets to know the outcome. The caller holds mu.
func (t *Ticket) look() {
	if t.over && t.seen != nil {
		t.seen()
		t.seen = nil
	}
}

// Notify has Complete send on c, unless c is full: whoever waits for many tickets needs
// no channel for each, but one of capacity 1, and polls them when it has something. It
// must be called before the ticket is handed to who completes it.
func (t *Ticket) Notify(c chan<- struct{}) { t.tell = c }

// Done returns a channel that is closed when the work is done.
func (t *Ticket) Done() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	if t.done == nil {
		t.done = make(chan struct{})
		if t.over {
			close(t.done)
		}
	}
	return t.done
}

// Poll reports whether the work is done and, if so, its error.
func (t *Ticket) Poll() (done bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
	return t.over, t.err
}

// Wait waits until the work is done and returns its error, or until ctx ends
// and returns ctx's error. Leaving early changes nothing for the work: what it
// reads and writes stays reserved until the ticket is done.
func (t *Ticket) Wait(ctx context.Context) error {
	if done, err := t.Poll(); done {
		return err
	}
	select {
	case <-t.Done():
		_, err := t.Poll()
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
