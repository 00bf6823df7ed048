package transfer

import (
	"fmt"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/replay"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// The ways in which a cache can lie, as bench copy has them.
const (
	LayerMajor = "layer-major" // one tensor, layer after layer
	PageMajor  = "page-major"  // one tensor, page after page, as a host pool has it
	KVFirst    = "kv-first"    // a tensor a layer: K of all pages, then V
)

// Shape is the geometry of a cache, as flags say it. Zero and "" mean not given.
type Shape struct {
	Model       string
	Layers      int
	KVHeads     int
	HeadDim     int
	LatentDim   int
	DType       string
	Layout      string
	PageSize    int // tokens
	Pages       int
	Arrangement string
}

// The cache of serve, when nothing is said of it: 128 MiB, in pages of 512 KiB.
const (
	defaultPages    = 256
	defaultPageSize = 16
	defaultLayers   = 16
	defaultHeads    = 8
	defaultHeadDim  = 64
)

// geometry makes what the flags say. Kind: fault.Invalid, fault.Unsupported.
func (s Shape) geometry() (*kv.Geometry, error) {
	if s.Pages < 1 || s.Pages > kv.MaxPages {
		return nil, fault.New(fault.Invalid, "--pages", "%d is not in 1…%d", s.Pages, kv.MaxPages)
	}
	if s.PageSize < 1 || s.PageSize > kv.MaxPageSize {
		return nil, fault.New(fault.Invalid, "--page-size", "%d is not in 1…%d", s.PageSize, kv.MaxPageSize)
	}
	m := replay.DefaultOptions()
	m.Model, m.Layers, m.KVHeads, m.HeadDim, m.LatentDim = s.Model, s.Layers, s.KVHeads, s.HeadDim, s.LatentDim
	m.DType, m.Layout = s.DType, s.Layout
	if s.Model == "" {
		m.Layers = orElse(m.Layers, defaultLayers)
		if s.LatentDim == 0 && !strings.EqualFold(s.Layout, kv.MLA.String()) {
			m.KVHeads, m.HeadDim = orElse(m.KVHeads, defaultHeads), orElse(m.HeadDim, defaultHeadDim)
		}
	}
	m, err := m.Resolve()
	if err != nil {
		return nil, err
	}
	c := kv.Config{Layers: m.Layers, KVHeads: m.KVHeads, HeadDim: m.HeadDim, LatentDim: m.LatentDim, PageSize: s.PageSize, Pages: s.Pages}
	if c.Layout, err = kv.ParseLayout(m.Layout); err != nil {
		return nil, err
	}
	if c.DType, err = kv.ParseDType(m.DType); err != nil {
		return nil, err
	}
	switch s.Arrangement {
	case "", PageMajor:
		return c.PageMajor()
	case LayerMajor:
		return c.LayerMajor()
	case KVFirst:
		if c.Layout == kv.MLA {
			return nil, fault.New(fault.Unsupported, "--arrangement", "%s keeps K and V apart, and MLA has one latent", KVFirst).
				Hint("use --arrangement %s or %s", LayerMajor, PageMajor)
		}
		return c.PerLayerKVFirst()
	}
	return nil, fault.New(fault.Invalid, "--arrangement", "no such choice: %q", s.Arrangement).
		Hint("there are %s, %s, %s", LayerMajor, PageMajor, KVFirst)
}

// like is a geometry of n pages that can be exchanged with those of far.
func like(far *kv.Geometry, n int, arrangement string) (*kv.Geometry, error) {
	switch arrangement {
	case "", PageMajor:
		return far.Packed(n)
	case LayerMajor:
		return far.PackedLayerMajor(n)
	}
	return nil, fault.New(fault.Invalid, "--arrangement", "no such choice: %q", arrangement).
		Hint("there are %s, %s", LayerMajor, PageMajor)
}

func orElse(n, otherwise int) int {
	if n == 0 {
		return otherwise
	}
	return n
}

// describe says what a page is, for people.
func describe(g *kv.Geometry) string {
	return fmt.Sprintf("%d %s, %d %s a page, %v, %v", g.Layers(), figures.Plural(g.Layers(), "layer", "layers"),
		g.PageSize(), figures.Plural(g.PageSize(), "token", "tokens"), g.DType(), g.Layout())
}
