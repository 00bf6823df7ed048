package devicetest

import (
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// engine is a way of copying of a [Driver]. It checks everything that it is given.
type engine struct {
	d *Driver
	o EngineOption
}

var _ device.Engine = (*engine)(nil)

func (e *engine) Name() string                { return e.o.Name }
func (e *engine) Limits() device.EngineLimits { return e.o.Limits }

// legal returns what is wrong with r, "" when nothing is.
func (e *engine) legal(r *device.Rect) string {
	l := &e.o.Limits
	flat := r.DstPitch >= r.Width && r.SrcPitch >= r.Width && max(r.DstPitch, r.SrcPitch) <= l.MaxPitch
	switch {
	case r.Width <= 0 || r.Rows <= 0 || r.Slices <= 0:
		return "nothing to copy"
	case r.Rows == 1 && r.Slices == 1:
		return ""
	case !flat:
		return "a pitch outside width and limit"
	case r.Slices == 1:
		return ""
	case !l.Boxes:
		return "slices, and the engine has no boxes"
	case r.DstSlice%r.DstPitch != 0 || r.SrcSlice%r.SrcPitch != 0:
		return "a slice stride that is no multiple of its pitch"
	case r.DstSlice/r.DstPitch < r.Rows || r.SrcSlice/r.SrcPitch < r.Rows:
		return "slices that overlap"
	}
	return ""
}

// CopyRects implements [device.Engine].
func (e *engine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	const call = "CopyRects"
	d := e.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(rects) == 0 {
		return 0, d.violate(call, "no rects")
	}
	for i := range rects {
		r := &rects[i]
		if err := d.refused(call); err != nil {
			return i, err
		}
		q, err := d.queue(call, s)
		if err != nil {
			return i, err
		}
		if wrong := e.legal(r); wrong != "" {
			return i, d.violate(call, "rect %d, %+v: %s", i, *r, wrong)
		}
		t := &transfer{}
		ends := func(rows, pitch, slices, slice int64) uint64 {
			return uint64((rows-1)*pitch + (slices-1)*slice + r.Width)
		}
		dstEnd, srcEnd := uint64(r.Width), uint64(r.Width)
		if r.Rows > 1 || r.Slices > 1 {
			dstEnd = ends(r.Rows, r.DstPitch, r.Slices, r.DstSlice)
			srcEnd = ends(r.Rows, r.SrcPitch, r.Slices, r.SrcSlice)
		}
		to, slowTo, err := d.operand(call, "destination", uint64(r.Dst), dstEnd)
		if err != nil {
			return i, err
		}
		from, slowFrom, err := d.operand(call, "source", uint64(r.Src), srcEnd)
		if err != nil {
			return i, err
		}
		for k := range r.Slices {
			for j := range r.Rows {
				t.rows = append(t.rows, row{
					dst: uint64(r.Dst) + uint64(k*r.DstSlice+j*r.DstPitch), src: uint64(r.Src) + uint64(k*r.SrcSlice+j*r.SrcPitch),
					n: r.Width, to: to, from: from,
				})
			}
		}
		t.regions = append(t.regions, to, from)
		d.enqueue(call, q, t, device.StreamOrder)
		if slowTo || slowFrom {
			d.pageable++
			q.want(q.queued)
			for to := q.queued; q.ran < to && d.lost == nil; {
				d.changed.Wait()
			}
		}
	}
	return len(rects), nil
}

// operand returns the region of n bytes at addr. It is made up for host memory that is
// not registered, where that is allowed.
func (d *Driver) operand(call, side string, addr, n uint64) (r *region, pageable bool, err error) {
	r = d.find(addr)
	if r != nil && addr+n <= r.hi {
		return r, false, nil
	}
	if r == nil && d.o.Pageable && addr < memoryBase {
		if next := d.find(addr + n - 1); next == nil {
			return &region{lo: addr, hi: addr + n, host: true, bytes: hostBytes(addr, int64(n))}, true, nil
		}
	}
	return nil, false, d.violate(call, "%s bytes [%#x, %#x) are not in one memory that was allocated or registered", side, addr, addr+n)
}

// CopyBatch implements [device.Engine].
func (e *engine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	const call = "CopyBatch"
	d := e.d
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(b.Bytes)
	switch {
	case n == 0 || n > e.o.Limits.Batch || len(b.Dst) != n || len(b.Src) != n:
		return d.violate(call, "%d, %d and %d copies: want 1 to %d", len(b.Dst), len(b.Src), n, e.o.Limits.Batch)
	case s == device.DefaultStream || s == device.LegacyStream:
		return d.violate(call, "on the legacy stream")
	}
	q, err := d.queue(call, s)
	if err != nil {
		return err
	}
	refused := d.refused(call)
	if refused != nil {
		if n /= 2; n == 0 || d.lost != nil || d.closed {
			return refused
		}
	}
	t := &transfer{rows: make([]row, 0, n)}
	for i := range n {
		if b.Bytes[i] == 0 {
			return d.violate(call, "copy %d is of nothing", i)
		}
		to, slowTo, err := d.operand(call, "destination", b.Dst[i], b.Bytes[i])
		if err != nil {
			return err
		}
		from, slowFrom, err := d.operand(call, "source", b.Src[i], b.Bytes[i])
		if err != nil {
			return err
		}
		if slowTo || slowFrom {
			d.pageable++
		}
		if o == device.AnyOrder && !from.host {
			return d.violate(call, "copy %d reads device memory in any order", i)
		}
		t.rows = append(t.rows, row{b.Dst[i], b.Src[i], int64(b.Bytes[i]), to, from})
		for _, r := range [...]*region{to, from} {
			if !slices.Contains(t.regions, r) {
				t.regions = append(t.regions, r)
			}
		}
	}
	if o == device.AnyOrder && (d.o.Mode == Eager || d.o.Mode == Random && q.rnd.IntN(2) == 0) {
		for _, r := range t.rows {
			t.read = append(t.read, slices.Clone(r.from.at(r.src, r.n)))
		}
	}
	d.enqueue(call, q, t, o)
	if refused != nil {
		return fault.Wrap(fault.Device, call, refused)
	}
	return nil
}

// enqueue queues t, whose rows are checked, and looks at what it touches and when.
func (d *Driver) enqueue(call string, q *queue, t *transfer, o device.SourceOrder) {
	writes, twice := spansOf(t.rows, func(r *row) uint64 { return r.dst })
	reads, _ := spansOf(t.rows, func(r *row) uint64 { return r.src })
	switch {
	case twice:
		_ = d.violate(call, "bytes of [%#x, %#x) are written twice by one copy", writes.lo(), writes.hi())
	case writes.overlap(reads):
		_ = d.violate(call, "bytes of [%#x, %#x) are read and written by one copy", writes.lo(), writes.hi())
	}
	t.enter()
	if !d.o.Unordered {
		q.access(reads, writes, o)
	}
	q.push(command{copy: t})
}
