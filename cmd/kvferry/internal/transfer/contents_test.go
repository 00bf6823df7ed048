package transfer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// openPages returns pages of a geometry on the host.
func openPages(t *testing.T, g *kv.Geometry, err error) *pages {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	opened, err := accel.Open(t.Context(), "", accel.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPages(g, 7, opened)
	t.Cleanup(func() {
		if err := errors.Join(p.close(), opened.Close()); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var shapes = map[string]kv.Config{
	"NHD": {Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 5, PageSize: 8, KVHeads: 2, HeadDim: 3},
	"HND": {Layout: kv.HND, DType: kv.FP8, Layers: 2, Pages: 5, PageSize: 8, KVHeads: 3, HeadDim: 5},
	"MLA": {Layout: kv.MLA, DType: kv.BF16, Layers: 3, Pages: 5, PageSize: 8, LatentDim: 5},
	"scales": {
		Layout: kv.HND, DType: kv.FP8, Layers: 2, Pages: 5, PageSize: 8, KVHeads: 3, HeadDim: 4, Scale: kv.PerTokenHead, ScaleBytes: 4,
	},
	"joined": {Layout: kv.HND, DType: kv.FP8, Layers: 2, Pages: 5, PageSize: 8, KVHeads: 2, HeadDim: 4, Join: kv.JoinBlocks},
}

// TestVerify_SeesEveryByte reads into a page as an engine would, and then breaks one byte
// after the other, inside the range and outside.
func TestVerify_SeesEveryByte(t *testing.T) {
	const at, id = page.ID(3), page.ID(9)
	for name, c := range shapes {
		for _, tokens := range [][2]int{{0, 8}, {0, 3}, {2, 5}, {7, 8}, {0, 0}} {
			t.Run(fmt.Sprintf("%s %v", name, tokens), func(t *testing.T) {
				g, err := c.LayerMajor()
				p := openPages(t, g, err)
				if err := p.fill(at, id, wrong); err != nil {
					t.Fatal(err)
				}
				pretend(t, p, at, id, tokens[0], tokens[1])
				n, err := p.verify(at, id, tokens[0], tokens[1])
				if err != nil || n != g.PageBytes() {
					t.Fatalf("%d of %d bytes, %v", n, g.PageBytes(), err)
				}
				for i, l := range g.Spec().Layers {
					for j := range l.Planes {
						b, err := p.cache.Plane(i, j, at)
						if err != nil {
							t.Fatal(err)
						}
						for k := range b {
							b[k] ^= 0x10
							if _, err := p.verify(at, id, tokens[0], tokens[1]); !errors.Is(err, fault.Corrupt) {
								t.Fatalf("layer %d, plane %d, byte %d: %v", i, j, k, err)
							}
							b[k] ^= 0x10
						}
					}
				}
			})
		}
	}
}

// pretend writes tokens of page id into page at, by the definition of chunks.
func pretend(t *testing.T, p *pages, at, id page.ID, t0, t1 int) {
	t.Helper()
	g := p.cache.Geometry()
	whole := openPages(t, g, nil)
	if err := whole.fill(at, id, right); err != nil {
		t.Fatal(err)
	}
	for i := range g.Layers() {
		chunks, err := g.Chunks(nil, make([]uintptr, g.Regions()), i, at, t0, t1)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range chunks {
			to, err := p.cache.Region(c.Region)
			if err != nil {
				t.Fatal(err)
			}
			from, err := whole.cache.Region(c.Region)
			if err != nil {
				t.Fatal(err)
			}
			copy(to.Bytes()[c.Off:c.Off+c.Bytes], from.Bytes()[c.Off:c.Off+c.Bytes])
		}
	}
}

func TestVerify_ForeignPagesDoNotPass(t *testing.T) {
	g, err := shapes["NHD"].LayerMajor()
	p := openPages(t, g, err)
	if err := p.fill(1, 4, right); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		id     page.ID
		t0, t1 int
		want   string
	}{
		{5, 0, 8, "should be"},
		{4, 0, 0, "it was written"},
		{4, 1, 8, "it was written"},
	} {
		if _, err := p.verify(1, tc.id, tc.t0, tc.t1); !errors.Is(err, fault.Corrupt) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
	if err := p.fill(1, 4, wrong); err != nil {
		t.Fatal(err)
	}
	if _, err := p.verify(1, 4, 0, 8); err == nil || !strings.Contains(err.Error(), "never written") {
		t.Errorf("got %v", err)
	}
}

// TestContents_AreTheSameInEveryArrangement packs pages, which puts their planes
// elsewhere and in another order, and wants the same contents.
func TestContents_AreTheSameInEveryArrangement(t *testing.T) {
	for name, c := range shapes {
		g, err := c.PerLayerPageFirst()
		a := openPages(t, g, err)
		packed, err := g.Packed(9)
		b := openPages(t, packed, err)
		if err := a.write(t.Context(), []page.ID{2, 4}, func(at page.ID, i int) error { return a.fill(at, page.ID(i), right) }); err != nil {
			t.Fatal(err)
		}
		r, err := kv.NewRoute(b.cache, a.cache)
		if err != nil {
			t.Fatal(err)
		}
		s, err := a.opened.Device.NewStream("test")
		if err != nil {
			t.Fatal(err)
		}
		_, err = a.opened.Copier.Copy(s, r, []page.Pair{{Dst: 8, Src: 2}, {Dst: 0, Src: 4}})
		if err := errors.Join(err, s.Sync(context.Background()), s.Close()); err != nil {
			t.Fatal(err)
		}
		err = b.look(t.Context(), []page.ID{8, 0}, func(at page.ID, i int) error {
			_, err := b.verify(at, page.ID(i), 0, 8)
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
