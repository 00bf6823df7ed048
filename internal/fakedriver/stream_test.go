package fakedriver

import (
	"testing"

	"github.com/kvferry/kvferry/internal/dl"
)

// TestLazyStreamsMoveWhenAsked: by who waits, by who asks three times, and through an event
// that another stream waits for.
func TestLazyStreamsMoveWhenAsked(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		o.Mode = Lazy
		o.Settings = map[string]string{"patience_ms": "1000000"}
		r := newRig(t, o)
		h, d, s, other := r.host(64), r.alloc(64), r.newStream(), r.newStream()
		e := r.newEvent(2)
		query := func(name string, handle uintptr) {
			t.Helper()
			r.copy(d, addr(h), 64, s)
			r.must(r.either("cuEventRecord", "hipEventRecord"), e, s)
			for range 2 {
				r.want(notReady, name, handle)
			}
			if n := r.Queued(s); n != 2 {
				t.Errorf("%d operations are queued", n)
			}
			for code := notReady; code != ok; {
				if code = r.call(name, handle); code != ok && code != notReady {
					t.Fatal(code)
				}
			}
		}
		query(r.either("cuStreamQuery", "hipStreamQuery"), s)
		query(r.either("cuEventQuery", "hipEventQuery"), e)

		r.copy(addr(h), d, 64, s)
		r.must(r.either("cuEventRecord", "hipEventRecord"), e, s)
		r.must(r.either("cuStreamWaitEvent", "hipStreamWaitEvent"), other, e, 0)
		r.sync(other)
		if n := r.Queued(s); n != 0 {
			t.Errorf("%d operations are queued before a point that was waited for", n)
		}
	})
}

// TestLazyStreamsHavePatience: who looks at memory only is not left alone for ever.
func TestLazyStreamsHavePatience(t *testing.T) {
	r := newRig(t, Options{Mode: Lazy})
	h, d, s := r.host(64), r.alloc(64), r.newStream()
	r.copy(d, addr(h), 64, s)
	for r.Queued(s) > 0 {
	}
}

func TestWordsAndFills(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			h, d, s, other := r.host(64), r.alloc(64), r.newStream(), r.newStream()
			wait, write := r.either("cuStreamWaitValue32_v2", "hipStreamWaitValue32"), r.either("cuStreamWriteValue32_v2", "hipStreamWriteValue32")
			fill := r.either("cuMemsetD8Async", "hipMemsetAsync")
			const all = 1<<32 - 1
			r.must(wait, s, addr(h), 7, 1, all)
			r.must(fill, d, 0x5A, 64, s)
			if r.Queued(s) == 0 {
				t.Error("the stream has not waited for the word")
			}
			r.must(write, other, addr(h), 7, 0)
			r.sync(other)
			r.sync(s)
			if got := r.Peek(d+63, 1)[0]; got != 0x5A || h[0] != 7 {
				t.Errorf("memory is filled with %#x, the word is %d", got, h[0])
			}
			r.want(invalidValue, write, s, addr(h)+1, 7, 0)
			r.want(invalidValue, write, s, addr(shared(t, osPage)), 7, 0)
			r.Expect("pageable word")
			r.want(invalidValue, fill, d+1, 0, 64, s)
			r.Expect("runs past the end")
		})
	})
}

func TestTimesOfEvents(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor})
		elapsed, record := r.either("cuEventElapsedTime", "hipEventElapsedTime"), r.either("cuEventRecord", "hipEventRecord")
		s, a, b, plain := r.newStream(), r.newEvent(0), r.newEvent(0), r.newEvent(2)
		r.want(invalidHandle, elapsed, r.args.Addr, a, b) // never recorded
		r.must(record, a, s)
		r.must(record, plain, s)
		release := r.Hold(s)
		r.must(record, b, s)
		r.want(invalidHandle, elapsed, r.args.Addr, a, plain)
		r.want(notReady, elapsed, r.args.Addr, a, b)
		release()
		r.sync(s)
		r.must(elapsed, r.args.Addr, a, b)
		r.must(r.either("cuEventDestroy_v2", "hipEventDestroy"), r.newLooseEvent())
		gone := r.newLooseEvent()
		r.must(r.either("cuEventDestroy_v2", "hipEventDestroy"), gone)
		r.want(invalidHandle, record, gone, s)
		r.Expect("was destroyed")
		r.want(invalidHandle, record, s, s)
		r.Expect("is not an event")
	}
}

// newLooseEvent is an event that the test destroys itself.
func (r *rig) newLooseEvent() uintptr {
	return r.word(r.either("cuEventCreate", "hipEventCreateWithFlags"), 2)
}

func TestPinnedMemory(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor, Protect: true})
		alloc, free := r.either("cuMemHostAlloc", "hipHostMalloc"), r.either("cuMemFreeHost", "hipHostFree")
		p, d, s := r.word(alloc, 100, 0), r.alloc(100), r.newStream()
		if faults(func() { dl.GoString(p) }) {
			t.Error("pinned memory can't be read")
		}
		release := r.Hold(s)
		r.copy(p, d, 100, s)
		if !faults(func() { dl.GoString(p) }) {
			t.Error("a destination can be read")
		}
		release()
		r.sync(s)
		if faults(func() { dl.GoString(p) }) {
			t.Error("pinned memory can't be read after its copy")
		}
		r.must(free, p)
		if !faults(func() { dl.GoString(p) }) {
			t.Error("freed memory can be read")
		}
		r.want(invalidValue, free, p)
		r.Expect("freed twice")
	}
}

func TestWhatPointersAre(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor})
		attribute := r.either("cuPointerGetAttribute", "hipPointerGetAttribute")
		d, h := r.alloc(1000), r.host(osPage)
		for _, c := range []struct {
			attribute, p uintptr
			want         uint64
		}{
			{2, d + 5, memoryDevice},
			{2, addr(h), memoryHost},
			{9, d, 0},
			{11, d + 5, uint64(d)},
			{12, d + 5, 1000},
		} {
			if got := r.word(attribute, c.attribute, c.p); uint64(got) != c.want {
				t.Errorf("attribute %d: %#x, want %#x", c.attribute, got, c.want)
			}
		}
		r.want(invalidValue, attribute, r.args.Addr, 2, addr(shared(t, 8)))
		rng := r.either("cuMemGetAddressRange_v2", "hipMemGetAddressRange")
		r.must(rng, r.args.Addr, r.args.Addr+8, d+999)
		if r.args.Words[0] != uint64(d) || r.args.Words[1] != 1000 {
			t.Errorf("range %#x", r.args.Words[:2])
		}
		r.want(notFound, rng, r.args.Addr, r.args.Addr+8, addr(h))
	}
}

func TestPeers(t *testing.T) {
	r := newRig(t, Options{})
	mine := r.alloc(64)
	s := r.newStream()
	before := r.word("cuCtxGetCurrent")
	peer := r.word("cuDevicePrimaryCtxRetain", 1)
	r.must("cuCtxSetCurrent", peer)
	theirs := r.word("cuMemAlloc_v2", 64)
	r.must("cuCtxSetCurrent", before)
	r.Poke(theirs, []byte("theirs"))
	if can := r.word("cuDeviceCanAccessPeer", 0, 1); can != 1 {
		t.Errorf("peer access: %d", can)
	}
	r.must("cuMemcpyPeerAsync", mine, before, theirs, peer, 64, s)
	r.want(invalidContext, "cuMemcpyPeerAsync", mine, peer, theirs, peer, 64, s)
	r.Expect("not those of the memories")
	r.must("cuCtxEnablePeerAccess", peer, 0)
	r.want(704, "cuCtxEnablePeerAccess", peer, 0)
	r.copy(mine, theirs, 64, s)
	r.sync(s)
	if got := string(r.Peek(mine, 6)); got != "theirs" {
		t.Errorf("%q", got)
	}
	r.must("cuCtxSetCurrent", peer)
	r.must("cuMemFree_v2", theirs)
	r.must("cuCtxSetCurrent", before)
	r.must("cuDevicePrimaryCtxRelease_v2", 1)
}

func TestPriorities(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor})
		r.must(r.either("cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange"), r.args.Addr, r.args.Addr+8)
		least, greatest := int32(r.args.Words[0]), int32(r.args.Words[1])
		if least <= greatest {
			t.Errorf("from %d to %d", least, greatest)
		}
		for _, c := range []struct{ ask, get int32 }{{least, least}, {greatest, greatest}, {greatest - 1, greatest}, {least + 1, least}} {
			s := r.word(r.either("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"), 1, uintptr(uint32(c.ask)))
			r.must(r.either("cuStreamGetPriority", "hipStreamGetPriority"), s, r.args.Addr)
			if got := int32(r.args.Words[0]); got != c.get {
				t.Errorf("asked for %d: %d, want %d", c.ask, got, c.get)
			}
			r.must(r.either("cuStreamDestroy_v2", "hipStreamDestroy"), s)
		}
	}
}

func TestAttributesCanBeSet(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor, Settings: map[string]string{"attributes": "40=1,2=1"}})
		call, engines, pitch := r.either("cuDeviceGetAttribute", "hipDeviceGetAttribute"), uintptr(40), uintptr(11)
		if r.hip() {
			engines, pitch = 2, 58
		}
		if got := r.word(call, engines, 0); got != 1 {
			t.Errorf("engines %d", got)
		}
		if got := r.word(call, pitch, 0); got != 1<<31-1 {
			t.Errorf("pitch %d", got)
		}
	}
}
