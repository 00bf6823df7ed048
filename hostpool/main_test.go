package hostpool

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var flagDevice = flag.String("device", "host", "device of the caches in the tests: host, or eager, lazy or random (accelerators in Go)")

// TestAll_OnAnAccelerator runs the tests of this package once more, with an accelerator
// instead of the host device, in those of its modes that are late.
func TestAll_OnAnAccelerator(t *testing.T) {
	if *flagDevice != "host" {
		t.Skip("is that run")
	}
	for _, mode := range []string{"lazy", "random"} {
		t.Run(mode, func(t *testing.T) {
			test := exec.CommandContext(t.Context(), os.Args[0], "-device="+mode, "-test.timeout=9m")
			test.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=10")
			if out, err := test.CombinedOutput(); err != nil {
				t.Fatalf("%v: go test ./hostpool -device=%s\n%s", err, mode, out)
			}
		})
	}
}

// shape is the cache of most tests: two layers, so that a page is several rows.
var shape = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 6, PageSize: 4, KVHeads: 2, HeadDim: 8}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wait waits for a ticket and returns how the work ended.
func wait(t *device.Ticket) error { return t.Wait(context.Background()) }

// rig is a device cache on a host device, with a stream. When the test ends it
// closes all of it, which fails if anything still uses the memory.
type rig struct {
	testing.TB
	host   *device.Host
	dev    device.Device       // of the cache and the streams
	acc    *device.Accelerator // dev, unless that is the host
	fake   *devicetest.Driver  // of acc
	cable  string              // says an error: see breaks
	cache  *kv.Cache
	copies device.Stream
}

func newRig(t testing.TB, g *kv.Geometry, err error) *rig {
	t.Helper()
	noError(t, err)
	r := &rig{TB: t}
	r.host, err = device.OpenHost(device.HostOptions{})
	noError(t, err)
	t.Cleanup(func() { noError(t, r.host.Close()) })
	r.dev = r.host
	if *flagDevice != "host" {
		modes := map[string]devicetest.Mode{"eager": devicetest.Eager, "lazy": devicetest.Lazy, "random": devicetest.Random}
		r.acc, r.fake = devicetest.OpenAccelerator(t, devicetest.Options{Mode: modes[*flagDevice], Seed: 1})
		r.dev = r.acc
	}
	r.cache, err = kv.NewCache(g, r.dev)
	noError(t, err)
	t.Cleanup(func() { noError(t, r.cache.Close()) })
	r.copies = r.stream("copies")
	return r
}

func newShapeRig(t testing.TB) *rig {
	t.Helper()
	g, err := shape.LayerMajor()
	return newRig(t, g, err)
}

func (r *rig) stream(name string) device.Stream {
	r.Helper()
	s, err := r.dev.NewStream(name)
	noError(r, err)
	r.Cleanup(func() { _ = s.Close() }) // a failed stream says so again
	return s
}

// hold holds a stream back until release, or the end of the test at the latest.
func (r *rig) hold(s device.Stream) (release func()) {
	if r.acc == nil {
		release = r.host.Hold(s)
	} else {
		release = r.fake.Hold(r.handle(s))
	}
	r.Cleanup(release)
	return release
}

func (r *rig) handle(s device.Stream) device.StreamHandle {
	r.Helper()
	h, ok := r.acc.Handle(s)
	if !ok {
		r.Fatal("a stream of something else")
	}
	return h
}

// breaks makes the next copy on s fail; r.cable is what its error says.
func (r *rig) breaks(s device.Stream) {
	if r.acc != nil {
		r.cable = r.fake.FailCopy(r.handle(s), device.Failed).Error()
		return
	}
	r.cable = "cable pulled"
	r.host.Fail(s, errors.New(r.cable))
}

// options are o on the rig's devices.
func (r *rig) options(o Options) Options {
	o.Cache, o.Host, o.Device = r.cache, r.host, r.dev
	if o.Copier == nil && r.acc != nil {
		o.Copier = copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{})
	}
	return o
}

// pool opens a pool of this many pages, grown, which the end of the test closes.
func (r *rig) pool(pages int) *Pool {
	r.Helper()
	p, err := Open(r.options(Options{Pages: pages}))
	noError(r, err)
	r.closeAtEnd(p)
	noError(r, wait(p.Grown()))
	return p
}

func (r *rig) closeAtEnd(p *Pool) {
	r.Cleanup(func() {
		_ = r.copies.Close() // nothing of a failed stream's queue may use the pool any more
		noError(r, p.Check())
		noError(r, p.Close())
	})
}

func (r *rig) claim(p *Pool, n int) []page.ID {
	r.Helper()
	ids, err := p.Claim(nil, n)
	noError(r, err)
	return ids
}

// offload enqueues one page's copy to the host.
func (r *rig) offload(p *Pool, host, dev page.ID) *device.Ticket {
	r.Helper()
	t := device.NewTicket()
	_, err := p.CopyIn(r.copies, []page.Pair{{Dst: host, Src: dev}}, t)
	noError(r, err)
	return t
}

func (r *rig) reload(p *Pool, dev, host page.ID) *device.Ticket {
	r.Helper()
	t := device.NewTicket()
	_, err := p.CopyOut(r.copies, []page.Pair{{Dst: dev, Src: host}}, t)
	noError(r, err)
	return t
}

// keep brings device page dev, with the contents of key, to a host page of its own.
func (r *rig) keep(p *Pool, dev page.ID, key uint64) page.ID {
	r.Helper()
	r.write(dev, key)
	id := r.claim(p, 1)[0]
	noError(r, wait(r.offload(p, id, dev)))
	noError(r, p.Commit(id))
	return id
}

// contents is what a page of key holds: a function of key and place, plane by
// plane in packed order.
func contents(g *kv.Geometry, key uint64) []byte {
	b := make([]byte, 0, g.PageBytes())
	for _, l := range g.Spec().Layers {
		for _, p := range l.Planes {
			rng := rand.New(rand.NewPCG(key, uint64(l.ID)<<8|uint64(p.Kind)))
			for range p.Bytes {
				b = append(b, byte(rng.Uint32()))
			}
		}
	}
	return b
}

// planes calls f with the bytes of every plane of a device page, in packed order, and
// keeps what it makes of them.
func (r *rig) planes(dev page.ID, f func(b []byte)) {
	r.Helper()
	for layer := range r.cache.Layers() {
		chunks, err := r.cache.Chunks(nil, layer, dev, 0, r.cache.PageSize())
		noError(r, err)
		for _, c := range chunks {
			mem, err := r.cache.Region(c.Region)
			noError(r, err)
			if r.acc == nil {
				f(mem.Bytes()[c.Off:][:c.Bytes])
				continue
			}
			b := make([]byte, c.Bytes)
			r.fake.Peek(mem.Base()+uintptr(c.Off), b)
			f(b)
			r.fake.Poke(mem.Base()+uintptr(c.Off), b)
		}
	}
}

func (r *rig) write(dev page.ID, key uint64) {
	r.Helper()
	from := contents(r.cache.Geometry(), key)
	r.planes(dev, func(b []byte) { from = from[copy(b, from):] })
}

func (r *rig) read(dev page.ID) (b []byte) {
	r.Helper()
	r.planes(dev, func(plane []byte) { b = append(b, plane...) })
	return b
}

// poison overwrites the whole device cache.
func (r *rig) poison() {
	r.Helper()
	for i := range r.cache.Geometry().Regions() {
		mem, err := r.cache.Region(i)
		noError(r, err)
		b := bytes.Repeat([]byte{0xAB}, int(mem.Size()))
		if r.acc == nil {
			copy(mem.Bytes(), b)
		} else {
			r.fake.Poke(mem.Base(), b)
		}
	}
}

func (r *rig) holds(b []byte, key uint64) bool {
	return bytes.Equal(b, contents(r.cache.Geometry(), key))
}

func (r *rig) wantDevice(dev page.ID, key uint64) {
	r.Helper()
	if !r.holds(r.read(dev), key) {
		r.Errorf("device page %d does not hold the bytes of key %d", dev, key)
	}
}

func hostBytes(t testing.TB, p *Pool, id page.ID) []byte {
	t.Helper()
	b, err := p.Cache().Page(id)
	noError(t, err)
	return b
}

func (r *rig) wantHost(p *Pool, id page.ID, key uint64) {
	r.Helper()
	if !r.holds(hostBytes(r, p, id), key) {
		r.Errorf("host page %d does not hold the bytes of key %d", id, key)
	}
}
