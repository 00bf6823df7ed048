package copiertest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// tokenRanges copies parts of a page in every layer: one row a head, a side of K and V,
// or a page, as the layout has it.
func tokenRanges(t *testing.T, h Harness) {
	hnd := with(func(c *kv.Config) { c.Layout = kv.HND })
	mla := with(func(c *kv.Config) { c.Layout, c.KVHeads, c.HeadDim, c.LatentDim = kv.MLA, 0, 0, 6 })
	joined := with(func(c *kv.Config) { c.Layout, c.Join, c.PageAlign = kv.HND, kv.JoinBlocks, 512 })
	for _, x := range []route{
		{"nhd", packed(small, 20), small.LayerMajor},
		{"nhd_kv-first", packed(small, 20), small.PerLayerKVFirst},
		{"hnd", packed(hnd, 20), hnd.LayerMajor},
		{"hnd_joined", packed(joined, 20), joined.PerLayerPageFirst},
		{"mla", packed(mla, 20), mla.LayerMajor},
	} {
		for _, at := range h.places() {
			t.Run(x.name+"/"+at.name, func(t *testing.T) {
				r := openAt(t, h, at, x.dst, x.src)
				for _, tokens := range [][2]int{{1, 3}, {0, 1}, {3, 4}, {0, 4}, {2, 2}} {
					want, src := r.read(r.dst), r.read(r.src)
					r.placeTokens(want, src, tokens[0], tokens[1])
					moved, err := copier.CopyTokens(h.Copier, r.s, r.route, 7, 5, tokens[0], tokens[1])
					if err != nil {
						t.Fatal(err)
					}
					r.sync(r.s)
					if bytes := r.route.PageBytes() / 4 * int64(tokens[1]-tokens[0]); moved.Bytes != bytes {
						t.Errorf("tokens %v: moved %d bytes, want %d", tokens, moved.Bytes, bytes)
					}
					r.compare("destination", r.dst, want)
					r.compare("source", r.src, src)
				}
			})
		}
	}
}

// placeTokens puts tokens [t0, t1) of page 5 of the source onto those of page 7.
func (r *rig) placeTokens(to, from [][]byte, t0, t1 int) {
	d, s := r.dst.Geometry().Spec(), r.src.Geometry().Spec()
	for l := range d.Layers {
		for i, dp := range d.Layers[l].Planes {
			sp := s.Layers[l].Planes[i]
			row := dp.TokenStride // of one token, in one head when heads come first
			for off := int64(0); off < dp.Bytes; off += row * int64(d.PageSize) {
				copy(to[dp.Region][dp.Offset+7*dp.PageStride+off+int64(t0)*row:][:int64(t1-t0)*row],
					from[sp.Region][sp.Offset+5*sp.PageStride+off+int64(t0)*row:][:int64(t1-t0)*row])
			}
		}
	}
}

func memories(t *testing.T, h Harness, at place, n int64) (r *rig, dst, src *device.Memory) {
	t.Helper()
	r = &rig{t: t, h: h}
	dst, src = r.memory(at.dst, n), r.memory(at.src, n)
	r.s = r.stream("rows")
	r.write(dst, pattern("destination", 0, n))
	r.write(src, pattern("source", 0, n))
	return r, dst, src
}

func rowsWithPitch(t *testing.T, h Harness) {
	const n = 4096
	for _, at := range h.places() {
		t.Run(at.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			r, dst, src := memories(t, h, at, n)
			for range 40 {
				count, width := 1+rng.IntN(9), int64(1+rng.IntN(200))
				side := func(m *device.Memory) copier.Rows {
					pitch := width + int64(rng.IntN(200))
					return copier.Rows{Mem: m, Off: rng.Int64N(n - int64(count-1)*pitch - width + 1), Width: width, Pitch: pitch, N: count}
				}
				if int64(count)*(width+200) > n {
					continue
				}
				d, s := side(dst), side(src)
				want, from := r.bytes(dst), pattern("source", 0, n)
				for i := range int64(count) {
					copy(want[d.Off+i*d.Pitch:][:width], from[s.Off+i*s.Pitch:][:width])
				}
				moved, err := h.Copier.CopyRows(r.s, d, s)
				if err = errors.Join(err, r.s.Sync(t.Context())); err != nil {
					t.Fatal(err)
				}
				if moved.Bytes != int64(count)*width {
					t.Errorf("moved %d bytes, want %d", moved.Bytes, int64(count)*width)
				}
				if !bytes.Equal(r.bytes(dst), want) {
					t.Fatalf("%+v onto %+v: wrong bytes", s, d)
				}
			}
		})
	}
}

func refusesRows(t *testing.T, h Harness) {
	const n = 1024
	r, dst, src := memories(t, h, place{}, n)
	ok := copier.Rows{Mem: dst, Width: 16, Pitch: 32, N: 4}
	from := copier.Rows{Mem: src, Width: 16, Pitch: 16, N: 4}
	edit := func(r copier.Rows, f func(*copier.Rows)) copier.Rows { f(&r); return r }
	for name, x := range map[string][2]copier.Rows{
		"pitch below width":    {edit(ok, func(r *copier.Rows) { r.Pitch = 15 }), from},
		"beyond the memory":    {edit(ok, func(r *copier.Rows) { r.Off = n - 3*32 - 15 }), from},
		"pitch overflows":      {edit(ok, func(r *copier.Rows) { r.Pitch = 1 << 62 }), from},
		"negative offset":      {edit(ok, func(r *copier.Rows) { r.Off = -1 }), from},
		"negative rows":        {edit(ok, func(r *copier.Rows) { r.N = -1 }), from},
		"other number of rows": {edit(ok, func(r *copier.Rows) { r.N = 3 }), from},
		"other width":          {ok, edit(from, func(r *copier.Rows) { r.Width = 15 })},
		"no memory":            {edit(ok, func(r *copier.Rows) { r.Mem = nil }), from},
		"onto itself":          {from, from},
		"overlap":              {edit(from, func(r *copier.Rows) { r.Off = 8 }), from},
	} {
		if _, err := h.Copier.CopyRows(r.s, x[0], x[1]); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	// Rows of one memory may interleave.
	if _, err := h.Copier.CopyRows(r.s, edit(ok, func(r *copier.Rows) { r.Off = 16 }), ok); err != nil {
		t.Errorf("interleaved rows: %v", err)
	}
	r.sync(r.s)
}
