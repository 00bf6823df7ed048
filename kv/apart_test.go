package kv

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

func TestNewRoute_CachesOverTheSamePagesAreOne(t *testing.T) {
	c := Config{Layout: NHD, DType: BF16, Layers: 2, Pages: 4, PageSize: 2, KVHeads: 1, HeadDim: 4}
	g := must(c.LayerMajor())(t)
	mem := device.WrapHost(make([]byte, g.Bytes()))
	a, b := must(Wrap(g, []*device.Memory{mem}))(t), must(Wrap(g, []*device.Memory{mem}))(t)
	r := must(NewRoute(a, b))(t)
	if !r.Same() {
		t.Error("the caches share all their pages, and the route knows nothing of it")
	}
	_, err := r.AppendBoxes(nil, page.Run{Dst: 1, Src: 0, N: 2})
	faulttest.Refused(t, err, fault.Invalid, "overlaps itself")
}

// TestNewRoute_RefusesSharedBytes compares with what a look at every byte says.
func TestNewRoute_RefusesSharedBytes(t *testing.T) {
	met := map[string]bool{}
	rapid.Check(t, func(t *rapid.T) {
		mem := make([]byte, 512)
		side := func(name string) (*Cache, []int) {
			pages := rapid.IntRange(1, 4).Draw(t, name+" pages")
			s := Spec{Pages: pages, PageSize: 1, RegionBytes: []int64{0}}
			from := rapid.IntRange(0, 16).Draw(t, name+" from")
			stride := int64(rapid.IntRange(16, 48).Draw(t, name+" stride"))
			var bytes []int
			for l := range 2 {
				off := int64(l * rapid.SampledFrom([]int{8, 200}).Draw(t, name+" layer"))
				s.Layers = append(s.Layers, Layer{ID: l, Planes: []Plane{{Kind: Opaque, Offset: off, PageStride: stride, Bytes: 8}}})
				for p := range pages {
					for i := range 8 {
						bytes = append(bytes, from+int(off)+p*int(stride)+i)
					}
				}
			}
			s.RegionBytes[0] = 400
			g, err := NewGeometry(s)
			if err != nil {
				t.Fatal(err)
			}
			c, err := Wrap(g, []*device.Memory{device.WrapHost(mem[from : from+400])})
			if err != nil {
				t.Fatal(err)
			}
			return c, bytes
		}
		dst, to := side("destination")
		src, from := side("source")
		shares := slices.ContainsFunc(to, func(i int) bool { return slices.Contains(from, i) })
		r, err := NewRoute(dst, src)
		switch {
		case !shares && err == nil:
			met["apart"] = true
		case !shares: // strides differ: crossing is refused
			faulttest.Refused(t, err, fault.Invalid, "share bytes")
			if dst.g.spec.Layers[0].Planes[0].PageStride == src.g.spec.Layers[0].Planes[0].PageStride {
				t.Fatal("planes that step alike are apart, and were refused")
			}
		case err != nil:
			faulttest.Refused(t, err, fault.Invalid, "share bytes")
			met["shared"] = true
		case !r.Same():
			t.Fatal("the caches share bytes, and a route was made")
		}
	})
	if len(met) < 2 {
		t.Errorf("met only %v", met)
	}
}

// TestRoute_PageBoxesAreThoseOfEveryPage holds boxes and steps against the boxes of pages.
func TestRoute_PageBoxesAreThoseOfEveryPage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		model := drawModel(t)
		dst, src := wrapped(t, drawPlaced(t, model), 1), wrapped(t, drawPlaced(t, model), 2)
		r, err := NewRoute(dst, src)
		if err != nil {
			t.Fatal(err)
		}
		d := page.ID(rapid.IntRange(0, dst.Pages()-1).Draw(t, "dst"))
		s := page.ID(rapid.IntRange(0, src.Pages()-1).Draw(t, "src"))
		want, err := r.AppendBoxes(nil, page.Run{Dst: d, Src: s, N: 1})
		if err != nil {
			t.Fatal(err)
		}
		var got []Box
		for _, b := range r.AppendPageBoxes(nil) {
			b.DstOff += int64(d) * b.DstStep
			b.SrcOff += int64(s) * b.SrcStep
			got = append(got, b.Box)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("boxes %v, want %v", got, want)
		}
	})
}
