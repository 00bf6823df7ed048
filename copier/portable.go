package copier

import (
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// batchOps is the most ops that one stream call is given. It bounds the scratch
// memory and how long the stream's queue is locked.
const batchOps = 2048

// Portable is the copier that works everywhere: one stream copy a row.
type Portable struct {
	scratch sync.Pool // of *scratch
}

// scratch is what one call builds; kept so that copies do not allocate.
type scratch struct {
	pairs []page.Pair
	runs  []page.Run
	boxes []kv.Box
	ops   []device.Op
}

var _ Copier = (*Portable)(nil)

// NewPortable returns the portable copier.
func NewPortable() *Portable {
	return &Portable{scratch: sync.Pool{New: func() any { return new(scratch) }}}
}

// Name returns "portable".
func (*Portable) Name() string { return "portable" }

// Copy implements [Copier].
func (c *Portable) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error) {
	if len(pairs) == 0 {
		return Moved{}, nil
	}
	w := c.scratch.Get().(*scratch) //nolint:errcheck // made by NewPortable and put back here
	defer c.scratch.Put(w)
	if err := w.order(r, pairs); err != nil {
		return Moved{}, err
	}
	if err := w.place(r); err != nil {
		return Moved{}, err
	}
	m := Moved{Pages: len(pairs), Runs: len(w.runs), Bytes: int64(len(pairs)) * r.PageBytes()}
	// A box is never cut: one box of a whole pool may pass batchOps, once.
	for i := 0; i < len(w.boxes); {
		w.ops = w.ops[:0]
		for ; i < len(w.boxes) && len(w.ops) < batchOps; i++ {
			w.ops = r.AppendOps(w.ops, w.boxes[i:i+1])
		}
		m.Rows += len(w.ops)
		if err := s.Copy(w.ops); err != nil {
			return m, err
		}
	}
	return m, nil
}

// order sorts pairs and leaves their runs in w. It refuses pairs that must not be
// copied together.
func (w *scratch) order(r *kv.Route, pairs []page.Pair) (err error) {
	if w.runs, err = page.AppendRuns(w.runs[:0], pairs); err != nil {
		return err
	}
	if r.Same() {
		return page.CheckDisjoint(pairs)
	}
	return nil
}

// place leaves the boxes of w's runs in w. It refuses runs that are not in the caches.
func (w *scratch) place(r *kv.Route) (err error) {
	w.boxes = w.boxes[:0]
	for _, run := range w.runs {
		if w.boxes, err = r.AppendBoxes(w.boxes, run); err != nil {
			return err
		}
	}
	return nil
}

// CopyRows implements [Copier].
func (c *Portable) CopyRows(s device.Stream, dst, src Rows) (Moved, error) {
	if err := dst.Check(src); err != nil {
		return Moved{}, err
	}
	if dst.N == 0 || dst.Width == 0 {
		return Moved{}, nil
	}
	w := c.scratch.Get().(*scratch) //nolint:errcheck // made by NewPortable and put back here
	defer c.scratch.Put(w)
	var m Moved
	for m.Rows < dst.N {
		w.ops = w.ops[:0]
		for i := int64(m.Rows); i < int64(min(dst.N, m.Rows+batchOps)); i++ {
			w.ops = append(w.ops, device.Op{
				Dst: dst.Mem, DstOff: dst.Off + i*dst.Pitch,
				Src: src.Mem, SrcOff: src.Off + i*src.Pitch, Bytes: dst.Width,
			})
		}
		if err := s.Copy(w.ops); err != nil {
			return m, err
		}
		m.Rows += len(w.ops)
		m.Bytes += int64(len(w.ops)) * dst.Width
	}
	return m, nil
}
