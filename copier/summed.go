package copier

import (
	"cmp"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// CopySummed is Copy, and gives digests[i] the bytes of the page that pairs[i] copies:
// as they were read from the source, in the order in which they lie in the
// destination. If its pages are packed (kv.Geometry.Packed), that is the order of the
// page's bytes. The digests are the stream's until the copy has run; after one that
// failed they mean nothing. Pairs keep their order.
//
// Every page is copied for itself: a run of pages widens no rows.
//
// Kinds: those of Copy; fault.Invalid (not a digest for each pair), fault.Unsupported
// (the destination is several regions, which have no order; the device gives no
// digests: see [device.Op]). When the stream refuses halfway, earlier pages are
// enqueued, as the package comment says.
func (c *Portable) CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (Moved, error) {
	switch {
	case len(digests) != len(pairs):
		return Moved{}, fault.New(fault.Invalid, "digests", "%d of them for %d pages", len(digests), len(pairs))
	case r.Dst().Geometry().Regions() > 1:
		return Moved{}, fault.New(fault.Unsupported, "digests", "pages of %d regions have no one order of bytes", r.Dst().Geometry().Regions())
	case len(pairs) == 0:
		return Moved{}, nil
	}
	w := c.scratch.Get().(*scratch) //nolint:errcheck // made by NewPortable and put back here
	defer c.scratch.Put(w)
	w.pairs = append(w.pairs[:0], pairs...)
	if err := w.order(r, w.pairs); err != nil {
		return Moved{}, err
	}
	w.runs = w.runs[:0] // each page by itself, in the order of the digests
	for _, p := range pairs {
		w.runs = append(w.runs, page.Run{Dst: p.Dst, Src: p.Src, N: 1})
	}
	if err := w.place(r); err != nil {
		return Moved{}, err
	}
	m := Moved{Pages: len(pairs), Runs: len(pairs), Bytes: int64(len(pairs)) * r.PageBytes()}
	w.ops = w.ops[:0]
	each := len(w.boxes) / len(pairs) // all pages of a route lie alike
	for i := range pairs {
		from := len(w.ops)
		w.ops = r.AppendOps(w.ops, w.boxes[i*each:(i+1)*each])
		rows := w.ops[from:]
		slices.SortFunc(rows, func(a, b device.Op) int { return cmp.Compare(a.DstOff, b.DstOff) })
		for j := range rows {
			rows[j].Digest = &digests[i]
		}
		if len(w.ops) >= batchOps || i == len(pairs)-1 {
			m.Rows += len(w.ops)
			if err := s.Copy(w.ops); err != nil {
				return m, err
			}
			w.ops = w.ops[:0]
		}
	}
	return m, nil
}
