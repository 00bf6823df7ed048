package kv

import (
	"fmt"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Rows is a list of packed rows, one for each token: [n, heads, dim] elements.
type Rows struct {
	DType DType
	Data  []byte
}

// WriteTokens writes row i of k and of v into slot slots[i] of page pages[i], in
// the layer at that position: n rows of [heads, dim] elements each. With MLA, k
// has the latent rows [dim] and v is empty. Of rows for one slot the last wins.
//
// BF16, FP16 and FP32 are converted to the cache's type: rounded to nearest,
// ties to even; NaNs stay NaNs; what is too large becomes an infinity and what
// is too small a subnormal or a zero. FP8 and INT8 are taken as they are.
//
// It writes host memory before it returns, and orders itself with nothing:
// copies that read or write these pages must have finished. A rejected call has
// written nothing.
//
// Kinds: fault.Invalid (layer, page or slot out of range, lengths that
// contradict each other), fault.Unsupported (memory that the host can't address,
// a layer of no rows, types that can't be converted), fault.Closed.
func (c *Cache) WriteTokens(layer int, k, v Rows, pages []page.ID, slots []int32) error {
	_, err := c.writeTokens(nil, false, layer, k, v, pages, slots)
	return err
}

// WriteTokensAppend is [Cache.WriteTokens] and appends to dst the rows as they
// were written, in the cache's type: [n, 2, heads, dim] (MLA: [n, dim]). A row
// that a later one overwrote is among them.
func (c *Cache) WriteTokensAppend(dst []byte, layer int, k, v Rows, pages []page.ID, slots []int32) ([]byte, error) {
	return c.writeTokens(dst, true, layer, k, v, pages, slots)
}

func (c *Cache) writeTokens(dst []byte, give bool, layer int, k, v Rows, pages []page.ID, slots []int32) ([]byte, error) {
	var halves [2]half
	n, err := c.halves(&halves, layer, pages, slots)
	if err != nil {
		return dst, err
	}
	rows, names := [2]Rows{k, v}, [2]string{"k", "v"}
	for i := range rows {
		if i >= n {
			if len(rows[i].Data) > 0 {
				return dst, fault.New(fault.Invalid, names[i], "has %d bytes, and latent rows have no v", len(rows[i].Data))
			}
			continue
		}
		if !convertible(c.g.spec.DType, rows[i].DType) {
			return dst, fault.New(fault.Unsupported, names[i], "rows of %v in a cache of %v", rows[i].DType, c.g.spec.DType).
				Hint("bf16, fp16 and fp32 are converted among each other; fp8 and int8 must match")
		}
		want := int64(len(pages)) * halves[i].elements() * rows[i].DType.Size()
		if int64(len(rows[i].Data)) != want {
			return dst, fault.New(fault.Invalid, names[i], "has %d bytes, %d rows of %d elements of %v are %d",
				len(rows[i].Data), len(pages), halves[i].elements(), rows[i].DType, want)
		}
	}
	for t := range pages {
		for i, h := range halves[:n] {
			size := rows[i].DType.Size() * h.block
			src := rows[i].Data[int64(t)*size*int64(h.blocks):]
			for b := range h.blocks {
				to := h.at(pages[t], slots[t], b)
				convert(to, c.g.spec.DType, src[int64(b)*size:][:size], rows[i].DType)
				if give {
					dst = append(dst, to...)
				}
			}
		}
	}
	return dst, nil
}

// ReadTokens appends to dst the rows in slot slots[i] of page pages[i], in the
// layer at that position: [n, 2, heads, dim] elements of the cache's type (MLA:
// [n, dim]).
//
// It reads host memory before it returns, and orders itself with nothing: copies
// that write these pages must have finished.
//
// Kinds: fault.Invalid (layer, page or slot out of range, lists of different
// lengths), fault.Unsupported (memory that the host can't address, a layer of no
// rows), fault.Closed.
func (c *Cache) ReadTokens(dst []byte, layer int, pages []page.ID, slots []int32) ([]byte, error) {
	var halves [2]half
	n, err := c.halves(&halves, layer, pages, slots)
	if err != nil {
		return dst, err
	}
	for t := range pages {
		for _, h := range halves[:n] {
			for b := range h.blocks {
				dst = append(dst, h.at(pages[t], slots[t], b)...)
			}
		}
	}
	return dst, nil
}

// half is where the rows of K, of V or of latents lie: the row of one slot is
// blocks contiguous blocks.
type half struct {
	mem         []byte
	off         int64 // of slot 0 of page 0
	page, token int64 // strides
	head        int64 // from block to block
	blocks      int
	block       int64 // elements
	size        int64 // bytes of an element
}

func (h *half) elements() int64 { return int64(h.blocks) * h.block }

func (h *half) at(p page.ID, slot int32, block int) []byte {
	off := h.off + int64(p)*h.page + int64(slot)*h.token + int64(block)*h.head
	return h.mem[off:][:h.block*h.size]
}

// halves fills in where the layer's rows lie, K then V or latents alone, and
// returns how many of the two there are. It checks every slot.
func (c *Cache) halves(out *[2]half, layer int, pages []page.ID, slots []int32) (int, error) {
	g := c.g
	l, err := g.layer(layer)
	if err != nil {
		return 0, err
	}
	if len(pages) != len(slots) {
		return 0, fault.New(fault.Invalid, "slots", "%d pages and %d slots", len(pages), len(slots))
	}
	for i, p := range pages {
		if err := g.checkPage(p); err != nil {
			return 0, err
		}
		if slots[i] < 0 || int(slots[i]) >= g.spec.PageSize {
			return 0, outside("slot", int64(slots[i]), 0, int64(g.spec.PageSize-1))
		}
	}
	pl := l.rows()
	if pl == nil {
		return 0, fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID), "has no rows of K and V or of latents")
	}
	e := g.spec.DType.Size()
	fill := func(h *half, pl *Plane, skip int64) (err error) {
		*h = half{
			off: pl.Offset + skip, page: pl.PageStride, token: pl.TokenStride, head: pl.HeadStride,
			blocks: l.Heads, block: int64(l.Dim), size: e,
		}
		if g.spec.Layout != HND && pl.Kind != KV {
			h.blocks, h.block = 1, h.elements() // the heads follow each other
		}
		h.mem, err = c.host(pl.Region)
		return err
	}
	if err := fill(&out[0], pl, 0); err != nil {
		return 0, err
	}
	switch pl.Kind {
	case Latent:
		return 1, nil
	case KV:
		return 2, fill(&out[1], pl, int64(l.Dim)*e)
	}
	return 2, fill(&out[1], l.find(V), 0)
}
