package copier_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// modes of the drivers that are written in Go.
func modes() []devicetest.Mode {
	return []devicetest.Mode{devicetest.Eager, devicetest.Lazy, devicetest.Random}
}

// engines that differ in what they can do.
func engines() map[string]device.EngineLimits {
	const pitch = 1<<31 - 1
	return map[string]device.EngineLimits{
		"everything":         {MaxPitch: pitch, Boxes: true, Batch: 8192},
		"small_batches":      {MaxPitch: pitch, Boxes: true, Batch: 7},
		"no_boxes":           {MaxPitch: pitch, Batch: 8192},
		"no_batches":         {MaxPitch: pitch, Boxes: true},
		"rectangles_only":    {MaxPitch: pitch},
		"small_pitch":        {MaxPitch: 200, Boxes: true, Batch: 8192},
		"small_pitch_and_2d": {MaxPitch: 200},
		"linear_only":        {},
	}
}

// fakeHarness is a copier on a device that is written in Go, which checks the order of
// all accesses.
func fakeHarness(t *testing.T, o devicetest.Options, make func(a *device.Accelerator) copier.Copier) copiertest.Harness {
	t.Helper()
	a, d := devicetest.OpenAccelerator(t, o)
	other, err := device.OpenAccelerator(devicetest.NewDriver(devicetest.Options{Name: "fake:1"}), device.AcceleratorOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, other.Close) })
	foreign, err := other.NewStream("foreign")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, foreign.Close) })
	h := openHost(t)
	handle := func(s device.Stream) device.StreamHandle {
		handle, ok := a.Handle(s)
		if !ok {
			t.Errorf("%T is no stream of %s", s, a.Name())
		}
		return handle
	}
	return copiertest.Harness{
		Copier: make(a), Device: a, Foreign: foreign,
		Hold:        func(s device.Stream) func() { return d.Hold(handle(s)) },
		Fail:        func(s device.Stream) error { return d.FailCopy(handle(s), device.Failed) },
		Lose:        func() { _ = d.Lose() },
		AllocHost:   func(n int64) (*device.Memory, error) { return a.AllocHost(h, n, n) },
		Write:       func(m *device.Memory, off int64, b []byte) error { d.Poke(m.Base()+uintptr(off), b); return nil },
		Read:        func(m *device.Memory, off int64, b []byte) error { d.Peek(m.Base()+uintptr(off), b); return nil },
		FailsDevice: false,
	}
}

func TestAccelerated(t *testing.T) {
	ways := map[string]*copier.Crossovers{"default": nil}
	for _, w := range []copier.Way{copier.InRectangles, copier.InBatches, copier.OneByOne} {
		all := copier.Every(w)
		ways[w.String()] = &all
	}
	for _, mode := range modes() {
		for name, limits := range engines() {
			for way, crossovers := range ways {
				if way != "default" && (mode != devicetest.Random || limits.MaxPitch == 0) {
					continue
				}
				t.Run(fmt.Sprintf("%v/%s/%s", mode, name, way), func(t *testing.T) {
					o := devicetest.Options{
						Mode: mode, Seed: 1, Engines: []devicetest.EngineOption{{Name: "fake", Limits: limits}},
						Unordered: name != "everything" || way != "default" || mode != devicetest.Random, // looking at the order takes its time
					}
					copiertest.Run(t, func(t *testing.T) copiertest.Harness {
						return fakeHarness(t, o, func(a *device.Accelerator) copier.Copier {
							return copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{Crossovers: crossovers})
						})
					})
				})
			}
		}
	}
}

func TestPortable_OnAnAccelerator(t *testing.T) {
	for _, mode := range modes() {
		t.Run(mode.String(), func(t *testing.T) {
			copiertest.Run(t, func(t *testing.T) copiertest.Harness {
				return fakeHarness(t, devicetest.Options{Mode: mode, Seed: 1}, func(*device.Accelerator) copier.Copier { return copier.NewPortable() })
			})
		})
	}
}

// rig is a device cache and host pools, on a device that is written in Go.
type rig struct {
	acc    *device.Accelerator
	driver *devicetest.Driver
	host   *device.Host
	s      device.Stream
}

func openRig(t *testing.T, o devicetest.Options) *rig {
	t.Helper()
	r := &rig{}
	r.acc, r.driver = devicetest.OpenAccelerator(t, o)
	r.host = openHost(t)
	var err error
	if r.s, err = r.acc.NewStream("copies"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.s.Close() })
	return r
}

// cache is a cache of g: of the host, pinned, or of the device.
func (r *rig) cache(t *testing.T, g *kv.Geometry, onHost bool) *kv.Cache {
	t.Helper()
	m, err := r.acc.Alloc(g.Bytes())
	if onHost {
		closing(t, m.Free)
		m, err = r.acc.AllocHost(r.host, g.Bytes(), g.Bytes())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.s.Close()
		closing(t, m.Free)
	})
	c, err := kv.Wrap(g, []*device.Memory{m})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (r *rig) route(t *testing.T, dst, src *kv.Cache) *kv.Route {
	t.Helper()
	route, err := kv.NewRoute(dst, src)
	if err != nil {
		t.Fatal(err)
	}
	return route
}

// geometries of a device cache, of a page-major pool, and of a layer-major one.
func geometries(t *testing.T) (dev, packed, wide *kv.Geometry) {
	t.Helper()
	dev, err := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 4, Pages: 16, PageSize: 4, KVHeads: 2, HeadDim: 8}.LayerMajor()
	if err != nil {
		t.Fatal(err)
	}
	if packed, err = dev.Packed(20); err != nil {
		t.Fatal(err)
	}
	if wide, err = dev.PackedLayerMajor(20); err != nil {
		t.Fatal(err)
	}
	return dev, packed, wide
}

// TestAccelerated_TakesTheFewestCalls looks at the calls of the library.
func TestAccelerated_TakesTheFewestCalls(t *testing.T) {
	run := []page.Pair{{Dst: 4, Src: 8}, {Dst: 5, Src: 9}, {Dst: 6, Src: 10}, {Dst: 7, Src: 11}}
	scattered := []page.Pair{{Dst: 4, Src: 3}, {Dst: 9, Src: 1}, {Dst: 2, Src: 15}}
	const far = 1<<31 - 1
	const guess = copier.Way(9) // as the crossovers have it that nobody has measured
	for _, x := range []struct {
		name   string
		wide   bool // the pool is layer-major
		limits device.EngineLimits
		ways   copier.Way
		most   int
		pairs  []page.Pair
		want   device.Calls
	}{
		{"a run of two layer-major caches is one 2-D copy", true, device.EngineLimits{MaxPitch: far}, copier.InRectangles, 0, run, device.Calls{Rects: 1}},
		{"scattered pages are a 2-D copy each", true, device.EngineLimits{MaxPitch: far}, copier.InRectangles, 0, scattered, device.Calls{Rects: 3}},
		{"so are those of a page-major pool", false, device.EngineLimits{MaxPitch: far}, copier.InRectangles, 0, scattered, device.Calls{Rects: 3}},
		{"a run into a page-major pool is a 2-D copy a layer", false, device.EngineLimits{MaxPitch: far, Boxes: true}, copier.InRectangles, 0, run, device.Calls{Rects: 4}},
		{"beyond the pitch a run is a 3-D copy", true, device.EngineLimits{MaxPitch: 1300, Boxes: true}, copier.InRectangles, 0, run, device.Calls{Boxes: 1}},
		{"or a batch", true, device.EngineLimits{MaxPitch: 1300, Batch: 99}, guess, 0, run, device.Calls{Batches: 1, BatchOps: 4}},
		{"or a copy a layer", true, device.EngineLimits{MaxPitch: 1300}, guess, 0, run, device.Calls{Linear: 4}},
		{"rows of a batch", true, device.EngineLimits{MaxPitch: far, Batch: 99}, copier.InBatches, 0, scattered, device.Calls{Batches: 1, BatchOps: 12}},
		{"batches are cut", true, device.EngineLimits{MaxPitch: far, Batch: 99}, copier.InBatches, 5, scattered, device.Calls{Batches: 3, BatchOps: 12}},
		{"and at the engine's limit", true, device.EngineLimits{MaxPitch: far, Batch: 6}, copier.InBatches, 50, scattered, device.Calls{Batches: 2, BatchOps: 12}},
		{"a batch of one is a copy", true, device.EngineLimits{MaxPitch: far, Batch: 11}, copier.InBatches, 0, scattered, device.Calls{Batches: 1, BatchOps: 11, Linear: 1}},
		{"no batches where there are none", true, device.EngineLimits{MaxPitch: far}, copier.InBatches, 0, scattered, device.Calls{Rects: 3}},
		{"one by one", true, device.EngineLimits{MaxPitch: far, Batch: 99}, copier.OneByOne, 0, scattered, device.Calls{Linear: 12}},
	} {
		t.Run(x.name, func(t *testing.T) {
			r := openRig(t, devicetest.Options{Engines: []devicetest.EngineOption{{Name: "fake", Limits: x.limits}}})
			dev, packed, wide := geometries(t)
			pool := packed
			if x.wide {
				pool = wide
			}
			route := r.route(t, r.cache(t, pool, true), r.cache(t, dev, false))
			ways := copier.DefaultCrossovers()
			if x.ways != guess {
				ways = copier.Every(x.ways)
			}
			c := copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{Crossovers: &ways, BatchOps: x.most})
			before := r.acc.Calls()
			moved, err := c.Copy(r.s, route, append([]page.Pair(nil), x.pairs...))
			if err != nil {
				t.Fatal(err)
			}
			got := r.acc.Calls()
			got.Linear -= before.Linear
			if got != x.want {
				t.Errorf("calls %+v, want %+v", got, x.want)
			}
			if x.wide && moved.Rows != 4*moved.Runs {
				t.Errorf("moved %+v, want 4 rows a run", moved)
			}
		})
	}
}

// TestAccelerated_ReadsSealedPagesInAnyOrder only where they may be: from pinned host
// memory. The driver's checks find reads of live memory out of order.
func TestAccelerated_ReadsSealedPagesInAnyOrder(t *testing.T) {
	dev, packed, _ := geometries(t)
	ways := copier.Every(copier.InBatches)
	pairs := func() []page.Pair { return []page.Pair{{Dst: 4, Src: 3}, {Dst: 9, Src: 1}} }
	for name, x := range map[string]struct{ pinned, sealed, early bool }{
		"sealed and pinned":   {true, true, true},
		"sealed and pageable": {false, true, false},
		"not sealed":          {true, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			// An eager driver reads sources of any order in the call itself.
			r := openRig(t, devicetest.Options{Mode: devicetest.Eager, Pageable: true, Unordered: true})
			var mem *device.Memory
			var err error
			if x.pinned {
				mem, err = r.acc.AllocHost(r.host, packed.Bytes(), packed.Bytes())
			} else if mem, err = r.host.Alloc(packed.Bytes()); err == nil {
				err = r.acc.AdmitPageable(mem)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = r.s.Close(); closing(t, mem.Free) })
			pool, err := kv.Wrap(packed, []*device.Memory{mem})
			if err != nil {
				t.Fatal(err)
			}
			cache := r.cache(t, dev, false)
			c := copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{Crossovers: &ways})
			do := c.Copy
			if x.sealed {
				do = c.CopySealed
			}
			for i := range mem.Bytes() {
				mem.Bytes()[i] = 1
			}
			handle, _ := r.acc.Handle(r.s)
			if x.pinned {
				release := r.driver.Hold(handle)
				defer release()
				defer func() {
					// What is written now is seen by whoever reads in the order of the stream.
					for i := range mem.Bytes() {
						mem.Bytes()[i] = 2
					}
					release()
					if err := r.s.Sync(t.Context()); err != nil {
						t.Fatal(err)
					}
					region, _ := cache.Region(0)
					spec := dev.Spec().Layers[0].Planes[0]
					got := devicetest.Read(t, r.acc, region, spec.Offset+4*spec.PageStride, 1)[0]
					if (got == 1) != x.early {
						t.Errorf("page 4 holds %d; sources are read early: want %t", got, x.early)
					}
				}()
			}
			if _, err := do(r.s, r.route(t, cache, pool), pairs()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestAccelerated_RefusesMemoryOutOfReach(t *testing.T) {
	r := openRig(t, devicetest.Options{})
	dev, packed, _ := geometries(t)
	heap, err := kv.Wrap(packed, []*device.Memory{device.WrapHost(make([]byte, packed.Bytes()))})
	if err != nil {
		t.Fatal(err)
	}
	c := copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{})
	_, err = c.Copy(r.s, r.route(t, heap, r.cache(t, dev, false)), []page.Pair{{Dst: 1, Src: 1}})
	faulttest.Refused(t, err, fault.Unsupported, "not pinned")
}

// TestAccelerated_HalfwayErrorsSayWhatWasAsked has the library refuse in the middle.
func TestAccelerated_HalfwayErrors(t *testing.T) {
	dev, packed, _ := geometries(t)
	for _, w := range []copier.Way{copier.InRectangles, copier.InBatches, copier.OneByOne} {
		t.Run(w.String(), func(t *testing.T) {
			r := openRig(t, devicetest.Options{Mode: devicetest.Lazy})
			route := r.route(t, r.cache(t, packed, true), r.cache(t, dev, false))
			ways := copier.Every(w)
			c := copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{Crossovers: &ways, BatchOps: 6})
			call, skip := "CopyRects", 2
			if w == copier.InBatches {
				call, skip = "CopyBatch", 1
			}
			want := r.driver.Refuse(call, skip, device.Failed)
			_, err := c.Copy(r.s, route, []page.Pair{{Dst: 4, Src: 3}, {Dst: 9, Src: 1}, {Dst: 2, Src: 15}})
			faulttest.Refused(t, err, fault.Device, want.Name)
		})
	}
}

func TestAccelerated_DoesNotAllocate(t *testing.T) {
	if raced {
		t.Skip("with the race detector, pools forget on purpose")
	}
	for _, w := range []copier.Way{copier.InRectangles, copier.InBatches, copier.OneByOne} {
		ways := copier.Every(w)
		a, c, s, r := idleRoute(t, 8, 512, copier.AcceleratedOptions{Crossovers: &ways})
		over, err := a.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		pairs, from := make([]page.Pair, 512), make([]page.Pair, 512)
		for i := range from {
			from[i] = page.Pair{Dst: page.ID(i * 37 % 512), Src: page.ID(i * 91 % 512)}
		}
		if n := testing.AllocsPerRun(50, func() {
			copy(pairs, from)
			if _, err := c.Copy(s, r, pairs); err != nil {
				t.Fatal(err)
			}
			if err := s.Record(over); err != nil {
				t.Fatal(err)
			}
			for !over.Done() { // what the device has built for the copy goes back to it
				runtime.Gosched()
			}
		}); n > 0 {
			t.Errorf("%v: %v allocations a copy", w, n)
		}
	}
}

func TestCrossovers_Text(t *testing.T) {
	c := copier.DefaultCrossovers()
	text := c.String()
	for _, want := range []string{"host to device", "device to host", "device to device", "256 KiB", "(batch)", "(rectangle)"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	if n, of := c.Measured(); n != 0 || of != 60 {
		t.Errorf("%d of %d measured", n, of)
	}
}
