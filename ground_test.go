package kvferry

import (
	"context"
	"errors"
	"flag"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

var flagDevice = flag.String("device", onHost, "device of the engines in the tests: host, eager, lazy or random (accelerators in Go), cuda or hip (fakes), cuda:N or hip:N (real)")

const onHost = "host"

// errCable is why the copies of a host device fail.
var errCable = errors.New("somebody pulled the cable")

// ground is what an engine stands on: a device, and what the tests do to it. The
// happens-before checker of an accelerator in Go must be silent in the end.
type ground struct {
	t      testing.TB
	dev    device.Device
	host   *device.Host
	acc    *device.Accelerator // nil: the host
	fake   *devicetest.Driver  // of acc, if it is made of Go
	copier copier.Copier       // nil: the portable one
	slab   slab
}

// openGround opens a device, which the end of the test closes.
func openGround(t testing.TB, name string) *ground {
	t.Helper()
	g := &ground{t: t, host: must(device.OpenHost(device.HostOptions{}))(t)}
	t.Cleanup(func() { noError(t, g.host.Close()) })
	g.dev = g.host
	switch vendor, which, real := strings.Cut(name, ":"); {
	case name == onHost:
		return g
	case real && vendor == "hip":
		g.acc = must(hip.Open(which, hip.Options{Library: os.Getenv("KVFERRY_HIP_LIBRARY")}))(t)
		t.Cleanup(func() { noError(t, g.acc.Close()) })
	case real:
		g.acc = must(cuda.Open(which, cuda.Options{Library: os.Getenv("KVFERRY_CUDA_LIBRARY")}))(t)
		t.Cleanup(func() { noError(t, g.acc.Close()) })
	case vendor == "cuda" || vendor == "hip":
		g.acc = openFake(t, name)
		t.Cleanup(func() { noError(t, g.acc.Close()) })
	default:
		modes := map[string]devicetest.Mode{"eager": devicetest.Eager, "lazy": devicetest.Lazy, "random": devicetest.Random}
		g.acc, g.fake = devicetest.OpenAccelerator(t, devicetest.Options{Mode: modes[name], Seed: 1})
	}
	g.dev, g.copier = g.acc, copier.NewAccelerated(g.acc, g.acc.Engines()[0], copier.AcceleratedOptions{})
	g.slab.mem = must(g.acc.AllocHost(g.host, 4<<20, 1))(t)
	t.Cleanup(func() { noError(t, g.slab.mem.Free()) })
	return g
}

// openFake opens the first device of a fake driver.
func openFake(t testing.TB, vendor string) *device.Accelerator {
	t.Helper()
	if vendor == "hip" {
		f := fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP, Delay: -1})
		return must(hip.Open("0", hip.Options{Library: f.Path()}))(t)
	}
	f := fakedriver.Load(t, fakedriver.Options{Delay: -1})
	return must(cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime()}))(t)
}

// plagued is the device with what goes wrong by the rules of in.
func (g *ground) plagued(in *devicetest.Injector) device.Device {
	if g.acc == nil {
		return in.Device(g.dev)
	}
	return &pinning{in.Device(&failing{g.acc, g}), g.acc}
}

// pinning is a wrapped accelerator that pins.
type pinning struct {
	device.Device
	acc *device.Accelerator
}

func (p *pinning) Pin(m *device.Memory, off, n int64) error { return p.acc.Pin(m, off, n) }
func (p *pinning) AdmitPageable(m *device.Memory) error     { return p.acc.AdmitPageable(m) }

// failing is an accelerator in Go whose streams fail as the host's do.
type failing struct {
	*device.Accelerator
	g *ground
}

func (f *failing) Fail(s device.Stream, _ error) { _ = f.g.fail(s) }

func (g *ground) handle(s device.Stream) device.StreamHandle {
	h, ok := g.acc.Handle(devicetest.Unwrap(s))
	if !ok || g.fake == nil {
		g.t.Fatalf("%s has no such stream", g.dev.Name())
	}
	return h
}

// holds reports whether streams can be held back.
func (g *ground) holds() bool { return g.acc == nil || g.fake != nil }

// hold holds s back until release is called.
func (g *ground) hold(s device.Stream) (release func()) {
	if g.acc == nil {
		return g.host.Hold(devicetest.Unwrap(s))
	}
	return g.fake.Hold(g.handle(s))
}

// fail makes the next copy on s fail, and returns with what.
func (g *ground) fail(s device.Stream) error {
	if g.acc == nil {
		g.host.Fail(devicetest.Unwrap(s), errCable)
		return errCable
	}
	return g.fake.FailCopy(g.handle(s), device.Failed)
}

// poke overwrites bytes of a device memory, as if by nobody.
func (g *ground) poke(m *device.Memory, off int64, b []byte) {
	if g.acc == nil {
		copy(m.Bytes()[off:], b)
		return
	}
	g.fake.Poke(m.Base()+uintptr(off), b)
}

// raced says whether the checker must have seen a race, and forgets it: the devices that
// have no checker are not asked.
func (g *ground) raced(must bool) {
	g.t.Helper()
	if g.fake == nil {
		return
	}
	if races := g.fake.TakeRaces(); (len(races) > 0) != must {
		g.t.Errorf("races %q, want some: %v", races, must)
	}
}

// slab is pinned host memory that is given away in parts. What is in use is behind the
// last place where nothing was.
type slab struct {
	mem *device.Memory

	mu    sync.Mutex
	used  int64            // guarded by mu
	parts []*device.Ticket // done when the part may go; guarded by mu
}

// stage returns host memory that the device's copies reach, with b in it; free is to be
// completed once nothing uses it any more.
func (g *ground) stage(b []byte) (m *device.Memory, off int64, free *device.Ticket) {
	free = device.NewTicket()
	if g.acc == nil {
		return device.WrapHost(b), 0, free
	}
	s := &g.slab
	s.mu.Lock()
	defer s.mu.Unlock()
	idle := true
	for _, p := range s.parts {
		done, _ := p.Poll()
		idle = idle && done
	}
	if idle {
		s.used, s.parts = 0, s.parts[:0]
	}
	if off = s.used; off+int64(len(b)) > s.mem.Size() {
		g.t.Fatalf("%d bytes are staged, and %d more", s.used, len(b))
	}
	s.used += int64(len(b))
	s.parts = append(s.parts, free)
	copy(s.mem.Bytes()[off:], b)
	return s.mem, off, free
}

// TestAll_OnAnAccelerator runs the tests of this package once more, with an accelerator
// instead of the host device, in those of its modes that are late.
func TestAll_OnAnAccelerator(t *testing.T) {
	if *flagDevice != onHost {
		t.Skip("is that run")
	}
	for _, mode := range []string{"lazy", "random"} {
		t.Run(mode, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			test := exec.CommandContext(ctx, os.Args[0], "-device="+mode, "-ops=5000", "-test.failfast", "-test.timeout=9m")
			test.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=10")
			if out, err := test.CombinedOutput(); err != nil {
				t.Fatalf("%v: go test . -device=%s\n%s", err, mode, out)
			}
		})
	}
}

// TestLost_EveryWaitEndsAndNothingIsGivenAwayEarly: the device goes while pages are on
// their way, in both directions.
func TestLost_EveryWaitEndsAndNothingIsGivenAwayEarly(t *testing.T) {
	for _, streams := range []bool{false, true} {
		for _, step := range []string{"demotion", "load", "offload", "reload", "idle"} {
			name := step
			if streams {
				name += ", with streams"
			}
			t.Run(name, func(t *testing.T) {
				e := newEngineOn(t, openGround(t, "random"), geometry(t, shape), Options{HostPages: 8}, streams, nil)
				e.failed = true
				tokens := text(1, 0, 9)
				var r *run
				switch step {
				case "load":
					e.cold(tokens)
					r = must(e.ingest("a", tokens, 9))(t)
					must(r.match())(t)
				case "reload":
					r = e.plain(ID{Request: "a"}, 1, 9)
					if streams {
						r.verified()
					}
					r.offload(3)
				default:
					r = e.serve("a", tokens)
				}
				if streams {
					noError(t, e.compute.Sync(t.Context()))
				}
				release := e.hold(e.m.Copies())
				_ = e.g.fake.FailCopy(e.g.handle(e.m.Copies()), device.Lost)
				var wait func() error
				switch step {
				case "demotion":
					noError(t, r.s.Remove())
					wait = func() error { _, err := e.m.store.Evict(t.Context(), 2); return err }
				case "load":
					adm := must(r.s.Admit(t.Context(), 1))(t)
					wait = func() error { return adm.Wait(t.Context()) }
				case "offload":
					wait = func() error { _, err := r.s.Offload(t.Context()); return err }
				case "reload":
					back := must(r.s.Reload(t.Context()))(t)
					wait = func() error { return back.Wait(t.Context()) }
				case "idle":
					_ = e.g.fake.Lose()
					wait = func() error { _, err := r.s.Offload(t.Context()); return err }
				}
				ended := make(chan error, 1)
				go func() { ended <- wait() }()
				if step != "idle" {
					noError(t, e.m.Check())
				}
				release()
				err := <-ended
				// What can't be demoted is dropped: it can be computed again.
				if step != "demotion" && !errors.Is(err, fault.Device) {
					t.Errorf("got %v", err)
				}
				if e.g.acc.Lost() == nil {
					t.Error("the device is not lost")
				}
				e.check()
				_ = r.s.Remove()
				e.check()
			})
		}
	}
}
