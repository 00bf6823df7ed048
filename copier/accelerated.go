package copier

import (
	"cmp"
	"errors"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// DefaultBatchOps is the most copies of one batch. ROCm's batches fault beyond it, and
// CUDA's gain nothing.
const DefaultBatchOps = 8192

// rectsOps is the most boxes that one call of the accelerator is given.
const rectsOps = 2048

// AcceleratedOptions are the choices of an accelerated copier. The zero value is a good
// one for an engine that is known to work: [Select] finds out.
type AcceleratedOptions struct {
	// NoBatches keeps the engine's batches out of use.
	NoBatches bool
	// BatchOps is the most copies of one batch: 0 means DefaultBatchOps. An engine that
	// allows less gets less.
	BatchOps int
	// Crossovers say what is copied how. Nil means DefaultCrossovers.
	Crossovers *Crossovers
}

// Accelerated copies by one engine of an accelerator: a box of rows is one rectangle,
// or its rows are entries of a batch, or copies of their own, as the crossovers say.
// Both caches must be memory that the accelerator reaches: its own, a peer's, or host
// memory that it has pinned.
type Accelerated struct {
	on      *device.Accelerator
	engine  device.Engine
	limits  device.EngineLimits
	most    int // copies of one batch; 0: there are no batches
	ways    Crossovers
	scratch sync.Pool // of *enqueuer
}

var _ Copier = (*Accelerated)(nil)

// NewAccelerated returns the copier of an engine of a. It is not tested: see [Select].
func NewAccelerated(a *device.Accelerator, engine device.Engine, o AcceleratedOptions) *Accelerated {
	c := &Accelerated{on: a, engine: engine, limits: engine.Limits(), ways: DefaultCrossovers()}
	if o.Crossovers != nil {
		c.ways = *o.Crossovers
	}
	if !o.NoBatches {
		c.most = min(c.limits.Batch, cmp.Or(max(o.BatchOps, 0), DefaultBatchOps))
	}
	c.scratch.New = func() any { return &enqueuer{of: c} }
	return c
}

// Name returns the name of the engine: "cuda", "libcudart", "libamdhip64".
func (c *Accelerated) Name() string { return c.engine.Name() }

// Copy implements [Copier]. Sources are read when the stream has come to the copy.
func (c *Accelerated) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error) {
	return c.copy(s, r, pairs, device.StreamOrder)
}

// CopySealed is Copy of pages that nobody writes until a later ticket or event of s is
// done, and that nothing enqueued on s before writes: sealed pages of a host pool. The
// accelerator may read them before the stream has come to the copy. That is for pinned
// host memory only: other pages are copied as by Copy.
func (c *Accelerated) CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error) {
	return c.copy(s, r, pairs, device.AnyOrder)
}

func (c *Accelerated) copy(s device.Stream, r *kv.Route, pairs []page.Pair, o device.SourceOrder) (Moved, error) {
	if len(pairs) == 0 {
		return Moved{}, nil
	}
	q := c.scratch.Get().(*enqueuer) //nolint:errcheck // made by NewAccelerated and put back here
	defer q.done()
	if err := q.plan.order(r, pairs); err != nil {
		return Moved{}, err
	}
	if err := q.plan.inside(r); err != nil {
		return Moved{}, err
	}
	m := Moved{Pages: len(pairs), Runs: len(q.plan.runs), Bytes: int64(len(pairs)) * r.PageBytes()}
	if m.Bytes == 0 {
		return m, nil
	}
	q.begin(s, linkOf(r.Dst().Device(), r.Src().Device()), o)
	err := q.learn(r)
	for i := 0; i < len(q.plan.runs) && err == nil; i++ {
		err = q.run(r, q.plan.runs[i])
	}
	if err == nil {
		err = q.flush()
	}
	m.Rows = q.rows
	return m, err
}

// inside refuses runs that are not in the caches, so that the boxes of all others can be
// made while those before them are enqueued. Runs ascend in the destination and are
// apart, and those of one cache onto itself were found to be disjoint.
func (w *scratch) inside(r *kv.Route) error {
	dst, src := r.Dst().Pages(), r.Src().Pages()
	for _, run := range w.runs {
		if run.Dst < 0 || run.Src < 0 || int(run.Dst) > dst-run.N || int(run.Src) > src-run.N {
			_, err := r.AppendBoxes(nil, run) // says what is wrong
			return err
		}
	}
	return nil
}

// CopyRows implements [Copier].
func (c *Accelerated) CopyRows(s device.Stream, dst, src Rows) (Moved, error) {
	if err := dst.Check(src); err != nil {
		return Moved{}, err
	}
	if dst.N == 0 || dst.Width == 0 {
		return Moved{}, nil
	}
	q := c.scratch.Get().(*enqueuer) //nolint:errcheck // made by NewAccelerated and put back here
	defer q.done()
	b := kv.Box{DstOff: dst.Off, SrcOff: src.Off, Width: dst.Width, Rows: dst.N, Slices: 1}
	switch {
	case dst.N == 1:
	case dst.Pitch == dst.Width && src.Pitch == src.Width: // one after the other on both sides
		b.Width, b.Rows = dst.Width*int64(dst.N), 1
	default:
		b.DstPitch, b.SrcPitch = dst.Pitch, src.Pitch
	}
	q.begin(s, linkOf(dst.Mem.Device(), src.Mem.Device()), device.StreamOrder)
	err := q.box(q.way(&b), dst.Mem, src.Mem, &b, 0, 0)
	if err == nil {
		err = q.flush()
	}
	return Moved{Rows: q.rows, Bytes: dst.Width * int64(dst.N)}, err
}

// enqueuer is what one call builds and enqueues; kept so that copies do not allocate.
type enqueuer struct {
	of    *Accelerated
	s     device.Stream
	link  Link
	order device.SourceOrder
	rows  int

	plan   scratch
	pages  []kv.PageBox
	shapes []shape // of pages
	rects  []device.Box
	ops    []device.Op
}

func (q *enqueuer) begin(s device.Stream, l Link, o device.SourceOrder) {
	q.s, q.link, q.rows = s, l, 0
	if q.order = o; l != ToDevice { // only host memory may be read in any order
		q.order = device.StreamOrder
	}
}

// done keeps the room for the next call.
func (q *enqueuer) done() {
	q.s = nil
	q.rects, q.ops = q.rects[:0], q.ops[:0]
	q.of.scratch.Put(q)
}

// shape is a box of every page.
type shape struct {
	kv.PageBox
	dst, src *device.Memory
	way      Way
}

// learn works out what all pages of r have in common.
func (q *enqueuer) learn(r *kv.Route) error {
	q.pages, q.shapes = r.AppendPageBoxes(q.pages[:0]), q.shapes[:0]
	for i := range q.pages {
		b := &q.pages[i]
		dst, src, err := ends(r, &b.Box)
		if err != nil {
			return err
		}
		q.shapes = append(q.shapes, shape{PageBox: *b, dst: dst, src: src, way: q.way(&b.Box)})
	}
	return nil
}

// ends returns the memories of a box.
func ends(r *kv.Route, b *kv.Box) (dst, src *device.Memory, err error) {
	if dst, err = r.Dst().Region(b.DstRegion); err != nil {
		return nil, nil, err
	}
	src, err = r.Src().Region(b.SrcRegion)
	return dst, src, err
}

// run takes the boxes of a run of pages.
func (q *enqueuer) run(r *kv.Route, run page.Run) (err error) {
	if run.N == 1 {
		for i := range q.shapes {
			b := &q.shapes[i]
			if err := q.box(b.way, b.dst, b.src, &b.Box, int64(run.Dst)*b.DstStep, int64(run.Src)*b.SrcStep); err != nil {
				return err
			}
		}
		return nil
	}
	if q.plan.boxes, err = r.AppendBoxes(q.plan.boxes[:0], run); err != nil {
		return err
	}
	for i := range q.plan.boxes {
		b := &q.plan.boxes[i]
		dst, src, err := ends(r, b)
		if err != nil {
			return err
		}
		if err := q.box(q.way(b), dst, src, b, 0, 0); err != nil {
			return err
		}
	}
	return nil
}

// way returns how b is copied: as the crossovers say, and the engine can.
func (q *enqueuer) way(b *kv.Box) Way {
	n := rowsOfACall(b, &q.of.limits)
	switch way := q.of.ways.Way(q.link, b.Width, n); {
	case way == InBatches && q.of.most > 0, way == InRectangles && n > 1, way == OneByOne:
		return way
	case n > 1:
		return InRectangles
	}
	return OneByOne
}

// box takes a box, so many bytes further on, and enqueues what there is enough of.
func (q *enqueuer) box(way Way, dst, src *device.Memory, b *kv.Box, to, from int64) error {
	q.rows += b.Rows * b.Slices
	to, from = to+b.DstOff, from+b.SrcOff
	if way == InRectangles {
		q.rects = append(q.rects, device.Box{
			Dst: dst, Src: src, DstOff: to, SrcOff: from, Width: b.Width, Rows: b.Rows, Slices: b.Slices,
			DstPitch: b.DstPitch, SrcPitch: b.SrcPitch, DstSlice: b.DstSlice, SrcSlice: b.SrcSlice,
		})
		return q.enoughRects()
	}
	for slice := range int64(b.Slices) {
		to, from := to+slice*b.DstSlice, from+slice*b.SrcSlice
		for range b.Rows {
			if err := q.row(way, dst, src, to, from, b.Width); err != nil {
				return err
			}
			to, from = to+b.DstPitch, from+b.SrcPitch
		}
	}
	return nil
}

// row takes a row of a box.
func (q *enqueuer) row(way Way, dst, src *device.Memory, to, from, width int64) error {
	if way == InBatches {
		q.ops = append(q.ops, device.Op{Dst: dst, DstOff: to, Src: src, SrcOff: from, Bytes: width})
		if len(q.ops) < q.of.most {
			return nil
		}
		return q.batch()
	}
	q.rects = append(q.rects, device.Box{Dst: dst, DstOff: to, Src: src, SrcOff: from, Width: width, Rows: 1, Slices: 1})
	return q.enoughRects()
}

func (q *enqueuer) enoughRects() error {
	if len(q.rects) < rectsOps {
		return nil
	}
	return q.boxes()
}

// boxes enqueues the boxes taken so far.
func (q *enqueuer) boxes() error {
	err := q.of.on.CopyBoxes(q.s, q.of.engine, q.rects)
	q.rects = q.rects[:0]
	return err
}

// batch enqueues the copies taken so far.
func (q *enqueuer) batch() error {
	err := q.of.on.CopyBatch(q.s, q.of.engine, q.ops, q.order, q.of.most)
	if q.order == device.AnyOrder && errors.Is(err, fault.Invalid) {
		// Refused whole: a source is not pinned, so it is read in the order of the stream.
		q.order = device.StreamOrder
		err = q.of.on.CopyBatch(q.s, q.of.engine, q.ops, q.order, q.of.most)
	}
	q.ops = q.ops[:0]
	return err
}

// flush enqueues the rest. A batch of one is a copy.
func (q *enqueuer) flush() error {
	if len(q.ops) == 1 {
		op := &q.ops[0]
		q.rects = append(q.rects, device.Box{Dst: op.Dst, DstOff: op.DstOff, Src: op.Src, SrcOff: op.SrcOff, Width: op.Bytes, Rows: 1, Slices: 1})
		q.ops = q.ops[:0]
	}
	if len(q.rects) > 0 {
		if err := q.boxes(); err != nil {
			return err
		}
	}
	if len(q.ops) == 0 {
		return nil
	}
	return q.batch()
}
