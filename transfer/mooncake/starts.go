package mooncake

import (
	"context"
	"sync"
	"time"

	"github.com/kvferry/kvferry/fault"
)

const backoffFirst, backoffMost = 100 * time.Millisecond, 10 * time.Second

// starts starts children, and not at once again one that died: not the first time, but
// after the second in a row of which nothing came.
type starts struct {
	mu    sync.Mutex
	fails int       // guarded by mu; in a row
	last  time.Time // guarded by mu; of the last of them
	err   error     // guarded by mu; why it failed
}

// start starts a child. Kinds: those of startChild.
func (s *starts) start(ctx context.Context, o *Options, p purpose) (*child, error) {
	if err := s.wait(time.Now()); err != nil {
		return nil, err
	}
	c, err := startChild(ctx, o, p)
	if err != nil && ctx.Err() == nil {
		s.failed(err)
	}
	return c, err
}

// wait refuses what comes too early after what failed.
func (s *starts) wait(now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails < 2 {
		return nil
	}
	left := s.last.Add(min(backoffFirst<<min(s.fails-2, 10), backoffMost)).Sub(now)
	if left <= 0 {
		return nil
	}
	kind := fault.KindOf(s.err)
	err := fault.Wrap(kind, "mooncake: not started again so soon", s.err)
	if hint := fault.RemedyOf(s.err); hint != "" {
		return err.Hint("%s; or wait for %v", hint, left.Round(time.Millisecond))
	}
	return err.Hint("wait for %v", left.Round(time.Millisecond))
}

func (s *starts) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails++
	s.last, s.err = time.Now(), err
}

// over is told how a child fared that was started: one that died of itself before it had
// read anything is as one that did not start.
func (s *starts) over(c *child, worked bool) {
	if !worked && closed(c.gone) && c.crashed {
		s.failed(c.death)
		return
	}
	if worked {
		s.mu.Lock()
		s.fails = 0
		s.mu.Unlock()
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
