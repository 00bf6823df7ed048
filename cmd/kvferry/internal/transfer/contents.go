package transfer

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// What serve writes into its pages, and what read expects of them, is a function of the
// seed, and of layer, plane, page and place: nothing has to be sent for it, and a byte
// that belongs elsewhere does not pass.
//
// The 8-byte words of a plane of a page count up, by an odd step, from a start that is a
// mix of the seed, the layer's global id, the plane and the owner's page. Before a read,
// the pages that it will write hold the complement of what they should hold afterwards:
// a byte that was not written differs from what is right in all its bits.

const step = 0x9e3779b97f4a7c15

// A flip is what words are combined with.
const (
	right uint64 = 0
	wrong uint64 = 1<<64 - 1
)

// contents knows the bytes of the planes of one cache, which the host can address.
type contents struct {
	cache  *kv.Cache
	seed   uint64
	layers []kv.Layer
	nth    [][]int // of each plane, among those of its kind in the layer
}

func newContents(c *kv.Cache, seed uint64) *contents {
	x := &contents{cache: c, seed: seed, layers: c.Geometry().Spec().Layers}
	for _, l := range x.layers {
		seen := map[kv.PlaneKind]int{}
		var nth []int
		for _, p := range l.Planes {
			nth = append(nth, seen[p.Kind])
			seen[p.Kind]++
		}
		x.nth = append(x.nth, nth)
	}
	return x
}

// start is the first word of a plane of the owner's page id.
func (x *contents) start(layer, plane int, id page.ID) uint64 {
	l := &x.layers[layer]
	h := x.seed
	for _, n := range [...]uint64{uint64(l.ID), uint64(l.Planes[plane].Kind)<<8 | uint64(x.nth[layer][plane]), uint64(id)} {
		hi, lo := bits.Mul64(h^(n+1)*step, 0xd6e8feb86659fd93)
		h = hi ^ lo ^ bits.RotateLeft64(h, 17)
	}
	return h
}

// fill writes page at as the owner's page id is.
func (x *contents) fill(at, id page.ID, flip uint64) error {
	for i := range x.layers {
		for j := range x.layers[i].Planes {
			b, err := x.cache.Plane(i, j, at)
			if err != nil {
				return err
			}
			fill(b, x.start(i, j, id), flip)
		}
	}
	return nil
}

// verify compares page at, where tokens [t0, t1) are those of the owner's page id and all
// others still what they were before the read. It returns how many bytes it has compared.
// Kind: fault.Corrupt.
func (x *contents) verify(at, id page.ID, t0, t1 int) (int64, error) {
	g, n := x.cache.Geometry(), int64(0)
	for i := range x.layers {
		var chunks []kv.Chunk
		if t0 < t1 && t1-t0 < g.PageSize() {
			var err error
			if chunks, err = g.Chunks(nil, make([]uintptr, g.Regions()), i, at, t0, t1); err != nil {
				return n, err
			}
		}
		for j := range x.layers[i].Planes {
			b, err := x.cache.Plane(i, j, at)
			if err != nil {
				return n, err
			}
			n += int64(len(b))
			first := x.start(i, j, id)
			for _, s := range x.stretches(i, j, at, chunks, int64(len(b)), t0 < t1) {
				if off := differs(b[s.from:s.to], first, s.from, s.flip); off >= 0 {
					return n, x.errWrong(i, j, id, s, first, s.from+int64(off), b[s.from+int64(off)])
				}
			}
		}
	}
	return n, nil
}

// stretch is part of a plane's page.
type stretch struct {
	from, to int64
	flip     uint64
}

// stretches cuts a plane of page at where what was read begins and ends: chunks, in the
// order of their places, or nothing, or all of it.
func (x *contents) stretches(layer, plane int, at page.ID, chunks []kv.Chunk, bytes int64, read bool) (out []stretch) {
	p := &x.layers[layer].Planes[plane]
	begin := p.Offset + int64(at)*p.PageStride
	var done int64
	for _, c := range chunks {
		from := c.Off - begin
		if c.Region != p.Region || from < 0 || from >= bytes {
			continue // of another plane
		}
		if from > done {
			out = append(out, stretch{done, from, wrong})
		}
		done = from + c.Bytes
		out = append(out, stretch{from, done, right})
	}
	if done < bytes {
		rest := wrong
		if read && len(chunks) == 0 {
			rest = right
		}
		out = append(out, stretch{done, bytes, rest})
	}
	return out
}

func (x *contents) errWrong(layer, plane int, id page.ID, s stretch, first uint64, at int64, got byte) error {
	l := &x.layers[layer]
	what := "what its owner has there"
	switch is := got ^ byteOf(first, at, right); {
	case s.flip == wrong && is == 0:
		what = "nothing, for it was not asked for, and it was written"
	case s.flip == wrong:
		what = "nothing, for it was not asked for"
	case is == 0xff:
		what += ", and it was never written"
	}
	return fault.New(fault.Corrupt, fmt.Sprintf("page %d", id), "layer %d, %v, byte %d is %02x, and should be %02x: %s",
		l.ID, l.Planes[plane].Kind, at, got, byteOf(first, at, s.flip), what).
		Hint("a read that says it went well brought a wrong byte: report it, with both commands. If the descriptor's seed is not its owner's, give --seed")
}

func byteOf(first uint64, at int64, flip uint64) byte {
	return byte((first + uint64(at>>3)*step ^ flip) >> (8 * (at & 7)))
}

func fill(b []byte, first, flip uint64) {
	n := len(b) &^ 7
	for w := b[:n]; len(w) > 0; w = w[8:] {
		binary.LittleEndian.PutUint64(w, first^flip)
		first += step
	}
	for i := n; i < len(b); i++ {
		b[i] = byteOf(first, int64(i-n), flip)
	}
}

// differs returns the place of the first wrong byte of b, which is what lies from byte at
// on; -1 when there is none.
func differs(b []byte, first uint64, at int64, flip uint64) int {
	i := 0
	for ; i < len(b) && (at+int64(i))&7 != 0; i++ {
		if b[i] != byteOf(first, at+int64(i), flip) {
			return i
		}
	}
	word := first + uint64((at+int64(i))>>3)*step
	for ; len(b)-i >= 8 && binary.LittleEndian.Uint64(b[i:]) == word^flip; i += 8 {
		word += step
	}
	for ; i < len(b); i++ {
		if b[i] != byteOf(first, at+int64(i), flip) {
			return i
		}
	}
	return -1
}
