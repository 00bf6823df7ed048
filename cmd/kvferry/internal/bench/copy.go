package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/replay"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// pageTokens is the page size of the models, in tokens.
const pageTokens = 16

// Copy measures copies between a device pool and a host pool, both in host memory:
// demotion and promotion beside the ceilings C and R, cold rows in any place beside
// Go's copy, and runs of pages beside bare loops row by row.
//
// Kinds: fault.Invalid, fault.Unsupported (an arrangement that a model can't have),
// fault.Memory, fault.Corrupt; or ctx's error.
func Copy(ctx context.Context, o Options) (*Report, error) {
	o, err := o.check()
	if err != nil {
		return nil, err
	}
	shapes, err := o.shapes()
	if err != nil {
		return nil, err
	}
	r := newReport("copy", o)
	if shapes, err = o.apart(r, shapes); err != nil {
		return nil, err
	}
	if vendor, _, _ := accel.Parse(o.Device); vendor != accel.Host { // check has parsed it
		return r, o.copyDevice(ctx, r, shapes)
	}
	r.legend = fmt.Sprintf("C: Go's copy of %s pieces in the same kind of memory.\nR: the better of two bare loops over the same rows, page by page, with the same checks and no books:\nby Go's copy, and by the device's.", size(o.pieceBytes()))
	return r, o.measured(r, func() error {
		b, err := openBench(o)
		if err != nil {
			return err
		}
		err = b.copies(ctx, r, shapes)
		return errors.Join(err, b.close())
	})
}

// calibrateFor is how long it may take to find out which way of copying is best.
const calibrateFor = 2 * time.Second

// copyDevice measures copies between an accelerator and pinned host memory, beside the
// rate of the link between them.
func (o Options) copyDevice(ctx context.Context, r *Report, shapes []shape) error {
	r.legend = fmt.Sprintf("link: linear copies of %s pieces of pinned memory, the same way in the same run.", size(o.pieceBytes()))
	return o.measured(r, func() error {
		x, err := accel.Open(ctx, o.Device, accel.Options{Libraries: o.Libraries, Copier: o.Copier, Workers: o.Threads, Calibrate: calibrateFor})
		if err != nil {
			return err
		}
		r.Crossovers = x.Selection.Crossovers.String()
		b, err := openLink(o, x)
		if err == nil {
			err = errors.Join(b.all(ctx, r, shapes), b.close())
		}
		return errors.Join(err, x.Close())
	})
}

// pieceBytes is the size of the pieces of the ceilings: smaller pools have smaller ones.
func (o Options) pieceBytes() int64 { return min(ceiling.PieceBytes, int64(o.MiB)<<20) }

// apart returns the shapes that can lie in the arrangement that was asked for, and notes
// in r which can't. Kind: fault.Unsupported, when none can.
func (o Options) apart(r *Report, shapes []shape) (can []shape, err error) {
	if o.Arrangement != KVFirst {
		return shapes, nil
	}
	for _, s := range shapes {
		if s.config.Layout != kv.MLA {
			can = append(can, s)
		} else if o.Model == "" {
			r.Warnings = append(r.Warnings, fmt.Sprintf("%s was not measured %s: its latent is no K and V that could lie apart", s.name, KVFirst))
		}
	}
	if len(can) == 0 {
		return nil, fault.New(fault.Unsupported, "--arrangement", "%s keeps K and V apart, and %s has one latent", KVFirst, shapes[0].name).
			Hint("use --arrangement %s or %s", LayerMajor, PageMajor)
	}
	return can, nil
}

// arrangements calls f for each shape with the arrangements in which it is measured.
// Unless asked for, others than layer-major are measured once: what they change does not
// depend on the model, and MLA has no K and V.
func (o Options) arrangements(shapes []shape, f func(shape, string) error) error {
	for _, s := range shapes {
		for _, arrangement := range []string{LayerMajor, PageMajor, KVFirst} {
			if o.Arrangement != "" && o.Arrangement != arrangement ||
				o.Arrangement == "" && arrangement != LayerMajor && s.name != replay.Models()[0] {
				continue
			}
			if err := f(s, arrangement); err != nil {
				return fmt.Errorf("%s, %s: %w", s.name, arrangement, err)
			}
		}
	}
	return nil
}

// shape is a model's page: rows of row bytes, one in each layer.
type shape struct {
	name   string
	layers int
	row    int64
	config kv.Config
}

// shapes are those that o asks for.
func (o Options) shapes() ([]shape, error) {
	if o.RowBytes > 0 {
		// One byte an element and one token a page: any row is a latent.
		return []shape{{"rows", o.Layers, o.RowBytes, kv.Config{
			Layout: kv.MLA, DType: kv.FP8, Layers: o.Layers, LatentDim: int(o.RowBytes), PageSize: 1,
		}}}, nil
	}
	names := replay.Models()
	if o.Model != "" {
		names = []string{o.Model}
	}
	var all []shape
	for _, name := range names {
		m := replay.DefaultOptions()
		m.Model, m.PageSize = name, pageTokens
		m, err := m.Resolve()
		if err != nil {
			return nil, err
		}
		c := kv.Config{Layers: m.Layers, KVHeads: m.KVHeads, HeadDim: m.HeadDim, LatentDim: m.LatentDim, PageSize: pageTokens, Pages: 1}
		if c.Layout, err = kv.ParseLayout(m.Layout); err != nil {
			return nil, err
		}
		if c.DType, err = kv.ParseDType(m.DType); err != nil {
			return nil, err
		}
		g, err := c.PageMajor()
		if err != nil {
			return nil, err
		}
		all = append(all, shape{name, m.Layers, g.PageBytes() / int64(m.Layers), c})
	}
	return all, nil
}

// geometry arranges pools of o.MiB, or of two pages if a page is larger.
func (s shape) geometry(o Options, arrangement string) (*kv.Geometry, error) {
	c := s.config
	c.Pages = int(max(2, int64(o.MiB)<<20/(s.row*int64(s.layers))))
	switch arrangement {
	case PageMajor:
		return c.PageMajor()
	case KVFirst:
		return c.PerLayerKVFirst()
	}
	return c.LayerMajor()
}

// copyBench has what all measurements of copies share.
type copyBench struct {
	o      Options
	host   *device.Host
	yard   *device.Memory // two halves as large as a pool, touched
	pieces []ceiling.Row  // of C
}

func openBench(o Options) (b *copyBench, err error) {
	b = &copyBench{o: o}
	if b.host, err = o.openHost(); err != nil {
		return b, err
	}
	half := int64(o.MiB) << 20
	if b.yard, err = b.host.Alloc(2 * half); err != nil {
		return b, errors.Join(err, b.close())
	}
	if err := b.yard.Populate(0, 2*half); err != nil {
		return b, errors.Join(err, b.close())
	}
	scribble(b.yard.Bytes(), o.Seed)
	dst, src := b.halves()
	b.pieces = ceiling.Pieces(dst, src, int(min(2*ceiling.PieceBytes, half)))
	return b, nil
}

func (b *copyBench) halves() (dst, src []byte) {
	all := b.yard.Bytes()
	return all[:len(all)/2], all[len(all)/2:]
}

func (b *copyBench) close() error {
	var errs []error
	if b.yard != nil {
		errs = append(errs, b.yard.Free())
	}
	if b.host != nil {
		errs = append(errs, b.host.Close())
	}
	return errors.Join(errs...)
}

func (b *copyBench) copies(ctx context.Context, r *Report, shapes []shape) error {
	r.Settings = append(r.Settings,
		Setting{"pools", fmt.Sprintf("%d MiB each, OS pages of %d KiB", b.o.MiB, b.yard.OSPageBytes()>>10)},
		Setting{"kernels", b.host.Kernels().String()},
		Setting{"jobs", fmt.Sprintf("%d pages, %d in flight, one stream", jobPages, inFlight)},
		Setting{"C", fmt.Sprintf("pieces of %d MiB", len(b.pieces[0].Dst)>>20)},
	)
	err := b.o.arrangements(shapes, func(s shape, arrangement string) error {
		section, err := b.shuttles(ctx, s, arrangement)
		if err == nil {
			r.Sections = append(r.Sections, section)
		}
		return err
	})
	if err != nil {
		return err
	}
	if b.o.Model != "" || b.o.RowBytes > 0 || b.o.Arrangement != "" {
		return nil // the rest is about no model
	}
	for _, f := range []func(context.Context) (Section, error){b.sums, b.scattered, b.runs} {
		section, err := f(ctx)
		if err != nil {
			return err
		}
		r.Sections = append(r.Sections, section)
	}
	return nil
}

// shuttles measures demotion and promotion of one shape, fresh and churned, with
// and without checks.
func (b *copyBench) shuttles(ctx context.Context, s shape, arrangement string) (out Section, err error) {
	g, err := s.geometry(b.o, arrangement)
	if err != nil {
		return out, err
	}
	x, err := openShuttle(ctx, onHost(b.host), g)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	out = Section{
		Title: fmt.Sprintf("%s: %d layers × %s rows, device %s, host page-major", s.name, s.layers, size(s.row), arrangement),
		Unit:  "GB/s",
	}
	pools := []bool{false, true} // churned or not
	if arrangement != LayerMajor && b.o.Arrangement == "" {
		pools = pools[1:] // as most pools are after a while
	}
	for _, churned := range pools {
		if err := x.settle(rand.New(rand.NewPCG(b.o.Seed, 1)), churned); err != nil {
			return out, err
		}
		unchecked := map[string]Stat{} // by direction
		for _, checks := range []bool{false, true} {
			x.checks = checks
			trips, err := b.roundTrips(ctx, x)
			if err != nil {
				return out, err
			}
			for _, t := range trips {
				l := t.line(s, arrangement, churned, checks)
				if !checks {
					unchecked[t.direction] = l.Value
				} else {
					l.checked(t.direction, unchecked[t.direction], s.row)
				}
				out.Lines = append(out.Lines, l)
			}
		}
	}
	return out, x.clear()
}

// trip is one direction, measured: the seconds of each run.
type trip struct {
	direction  string
	bytes      int64
	rows       int // bare copies of one run
	ours, r, c []float64
	pieceBytes int64 // moved by a run of C
}

// roundTrips measures both directions: each run goes down and up again.
func (b *copyBench) roundTrips(ctx context.Context, x *shuttle) ([]trip, error) {
	bytes := x.bytes()
	down := &bare{o: b.o, s: x, route: x.down, sumSrc: true}
	up := &bare{o: b.o, s: x, route: x.up}
	seconds, err := b.o.interleave(ctx, append(down.contestants(ctx, x.demote), b.loop(b.pieces)), up.contestants(ctx, x.promote))
	if err != nil {
		return nil, err
	}
	pieces := ceiling.Bytes(b.pieces)
	return []trip{
		{"demote", bytes, len(down.rows), seconds[0][0], leastOf(seconds[0][1], seconds[0][2]), seconds[0][3], pieces},
		{"promote", bytes, len(up.rows), seconds[1][0], leastOf(seconds[1][1], seconds[1][2]), seconds[0][3], pieces},
	}, nil
}

// contestants are ours and the two bare loops, which follow it.
func (b *bare) contestants(ctx context.Context, ours func(context.Context) error) []contestant {
	return []contestant{
		{run: func() error { return ours(ctx) }, after: b.follow},
		{run: b.byGo},
		{run: func() error { return b.byDevice(ctx) }},
	}
}

// line makes a line of a trip, with the goals that are set for its shape.
func (t trip) line(s shape, arrangement string, churned, checks bool) Line {
	pool, check := "fresh", "off"
	if churned {
		pool = "churned"
	}
	if checks {
		check = "on"
	}
	ours := each(t.ours, gbps(t.bytes))
	l := newLine(fmt.Sprintf("%-7s  %-7s  checks %s", t.direction, pool, check), statOf(ours), map[string]any{
		"direction": t.direction, "pool": pool, "checks": check, "model": s.name, "layers": s.layers,
		"row_bytes": s.row, "arrangement": arrangement, "rows": t.rows,
	})
	l.Bytes = &t.bytes
	l.against("C", ours, each(t.c, gbps(t.pieceBytes)))
	l.against("R", ours, each(t.r, gbps(t.bytes)))
	if s.row == 64<<10 && arrangement == LayerMajor {
		l.atLeast("R", 0.95)
		if !checks {
			l.atLeast("C", 0.6)
		}
	}
	return l
}

// checked says what the checks cost, beside the same trip without them. The two
// were not measured in turns, so the spread is that of the extremes.
func (l *Line) checked(direction string, off Stat, row int64) {
	l.Beside = append(l.Beside, Share{Of: "off", Value: off, Ratio: Stat{
		Median: l.Value.Median / off.Median, Low: l.Value.Low / off.High, High: l.Value.High / off.Low,
	}})
	if direction == "demote" && row >= 64<<10 {
		l.atLeast("off", 0.7)
	}
}

// loop is a bare loop over rows as a contestant.
func (b *copyBench) loop(rows []ceiling.Row) contestant {
	return contestant{run: func() error {
		b.o.split(len(rows), func(from, to int) { ceiling.Copy(rows[from:to]) })
		return nil
	}}
}
