package mooncake

import (
	"context"
	"sync"
	"time"

	"github.com/kvferry/kvferry/fault"
)

const backoffFirst, backoffMost = 100 * time.Millisecond, 10 * time.Second

// starts starts children, and not at once again one that died: not the first time, but
// after the second in a row of which nothing came. Children that don't start at all say
// something about this host; one that dies before it has read anything says something
// about its owner, and nothing about others.
type starts struct {
	mu sync.Mutex
	of map[string]*failures // guarded by mu; by owner; "" has those that did not start
}

// maxFailures bounds what is remembered of owners: names come from outside.
const maxFailures = 256

// failures are those in a row.
type failures struct {
	n    int
	last time.Time
	err  error // the last one
}

// until is when the next start may be.
func (f *failures) until() time.Time {
	if f.n < 2 {
		return f.last
	}
	return f.last.Add(min(backoffFirst<<min(f.n-2, 10), backoffMost))
}

// start starts a child for an owner, or for offers, which are nobody's. Kinds: those of
// startChild.
func (s *starts) start(ctx context.Context, o *Options, p purpose, owner string) (*child, error) {
	for _, who := range []string{"", owner} {
		if err := s.wait(who, time.Now()); err != nil {
			return nil, err
		}
	}
	c, err := startChild(ctx, o, p)
	switch {
	case err == nil:
		s.worked("")
	case ctx.Err() == nil:
		s.failed("", err, time.Now())
	}
	return c, err
}

// wait refuses what comes too early after what failed.
func (s *starts) wait(who string, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.of[who]
	if f == nil {
		return nil
	}
	left := f.until().Sub(now)
	if left <= 0 {
		return nil
	}
	err := fault.Wrap(fault.KindOf(f.err), "mooncake: not started again so soon", f.err)
	if hint := fault.RemedyOf(f.err); hint != "" {
		return err.Hint("%s; or wait for %v", hint, left.Round(time.Millisecond))
	}
	return err.Hint("wait for %v", left.Round(time.Millisecond))
}

func (s *starts) failed(who string, err error, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[string]*failures{}
	}
	f := s.of[who]
	if f == nil {
		if len(s.of) >= maxFailures { // the one that has waited longest
			oldest := ""
			for name, x := range s.of {
				if name != "" && (oldest == "" || x.last.Before(s.of[oldest].last)) {
					oldest = name
				}
			}
			delete(s.of, oldest)
		}
		f = &failures{}
		s.of[who] = f
	}
	f.n, f.last, f.err = f.n+1, now, err
}

func (s *starts) worked(who string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, who)
}

// over is told how a child fared that was started for an owner.
func (s *starts) over(c *child, owner string, worked bool) {
	switch {
	case worked:
		s.worked(owner)
	case closed(c.gone) && c.crashed: // of itself
		s.failed(owner, c.death, time.Now())
	}
}

// Report is what [Check] found.
type Report struct {
	Release string // of the library: there is no more exact answer
	Name    string // by which peers would know this process
}

// Check opens the libraries and makes an engine, as a first use would, in a child unless
// the options say otherwise: what doctor asks. Kinds: those of [New] and of a start, with
// what is in the way.
func Check(ctx context.Context, o Options) (Report, error) {
	o, err := withDefaults(o)
	if err != nil {
		return Report{}, err
	}
	var w worker
	if o.InProcess {
		w, err = newInside(&o)
	} else {
		w, err = startChild(ctx, &o, purpose{})
	}
	if err != nil {
		return Report{}, err
	}
	defer w.close()
	name, release := w.named()
	return Report{Release: release, Name: name}, nil
}
