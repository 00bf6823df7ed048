package replay

import (
	"encoding/json"
	"io"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
)

// Result is what a replay found out. It is flat, and its JSON keys are stable.
// A pointer is nil, and null in JSON, where nothing was measured: a 0 is always
// a measured 0. Rates of bytes are in GB/s (10^9), shares are parts of 1.
type Result struct {
	Version     string  `json:"version"`
	Trace       string  `json:"trace"`        // Trace.Name
	TraceSHA256 *string `json:"trace_sha256"` // nil for the built-in load
	Seed        uint64  `json:"seed"`
	Requests    int64   `json:"requests"`
	Tokens      int64   `json:"tokens"` // of the prompts

	// Geometry and pools.
	PageSize    int64   `json:"page_size"`
	Model       *string `json:"model"`  // nil when none was named
	Layers      int64   `json:"layers"` // 0 with Bookkeeping
	KVHeads     *int64  `json:"kv_heads"`
	HeadDim     *int64  `json:"head_dim"`
	LatentDim   *int64  `json:"latent_dim"` // MLA
	DType       *string `json:"dtype"`
	Layout      *string `json:"layout"`
	PageBytes   int64   `json:"page_bytes"`
	DevicePages int64   `json:"device_pages"` // without the sink
	HostPages   int64   `json:"host_pages"`
	Tiers       string  `json:"tiers"`
	Policy      string  `json:"policy"`
	Verify      string  `json:"verify"`
	Checks      string  `json:"checks"` // of the store: always, arrival or off
	Bookkeeping bool    `json:"bookkeeping"`

	// What the device pages are on, and what copied them.
	Device        string  `json:"device"`         // "host", "cuda:0"
	DeviceModel   *string `json:"device_model"`   // as its vendor calls it; nil for the host
	Copier        string  `json:"copier"`         //
	PinnedBytes   *int64  `json:"pinned_bytes"`   // of the host pool; nil for the host
	PageableBytes *int64  `json:"pageable_bytes"` // of the host pool, copied slowly

	// Every page looked up is a hit in one place or a miss for one reason.
	PagesLookedUp  int64    `json:"pages_looked_up"`
	PagesWhole     int64    `json:"pages_whole"`
	PagesHitDevice int64    `json:"pages_hit_device"`
	PagesHitHost   int64    `json:"pages_hit_host"`
	HitRatio       *float64 `json:"hit_ratio"`

	MissNeverStored  int64 `json:"miss_never_stored"`
	MissEvicted      int64 `json:"miss_evicted"`
	MissHistoryFull  int64 `json:"miss_history_full"`
	MissBeyondPrefix int64 `json:"miss_beyond_prefix"`
	MissHeldBack     int64 `json:"miss_held_back"`
	MissPartial      int64 `json:"miss_partial"`
	MissOther        int64 `json:"miss_other"` // a page being written, corrupted, or whose copy failed

	// HostPagesSuggested is a host pool that would have kept most of what was
	// evicted; nil when none was worked out.
	HostPagesSuggested *int64 `json:"host_pages_suggested"`

	// What was written, compared and moved.
	PagesWritten     int64  `json:"pages_written"`
	BytesWritten     *int64 `json:"bytes_written"`
	BytesVerified    *int64 `json:"bytes_verified"`
	Mismatches       *int64 `json:"mismatches"`
	PagesOffloaded   int64  `json:"pages_offloaded"`
	BytesOffloaded   *int64 `json:"bytes_offloaded"`
	PagesReloaded    int64  `json:"pages_reloaded"`
	BytesReloaded    *int64 `json:"bytes_reloaded"`
	PagesEvictedHost int64  `json:"pages_evicted_host"`

	// Speed. C is Go's copy of large pieces in the pools' own memory, R the best
	// bare loop over the same rows.
	CopyGBps     *float64 `json:"copy_gbps"`
	CeilingCGBps *float64 `json:"ceiling_c_gbps"`
	CeilingRGBps *float64 `json:"ceiling_r_gbps"`
	ShareOfC     *float64 `json:"share_of_c"`
	ShareOfR     *float64 `json:"share_of_r"`
	MatchP50us   *float64 `json:"match_p50_us"`
	MatchP99us   *float64 `json:"match_p99_us"`
	ReloadP50us  *float64 `json:"reload_p50_us"`
	ReloadP99us  *float64 `json:"reload_p99_us"`
	LookupsPerS  *float64 `json:"lookups_per_second"`

	// The store's own checks of bytes as they arrive in and leave host memory.
	CheckSeconds *float64 `json:"check_seconds"`
	CheckBytes   *int64   `json:"check_bytes"`

	// Where the time went. Seconds begins when the pools are ready.
	WarmupSeconds *float64 `json:"warmup_seconds"`
	Seconds       *float64 `json:"seconds"`
	WriteSeconds  *float64 `json:"write_seconds"`
	CopySeconds   *float64 `json:"copy_seconds"` // of the host; nil where nobody knows what copies take
	WaitSeconds   *float64 `json:"wait_seconds"` // else: for pages to be admitted, which is for copies and their checks
	VerifySeconds *float64 `json:"verify_seconds"`
	BooksSeconds  *float64 `json:"books_seconds"` // the rest: with CopySeconds, also what of the checks did not run beside copies

	PoolBytes       int64  `json:"pool_bytes"`
	GhostTableBytes *int64 `json:"ghost_table_bytes"` // what remembers evictions
	PeakRSSBytes    *int64 `json:"peak_rss_bytes"`

	// Hit ratios of other policies on the same trace, over as many pages as both
	// pools have together; nil without Compare.
	OptimumHitRatio *float64 `json:"optimum_hit_ratio"`
	LRUHitRatio     *float64 `json:"lru_hit_ratio"`

	Warnings []string `json:"warnings"`
	Error    *Failure `json:"error"`
}

// Failure is what ended a replay. The fields after Message are known for a
// wrong byte.
type Failure struct {
	Kind    string `json:"kind"` // the name of the fault.Kind
	Message string `json:"message"`
	Page    *int64 `json:"page"`
	Layer   *int64 `json:"layer"`
	Offset  *int64 `json:"offset"` // bytes into the layer's part of the page
	Tier    string `json:"tier,omitempty"`
	History string `json:"history,omitempty"` // where the page has been
}

// NewResult returns the result of a replay that has not begun: what is known
// from resolved options and the trace. The sizes of pools and pages are left to
// whoever makes them.
func NewResult(o Options, t *Trace) *Result {
	r := &Result{
		Trace: t.Name, Seed: o.Seed, Requests: int64(len(t.Requests)), Tokens: t.Tokens,
		PageSize: int64(o.PageSize), Layers: int64(o.Layers),
		Tiers: o.Tiers, Verify: o.Verify, Checks: o.Checks, Bookkeeping: o.Bookkeeping,
		Warnings: append([]string{}, t.Warnings...),
	}
	known := func(n int) *int64 {
		if n == 0 {
			return nil
		}
		return new(int64(n))
	}
	named := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	r.TraceSHA256, r.Model, r.DType, r.Layout = named(t.SHA256), named(o.Model), named(o.DType), named(o.Layout)
	r.KVHeads, r.HeadDim, r.LatentDim = known(o.KVHeads), known(o.HeadDim), known(o.LatentDim)
	return r
}

// named says what was opened.
func (r *Result) named(x *accel.Opened) {
	r.Device, r.Copier = x.Device.Name(), x.Copier.Name()
	if x.Accelerator != nil {
		r.DeviceModel = new(x.Accelerator.Attributes().Model)
	}
}

// Hits returns the pages that were hit, wherever they were.
func (r *Result) Hits() int64 { return r.PagesHitDevice + r.PagesHitHost }

// Misses returns the pages that were missed, for whatever reason.
func (r *Result) Misses() int64 {
	return r.MissNeverStored + r.MissEvicted + r.MissHistoryFull + r.MissBeyondPrefix + r.MissHeldBack + r.MissPartial + r.MissOther
}

// AddMiss counts n pages missed for a reason.
func (r *Result) AddMiss(reason fault.Reason, n int64) {
	switch reason {
	case fault.NeverStored:
		r.MissNeverStored += n
	case fault.Evicted:
		r.MissEvicted += n
	case fault.HistoryFull:
		r.MissHistoryFull += n
	case fault.BeyondPrefix:
		r.MissBeyondPrefix += n
	case fault.HeldBack:
		r.MissHeldBack += n
	case fault.Partial:
		r.MissPartial += n
	default:
		r.MissOther += n
	}
}

// Balance refuses a result whose pages are not all accounted for: looked up =
// hits + misses by reason. Kinds: fault.Corrupt.
func (r *Result) Balance() error {
	if r.Hits()+r.Misses() == r.PagesLookedUp {
		return nil
	}
	return fault.New(fault.Corrupt, "replay", "%d pages looked up, but %d hits and %d misses", r.PagesLookedUp, r.Hits(), r.Misses()).
		Hint("this is a bug in kvferry: please report it with the command line")
}

// WriteJSON writes the result as one indented JSON object.
func (r *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if r.Warnings == nil {
		withList := *r
		withList.Warnings = []string{}
		r = &withList
	}
	return e.Encode(r)
}
