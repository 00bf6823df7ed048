package replay

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
)

func TestCheckPageSize_AcceptsPartsAndMultiplesOfAnID(t *testing.T) {
	for _, n := range []int{1, 2, 16, 64, 256, 512, 1024, 1536, 5120, kv.MaxPageSize} {
		if err := CheckPageSize(n); err != nil {
			t.Errorf("%d: %v", n, err)
		}
	}
}

func TestCheckPageSize_NamesTheNearestThatFit(t *testing.T) {
	for _, tc := range []struct {
		size         int
		want, remedy string
	}{
		{0, "--page-size: 0 tokens is not in 1…1048576", "the default is --page-size 512"},
		{-16, "--page-size: -16 tokens is not in 1…1048576", "the default is --page-size 512"},
		{MaxTokens + 512, "--page-size: 16777728 tokens is not in 1…1048576", "the default is --page-size 512"},
		{3, "--page-size: 3 tokens neither divides 512 nor is a multiple of it, and a trace has one id for each 512 tokens", "the nearest sizes are --page-size 2 and --page-size 4"},
		{500, "--page-size: 500 tokens neither divides 512 nor is a multiple of it, and a trace has one id for each 512 tokens", "the nearest sizes are --page-size 256 and --page-size 512"},
		{700, "--page-size: 700 tokens neither divides 512 nor is a multiple of it, and a trace has one id for each 512 tokens", "the nearest sizes are --page-size 512 and --page-size 1024"},
	} {
		err := CheckPageSize(tc.size)
		if !errors.Is(err, fault.Invalid) || err.Error() != tc.want || fault.RemedyOf(err) != tc.remedy {
			t.Errorf("%d: %v (%s)", tc.size, err, fault.RemedyOf(err))
		}
	}
}

func TestAppendKeys_ChainsTheIDsOfWholePages(t *testing.T) {
	root := prefix.Fingerprint([]byte("test"))
	a := prefix.NextID(root, 7)
	b := prefix.NextID(a, 8)
	c := prefix.NextID(b, 9)
	d := prefix.NextID(c, 4)
	p0 := prefix.NextIDPart(root, 7, 0)
	p1 := prefix.NextIDPart(p0, 7, 1)
	p2 := prefix.NextIDPart(p1, 8, 0)
	for _, tc := range []struct {
		name            string
		input, pageSize int
		ids             []int64
		needed          int
		want            []page.Key
	}{
		{"a page is an id", 3 * 512, 512, []int64{7, 8, 9}, 3, []page.Key{a, b, c}},
		{"the last id is partial", 2*512 + 1, 512, []int64{7, 8, 9}, 3, []page.Key{a, b}},
		{"less than a page", 511, 512, []int64{7}, 1, nil},
		{"a page is two ids", 4 * 512, 1024, []int64{7, 8, 9, 4}, 2, []page.Key{b, d}},
		{"the second id of a page is missing", 3 * 512, 1024, []int64{7, 8, 9}, 2, []page.Key{b}},
		{"the second id of a page is partial", 4*512 - 1, 1024, []int64{7, 8, 9, 4}, 2, []page.Key{b}},
		{"two pages are an id", 512 + 256, 256, []int64{7, 8}, 3, []page.Key{p0, p1, p2}},
		{"a partial id with a whole page", 512 + 300, 256, []int64{7, 8}, 4, []page.Key{p0, p1, p2}},
		{"a partial id without", 512 + 255, 256, []int64{7, 8}, 3, []page.Key{p0, p1}},
	} {
		req := Request{Input: tc.input, IDs: tc.ids}
		got := AppendKeys(nil, root, &req, tc.pageSize)
		if d := cmp.Diff(tc.want, got); d != "" {
			t.Errorf("%s: %s", tc.name, d)
		}
		needed, whole := Pages(tc.input, tc.pageSize)
		if needed != tc.needed || whole != len(tc.want) {
			t.Errorf("%s: %d pages, %d whole; want %d and %d", tc.name, needed, whole, tc.needed, len(tc.want))
		}
	}
}

// Two prompts share the keys of exactly the whole pages that lie in the ids that
// they share, whatever the page size.
func TestAppendKeys_SharesExactlyTheCommonPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{1, 64, 128, 256, 512, 1024, 1536}).Draw(t, "page size")
		common := rapid.IntRange(0, 6).Draw(t, "common ids")
		prompt := func(name string, own int64) Request {
			n := common + rapid.IntRange(1, 6).Draw(t, name+" own ids")
			r := Request{Input: n*IDTokens - rapid.IntRange(0, IDTokens-1).Draw(t, name+" short by")}
			for i := range n {
				id := int64(i)
				if i >= common {
					id += own
				}
				r.IDs = append(r.IDs, id)
			}
			return r
		}
		a, b := prompt("first", 100), prompt("second", 200)
		root := prefix.Fingerprint()
		keysA, keysB := AppendKeys(nil, root, &a, size), AppendKeys(nil, root, &b, size)
		shared := 0
		for shared < min(len(keysA), len(keysB)) && keysA[shared] == keysB[shared] {
			shared++
		}
		if want := min(common*IDTokens/size, len(keysA), len(keysB)); shared != want {
			t.Fatalf("%d keys shared, want %d", shared, want)
		}
		seen := map[page.Key]bool{}
		for _, k := range keysA {
			if seen[k] {
				t.Fatal("one prompt has a key twice")
			}
			seen[k] = true
		}
	})
}

func TestAppendKeys_DoesNotAllocate(t *testing.T) {
	req := Generate(1, 1).Requests[0]
	for _, size := range []int{128, 512, 1024} {
		keys := AppendKeys(nil, page.Key{}, &req, size)
		if n := testing.AllocsPerRun(10, func() { keys = AppendKeys(keys[:0], page.Key{}, &req, size) }); n != 0 {
			t.Errorf("page size %d: %v allocations", size, n)
		}
	}
}

// The simulator's hits on the real trace are known from two independent ones.
// They hold the decoder and the keys, as well as the simulator, to account.
func TestAppendKeys_HitsOfTheRealTraceAreTheKnownOnes(t *testing.T) {
	trace := realTrace(t)
	for _, tc := range []struct{ pageSize, room, hits, lookups int }{
		{512, 0, 105_592, 288_500},
		{512, 10_000, 62_005, 288_500},
		{512, 50_000, 102_724, 288_500},
		{128, 0, 422_576, 1_137_341},
		{256, 0, 211_258, 571_526},
		{1024, 0, 48_021, 147_055},
	} {
		hits, lookups := simulate(trace, tc.pageSize, tc.room)
		if hits != tc.hits || lookups != tc.lookups {
			t.Errorf("pages of %d tokens, room for %d: %d hits of %d (%.4f), want %d of %d",
				tc.pageSize, tc.room, hits, lookups, float64(hits)/float64(lookups), tc.hits, tc.lookups)
		}
	}
}
