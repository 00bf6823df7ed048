package kv

import (
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func FuzzConfig(f *testing.F) {
	f.Add(uint8(NHD), uint8(BF16), uint8(0), uint8(0), 4, 8, 16, 2, 8, 0, 0, 0, 0, 0, 0)
	f.Add(uint8(MLA), uint8(FP8), uint8(0), uint8(PerToken), 61, 100, 64, 0, 0, 576, 4, 0, 0, 3, 0)
	f.Add(uint8(HND), uint8(INT4), uint8(JoinBlocks), uint8(PerTokenHead), 2, 9, 16, 4, 6, 0, 2, 5, 4096, 3, 7)
	f.Add(uint8(HND), uint8(FP32), uint8(JoinRows), uint8(PerTokenHead), MaxLayers, MaxPages, MaxPageSize, MaxHeads, MaxDim, 0, MaxScaleBytes, MaxStateBytes, MaxPageAlign, 0, 0)
	f.Add(uint8(0), uint8(0), uint8(0), uint8(0), 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
	f.Add(uint8(0), uint8(0), uint8(0), uint8(0), 3, 2, 1, 0, 0, 0, 0, 77, 0, 0, 0)
	f.Fuzz(func(t *testing.T, layout, dtype, join, scale uint8, layers, pages, pageSize, heads, dim, latent, scaleBytes, stateBytes, align, firstLayer, firstHead int) {
		c := Config{
			Layout: Layout(layout), DType: DType(dtype), Layers: layers, Pages: pages, PageSize: pageSize,
			KVHeads: heads, HeadDim: dim, LatentDim: latent, FirstLayer: firstLayer, FirstHead: firstHead,
			Join: Join(join), Scale: ScalePer(scale), ScaleBytes: scaleBytes, StateBytes: stateBytes, PageAlign: align,
		}
		for _, a := range arrangements {
			g, err := a.make(c)
			if err != nil {
				if k := fault.KindOf(err); k != fault.Invalid && k != fault.Unsupported {
					t.Fatalf("%s: %v is of kind %v", a.name, err, k)
				}
				continue
			}
			if g.PageBytes() < 0 || g.Bytes()/int64(g.Pages()) < g.PageBytes() || (align <= 1 && g.Bytes() != g.PageBytes()*int64(g.Pages())) {
				t.Fatalf("%s: %d pages of %d bytes in %d", a.name, g.Pages(), g.PageBytes(), g.Bytes())
			}
			bases := make([]uintptr, g.Regions())
			for layer := range g.Layers() {
				for _, p := range []int{0, g.Pages() - 1} {
					whole, err := g.Chunks(nil, bases, layer, page.ID(p), 0, g.PageSize())
					if err != nil {
						t.Fatal(err)
					}
					checkInside(t, g, whole)
					if g.PageSize() == 1 {
						continue
					}
					// Two parts of a page are the page.
					cut := 1 + p%(g.PageSize()-1)
					parts, err := g.Chunks(nil, bases, layer, page.ID(p), 0, cut)
					if err == nil {
						parts, err = g.Chunks(parts, bases, layer, page.ID(p), cut, g.PageSize())
					}
					switch {
					case err != nil && fault.KindOf(err) != fault.Unsupported:
						t.Fatal(err)
					case err == nil && checkInside(t, g, parts) != checkInside(t, g, whole):
						t.Fatalf("%s: %d bytes in parts of page %d, layer %d", a.name, checkInside(t, g, parts), p, layer)
					}
				}
			}
			for _, pack := range []func(int) (*Geometry, error){g.Packed, g.PackedLayerMajor} {
				p, err := pack(3)
				if err != nil {
					if fault.KindOf(err) != fault.Invalid {
						t.Fatal(err)
					}
					continue
				}
				if err := Exchangeable(g, p); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// checkInside fails when a chunk is not inside its region, and returns the bytes
// of all.
func checkInside(t *testing.T, g *Geometry, chunks []Chunk) (bytes int64) {
	for _, ch := range chunks {
		if ch.Off < 0 || ch.Bytes < 1 || ch.Off > g.spec.RegionBytes[ch.Region]-ch.Bytes {
			t.Fatalf("chunk %+v outside region of %d bytes", ch, g.spec.RegionBytes[ch.Region])
		}
		bytes += ch.Bytes
	}
	return bytes
}
