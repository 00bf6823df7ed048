package kv

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/device"
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
// is too small a subnormal or a zero. The types of 8 and 4 bits are taken as they
// are. Scales are written apart: [Cache.WriteScales].
//
// It writes before it returns, and orders itself with nothing: copies that read or
// write these pages must have finished. A rejected call has written nothing.
//
// Into memory of a device that the host can't address, rows go by copies of that
// device: converted into pinned host memory of the cache, up to 1 MiB at a time, and
// waited for. That costs a round trip to the device for each MiB; calls on one such
// cache take turns, and keep what they have made for the next. Rows of neighbouring
// slots are one copy.
//
// Kinds: fault.Invalid (layer, page or slot out of range, lengths that
// contradict each other), fault.Unsupported (a layer of no rows, types that can't be
// converted, memory that the host can't address of a wrapped cache without its
// device: see [WrapOn]), fault.Closed; of a device also fault.Memory (nothing was
// written) and fault.Device (the rows hold undefined bytes).
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
				Hint("bf16, fp16 and fp32 are converted among each other; types of 8 and 4 bits must match")
		}
		elements := int64(halves[i].blocks) * halves[i].block
		want := int64(len(pages)) * rows[i].DType.Bytes(elements)
		if int64(len(rows[i].Data)) != want {
			return dst, fault.New(fault.Invalid, names[i], "has %d bytes, %d rows of %d elements of %v are %d",
				len(rows[i].Data), len(pages), elements, rows[i].DType, want)
		}
	}
	if halves[0].far != nil {
		return c.writeTokensFar(dst, give, slices.Clone(halves[:n]), rows, pages, slots)
	}
	for t := range pages {
		for i, h := range halves[:n] {
			size := rows[i].DType.Bytes(h.block)
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

// writeTokensFar is writeTokens, once all is checked, into memory that the host can't
// address.
func (c *Cache) writeTokensFar(dst []byte, give bool, halves []half, rows [2]Rows, pages []page.ID, slots []int32) ([]byte, error) {
	before := len(dst)
	err := c.writeFar(halves, pages, slots, func(to []byte, i, block, t int) {
		h, size := &halves[i], rows[i].DType.Bytes(halves[i].block)
		src := rows[i].Data[(int64(t)*int64(h.blocks)+int64(block))*size:][:size]
		convert(to, c.g.spec.DType, src, rows[i].DType)
		if give {
			dst = append(dst, to...)
		}
	})
	if err != nil {
		return dst[:before], err
	}
	return dst, nil
}

// ReadTokens appends to dst the rows in slot slots[i] of page pages[i], in the
// layer at that position: [n, 2, heads, dim] elements of the cache's type (MLA:
// [n, dim]).
//
// It reads before it returns, and orders itself with nothing: copies that write these
// pages must have finished. From memory that the host can't address rows come as
// [Cache.WriteTokens] says.
//
// Kinds: fault.Invalid (layer, page or slot out of range, lists of different
// lengths), fault.Unsupported (a layer of no rows, memory that the host can't address
// of a wrapped cache without its device), fault.Closed; of a device also fault.Memory
// and fault.Device.
func (c *Cache) ReadTokens(dst []byte, layer int, pages []page.ID, slots []int32) ([]byte, error) {
	var halves [2]half
	n, err := c.halves(&halves, layer, pages, slots)
	if err != nil {
		return dst, err
	}
	if halves[0].far != nil {
		return c.readFar(dst, slices.Clone(halves[:n]), pages, slots)
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

// WriteScales writes row i of rows into slot slots[i] of page pages[i] of a Scale
// plane: the nth of the layer at that position (as [Config] orders them, 0 is K's
// or the latents', 1 V's). A row is all scales of one token, [heads] or one, as
// they are. Like [Cache.WriteTokens] it writes at once, orders itself with
// nothing, and lets the last of rows for one slot win. Scales of whole pages are
// reached by [Cache.Plane].
//
// Kinds: fault.Invalid (layer, nth, page or slot out of range, lengths that
// contradict each other), fault.Unsupported (scales that tokens have no own of), and
// the others of WriteTokens.
func (c *Cache) WriteScales(layer, nth int, rows []byte, pages []page.ID, slots []int32) error {
	var h half
	if err := c.scales(&h, layer, nth, pages, slots); err != nil {
		return err
	}
	row := h.bytes * int64(h.blocks)
	if want := row * int64(len(pages)); int64(len(rows)) != want {
		return fault.New(fault.Invalid, "scales", "%d bytes, %d rows of %d bytes are %d", len(rows), len(pages), row, want)
	}
	if h.far != nil {
		return c.writeScalesFar(h, rows, pages, slots)
	}
	for t := range pages {
		for b := range h.blocks {
			rows = rows[copy(h.at(pages[t], slots[t], b), rows):]
		}
	}
	return nil
}

// writeScalesFar is WriteScales, once all is checked, into memory that the host can't
// address.
func (c *Cache) writeScalesFar(h half, rows []byte, pages []page.ID, slots []int32) error {
	return c.writeFar([]half{h}, pages, slots, func(to []byte, _, _, _ int) { rows = rows[copy(to, rows):] })
}

// ReadScales appends to dst the rows of scales that [Cache.WriteScales] writes:
// [n, heads], or [n]. Kinds: as WriteScales.
func (c *Cache) ReadScales(dst []byte, layer, nth int, pages []page.ID, slots []int32) ([]byte, error) {
	var h half
	if err := c.scales(&h, layer, nth, pages, slots); err != nil {
		return dst, err
	}
	if h.far != nil {
		return c.readFar(dst, []half{h}, pages, slots)
	}
	for t := range pages {
		for b := range h.blocks {
			dst = append(dst, h.at(pages[t], slots[t], b)...)
		}
	}
	return dst, nil
}

// half is where the rows of K, of V, of latents or of scales lie: the row of one
// slot is blocks contiguous blocks.
type half struct {
	mem         []byte         // nil when the host can't address it
	far         *device.Memory // then; else nil
	off         int64          // of slot 0 of page 0
	page, token int64          // strides
	head        int64          // from block to block
	blocks      int
	block       int64 // elements; 0 of scales
	bytes       int64 // of a block
}

func (h *half) at(p page.ID, slot int32, block int) []byte {
	return h.mem[h.offset(p, slot, block):][:h.bytes]
}

func (h *half) offset(p page.ID, slot int32, block int) int64 {
	return h.off + int64(p)*h.page + int64(slot)*h.token + int64(block)*h.head
}

// fill says where blocks rows of bytes bytes for each slot lie in pl, skip bytes
// behind its start.
func (c *Cache) fill(h *half, pl *Plane, skip int64, blocks int, bytes int64) (err error) {
	*h = half{
		off: pl.Offset + skip, page: pl.PageStride, token: pl.TokenStride, head: pl.HeadStride,
		blocks: blocks, bytes: bytes,
	}
	if h.head == bytes { // the heads follow each other
		h.blocks, h.bytes = 1, bytes*int64(blocks)
	}
	if h.mem, err = c.host(pl.Region); err != nil && c.reaches && !c.closed.Load() {
		h.far, err = c.regions[pl.Region], nil
	}
	return err
}

// halves fills in where the layer's rows lie, K then V or latents alone, and
// returns how many of the two there are. It checks every slot.
func (c *Cache) halves(out *[2]half, layer int, pages []page.ID, slots []int32) (int, error) {
	l, err := c.checkSlots(layer, pages, slots)
	if err != nil {
		return 0, err
	}
	pl := l.rows()
	if pl == nil {
		return 0, fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID), "has no rows of K and V or of latents")
	}
	row := c.g.spec.DType.Bytes(int64(l.Dim))
	planes, n := [2]*Plane{pl, pl}, 2
	switch pl.Kind {
	case K:
		planes[1] = l.find(V)
	case Latent:
		n = 1
	default: // KV: both in one plane
	}
	for i, pl := range planes[:n] {
		h := &out[i]
		if err := c.fill(h, pl, int64(i)*pl.KVStride, l.Heads, row); err != nil {
			return 0, err
		}
		h.block = int64(l.Dim) * int64(l.Heads/h.blocks)
	}
	return n, nil
}

// scales fills in where the rows of the layer's nth Scale plane lie. It checks
// every slot.
func (c *Cache) scales(h *half, layer, nth int, pages []page.ID, slots []int32) error {
	l, err := c.checkSlots(layer, pages, slots)
	if err != nil {
		return err
	}
	found := 0
	for i := range l.Planes {
		pl := &l.Planes[i]
		if pl.Kind != Scale {
			continue
		}
		if found++; found-1 != nth {
			continue
		}
		switch {
		case pl.TokenStride == 0:
			return fault.New(fault.Unsupported, fmt.Sprintf("layer %d", l.ID), "tokens have no scales of their own").Hint("use Plane, for whole pages")
		case pl.HeadStride == 0:
			return c.fill(h, pl, 0, 1, pl.TokenStride)
		}
		return c.fill(h, pl, 0, l.Heads, min(pl.TokenStride, pl.HeadStride))
	}
	return outside("plane of scales", int64(nth), 0, int64(found-1))
}

// checkSlots returns the layer at a position, and refuses slots out of range.
func (c *Cache) checkSlots(layer int, pages []page.ID, slots []int32) (*Layer, error) {
	g := c.g
	l, err := g.layer(layer)
	if err != nil {
		return nil, err
	}
	if len(pages) != len(slots) {
		return nil, fault.New(fault.Invalid, "slots", "%d pages and %d slots", len(pages), len(slots))
	}
	for i, p := range pages {
		if err := g.checkPage(p); err != nil {
			return nil, err
		}
		if slots[i] < 0 || int(slots[i]) >= g.spec.PageSize {
			return nil, outside("slot", int64(slots[i]), 0, int64(g.spec.PageSize-1))
		}
	}
	return l, nil
}
