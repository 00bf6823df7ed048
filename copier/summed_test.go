package copier_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// summedRig is a route from a device cache of 8 pages to a packed one of 9.
type summedRig struct {
	stream   device.Stream
	dst, src *kv.Cache
	route    *kv.Route
}

func openSummed(t *testing.T, arrange func() (*kv.Geometry, error)) *summedRig {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	h, r := openHost(t), &summedRig{}
	g, err := arrange()
	must(err)
	packed, err := g.Packed(9)
	must(err)
	r.dst, err = kv.NewCache(packed, h)
	must(err)
	t.Cleanup(func() { must(r.dst.Close()) })
	r.src, err = kv.NewCache(g, h)
	must(err)
	t.Cleanup(func() { must(r.src.Close()) })
	r.route, err = kv.NewRoute(r.dst, r.src)
	must(err)
	r.stream, err = h.NewStream("copies")
	must(err)
	t.Cleanup(func() { must(r.stream.Close()) })
	for i := range g.Regions() {
		m, err := r.src.Region(i)
		must(err)
		for k := range m.Bytes() {
			m.Bytes()[k] = byte(k*7 + k>>8*13 + i*31)
		}
	}
	return r
}

// arrangements are those of the small cache, and of layouts that lie otherwise.
func arrangements() map[string]func() (*kv.Geometry, error) {
	small := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 8, PageSize: 4, KVHeads: 2, HeadDim: 4}
	hnd, mla, joined, large := small, small, small, small
	hnd.Layout = kv.HND
	mla.Layout, mla.KVHeads, mla.HeadDim, mla.LatentDim = kv.MLA, 0, 0, 6
	mla.DType, mla.Scale, mla.ScaleBytes, mla.StateBytes = kv.INT4, kv.PerToken, 2, 40
	joined.Layout, joined.Join, joined.PageAlign = kv.HND, kv.JoinBlocks, 512
	large.PageSize, large.KVHeads, large.HeadDim = 16, 8, 128
	return map[string]func() (*kv.Geometry, error){
		"layer-major": small.LayerMajor, "page-major": small.PageMajor,
		"kv-first": small.PerLayerKVFirst, "page-first": small.PerLayerPageFirst,
		"hnd": hnd.LayerMajor, "hnd kv-first": hnd.PerLayerKVFirst, "hnd joined with padding": joined.PerLayerPageFirst,
		"4-bit latents, scales and states": mla.LayerMajor, "64 KiB rows": large.LayerMajor, "32 KiB rows": large.PerLayerKVFirst,
	}
}

func TestCopySummed_SumsThePagesThatArriveInTheOrderOfThePairs(t *testing.T) {
	for name, arrange := range arrangements() {
		t.Run(name, func(t *testing.T) {
			r := openSummed(t, arrange)
			c := copier.NewPortable()
			pairs := []page.Pair{{Dst: 7, Src: 2}, {Dst: 0, Src: 5}, {Dst: 1, Src: 6}, {Dst: 8, Src: 2}, {Dst: 3, Src: 0}}
			given, digests := slices.Clone(pairs), make([]device.Digest, len(pairs))
			m, err := c.CopySummed(r.stream, r.route, pairs, digests)
			if err != nil || m.Pages != 5 || m.Bytes != 5*r.route.PageBytes() || m.Rows < 5 {
				t.Fatalf("moved %+v, %v", m, err)
			}
			if err := r.stream.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(pairs, given) {
				t.Errorf("pairs are now %v", pairs)
			}
			plain := openSummed(t, arrange)
			if _, err := c.Copy(plain.stream, plain.route, given); err != nil {
				t.Fatal(err)
			}
			if err := plain.stream.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			for i, p := range pairs {
				got, err := r.dst.Page(p.Dst)
				if err != nil {
					t.Fatal(err)
				}
				want, err := plain.dst.Page(p.Dst)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Errorf("page %d has other bytes than those of Copy", p.Dst)
				}
				sum := xxh3.Hash128(want)
				if hi, lo := digests[i].Sum128(); hi != sum.Hi || lo != sum.Lo {
					t.Errorf("pair %d: the digest is not that of page %d", i, p.Dst)
				}
			}
		})
	}
}

func TestCopySummed_RefusesBeforeAnythingIsEnqueued(t *testing.T) {
	small := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 8, PageSize: 4, KVHeads: 2, HeadDim: 4}
	r := openSummed(t, small.LayerMajor)
	regions := openSummed(t, small.PerLayerKVFirst)
	back, err := kv.NewRoute(regions.src, regions.dst)
	if err != nil {
		t.Fatal(err)
	}
	c := copier.NewPortable()
	for _, x := range []struct {
		name    string
		route   *kv.Route
		pairs   []page.Pair
		digests int
		kind    fault.Kind
	}{
		{"too few digests", r.route, []page.Pair{{Dst: 0, Src: 0}, {Dst: 1, Src: 1}}, 1, fault.Invalid},
		{"out of range", r.route, []page.Pair{{Dst: 0, Src: 0}, {Dst: 1, Src: 8}}, 2, fault.Invalid},
		{"destination twice", r.route, []page.Pair{{Dst: 1, Src: 0}, {Dst: 0, Src: 3}, {Dst: 1, Src: 1}}, 3, fault.Invalid},
		{"several regions", back, []page.Pair{{Dst: 0, Src: 0}}, 1, fault.Unsupported},
	} {
		digests := make([]device.Digest, x.digests)
		if m, err := c.CopySummed(r.stream, x.route, x.pairs, digests); !errors.Is(err, x.kind) || m != (copier.Moved{}) {
			t.Errorf("%s: moved %+v, error %v, want kind %v", x.name, m, err, x.kind)
		}
	}
	if err := r.stream.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	m, err := r.dst.Region(0)
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(m.Bytes(), func(b byte) bool { return b != 0 }) {
		t.Error("a refused copy has written")
	}
	if m, err := c.CopySummed(r.stream, r.route, nil, nil); err != nil || m != (copier.Moved{}) {
		t.Errorf("no pairs: %+v, %v", m, err)
	}
}
