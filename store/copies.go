package store

import (
	"context"
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
// settler finishes them in that order: sums first, with no lock held (the pool has
// taken them while it copied, or takes them now), then the books of all its pages
// under mu.
type job struct {
	kind    jobKind
	refs    []Ref
	epochs  []uint32          // demote: as claimed
	pairs   []page.Pair       // what is copied; in no order that means anything, for copiers sort it
	hosts   []page.ID         // demote: the page claimed for each ref; page.None: the host has it
	arrival *hostpool.Arrival // demote, through: takes the sums of pairs; nil without checks
	sums    []hostpool.Sum    // of hosts, once copied
	copied  *device.Ticket    // by the stream
	done    *device.Ticket    // by the settler, when the books are settled
	freed   int               // demote: device pages freed; valid once done
	stuck   int               // demote: pages that failed and stay, for somebody holds them; valid once done
	unpin   [][]Ref           // paths whose pins go when the books are settled; guarded by Store.mu
}

// newJob makes a job with room for the usual number of pages.
func newJob(kind jobKind) *job {
	const usual = 16
	x := &struct {
		job
		copied, done device.Ticket
		refs         [usual]Ref
		epochs       [usual]uint32
		pairs        [usual]page.Pair
		hosts        [usual]page.ID
		sums         [usual]hostpool.Sum
	}{}
	x.job = job{
		kind: kind, copied: &x.copied, done: &x.done,
		refs: x.refs[:0], epochs: x.epochs[:0], pairs: x.pairs[:0], hosts: x.hosts[:0], sums: x.sums[:0],
	}
	return &x.job
}

type jobKind uint8

const (
	demotion  jobKind = iota // device → host, and the device page goes
	promotion                // host → device
	through                  // device → host, and the device page stays
)

// run enqueues j's copy and hands it to the settler. Pages without bytes are
// settled here. Errors come out of j.done, like those of the copy itself. The
// caller has held enqueue since it chose j's pages: the store is not closed.
func (s *Store) run(j *job) {
	if s.bytes == 0 {
		j.copied.Complete(nil)
		s.finish(j)
		return
	}
	s.mu.Lock()
	s.latest = j
	s.mu.Unlock()
	s.copy(j)
	s.jobs <- j
}

// copy enqueues the bytes of j. Its pages are idle and pinned or claimed by j, so
// only the stream can refuse; whatever it says also comes out of j.copied.
func (s *Store) copy(j *job) {
	switch {
	case j.kind == promotion:
		_, _ = s.pool.CopyOut(s.o.Copies, j.pairs, j.copied)
	case s.pool.Checks() == hostpool.ChecksOff:
		_, _ = s.pool.CopyIn(s.o.Copies, j.pairs, j.copied)
	default:
		j.arrival = s.arrivals.Get().(*hostpool.Arrival) //nolint:errcheck // made by Open and put back by arriving
		_, _ = s.pool.CopyInSummed(s.o.Copies, j.pairs, j.arrival, j.copied)
	}
}

// settle finishes jobs in order until the store is closed.
func (s *Store) settle() {
	for j := range s.jobs {
		s.finish(j)
	}
	s.readers.Wait()
	close(s.settled)
}

func (s *Store) finish(j *job) {
	err := j.copied.Wait(context.Background())
	if j.kind != promotion && err == nil {
		j.sums = s.arriving(j)
	}
	s.mu.Lock()
	switch j.kind {
	case demotion:
		s.finishDemotion(j, err)
	case promotion:
		s.finishPromotion(j, err)
	case through:
		s.finishThrough(j, err)
	}
	for _, refs := range j.unpin { // a path may go on to another copy in flight
		s.unpin(refs)
	}
	s.mu.Unlock()
	if err != nil {
		err = fault.Wrap(fault.Device, "store: copy of pages", err)
	}
	j.done.Complete(err)
}

// arriving returns the checksums of the pages of j, whose copy has run, in the order
// of its hosts. Without checks they are all alike, and so never wrong. Only the
// settler calls it for pages with bytes.
func (s *Store) arriving(j *job) []hostpool.Sum {
	sums := j.sums
	if j.arrival == nil {
		for range j.hosts {
			sums = append(sums, hostpool.Sum{})
		}
		return sums
	}
	var took time.Duration
	s.arrived, took = s.pool.AppendSums(s.arrived[:0], j.arrival)
	s.arrivals.Put(j.arrival)
	j.arrival = nil
	next := 0
	for _, id := range j.hosts {
		var sum hostpool.Sum
		if id != page.None { // else the host had it: nothing was copied
			sum = s.arrived[next]
			next++
		}
		sums = append(sums, sum)
	}
	s.countSums(int64(next), took)
	return sums
}

// sum computes the checksums of host pages, and counts what it costs. page.None is
// passed over.
func (s *Store) sum(sums []hostpool.Sum, ids []page.ID) []hostpool.Sum {
	began, n := time.Now(), int64(0)
	for _, id := range ids {
		var sum hostpool.Sum
		if id != page.None {
			sum = s.pool.Sum(id)
			n++
		}
		sums = append(sums, sum)
	}
	s.countSums(n, time.Since(began))
	return sums
}

func (s *Store) countSums(n int64, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Summed += n
	s.stats.SummedBytes += n * s.bytes
	s.stats.SumNanos += took.Nanoseconds()
}

func (s *Store) finishDemotion(j *job, failure error) {
	s.hosts, s.ids = s.hosts[:0], s.ids[:0] // those that arrived, and the device pages that they leave
	for i, r := range j.refs {
		e := &s.entries[r]
		e.part.flight = nil
		host := j.hosts[i]
		there := host == page.None // inclusive: nothing was copied
		arrived := there || failure == nil && (!e.part.summed || e.part.sum == j.sums[i])
		if arrived && e.epoch == j.epochs[i] {
			if !there {
				e.part.sum, e.part.summed = j.sums[i], true
				s.hosts = append(s.hosts, host)
				e.part.host = host
				s.stats.HostPages++
				s.note(r, demoted, host)
				s.stats.Demoted++
			}
			s.ids = append(s.ids, e.part.device)
			s.at[e.part.device], e.part.device = NoRef, page.None
			s.stats.DevicePages--
			s.list(r, e)
			continue
		}
		if !there {
			s.stats.Abandoned++
			s.must(s.pool.Abandon(host))
		}
		switch {
		case !arrived && failure != nil && e.pins+e.holds == 0:
			// Cold, and the tier below can't take it: it would be chosen again and again.
			s.stats.CopyFailed++
			j.freed += s.drop(r, e, fault.CopyFailed)
		case !arrived && failure == nil:
			// The device's bytes are not the ones that were summed: they can't be trusted either.
			s.stats.Corrupted++
			j.freed += s.corrupt(r, e)
		default:
			if !arrived && e.pins == 0 {
				j.stuck++
			}
			s.list(r, e)
		}
	}
	if len(s.hosts) > 0 {
		s.must(s.pool.Commit(s.hosts...))
	}
	freed, err := s.arena.Release(s.ids)
	s.must(err)
	j.freed += freed
}

// corrupt drops an entry whose bytes failed their check. It returns how many
// device pages that freed.
func (s *Store) corrupt(r Ref, e *entry) int {
	s.log.LogAttrs(context.Background(), slog.LevelError, "store: checksum mismatch: page discarded",
		slog.String("key", s.index.keys[r].String()), slog.Any("device", e.part.device), slog.Any("host", e.part.host))
	return s.drop(r, e, fault.Corrupted)
}

// writeThrough chooses what of a path that is about to be unpinned the host does not
// have, as much as it has room for, from the root, and returns the jobs to be run.
// While they are in flight, unpin keeps the path together.
func (s *Store) writeThrough(refs []Ref) (jobs []*job) {
	if s.closed {
		return nil
	}
	missing := func(r Ref) bool {
		return r != NoRef && s.entries[r].state == kept && s.entries[r].pins == 1 &&
			s.entries[r].part.host == page.None && s.entries[r].part.flight == nil
	}
	n := 0
	for _, r := range refs {
		if missing(r) {
			n++
		}
	}
	s.chosen = s.chosen[:0]
	claimed := s.claim(n)
	for _, r := range refs {
		if len(claimed) == 0 {
			break
		}
		if !missing(r) {
			continue
		}
		if k := len(jobs); k == 0 || len(jobs[k-1].refs) == s.o.JobPages {
			jobs = append(jobs, newJob(through))
		}
		j, e := jobs[len(jobs)-1], &s.entries[r]
		j.refs, j.hosts = append(j.refs, r), append(j.hosts, claimed[0])
		j.pairs = append(j.pairs, page.Pair{Dst: claimed[0], Src: e.part.device})
		e.part.flight, claimed = j, claimed[1:]
	}
	return jobs
}

func (s *Store) finishThrough(j *job, failure error) {
	for i, r := range j.refs {
		e, host := &s.entries[r], j.hosts[i]
		e.part.flight = nil
		switch {
		case failure != nil: // the device's page is as good as before
			s.stats.Abandoned++
			s.must(s.pool.Abandon(host))
			s.list(r, e)
		case e.part.summed && e.part.sum != j.sums[i]:
			s.stats.Corrupted++
			s.must(s.pool.Abandon(host))
			s.corrupt(r, e)
		default:
			e.part.sum, e.part.summed, e.part.host = j.sums[i], true, host
			s.stats.HostPages++
			s.must(s.pool.Commit(host))
			s.note(r, written, host)
			s.stats.Written++
			s.list(r, e)
		}
	}
}

func (s *Store) finishPromotion(j *job, failure error) {
	for _, r := range j.refs { // pinned by the loader, or by j
		e := &s.entries[r]
		e.part.flight = nil
		if failure != nil {
			s.stats.CopyFailed++
			if e.holds > 0 { // it must not be lost
				s.releaseDevice(e)
			} else { // else it would be found again and again, and never come
				s.drop(r, e, fault.CopyFailed)
			}
			continue
		}
		s.note(r, promoted, e.part.device)
		s.stats.Promoted++
		if !s.o.Inclusive {
			s.releaseHost(e)
		}
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

// CorruptError says which of the pages asked for was discarded: its bytes failed their
// check, or the copy of it failed.
type CorruptError struct {
	Index   int // in refs
	Why     fault.Reason
	History string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("page %d of the prefix was discarded: %v (%s)", e.Index, e.Why, e.History)
}

// Unwrap makes errors.Is(err, fault.Corrupt) hold.
func (*CorruptError) Unwrap() error { return fault.Corrupt }

// discarded is the error about a dropped entry, the i-th of those asked for.
func (s *Store) discarded(i int, r Ref) *CorruptError {
	return &CorruptError{Index: i, Why: s.ghosts.why(s.index.hash(&s.index.keys[r])), History: s.history(r)}
}

// Missing is how many of refs are not on the device: the fresh pages that Load
// needs. While they are pinned it can shrink, as others load them, and grow only when
// a copy of others fails: Load refuses then, and is asked again with more.
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
	if s.bytes > 0 && s.pool != nil && s.pool.Checks() == hostpool.ChecksAlways {
		if err := s.checkDeparting(refs, l); err != nil {
			return err
		}
	}
	s.enqueue.Lock()
	defer s.enqueue.Unlock()
	jobs, err := s.place(refs, fresh, l)
	for _, j := range jobs {
		s.run(j)
	}
	return err
}

// checkDeparting compares the sums of the host pages that are about to leave.
func (s *Store) checkDeparting(refs []Ref, l *Loaded) error {
	if err := s.departing(refs, l); err != nil {
		return err
	}
	defer s.readers.Done()
	if len(l.ids) == 0 {
		return nil
	}
	l.sums = s.sum(l.sums[:0], l.ids)
	return s.compare(refs, l)
}

// departing lists the host pages of refs that are not on the device, with their
// sums. Without an error the caller is one of readers.
func (s *Store) departing(refs []Ref, l *Loaded) error {
	l.ids, l.want, l.refs = l.ids[:0], l.want[:0], l.refs[:0]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed()
	}
	for i, r := range refs {
		e := &s.entries[r]
		if e.state != kept {
			return s.discarded(i, r)
		}
		if e.part.device == page.None {
			l.ids, l.want, l.refs = append(l.ids, e.part.host), append(l.want, e.part.sum), append(l.refs, Ref(i))
		}
	}
	s.readers.Add(1)
	return nil
}

// compare drops the first page whose sum is wrong, and says so.
func (s *Store) compare(refs []Ref, l *Loaded) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, i := range l.refs {
		if l.sums[k] == l.want[k] {
			continue
		}
		r := refs[i]
		e := &s.entries[r]
		if e.part.host != l.ids[k] {
			// It left while it was summed: somebody else promoted it, or found it bad.
			// What was summed may be another page by now. place looks at it again.
			continue
		}
		if e.state == kept && e.part.flight == nil {
			s.stats.Corrupted++
			s.corrupt(r, e)
		}
		err := s.discarded(int(i), r)
		err.Why = fault.Corrupted
		return err
	}
	return nil
}

// place gives every ref its device page and returns the jobs that fill them.
func (s *Store) place(refs []Ref, fresh []page.ID, l *Loaded) ([]*job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed()
	}
	jobs, err := s.promote(refs, fresh)
	if err != nil {
		for _, j := range jobs {
			for _, r := range j.refs {
				e := &s.entries[r]
				e.part.flight = nil
				s.releaseDevice(e)
			}
		}
		return nil, err
	}
	for _, r := range refs {
		p := &s.entries[r].part
		l.Pages = append(l.Pages, p.device)
		if l.Used < len(fresh) && p.device == fresh[l.Used] {
			l.Used++
		} else {
			id := [1]page.ID{p.device}
			s.must(s.arena.Retain(id[:]))
		}
		if p.promoting() {
			if n := len(l.Tickets); n == 0 || l.Tickets[n-1] != p.flight.done {
				l.Tickets = append(l.Tickets, p.flight.done)
			}
		}
	}
	return jobs, nil
}

// promote puts the pages of refs that are only on the host on fresh pages, in
// order, and returns the jobs to be run; after an error, to be undone.
func (s *Store) promote(refs []Ref, fresh []page.ID) (jobs []*job, err error) {
	used := 0
	for i, r := range refs {
		e := &s.entries[r]
		switch {
		case e.state != kept:
			return jobs, s.discarded(i, r)
		case e.part.device != page.None:
			continue
		case used == len(fresh):
			return jobs, fault.New(fault.Full, "store", "more pages are on the host than the %d device pages given for them", used)
		}
		if err := s.keep(r, fresh[used]); err != nil {
			return jobs, fmt.Errorf("store: load: %w", err)
		}
		if n := len(jobs); n == 0 || len(jobs[n-1].refs) == s.o.JobPages {
			jobs = append(jobs, newJob(promotion))
		}
		j := jobs[len(jobs)-1]
		j.refs, j.pairs = append(j.refs, r), append(j.pairs, page.Pair{Dst: fresh[used], Src: e.part.host})
		e.part.flight = j
		used++
	}
	return jobs, nil
}
