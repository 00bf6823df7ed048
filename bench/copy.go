package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/kvferry/kvferry/page"
)

// shape is what is copied: pages of layers rows of row bytes.
type shape struct {
	name        string
	layers, row int
	pages       int
}

// moves is which device page (Src) goes onto which host page (Dst): all of them, in
// no order.
type moves struct{ Dst, Src []int }

func (m moves) appendPairs(pairs []page.Pair, from, n int) []page.Pair {
	for i := from; i < min(from+n, len(m.Dst)); i++ {
		pairs = append(pairs, page.Pair{Dst: page.ID(m.Dst[i]), Src: page.ID(m.Src[i])})
	}
	return pairs
}

// copies are the contests of demotion: pages from a device pool onto the host, both
// pools of so many MiB. eachGoal is what ours is to be faster by than a copy_ for
// every page and layer.
func copies(ctx context.Context, p *python, name string, layers, row, mib int, seed uint64, eachGoal float64) (*contest, error) {
	s := shape{name, layers, row, max(2, mib<<20/(layers*row))}
	rng := rand.New(rand.NewPCG(seed, uint64(row)))
	m := moves{Dst: rng.Perm(s.pages), Src: rng.Perm(s.pages)}
	bytes := int64(s.pages) * int64(layers) * int64(row)
	c := &contest{
		title: fmt.Sprintf("copies of %d scattered pages, %s: %d layers × %d KiB rows, %d MB a run", s.pages, name, layers, row>>10, bytes/1e6),
		unit:  "GB/s", rate: gbps(bytes),
	}
	for _, ours := range []struct {
		name   string
		checks bool
	}{{"kvferry", false}, {"kvferry, with checksums", true}} {
		f, err := openFerry(ctx, s, m, ours.checks)
		if err != nil {
			return c, err
		}
		c.rivals = append(c.rivals, &rival{name: ours.name, run: f.run, close: f.close})
	}
	for _, torch := range []struct {
		name, way string
		goal      float64
	}{{"a copy_ a page and layer", "each", eachGoal}, {"a strided copy_ a page", "strided", 0}} {
		r, err := p.start(ctx, torch.name, "torch_copy.py", map[string]any{
			"layers": layers, "pages": s.pages, "row_bytes": row, "way": torch.way, "dst": m.Dst, "src": m.Src,
		})
		if err != nil {
			return c, err
		}
		r.goal = torch.goal
		c.rivals = append(c.rivals, r)
	}
	return c, nil
}
