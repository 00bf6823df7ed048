package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Directions between the host and an accelerator. With Both, as much goes each way at
// once, on a stream each.
const (
	Down = "device → host"
	Up   = "host → device"
	Both = "both ways"
)

// linkBench measures copies between pinned host memory and an accelerator. The ceiling
// of all of them is the link: linear copies of pieces of 64 MiB, or of a smaller pool,
// between two pinned halves of the host's memory and the device, in the same runs.
type linkBench struct {
	o       Options
	x       *accel.Opened
	host    *device.Memory // pinned: a half for each direction
	far     *device.Memory // as much on the device
	streams [2]device.Stream
	pieces  [2][]device.Op // of the link, down and up
}

func openLink(o Options, x *accel.Opened) (b *linkBench, err error) {
	b = &linkBench{o: o, x: x}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	half := int64(o.MiB) << 20
	if b.host, err = x.Accelerator.AllocHost(x.Host, 2*half, 1); err != nil {
		return b, err
	}
	scribble(b.host.Bytes(), o.Seed)
	if b.far, err = x.Accelerator.Alloc(2 * half); err != nil {
		return b, err
	}
	for i, name := range []string{"down", "up"} {
		if b.streams[i], err = x.Accelerator.NewStream(name); err != nil {
			return b, err
		}
		b.pieces[i] = b.linear(i, o.pieceBytes(), 2*ceiling.PieceBytes)
	}
	return b, errors.Join(b.streams[1].Copy(b.linear(1, half, half)), b.streams[1].Sync(context.Background()))
}

func (b *linkBench) close() error {
	var errs []error
	for _, s := range b.streams {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	for _, m := range []*device.Memory{b.host, b.far} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	return errors.Join(errs...)
}

// linear returns the copies of pieces of n bytes of one half, down (0) or up (1), one
// after the other, of limit bytes at most.
func (b *linkBench) linear(way int, n, limit int64) (ops []device.Op) {
	half := b.host.Size() / 2
	for off := int64(0); off+n <= min(half, max(limit, n)); off += n {
		op := device.Op{Dst: b.host, DstOff: off, Src: b.far, SrcOff: off, Bytes: n}
		if way == 1 {
			op = device.Op{Dst: b.far, DstOff: half + off, Src: b.host, SrcOff: half + off, Bytes: n}
		}
		ops = append(ops, op)
	}
	return ops
}

// copy gives each stream what is there for it, and waits.
func (b *linkBench) copy(ctx context.Context, down, up []device.Op) error {
	for i, ops := range [][]device.Op{down, up} {
		if len(ops) > 0 {
			if err := b.streams[i].Copy(ops); err != nil {
				return errors.Join(err, b.sync(ctx))
			}
		}
	}
	return b.sync(ctx)
}

func (b *linkBench) sync(ctx context.Context) error {
	return errors.Join(b.streams[0].Sync(ctx), b.streams[1].Sync(ctx))
}

// ways are the directions, and the link's copies in each.
func (b *linkBench) ways() []struct {
	name     string
	down, up []device.Op
} {
	return []struct {
		name     string
		down, up []device.Op
	}{{Down, b.pieces[0], nil}, {Up, nil, b.pieces[1]}, {Both, b.pieces[0], b.pieces[1]}}
}

// measured measures ours for every direction beside the link's own rate, and returns
// the seconds of both and the bytes of the link.
func (b *linkBench) measured(ctx context.Context, ours func(way int) contestant) (seconds [][][]float64, link []int64, err error) {
	var groups [][]contestant
	for i, w := range b.ways() {
		groups = append(groups, []contestant{ours(i), {run: func() error { return b.copy(ctx, w.down, w.up) }}})
		link = append(link, opsBytes(w.down)+opsBytes(w.up))
	}
	seconds, err = b.o.interleave(ctx, groups...)
	return seconds, link, err
}

func opsBytes(ops []device.Op) (n int64) {
	for i := range ops {
		n += ops[i].Bytes
	}
	return n
}

// line makes a line of n bytes in each run beside the link.
func (b *linkBench) line(name string, n int64, seconds [][]float64, link int64, labels map[string]any) Line {
	ours := each(seconds[0], gbps(n))
	l := newLine(name, statOf(ours), labels)
	l.Bytes = &n
	l.against("link", ours, each(seconds[1], gbps(link)))
	return l
}

// rowSizes are those of the sections about rows: four at least fit into limit bytes.
func rowSizes(limit int64) (sizes []int64) {
	for _, n := range []int64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20} {
		if 4*n <= limit {
			sizes = append(sizes, n)
		}
	}
	return sizes
}

// rowsARun is how many copies a run of one direction has at most.
const rowsARun = 1 << 13

// linears measures linear copies of one size, one after the other in memory.
func (b *linkBench) linears(ctx context.Context) (out Section, err error) {
	out = Section{Title: "linear copies, each a call of the library", Unit: "GB/s"}
	before := b.x.Accelerator.Calls().Batches
	defer func() {
		if b.x.Accelerator.Calls().Batches != before {
			out.Title = "linear copies, as the device batches them"
		}
	}()
	for _, n := range rowSizes(int64(b.o.MiB) << 20) {
		ops := [2][]device.Op{b.linear(0, n, rowsARun*n), b.linear(1, n, rowsARun*n)}
		bytes := []int64{opsBytes(ops[0]), opsBytes(ops[1]), opsBytes(ops[0]) + opsBytes(ops[1])}
		seconds, link, err := b.measured(ctx, func(way int) contestant {
			d, u := ops[0], ops[1]
			switch way {
			case 0:
				u = nil
			case 1:
				d = nil
			}
			return contestant{run: func() error { return b.copy(ctx, d, u) }}
		})
		if err != nil {
			return out, err
		}
		for i, w := range b.ways() {
			out.Lines = append(out.Lines, b.line(fmt.Sprintf("%-8s  %s", size(n), w.name), bytes[i], seconds[i], link[i],
				map[string]any{"direction": w.name, "row_bytes": n, "rows": len(ops[0])}))
		}
	}
	return out, nil
}

// The shapes of the pages of boxes.
const boxLayers = 8

// boxes measures scattered pages of 8 rows between a layer-major device cache and a
// page-major host pool: each page is one box, where the copier has boxes.
func (b *linkBench) boxes(ctx context.Context) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("scattered pages of %d layers: device layer-major, host page-major", boxLayers), Unit: "GB/s"}
	for _, row := range rowSizes(int64(b.o.MiB) << 20 / boxLayers) {
		lines, err := b.pages(ctx, boxLayers, row, kv.Config.LayerMajor, (*kv.Geometry).Packed, 1)
		if err != nil {
			return out, err
		}
		for i := range lines {
			l := &lines[i]
			switch way := l.Labels["direction"]; {
			case way == Both && row == 2<<20:
				l.atLeast("", 80)
			case way != Both && row >= 64<<10:
				l.atLeast("", 48)
			}
		}
		out.Lines = append(out.Lines, lines...)
	}
	return out, nil
}

// merged measures runs of pages with small rows, both sides layer-major, where a run is
// one wide row in each layer.
func (b *linkBench) merged(ctx context.Context) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("runs of %d pages of %d layers × %s rows, both sides layer-major", runPages, runLayers, size(runRow)), Unit: "GB/s"}
	out.Lines, err = b.pages(ctx, runLayers, runRow, kv.Config.LayerMajor, (*kv.Geometry).PackedLayerMajor, runPages)
	for i := range out.Lines {
		if out.Lines[i].Labels["direction"] == Up {
			out.Lines[i].atLeast("", 25)
		}
	}
	return out, err
}

// smallest measures scattered rows that merge with nothing: printed, without a goal.
func (b *linkBench) smallest(ctx context.Context) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("scattered pages of %d layers × small rows, both sides layer-major", runLayers), Unit: "GB/s"}
	for _, row := range []int64{2 << 10, runRow} {
		lines, err := b.pages(ctx, runLayers, row, kv.Config.LayerMajor, (*kv.Geometry).PackedLayerMajor, 1)
		if err != nil {
			return out, err
		}
		out.Lines = append(out.Lines, lines...)
	}
	return out, nil
}

// pages measures copies of pages by the copier, in every direction: the pages of each
// side in runs of so many, the runs in no order.
func (b *linkBench) pages(ctx context.Context, layers int, row int64, arrange func(kv.Config) (*kv.Geometry, error),
	pack func(*kv.Geometry, int) (*kv.Geometry, error), run int,
) (lines []Line, err error) {
	n := int(max(2, min(int64(b.o.MiB)<<20/(row*int64(layers)), rowsARun*4/int64(layers))))
	n = max(2, n/(2*run)) / 2 * 2 * run // an even number of runs
	tokens := max(1, row/kv.MaxDim)     // a row is one token's latent, or those of a few
	g, err := arrange(kv.Config{Layout: kv.MLA, DType: kv.FP8, Layers: layers, LatentDim: int(row / tokens), PageSize: int(tokens), Pages: n})
	if err != nil {
		return nil, err
	}
	far, err := kv.NewCache(g, b.x.Device)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, far.Close()) }()
	if g, err = pack(g, n); err != nil {
		return nil, err
	}
	mem, err := b.x.Accelerator.AllocHost(b.x.Host, g.Bytes(), 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, mem.Free()) }()
	scribble(mem.Bytes(), b.o.Seed)
	near, err := kv.Wrap(g, []*device.Memory{mem})
	if err != nil {
		return nil, err
	}
	routes := [2]*kv.Route{}
	if routes[0], err = kv.NewRoute(near, far); err != nil {
		return nil, err
	}
	if routes[1], err = kv.NewRoute(far, near); err != nil {
		return nil, err
	}
	pairs := b.pairs(n, run, row)
	var moved copier.Moved
	move := func(way int) error {
		moved, err = b.x.Copier.Copy(b.streams[way], routes[way], pairs[way])
		return err
	}
	if err := errors.Join(move(1), b.sync(ctx)); err != nil { // the device has the bytes that come down
		return nil, err
	}
	seconds, link, err := b.measured(ctx, func(way int) contestant {
		return contestant{run: func() error {
			if way < 2 {
				return errors.Join(move(way), b.sync(ctx))
			}
			return errors.Join(move(0), move(1), b.sync(ctx))
		}}
	})
	if err != nil {
		return nil, err
	}
	bytes := int64(n/2) * g.PageBytes()
	for i, w := range b.ways() {
		name := fmt.Sprintf("%-8s  %s", size(row), w.name)
		lines = append(lines, b.line(name, bytes*int64(1+i/2), seconds[i], link[i], map[string]any{
			"direction": w.name, "layers": layers, "row_bytes": row, "pages": n / 2, "run_pages": run, "copies": moved.Rows,
		}))
	}
	return lines, nil
}

// pairs returns which pages go down and which go up: of n pages of each side one half
// each, so that both can go at once, in runs whose places are drawn by lot.
func (b *linkBench) pairs(n, run int, row int64) (pairs [2][]page.Pair) {
	rng := rand.New(rand.NewPCG(b.o.Seed, uint64(row)))
	runs := n / run
	dst, src := rng.Perm(runs/2), rng.Perm(runs/2)
	for way := range pairs {
		for i := range dst {
			for k := range run {
				first := way * (runs / 2)
				pairs[way] = append(pairs[way], page.Pair{Dst: page.ID((first+dst[i])*run + k), Src: page.ID((first+src[i])*run + k)})
			}
		}
	}
	return pairs
}

// trips measures demotion and promotion of one shape with the books of both pools,
// beside the link.
func (b *linkBench) trips(ctx context.Context, s shape, arrangement string) (out Section, err error) {
	g, err := s.geometry(b.o, arrangement)
	if err != nil {
		return out, err
	}
	x, err := openShuttle(ctx, b.x, g)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	out = Section{Title: fmt.Sprintf("%s: %d layers × %s rows, device %s, host page-major", s.name, s.layers, size(s.row), arrangement), Unit: "GB/s"}
	if err := x.settle(rand.New(rand.NewPCG(b.o.Seed, 1)), true); err != nil {
		return out, err
	}
	for _, checks := range []bool{false, true} {
		x.checks = checks
		bytes, ways, check := x.bytes(), b.ways(), "off"
		if checks {
			check = "on"
		}
		seconds, err := b.o.interleave(ctx,
			[]contestant{{run: func() error { return x.demote(ctx) }}, {run: func() error { return b.copy(ctx, ways[0].down, nil) }}},
			[]contestant{{run: func() error { return x.promote(ctx) }}, {run: func() error { return b.copy(ctx, nil, ways[1].up) }}})
		if err != nil {
			return out, err
		}
		for i, direction := range []string{"demote", "promote"} {
			out.Lines = append(out.Lines, b.line(fmt.Sprintf("%-7s  checks %s", direction, check), bytes, seconds[i], opsBytes(b.pieces[i]), map[string]any{
				"direction": direction, "pool": "churned", "checks": check, "model": s.name, "layers": s.layers, "row_bytes": s.row, "arrangement": arrangement,
			}))
		}
	}
	return out, x.clear()
}

// all measures what o asks for.
func (b *linkBench) all(ctx context.Context, r *Report, shapes []shape) error {
	a := b.x.Accelerator.Attributes()
	r.Settings = append(r.Settings,
		Setting{"device", fmt.Sprintf("%s, %s, driver %s", b.x.Accelerator.Name(), a.Model, a.Driver)},
		Setting{"copier", b.x.Copier.Name()},
		Setting{"pools", fmt.Sprintf("%d MiB each, host memory pinned, OS pages of %d KiB", b.o.MiB, b.host.OSPageBytes()>>10)},
		Setting{"jobs", fmt.Sprintf("%d pages, %d in flight, one stream", jobPages, inFlight)},
		Setting{"link", fmt.Sprintf("pieces of %d MiB", b.pieces[0][0].Bytes>>20)},
	)
	sections := []func(context.Context) (Section, error){b.linears, b.boxes, b.merged, b.smallest}
	if b.o.Model != "" || b.o.RowBytes > 0 || b.o.Arrangement != "" {
		sections = nil // about no model
	}
	for _, f := range sections {
		section, err := f(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", section.Title, err)
		}
		r.Sections = append(r.Sections, section)
	}
	return b.o.arrangements(shapes, func(s shape, arrangement string) error {
		section, err := b.trips(ctx, s, arrangement)
		r.Sections = append(r.Sections, section)
		return err
	})
}
