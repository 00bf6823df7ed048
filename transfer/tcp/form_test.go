package tcp

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// reversed has the layers and the planes of a geometry listed the other way round.
func reversed(g *kv.Geometry) (*kv.Geometry, error) {
	s := g.Spec()
	slices.Reverse(s.Layers)
	for _, l := range s.Layers {
		slices.Reverse(l.Planes)
	}
	return kv.NewGeometry(s)
}

// forms are geometries whose pages can be exchanged, list by list.
func forms(tb testing.TB) (lists [][]*kv.Geometry) {
	tb.Helper()
	nhd := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 9, PageSize: 8, KVHeads: 2, HeadDim: 8, FirstLayer: 4}
	hnd, mla, scaled, joined, padded := nhd, nhd, nhd, nhd, nhd
	hnd.Layout, mla.Layout, mla.KVHeads, mla.HeadDim, mla.LatentDim = kv.HND, kv.MLA, 0, 0, 20
	joined.Layout, joined.Join = kv.HND, kv.JoinBlocks
	scaled.Layout, scaled.Scale, scaled.ScaleBytes = kv.HND, kv.PerTokenHead, 4
	padded.PageAlign = 256
	for _, c := range []kv.Config{nhd, hnd, mla, scaled, joined, padded} {
		var list []*kv.Geometry
		for i, layout := range []func(kv.Config) (*kv.Geometry, error){
			kv.Config.LayerMajor, kv.Config.PageMajor, kv.Config.PerLayerPageFirst, kv.Config.PerLayerKVFirst,
		} {
			c.Pages = 9 + i // so that no stride of one is right in another
			g, err := layout(c)
			if fault.KindOf(err) == fault.Unsupported {
				continue // K and V are one
			}
			noError(tb, err)
			back, err := reversed(g)
			noError(tb, err)
			list = append(list, g, back)
		}
		lists = append(lists, list)
	}
	return lists
}

// filled returns a cache whose pages all have their contents by global layer, plane kind
// and token, so that exchangeable caches hold the same.
func filled(tb testing.TB, host *device.Host, g *kv.Geometry, from *kv.Cache) *kv.Cache {
	tb.Helper()
	c, err := kv.NewCache(g, host)
	noError(tb, err)
	tb.Cleanup(func() { noError(tb, c.Close()) })
	if from == nil {
		noError(tb, transfertest.Fill(c, 1, ids(g.Pages())))
		return c
	}
	r, err := kv.NewRoute(c, from)
	noError(tb, err)
	boxes, err := r.AppendBoxes(nil, page.Run{N: from.Pages()})
	noError(tb, err)
	s, err := host.NewStream("fill")
	noError(tb, err)
	noError(tb, s.Copy(r.AppendOps(nil, boxes)))
	noError(tb, s.Sync(tb.Context()))
	noError(tb, s.Close())
	return c
}

// text returns the bytes that w goes through, in steps.
func text(f *form, o *order, step func() (bytes int64, room int)) (b []byte) {
	var w walk
	w.start(f, o)
	for left := o.to - o.from; left > 0; {
		n, room := step()
		pieces, got := w.pieces(nil, min(n, left), room)
		b = append(b, slices.Concat(pieces...)...)
		left -= got
	}
	return b
}

// All forms of exchangeable caches say the same pages in the same words: whatever part of
// an order is asked for, in whatever steps.
func TestForm_OneOrderForAll(t *testing.T) {
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	t.Cleanup(func() { noError(t, host.Close()) })
	for _, list := range forms(t) {
		var caches []*form
		var first *kv.Cache
		for _, g := range list {
			c := filled(t, host, g, first)
			if first == nil {
				first = c
			}
			f, err := newForm(c)
			noError(t, err)
			caches = append(caches, f)
		}
		rapid.Check(t, func(t *rapid.T) {
			o := order{}
			id := rapid.IntRange(0, 8)
			for range rapid.IntRange(0, 4).Draw(t, "runs") {
				first := id.Draw(t, "first")
				o.runs = append(o.runs, run{page.ID(first), int32(rapid.IntRange(1, 9-first).Draw(t, "n"))})
			}
			for range rapid.IntRange(0, 2).Draw(t, "parts") {
				t0 := rapid.IntRange(0, 7).Draw(t, "t0")
				o.parts = append(o.parts, part{page.ID(id.Draw(t, "page")), int32(t0), int32(rapid.IntRange(t0+1, 8).Draw(t, "t1"))})
			}
			var ok bool
			if o.to, ok = caches[0].bytes(&o); !ok {
				t.Fatal("too many to be counted")
			}
			all := func() (int64, int) { return 1 << 40, 1 << 20 }
			want := text(caches[0], &o, all)
			o.from = rapid.Int64Range(0, o.to).Draw(t, "from")
			o.to = rapid.Int64Range(o.from, o.to).Draw(t, "to")
			want = want[o.from:o.to]
			steps := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "steps"), 0))
			for i, f := range caches {
				if err := f.check(&o); err != nil {
					t.Fatal(err)
				}
				got := text(f, &o, func() (int64, int) { return 1 + steps.Int64N(200), 1 + steps.IntN(3) })
				if !bytes.Equal(got, want) {
					t.Fatalf("geometry %d says other bytes [%d, %d)", i, o.from, o.to)
				}
			}
		})
	}
}

// The parts into which a plan is shared out are, one behind the other, the plan: on both
// sides, and each names no more pages than it needs.
func TestForm_Share(t *testing.T) {
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	t.Cleanup(func() { noError(t, host.Close()) })
	list := forms(t)[0]
	far := filled(t, host, list[0], nil)
	f, err := newForm(far)
	noError(t, err)
	rapid.Check(t, func(t *rapid.T) {
		perm := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "pages"), 0)).Perm(9)
		local, remote := make([]page.ID, 9), make([]page.ID, 9)
		for i, x := range perm {
			local[i], remote[i] = page.ID(x), page.ID(perm[(i+1)%9])
		}
		var p transfer.Plan
		start := rapid.IntRange(0, 71).Draw(t, "start")
		if err := p.Set(start, rapid.IntRange(start+1, 72).Draw(t, "end"), local, remote, 8); err != nil {
			t.Fatal(err)
		}
		var remotes, locals order
		all := int64(len(p.Pairs)) * f.pageBytes
		for _, x := range p.Parts {
			all += int64(x.T1-x.T0) * f.tokenBytes
		}
		f.share(&p, 0, all, &remotes, &locals)
		whole := func() (int64, int) { return 1 << 40, 1 << 20 }
		wantRemote, wantLocal := text(f, &remotes, whole), text(f, &locals, whole)
		var gotRemote, gotLocal []byte
		for from := int64(0); from < all; {
			to := min(from+rapid.Int64Range(1, all).Draw(t, "bytes"), all)
			f.share(&p, from, to, &remotes, &locals)
			n, _ := f.bytes(&remotes)
			if remotes.from >= f.pageBytes && len(remotes.runs) > 0 || n-remotes.to >= f.pageBytes {
				t.Fatalf("%+v has a page too many", remotes)
			}
			if got, want := f.page(&locals, locals.from), f.page(&remotes, remotes.from); slices.Index(local, got) != slices.Index(remote, want) {
				t.Fatalf("byte %d: pages %d and %d", from, got, want)
			}
			gotRemote, gotLocal = append(gotRemote, text(f, &remotes, whole)...), append(gotLocal, text(f, &locals, whole)...)
			from = to
		}
		if !bytes.Equal(gotRemote, wantRemote) || !bytes.Equal(gotLocal, wantLocal) {
			t.Fatal("the shares are not the plan")
		}
	})
}

func TestForm_Check(t *testing.T) {
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	t.Cleanup(func() { noError(t, host.Close()) })
	c := small()
	c.Sink = true
	g, err := c.PageMajor()
	noError(t, err)
	f, err := newForm(filled(t, host, g, nil))
	noError(t, err)
	opaque, err := kv.OpaqueSpec{Layers: 1, Blocks: 3, PageSize: 8, BlockBytes: 8, LayerStride: 24, BlockStride: 8, RegionBytes: 24}.Geometry()
	noError(t, err)
	whole, err := newForm(filled(t, host, opaque, nil))
	noError(t, err)
	for name, c := range map[string]struct {
		f *form
		o order
	}{
		"the sink":                 {f, order{runs: []run{{0, 1}}}},
		"part of the sink":         {f, order{parts: []part{{0, 0, 1}}}},
		"behind the last page":     {f, order{runs: []run{{11, 2}}}},
		"part behind the last":     {f, order{parts: []part{{12, 0, 1}}}},
		"behind the last token":    {f, order{parts: []part{{1, 8, 9}}}},
		"a byte too many":          {f, order{runs: []run{{1, 1}}, to: f.pageBytes + 1}},
		"part of a whole":          {whole, order{parts: []part{{1, 0, 1}}}},
		"more than can be counted": {&form{pageBytes: 1 << 50, pages: 1 << 20}, order{runs: []run{{0, 1 << 17}}, to: 1}},
	} {
		if err := c.f.check(&c.o); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}
