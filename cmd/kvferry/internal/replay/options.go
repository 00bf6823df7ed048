package replay

import (
	"math"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
)

// Auto asks for the default number of pages of a pool, or for fewer if the
// machine has less memory than that.
const Auto = -1

// The default pools.
const (
	DefaultDevicePages = 2048
	DefaultHostPages   = 8192
)

// The ways of keeping a page that is on the device and on the host.
const (
	Exclusive = "exclusive" // a page lives in one of them: a promotion frees the host page
	Inclusive = "inclusive" // a promotion leaves the host page where it is
	// Every page that is put, or used, is copied to the host too, unless it is there.
	WriteThrough = "write-through"
)

// How much of a page that was hit is compared with what was written.
const (
	VerifyFull   = "full"
	VerifySample = "sample" // the first, the last and one seeded 64-byte line of every chunk
	VerifyOff    = "off"
)

// maxPages is the most pages of one pool; page ids are 32-bit and one page may
// be the sink.
const maxPages = math.MaxInt32 - 1

// Options say what is replayed over what. Start from [DefaultOptions].
type Options struct {
	Trace    string // path of a trace; "" = the built-in chat load
	Requests int    // replay the first so many; 0 = all, or DefaultRequests of the built-in load
	Seed     uint64 // of the built-in load, and of the lines that VerifySample looks at

	DevicePages int // without the sink; or Auto
	HostPages   int // 0 = no host pool; or Auto
	PageSize    int // tokens; see CheckPageSize

	// Geometry. Zero or "" means not given: Resolve takes it from the model, or
	// from the small default geometry.
	Model     string
	Layers    int
	KVHeads   int
	HeadDim   int
	LatentDim int    // MLA, instead of KVHeads and HeadDim
	DType     string // a name that kv.ParseDType knows
	Layout    string // a name that kv.ParseLayout knows

	// Device is what holds the device pages: a name that accel.Parse knows, "" = the host.
	Device    string
	Libraries accel.Libraries
	Copier    string // "" = the one that a self-test chooses

	Tiers       string
	Checks      string // a name that hostpool.ParseChecks knows
	Verify      string // "" = VerifyFull, or VerifyOff with Bookkeeping
	Bookkeeping bool   // pages have no bytes: a geometry of zero layers

	Compare bool // work out what other policies would have hit
	Sweep   bool // for RunSweep: do not replay, work out what other pools would hit
}

// DefaultOptions replay the built-in chat load over small pools.
func DefaultOptions() Options {
	return Options{
		Seed:        1,
		DevicePages: Auto,
		HostPages:   Auto,
		PageSize:    IDTokens,
		Tiers:       Exclusive,
		Checks:      hostpool.ChecksAlways.String(),
	}
}

// Resolve checks everything that can be checked without making pools or reading
// the trace, and fills in what was not given, except Auto. Errors name the flag,
// its value and the limit. Kinds: fault.Invalid.
func (o Options) Resolve() (Options, error) {
	if o.Requests < 0 || o.Requests > MaxRequests {
		return o, fault.New(fault.Invalid, "--requests", "%d is not in 0…%d", o.Requests, MaxRequests).
			Hint("0 replays all")
	}
	if err := CheckPageSize(o.PageSize); err != nil {
		return o, err
	}
	if o.DevicePages != Auto && (o.DevicePages < 1 || o.DevicePages > maxPages) {
		return o, fault.New(fault.Invalid, "--device-pages", "%d pages is not in 1…%d", o.DevicePages, maxPages).
			Hint("the default is --device-pages %d", DefaultDevicePages)
	}
	if o.HostPages != Auto && (o.HostPages < 0 || o.HostPages > maxPages) {
		return o, fault.New(fault.Invalid, "--host-pages", "%d pages is not in 0…%d", o.HostPages, maxPages).
			Hint("0 replays without a host pool; the default is --host-pages %d", DefaultHostPages)
	}
	if _, _, err := accel.Parse(o.Device); err != nil {
		return o, err
	}
	if err := oneOf("--tiers", o.Tiers, Exclusive, Inclusive, WriteThrough); err != nil {
		return o, err
	}
	if o.Sweep {
		if err := o.checkSweep(); err != nil {
			return o, err
		}
	}
	if _, err := hostpool.ParseChecks(o.Checks); err != nil {
		return o, fault.Wrap(fault.Invalid, "--checks", err).Hint("%s", fault.RemedyOf(err))
	}
	if o.Verify == "" {
		o.Verify = VerifyFull
		if o.Bookkeeping {
			o.Verify = VerifyOff
		}
	}
	if err := oneOf("--verify", o.Verify, VerifyFull, VerifySample, VerifyOff); err != nil {
		return o, err
	}
	if o.Bookkeeping {
		return o.withoutBytes()
	}
	return o.withGeometry()
}

// withoutBytes refuses what would have no effect with Bookkeeping.
func (o Options) withoutBytes() (Options, error) {
	if o.Verify != VerifyOff {
		return o, fault.New(fault.Invalid, "--bookkeeping", "pages have no bytes, so --verify %s has nothing to look at", o.Verify).
			Hint("drop one of the two")
	}
	if vendor, _, _ := accel.Parse(o.Device); vendor != accel.Host {
		return o, fault.New(fault.Invalid, "--bookkeeping", "pages have no bytes, so --device %s has no effect", o.Device).
			Hint("drop one of the two")
	}
	for _, f := range o.geometryFlags() {
		if f.given {
			return o, fault.New(fault.Invalid, "--bookkeeping", "pages have no bytes, so %s has no effect", f.flag).
				Hint("drop one of the two")
		}
	}
	return o, nil
}

// checkSweep refuses what would have no effect with Sweep.
func (o Options) checkSweep() error {
	if o.Compare {
		return fault.New(fault.Invalid, "--sweep", "shows both policies of --compare for every size, and replays nothing to compare them with").
			Hint("drop one of the two")
	}
	for _, f := range []struct {
		flag  string
		given bool
	}{
		{"--bookkeeping", o.Bookkeeping},
		{"--tiers " + o.Tiers, o.Tiers != Exclusive},
		{"--verify", o.Verify != ""},
		{"--device " + o.Device, o.Device != "" && o.Device != accel.Host},
	} {
		if f.given {
			return fault.New(fault.Invalid, "--sweep", "nothing is replayed, so %s has no effect", f.flag).Hint("drop one of the two")
		}
	}
	return nil
}

type geometryFlag struct {
	flag  string
	given bool
}

func (o Options) geometryFlags() []geometryFlag {
	return []geometryFlag{
		{"--model", o.Model != ""},
		{"--layers", o.Layers != 0},
		{"--kv-heads", o.KVHeads != 0},
		{"--head-dim", o.HeadDim != 0},
		{"--latent-dim", o.LatentDim != 0},
		{"--dtype", o.DType != ""},
		{"--layout", o.Layout != ""},
	}
}

// withGeometry fills in the geometry. What a model fixes (layers, heads, dims)
// may be repeated but not contradicted; what an engine chooses (the dtype of
// the cache, the order of the axes) may be changed.
func (o Options) withGeometry() (Options, error) {
	base := model{layers: 4, kvHeads: 2, dim: 8, dtype: "bf16"}
	if o.Model != "" {
		m, err := findModel(o.Model)
		if err != nil {
			return o, err
		}
		base = m
	} else if o.LatentDim != 0 || strings.EqualFold(o.Layout, kv.MLA.String()) {
		base.kvHeads, base.dim = 0, 0
	}
	layout := kv.NHD
	if base.kvHeads == 0 {
		layout = kv.MLA
	}
	if o.Layout != "" {
		l, err := kv.ParseLayout(strings.ToUpper(o.Layout))
		if err != nil {
			return o, fault.Wrap(fault.Invalid, "--layout", err).Hint("%s", fault.RemedyOf(err))
		}
		if (l == kv.MLA) != (layout == kv.MLA) {
			return o, fault.New(fault.Invalid, "--layout", "%s contradicts %s", l, o.whatFixes()).
				Hint("MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim")
		}
		layout = l
	}
	o.Layout = layout.String()

	if o.DType == "" {
		o.DType = base.dtype
	}
	dtype, err := kv.ParseDType(strings.ToLower(o.DType))
	if err != nil {
		return o, fault.Wrap(fault.Invalid, "--dtype", err).Hint("%s", fault.RemedyOf(err))
	}
	o.DType = dtype.String()

	for _, f := range []struct {
		flag  string
		value *int
		base  int  // what the model or the default says
		most  int  // what a geometry can have
		used  bool // whether this layout has it
	}{
		{"--layers", &o.Layers, base.layers, kv.MaxLayers, true},
		{"--kv-heads", &o.KVHeads, base.kvHeads, kv.MaxHeads, layout != kv.MLA},
		{"--head-dim", &o.HeadDim, base.dim, kv.MaxDim, layout != kv.MLA},
		{"--latent-dim", &o.LatentDim, base.latent, kv.MaxDim, layout == kv.MLA},
	} {
		given := *f.value
		switch {
		case given < 0 || given > f.most:
			return o, fault.New(fault.Invalid, f.flag, "%d is not in 1…%d", given, f.most)
		case given != 0 && !f.used:
			return o, fault.New(fault.Invalid, f.flag, "layout %s has none, yet %d was given", layout, given).
				Hint("MLA goes with --latent-dim, NHD and HND with --kv-heads and --head-dim")
		case given != 0 && o.Model != "" && given != f.base:
			return o, fault.New(fault.Invalid, f.flag, "%d contradicts --model %s, which has %d", given, o.Model, f.base).
				Hint("drop one of the two")
		case given == 0 && f.used && f.base == 0:
			return o, fault.New(fault.Invalid, f.flag, "layout %s needs it", layout).
				Hint("for example --latent-dim 576, as --model deepseek-v3 has")
		case given == 0:
			*f.value = f.base
		}
	}
	return o, nil
}

// whatFixes names what decided that the geometry is MLA, or is not. Without a
// model only a latent dim can contradict the layout that was asked for.
func (o Options) whatFixes() string {
	if o.Model != "" {
		return "--model " + o.Model
	}
	return "--latent-dim"
}

// CheckFits refuses a device pool that cannot hold the largest request of the
// trace: it could never be served. devicePages does not count the sink.
// Kinds: fault.Invalid, naming the request.
func CheckFits(t *Trace, pageSize, devicePages int) error {
	i, need := t.Largest(pageSize)
	if need <= devicePages {
		return nil
	}
	return fault.New(fault.Invalid, "--device-pages", "%d pages, but %s has %d tokens and needs %d pages of %d tokens",
		devicePages, t.Where(i), t.Requests[i].Input, need, pageSize).Hint("give --device-pages %d or more", need)
}

func oneOf(flag, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fault.New(fault.Invalid, flag, "no such choice: %q", value).Hint("there are %s", strings.Join(allowed, ", "))
}
