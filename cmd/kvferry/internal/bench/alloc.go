package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/page"
)

// The pool whose allocator is measured, and how much of it is taken where that
// matters.
const (
	allocPages = 16_384
	allocTaken = allocPages * 4 / 5
	allocMost  = 128 // pages of one allocation
)

// Alloc measures what a pair of allocate and free costs, and into how many runs
// pages come, beside the same with pages handed out in the order in which they
// became free. Kinds: fault.Invalid; or ctx's error.
func Alloc(ctx context.Context, o Options) (*Report, error) {
	o, err := o.check()
	if err != nil {
		return nil, err
	}
	r := newReport("alloc", o)
	r.legend = "FIFO: the same books, with pages handed out in the order in which they became free."
	r.Settings = append(r.Settings,
		Setting{"pool", fmt.Sprintf("%d pages", allocPages)},
		Setting{"churned", fmt.Sprintf("%d pages taken, the others freed one by one in any order", allocTaken)},
		Setting{"runs", fmt.Sprintf("%d allocations of 1 to %d pages, at most %d pages taken", o.Allocations, allocMost, allocTaken)})
	return r, o.measured(r, func() error {
		for _, f := range []func(context.Context, Options) (Section, error){pairs, fragmentation} {
			section, err := f(ctx, o)
			if err != nil {
				return err
			}
			r.Sections = append(r.Sections, section)
		}
		return nil
	})
}

// pairs measures allocate and free of n pages, append style.
func pairs(ctx context.Context, o Options) (Section, error) {
	out := Section{Title: "allocate and free, a pair", Unit: "ns"}
	for _, c := range []struct {
		n       int
		churned bool
		most    float64 // ns
	}{{1, false, 90}, {64, false, 250}, {64, true, 1000}} {
		reps := max(1, min(o.Allocations, 2_000_000)/10/c.n)
		var sides [2]contestant
		for i, order := range []page.Order{page.Runs, page.FIFO} {
			a, err := newAllocator(order, c.churned, o.Seed)
			if err != nil {
				return out, err
			}
			buf := make([]page.ID, 0, c.n)
			sides[i] = contestant{run: func() error {
				var err error
				for range reps {
					if buf, err = a.Alloc(buf[:0], c.n); err != nil {
						return err
					}
					if err = a.Free(buf); err != nil {
						return err
					}
				}
				return nil
			}}
		}
		arena, err := page.NewArena(page.ArenaOptions{Pages: allocPages})
		if err != nil {
			return out, err
		}
		buf := make([]page.ID, 0, c.n)
		owned := contestant{run: func() error {
			var err error
			for range reps {
				if buf, err = arena.Acquire(buf[:0], c.n); err != nil {
					return err
				}
				if _, err = arena.Release(buf); err != nil {
					return err
				}
			}
			return nil
		}}
		group := []contestant{sides[0], sides[1]}
		if !c.churned {
			group = append(group, owned)
		}
		seconds, err := o.interleave(ctx, group)
		if err != nil {
			return out, err
		}
		pool := "fresh"
		if c.churned {
			pool = "churned"
		}
		ours := each(seconds[0][0], nanos(reps))
		l := newLine(fmt.Sprintf("%2d %-5s  %s", c.n, figures.Plural(c.n, "page", "pages"), pool), statOf(ours),
			map[string]any{"pages": c.n, "pool": pool, "what": "allocator"})
		l.against("FIFO", ours, each(seconds[0][1], nanos(reps)))
		l.atMost("", c.most)
		out.Lines = append(out.Lines, l)
		if !c.churned {
			out.Lines = append(out.Lines, newLine(l.Name+", with owners", statOf(each(seconds[0][2], nanos(reps))),
				map[string]any{"pages": c.n, "pool": pool, "what": "arena"}))
		}
	}
	return out, nil
}

// newAllocator returns an allocator of allocPages pages: fresh, or with allocTaken
// of them taken in places drawn by lot.
func newAllocator(order page.Order, churned bool, seed uint64) (*page.Allocator, error) {
	a, err := page.NewAllocator(page.AllocatorOptions{Pages: allocPages, Order: order})
	if err != nil || !churned {
		return a, err
	}
	all, err := a.Alloc(nil, allocPages)
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(seed, 2))
	for _, i := range rng.Perm(allocPages)[allocTaken:] {
		if err := a.Free(all[i : i+1]); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// fragmentation counts into how many runs pages come when a pool is four fifths
// full and stays so. It is arithmetic: it does not vary, and is done once.
func fragmentation(ctx context.Context, o Options) (Section, error) {
	out := Section{Title: "runs for each 64 pages allocated", Unit: "runs"}
	for _, c := range []struct {
		name  string
		whole bool
		most  float64 // of FIFO's
	}{{"freed whole", true, 1.0 / 16}, {"freed page by page", false, 0.7}} {
		var per [2]float64
		for i, order := range []page.Order{page.Runs, page.FIFO} {
			var err error
			if per[i], err = runsPer64(ctx, order, c.whole, o); err != nil {
				return out, err
			}
		}
		l := newLine(c.name, statOf(per[:1]), map[string]any{"freed_whole": c.whole, "allocations": o.Allocations})
		l.against("FIFO", per[:1], per[1:])
		l.atMost("FIFO", c.most)
		out.Lines = append(out.Lines, l)
	}
	return out, nil
}

// runsPer64 makes allocations of 1 to allocMost pages, each after so much was freed
// that no more than allocTaken pages are taken: holders drawn by lot, or single
// pages drawn by lot.
func runsPer64(ctx context.Context, order page.Order, whole bool, o Options) (float64, error) {
	a, err := newAllocator(order, false, o.Seed)
	if err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(o.Seed, 3))
	var holders [][]page.ID
	var spare []page.ID // room of a holder that is gone
	var taken, runs, pages int
	for i := range o.Allocations {
		if i%4096 == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		n := 1 + rng.IntN(allocMost)
		for taken+n > allocTaken {
			k := rng.IntN(len(holders))
			if err := a.Free(holders[k]); err != nil {
				return 0, err
			}
			taken -= len(holders[k])
			spare = holders[k][:0]
			holders[k] = holders[len(holders)-1]
			holders = holders[:len(holders)-1]
		}
		got, err := a.Alloc(slices.Grow(spare[:0], n), n)
		if err != nil {
			return 0, err
		}
		spare = nil
		taken, pages, runs = taken+n, pages+n, runs+countRuns(got)
		if whole {
			holders = append(holders, got)
			continue
		}
		for k := range got {
			holders = append(holders, got[k:k+1:k+1])
		}
	}
	return float64(runs) / float64(pages) * 64, nil
}

// countRuns returns how many runs of ascending neighbours ids are.
func countRuns(ids []page.ID) (n int) {
	for i, id := range ids {
		if i == 0 || id != ids[i-1]+1 {
			n++
		}
	}
	return n
}
