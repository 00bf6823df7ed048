package copier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

const (
	// What one measurement copies: calibrateRows rows, or as many as there are in
	// calibrateBytes. Small enough to be short, large enough that a queue is full.
	calibrateRows  = 512
	calibrateBytes = 32 << 20
	// calibrateRounds is how often each is measured, after once to warm up.
	calibrateRounds = 3
	// defaultBudget bounds all measurements together.
	defaultBudget = 2 * time.Second
)

// CalibrateOptions are the choices of a calibration. The zero value is a good one.
type CalibrateOptions struct {
	// Bytes is how much memory is used on either side: at least 256 KiB; 0 means 32 MiB.
	Bytes int64
	// Budget is the time after which no copies are begun; 0 means 2 s.
	Budget time.Duration
}

// Calibrate measures which way of e is best for rows of 4 KiB to 1 MiB, 1 to 64 to a
// rectangle, over every link, with memory and streams of its own, on a device that
// should have nothing else to do meanwhile. What it measures depends on nothing but the
// options, in a fixed order; what is not measured when the budget is spent, or does not
// fit into the memory, is left as o.Crossovers has it. o also says whether there are
// batches, and of how many copies.
//
// Kinds: fault.Memory (nothing can be pinned), fault.Device (copies are not done 10 s after
// the budget), those of the device, ctx's error.
func Calibrate(ctx context.Context, a *device.Accelerator, e device.Engine, h *device.Host, o AcceleratedOptions, co CalibrateOptions) (found Crossovers, err error) {
	k := &calibration{on: a, engine: e, limits: e.Limits(), bytes: max(cmp.Or(co.Bytes, calibrateBytes), 256<<10)}
	found = DefaultCrossovers()
	if o.Crossovers != nil {
		found = *o.Crossovers
	}
	k.most = NewAccelerated(a, e, o).most
	budget := cmp.Or(co.Budget, defaultBudget)
	ctx, cancel := context.WithTimeoutCause(ctx, patience+budget,
		fault.New(fault.Device, "", "the device has not done its copies within %v", patience+budget))
	defer cancel()
	if err := k.open(h); err != nil {
		return found, errors.Join(fmt.Errorf("calibration: %w", err), k.close())
	}
	defer func() {
		if ctx.Err() != nil {
			go func() { _ = k.close() }() // ends with the device's work
			return
		}
		err = errors.Join(err, k.close())
	}()
	k.end = time.Now().Add(budget)
	for l := range Link(links) {
		for w := range widths {
			for n := range counts {
				times, err := k.cell(ctx, l, int64(4<<10)<<(2*w), 1<<(2*n))
				switch {
				case err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()):
					return found, fmt.Errorf("calibration: %w", context.Cause(ctx))
				case err != nil:
					return found, fmt.Errorf("calibration: %w", err)
				case k.over():
					return found, nil
				}
				if way, ok := best(times); ok {
					found.ways[l][w][n], found.measured[l][w][n] = way, true
				}
			}
		}
	}
	return found, nil
}

// calibration is what is measured, and with what.
type calibration struct {
	on      *device.Accelerator
	engine  device.Engine
	limits  device.EngineLimits
	most    int
	bytes   int64
	end     time.Time // of the budget
	s       device.Stream
	host    *device.Memory
	dev     [2]*device.Memory
	scratch struct {
		boxes []device.Box
		ops   []device.Op
	}
}

func (k *calibration) open(h *device.Host) (err error) {
	for i := range k.dev {
		if k.dev[i], err = k.on.Alloc(k.bytes); err != nil {
			return err
		}
	}
	if k.host, err = k.on.AllocHost(h, k.bytes, k.bytes); err != nil {
		return err
	}
	k.s, err = k.on.NewStream("calibration")
	return err
}

func (k *calibration) close() error {
	if k.s != nil {
		_ = k.s.Close() // Sync has told
	}
	var errs []error
	for _, m := range [...]*device.Memory{k.dev[0], k.dev[1], k.host} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	return errors.Join(errs...)
}

// over reports whether the budget is spent.
func (k *calibration) over() bool { return !time.Now().Before(k.end) }

// cell returns the seconds that each way takes for rectangles of rows rows of width
// bytes: 0 where there is no such way, or no room for it. They mean nothing once the
// budget is spent.
func (k *calibration) cell(ctx context.Context, l Link, width int64, rows int) (times [3]float64, err error) {
	n := min(k.bytes/width, max(calibrateRows, int64(rows))) / int64(rows) // rectangles
	if n == 0 {
		return times, nil
	}
	for w := range times {
		if Way(w) == InBatches && k.most == 0 || Way(w) == InRectangles && (rows == 1 || k.limits.MaxPitch == 0) {
			continue
		}
		for round := range calibrateRounds + 1 {
			if k.over() {
				return times, nil
			}
			t, err := k.measure(ctx, l, Way(w), width, rows, int(n))
			if err != nil {
				return times, err
			}
			if round == 1 || round > 1 && t < times[w] {
				times[w] = t
			}
		}
	}
	return times, nil
}

// measure returns the seconds from the first call until n rectangles have been copied:
// between pages that lie one after the other and layers that are far apart, as those of
// a host pool and of a device.
func (k *calibration) measure(ctx context.Context, l Link, way Way, width int64, rows, n int) (float64, error) {
	b := device.Box{Dst: k.dev[0], Src: k.host, Width: width, Rows: rows, Slices: 1}
	switch l {
	case ToDevice:
	case ToHost:
		b.Dst, b.Src = k.host, k.dev[0]
	case OnDevice:
		b.Src = k.dev[1]
	}
	near, far := width, width*int64(n)
	nearOff, farOff := width*int64(rows), width
	boxes, ops := k.scratch.boxes[:0], k.scratch.ops[:0]
	for i := range int64(n) {
		b.DstOff, b.SrcOff, b.DstPitch, b.SrcPitch = i*farOff, i*nearOff, far, near
		if l == ToHost {
			b.DstOff, b.SrcOff, b.DstPitch, b.SrcPitch = i*nearOff, i*farOff, near, far
		}
		if way == InRectangles {
			boxes = append(boxes, b)
			continue
		}
		for row := range int64(rows) {
			dst, src := b.DstOff+row*b.DstPitch, b.SrcOff+row*b.SrcPitch
			if way == InBatches {
				ops = append(ops, device.Op{Dst: b.Dst, DstOff: dst, Src: b.Src, SrcOff: src, Bytes: width})
			} else {
				boxes = append(boxes, device.Box{Dst: b.Dst, DstOff: dst, Src: b.Src, SrcOff: src, Width: width, Rows: 1, Slices: 1})
			}
		}
	}
	k.scratch.boxes, k.scratch.ops = boxes, ops
	began := time.Now()
	var err error
	if way == InBatches {
		err = k.on.CopyBatch(k.s, k.engine, ops, device.StreamOrder, k.most)
	} else {
		err = k.on.CopyBoxes(k.s, k.engine, boxes)
	}
	if err = errors.Join(err, k.s.Sync(ctx)); err != nil {
		return 0, err
	}
	return max(time.Since(began).Seconds(), 1e-9), nil
}
