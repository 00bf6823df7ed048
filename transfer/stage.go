package transfer

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// stageBytes is the host memory of one half of a stage, unless a page is larger.
const stageBytes = 16 << 20

// Staged opens an owner for a target that an engine can't write: memory of a device. Its
// pages are read into host memory, by the source that open returns for a target there,
// and copied from there. A target in host memory is opened as it is.
//
// Kinds: fault.Unsupported (t.Host is missing, or t.Device reaches no host memory),
// fault.Memory, and those of open.
func Staged(t Target, open func(Target) (Source, error)) (Source, error) {
	if hostCache(t.Cache) {
		return open(t)
	}
	dev, ok := t.Device.(interface {
		AllocHost(h *device.Host, bytes, cut int64) (*device.Memory, error)
		AdmitPageable(m *device.Memory) error
	})
	if !ok || t.Host == nil {
		return nil, fault.New(fault.Unsupported, "read", "its pages are memory of %s, which this engine can't write", t.Cache.Device()).
			Hint("give the reader host memory for them to pass through: Options.Host")
	}
	g := t.Cache.Geometry()
	half := int(min(max(stageBytes/max(g.PageBytes(), 1), 1), int64(g.Pages())))
	s := &stage{target: t, half: half, turn: make(chan struct{}, 1)}
	if err := s.fill(dev, g, open); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// stage is a source whose pages pass through host memory. It has two halves: while the
// device copies from one, the engine reads into the other. One read uses it at a time.
type stage struct {
	Source
	target Target
	half   int // pages of one half
	turn   chan struct{}
	mem    *device.Memory
	cache  *kv.Cache     // pages [0, half) and [half, 2·half)
	stream device.Stream // of the host: the inner source's
	route  *kv.Route     // from cache to the target's

	// Guarded by turn.
	events [2]device.Event // the device has read that half
	plan   Plan
	pairs  []page.Pair
}

func (s *stage) fill(dev interface {
	AllocHost(h *device.Host, bytes, cut int64) (*device.Memory, error)
	AdmitPageable(m *device.Memory) error
}, g *kv.Geometry, open func(Target) (Source, error),
) error {
	packed, err := g.Packed(2 * s.half)
	if err != nil {
		return err
	}
	var regions []*device.Memory
	if packed.Regions() > 0 {
		if s.mem, err = device.ReachableMemory(dev, s.target.Host, packed.Bytes(), 1); err != nil {
			return err
		}
		regions = append(regions, s.mem)
	}
	if s.cache, err = kv.Wrap(packed, regions); err != nil {
		return err
	}
	if s.route, err = kv.NewRoute(s.target.Cache, s.cache); err != nil {
		return err
	}
	for i := range s.events {
		if s.events[i], err = s.target.Device.NewEvent(); err != nil {
			return err
		}
	}
	if s.stream, err = s.target.Host.NewStream("stage"); err != nil {
		return err
	}
	s.Source, err = open(Target{Cache: s.cache, Device: s.target.Host, Copier: copier.NewPortable(), Host: s.target.Host})
	return err
}

// Copy implements [Source].
func (s *stage) Copy(ctx context.Context, on device.Stream, p *Plan) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.turn }()
	// What was enqueued is waited for whatever happens: it writes the target's pages, and
	// reads the stage.
	return errors.Join(s.copyAll(ctx, on, p), on.Sync(context.WithoutCancel(ctx)))
}

func (s *stage) copyAll(ctx context.Context, on device.Stream, p *Plan) error {
	n := 0 // halves that were filled
	for pairs, parts := p.Pairs, p.Parts; len(pairs)+len(parts) > 0; n++ {
		whole := min(len(pairs), s.half)
		part := min(len(parts), s.half-whole)
		if n >= len(s.events) {
			if err := s.events[n%2].Sync(ctx); err != nil {
				return err
			}
		}
		if err := s.pass(ctx, on, n%2, pairs[:whole], parts[:part]); err != nil {
			return err
		}
		pairs, parts = pairs[whole:], parts[part:]
	}
	return nil
}

// pass reads into a half of the stage, and enqueues the copies from there.
func (s *stage) pass(ctx context.Context, on device.Stream, half int, pairs []page.Pair, parts []Part) error {
	q, first := &s.plan, page.ID(half*s.half)
	q.Pairs, q.Runs, q.Parts, s.pairs = q.Pairs[:0], q.Runs[:0], q.Parts[:0], s.pairs[:0]
	for i, x := range pairs {
		staged := first + page.ID(i)
		q.Pairs = append(q.Pairs, page.Pair{Dst: staged, Src: x.Src})
		s.pairs = append(s.pairs, page.Pair{Dst: x.Dst, Src: staged})
	}
	for i, x := range parts {
		q.Parts = append(q.Parts, Part{Local: first + page.ID(len(pairs)+i), Remote: x.Remote, T0: x.T0, T1: x.T1})
	}
	var err error
	if q.Runs, err = page.AppendRuns(q.Runs, q.Pairs); err != nil {
		return err
	}
	if err := s.Source.Copy(ctx, s.stream, q); err != nil {
		return err
	}
	if _, err := s.target.Copier.Copy(on, s.route, s.pairs); err != nil {
		return err
	}
	for i, x := range parts {
		if _, err := copier.CopyTokens(s.target.Copier, on, s.route, x.Local, first+page.ID(len(pairs)+i), x.T0, x.T1); err != nil {
			return err
		}
	}
	return on.Record(s.events[half])
}

// Close implements [Source].
func (s *stage) Close() (err error) {
	if s.Source != nil {
		err = s.Source.Close()
	}
	if s.stream != nil {
		err = errors.Join(err, s.stream.Close())
	}
	if s.cache != nil {
		err = errors.Join(err, s.cache.Close())
	}
	if s.mem != nil {
		err = errors.Join(err, s.mem.Free())
	}
	return err
}
