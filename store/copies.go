package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/page"
)

// job is one copy between the device and the host, of a few pages. Jobs are
// enqueued on the stream in the order in which they enter Store.jobs, and the
// settler finishes them in that order: sums first, with no lock held, then the
// books of all its pages under mu.
type job struct {
	demote bool
	refs   []Ref
	epochs []uint32       // demote: as claimed
	pairs  []page.Pair    // what is copied; in no order that means anything, for copiers sort it
	hosts  []page.ID      // demote: the page claimed for each ref; page.None: the host has it
	copied *device.Ticket // by the stream
	done   *device.Ticket // by the settler, when the books are settled
	freed  int            // demote: device pages freed; valid once done
}

// run enqueues j's copy and hands it to the settler. Pages without bytes are
// settled here. Errors come out of j.done, like those of the copy itself.
func (s *Store) run(j *job) {
	if s.bytes == 0 {
		s.copy(j)
		s.finish(j)
		return
	}
	s.enqueue.Lock()
	defer s.enqueue.Unlock()
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed { // the settler is gone or going
		j.copied.Complete(errClosed())
		s.finish(j)
		return
	}
	if err := s.fenced(func() { s.copy(j) }); err != nil {
		// The fences failed, not the copy. It is not known to be ordered, so it
		// must not count; the ticket still says when it has drained.
		s.log.LogAttrs(context.Background(), slog.LevelError, "store: copy not ordered", slog.Any("error", err))
		j.copied = failed(j.copied, err)
	}
	s.jobs <- j
}

// copy enqueues the bytes of j. Its pages are idle and pinned or claimed by j, so
// only the stream can refuse; whatever it says also comes out of j.copied.
func (s *Store) copy(j *job) {
	if j.demote {
		_, _ = s.pool.Offload(s.o.Copies, j.pairs, j.copied)
	} else {
		_, _ = s.pool.Reload(s.o.Copies, j.pairs, j.copied)
	}
}

// fenced orders what enqueue puts on Copies behind the engine's work, and the
// engine's later work behind it: a store must not read a page still being
// written, a load must not overwrite a page still being read, and the engine must
// not read a page still being loaded.
func (s *Store) fenced(enqueue func()) error {
	if s.o.Compute == nil {
		enqueue()
		return nil
	}
	before := errors.Join(s.o.Compute.Record(s.fence), s.o.Copies.Wait(s.fence))
	if before != nil {
		enqueue()
		return before
	}
	enqueue()
	return errors.Join(s.o.Copies.Record(s.fence), s.o.Compute.Wait(s.fence))
}

// failed returns a ticket that is done when t is, with err.
func failed(t *device.Ticket, err error) *device.Ticket {
	f := device.NewTicket()
	go func() { // ends with the copy: t is always completed
		<-t.Done()
		f.Complete(err)
	}()
	return f
}

// settle finishes jobs in order until the store is closed.
func (s *Store) settle() {
	defer close(s.settled)
	for j := range s.jobs {
		s.finish(j)
	}
}

func (s *Store) finish(j *job) {
	<-j.copied.Done()
	_, err := j.copied.Poll()
	if j.demote {
		s.finishDemotion(j, err)
	} else {
		s.finishPromotion(j, err)
	}
	if err != nil {
		err = fault.Wrap(fault.Device, "store: copy of pages", err)
	}
	j.done.Complete(err)
}

// sum computes the checksums of host pages, and counts what it costs. page.None is
// passed over.
func (s *Store) sum(sums []hostpool.Sum, ids []page.ID) []hostpool.Sum {
	if s.bytes == 0 {
		return append(sums, make([]hostpool.Sum, len(ids))...)
	}
	began, n := time.Now(), int64(0)
	for _, id := range ids {
		var sum hostpool.Sum
		if id != page.None {
			sum = s.pool.Sum(id)
			n++
		}
		sums = append(sums, sum)
	}
	took := time.Since(began)
	s.mu.Lock()
	s.stats.Summed += n
	s.stats.SummedBytes += n * s.bytes
	s.stats.SumNanos += took.Nanoseconds()
	s.mu.Unlock()
	return sums
}

func (s *Store) finishDemotion(j *job, failure error) {
	var sums []hostpool.Sum
	if failure == nil {
		sums = s.sum(nil, j.hosts)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, r := range j.refs {
		e := &s.entries[r]
		e.part.demoting = false
		host := j.hosts[i]
		there := host == page.None // inclusive: nothing was copied
		arrived := there || failure == nil && (!e.part.summed || e.part.sum == sums[i])
		if arrived && e.epoch == j.epochs[i] {
			if !there {
				e.part.sum, e.part.summed = sums[i], true
				s.must(s.pool.Commit(host))
				e.part.host = host
				s.note(r, demoted, host)
				s.stats.Demoted++
			}
			s.must(s.releaseDevice(e))
			j.freed++
			s.list(r, e)
			continue
		}
		if !there {
			s.stats.Abandoned++
			s.must(s.pool.Abandon(host))
		}
		switch {
		case !arrived && failure != nil && e.pins == 0:
			// Cold, and the tier below can't take it: it would be chosen again and again.
			s.stats.CopyFailed++
			s.drop(r, e, fault.CopyFailed)
			j.freed++
		case !arrived && failure == nil:
			// The device's bytes are not the ones that were summed: they can't be trusted either.
			s.stats.Corrupted++
			j.freed += s.corrupt(r, e)
		default:
			s.list(r, e)
		}
	}
}

// corrupt drops an entry whose bytes failed their check. It returns how many
// device pages that gave back to the arena.
func (s *Store) corrupt(r Ref, e *entry) int {
	s.log.LogAttrs(context.Background(), slog.LevelError, "store: checksum mismatch: page discarded",
		slog.String("key", s.index.keys[r].String()), slog.Any("device", e.part.device), slog.Any("host", e.part.host))
	freed := 0
	if e.part.device != page.None && e.pins == 0 {
		freed = 1
	}
	s.drop(r, e, fault.Corrupted)
	return freed
}

func (s *Store) finishPromotion(j *job, failure error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range j.refs {
		e := &s.entries[r]
		e.part.coming = nil
		if failure != nil {
			s.stats.CopyFailed++
			s.must(s.releaseDevice(e))
			s.list(r, e)
			continue
		}
		s.note(r, promoted, e.part.device)
		s.stats.Promoted++
		if !s.o.Inclusive {
			s.must(s.releaseHost(e))
		}
		s.list(r, e)
	}
}

// must reports books that disagree: a bug in this package. The page in question
// is lost to its tier, and never shared.
func (s *Store) must(err error) {
	if err != nil {
		s.log.LogAttrs(context.Background(), slog.LevelError, "store: books disagree", slog.Any("error", err))
	}
}

// Loaded is what Load put on the device. It can be used again and again.
type Loaded struct {
	// Pages has the device page of each ref, owned by the caller too.
	Pages []page.ID
	// Tickets are done when the pages that were not there have arrived.
	Tickets []*device.Ticket
	// Used is how many pages of fresh were taken. The rest are the caller's.
	Used int

	ids  []page.ID // scratch
	sums []hostpool.Sum
	want []hostpool.Sum
	refs []Ref
}

// CorruptError says which of the pages asked for failed its check.
type CorruptError struct {
	Index   int // in refs
	History string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("page %d of the prefix failed its check and was discarded (%s)", e.Index, e.History)
}

// Unwrap makes errors.Is(err, fault.Corrupt) hold.
func (*CorruptError) Unwrap() error { return fault.Corrupt }

// Missing is how many of refs are not on the device: the fresh pages that Load
// needs. It can shrink as others load them, and never grows while they are pinned.
func (s *Store) Missing(refs []Ref) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range refs {
		if s.entries[r].part.device == page.None {
			n++
		}
	}
	return n
}

// Load puts the page of every ref on the device. Pages that are there are adopted:
// the caller becomes one of their owners. Pages on the host are checked, and copied
// into pages of fresh, which the caller owns and goes on owning; the store becomes
// their second owner. Load returns when the copies are enqueued.
//
// All or nothing. Kinds: fault.Corrupt (a *CorruptError: the page is discarded; the
// caller unpins it and matches again), fault.Full (fresh is too short), fault.Closed.
func (s *Store) Load(refs []Ref, fresh []page.ID, l *Loaded) error {
	l.Pages, l.Tickets, l.Used = l.Pages[:0], l.Tickets[:0], 0
	if err := s.checkDeparting(refs, l); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errClosed()
	}
	jobs, err := s.place(refs, fresh, l)
	s.mu.Unlock()
	for _, j := range jobs {
		s.run(j)
	}
	return err
}

// checkDeparting compares the sums of the host pages that are about to leave.
func (s *Store) checkDeparting(refs []Ref, l *Loaded) error {
	l.ids, l.want, l.refs = l.ids[:0], l.want[:0], l.refs[:0]
	s.mu.Lock()
	for i, r := range refs {
		e := &s.entries[r]
		if e.state != kept {
			s.mu.Unlock()
			return &CorruptError{Index: i, History: s.History(r)}
		}
		if e.part.device == page.None && s.bytes > 0 {
			l.ids, l.want, l.refs = append(l.ids, e.part.host), append(l.want, e.part.sum), append(l.refs, Ref(i))
		}
	}
	s.mu.Unlock()
	if len(l.ids) == 0 {
		return nil
	}
	l.sums = s.sum(l.sums[:0], l.ids)
	for k, i := range l.refs {
		if l.sums[k] == l.want[k] {
			continue
		}
		r := refs[i]
		err := &CorruptError{Index: int(i), History: s.History(r)}
		s.mu.Lock()
		if e := &s.entries[r]; e.state == kept && e.part.coming == nil && e.part.host == l.ids[k] {
			s.stats.Corrupted++
			s.corrupt(r, e)
		}
		s.mu.Unlock()
		return err
	}
	return nil
}

// place gives every ref its device page and returns the jobs that fill them.
func (s *Store) place(refs []Ref, fresh []page.ID, l *Loaded) ([]*job, error) {
	need := 0
	for i, r := range refs {
		switch e := &s.entries[r]; {
		case e.state != kept:
			return nil, &CorruptError{Index: i}
		case e.part.device == page.None:
			need++
		}
	}
	if need > len(fresh) {
		return nil, fault.New(fault.Full, "store", "%d pages are on the host, %d device pages were given for them", need, len(fresh))
	}
	if err := s.share(fresh[:need]); err != nil {
		return nil, fmt.Errorf("store: load: %w", err)
	}
	var jobs []*job
	for _, r := range refs {
		e := &s.entries[r]
		if e.part.device != page.None {
			id := [1]page.ID{e.part.device}
			s.must(s.arena.Retain(id[:]))
			l.Pages = append(l.Pages, id[0])
			if t := e.part.coming; t != nil && (len(l.Tickets) == 0 || l.Tickets[len(l.Tickets)-1] != t) {
				l.Tickets = append(l.Tickets, t)
			}
			continue
		}
		id := fresh[l.Used]
		l.Used++
		l.Pages = append(l.Pages, id)
		if n := len(jobs); n == 0 || len(jobs[n-1].refs) == s.o.JobPages {
			j := &job{copied: device.NewTicket(), done: device.NewTicket()}
			jobs = append(jobs, j)
			l.Tickets = append(l.Tickets, j.done)
		}
		j := jobs[len(jobs)-1]
		j.refs, j.pairs = append(j.refs, r), append(j.pairs, page.Pair{Dst: id, Src: e.part.host})
		e.part.device, e.part.coming = id, j.done
	}
	return jobs, nil
}
