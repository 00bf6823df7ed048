package transfertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// The cases about reads that end otherwise than by success, and about leases.

func givenUpBefore(b *bench) error {
	r := b.plain()
	s := r.publish(3, false, lease)
	defer r.end(s)
	want := r.snapshot()
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	err := r.wait(r.reader.StartRetrieve(ctx, 0, 3, s.local, s.remote, s.d))
	if !errors.Is(err, fault.Busy) || !errors.Is(err, context.Canceled) {
		return fmt.Errorf("error %w, want kind busy, canceled", orNone(err))
	}
	return r.compare(want)
}

// held stops copies of the rig's engine until release.
func (r *rig) held() (reached <-chan struct{}, release func()) {
	in, out := make(chan struct{}, 64), make(chan struct{})
	r.engine.before = func(context.Context) {
		in <- struct{}{}
		<-out
	}
	release = sync.OnceFunc(func() { close(out) })
	r.Cleanup(release) // before the reader's, which waits for the copy
	return in, release
}

// givenUpInTheMiddle cancels reads whose copies go on: who waits leaves, and the pages
// stay reserved. As many are stopped as there are workers, and one more read passes.
func givenUpInTheMiddle(b *bench) error {
	r := b.plain()
	size := r.cache.PageSize()
	reached, release := r.held()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	type outcome struct {
		s   *run
		err error
	}
	outcomes := make(chan outcome, 3)
	for range 3 {
		s := r.publish(3, false, lease)
		go func() { outcomes <- outcome{s, r.reader.Retrieve(ctx, 0, 3*size, s.local, s.remote, s.d)} }()
	}
	for range 3 {
		<-reached
	}
	cancel()
	var failed error
	var stuck []*transfer.UnfinishedError
	var runs []*run
	for range 3 {
		o := <-outcomes
		runs = append(runs, o.s)
		u, ok := errors.AsType[*transfer.UnfinishedError](o.err)
		if !ok || !errors.Is(o.err, context.Canceled) {
			failed = fmt.Errorf("error %w, want an UnfinishedError, canceled", orNone(o.err))
			continue
		}
		if over, err := u.Ticket.Poll(); over {
			failed = fmt.Errorf("the ticket is done, error %w, and the copy is not", orNone(err))
		}
		stuck = append(stuck, u)
	}
	r.engine.before = nil
	if failed == nil {
		s := r.publish(1, false, lease)
		failed = r.reader.Retrieve(r.Context(), 0, size, s.local, s.remote, s.d)
		r.end(s)
	}
	release()
	for _, u := range stuck {
		if err := r.wait(u.Ticket); !errors.Is(err, context.Canceled) && failed == nil {
			failed = fmt.Errorf("the copy is over: error %w, want canceled", orNone(err))
		}
	}
	for _, s := range runs {
		r.end(s)
	}
	return failed
}

// deadline stops a copy for longer than a reader waits.
func deadline(b *bench) error {
	r := b.plain()
	s := r.publish(2, false, lease)
	defer r.end(s)
	o := r.opts
	o.Deadline = 50 * time.Millisecond
	hurried := must(transfer.NewReader(o))(r)
	defer func() { noError(r, hurried.Close()) }()
	_, release := r.held()
	defer release()
	err := hurried.Retrieve(r.Context(), 0, 3, s.local, s.remote, s.d)
	if !errors.Is(err, fault.Busy) || !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("error %w, want kind busy, deadline exceeded", orNone(err))
	}
	release()
	if u, ok := errors.AsType[*transfer.UnfinishedError](err); ok { // a slow machine may not have come as far as the copy
		if err := r.wait(u.Ticket); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("the copy is over: error %w, want deadline exceeded", orNone(err))
		}
	}
	r.engine.before = nil
	again := r.publish(2, false, lease) // the other one may have ended with its reader
	defer r.end(again)
	return r.retrieve(0, 3, again)
}

// closedInTheMiddle closes a reader whose read is running.
func closedInTheMiddle(b *bench) error {
	r := b.plain()
	s := r.publish(2, false, lease)
	defer r.end(s)
	second := must(transfer.NewReader(r.opts))(r)
	reached, release := r.held()
	t := second.StartRetrieve(r.Context(), 0, 3, s.local, s.remote, s.d)
	<-reached
	closed := make(chan error, 1)
	go func() { closed <- second.Close() }()
	var failed error
	if over, _ := t.Poll(); over {
		failed = errors.New("the ticket is done, and the copy is not")
	}
	release()
	if err := <-closed; err != nil {
		return err
	}
	if over, err := t.Poll(); !over || err != nil && !errors.Is(err, fault.Closed) {
		return fmt.Errorf("after Close: over %t, error %w", over, orNone(err))
	}
	if err := second.Retrieve(r.Context(), 0, 1, s.local, s.remote, s.d); !errors.Is(err, fault.Closed) {
		return fmt.Errorf("a read after Close: error %w, want kind closed", orNone(err))
	}
	return failed
}

// leasedPagesAreKept has the owner give up pages that are published.
func leasedPagesAreKept(b *bench) error {
	r := b.plain()
	s := r.publish(4, true, lease)
	noError(r, r.owner.Drop(s.remote))
	if n := must(r.owner.Free())(r); n != 0 {
		return fmt.Errorf("%d of the leased pages are free", n)
	}
	if err := r.retrieve(0, 4*r.cache.PageSize(), s); err != nil {
		return err
	}
	r.end(s)
	if n := must(r.owner.Free())(r); n != len(s.remote) {
		return fmt.Errorf("the lease has ended, and %d pages are free of %d", n, len(s.remote))
	}
	return nil
}

// reuse ends a publication and has its pages hold something else.
func (r *rig) reuse(s *run) {
	noError(r, r.owner.Drop(s.remote))
	if err := r.owner.End(s.d.Epoch); err != nil && !errors.Is(err, fault.NotFound) {
		r.Error(err)
	}
	if got := must(r.owner.Reuse(otherSeed))(r); len(got) != len(s.remote) {
		r.Errorf("%d pages of %d were reused", len(got), len(s.remote))
	}
}

// stale reads what is no longer published.
func (r *rig) stale(s *run) error {
	err := r.reader.Retrieve(r.Context(), 0, 2*r.cache.PageSize()+1, s.local, s.remote, s.d)
	r.end(s)
	if !errors.Is(err, fault.NotFound) {
		return fmt.Errorf("error %w, want kind not found", orNone(err))
	}
	r.engine.before, r.engine.after = nil, nil
	return nil
}

func epochMovesBefore(b *bench) error {
	r := b.plain()
	s := r.publish(3, false, lease)
	r.reuse(s)
	want := r.snapshot()
	if err := r.stale(s); err != nil {
		return err
	}
	return r.compare(want)
}

// epochMovesInTheMiddle has pages reused between the first look at the word and the
// copy, and reads what is published next.
func epochMovesInTheMiddle(b *bench) error {
	r := b.plain()
	s := r.publish(3, false, lease)
	r.engine.before = func(context.Context) { r.reuse(s) }
	if err := r.stale(s); err != nil {
		return err
	}
	noError(r, Fill(r.image, otherSeed, s.remote))
	next := r.publish(14, true, lease)
	defer r.end(next)
	return r.retrieve(0, 10*r.cache.PageSize(), next)
}

// epochMovesAtTheEnd has pages reused when all bytes are there: they are right, and
// nobody can know.
func epochMovesAtTheEnd(b *bench) error {
	r := b.plain()
	s := r.publish(3, false, lease)
	r.engine.after = func(context.Context) { r.reuse(s) }
	return r.stale(s)
}

// leaseExpires waits until a lease is over, without a word from anybody.
func leaseExpires(b *bench) error {
	r := b.plain()
	s := r.publish(3, false, time.Millisecond)
	s.d.Expires = time.Time{} // as if the reader's clock were behind
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	for tick := time.NewTicker(time.Millisecond); must(r.owner.Leased())(r) > 0; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			r.Fatal("the lease does not end")
		}
	}
	r.reuse(s)
	return r.stale(s)
}

// ownerStops closes the publisher before, in the middle of, and after reads.
func ownerStops(b *bench) error {
	stop := func(r *rig) func(context.Context) {
		return func(context.Context) {
			if err := r.owner.Stop(); err != nil {
				r.Error(err)
			}
		}
	}
	for _, when := range []string{"before", "in the middle", "after"} {
		r := b.plain()
		s := r.publish(3, false, lease)
		switch when {
		case "before":
			stop(r)(r.Context())
		case "in the middle":
			r.engine.before = stop(r)
		default:
			if err := r.retrieve(0, 9, s); err != nil {
				return err
			}
			stop(r)(r.Context())
		}
		if err := r.stale(s); err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
	}
	return nil
}
