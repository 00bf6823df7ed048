package kvferry

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestOptions_ZeroValuesAreUseful(t *testing.T) {
	dev := must(device.OpenHost(device.HostOptions{}))(t)
	cache := must(kv.NewCache(geometry(t, shape), dev))(t)
	m := must(Open(Options{Cache: cache}))(t)
	equal(t, "ready", must(m.Ready().Poll())(t), true)
	equal(t, "host pool", m.Pool() == nil, true)
	equal(t, "copies", m.Copies() == nil, true)
	equal(t, "free", m.NumFree(), 8)
	equal(t, "largest run", m.LargestRun(), 8)
	equal(t, "sequence", m.Sequence(ID{}) == nil, true)
	s := must(m.Ingest(ID{}, Prompt{}))(t)
	equal(t, "matched", must(s.Match())(t).Pages, 0)
	adm := must(s.Admit(t.Context(), 0))(t)
	equal(t, "tokens", adm.Tokens, 0)
	noError(t, adm.Wait(t.Context()))
	noError(t, s.Commit(0))
	must(s.Admit(t.Context(), 1))(t)
	noError(t, m.Check())
	noError(t, s.Remove())
	noError(t, m.Close(t.Context()))
	noError(t, cache.Close())
	noError(t, dev.Close())
}

func TestOpen_Refusals(t *testing.T) {
	dev := must(device.OpenHost(device.HostOptions{}))(t)
	cache := must(kv.NewCache(geometry(t, shape), dev))(t)
	sink := withPages(1)
	sink.Sink = true
	onlySink := must(kv.NewCache(geometry(t, sink), dev))(t)
	closed := must(device.OpenHost(device.HostOptions{}))(t)
	noError(t, closed.Close())
	for _, test := range []struct {
		name string
		o    Options
		kind fault.Kind
		says string
	}{
		{"no cache", Options{}, fault.Invalid, "Options.Cache"},
		{"only a sink", Options{Cache: onlySink}, fault.Invalid, "Options.Cache"},
		{"negative host pool", Options{Cache: cache, HostPages: -1}, fault.Invalid, "Options.HostPages"},
		{"host pool beyond page ids", Options{Cache: cache, HostPages: math.MaxInt32 + 1}, fault.Invalid, "Options.HostPages"},
		{"host pool beyond memory", Options{Cache: cache, HostPages: math.MaxInt32}, fault.Memory, "host pool"},
		{"negative history", Options{Cache: cache, HostPages: 1, History: -1}, fault.Invalid, "history"},
		{"history beyond memory", Options{Cache: cache, History: math.MaxInt}, fault.Invalid, "history"},
		{"closed device", Options{Cache: cache, HostPages: 1, Device: closed}, fault.Closed, "host device"},
	} {
		t.Run(test.name, func(t *testing.T) {
			maps, fds, err := leaktest.CountHostMemory()
			noError(t, err)
			_, err = Open(test.o)
			faulttest.Refused(t, err, test.kind, test.says)
			mapsNow, fdsNow, err := leaktest.CountHostMemory()
			noError(t, err)
			equal(t, "mappings", mapsNow, maps)
			equal(t, "descriptors", fdsNow, fds)
		})
	}
	noError(t, onlySink.Close())
	noError(t, cache.Close())
	noError(t, dev.Close())
}

func TestOptions_InclusiveKeepsTheHostCopy(t *testing.T) {
	for _, inclusive := range []bool{false, true} {
		t.Run(fmt.Sprint(inclusive), func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 4, Inclusive: inclusive}, false)
			tokens := text(1, 0, 9)
			e.cold(tokens)
			noError(t, e.serve("a", tokens).s.Remove())
			st := e.m.store.Stats()
			equal(t, "on the device", st.DevicePages, 2)
			equal(t, "on the host too", st.HostPages == 2, inclusive)
			e.evict(2)
			equal(t, "copies to the host", e.m.store.Stats().Demoted == 2, inclusive) // else once more
			e.check()
		})
	}
}

// counting is a copier that counts the pages it is asked to move.
type counting struct {
	copier.Copier
	pages int
}

func (c *counting) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	c.pages += len(pairs)
	return c.Copier.Copy(s, r, pairs)
}

func TestOptions_CopierMovesThePages(t *testing.T) {
	c := &counting{Copier: copier.NewPortable()}
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4, Copier: c}, false)
	tokens := text(1, 0, 9)
	e.cold(tokens)
	e.serve("a", tokens).verified()
	equal(t, "pages moved", c.pages, 4)
}

// arrangement is a geometry of many: how its bytes lie must not show.
type arrangement struct {
	name string
	c    kv.Config
	make func(kv.Config) (*kv.Geometry, error)
}

func arrangements() []arrangement {
	nhd := shape
	hnd, mla, half, one, single, thousand := nhd, nhd, nhd, nhd, nhd, nhd
	hnd.Layout = kv.HND
	mla.Layout, mla.KVHeads, mla.HeadDim, mla.LatentDim = kv.MLA, 0, 0, 16
	half.DType, half.KVHeads = kv.FP16, 1
	one.PageSize, one.Pages = 1, 24
	single.Layers, single.PageSize = 1, 3
	thousand.PageSize, thousand.Pages = 1000, 2
	sink := hnd
	sink.Sink = true
	return []arrangement{
		{"layer-major", nhd, kv.Config.LayerMajor},
		{"page-major", nhd, kv.Config.PageMajor},
		{"a tensor a layer, K first", nhd, kv.Config.PerLayerKVFirst},
		{"a tensor a layer, pages first", hnd, kv.Config.PerLayerPageFirst},
		{"HND with a sink", sink, kv.Config.LayerMajor},
		{"MLA", mla, kv.Config.LayerMajor},
		{"FP16", half, kv.Config.PerLayerKVFirst},
		{"page size 1", one, kv.Config.LayerMajor},
		{"one layer, page size 3", single, kv.Config.PageMajor},
		{"two large pages", thousand, kv.Config.LayerMajor},
	}
}

// In every geometry, and with every size of the host pool: fill the device, push
// all of it out, bring back what is left, and look at every byte.
func TestSequence_LivesInEveryGeometry(t *testing.T) {
	for _, a := range arrangements() {
		for _, host := range []int{0, 1, 30} {
			t.Run(fmt.Sprintf("%s/host=%d", a.name, host), func(t *testing.T) {
				e := newEngine(t, must(a.make(a.c))(t), Options{HostPages: host}, false)
				pages := usable(e.cache.Geometry())
				whole := text(1, 0, pages*e.size)
				var seen []int
				for i := range 3 {
					r := e.serve(fmt.Sprint(i), whole) // has every page
					seen = append(seen, r.adm.Stored/e.size)
					r.verified()
					noError(t, r.s.Remove())
					e.check()
					other := must(e.ingest("other", text(2, 0, pages*e.size), pages*e.size))(t)
					noError(t, other.admit(t.Context(), pages*e.size)) // pushes everything out
					noError(t, other.commit(pages*e.size))
					other.verified()
					noError(t, other.reset(true))
					noError(t, other.s.Remove())
					e.evict(e.m.store.Stats().DevicePages)
					e.check()
				}
				if seen[0] != 0 || host == 0 && slices.Max(seen) > 0 {
					t.Fatalf("pages found: %v", seen)
				}
				if host >= 2*pages { // room for both prompts
					equal(t, "pages found in the end, but the one held back", seen[2], pages-1)
				}
				equal(t, "free", e.m.NumFree(), pages)
			})
		}
	}
}

func TestSequence_LivesInOnePage(t *testing.T) {
	e := newEngine(t, geometry(t, withPages(1)), Options{HostPages: 1}, false)
	for i := range 4 {
		r := e.serve(fmt.Sprint(i), text(uint32(i%2), 0, 4))
		r.verified()
		_, err := r.s.Admit(t.Context(), 1)
		faulttest.Refused(t, err, fault.Full, r.s.ID().String())
		other := must(e.ingest("other", nil, 0))(t)
		_, err = other.s.Admit(t.Context(), 1)
		faulttest.Refused(t, err, fault.Full, "free 0")
		noError(t, other.s.Remove())
		noError(t, r.s.Remove())
		e.check()
	}
}
