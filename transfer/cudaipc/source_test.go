//go:build !nogpu

package cudaipc

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// patience only turns a hang into a message.
const patience = 20 * time.Second

// reader is this process's side: a device, an engine and a cache.
type reader struct {
	testing.TB
	*ground
	acc    *device.Accelerator
	engine *Engine
	target transfer.Target
	stream device.Stream
}

func (g *ground) reader(t testing.TB) *reader {
	t.Helper()
	r := &reader{TB: t, ground: g, acc: must(openDevice(g.Vendor, "0", g.fake.Path(), g.fake.Runtime()))(t)}
	t.Cleanup(func() { noError(t, r.acc.Close()) })
	r.engine = must(New(r.acc, Options{Dir: g.dir}))(t)
	cache := must(kv.NewCache(must(shape.PageMajor())(t), r.acc))(t)
	t.Cleanup(func() { noError(t, cache.Close()) })
	r.stream = must(r.acc.NewStream("reads"))(t)
	t.Cleanup(func() { noError(t, r.stream.Close()) })
	r.target = transfer.Target{Cache: cache, Device: r.acc, Copier: copier.NewPortable()}
	return r
}

func (r *reader) open(d *transfer.Descriptor) *source {
	r.Helper()
	s := must(r.engine.Open(r.Context(), r.target, d, d.Offers[0].Data))(r).(*source)
	r.Cleanup(func() { noError(r, s.Close()) })
	return s
}

// plan reads pages 1 to 4 onto 5 to 8.
func plan() *transfer.Plan {
	p := &transfer.Plan{}
	local, remote := []page.ID{5, 6, 7, 8}, []page.ID{1, 2, 3, 4}
	if err := p.Set(0, 4*shape.PageSize, local, remote, shape.PageSize); err != nil {
		panic(err)
	}
	return p
}

// wantPages compares what plan reads.
func (r *reader) wantPages() {
	r.Helper()
	far := must(shape.LayerMajor())(r)
	all := contents(far.Bytes())
	for layer := range far.Layers() {
		for i := range page.ID(4) {
			from := must(far.Chunks(nil, make([]uintptr, far.Regions()), layer, 1+i, 0, shape.PageSize))(r)
			to := must(r.target.Cache.Chunks(nil, layer, 5+i, 0, shape.PageSize))(r)
			for j, c := range to {
				m := must(r.target.Cache.Region(c.Region))(r)
				if got := r.fake.Peek(m.Base()+uintptr(c.Off), int(c.Bytes)); !bytes.Equal(got, all[from[j].Off:][:c.Bytes]) {
					r.Fatalf("layer %d, page %d: other bytes", layer, 5+i)
				}
			}
		}
	}
}

// held stops the reader's stream, and starts a copy that stands there.
func (r *reader) held(s *source) (release func(), outcome <-chan error) {
	r.Helper()
	h, _ := r.acc.Handle(r.stream)
	release = r.fake.Hold(uintptr(h))
	r.Cleanup(release) // also of a test that has failed
	over := make(chan error, 1)
	go func() { over <- s.Copy(context.Background(), r.stream, plan()) }()
	r.until("the copy is enqueued", func() bool { return r.fake.Queued(uintptr(h)) > 0 })
	return release, over
}

func (r *reader) until(what string, is func() bool) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	for tick := time.NewTicker(time.Millisecond); !is(); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			r.Fatalf("it never came to pass: %s", what)
		}
	}
}

func (r *reader) ended(s *source) func() bool {
	return func() bool {
		s.using.Lock()
		defer s.using.Unlock()
		return s.over
	}
}

// open memories of either kind, as the fake counts them.
func (r *reader) memories() int64 {
	c := r.fake.Counts()
	return c.OpenedMemories + c.Mappings
}

func (r *reader) wantRefused(err error, kind fault.Kind, text string, own int64) {
	r.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) || fault.RemedyOf(err) == "" {
		r.Errorf("error %v (remedy %q), want kind %s, about %q, and a remedy", err, fault.RemedyOf(err), kind.Error(), text)
	}
	if n := r.memories() - own; n != 0 {
		r.Errorf("%d memories stay open", n)
	}
}

// kinds are both vendors, with memory of both kinds.
func kinds(t *testing.T, run func(t *testing.T, r *reader)) {
	t.Helper()
	for _, c := range []config{
		{fakedriver.Options{Version: fakedriver.CUDA130}, plainMemory},
		{fakedriver.Options{Version: fakedriver.CUDA130}, twoPieces},
		{fakedriver.Options{Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}, plainMemory},
		{fakedriver.Options{Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}, mappedMemory},
	} {
		t.Run(c.String(), func(t *testing.T) { run(t, newGround(t, c).reader(t)) })
	}
}

// TestOwnerKilled_InMidRead has an owner die while copies of its memory are queued: that
// stays open until they are over, and not longer.
func TestOwnerKilled_InMidRead(t *testing.T) {
	kinds(t, func(t *testing.T, r *reader) {
		p := r.start(t, orders{})
		d := p.publish()
		s := r.open(d)
		if n, err := s.Epoch(t.Context(), d.Epoch.Word); n != d.Epoch.Count || err != nil {
			t.Errorf("the epoch is %d, %v, and not %d", n, err, d.Epoch.Count)
		}
		release, outcome := r.held(s)
		p.kill()
		r.until("the owner's end is seen", r.ended(s))
		if n := r.memories(); n == 0 {
			t.Error("memory was closed under a copy")
		}
		if _, err := s.Epoch(t.Context(), d.Epoch.Word); !errors.Is(err, fault.NotFound) {
			t.Errorf("the epoch of a dead owner: %v", err)
		}
		select {
		case err := <-outcome:
			t.Errorf("the copy is over, and its stream stands: %v", err)
		default:
		}
		release()
		noError(t, <-outcome) // the bytes came: it is the epoch that fails the read
		r.until("the memory is closed", func() bool { return r.memories() == 0 })
		if err := s.Copy(t.Context(), r.stream, plan()); !errors.Is(err, fault.NotFound) {
			t.Errorf("a copy from a dead owner: %v", err)
		}
		if _, err := r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data); !errors.Is(err, fault.NotFound) {
			t.Errorf("a dead owner is opened: %v", err)
		}
	})
}

// TestWithdraw_WaitsForReaders has an owner close while copies of its memory are queued.
func TestWithdraw_WaitsForReaders(t *testing.T) {
	kinds(t, func(t *testing.T, r *reader) {
		p := r.start(t, orders{})
		d := p.publish()
		s := r.open(d)
		release, outcome := r.held(s)
		p.tell("stop")
		r.until("the owner asks for its memory", r.ended(s))
		noError(t, s.Join(d.Epoch)) // it is still connected: it waits
		release()
		noError(t, <-outcome)
		if got := p.answer(); got != "stopped" || r.memories() != 0 {
			t.Errorf("the owner says %q, and %d memories are open", got, r.memories())
		}
		r.wantPages()
		if err := s.Copy(t.Context(), r.stream, plan()); !errors.Is(err, fault.NotFound) {
			t.Errorf("a copy of what was withdrawn: %v", err)
		}
	})
}

func TestOpen_OncePerProcess(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	d := r.start(t, orders{}).publish()
	a, b := r.open(d), r.open(d)
	if n := r.fake.Calls("cuIpcOpenMemHandle_v2"); n != 1 || len(r.engine.held) != 1 {
		t.Errorf("%d opens of one handle, %d are held", n, len(r.engine.held))
	}
	noError(t, a.Close())
	noError(t, b.Copy(t.Context(), r.stream, plan()))
	r.wantPages()
	noError(t, b.Close())
	if n := r.fake.Calls("cuIpcCloseMemHandle"); n != 1 || len(r.engine.held) != 0 {
		t.Errorf("%d closes of one handle, %d are held", n, len(r.engine.held))
	}
}

func TestOpen_StaleHandle(t *testing.T) {
	for _, c := range []config{configs()[0], {fakedriver.Options{Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}, plainMemory}} {
		r := newGround(t, c).reader(t)
		p := r.start(t, orders{})
		d := p.publish()
		p.ask("free")
		_, err := r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data)
		r.wantRefused(err, fault.Device, "memory of process", 0)
	}
}

// TestOpen_HandleOfAnEarlierProcess has a handle that names memory which a dead process's
// reader still has open.
func TestOpen_HandleOfAnEarlierProcess(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	first := r.start(t, orders{})
	old := r.open(first.publish())
	release, outcome := r.held(old)
	first.kill()
	d := r.start(t, orders{}).publish()
	h := foreignAlloc(r, d).handle
	r.engine.mu.Lock()
	r.engine.held[h] = []*source{old} // as if it had been given twice
	r.engine.mu.Unlock()
	if _, err := r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data); !errors.Is(err, fault.Busy) || fault.RemedyOf(err) == "" {
		t.Errorf("a handle of an earlier process: %v", err)
	}
	r.engine.mu.Lock()
	delete(r.engine.held, h)
	r.engine.mu.Unlock()
	release()
	noError(t, <-outcome)
	noError(t, r.open(d).Copy(t.Context(), r.stream, plan()))
}

// TestOpen_OtherDevice has owners whose ordinals are others than here.
func TestOpen_OtherDevice(t *testing.T) {
	for _, c := range []config{configs()[0], {fakedriver.Options{Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}, mappedMemory}} {
		r := newGround(t, c).reader(t)
		d := r.start(t, orders{Which: "1"}).publish()
		_, err := r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data)
		r.wantRefused(err, fault.Unsupported, "another device", 0)

		t.Setenv("FAKE_VISIBLE", "1,0")
		d = r.start(t, orders{Which: "1"}).publish()
		noError(t, r.open(d).Copy(t.Context(), r.stream, plan()))
		r.wantPages()
		t.Setenv("FAKE_VISIBLE", "0,1")
	}
}

func TestOpen_RefusesItself(t *testing.T) {
	for _, c := range configs() {
		t.Run(c.String(), func(t *testing.T) { refusesItself(t, newGround(t, c).reader(t)) })
	}
}

func refusesItself(t *testing.T, r *reader) {
	t.Helper()
	host := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, host.Close()) })
	g := must(shape.LayerMajor())(t)
	addr, free, err := r.memory(r.acc, g.Bytes())
	noError(t, err)
	t.Cleanup(func() { noError(t, free()) })
	m := must(r.acc.Wrap(addr, g.Bytes()))(t)
	t.Cleanup(func() { noError(t, m.Free()) })
	own := must(kv.WrapOn(g, []*device.Memory{m}, r.acc))(t)
	t.Cleanup(func() { noError(t, own.Close()) })
	before := r.memories()
	pub := must(transfer.NewPublisher(transfer.PublisherOptions{Cache: own, Host: host, Engines: []transfer.Engine{r.engine}}))(t)
	t.Cleanup(func() { noError(t, pub.Close()) })
	d := must(pub.Descriptor())(t)
	_, err = r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data)
	r.wantRefused(err, fault.Invalid, "this process's own", before)

	// Memory of another device is nobody's to offer here, and none of it can be read into.
	in := must(kv.NewCache(must(shape.LayerMajor())(t), host))(t)
	t.Cleanup(func() { noError(t, in.Close()) })
	_, _, err = r.engine.Offer(transfer.Export{Cache: in})
	r.wantRefused(err, fault.Unsupported, "memory of host", before)
	_, err = r.engine.Open(t.Context(), transfer.Target{Cache: in, Device: host}, d, d.Offers[0].Data)
	r.wantRefused(err, fault.Unsupported, "memory of host", before)
}

func TestOffer_MemoryThatCannotBeShared(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	host := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, host.Close()) })
	r.fake.FailCall("cuIpcGetMemHandle", 1, 1)
	pub := must(transfer.NewPublisher(transfer.PublisherOptions{Cache: r.target.Cache, Host: host, Engines: []transfer.Engine{r.engine}}))(t)
	t.Cleanup(func() { noError(t, pub.Close()) })
	_, err := pub.Descriptor()
	r.wantRefused(err, fault.Unsupported, "cuIpcGetMemHandle", 0)
}

// TestEvent has a reader wait for the owner's work, and not longer than it may.
func TestEvent(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	p := r.start(t, orders{Event: true})
	p.ask("hold")
	s := r.open(p.publish())
	before := r.fake.Counts().Linear
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := s.Copy(ctx, r.stream, plan()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a copy of what is being written: %v", err)
	}
	if n := r.fake.Counts().Linear - before; n != 0 {
		t.Errorf("%d copies were enqueued", n)
	}
	p.ask("release")
	noError(t, s.Copy(t.Context(), r.stream, plan()))
	r.wantPages()

	p.ask("hold")
	copied := make(chan error, 1)
	go func() { copied <- s.Copy(context.Background(), r.stream, plan()) }()
	p.kill()
	if err := <-copied; err != nil && !errors.Is(err, fault.NotFound) {
		t.Errorf("the owner has died: %v", err)
	}
	if _, err := s.Epoch(t.Context(), 0); !errors.Is(err, fault.NotFound) {
		t.Errorf("the epoch of a dead owner: %v", err)
	}
}

func TestOptions(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	for _, o := range []Options{{Event: make([]byte, 63)}, {Linger: -1}} {
		if _, err := New(r.acc, o); !errors.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := New(nil, Options{}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no device: %v", err)
	}
}

func TestProbe(t *testing.T) {
	for _, o := range []fakedriver.Options{{}, {Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}} {
		r := newGround(t, config{o, plainMemory}).reader(t)
		got := must(Probe(r.acc))(t)
		if got.Engine != r.engine.Name() || got.Handles != nil || got.Descriptors != nil {
			t.Errorf("%+v", got)
		}
	}
	r := newGround(t, config{fakedriver.Options{Settings: map[string]string{"attributes": "103=0"}}, plainMemory}).reader(t)
	r.fake.FailCall("cuIpcGetMemHandle", 1, 801)
	got := must(Probe(r.acc))(t)
	if !errors.Is(got.Handles, fault.Unsupported) || !errors.Is(got.Descriptors, fault.Unsupported) || fault.RemedyOf(got.Descriptors) == "" {
		t.Errorf("%+v", got)
	}
}
