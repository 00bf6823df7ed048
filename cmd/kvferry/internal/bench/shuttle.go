package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Copies go in jobs of so many pages, so many jobs in flight.
const (
	jobPages = 16
	inFlight = 2
)

// shuttle moves the same pages down from a device pool into a host pool and up
// again, with the books of both, as the store does it: pages are claimed and
// allocated as each job begins, and given back as it ends.
type shuttle struct {
	cache  *kv.Cache
	pool   *hostpool.Pool
	stream device.Stream
	alloc  *page.Allocator // of the device cache
	checks bool            // sum pages as they arrive on the host, and compare as they leave

	down, up *kv.Route
	onDevice []page.ID // the pages that move, in their order, while they are there
	onHost   []page.ID // likewise
	sums     []hostpool.Sum
	moved    []page.Pair // of the last pass, in the order of the jobs
	held     []page.ID   // host pages that keep the churned pool churned
}

// onHost is what is opened when the device is the host.
func onHost(h *device.Host) *accel.Opened {
	return &accel.Opened{Device: h, Host: h, Copier: copier.NewPortable()}
}

// openShuttle makes the pools, of pages pages each, and waits until they are
// touched.
func openShuttle(ctx context.Context, x *accel.Opened, g *kv.Geometry) (s *shuttle, err error) {
	s = &shuttle{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.cache, err = kv.NewCache(g, x.Device); err != nil {
		return s, err
	}
	if s.pool, err = hostpool.Open(hostpool.Options{Cache: s.cache, Pages: g.Pages(), Host: x.Host, Device: x.Device, Copier: x.Copier}); err != nil {
		return s, err
	}
	if s.stream, err = x.Device.NewStream("bench"); err != nil {
		return s, err
	}
	for i := range g.Regions() {
		m, err := s.cache.Region(i)
		if err != nil {
			return s, err
		}
		if err := m.Populate(0, m.Size()); err != nil {
			return s, err
		}
		scribble(m.Bytes(), uint64(i))
	}
	if s.down, err = kv.NewRoute(s.pool.Cache(), s.cache); err != nil {
		return s, err
	}
	if s.up, err = kv.NewRoute(s.cache, s.pool.Cache()); err != nil {
		return s, err
	}
	if s.alloc, err = page.NewAllocator(page.AllocatorOptions{Pages: g.Pages()}); err != nil {
		return s, err
	}
	return s, s.pool.Grown().Wait(ctx)
}

// scribble fills b with bytes that differ from one cache line to the next.
func scribble(b []byte, seed uint64) {
	const step = 0x9e3779b97f4a7c15
	for w := seed * step; len(b) >= 8; b = b[8:] {
		w += step
		binary.LittleEndian.PutUint64(b, w)
	}
}

// settle puts the pages that move onto the device: all of a fresh pool, or four
// fifths of a churned one, whose other pages are held in places drawn by lot. The
// pools must be at rest.
func (s *shuttle) settle(rng *rand.Rand, churned bool) error {
	if err := s.clear(); err != nil {
		return err
	}
	n := s.cache.Pages()
	all, err := s.alloc.Alloc(nil, n)
	if err != nil {
		return err
	}
	claimed, err := s.pool.Claim(nil, n)
	if err != nil {
		return err
	}
	keep := 0
	if churned {
		keep = n / 5
	}
	// Given back one by one and by lot, as sequences that end give back pages.
	for i, k := range rng.Perm(n) {
		if i < keep {
			s.held = append(s.held, claimed[k])
		} else if err := s.pool.Abandon(claimed[k]); err != nil {
			return err
		}
	}
	for i, k := range rng.Perm(n) {
		if i < keep {
			continue
		}
		if err := s.alloc.Free(all[k : k+1]); err != nil {
			return err
		}
	}
	for left := n - keep; left > 0; left -= jobPages {
		if s.onDevice, err = s.alloc.Alloc(s.onDevice, min(jobPages, left)); err != nil {
			return err
		}
	}
	s.sums = make([]hostpool.Sum, len(s.onDevice))
	return nil
}

// clear makes both pools fresh again.
func (s *shuttle) clear() error {
	var err error
	if s.alloc, err = page.NewAllocator(page.AllocatorOptions{Pages: s.cache.Pages()}); err != nil {
		return err
	}
	err = errors.Join(s.pool.Release(s.onHost...), s.pool.Abandon(s.held...))
	s.onDevice, s.onHost, s.held = s.onDevice[:0], s.onHost[:0], s.held[:0]
	return err
}

// bytes is what one pass moves.
func (s *shuttle) bytes() int64 {
	return int64(max(len(s.onDevice), len(s.onHost))) * s.cache.Geometry().PageBytes()
}

// job is one copy in flight.
type job struct {
	from   int // of the first page, in the order of the pages
	ids    []page.ID
	pairs  []page.Pair // the copier sorts them
	sums   hostpool.Arrival
	ticket *device.Ticket
}

// pass runs begin for every job and end for each whose copy is done, in order.
func (s *shuttle) pass(ctx context.Context, pages int, begin, end func(*job) error) error {
	s.moved = s.moved[:0]
	var jobs [inFlight]job
	finish := func(k int) error {
		j := &jobs[k%inFlight]
		if err := j.ticket.Wait(ctx); err != nil {
			return err
		}
		return end(j)
	}
	n := 0
	for from := 0; from < pages; from += jobPages {
		if n >= inFlight {
			if err := finish(n - inFlight); err != nil {
				return err
			}
		}
		j := &jobs[n%inFlight]
		j.from, j.ids, j.pairs, j.ticket = from, j.ids[:0], j.pairs[:0], device.NewTicket()
		n++
		if err := begin(j); err != nil {
			// Pages of copies in flight stay in use until they have run.
			return errors.Join(err, s.stream.Sync(context.WithoutCancel(ctx)))
		}
	}
	for k := max(0, n-inFlight); k < n; k++ {
		if err := finish(k); err != nil {
			return errors.Join(err, s.stream.Sync(context.WithoutCancel(ctx)))
		}
	}
	return nil
}

// demote moves every page to the host.
func (s *shuttle) demote(ctx context.Context) error {
	err := s.pass(ctx, len(s.onDevice), func(j *job) (err error) {
		from := s.onDevice[j.from:min(j.from+jobPages, len(s.onDevice))]
		if j.ids, err = s.pool.Claim(j.ids, len(from)); err != nil {
			return err
		}
		for i, id := range j.ids {
			j.pairs = append(j.pairs, page.Pair{Dst: id, Src: from[i]})
		}
		s.moved = append(s.moved, j.pairs...)
		s.onHost = append(s.onHost, j.ids...)
		if s.checks {
			_, err = s.pool.CopyInSummed(s.stream, j.pairs, &j.sums, j.ticket)
		} else {
			_, err = s.pool.CopyIn(s.stream, j.pairs, j.ticket)
		}
		return err
	}, func(j *job) error {
		if s.checks {
			s.pool.AppendSums(s.sums[:j.from], &j.sums)
		}
		if err := s.pool.Commit(j.ids...); err != nil {
			return err
		}
		return s.alloc.Free(s.onDevice[j.from : j.from+len(j.ids)])
	})
	if err == nil {
		s.onDevice = s.onDevice[:0]
	}
	return err
}

// promote moves every page back.
func (s *shuttle) promote(ctx context.Context) error {
	err := s.pass(ctx, len(s.onHost), func(j *job) (err error) {
		from := s.onHost[j.from:min(j.from+jobPages, len(s.onHost))]
		if s.checks {
			for i, id := range from {
				if s.pool.Sum(id) != s.sums[j.from+i] {
					return fault.New(fault.Corrupt, "bench", "host page %d does not hold the bytes that arrived in it", id).
						Hint("suspect this machine's memory, and report it if it happens again")
				}
			}
		}
		if j.ids, err = s.alloc.Alloc(j.ids, len(from)); err != nil {
			return err
		}
		for i, id := range j.ids {
			j.pairs = append(j.pairs, page.Pair{Dst: id, Src: from[i]})
		}
		s.moved = append(s.moved, j.pairs...)
		s.onDevice = append(s.onDevice, j.ids...)
		_, err = s.pool.CopyOut(s.stream, j.pairs, j.ticket)
		return err
	}, func(j *job) error {
		return s.pool.Release(s.onHost[j.from : j.from+len(j.ids)]...)
	})
	if err == nil {
		s.onHost = s.onHost[:0]
	}
	return err
}

// bare are the loops beside ours: the rows of the same pages, page by page, with the
// same sums and no books: of the source while it is in the cache on the way down, of
// the host page before it is copied on the way up. R is the better of the two, run by
// run.
type bare struct {
	o       Options
	s       *shuttle
	route   *kv.Route
	sumSrc  bool // sum what is copied, while it is
	pairs   []page.Pair
	digests []device.Digest // of pairs
	ops     []device.Op
	rows    []ceiling.Row
	perPage int
}

// follow takes over the pages that ours has just moved.
func (b *bare) follow() (err error) {
	if slices.Equal(b.pairs, b.s.moved) {
		return nil
	}
	b.pairs = append(b.pairs[:0], b.s.moved...)
	b.ops, err = ceiling.AppendPageOps(b.ops[:0], b.route, b.pairs...)
	b.rows = ceiling.AppendOps(b.rows[:0], b.ops)
	b.perPage = len(b.rows) / max(1, len(b.pairs))
	b.digests = make([]device.Digest, len(b.pairs))
	return err
}

// begin takes the sums of pages that are to be copied up, and makes the digests of
// those that are to be copied down empty.
func (b *bare) begin(from, to int) {
	if !b.s.checks {
		return
	}
	for i := from; i < to; i++ {
		if b.sumSrc {
			b.digests[i].Reset()
		} else {
			b.s.pool.Sum(b.pairs[i].Src)
		}
	}
}

// end ends the digests.
func (b *bare) end(from, to int) {
	if b.s.checks && b.sumSrc {
		for i := from; i < to; i++ {
			b.digests[i].Sum128()
		}
	}
}

// byGo copies with Go's copy, and sums each row, or each page, while it is in the
// cache.
func (b *bare) byGo() error {
	b.o.split(len(b.pairs), func(from, to int) {
		for i := from; i < to; i++ {
			b.begin(i, i+1)
			rows := b.rows[i*b.perPage : (i+1)*b.perPage]
			if !b.s.checks || !b.sumSrc {
				ceiling.Copy(rows)
				continue
			}
			for k := range rows {
				ceiling.Copy(rows[k : k+1])
				_, _ = b.digests[i].Write(rows[k].Src)
			}
			b.end(i, i+1)
		}
	})
	return nil
}

// byDevice copies with the device's own kernels, in jobs like ours.
func (b *bare) byDevice(ctx context.Context) error {
	for from := 0; from < len(b.pairs); from += jobPages {
		to := min(from+jobPages, len(b.pairs))
		b.begin(from, to)
		for i := from * b.perPage; i < to*b.perPage; i++ {
			b.ops[i].Digest = nil
			if b.s.checks && b.sumSrc {
				b.ops[i].Digest = &b.digests[i/b.perPage]
			}
		}
		if err := b.s.stream.Copy(b.ops[from*b.perPage : to*b.perPage]); err != nil {
			return err
		}
	}
	err := b.s.stream.Sync(ctx)
	b.end(0, len(b.pairs))
	return err
}

// close frees the pools. Nothing is in flight.
func (s *shuttle) close() error {
	var errs []error
	if s.stream != nil {
		errs = append(errs, s.stream.Close())
	}
	if s.pool != nil {
		errs = append(errs, s.pool.Close())
	}
	if s.cache != nil {
		errs = append(errs, s.cache.Close())
	}
	return errors.Join(errs...)
}
