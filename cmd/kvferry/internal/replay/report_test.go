package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// golden compares got with a file of testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s differs (-update rewrites it; read the difference):\n%s", name, d)
	}
}

// fullResult has a value in every field that a replay with bytes measures.
func fullResult() *Result {
	return &Result{
		Version: "v0.1.0", Trace: "conversation_trace.jsonl", TraceSHA256: new("b8cbb061"), Seed: 1,
		Requests: 12_031, Tokens: 144_793_823,
		PageSize: 512, Layers: 4, KVHeads: new(int64(2)), HeadDim: new(int64(8)), DType: new("bf16"), Layout: new("NHD"),
		PageBytes: 128 << 10, DevicePages: 2048, HostPages: 8192,
		Tiers: Exclusive, Policy: "lru", Verify: VerifyFull, Checks: "always",
		Device: "cuda:0", DeviceModel: new("Model X"), Copier: "cuda", PinnedBytes: new(int64(1 << 30)), PageableBytes: new(int64(0)),
		PagesLookedUp: 288_500, PagesWhole: 276_491, PagesHitDevice: 16_011, PagesHitHost: 47_052, HitRatio: new(0.21859),
		MissNeverStored: 170_899, MissEvicted: 42_529, MissPartial: 12_009,
		HostPagesSuggested: new(int64(48_000)),
		PagesWritten:       225_437, BytesWritten: new(int64(29_548_478_464)),
		BytesVerified: new(int64(8_265_793_536)), Mismatches: new(int64(0)),
		PagesOffloaded: 258_634, BytesOffloaded: new(int64(33_899_675_648)),
		PagesReloaded: 47_052, BytesReloaded: new(int64(6_167_199_744)), PagesEvictedHost: 203_390,
		CopyGBps: new(10.24), CeilingCGBps: new(21.4), CeilingRGBps: new(13.61), ShareOfC: new(0.4785), ShareOfR: new(0.7524),
		MatchP50us: new(3.04), MatchP99us: new(21.0), ReloadP50us: new(95.0), ReloadP99us: new(1904.0),
		LookupsPerS: new(3_120_000.0), CheckSeconds: new(1.11), CheckBytes: new(int64(46_234_075_136)),
		WarmupSeconds: new(1.31), Seconds: new(8.9), WriteSeconds: new(3.1), CopySeconds: new(3.9),
		VerifySeconds: new(1.6), BooksSeconds: new(0.31),
		PoolBytes: 1_342_308_352, GhostTableBytes: new(int64(1 << 20)), PeakRSSBytes: new(int64(1_395_864_371)),
		OptimumHitRatio: new(0.2689), LRUHitRatio: new(0.2186),
		Warnings: []string{"conversation_trace.jsonl:17: timestamp goes back from 9 to 7; requests are replayed in file order"},
	}
}

// failedResult is a replay that a wrong byte ended early.
func failedResult() *Result {
	return &Result{
		Trace: generatedName, Seed: 7, Requests: 1, Tokens: 600, PageSize: 512, Layers: 1, Tiers: Inclusive, Policy: "lru", Verify: VerifySample, Checks: "always",
		Error: &Failure{
			Kind: "corrupt", Message: "page 17, layer 3, offset 4096: wrong byte", Page: new(int64(17)), Layer: new(int64(3)),
			Offset: new(int64(4096)), Tier: "host", History: "written, offloaded, reloaded",
		},
	}
}

func TestResult_Text(t *testing.T) {
	books, _ := Options{PageSize: 512, Bookkeeping: true, Tiers: Exclusive, DevicePages: Auto, HostPages: Auto}.Resolve()
	bare := NewResult(books, Generate(1, 3))
	bare.DevicePages, bare.HostPages = 300, 0
	bare.PagesLookedUp, bare.MissNeverStored, bare.MissPartial, bare.MissHistoryFull, bare.MissOther = 10, 4, 3, 2, 1
	bare.LookupsPerS = new(1_234_567.0)

	model, _ := Options{PageSize: 512, Model: "deepseek-v3", Tiers: Inclusive, Verify: VerifyOff, Checks: "always", DevicePages: Auto, HostPages: Auto}.Resolve()
	mla := NewResult(model, Generate(1, 3))
	mla.PageBytes, mla.DevicePages, mla.HostPages = 61*576*2*512, 2048, 8192

	sample := fullResult()
	sample.Verify, sample.Mismatches, sample.HostPagesSuggested = VerifySample, new(int64(1)), nil

	for _, tc := range []struct {
		file string
		r    *Result
	}{
		{"full.txt", fullResult()},
		{"sample.txt", sample},
		{"bookkeeping.txt", bare},
		{"mla.txt", mla},
	} {
		t.Run(tc.file, func(t *testing.T) {
			var b bytes.Buffer
			if err := tc.r.WriteText(&b); err != nil {
				t.Fatal(err)
			}
			golden(t, tc.file, b.Bytes())
			for line := range strings.Lines(b.String()) {
				// Warnings are as long as they are.
				if n := utf8.RuneCountInString(line); n > 112 && !strings.HasPrefix(line, "warning") {
					t.Errorf("a line of %d characters: %s", n, line)
				}
				if strings.TrimRight(line, " \n") != strings.TrimRight(line, "\n") {
					t.Errorf("blanks at the end of %q", line)
				}
			}
		})
	}
}

func TestResult_JSON(t *testing.T) {
	for _, tc := range []struct {
		file string
		r    *Result
	}{
		{"full.json", fullResult()},
		{"wrong_byte.json", failedResult()},
	} {
		t.Run(tc.file, func(t *testing.T) {
			var b bytes.Buffer
			if err := tc.r.WriteJSON(&b); err != nil {
				t.Fatal(err)
			}
			golden(t, tc.file, b.Bytes())
		})
	}
}

func TestResult_TimeHasANameForEachPart(t *testing.T) {
	r := fullResult()
	on := fullResult()
	on.CopySeconds, on.WaitSeconds = nil, new(3.9)
	for want, r := range map[string]*Result{
		"8.9 s (write 3.1, copy 3.9, verify 1.6, checks and books 0.31)":    r,
		"8.9 s (write 3.1, waiting for copies 3.9, verify 1.6, books 0.31)": on,
	} {
		if got := (&text{r: r}).time(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestResult_JSONIsFlatAndCompleteAndReadsBack(t *testing.T) {
	keys := strings.Fields(`version trace trace_sha256 seed requests tokens page_size layers kv_heads head_dim dtype layout page_bytes
		device_pages host_pages tiers policy verify bookkeeping pages_looked_up pages_whole pages_hit_device pages_hit_host hit_ratio
		miss_never_stored miss_evicted miss_beyond_prefix miss_held_back miss_partial pages_written bytes_written bytes_verified mismatches
		pages_offloaded bytes_offloaded pages_reloaded bytes_reloaded pages_evicted_host copy_seconds copy_gbps ceiling_c_gbps
		ceiling_r_gbps share_of_c share_of_r match_p50_us match_p99_us reload_p50_us reload_p99_us lookups_per_second warmup_seconds wait_seconds books_seconds
		seconds pool_bytes peak_rss_bytes optimum_hit_ratio lru_hit_ratio warnings error`)
	for name, r := range map[string]*Result{"full": fullResult(), "zero": {}} {
		var b bytes.Buffer
		if err := r.WriteJSON(&b); err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			v, ok := m[k]
			if !ok {
				t.Errorf("%s: no key %s", name, k)
			}
			if _, nested := v.(map[string]any); nested && k != "error" {
				t.Errorf("%s: %s is not flat", name, k)
			}
		}
		if m["warnings"] == nil {
			t.Errorf("%s: warnings is null, want a list", name)
		}
		var back Result
		d := json.NewDecoder(bytes.NewReader(b.Bytes()))
		d.DisallowUnknownFields()
		if err := d.Decode(&back); err != nil {
			t.Fatal(err)
		}
		if r.Warnings == nil {
			back.Warnings = nil
		}
		if d := cmp.Diff(r, &back); d != "" {
			t.Errorf("%s: reads back differently:\n%s", name, d)
		}
	}
}

func TestResult_NothingMeasuredIsNullNeverZero(t *testing.T) {
	var b bytes.Buffer
	if err := new(Result).WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"hit_ratio", "copy_gbps", "bytes_verified", "mismatches", "seconds", "peak_rss_bytes", "kv_heads", "optimum_hit_ratio", "check_bytes"} {
		if !strings.Contains(b.String(), `"`+k+`": null`) {
			t.Errorf("%s is not null", k)
		}
	}
}

func TestResult_BalanceNoticesAPageWithoutAReason(t *testing.T) {
	r := &Result{PagesHitDevice: 1, PagesHitHost: 2}
	for reason := range fault.Reason(fault.NumReasons) {
		if reason != fault.Hit {
			r.AddMiss(reason, int64(reason))
		}
	}
	r.PagesLookedUp = 3 + r.Misses()
	if want := int64(fault.NumReasons) * (fault.NumReasons - 1) / 2; r.Misses() != want {
		t.Errorf("%d misses, want %d", r.Misses(), want)
	}
	if err := r.Balance(); err != nil {
		t.Error(err)
	}
	for _, off := range []int64{1, -1} {
		r.PagesLookedUp += off
		if err := r.Balance(); !errors.Is(err, fault.Corrupt) {
			t.Errorf("off by %d: %v", off, err)
		}
		r.PagesLookedUp -= off
	}
}

func TestNewResult_SaysWhatIsKnown(t *testing.T) {
	o, err := Options{PageSize: 256, Model: "qwen2.5-0.5b", Tiers: Inclusive, Seed: 9}.withGeometry()
	if err != nil {
		t.Fatal(err)
	}
	r := NewResult(o, &Trace{Name: "chat.jsonl", SHA256: "ab", Requests: make([]Request, 3), Tokens: 77, Warnings: []string{"w"}})
	want := &Result{
		Trace: "chat.jsonl", TraceSHA256: new("ab"), Seed: 9, Requests: 3, Tokens: 77, PageSize: 256, Model: new("qwen2.5-0.5b"),
		Layers: 24, KVHeads: new(int64(2)), HeadDim: new(int64(64)), DType: new("bf16"), Layout: new("NHD"), Tiers: Inclusive,
		Warnings: []string{"w"},
	}
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
}

func TestFormat(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{count(0), "0"},
		{count(999), "999"},
		{count(1000), "1,000"},
		{count(-1234567), "-1,234,567"},
		{millions(999_999), "999,999"},
		{millions(144_793_823), "144.8 M"},
		{millions(2_500_000_000), "2.5 G"},
		{volume(999), "999 B"},
		{volume(29_548_478_464), "29.5 GB"},
		{volume(8_265_793_536), "8.27 GB"},
		{volume(123_456_000), "123 MB"},
		{micros(3.04), "3.0 µs"},
		{micros(95.2), "95 µs"},
		{micros(1904), "1.90 ms"},
		{micros(250_000), "250 ms"},
		{micros(2_000_000), "2.0 s"},
		{seconds(0.31), "0.31 s"},
		{seconds(8.94), "8.9 s"},
		{seconds(125.3), "125 s"},
		{percent(16_011, 288_500), "5.5 %"},
		{percent(1, 1), "100.0 %"},
		{percent(0, 0), ""},
		{bar(16_011, 288_500), "██▊"},
		{bar(47_052, 288_500), "████████▏"},
		{bar(0, 9), ""},
		{bar(1, 1_000_000), "▏"},
		{bar(9, 9), strings.Repeat("█", 50)},
		{bar(10, 9), strings.Repeat("█", 50)},
		{bar(1, 0), ""},
	} {
		if tc.got != tc.want {
			t.Errorf("got %q, want %q", tc.got, tc.want)
		}
	}
}
