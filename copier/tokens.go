package copier

import (
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// CopyTokens enqueues on s, through c, the copy of tokens [t0, t1) of page src of r's
// source, in every layer, onto the same tokens of page dst of r's destination. What was
// said of Copy holds here too. Kinds: those of [kv.Route.AppendTokenBoxes], and of s.
func CopyTokens(c Copier, s device.Stream, r *kv.Route, dst, src page.ID, t0, t1 int) (Moved, error) {
	boxes, err := r.AppendTokenBoxes(nil, dst, src, t0, t1)
	if err != nil {
		return Moved{}, err
	}
	var sum Moved
	for _, b := range boxes {
		to, err := r.Dst().Region(b.DstRegion)
		if err != nil {
			return sum, err
		}
		from, err := r.Src().Region(b.SrcRegion)
		if err != nil {
			return sum, err
		}
		for i := range int64(b.Slices) {
			m, err := c.CopyRows(s,
				Rows{Mem: to, Off: b.DstOff + i*b.DstSlice, Width: b.Width, Pitch: b.DstPitch, N: b.Rows},
				Rows{Mem: from, Off: b.SrcOff + i*b.SrcSlice, Width: b.Width, Pitch: b.SrcPitch, N: b.Rows})
			sum.Rows += m.Rows
			sum.Bytes += m.Bytes
			if err != nil {
				return sum, err
			}
		}
	}
	return sum, nil
}
