package copier_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// idleDriver does nothing, at once: what is left is what enqueueing costs.
type idleDriver struct {
	handles atomic.Uintptr
	engine  *idleEngine
}

type idleEngine struct {
	limits device.EngineLimits
	copies int
}

func newIdleDriver() *idleDriver {
	d := &idleDriver{engine: &idleEngine{limits: device.EngineLimits{MaxPitch: 1<<31 - 1, Boxes: true, Batch: 1 << 20}}}
	d.handles.Store(1 << 20)
	return d
}

func (d *idleDriver) Name() string                  { return "idle:0" }
func (d *idleDriver) Attributes() device.Attributes { return device.Attributes{} }
func (d *idleDriver) Alloc(n int64) (uintptr, error) {
	return d.handles.Add(uintptr(n+1<<20)) - uintptr(n), nil
}
func (d *idleDriver) Free(uintptr) error            { return nil }
func (d *idleDriver) Register(uintptr, int64) error { return nil }
func (d *idleDriver) Unregister(uintptr) error      { return nil }
func (d *idleDriver) NewStream(device.Priority) (device.StreamHandle, error) {
	return device.StreamHandle(d.handles.Add(1)), nil
}
func (d *idleDriver) CloseStream(device.StreamHandle) error        { return nil }
func (d *idleDriver) SyncStream(device.StreamHandle) (bool, error) { return true, nil }
func (d *idleDriver) NewEvent() (device.EventHandle, error) {
	return device.EventHandle(d.handles.Add(1)), nil
}
func (d *idleDriver) CloseEvent(device.EventHandle) error                  { return nil }
func (d *idleDriver) Record(device.EventHandle, device.StreamHandle) error { return nil }
func (d *idleDriver) Wait(device.StreamHandle, device.EventHandle) error   { return nil }
func (d *idleDriver) EventDone(device.EventHandle) (bool, error)           { return true, nil }
func (d *idleDriver) SyncEvent(device.EventHandle) error                   { return nil }
func (d *idleDriver) Engines() []device.Engine                             { return []device.Engine{d.engine} }
func (d *idleDriver) Close() error                                         { return nil }

func (e *idleEngine) Name() string                { return "idle" }
func (e *idleEngine) Limits() device.EngineLimits { return e.limits }
func (e *idleEngine) CopyRects(_ device.StreamHandle, rects []device.Rect) (int, error) {
	e.copies += len(rects)
	return len(rects), nil
}

func (e *idleEngine) CopyBatch(_ device.StreamHandle, b *device.Batch, _ device.SourceOrder) error {
	e.copies += len(b.Bytes)
	return nil
}

// idleRoute is a device cache and another one like a host pool, both of the idle driver,
// with an accelerated copier and a stream.
func idleRoute(tb testing.TB, layers, pages int, o copier.AcceleratedOptions) (a *device.Accelerator, c *copier.Accelerated, s device.Stream, r *kv.Route) {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	d := newIdleDriver()
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(err)
	tb.Cleanup(func() { closing(tb, a.Close) })
	g, err := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: layers, Pages: pages, PageSize: 16, KVHeads: 8, HeadDim: 128}.LayerMajor()
	must(err)
	packed, err := g.Packed(pages)
	must(err)
	caches := [2]*kv.Cache{}
	for i, g := range [...]*kv.Geometry{packed, g} {
		caches[i], err = kv.NewCache(g, a)
		must(err)
		tb.Cleanup(func() { closing(tb, caches[i].Close) })
	}
	r, err = kv.NewRoute(caches[0], caches[1])
	must(err)
	s, err = a.NewStream("copies")
	must(err)
	tb.Cleanup(func() { closing(tb, s.Close) })
	return a, copier.NewAccelerated(a, d.engine, o), s, r
}

// lists of n pages, none of which is next to another one unless it says so.
var lists = map[string]func(rng *rand.Rand, pairs []page.Pair){
	"sorted run": func(_ *rand.Rand, pairs []page.Pair) {
		for i := range pairs {
			pairs[i] = page.Pair{Dst: page.ID(i), Src: page.ID(i)}
		}
	},
	"sorted scattered": func(_ *rand.Rand, pairs []page.Pair) {
		for i := range pairs {
			pairs[i] = page.Pair{Dst: page.ID(i), Src: page.ID(len(pairs) - 1 - i)}
		}
	},
	"shuffled runs of 8": func(rng *rand.Rand, pairs []page.Pair) {
		for i, b := range rng.Perm((len(pairs) + 7) / 8) {
			for k := 8 * i; k < min(8*i+8, len(pairs)); k++ {
				pairs[k] = page.Pair{Dst: page.ID(k), Src: page.ID(min(8*b+k%8, len(pairs)-1))}
			}
		}
		rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	},
	"shuffled scattered": func(rng *rand.Rand, pairs []page.Pair) {
		dst, src := rng.Perm(len(pairs)), rng.Perm(len(pairs))
		for i := range pairs {
			pairs[i] = page.Pair{Dst: page.ID(dst[i]), Src: page.ID(src[i])}
		}
	},
}

// BenchmarkPlan sorts, merges and splits lists of pages, up to the boxes that an
// accelerator takes, and prints the pairs a second: 10 M are asked for.
func BenchmarkPlan(b *testing.B) {
	for name, list := range lists {
		for _, n := range []int{1000, 100_000} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				_, _, _, r := idleRoute(b, 32, n, copier.AcceleratedOptions{})
				from, pairs := make([]page.Pair, n), make([]page.Pair, n)
				list(rand.New(rand.NewPCG(1, 2)), from)
				var (
					runs  []page.Run
					boxes []kv.Box
					err   error
				)
				b.ReportAllocs()
				for b.Loop() {
					copy(pairs, from)
					if runs, err = page.AppendRuns(runs[:0], pairs); err != nil {
						b.Fatal(err)
					}
					for at := 0; at < len(runs); {
						for boxes = boxes[:0]; at < len(runs) && len(boxes) < 2048; at++ {
							if boxes, err = r.AppendBoxes(boxes, runs[at]); err != nil {
								b.Fatal(err)
							}
						}
					}
				}
				b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mpairs/s")
			})
		}
	}
}

// BenchmarkEnqueue copies lists of pages through an accelerator whose driver does nothing,
// in jobs of 1 op and of 10^5: 1 µs a job and 50 ns an op are asked for. An op is a row of
// a batch, or a rectangle.
func BenchmarkEnqueue(b *testing.B) {
	batches, rects := copier.Every(copier.InBatches), copier.Every(copier.InRectangles)
	for _, x := range []struct {
		name   string
		layers int
		pages  int
		ways   *copier.Crossovers
		list   string
	}{
		{"one page, a rectangle", 32, 1, &rects, "sorted run"},
		{"100000 pages, a rectangle each", 32, 100_000, &rects, "sorted scattered"},
		{"3125 pages, 32 rows of a batch each", 32, 3125, &batches, "sorted scattered"},
		{"100000 pages, a row of a batch each", 1, 100_000, &batches, "sorted scattered"},
		{"100000 pages, a row each, shuffled", 1, 100_000, &batches, "shuffled scattered"},
	} {
		b.Run(x.name, func(b *testing.B) {
			a, c, s, r := idleRoute(b, x.layers, x.pages, copier.AcceleratedOptions{Crossovers: x.ways})
			from, pairs := make([]page.Pair, x.pages), make([]page.Pair, x.pages)
			lists[x.list](rand.New(rand.NewPCG(1, 2)), from)
			b.ReportAllocs()
			e, ok := a.Engines()[0].(*idleEngine)
			if !ok {
				b.Fatal("another engine")
			}
			e.copies = 0
			for b.Loop() {
				copy(pairs, from)
				if _, err := c.Copy(s, r, pairs); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(e.copies), "ns/op-copied")
		})
	}
}
