package fakedriver

import (
	"runtime"
	"testing"
)

// elsewhere runs f on another thread, which is a new one each time.
func elsewhere(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		f()
	}()
	<-done
}

func TestThreadWithoutContext(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		s := r.newStream()
		elsewhere(func() {
			if code := r.call(r.either("cuStreamSynchronize", "hipStreamSynchronize"), s); code != invalidContext {
				t.Errorf("code %d", code)
			}
		})
		r.expect(r.either("no current context", "has set no device"))
	})
}

// TestExpiredContext: a thread that was bound by an earlier section has no context. Without
// Expire the same call goes through, which is what a missing bind mostly looks like.
func TestExpiredContext(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		s := r.newStream()
		call := r.either("cuStreamQuery", "hipStreamQuery")
		r.must(call, s)
		r.Expire()
		r.want(invalidContext, call, s)
		r.Expect("set by an earlier section")
		if r.hip() {
			r.must("hipSetDevice", 0)
		} else {
			r.must("cuCtxSetCurrent", r.word("cuDevicePrimaryCtxRetain", 0))
			r.must("cuDevicePrimaryCtxRelease_v2", 0)
		}
		r.must(call, s)
	})
}

// TestIdleContextExpires: with expire_us a thread that has not called for so long is seen
// too.
func TestIdleContextExpires(t *testing.T) {
	r := newRig(t, Options{Vendor: HIP})
	s := r.newStream()
	r.Set("expire_us", "1")
	for r.call("hipStreamQuery", s) == ok {
		runtime.GC() // takes longer
	}
	r.Set("expire_us", "0")
	r.Expect("set by an earlier section")
}

func TestWrongDevice(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		if o.Vendor == HIP {
			r.must("hipSetDevice", 1)
			defer r.must("hipSetDevice", 0)
		} else {
			first := r.word("cuCtxGetCurrent")
			r.must("cuCtxSetCurrent", r.word("cuDevicePrimaryCtxRetain", 1))
			defer func() {
				r.must("cuDevicePrimaryCtxRelease_v2", 1)
				r.must("cuCtxSetCurrent", first)
			}()
		}
		s := r.word(r.either("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"), 1, 0)
		d := r.word(r.either("cuMemAlloc_v2", "hipMalloc"), 64)
		e := r.word(r.either("cuEventCreate", "hipEventCreateWithFlags"), 2)
		r.on(0, func() {
			h := r.host(64)
			mine := r.newStream()
			r.want(invalidHandle, r.either("cuStreamSynchronize", "hipStreamSynchronize"), s)
			r.Expect("is of device 1, but device 0 is current")
			r.want(invalidHandle, r.either("cuEventRecord", "hipEventRecord"), e, mine)
			r.Expect("an event of device 1 is recorded on a stream of device 0")
			r.copy(d, addr(h), 64, mine)
			r.Expect("copies memory of device 1")
			r.copy(r.alloc(64), d, 64, mine)
			r.Expect("no peer access")
			r.sync(mine)
			r.must(r.either("cuStreamWaitEvent", "hipStreamWaitEvent"), mine, e, 0) // that is what events are for
		})
		r.must(r.either("cuEventDestroy_v2", "hipEventDestroy"), e)
		r.must(r.either("cuStreamDestroy_v2", "hipStreamDestroy"), s)
		r.must(r.either("cuMemFree_v2", "hipFree"), d)
	})
}

// on runs f with another device current.
func (r *rig) on(device uintptr, f func()) {
	r.tb.Helper()
	if r.hip() {
		before := r.word("hipGetDevice")
		r.must("hipSetDevice", device)
		f()
		r.must("hipSetDevice", before)
		return
	}
	before := r.word("cuCtxGetCurrent")
	r.must("cuCtxSetCurrent", r.word("cuDevicePrimaryCtxRetain", device))
	f()
	r.must("cuDevicePrimaryCtxRelease_v2", device)
	r.must("cuCtxSetCurrent", before)
}

// TestHostFunctionCallsDriver: a function of the driver is what is called by the stream.
func TestHostFunctionCallsDriver(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		s := r.newStream()
		r.must(r.either("cuLaunchHostFunc", "hipLaunchHostFunc"), s, uintptr(r.Find(r.either("cuStreamQuery", "hipStreamQuery"))), s)
		r.sync(s)
		r.Expect("called from a host function")
	})
}

func TestContextsAreCounted(t *testing.T) {
	r := newRig(t, Options{})
	r.must("cuDevicePrimaryCtxRetain", r.args.Addr, 1)
	if n := r.Counts().Contexts; n != 2 {
		t.Errorf("%d contexts", n)
	}
	r.must("cuCtxSetCurrent", uintptr(r.args.Words[0]))
	s := r.word("cuStreamCreateWithPriority", 1, 0)
	r.word("cuEventCreate", 2)
	r.word("cuMemAlloc_v2", 8)
	gone := r.word("cuCtxGetCurrent")
	r.must("cuDevicePrimaryCtxRelease_v2", 1)
	r.Expect("released with 1 streams, 1 events and 1 memories")
	r.want(invalidContext, "cuStreamQuery", s)
	r.Expect("was released")
	r.want(invalidContext, "cuCtxSetCurrent", gone)
	r.Expect("is not a context")
	r.want(invalidContext, "cuDevicePrimaryCtxRelease_v2", 1)
	r.Expect("more often than it was retained")
	r.must("cuCtxSetCurrent", r.word("cuDevicePrimaryCtxRetain", 0))
	r.must("cuDevicePrimaryCtxRelease_v2", 0)
}

func TestCallBeforeInit(t *testing.T) {
	f := Load(t, Options{})
	if code := int32(f.Find("cuCtxSetCurrent").Call(0)); code != 3 {
		t.Errorf("code %d", code)
	}
	f.Expect("before the library was initialized")
}
