package transfertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// The cases about processes that die or stand still. They are no part of a suite whose
// sides are in one process.
func processCases() []testCase {
	return []testCase{
		{"the owner is killed", ownerKilled},
		{"the owner stands still", ownerStandsStill},
		{"the reader is killed", readerKilled},
	}
}

// process returns the owner's process.
func (r *rig) process() *process {
	r.Helper()
	p, ok := r.owner.(*process)
	if !ok {
		r.Fatal("the owner has no process of its own")
	}
	return p
}

// free gives the local pages of a run back, where nobody is left to end it.
func (r *rig) free(s *run) {
	r.Helper()
	must(r.arena.Release(s.local))(r)
}

// ownerKilled kills the owner before, in the middle of, and after the copy. Its memory
// may well outlive it: a read must fail all the same, for nobody keeps the promise.
func ownerKilled(b *bench) error {
	for _, when := range []string{"before the first", "before", "in the middle", "at the end"} {
		r := b.plain()
		size := r.cache.PageSize()
		s := r.publish(3, false, lease)
		kill := func(context.Context) { noError(r, r.process().signal(unix.SIGKILL)) }
		if when != "before the first" {
			if err := r.retrieve(0, size, s); err != nil {
				return err
			}
		}
		switch when {
		case "in the middle":
			r.engine.before = kill
		case "at the end":
			r.engine.after = kill
		default:
			kill(r.Context())
		}
		err := r.wait(r.reader.StartRetrieve(r.Context(), 0, 2*size+1, s.local, s.remote, s.d))
		if err == nil || fault.KindOf(err) == 0 {
			return fmt.Errorf("%s: error %w, want one with a kind", when, orNone(err))
		}
		r.engine.before, r.engine.after = nil, nil
		want := r.snapshot()
		err = r.wait(r.reader.StartRetrieve(r.Context(), 0, size, s.local, s.remote, s.d))
		if err == nil || fault.KindOf(err) == 0 {
			return fmt.Errorf("after %s: error %w, want one with a kind", when, orNone(err))
		}
		if err := r.compare(want); err != nil {
			return fmt.Errorf("after %s: %w", when, err)
		}
		r.free(s)
	}
	return nil
}

// ownerStandsStill stops the owner's process. Who reads from it either has every byte, or
// an error by the deadline, with nothing that writes its pages.
func ownerStandsStill(b *bench) error {
	for _, when := range []string{"before the first", "before", "in the middle"} {
		r := b.plain()
		size := r.cache.PageSize()
		s := r.publish(3, false, lease)
		second := must(transfer.NewReader(r.opts))(r)
		if when != "before the first" {
			if err := second.Retrieve(r.Context(), 0, 1, s.local, s.remote, s.d); err != nil {
				return err
			}
		}
		stop := func(context.Context) { noError(r, r.process().signal(unix.SIGSTOP)) }
		if when == "in the middle" {
			r.engine.before = stop
		} else {
			stop(r.Context())
		}
		want := r.snapshot()
		r.expect(want, 0, 2*size+1, s)
		hurried, cancel := context.WithTimeout(r.Context(), 300*time.Millisecond)
		err := r.wait(second.StartRetrieve(hurried, 0, 2*size+1, s.local, s.remote, s.d))
		cancel()
		r.engine.before = nil
		switch {
		case err == nil:
			err = r.compare(want)
		case errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fault.Busy), fault.KindOf(err) == 0:
			err = fmt.Errorf("error %w, want one with a kind", err)
		default:
			err = nil
		}
		err = errors.Join(err, second.Close(), r.process().signal(unix.SIGCONT))
		if err == nil { // anew: the publication's only reader has gone, and its time may be over
			next := r.publish(3, false, lease)
			err = r.retrieve(0, 3*size, next)
			r.end(next)
		}
		r.end(s)
		if err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
	}
	return nil
}

// readerKilled kills a process that reads. What it held is free, and others read on.
func readerKilled(b *bench) error {
	r := b.plain()
	size := r.cache.PageSize()
	ttl := lease
	if r.harness.Unseen {
		ttl = time.Second
	}
	s, other := r.publish(3, false, ttl), r.publish(3, false, lease)
	reader := must(startProcess(r.harness.Role))(r)
	defer func() { noError(r, reader.Close()) }()
	_, err := reader.call(request{
		Do:         "read",
		Geometry:   must((&transfer.Descriptor{Geometry: r.cache.Geometry()}).AppendBinary(nil))(r),
		Descriptor: must(s.d.AppendBinary(nil))(r),
		Local:      []page.ID{1, 2, 3}, Pages: s.remote, End: 3 * size,
	})
	if err != nil {
		return err
	}
	noError(r, reader.signal(unix.SIGKILL))
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	for tick := time.NewTicker(time.Millisecond); must(r.owner.Leased())(r) > 1; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("a dead reader holds its pages")
		}
	}
	r.free(s)
	err = r.retrieve(0, 3*size, other)
	r.end(other)
	return err
}
