package kv

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// locate is where the geometry's planes say that an element lies.
func locate(g *Geometry, e element) place {
	l := &g.spec.Layers[e.layer]
	var pl *Plane
	size := g.DType().unit()
	switch e.part {
	case rowPart:
		if pl = l.rows(); e.k == 1 && pl.Kind == K {
			pl = l.find(V)
		}
	case scalePart:
		nth := e.k
		for i := range l.Planes { // K's, then V's
			if l.Planes[i].Kind == Scale {
				if nth--; nth == -1 {
					pl = &l.Planes[i]
				}
			}
		}
	case statePart:
		pl, size = l.find(State), 1
	}
	off := pl.Offset + int64(e.page)*pl.PageStride + int64(e.token)*pl.TokenStride +
		int64(e.head)*pl.HeadStride + int64(e.k)*pl.KVStride + int64(e.dim)*size
	return place{pl.Region, off}
}

func TestConfig_ArrangementsAgreeWithAWalkOverTheirTensors(t *testing.T) {
	for _, a := range arrangements {
		for _, layout := range []Layout{NHD, HND, MLA} {
			for _, dtype := range dtypes {
				for _, join := range []Join{Apart, JoinRows, JoinBlocks} {
					c := small
					if layout == MLA {
						c = smallMLA
					}
					c.Layout, c.DType, c.Join = layout, dtype, join
					if dtype.packs() && layout != MLA {
						c.HeadDim = 6
					}
					t.Run(fmt.Sprintf("%s/%v/%v/%d", a.name, layout, dtype, join), func(t *testing.T) {
						g, err := a.make(c)
						switch {
						case layout == MLA && join != Apart:
							faulttest.Refused(t, err, fault.Invalid, "Config.Join")
						case a.name == "PerLayerKVFirst" && layout == MLA:
							faulttest.Refused(t, err, fault.Unsupported, "MLA")
						case a.name == "PerLayerKVFirst" && join != Apart:
							faulttest.Refused(t, err, fault.Unsupported, "Config.Join", "joined")
						case err != nil:
							t.Fatal(err)
						default:
							checkAgainstWalk(t, c, a, g)
						}
					})
				}
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		g, a := drawGeometry(t, c)
		checkAgainstWalk(t, c, a, g)
	})
}

func checkAgainstWalk(t interface{ Fatalf(string, ...any) }, c Config, a arrangement, g *Geometry) {
	sizes := map[int]int64{}
	for _, p := range c.parts() {
		sizes[p.number] = p.bytes
	}
	var bytes int64
	ends := make([]int64, g.Regions())
	for e, p := range walk(c, a) {
		if got := locate(g, e); got != p {
			t.Fatalf("%v lies at %+v, want %+v", e, got, p)
		}
		bytes += sizes[e.part]
		ends[p.region] = max(ends[p.region], p.off+sizes[e.part])
	}
	for i, end := range ends {
		if g.spec.RegionBytes[i] != end {
			t.Fatalf("region %d has %d bytes, its last element ends at %d", i, g.spec.RegionBytes[i], end)
		}
	}
	if g.PageBytes()*int64(c.Pages) != bytes {
		t.Fatalf("%d bytes a page, want %d in all", g.PageBytes(), bytes)
	}
	if g.Layers() != c.Layers || g.Pages() != c.Pages || g.PageSize() != c.PageSize || g.Layout() != c.Layout || g.DType() != c.DType || g.Sink() != c.Sink {
		t.Fatalf("accessors do not repeat the config: %+v", g.spec)
	}
	if l, err := g.Layer(c.Layers - 1); err != nil || l.ID != c.FirstLayer+c.Layers-1 || l.FirstHead != c.FirstHead {
		t.Fatalf("last layer is %+v, %v", l, err)
	}
}

func TestConfig_ErrorsNameFieldValueAndLimit(t *testing.T) {
	for _, c := range []struct {
		change   func(*Config)
		mentions []string
	}{
		{func(c *Config) { c.Layout = 0 }, []string{"Config.Layout", "none"}},
		{func(c *Config) { c.Layout = 9 }, []string{"Config.Layout", "9"}},
		{func(c *Config) { c.DType = 0 }, []string{"Config.DType", "none"}},
		{func(c *Config) { c.DType = 77 }, []string{"Config.DType", "77"}},
		{func(c *Config) { c.Layers = -1 }, []string{"Config.Layers", "-1", "0 … 1024"}},
		{func(c *Config) { c.Layers = 1025 }, []string{"Config.Layers", "1025", "0 … 1024"}},
		{func(c *Config) { c.Pages = 0 }, []string{"Config.Pages", "0 is not in 1 … 2147483647"}},
		{func(c *Config) { c.Pages = 1 << 31 }, []string{"Config.Pages", "2147483648"}},
		{func(c *Config) { c.PageSize = 0 }, []string{"Config.PageSize", "0 is not in 1 … 1048576"}},
		{func(c *Config) { c.KVHeads = 0 }, []string{"Config.KVHeads", "0 is not in 1 … 65536"}},
		{func(c *Config) { c.HeadDim = -3 }, []string{"Config.HeadDim", "-3 is not in 1 … 1048576"}},
		{func(c *Config) { c.LatentDim = 4 }, []string{"Config.LatentDim", "4 is not in 0 … 0"}},
		{func(c *Config) { c.Layout = MLA; c.KVHeads = 0; c.HeadDim = 0; c.FirstHead = 0 }, []string{"Config.LatentDim", "0 is not in 1"}},
		{func(c *Config) { c.Layout = MLA; c.LatentDim = 4 }, []string{"Config.KVHeads", "2 is not in 0 … 0"}},
		{func(c *Config) { c.Join = 3 }, []string{"Config.Join", "3 is not in 0 … 2"}},
		{func(c *Config) { *c = smallMLA; c.Join = JoinRows }, []string{"Config.Join", "1 is not in 0 … 0"}},
		{func(c *Config) { c.Scale = 5 }, []string{"Config.Scale", "5 is not in 0 … 4"}},
		{func(c *Config) { c.ScaleBytes = 4 }, []string{"Config.ScaleBytes", "4 is not in 0 … 0"}},
		{func(c *Config) { c.Scale = PerPage }, []string{"Config.ScaleBytes", "0 is not in 1 … 64"}},
		{func(c *Config) { c.Scale, c.ScaleBytes = PerPage, 65 }, []string{"Config.ScaleBytes", "65 is not in 1 … 64"}},
		{func(c *Config) { *c = smallMLA; c.Scale, c.ScaleBytes = PerHead, 4 }, []string{"Config.Scale", "MLA has no heads"}},
		{func(c *Config) { c.StateBytes = -1 }, []string{"Config.StateBytes", "-1 is not in 0 … 1099511627776"}},
		{func(c *Config) { c.PageAlign = -1 }, []string{"Config.PageAlign", "-1 is not in 0 … 1073741824"}},
		{func(c *Config) { c.PageAlign = MaxPageAlign + 1 }, []string{"Config.PageAlign", "1073741825"}},
		{func(c *Config) { c.DType = INT4 }, []string{"Config.HeadDim", "5 is odd", "int4"}},
		{func(c *Config) { *c = smallMLA; c.DType, c.LatentDim = FP4, 3 }, []string{"Config.LatentDim", "3 is odd", "fp4"}},
		{func(c *Config) { c.Layout, c.StateBytes = 0, 9 }, []string{"Config.KVHeads", "2 is not in 0 … 0"}},
		{
			func(c *Config) {
				*c = Config{Layers: 1, Pages: 1, PageSize: 1, StateBytes: 9, Scale: PerPage, ScaleBytes: 1}
			},
			[]string{"Config.Scale", "no rows"},
		},
		{func(c *Config) { c.FirstLayer = -1 }, []string{"Config.FirstLayer", "-1"}},
		{func(c *Config) { c.FirstLayer = MaxID - 1 }, []string{"Config.FirstLayer", "1048575", "0 … 1048573"}},
		{func(c *Config) { c.FirstHead = MaxID }, []string{"Config.FirstHead", "1048576", "0 … 1048574"}},
		{
			func(c *Config) { c.Pages, c.PageSize, c.KVHeads = MaxPages, MaxPageSize, MaxHeads },
			[]string{"Config.Pages", "2147483647 pages of 3 layers", fmt.Sprint(int64(math.MaxInt64))},
		},
	} {
		config := small.with(c.change)
		for _, a := range arrangements {
			_, err := a.make(config)
			faulttest.Refused(t, err, fault.Invalid, c.mentions...)
		}
	}
}

func TestConfig_ZeroLayersArePagesWithoutBytes(t *testing.T) {
	for _, a := range arrangements {
		g := must(a.make(Config{Pages: 5, PageSize: 16}))(t)
		if g.PageBytes() != 0 || g.Bytes() != 0 || g.Regions() != 0 || g.Pages() != 5 {
			t.Errorf("%s: %d bytes a page, %d in all, %d regions, %d pages", a.name, g.PageBytes(), g.Bytes(), g.Regions(), g.Pages())
		}
		packed := must(g.Packed(3))(t)
		if err := Exchangeable(g, packed); err != nil {
			t.Error(err)
		}
	}
}

// base is a legal spec of two regions, mutated by the tests.
func base() Spec {
	return Spec{
		Layout: NHD, DType: FP16, Pages: 3, PageSize: 2, RegionBytes: []int64{1000, 500},
		Layers: []Layer{
			{ID: 1, FirstHead: 4, Heads: 2, Dim: 3, Planes: []Plane{
				{Kind: K, PageStride: 48, TokenStride: 12, HeadStride: 6, Bytes: 24},
				{Kind: V, Offset: 24, PageStride: 48, TokenStride: 12, HeadStride: 6, Bytes: 24},
				{Kind: Scale, Region: 1, PageStride: 10, TokenStride: 4, Bytes: 8},
			}},
			{ID: 0, Heads: 1, Dim: 1, Planes: []Plane{
				{Kind: KV, Offset: 200, PageStride: 8, TokenStride: 4, HeadStride: 4, KVStride: 2, Bytes: 8},
				{Kind: State, Region: 1, Offset: 100, PageStride: 77, Bytes: 77},
			}},
		},
	}
}

func TestNewGeometry_ErrorsNameFieldValueAndLimit(t *testing.T) {
	if _, err := NewGeometry(base()); err != nil {
		t.Fatal("the legal spec is refused: ", err)
	}
	for _, c := range []struct {
		change   func(*Spec)
		mentions string // separated by |
	}{
		{func(s *Spec) { s.Pages = 0 }, "Spec.Pages|0 is not in 1 … 2147483647"},
		{func(s *Spec) { s.PageSize = -4 }, "Spec.PageSize|-4 is not in 1 … 1048576"},
		{func(s *Spec) { s.Layout = 4 }, "Spec.Layout|4 is not in 0 … 3"},
		{func(s *Spec) { s.DType = 8 }, "Spec.DType|8 is not in 0 … 7"},
		{func(s *Spec) { s.Layout = 0 }, "Spec.Layout|none"},
		{func(s *Spec) { s.DType = 0 }, "Spec.DType|none"},
		{func(s *Spec) { s.Layout = MLA }, "Spec.Layers[0].Planes|1 of K, 1 of V|MLA"},
		{func(s *Spec) { s.Layers = make([]Layer, MaxLayers+1) }, "Spec.Layers|1025|0 … 1024"},
		{func(s *Spec) { s.Layers[0].Planes = make([]Plane, MaxPlanes+1) }, "Spec.Layers[].Planes|4099|0 … 4096"},
		{func(s *Spec) { s.RegionBytes = make([]int64, MaxPlanes+1) }, "Spec.RegionBytes|4097|0 … 4096"},
		{func(s *Spec) { s.RegionBytes[1] = -1 }, "Spec.RegionBytes[1]|-1"},
		{func(s *Spec) { s.RegionBytes[1] = math.MaxInt64 }, "Spec.RegionBytes[1]|9223372036854775807 bytes, after 1000"},
		{func(s *Spec) { s.Layers[1].ID = 1 }, "Spec.Layers[1].ID|1 is the id of Layers[0]"},
		{func(s *Spec) { s.Layers[1].ID = MaxID }, "Spec.Layers[1].ID|1048576 is not in 0 … 1048575"},
		{func(s *Spec) { s.Layers[0].FirstHead = MaxID }, "Spec.Layers[0].FirstHead|1048576 is not in 0 … 1048574"},
		{func(s *Spec) { s.Layers[0].Heads = 0 }, "Spec.Layers[0].Heads|0 is not in 1 … 65536"},
		{func(s *Spec) { s.Layers[0].Dim = MaxDim + 1 }, "Spec.Layers[0].Dim|1048577 is not in 1 … 1048576"},
		{func(s *Spec) { s.Layers[1].Planes = nil }, "Spec.Layers[1].Planes|empty"},
		{func(s *Spec) { s.Layers[0].Planes = s.Layers[0].Planes[1:] }, "Spec.Layers[0].Planes|0 of K, 1 of V"},
		{func(s *Spec) { s.Layers[0].Planes[0].Kind = 8 }, "Spec.Layers[0].Planes[0].Kind|8"},
		{func(s *Spec) { s.Layers[0].Planes[0].Kind = 0 }, "Spec.Layers[0].Planes[0].Kind|none"},
		{func(s *Spec) { s.Layers[0].Planes[0].Region = 2 }, "Spec.Layers[0].Planes[0].Region|2 is not in 0 … 1"},
		{func(s *Spec) { s.Layers[0].Planes[0].Region = -1 }, "Spec.Layers[0].Planes[0].Region|-1 is not in 0 … 1"},
		{func(s *Spec) { s.Layers[0].Planes[0].Offset = -1 }, "Spec.Layers[0].Planes[0].Offset|-1"},
		{func(s *Spec) { s.Layers[0].Planes[0].PageStride = 23 }, "Spec.Layers[0].Planes[0].PageStride|23 is not in 24"},
		{func(s *Spec) { s.Layers[0].Planes[0].TokenStride = 13 }, "Spec.Layers[0].Planes[0].TokenStride|13 is not 12"},
		{func(s *Spec) { s.Layers[0].Planes[0].HeadStride = 5 }, "Spec.Layers[0].Planes[0].HeadStride|5 is not 6"},
		{func(s *Spec) { s.Layers[0].Planes[0].Bytes = 23 }, "Spec.Layers[0].Planes[0].Bytes|23 is not 24"},
		{func(s *Spec) { s.Layers[0].Planes[2].Bytes = 7 }, "Spec.Layers[0].Planes[2].TokenStride|4 is not 3"},
		{func(s *Spec) { s.Layers[0].Planes[2].Bytes = 9 }, "Spec.Layers[0].Planes[2].Bytes|9 is not 8"},
		{func(s *Spec) { s.Layers[0].Planes[2].TokenStride = math.MaxInt64 }, "Spec.Layers[0].Planes[2].TokenStride|9223372036854775807 is not 4"},
		{func(s *Spec) { s.Layers[0].Planes[2].HeadStride = 3 }, "Spec.Layers[0].Planes[2].HeadStride|3 is not 2"},
		{func(s *Spec) { s.Layers[0].Planes[2].HeadStride = -2 }, "Spec.Layers[0].Planes[2].HeadStride|-2 is not 0"},
		{func(s *Spec) { s.Layers[0].Planes[2].TokenStride, s.Layers[0].Planes[2].HeadStride = 0, 3 }, "Spec.Layers[0].Planes[2].HeadStride|3 is not 4"},
		{func(s *Spec) { s.Layers[1].Planes[0].KVStride = 0 }, "Spec.Layers[1].Planes[0].KVStride|0 is neither 2"},
		{func(s *Spec) { s.Layers[1].Planes[0].KVStride = 4 }, "Spec.Layers[1].Planes[0].KVStride|4 is neither 2|nor 2"},
		{func(s *Spec) { s.Layers[0].Planes[0].KVStride = 6 }, "Spec.Layers[0].Planes[0].KVStride|6 is not 0"},
		{func(s *Spec) { s.DType = INT4 }, "Spec.Layers[0].Dim|3 is odd|int4"},
		{func(s *Spec) { s.Layers[1].Planes[1].TokenStride = 7 }, "Spec.Layers[1].Planes[1].TokenStride|7 is not 0"},
		{func(s *Spec) { s.Layers[1].Planes[1].Bytes = 0 }, "Spec.Layers[1].Planes[1].Bytes|0 is not in 1"},
		{func(s *Spec) { s.RegionBytes[1] = 330 }, "Spec.Layers[1].Planes[1].Offset|3 pages of 77 bytes|330 bytes of region 1"},
		{func(s *Spec) { s.Layers[1].Planes[1].Offset = math.MaxInt64 }, "Spec.Layers[1].Planes[1].Offset|9223372036854775807"},
		{func(s *Spec) { s.Layers[1].Planes[1].PageStride = math.MaxInt64 / 2 }, "Spec.Layers[1].Planes[1].Offset|4611686018427387903 apart"},
		{func(s *Spec) { s.Layers[0].Planes[1].Offset = 23 }, "Spec.Layers[0].Planes[1]|24 bytes at 23, stride 48|24 bytes at 0"},
		{func(s *Spec) { s.Layers[1].Planes[0].Offset = 40 }, "Spec.Layers[1].Planes[0]|8 bytes at 40, stride 8|24 bytes at 0, stride 48"},
		{
			func(s *Spec) {
				s.Pages, s.RegionBytes = MaxPages, []int64{math.MaxInt64}
				s.Layers = []Layer{{Planes: []Plane{
					{Kind: Opaque, PageStride: 4, Bytes: 1}, {Kind: Opaque, Offset: 1, PageStride: 8, Bytes: 1},
				}}}
			}, "Spec.Layers[0].Planes[1].PageStride|8 interleaves with the stride 4|2147483647 pages",
		},
	} {
		s := base()
		c.change(&s)
		_, err := NewGeometry(s)
		kind := fault.Invalid
		if strings.Contains(c.mentions, "interleaves") {
			kind = fault.Unsupported
		}
		faulttest.Refused(t, err, kind, strings.Split(c.mentions, "|")...)
	}
}

// TestNewGeometry_OverlapIsFoundExactly tries every pair of small planes.
func TestNewGeometry_OverlapIsFoundExactly(t *testing.T) {
	const region = 64
	verdicts := map[bool]int{}
	check := func(pages int, planes ...Plane) {
		var owned [region]bool
		want := false
		for _, p := range planes {
			for i := range int64(pages) {
				for b := range p.Bytes {
					at := p.Offset + i*p.PageStride + b
					want = want || owned[at]
					owned[at] = true
				}
			}
		}
		_, err := NewGeometry(Spec{Pages: pages, PageSize: 1, RegionBytes: []int64{region}, Layers: []Layer{{Planes: planes}}})
		if (err != nil) != want {
			t.Fatalf("overlap is %v, the error %v, of %d pages of %+v", want, err, pages, planes)
		}
		verdicts[want]++
	}
	for pages := 1; pages <= 4; pages++ {
		for s := int64(1); s <= 5; s++ {
			for u := int64(1); u <= 5; u++ {
				for m := int64(1); m <= s; m++ {
					for n := int64(1); n <= u; n++ {
						for off := range int64(22) {
							a := Plane{Kind: Opaque, PageStride: s, Bytes: m}
							b := Plane{Kind: Opaque, Offset: off, PageStride: u, Bytes: n}
							check(pages, a, b)
							check(pages, b, a)
						}
					}
				}
			}
		}
	}
	if verdicts[true] < 1000 || verdicts[false] < 1000 {
		t.Errorf("overlapping or not: %v", verdicts)
	}
}

// leaves visits every number and flag inside v.
func leaves(v reflect.Value, path string, visit func(path string, leaf reflect.Value)) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			leaves(v.Field(i), path+"."+v.Type().Field(i).Name, visit)
		}
	case reflect.Slice:
		for i := range v.Len() {
			leaves(v.Index(i), fmt.Sprintf("%s[%d]", path, i), visit)
		}
	default:
		visit(path, v)
	}
}

// change makes a leaf another value.
func change(leaf reflect.Value) {
	switch leaf.Kind() {
	case reflect.Bool:
		leaf.SetBool(!leaf.Bool())
	case reflect.Uint8:
		leaf.SetUint(leaf.Uint() + 1)
	default:
		leaf.SetInt(leaf.Int() + 1)
	}
}

func TestFingerprint_ChangesWithEveryField(t *testing.T) {
	s := base()
	seen := map[Fingerprint]string{fingerprint(&s): "the original"}
	note := func(path string, s Spec) {
		f := fingerprint(&s)
		if other, twice := seen[f]; twice {
			t.Errorf("changing %s gives the fingerprint of %s", path, other)
		}
		seen[f] = path
	}
	leaves(reflect.ValueOf(&s).Elem(), "", func(path string, leaf reflect.Value) {
		old := reflect.New(leaf.Type()).Elem()
		old.Set(leaf)
		change(leaf)
		note(path, s.clone())
		leaf.Set(old)
	})
	for path, edit := range map[string]func(*Spec){
		"one region more": func(s *Spec) { s.RegionBytes = append(s.RegionBytes, 0) },
		"one layer less":  func(s *Spec) { s.Layers = s.Layers[:1] },
		"one plane less":  func(s *Spec) { s.Layers[0].Planes = s.Layers[0].Planes[:2] },
		"no regions":      func(s *Spec) { s.RegionBytes = nil },
	} {
		c := s.clone()
		edit(&c)
		note(path, c)
	}
	if len(seen) < 55 {
		t.Errorf("only %d fields were changed", len(seen))
	}
	g, h := must(NewGeometry(base()))(t), must(NewGeometry(base()))(t)
	if g.Fingerprint() != h.Fingerprint() {
		t.Error("equal geometries have different fingerprints")
	}
	// The encoding is a promise to other processes and versions.
	const golden = "a7c7bc2e91f9c3b1c8a95fd394eb8e2f"
	if got := g.Fingerprint().String(); got != golden {
		t.Errorf("fingerprint is %s, was %s", got, golden)
	}
}

func TestExchangeable_NamesTheFieldThatDiffers(t *testing.T) {
	made := func(s Spec) *Geometry { return &Geometry{spec: s, sorted: s.sorted()} } // valid or not
	for _, c := range []struct {
		change   func(*Spec)
		mentions string
	}{
		{func(s *Spec) { s.Layout = HND }, "layout|NHD and HND"},
		{func(s *Spec) { s.DType = BF16 }, "dtype|fp16 and bf16"},
		{func(s *Spec) { s.PageSize = 9 }, "page size|2 and 9"},
		{func(s *Spec) { s.Layers = s.Layers[:1] }, "number of layers|2 and 1"},
		{func(s *Spec) { s.Layers[0].ID = 7 }, "set of layers|layer 1 and layer 7"},
		{func(s *Spec) { s.Layers[0].FirstHead = 0 }, "layer 1: first head|4 and 0"},
		{func(s *Spec) { s.Layers[0].Heads = 3 }, "layer 1: number of heads|2 and 3"},
		{func(s *Spec) { s.Layers[0].Dim = 4 }, "layer 1: head dim|3 and 4"},
		{func(s *Spec) { s.Layers[0].Planes = s.Layers[0].Planes[:2] }, "layer 1: number of planes|3 and 2"},
		{func(s *Spec) { s.Layers[1].Planes[1].Kind = Opaque }, "layer 0: kind of plane 1|state and opaque"},
		{func(s *Spec) { s.Layers[1].Planes[1].Bytes = 76 }, "layer 0: plane state: bytes a page|77 and 76"},
		{func(s *Spec) { s.Layers[0].Planes[2].TokenStride = 0 }, "layer 1: plane scale: token stride|4 and 0"},
		{func(s *Spec) { s.Layers[0].Planes[0].HeadStride = 9 }, "layer 1: plane K: head stride|6 and 9"},
		{func(s *Spec) { s.Layers[1].Planes[0].KVStride = 4 }, "layer 0: plane KV: distance from K to V|2 and 4"},
	} {
		s := base()
		c.change(&s)
		err := Exchangeable(made(base()), made(s))
		faulttest.Refused(t, err, fault.Invalid, strings.Split(c.mentions, "|")...)
		if fault.RemedyOf(err) == "" {
			t.Errorf("%v has no remedy", err)
		}
	}
	s := base()
	s.Pages, s.Sink, s.RegionBytes = 2, true, []int64{9000, 9000, 9000}
	s.Layers[0], s.Layers[1] = s.Layers[1], s.Layers[0]
	for i := range s.Layers {
		for j := range s.Layers[i].Planes {
			p := &s.Layers[i].Planes[j]
			p.Region, p.Offset, p.PageStride = 2, p.Offset+int64(1000*(i*3+j)), p.PageStride+5
		}
	}
	if err := Exchangeable(made(base()), must(NewGeometry(s))(t)); err != nil {
		t.Error("pages, sink, order of layers and places may differ: ", err)
	}
}

func TestGeometry_PackedIsOneStretchAPage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawPlaced(t, drawModel(t))
		pages := rapid.IntRange(1, 9).Draw(t, "packed pages")
		p, err := g.Packed(pages)
		if err != nil {
			t.Fatal(err)
		}
		if err := Exchangeable(g, p); err != nil {
			t.Fatal(err)
		}
		if p.Pages() != pages || p.Bytes() != g.PageBytes()*int64(pages) || p.PageBytes() != g.PageBytes() || p.Sink() {
			t.Fatalf("%d pages of %d bytes, %d in all, sink %v", p.Pages(), p.PageBytes(), p.Bytes(), p.Sink())
		}
		if g.PageBytes() == 0 {
			return
		}
		var off int64
		for i, l := range p.spec.Layers {
			if l.ID != g.spec.Layers[i].ID {
				t.Fatalf("layer %d is at position %d", l.ID, i)
			}
			last := PlaneKind(0)
			for _, pl := range l.Planes {
				if pl.Offset != off || pl.Kind < last || pl.PageStride != g.PageBytes() {
					t.Fatalf("plane %+v, want offset %d", pl, off)
				}
				off, last = off+pl.Bytes, pl.Kind
			}
		}
		c := wrapped(t, p, 1)
		whole := c.regions[0].Bytes()
		for i := range pages {
			b, err := c.Page(page.ID(i))
			if err != nil || &b[0] != &whole[int64(i)*p.PageBytes()] || int64(len(b)) != p.PageBytes() {
				t.Fatalf("page %d: %d bytes, %v", i, len(b), err)
			}
		}
	})
	g := must(small.LayerMajor())(t)
	for _, pages := range []int{0, -1, MaxPages + 1} {
		_, err := g.Packed(pages)
		faulttest.Refused(t, err, fault.Invalid, "pages", fmt.Sprint(pages), fmt.Sprint(MaxPages))
	}
	huge := must(Config{Layout: MLA, DType: FP32, Layers: 1, Pages: 1, PageSize: MaxPageSize, LatentDim: MaxDim}.PageMajor())(t)
	_, err := huge.Packed(MaxPages)
	faulttest.Refused(t, err, fault.Invalid, "pages", "2147483647")
}

func TestOpaqueSpec_IsBasePlusStrides(t *testing.T) {
	s := OpaqueSpec{Layers: 3, Blocks: 4, PageSize: 16, FirstLayer: 5, BlockBytes: 6, Offset: 7, LayerStride: 8, BlockStride: 30, RegionBytes: 200}
	g := must(s.Geometry())(t)
	for layer := range 3 {
		for block := range 4 {
			chunks := must(g.Chunks(nil, []uintptr{1000}, layer, page.ID(block), 0, 16))(t)
			off := int64(7 + layer*8 + block*30)
			want := []Chunk{{Kind: Opaque, Off: off, Addr: uintptr(1000 + off), Bytes: 6}}
			if d := cmp.Diff(want, chunks); d != "" {
				t.Errorf("layer %d block %d: %s", layer, block, d)
			}
		}
	}
	_, err := g.Chunks(nil, []uintptr{0}, 0, 0, 0, 15)
	faulttest.Refused(t, err, fault.Unsupported, "[0, 15)", "layer 5")
	for _, c := range []struct {
		change   func(*OpaqueSpec)
		mentions string
	}{
		{func(s *OpaqueSpec) { s.Layers = -1 }, "OpaqueSpec.Layers|-1"},
		{func(s *OpaqueSpec) { s.Layers = 1 << 40 }, "OpaqueSpec.Layers|1024"},
		{func(s *OpaqueSpec) { s.LayerStride = -8 }, "OpaqueSpec.LayerStride|-8"},
		{func(s *OpaqueSpec) { s.LayerStride = math.MaxInt64 }, "OpaqueSpec.LayerStride|9223372036854775807"},
		{func(s *OpaqueSpec) { s.LayerStride = 5 }, "Layers[1].Planes[0]|overlap"},
		{func(s *OpaqueSpec) { s.RegionBytes = 118 }, "Layers[2].Planes[0]|118"},
		{func(s *OpaqueSpec) { s.Offset = -1 }, "Offset|-1"},
	} {
		s := s
		c.change(&s)
		_, err := s.Geometry()
		faulttest.Refused(t, err, fault.Invalid, strings.Split(c.mentions, "|")...)
	}
}

func TestGeometry_IsACopyOfItsSpec(t *testing.T) {
	s := base()
	g := must(NewGeometry(s))(t)
	for _, edit := range []func() Spec{func() Spec { return s }, g.Spec} {
		c := edit()
		leaves(reflect.ValueOf(&c).Elem(), "", func(_ string, leaf reflect.Value) { change(leaf) })
	}
	l := must(g.Layer(0))(t)
	l.Planes[0].Offset = 99
	if d := cmp.Diff(base(), g.Spec()); d != "" {
		t.Error(d)
	}
	_, err := g.Layer(2)
	faulttest.Refused(t, err, fault.Invalid, "layer", "2 is not in 0 … 1")
}

func TestNames_ParseWhatTheyPrint(t *testing.T) {
	for l := Layout(0); l <= MLA; l++ {
		if back, err := ParseLayout(strings.ToLower(l.String())); err != nil || back != l {
			t.Errorf("%v: %v, %v", l, back, err)
		}
	}
	for d := DType(0); d <= FP4; d++ {
		if back, err := ParseDType(strings.ToUpper(d.String())); err != nil || back != d {
			t.Errorf("%v: %v, %v", d, back, err)
		}
	}
	_, err := ParseLayout("DNH")
	faulttest.Refused(t, err, fault.Invalid, "layout", `"DNH"`)
	if !strings.Contains(fault.RemedyOf(err), "NHD HND MLA") {
		t.Errorf("remedy %q does not list the layouts", fault.RemedyOf(err))
	}
	_, err = ParseDType("int3")
	faulttest.Refused(t, err, fault.Invalid, "dtype", `"int3"`)
}
