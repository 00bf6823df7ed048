package store

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/page"
)

// The scrubber looks at host pages while nobody needs the memory: a byte that went
// wrong is then found, and its page dropped, before anybody waits for it. It goes
// round the entries, a few at a time, whenever no look-up came for a while; once
// round, it looks at suspended runs, and rests until there was a look-up.
const (
	scrubIdle  = time.Second // the default of Options.ScrubAfter
	scrubBytes = 8 << 20     // looked at in one go: a few milliseconds
)

// suspect is a host page to be looked at.
type suspect struct {
	r     Ref
	host  page.ID
	sum   hostpool.Sum
	epoch uint32
}

// scrubber runs until ctx ends.
func (s *Store) scrubber(ctx context.Context, every time.Duration) {
	defer close(s.scrubbed)
	tick := time.NewTicker(every)
	defer tick.Stop()
	var seen uint64 // look-ups when last looked at
	at, left := 0, 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		idle, entries := s.lookups == seen, len(s.entries)
		seen = s.lookups
		s.mu.Unlock()
		if !idle {
			left = entries // what was looked at may have changed since
			continue
		}
		if left == 0 {
			continue
		}
		n, _ := s.scrub(at, min(left, entries), int(max(1, scrubBytes/s.bytes)))
		if at, left = (at+n)%max(1, entries), left-n; left <= 0 {
			left = 0
			_, _ = s.scrubRuns(ctx) // it ends with ctx
		}
	}
}

// Scrub looks at every cold host page now, and at the pool's suspended runs, and
// returns how many pages and runs were wrong. The pages are dropped, for the reason
// fault.Corrupted; the runs can't be reloaded. It gives up when ctx ends.
func (s *Store) Scrub(ctx context.Context) (wrong int, err error) {
	if s.bytes == 0 || s.pool == nil || s.pool.Checks() == hostpool.ChecksOff {
		return 0, nil
	}
	s.mu.Lock()
	entries := len(s.entries)
	s.mu.Unlock()
	for at := 0; at < entries; {
		if err := ctx.Err(); err != nil {
			return wrong, err
		}
		n, bad := s.scrub(at, entries-at, int(max(1, scrubBytes/s.bytes)))
		at, wrong = at+n, wrong+bad
	}
	bad, err := s.scrubRuns(ctx)
	return wrong + bad, err
}

// scrubRuns looks at the suspended runs of the pool.
func (s *Store) scrubRuns(ctx context.Context) (wrong int, err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return 0, errClosed()
	}
	s.readers.Add(1)
	s.mu.Unlock()
	defer s.readers.Done()
	pages, wrong, err := s.pool.Scrub(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Scrubbed += int64(pages)
	s.stats.Corrupted += int64(wrong)
	return wrong, err
}

// scrub looks at the pages of up to n entries from at on, most of them at the most.
// It returns how many entries it passed, and how many pages were wrong.
func (s *Store) scrub(at, n, most int) (passed, wrong int) {
	suspects, passed := s.suspects(at, n, most)
	if len(suspects) == 0 {
		return passed, 0
	}
	defer s.readers.Done()
	ids := make([]page.ID, len(suspects))
	for i, x := range suspects {
		ids[i] = x.host
	}
	sums := s.sum(nil, ids)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, x := range suspects {
		s.stats.Scrubbed++
		e := &s.entries[x.r]
		if sums[i] == x.sum || e.state != kept || e.epoch != x.epoch || e.part.host != x.host || e.part.flight != nil {
			continue // right; or the page was somebody else's while it was read
		}
		wrong++
		s.stats.Corrupted++
		s.corrupt(x.r, e)
	}
	return passed, wrong
}

// suspects lists cold pages from entry at on. With any, the caller is one of readers.
func (s *Store) suspects(at, n, most int) (all []suspect, passed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, n
	}
	for ; passed < n && len(all) < most; passed++ {
		r := Ref((at + passed) % len(s.entries))
		e := &s.entries[r]
		if e.state == kept && e.pins == 0 && e.part.flight == nil && e.part.host != page.None && e.part.summed {
			all = append(all, suspect{r, e.part.host, e.part.sum, e.epoch})
		}
	}
	if len(all) > 0 {
		s.readers.Add(1)
	}
	return all, passed
}
