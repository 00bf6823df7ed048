package transfertest

import (
	"context"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/transfer"
)

// sabotage wraps a source so that it breaks a rule of the seam.
type sabotage func(transfer.Source, transfer.Target, *transfer.Descriptor) transfer.Source

// controls are the rules that are broken on purpose, and the cases that must see it.
func controls() []control {
	return []control{
		{"the epoch word is never read", "the epoch moves in the middle", func(s transfer.Source, _ transfer.Target, d *transfer.Descriptor) transfer.Source {
			return &blind{s, d.Epoch.Count}
		}},
		{"the epoch word is never read", "a lease expires and its page is reused", func(s transfer.Source, _ transfer.Target, d *transfer.Descriptor) transfer.Source {
			return &blind{s, d.Epoch.Count}
		}},
		{"a token is left out", "ranges", func(s transfer.Source, t transfer.Target, _ *transfer.Descriptor) transfer.Source {
			return &bent{s, t, -1}
		}},
		{"a token too many is read", "ranges", func(s transfer.Source, t transfer.Target, _ *transfer.Descriptor) transfer.Source {
			return &bent{s, t, 1}
		}},
		{"pages change places", "ten thousand pages", func(s transfer.Source, _ transfer.Target, _ *transfer.Descriptor) transfer.Source {
			return &swapped{s}
		}},
		{"a copy is said to be over too early", "given up in the middle", func(s transfer.Source, _ transfer.Target, _ *transfer.Descriptor) transfer.Source {
			return &hasty{Source: s}
		}},
	}
}

type control struct {
	rule, seenBy string
	break_       sabotage
}

// Controls breaks rules of the seam, one at a time, over a harness that keeps them, and
// wants the suite to see each. It tests the suite.
func Controls(t *testing.T, h Harness) {
	for _, c := range controls() {
		t.Run(c.rule+"/"+c.seenBy, func(t *testing.T) {
			for _, x := range cases() {
				if x.name == c.seenBy {
					if err := x.run(&bench{TB: t, Harness: h, sabotage: c.break_}); err == nil {
						t.Error("nobody saw it")
					} else {
						t.Log("seen:", err)
					}
					return
				}
			}
			t.Error("there is no such case")
		})
	}
}

// blind answers with the count that is hoped for.
type blind struct {
	transfer.Source
	count uint64
}

func (s *blind) Epoch(context.Context, uint32) (uint64, error) { return s.count, nil }

// bent reads one token more or less of the last part of a page.
type bent struct {
	transfer.Source
	target transfer.Target
	by     int
}

func (s *bent) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	q := transfer.Plan{Pairs: p.Pairs, Runs: p.Runs, Parts: append([]transfer.Part(nil), p.Parts...)}
	if n := len(q.Parts); n > 0 {
		x := &q.Parts[n-1]
		x.T1 = min(max(x.T1+s.by, x.T0), s.target.Cache.PageSize())
	}
	return s.Source.Copy(ctx, on, &q)
}

// swapped reads two pages onto each other's place.
type swapped struct{ transfer.Source }

func (s *swapped) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	if n := len(p.Pairs); n > 1 {
		p.Pairs[0].Src, p.Pairs[n-1].Src = p.Pairs[n-1].Src, p.Pairs[0].Src
	}
	return s.Source.Copy(ctx, on, p)
}

// hasty returns while its copy is running.
type hasty struct {
	transfer.Source
	copies sync.WaitGroup
}

func (s *hasty) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	q := &transfer.Plan{}
	q.Pairs, q.Runs, q.Parts = append(q.Pairs, p.Pairs...), append(q.Runs, p.Runs...), append(q.Parts, p.Parts...)
	s.copies.Go(func() { _ = s.Source.Copy(context.WithoutCancel(ctx), on, q) }) // its stream may be closed by then
	return nil
}

func (s *hasty) Close() error {
	s.copies.Wait()
	return s.Source.Close()
}
