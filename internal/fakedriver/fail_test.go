package fakedriver

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestFailCall(t *testing.T) {
	r := newRig(t, Options{})
	r.FailCall("cuMemAlloc_v2", 2, outOfMemory)
	r.alloc(64)
	r.want(outOfMemory, "cuMemAlloc_v2", r.args.Addr, 64)
	r.alloc(64)
	if n := r.Calls("cuMemAlloc_v2"); n != 3 {
		t.Errorf("%d calls", n)
	}
}

// TestFailCopy: a copy that fails takes its device with it, as real ones do.
func TestFailCopy(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			h, d, s, other := shared(t, osPage), r.alloc(64), r.newStream(), r.newStream()
			r.must(r.either("cuMemHostRegister_v2", "hipHostRegister"), addr(h), 3*64, 0)
			e := r.newEvent(2)
			r.FailCopy(s, 2, launchFailed)
			release := r.Hold(s)
			r.copy(addr(h), d, 64, s)
			r.copy(addr(h)+64, d, 64, s)
			r.copy(addr(h)+128, d, 64, s)
			r.must(r.either("cuEventRecord", "hipEventRecord"), e, s)
			release()
			r.want(launchFailed, r.either("cuEventSynchronize", "hipEventSynchronize"), e)
			for i, want := range []byte{fresh, junk, 0} {
				if h[64*i] != want {
					t.Errorf("destination %d holds %#x, want %#x", i, h[64*i], want)
				}
			}
			r.want(launchFailed, r.either("cuEventQuery", "hipEventQuery"), e)
			r.want(launchFailed, r.either("cuStreamQuery", "hipStreamQuery"), other)
			r.want(launchFailed, r.either("cuMemAlloc_v2", "hipMalloc"), r.args.Addr, 64)
			// What ends things says so too, but they are gone.
			r.want(launchFailed, r.either("cuMemHostUnregister", "hipHostUnregister"), addr(h))
			if n := r.Counts().Registrations; n != 0 {
				t.Errorf("%d registrations", n)
			}
		})
	})
}

// TestLose: a lost device lets nobody wait, and the other one goes on.
func TestLose(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		h, d, s := r.host(128), r.alloc(64), r.newStream()
		release := r.Hold(s)
		defer release()
		r.copy(addr(h), d, 64, s)
		r.Lose(0, launchFailed)
		r.want(launchFailed, r.either("cuStreamSynchronize", "hipStreamSynchronize"), s)
		r.on(1, func() {
			mine := r.word(r.either("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"), 1, 0)
			p := r.word(r.either("cuMemAlloc_v2", "hipMalloc"), 64)
			r.copy(addr(h)+64, p, 64, mine)
			r.sync(mine)
			r.must(r.either("cuStreamDestroy_v2", "hipStreamDestroy"), mine)
			r.must(r.either("cuMemFree_v2", "hipFree"), p)
		})
		if h[0] != 0 || h[64] != fresh {
			t.Errorf("the lost device has copied %#x, the other one %#x", h[0], h[64])
		}
	})
}

// spy is a test whose end is looked at.
type spy struct {
	testing.TB
	said    []string
	cleanup []func()
}

func (s *spy) Errorf(format string, args ...any) {
	s.said = append(s.said, fmt.Sprintf(format, args...))
}
func (s *spy) Cleanup(f func()) { s.cleanup = append(s.cleanup, f) }

func (s *spy) end() string {
	for _, f := range slices.Backward(s.cleanup) {
		f()
	}
	return strings.Join(s.said, "\n")
}

// TestEndOfTest: what is left behind and what was done wrong fail the test.
func TestEndOfTest(t *testing.T) {
	run := func(o Options, f func(r *rig)) string {
		s := &spy{TB: t}
		r := newRig(s, o)
		f(r)
		return s.end()
	}
	nothing := func(*rig) {}
	leak := func(r *rig) { r.must("hipMalloc", r.args.Addr, 8) }
	wrong := func(r *rig) { r.call("hipFree", r.args.Addr) }
	for _, c := range []struct {
		o    Options
		do   func(*rig)
		says string
	}{
		{Options{}, nothing, ""},
		{Options{Vendor: HIP}, nothing, ""},
		{Options{Vendor: HIP}, leak, "HIP: left behind: 1 device memories"},
		{Options{Vendor: HIP, AllowLeaks: true}, leak, ""},
		{Options{Vendor: HIP}, wrong, "not what was allocated"},
		{Options{Vendor: HIP, AllowViolations: true}, wrong, ""},
		{Options{}, func(r *rig) { r.word("cuDevicePrimaryCtxRetain", 1) }, "CUDA: left behind: 1 contexts"},
	} {
		if got := run(c.o, c.do); (c.says == "") != (got == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s: got %q, want %q", c.o.Vendor, got, c.says)
		}
	}
}

// TestLoadsAreApart: what one fake knows is nothing to another.
func TestLoadsAreApart(t *testing.T) {
	a, b := newRig(t, Options{Seed: 2}), Load(t, Options{Devices: 1, Seed: 3})
	a.alloc(64)
	if a.Path() == b.Path() || b.Counts().DeviceMemories != 0 || a.Counts().DeviceMemories != 1 {
		t.Error("two fakes share their state")
	}
}

// TestEndOfProcess: and so do the processes that it has started.
func TestEndOfProcess(t *testing.T) {
	for vendor, says := range map[Vendor][]string{
		CUDA: {"cuMemFree_v2: address 0x1 is not what was allocated", "released with 0 streams, 0 events and 1 memories"},
		HIP:  {"hipFree: address 0x1 is not what was allocated", "left behind: 1 device memories"},
	} {
		r := newRig(t, Options{Vendor: vendor})
		s := &spy{TB: t}
		r.spawnFor(s, "forget", nil).wait()
		got := s.end()
		for _, want := range says {
			if !strings.Contains(got, want) {
				t.Errorf("%s: got %q, want %q", vendor, got, want)
			}
		}
	}
}
