package kv

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// arrangement is a constructor and, for the reference, what it means: the axes
// of each region from the slowest to the fastest. l layer, p page, k K or V; what
// a layer has of a page (rows, scales, a state) follows.
type arrangement struct {
	name     string
	make     func(Config) (*Geometry, error)
	perLayer bool // regions for each layer
	together bool // rows, scales and states of a layer are in one region, one after another
	axes     string
}

var arrangements = []arrangement{
	{name: "LayerMajor", make: Config.LayerMajor, axes: "lp"},
	{name: "PageMajor", make: Config.PageMajor, axes: "pl", together: true},
	{name: "PerLayerKVFirst", make: Config.PerLayerKVFirst, axes: "kp", perLayer: true},
	{name: "PerLayerPageFirst", make: Config.PerLayerPageFirst, axes: "p", perLayer: true},
}

// takes reports whether the arrangement is one of that config.
func (a arrangement) takes(c Config) bool {
	return a.name != "PerLayerKVFirst" || (c.Layout != MLA && c.Join == Apart)
}

// element names one element of a cache (of a 4-bit type, two of them), one scale
// or one byte of a state; place is where its first byte lies.
type (
	element struct{ part, layer, page, k, token, head, dim int }
	place   struct {
		region int
		off    int64
	}
)

// The parts of a layer.
const (
	rowPart = iota
	scalePart
	statePart
)

// part is what a layer has of a page: axes as in arrangement, t tokens, h heads,
// d dimension or byte, and the bytes of one element.
type part struct {
	number int
	axes   string
	bytes  int64
}

func (c Config) parts() (ps []part) {
	if c.Layout != 0 {
		axes := map[Layout][]string{NHD: {"kthd", "thkd", "tkhd"}, HND: {"khtd", "htkd", "hktd"}, MLA: {"td"}}
		ps = append(ps, part{rowPart, axes[c.Layout][c.Join], max(c.DType.Bits()/8, 1)})
	}
	if c.Scale != NoScale {
		axes := map[ScalePer]string{PerPage: "k", PerHead: "kh", PerToken: "kt", PerTokenHead: "kth"}[c.Scale]
		switch {
		case c.Layout == MLA:
			axes = strings.TrimPrefix(axes, "k")
		case c.Layout == HND && c.Scale == PerTokenHead:
			axes = "kht"
		}
		ps = append(ps, part{scalePart, axes, int64(c.ScaleBytes)})
	}
	if c.StateBytes > 0 {
		ps = append(ps, part{statePart, "d", 1})
	}
	return ps
}

// dims returns the elements of a row, of a 4-bit type the pairs of them.
func (c Config) dims() int {
	n := c.HeadDim + c.LatentDim
	if c.DType == INT4 || c.DType == FP4 {
		n /= 2
	}
	return n
}

// walk is the slow reference: it visits every element of the tensors in the
// order in which they lie, counting bytes, with no stride anywhere.
func walk(c Config, a arrangement) map[element]place {
	parts := c.parts()
	sizes := map[rune]int{'l': c.Layers, 'p': c.Pages, 'k': 2, 't': c.PageSize, 'h': c.KVHeads}
	out := map[element]place{}
	region, off := 0, int64(0)
	at := map[rune]int{}
	// visit steps over axes and calls leaf at each step of the last.
	var visit func(axes string, leaf func())
	visit = func(axes string, leaf func()) {
		if axes == "" {
			leaf()
			return
		}
		axis := rune(axes[0])
		for i := range sizes[axis] {
			at[axis] = i
			visit(axes[1:], leaf)
			for axis == 'p' && c.PageAlign > 0 && off%int64(c.PageAlign) != 0 {
				off++
			}
		}
		at[axis] = 0
	}
	inside := func(p part, outer string) {
		sizes['d'] = c.dims()
		if p.number == statePart {
			sizes['d'] = c.StateBytes
		}
		axes := p.axes
		if strings.Contains(outer, "k") {
			axes = strings.Replace(axes, "k", "", 1)
		}
		visit(axes, func() {
			out[element{p.number, at['l'], at['p'], at['k'], at['t'], at['h'], at['d']}] = place{region, off}
			off += p.bytes
		})
	}
	layers := 1
	if a.perLayer {
		layers = c.Layers
	}
	for l := range layers {
		at['l'] = l
		if a.together {
			visit(a.axes, func() {
				for _, p := range parts {
					inside(p, a.axes)
				}
			})
			break
		}
		for _, p := range parts {
			outer := a.axes
			if !strings.Contains(p.axes, "k") {
				outer = strings.Replace(outer, "k", "", 1)
			}
			at['l'] = l
			visit(outer, func() { inside(p, outer) })
			region, off = region+1, 0
		}
	}
	return out
}

// dtypes are all types with elements.
var dtypes = []DType{FP8, INT8, BF16, FP16, FP32, INT4, FP4}

// drawConfig draws a small legal config with rows.
func drawConfig(t *rapid.T) Config {
	c := Config{
		Layout:   rapid.SampledFrom([]Layout{NHD, HND, MLA}).Draw(t, "layout"),
		DType:    rapid.SampledFrom(dtypes).Draw(t, "dtype"),
		Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
		Pages:    rapid.IntRange(1, 4).Draw(t, "pages"),
		PageSize: rapid.IntRange(1, 4).Draw(t, "page size"),
		Sink:     rapid.Bool().Draw(t, "sink"), FirstLayer: rapid.IntRange(0, 9).Draw(t, "first layer"),
		Scale:      rapid.SampledFrom([]ScalePer{NoScale, NoScale, PerPage, PerHead, PerToken, PerTokenHead}).Draw(t, "scale"),
		StateBytes: rapid.SampledFrom([]int{0, 0, 0, 5}).Draw(t, "state"),
		PageAlign:  rapid.SampledFrom([]int{0, 0, 1, 64, 7}).Draw(t, "align"),
	}
	dim := 1
	if c.DType.packs() {
		dim = 2
	}
	if c.Layout == MLA {
		c.LatentDim = dim * rapid.IntRange(1, 5).Draw(t, "latent")
		c.Scale = map[ScalePer]ScalePer{PerPage: PerPage, PerToken: PerToken}[c.Scale]
	} else {
		c.KVHeads = rapid.IntRange(1, 3).Draw(t, "heads")
		c.HeadDim = dim * rapid.IntRange(1, 3).Draw(t, "dim")
		c.FirstHead = rapid.IntRange(0, 9).Draw(t, "first head")
		c.Join = rapid.SampledFrom([]Join{Apart, JoinRows, JoinBlocks}).Draw(t, "join")
	}
	if c.Scale != NoScale {
		c.ScaleBytes = rapid.IntRange(1, 4).Draw(t, "scale bytes")
	}
	return c
}

// cuts reports whether every plane of the config can be cut by token.
func (c Config) cuts() bool {
	return c.Scale != PerPage && c.Scale != PerHead && c.StateBytes == 0
}

// drawGeometry draws one of the arrangements of a config.
func drawGeometry(t *rapid.T, c Config) (*Geometry, arrangement) {
	a := rapid.SampledFrom(arrangements).Filter(func(a arrangement) bool { return a.takes(c) }).Draw(t, "arrangement")
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
		DType:    rapid.SampledFrom([]DType{FP8, BF16, FP32, INT4}).Draw(t, "dtype"),
		PageSize: rapid.IntRange(1, 4).Draw(t, "page size"),
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "layers") {
		l := Layer{ID: 10 + 3*i, Heads: rapid.IntRange(1, 3).Draw(t, "heads"), Dim: 2 * rapid.IntRange(1, 3).Draw(t, "dim")}
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
			switch {
			case kind.hasRows():
				p = rowPlane(&s, &l, kind, rapid.SampledFrom([]Join{JoinRows, JoinBlocks}).Draw(t, "join"))
			case kind == Scale && rapid.Bool().Draw(t, "cut"):
				one := rapid.Int64Range(1, 4).Draw(t, "scale bytes")
				p.TokenStride, p.Bytes = one, one*int64(s.PageSize)
				if rapid.Bool().Draw(t, "by head") {
					p.HeadStride, p.TokenStride = one, one*int64(l.Heads)
					if s.Layout == HND {
						p.HeadStride, p.TokenStride = one*int64(s.PageSize), one
					}
					p.Bytes *= int64(l.Heads)
				}
			default:
				p.Bytes = rapid.Int64Range(1, 9).Draw(t, "bytes")
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
	return fmt.Sprintf("part %d layer %d page %d k %d token %d head %d dim %d", e.part, e.layer, e.page, e.k, e.token, e.head, e.dim)
}
