package copier_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// queueBackend is a device under a queue, and how a test gets at it.
type queueBackend struct {
	dev    device.Device
	acc    *device.Accelerator // dev, if it is one
	copier copier.Copier
	linear bool
	hold   func(device.Stream) (release func())
	fail   func(device.Stream) error                    // makes the next copy fail when its turn comes, with that error
	cache  func(t testing.TB, g *kv.Geometry) *kv.Cache // on the host
	races  func() int                                   // since the last call: accesses that nothing orders
	strict bool                                         // the device sees races
	write  func(t testing.TB, m *device.Memory, b []byte)
	read   func(t testing.TB, m *device.Memory) []byte
}

// hostBackend is the host device.
func hostBackend(t testing.TB, c copier.Copier) *queueBackend {
	t.Helper()
	h := openHost(t)
	return &queueBackend{
		dev: h, copier: c, hold: h.Hold,
		fail:  func(s device.Stream) error { h.Fail(s, errBoom); return errBoom },
		races: func() int { return 0 },
		cache: func(t testing.TB, g *kv.Geometry) *kv.Cache { t.Helper(); return newCache(t, g, h) },
		write: func(_ testing.TB, m *device.Memory, b []byte) { copy(m.Bytes(), b) },
		read:  func(_ testing.TB, m *device.Memory) []byte { return bytes.Clone(m.Bytes()) },
	}
}

// acceleratorBackend is an accelerator over the suite's strict driver.
func acceleratorBackend(t testing.TB, o devicetest.Options, copies func(*device.Accelerator) copier.Copier) (*queueBackend, *devicetest.Driver) {
	t.Helper()
	h := openHost(t)
	a, d := devicetest.OpenAccelerator(t, o)
	handle := func(s device.Stream) device.StreamHandle {
		h, ok := a.Handle(s)
		if !ok {
			t.Fatalf("%s is no stream of %s", s.Name(), a.Name())
		}
		return h
	}
	b := &queueBackend{
		dev: a, acc: a, strict: !o.Unordered,
		hold:  func(s device.Stream) func() { return d.Hold(handle(s)) },
		fail:  func(s device.Stream) error { return d.FailCopy(handle(s), device.Failed) },
		races: func() int { return len(d.TakeRaces()) },
		cache: func(t testing.TB, g *kv.Geometry) *kv.Cache {
			t.Helper()
			var regions []*device.Memory
			for _, n := range g.Spec().RegionBytes {
				m, err := a.AllocHost(h, n, 1)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { closing(t, m.Free) })
				regions = append(regions, m)
			}
			c, err := kv.Wrap(g, regions)
			if err != nil {
				t.Fatal(err)
			}
			return c
		},
		write: func(_ testing.TB, m *device.Memory, b []byte) {
			if m.Bytes() == nil {
				d.Poke(m.Base(), b)
				return
			}
			copy(m.Bytes(), b)
		},
		read: func(_ testing.TB, m *device.Memory) []byte {
			if m.Bytes() == nil {
				b := make([]byte, m.Size())
				d.Peek(m.Base(), b)
				return b
			}
			return bytes.Clone(m.Bytes())
		},
	}
	if copies != nil {
		b.copier = copies(a)
	}
	return b, d
}

// onBackends runs a test on every backend.
func onBackends(t *testing.T, test func(t *testing.T, b *queueBackend)) {
	t.Helper()
	accelerator := func(o devicetest.Options, copies func(*device.Accelerator) copier.Copier) func(t testing.TB) *queueBackend {
		return func(t testing.TB) *queueBackend {
			t.Helper()
			b, _ := acceleratorBackend(t, o, copies)
			return b
		}
	}
	rectangles := func(a *device.Accelerator) copier.Copier {
		return copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{})
	}
	for name, open := range map[string]func(t testing.TB) *queueBackend{
		"host":          func(t testing.TB) *queueBackend { t.Helper(); return hostBackend(t, nil) },
		"host_portable": func(t testing.TB) *queueBackend { t.Helper(); return hostBackend(t, copier.NewPortable()) },
		"eager":         accelerator(devicetest.Options{Mode: devicetest.Eager}, nil),
		"lazy":          accelerator(devicetest.Options{Mode: devicetest.Lazy}, nil),
		"random":        accelerator(devicetest.Options{Mode: devicetest.Random, Seed: 1}, nil),
		"rectangles":    accelerator(devicetest.Options{Mode: devicetest.Random, Seed: 2}, rectangles),
		"linear": func(t testing.TB) *queueBackend {
			t.Helper()
			b, _ := acceleratorBackend(t, devicetest.Options{Mode: devicetest.Random, Seed: 3}, nil)
			b.linear = true
			return b
		},
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func newCache(t testing.TB, g *kv.Geometry, d device.Device) *kv.Cache {
	t.Helper()
	c, err := kv.NewCache(g, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, c.Close) }) // Busy, if a job still uses it
	return c
}

// queueRig is a queue over caches of two names, whose pages hold what says whose they
// are.
type queueRig struct {
	*queueBackend
	t              testing.TB
	onDevice, host map[string]*kv.Cache
	streams        [2]device.Stream // by direction
	q              *copier.Queue
}

const (
	rigDevicePages = 24
	rigHostPages   = 40
)

// openQueue opens a queue; change may change its options.
func openQueue(t testing.TB, b *queueBackend, change func(*copier.QueueOptions)) *queueRig {
	t.Helper()
	r := &queueRig{queueBackend: b, t: t, onDevice: map[string]*kv.Cache{}, host: map[string]*kv.Cache{}}
	for name, c := range map[string]kv.Config{
		"layers": {Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: rigDevicePages, PageSize: 4, KVHeads: 2, HeadDim: 4},
		"latent": {Layout: kv.MLA, DType: kv.BF16, Layers: 2, Pages: rigDevicePages, PageSize: 4, LatentDim: 6},
	} {
		g, err := c.LayerMajor()
		r.must(err)
		packed, err := g.Packed(rigHostPages)
		r.must(err)
		r.onDevice[name], r.host[name] = newCache(t, g, b.dev), b.cache(t, packed)
		for side, c := range r.sides(name) {
			for i := range c.Geometry().Regions() {
				m, err := c.Region(i)
				r.must(err)
				b.write(t, m, queuePattern(side+name, int(m.Size())))
			}
		}
	}
	for dir := range r.streams {
		s, err := b.dev.NewStream(copier.Direction(dir).String() + "s")
		r.must(err)
		r.streams[dir] = s
		t.Cleanup(func() { _ = s.Close() }) // some tests make it fail
	}
	o := copier.QueueOptions{
		Device: b.dev, DeviceCaches: r.onDevice, HostCaches: r.host, Copier: b.copier, Linear: b.linear,
		StoreStream: r.streams[copier.Store], LoadStream: r.streams[copier.Load],
	}
	if change != nil {
		change(&o)
	}
	var err error
	r.q, err = copier.OpenQueue(o)
	r.must(err)
	t.Cleanup(func() { closing(t, func() error { return r.q.Shutdown(context.Background()) }) })
	return r
}

func (r *queueRig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *queueRig) sides(name string) map[string]*kv.Cache {
	return map[string]*kv.Cache{"device": r.onDevice[name], "host": r.host[name]}
}

// ends are the destination and the source of a direction.
func (r *queueRig) ends(dir copier.Direction, name string) (dst, src *kv.Cache) {
	if dir == copier.Store {
		return r.host[name], r.onDevice[name]
	}
	return r.onDevice[name], r.host[name]
}

// queuePattern is 1 to 199, so neither fresh memory nor poison.
func queuePattern(who string, n int) []byte {
	b := make([]byte, n)
	x := uint64(14695981039346656037)
	for _, c := range []byte(who) {
		x = (x ^ uint64(c)) * 1099511628211
	}
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(1 + x%199)
	}
	return b
}

// shadow is a copy of c's bytes that the host can look into.
func (r *queueRig) shadow(c *kv.Cache) *kv.Cache {
	r.t.Helper()
	var regions []*device.Memory
	for i := range c.Geometry().Regions() {
		m, err := c.Region(i)
		r.must(err)
		regions = append(regions, device.WrapHost(r.read(r.t, m)))
	}
	s, err := kv.Wrap(c.Geometry(), regions)
	r.must(err)
	return s
}

// copyPage does to shadows what a job does to one page.
func copyPage(t testing.TB, dst *kv.Cache, d page.ID, src *kv.Cache, s page.ID) {
	t.Helper()
	for layer := range src.Layers() {
		l, err := src.Geometry().Layer(layer)
		if err != nil {
			t.Fatal(err)
		}
		for plane := range l.Planes {
			to, err := dst.Plane(layer, plane, d)
			from, err2 := src.Plane(layer, plane, s)
			if err = errors.Join(err, err2); err != nil {
				t.Fatal(err)
			}
			copy(to, from)
		}
	}
}

// pageBytes are the bytes of one page of a shadow.
func pageBytes(t testing.TB, c *kv.Cache, p page.ID) (all []byte) {
	t.Helper()
	for layer := range c.Layers() {
		l, err := c.Geometry().Layer(layer)
		if err != nil {
			t.Fatal(err)
		}
		for plane := range l.Planes {
			b, err := c.Plane(layer, plane, p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
	}
	return all
}

// want fails unless every page of every cache, on both sides, is as in the shadows of a
// direction's ends: those before the jobs, with the jobs done to them.
func (r *queueRig) want(what string, name string, dir copier.Direction, dst, src *kv.Cache) {
	r.t.Helper()
	d, s := r.ends(dir, name)
	for _, x := range []struct {
		side      string
		got, want *kv.Cache
	}{{"destination", r.shadow(d), dst}, {"source", r.shadow(s), src}} {
		for p := range page.ID(x.want.Pages()) {
			if got, want := pageBytes(r.t, x.got, p), pageBytes(r.t, x.want, p); !bytes.Equal(got, want) {
				r.t.Errorf("%s: page %d of the %s of %q is wrong", what, p, x.side, name)
			}
		}
	}
}

// submit submits a job with a ticket.
func (r *queueRig) submit(dir copier.Direction, job copier.Job) *device.Ticket {
	r.t.Helper()
	job.Done = device.NewTicket()
	r.must(r.q.Submit(dir, job))
	return job.Done
}

func (r *queueRig) event(s device.Stream) device.Event {
	r.t.Helper()
	e, err := r.dev.NewEvent()
	r.must(err)
	r.must(s.Record(e))
	return e
}

// held holds s back, at the latest until the test ends.
func (r *queueRig) held(s device.Stream) (release func()) {
	r.t.Helper()
	release = r.hold(s)
	r.t.Cleanup(release)
	return release
}

// kernel is a stream that computes, held back until release is called.
func (r *queueRig) kernel() (s device.Stream, release func()) {
	r.t.Helper()
	s, err := r.dev.NewStream("kernels")
	r.must(err)
	release = r.hold(s)
	r.t.Cleanup(func() {
		release()
		closing(r.t, s.Close)
	})
	return s, release
}

func (r *queueRig) alloc(bytes int64) *device.Memory {
	r.t.Helper()
	m, err := r.dev.Alloc(bytes)
	r.must(err)
	r.t.Cleanup(func() { closing(r.t, m.Free) })
	return m
}
