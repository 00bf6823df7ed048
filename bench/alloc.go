package main

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry/page"
)

// poolPages is the size of the pool that pages are allocated from.
const poolPages = 16_384

// allocations is the contest of a pair of allocate and free of n pages.
func allocations(ctx context.Context, p *python, n int) (*contest, error) {
	pairs := max(200, 40_000/n)
	c := &contest{title: fmt.Sprintf("allocate and free of %d, a pair", n), unit: "ns", rate: nanos(pairs)}
	ours, err := kvferryAllocator(n, pairs)
	if err != nil {
		return c, err
	}
	c.rivals = append(c.rivals, ours)
	for _, r := range []struct{ name, script string }{{"a FIFO in Python", "fifo_alloc.py"}, {"vLLM's BlockPool", "vllm_pool.py"}} {
		x, err := p.start(ctx, r.name, r.script, map[string]any{"pages": poolPages, "n": n, "pairs": pairs})
		if err != nil {
			return c, err
		}
		c.rivals = append(c.rivals, x)
	}
	return c, nil
}

func kvferryAllocator(n, pairs int) (*rival, error) {
	a, err := page.NewAllocator(page.AllocatorOptions{Pages: poolPages})
	if err != nil {
		return nil, err
	}
	ids := make([]page.ID, 0, n)
	return &rival{name: "kvferry", run: func(context.Context) (float64, error) {
		return timed(func() (err error) {
			for range pairs {
				if ids, err = a.Alloc(ids[:0], n); err != nil {
					return err
				}
				if err = a.Free(ids); err != nil {
					return err
				}
			}
			return nil
		})
	}}, nil
}
