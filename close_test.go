package kvferry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
)

func TestClose_EndsEverything(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.store(text(3, 0, 8))
	e.evict(1)
	admitted := e.serve("a", text(1, 0, 9))
	matched := must(e.ingest("b", text(3, 0, 9), 9))(t)
	equal(t, "matched", must(matched.match())(t).Pages, 2)
	noError(t, e.m.Close(t.Context()))
	faulttest.Refused(t, e.m.Close(t.Context()), fault.Closed)

	_, ingest := e.m.Ingest(ID{Request: "c"}, Prompt{})
	_, match := matched.s.Match()
	_, admit := matched.s.Admit(t.Context(), 1)
	for name, err := range map[string]error{
		"ingest": ingest, "match": match, "admit": admit, "commit": admitted.s.Commit(0), "extend": admitted.s.Extend(),
		"reset": admitted.s.Reset(true), "remove": admitted.s.Remove(), "check": e.m.Check(),
	} {
		t.Run(name, func(t *testing.T) { faulttest.Refused(t, err, fault.Closed) })
	}
}

func TestClose_LeavesTheProcessAsItWas(t *testing.T) {
	dev := must(device.OpenHost(device.HostOptions{}))(t)
	cache := must(kv.NewCache(geometry(t, shape), dev))(t)
	maps, fds, err := leaktest.CountHostMemory()
	noError(t, err)
	goroutines := runtime.NumGoroutine()
	for range 3 {
		m := must(Open(Options{Cache: cache, HostPages: 64}))(t)
		s := must(m.Ingest(ID{}, Prompt{Tokens: 9}))(t)
		must(s.Admit(t.Context(), 9))(t)
		noError(t, m.Close(t.Context()))
	}
	mapsNow, fdsNow, err := leaktest.CountHostMemory()
	noError(t, err)
	equal(t, "mappings", mapsNow, maps)
	equal(t, "descriptors", fdsNow, fds)
	for runtime.NumGoroutine() > goroutines { // those that are ending; goleak names any that is not
		runtime.Gosched()
	}
	noError(t, cache.Close()) // the cache and its device are the caller's
	noError(t, dev.Close())
}

func TestClose_WaitsForCopiesAndCanBeCalledAgain(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, test := range []struct {
		name  string
		start func(t *testing.T, e *engine)
	}{
		{"demotion", func(t *testing.T, e *engine) {
			_, err := e.m.store.Evict(canceled, 1)
			equal(t, "canceled", errors.Is(err, context.Canceled), true)
		}},
		{"promotion", func(t *testing.T, e *engine) {
			r := must(e.ingest("a", text(3, 0, 9), 9))(t)
			must(r.match())(t)
			adm := must(r.s.Admit(t.Context(), 1))(t)
			equal(t, "done", adm.Done(), false)
		}},
		{"promotion that nobody waits for", func(t *testing.T, e *engine) {
			r := must(e.ingest("a", text(3, 0, 9), 9))(t)
			must(r.match())(t)
			must(r.s.Admit(t.Context(), 1))(t)
			noError(t, r.s.Remove())
			e.check()
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
			e.store(text(3, 0, 12))
			e.evict(2)
			release := e.hold(e.m.Copies())
			test.start(t, e)
			for range 2 {
				equal(t, "canceled", errors.Is(e.m.Close(canceled), context.Canceled), true)
				must(e.m.Pool().Cache().Page(0))(t) // not freed
				_, err := e.m.Ingest(ID{Request: "late"}, Prompt{})
				faulttest.Refused(t, err, fault.Closed)
			}
			release()
			noError(t, e.m.Close(t.Context()))
			faulttest.Refused(t, e.m.Close(t.Context()), fault.Closed)
		})
	}
}

// A call under way is let out before the memory that it reads is freed.
func TestClose_WaitsForCallsUnderWay(t *testing.T) {
	c := withPages(16)
	c.HeadDim = 16 << 10 // 256 KiB a page, so that checking all takes a while
	for range 10 {
		e := newEngine(t, geometry(t, c), Options{HostPages: 16}, false)
		tokens := text(1, 0, 61)
		keyed := e.serve("stored", tokens)
		noError(t, keyed.s.Remove())
		e.evict(15)
		r := must(e.ingest("a", tokens, 61))(t)
		equal(t, "matched", must(r.match())(t).Pages, 15)
		admitted := make(chan error, 1)
		go func() {
			_, err := r.s.Admit(context.Background(), 1)
			admitted <- err
		}()
		for !r.underWay() && len(admitted) == 0 {
			runtime.Gosched()
		}
		noError(t, e.m.Close(t.Context()))
		if err := <-admitted; err != nil {
			faulttest.Refused(t, err, fault.Closed)
		}
	}
}

// underWay reports whether an Admit of r has let go of the manager.
func (r *run) underWay() bool {
	r.e.m.mu.Lock()
	defer r.e.m.mu.Unlock()
	return r.s.busy
}

func TestClose_LeavesACallThatWaitsForItsCopy(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 8}, false)
	e.store(text(1, 0, 32))
	r := must(e.ingest("a", text(2, 0, 8), 8))(t)
	release := e.hold(e.m.Copies())
	var admitted error
	var admitting sync.WaitGroup
	admitting.Go(func() { _, admitted = r.s.Admit(context.Background(), 8) })
	for !r.underWay() {
		runtime.Gosched()
	}
	faulttest.Refused(t, r.s.Commit(0), fault.Busy, r.s.ID().String())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	equal(t, "canceled", errors.Is(e.m.Close(ended), context.Canceled), true)
	release()
	noError(t, e.m.Close(t.Context()))
	admitting.Wait()
	if admitted != nil {
		faulttest.Refused(t, admitted, fault.Closed)
	}
}

// A stream that failed is reported, and costs nothing but the report.
func TestClose_ReportsAFailedStream(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.store(text(1, 0, 8))
	e.breakCopies()
	_, _ = e.m.store.Evict(t.Context(), 2)
	err := e.m.Close(t.Context())
	faulttest.Refused(t, err, fault.Device)
	equal(t, "the cause", errors.Is(err, e.cable), true)
	faulttest.Refused(t, e.m.Close(t.Context()), fault.Closed)
	want := 1 // the cache's
	if e.g.acc != nil {
		want = 2 // the slab's, and that of the tokens written
	}
	if maps, _, _ := leaktest.CountHostMemory(); maps != want {
		t.Fatalf("%d mappings", maps)
	}
}

func TestClose_FromManyGoroutines(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	e.store(text(1, 0, 16))
	errs := make([]error, 8)
	var closing sync.WaitGroup
	for i := range errs {
		closing.Go(func() { errs[i] = e.m.Close(t.Context()) })
	}
	closing.Wait()
	good := 0
	for i, err := range errs {
		if err == nil {
			good++
			continue
		}
		t.Run(fmt.Sprint(i), func(t *testing.T) { faulttest.Refused(t, err, fault.Closed) })
	}
	equal(t, "closed once", good, 1)
}

// Somebody's copy out of the host pool is in flight: Close is refused, and frees
// everything when it is called again.
func TestClose_RefusedByABusyPoolCanBeCalledAgain(t *testing.T) {
	e := newEngine(t, geometry(t, shape), Options{HostPages: 4}, false)
	s := must(e.dev.NewStream("somebody's"))(t)
	release := e.hold(s)
	pool := must(e.m.Pool().Cache().Region(0))(t)
	dst, to, _ := e.g.stage(make([]byte, 8))
	noError(t, s.Copy([]device.Op{{Dst: dst, DstOff: to, Src: pool, Bytes: 8}}))
	for range 2 {
		faulttest.Refused(t, e.m.Close(t.Context()), fault.Busy)
	}
	release()
	noError(t, s.Sync(t.Context()))
	noError(t, s.Close())
	noError(t, e.m.Close(t.Context()))
	faulttest.Refused(t, e.m.Close(t.Context()), fault.Closed)
}
