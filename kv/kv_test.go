package kv

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// arrangement is a constructor and, for the reference, what it means: the axes
// of each region from the slowest to the fastest. l layer, p page, k K or V, r
// row (tokens and heads, as the layout has them), d dimension.
type arrangement struct {
	name     string
	make     func(Config) (*Geometry, error)
	perLayer bool // a region for each layer
	axes     string
}

var arrangements = []arrangement{
	{"LayerMajor", Config.LayerMajor, false, "lpkrd"},
	{"PageMajor", Config.PageMajor, false, "plkrd"},
	{"PerLayerKVFirst", Config.PerLayerKVFirst, true, "kprd"},
	{"PerLayerPageFirst", Config.PerLayerPageFirst, true, "pkrd"},
}

// element names one element of a cache; place is where its first byte lies.
type (
	element struct{ layer, page, k, token, head, dim int }
	place   struct {
		region int
		off    int64
	}
)

// walk is the slow reference: it visits every element of the tensors in the
// order in which they lie, counting bytes, with no stride anywhere.
func walk(c Config, a arrangement) map[element]place {
	rows, heads, dim, ks := "th", c.KVHeads, c.HeadDim, 2
	switch c.Layout {
	case HND:
		rows = "ht"
	case MLA:
		heads, dim, ks = 1, c.LatentDim, 1
	}
	axes := strings.ReplaceAll(a.axes, "r", rows)
	regions := 1
	sizes := map[rune]int{'l': c.Layers, 'p': c.Pages, 'k': ks, 't': c.PageSize, 'h': heads, 'd': dim}
	if a.perLayer {
		regions = c.Layers
	}
	out := map[element]place{}
	for region := range regions {
		var off int64
		var visit func(axes string, at map[rune]int)
		visit = func(axes string, at map[rune]int) {
			if axes == "" {
				e := element{at['l'], at['p'], at['k'], at['t'], at['h'], at['d']}
				if a.perLayer {
					e.layer = region
				}
				out[e] = place{region, off}
				off += c.DType.Size()
				return
			}
			axis := rune(axes[0])
			for i := range sizes[axis] {
				at[axis] = i
				visit(axes[1:], at)
			}
		}
		visit(axes, map[rune]int{})
	}
	return out
}

// drawConfig draws a small legal config.
func drawConfig(t *rapid.T) Config {
	c := Config{
		Layout:   rapid.SampledFrom([]Layout{NHD, HND, MLA}).Draw(t, "layout"),
		DType:    rapid.SampledFrom([]DType{FP8, INT8, BF16, FP16, FP32}).Draw(t, "dtype"),
		Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
		Pages:    rapid.IntRange(1, 4).Draw(t, "pages"),
		PageSize: rapid.IntRange(1, 4).Draw(t, "page size"),
		Sink:     rapid.Bool().Draw(t, "sink"), FirstLayer: rapid.IntRange(0, 9).Draw(t, "first layer"),
	}
	if c.Layout == MLA {
		c.LatentDim = rapid.IntRange(1, 5).Draw(t, "latent")
	} else {
		c.KVHeads = rapid.IntRange(1, 3).Draw(t, "heads")
		c.HeadDim = rapid.IntRange(1, 3).Draw(t, "dim")
		c.FirstHead = rapid.IntRange(0, 9).Draw(t, "first head")
	}
	return c
}

// drawGeometry draws one of the arrangements of a config.
func drawGeometry(t *rapid.T, c Config) (*Geometry, arrangement) {
	a := rapid.SampledFrom(arrangements).Filter(func(a arrangement) bool {
		return c.Layout != MLA || a.name != "PerLayerKVFirst"
	}).Draw(t, "arrangement")
	g, err := a.make(c)
	if err != nil {
		t.Fatalf("%s: %v", a.name, err)
	}
	return g, a
}

// drawModel draws layers of any shape and with any planes, not placed yet.
func drawModel(t *rapid.T) Spec {
	s := Spec{
		Layout:   rapid.SampledFrom([]Layout{NHD, NHD, HND, MLA}).Draw(t, "layout"),
		DType:    rapid.SampledFrom([]DType{FP8, BF16, FP32}).Draw(t, "dtype"),
		PageSize: rapid.IntRange(1, 4).Draw(t, "page size"),
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "layers") {
		l := Layer{ID: 10 + 3*i, Heads: rapid.IntRange(1, 3).Draw(t, "heads"), Dim: rapid.IntRange(1, 3).Draw(t, "dim")}
		var kinds []PlaneKind
		switch joined := rapid.Bool().Draw(t, "joined"); {
		case s.Layout == MLA:
			l.Heads, kinds = 1, []PlaneKind{Latent}
		case joined:
			kinds = []PlaneKind{KV}
		default:
			kinds = []PlaneKind{K, V}
		}
		kinds = append(kinds, rapid.SliceOfN(rapid.SampledFrom([]PlaneKind{Scale, State, Opaque}), 0, 2).Draw(t, "more")...)
		for _, kind := range kinds {
			p := Plane{Kind: kind}
			p.TokenStride, p.HeadStride = packedStrides(&s, &l, kind)
			switch {
			case kind == Scale && rapid.Bool().Draw(t, "cut"):
				p.TokenStride = rapid.Int64Range(1, 4).Draw(t, "scale bytes")
				p.Bytes = p.TokenStride * int64(s.PageSize)
			case !kind.hasRows():
				p.Bytes = rapid.Int64Range(1, 9).Draw(t, "bytes")
			case s.Layout == HND:
				p.Bytes = p.HeadStride * int64(l.Heads)
			default:
				p.Bytes = p.TokenStride * int64(s.PageSize)
			}
			l.Planes = append(l.Planes, p)
		}
		s.Layers = append(s.Layers, l)
	}
	return s
}

// drawPlaced places a model's planes: groups of planes, each with a page stride
// of its own, in up to 3 regions, in any order, with gaps.
func drawPlaced(t *rapid.T, model Spec) *Geometry {
	s := model.clone()
	s.Pages, s.Sink = rapid.IntRange(1, 6).Draw(t, "pages"), rapid.Bool().Draw(t, "sink")
	s.Layers = rapid.Permutation(s.Layers).Draw(t, "order of layers")
	var planes []*Plane
	for i := range s.Layers {
		for j := range s.Layers[i].Planes {
			planes = append(planes, &s.Layers[i].Planes[j])
		}
	}
	if rapid.Bool().Draw(t, "shuffle") {
		planes = rapid.Permutation(planes).Draw(t, "order of planes")
	}
	gaps := rapid.SampledFrom([]int64{0, 0, 3}).Draw(t, "gaps")
	gap := func() int64 { return rapid.Int64Range(0, gaps).Draw(t, "gap") }
	if len(planes) > 0 {
		s.RegionBytes = make([]int64, rapid.IntRange(1, 3).Draw(t, "regions"))
	}
	for len(planes) > 0 {
		group := planes[:rapid.IntRange(1, len(planes)).Draw(t, "group")]
		planes = planes[len(group):]
		region := rapid.IntRange(0, len(s.RegionBytes)-1).Draw(t, "region")
		start := s.RegionBytes[region] + gap()
		var stride int64
		for _, p := range group {
			p.Region, p.Offset = region, start+stride
			stride += p.Bytes + gap()
		}
		for _, p := range group {
			p.PageStride = stride
		}
		s.RegionBytes[region] = start + stride*int64(s.Pages) + gap()
	}
	g, err := NewGeometry(s)
	if err != nil {
		t.Fatalf("a legal placement is refused: %v\n%+v", err, s)
	}
	return g
}

// wrapped is a cache over Go memory full of random bytes.
func wrapped(t interface{ Fatal(...any) }, g *Geometry, seed uint64) *Cache {
	rng := rand.New(rand.NewPCG(seed, 1))
	var regions []*device.Memory
	for _, n := range g.spec.RegionBytes {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		regions = append(regions, device.WrapHost(b))
	}
	c, err := Wrap(g, regions)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// snapshot copies the bytes of all regions.
func snapshot(c *Cache) (out [][]byte) {
	for _, m := range c.regions {
		out = append(out, slices.Clone(m.Bytes()))
	}
	return out
}

// mustRefuse fails unless err is of that kind and mentions each text.
func mustRefuse(t *testing.T, err error, kind fault.Kind, mentions ...string) {
	t.Helper()
	if fault.KindOf(err) != kind {
		t.Fatalf("error %v is of kind %v, want %v", err, fault.KindOf(err), kind)
	}
	for _, m := range mentions {
		if !strings.Contains(err.Error(), m) {
			t.Errorf("error %q does not mention %q", err, m)
		}
	}
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// small is a config whose every number is different.
var small = Config{
	Layout: NHD, DType: BF16, Layers: 3, Pages: 7, PageSize: 4, KVHeads: 2, HeadDim: 5,
	FirstLayer: 20, FirstHead: 8,
}

func (c Config) with(change func(*Config)) Config {
	change(&c)
	return c
}

var smallMLA = small.with(func(c *Config) { c.Layout, c.KVHeads, c.HeadDim, c.LatentDim, c.FirstHead = MLA, 0, 0, 10, 0 })

func (e element) String() string {
	return fmt.Sprintf("layer %d page %d k %d token %d head %d dim %d", e.layer, e.page, e.k, e.token, e.head, e.dim)
}
