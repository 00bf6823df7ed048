package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// batchBytes is what one call of the stream is given of scattered rows: about as
// much as a job of large pages.
const batchBytes = 32 << 20

// scattered measures the device's copy of rows that lie anywhere, cold on both
// sides, beside Go's copy.
func (b *copyBench) scattered(ctx context.Context) (out Section, err error) {
	out = Section{Title: "cold scattered rows: the host device's copy beside Go's", Unit: "GB/s"}
	stream, err := b.host.NewStream("rows")
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	for row := int64(1 << 10); row <= min(1<<20, b.yard.Size()/2); row *= 2 {
		ops := b.scatter(row)
		rows := ceiling.AppendOps(nil, ops)
		batch := int(max(1, batchBytes/row))
		seconds, err := b.o.interleave(ctx, []contestant{
			{run: func() error {
				for i := 0; i < len(ops); i += batch {
					if err := stream.Copy(ops[i:min(i+batch, len(ops))]); err != nil {
						return err
					}
				}
				return stream.Sync(ctx)
			}},
			b.loop(rows),
			b.loop(b.pieces),
		})
		if err != nil {
			return out, err
		}
		bytes := ceiling.Bytes(rows)
		ours, gos := each(seconds[0][0], gbps(bytes)), each(seconds[0][1], gbps(bytes))
		l := newLine(size(row), statOf(ours), map[string]any{"row_bytes": row, "rows": len(ops)})
		l.Bytes = &bytes
		l.against("C", ours, each(seconds[0][2], gbps(ceiling.Bytes(b.pieces))))
		l.against("Go copy", ours, gos)
		switch {
		case row >= 64<<10 && row <= 512<<10:
			l.atLeast("Go copy", 1.25)
		case row == 32<<10:
			l.atLeast("Go copy", 1.15)
		default:
			l.atLeast("Go copy", 0.97)
		}
		out.Lines = append(out.Lines, l)
	}
	return out, nil
}

// scatter returns the copy of every row of the yard's one half to a row of the
// other, in no order.
func (b *copyBench) scatter(row int64) []device.Op {
	half := b.yard.Size() / 2
	n := int(half / row)
	rng := rand.New(rand.NewPCG(b.o.Seed, uint64(row)))
	dst, src := rng.Perm(n), rng.Perm(n)
	ops := make([]device.Op, n)
	for i := range ops {
		ops[i] = device.Op{
			Dst: b.yard, DstOff: int64(dst[i]) * row,
			Src: b.yard, SrcOff: half + int64(src[i])*row, Bytes: row,
		}
	}
	return ops
}

// Runs are of so many pages, of so many tokens in so many layers.
const (
	runPages  = 64
	runLayers = 24
	runRow    = 8 << 10
)

// runs measures runs of pages with small rows, both sides layer-major, where a run
// of pages is one wide row a layer, beside the better of two bare loops row by row:
// page after page and layer after layer.
func (b *copyBench) runs(ctx context.Context) (out Section, err error) {
	out = Section{
		Title: fmt.Sprintf("runs of %d pages of %d layers × %s rows, both sides layer-major", runPages, runLayers, size(runRow)),
		Unit:  "GB/s",
	}
	pages := max(runPages, b.o.MiB<<20/(runLayers*runRow)/runPages*runPages)
	g, err := kv.Config{Layout: kv.MLA, DType: kv.FP8, Layers: runLayers, LatentDim: runRow, PageSize: 1, Pages: pages}.LayerMajor()
	if err != nil {
		return out, err
	}
	stream, err := b.host.NewStream("runs")
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	var side [2]*kv.Cache
	for i := range side {
		if side[i], err = b.touched(g); err != nil {
			return out, err
		}
		defer func() { err = errors.Join(err, side[i].Close()) }()
	}
	route, err := kv.NewRoute(side[0], side[1])
	if err != nil {
		return out, err
	}
	rng := rand.New(rand.NewPCG(b.o.Seed, runRow))
	dst, src := rng.Perm(pages/runPages), rng.Perm(pages/runPages)
	pairs := make([]page.Pair, 0, pages)
	for i := range dst {
		for k := range runPages {
			pairs = append(pairs, page.Pair{Dst: page.ID(dst[i]*runPages + k), Src: page.ID(src[i]*runPages + k)})
		}
	}
	byPage, err := ceiling.AppendPages(nil, route, pairs...)
	if err != nil {
		return out, err
	}
	byLayer := layerAfterLayer(byPage)
	c := copier.NewPortable()
	seconds, err := b.o.interleave(ctx, []contestant{
		{run: func() error {
			for i := 0; i < len(pairs); i += runPages {
				if _, err := c.Copy(stream, route, pairs[i:i+runPages]); err != nil {
					return err
				}
			}
			return stream.Sync(ctx)
		}},
		b.loop(byPage),
		b.loop(byLayer),
		b.loop(b.pieces),
	})
	if err != nil {
		return out, err
	}
	bytes := ceiling.Bytes(byPage)
	ours := each(seconds[0][0], gbps(bytes))
	l := newLine(fmt.Sprintf("%d runs", len(dst)), statOf(ours), map[string]any{
		"pages": pages, "run_pages": runPages, "layers": runLayers, "row_bytes": runRow,
	})
	l.Bytes = &bytes
	l.against("C", ours, each(seconds[0][3], gbps(ceiling.Bytes(b.pieces))))
	l.against("page by page", ours, each(seconds[0][1], gbps(bytes)))
	l.against("row by row", ours, each(leastOf(seconds[0][1], seconds[0][2]), gbps(bytes)))
	l.atLeast("row by row", 1.8)
	out.Lines = append(out.Lines, l)
	return out, nil
}

// layerAfterLayer puts the rows of whole runs, page after page, into the order in
// which they lie in memory: run after run, and in a run layer after layer.
func layerAfterLayer(byPage []ceiling.Row) []ceiling.Row {
	rows := make([]ceiling.Row, 0, len(byPage))
	for run := 0; run < len(byPage); run += runPages * runLayers {
		for layer := range runLayers {
			for k := range runPages {
				rows = append(rows, byPage[run+k*runLayers+layer])
			}
		}
	}
	return rows
}

// touched returns a cache on the host device whose memory is there.
func (b *copyBench) touched(g *kv.Geometry) (*kv.Cache, error) {
	c, err := kv.NewCache(g, b.host)
	if err != nil {
		return nil, err
	}
	m, err := c.Region(0)
	if err == nil {
		err = m.Populate(0, m.Size())
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	scribble(m.Bytes(), uint64(g.Pages()))
	return c, nil
}
