package copier_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// foreign is an event of no device.
type foreign struct{ device.Event }

func TestQueue_BadJobFailsAlone(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		r := openQueue(t, b, nil)
		for _, test := range []struct {
			name string
			dir  copier.Direction
			job  copier.Job
			at   string // where it is refused
			says []string
		}{
			{"lists differ", copier.Store, copier.Job{Index: 7, Src: []page.ID{1}, Dst: []page.ID{1, 2}}, "submit", []string{"store 7", "1 source pages and 2"}},
			{"source too high", copier.Store, copier.Job{Index: 7, Src: []page.ID{1, rigDevicePages}, Dst: []page.ID{1, 2}}, "submit", []string{"store 7", `"latent"`, "source page 24", "0 … 23"}},
			{"destination too high", copier.Store, copier.Job{Src: []page.ID{1}, Dst: []page.ID{rigHostPages}}, "submit", []string{"destination page 40", "0 … 39"}},
			{"load source too high", copier.Load, copier.Job{Src: []page.ID{rigHostPages}, Dst: []page.ID{1}}, "submit", []string{"load 0", "source page 40"}},
			{"negative", copier.Load, copier.Job{Src: []page.ID{1}, Dst: []page.ID{-1}}, "submit", []string{"destination page -1"}},
			{"sealed store", copier.Store, copier.Job{Src: []page.ID{1}, Dst: []page.ID{1}, Sealed: true}, "submit", []string{"sealed"}},
			{"direction", 2, one(0), "submit", []string{"direction 2"}},
			{"destination twice", copier.Store, copier.Job{Index: 9, Src: []page.ID{1, 2, 3}, Dst: []page.ID{4, 5, 4}}, "end", []string{"store 9", "page 4", "two pairs"}},
			{"foreign event", copier.Load, copier.Job{Index: 9, Src: []page.ID{1}, Dst: []page.ID{1}, Wait: foreign{}}, "end", []string{"load 9"}},
		} {
			err := r.q.Submit(test.dir, test.job)
			if test.at == "end" {
				r.must(err)
				r.must(r.q.Barrier(t.Context()))
				ended := r.q.Completed(test.dir, nil)
				if len(ended) != 1 || ended[0].Index != test.job.Index {
					t.Fatalf("%s: %v ended", test.name, ended)
				}
				err = ended[0].Err
			}
			kindIs(t, test.name, err, fault.Invalid, test.says...)
			for _, dir := range directions { // the queue goes on
				r.must(r.submit(dir, one(1)).Wait(t.Context()))
			}
		}
		r.must(r.q.Err())
	})
}

// apart returns the options of a queue between the caches of one name.
func apart(h *device.Host, dev, host *kv.Cache) copier.QueueOptions {
	return copier.QueueOptions{Device: h, DeviceCaches: map[string]*kv.Cache{"a": dev}, HostCaches: map[string]*kv.Cache{"a": host}}
}

func openOrFail(t *testing.T, o copier.QueueOptions) *copier.Queue {
	t.Helper()
	q, err := copier.OpenQueue(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, func() error { return q.Shutdown(context.Background()) }) })
	return q
}

// outcome submits a job and waits for it.
func outcome(t *testing.T, q *copier.Queue, dir copier.Direction, job copier.Job) error {
	t.Helper()
	job.Done = device.NewTicket()
	if err := q.Submit(dir, job); err != nil {
		t.Fatal(err)
	}
	return job.Done.Wait(t.Context())
}

func TestQueue_MemoryOutOfReachFailsItsJobAlone(t *testing.T) {
	h := openHost(t)
	g := flat(t, 10)
	far, err := kv.Wrap(g, []*device.Memory{device.NewMemory(device.MemoryOptions{Device: "far", Base: 4096, Size: 80})})
	if err != nil {
		t.Fatal(err)
	}
	q := openOrFail(t, apart(h, far, newCache(t, g, h)))
	for _, dir := range directions {
		kindIs(t, dir.String(), outcome(t, q, dir, one(3)), fault.Unsupported, dir.String()+" 3", `cache "a"`, "op 0", "far")
	}
	if err := q.Err(); err != nil {
		t.Error(err)
	}
}

func TestQueue_OneMemoryOnBothSides(t *testing.T) {
	h := openHost(t)
	c := newCache(t, flat(t, 10), h)
	m, _ := c.Region(0)
	copy(m.Bytes(), queuePattern("one", 80))
	twin, err := kv.Wrap(c.Geometry(), []*device.Memory{device.WrapHost(m.Bytes())})
	if err != nil {
		t.Fatal(err)
	}
	for name, host := range map[string]*kv.Cache{"same cache": c, "same memory": twin} {
		q := openOrFail(t, apart(h, c, host))
		for _, dir := range directions {
			for what, job := range map[string]copier.Job{
				"a chain":      {Src: []page.ID{1, 2}, Dst: []page.ID{2, 3}},
				"a swap":       {Src: []page.ID{1, 2}, Dst: []page.ID{2, 1}},
				"onto itself":  {Src: []page.ID{5}, Dst: []page.ID{5}},
				"a run's step": {Src: []page.ID{1, 2, 3}, Dst: []page.ID{2, 3, 4}},
			} {
				kindIs(t, name+", "+what, outcome(t, q, dir, job), fault.Invalid, `cache "a"`)
			}
			if err := outcome(t, q, dir, copier.Job{Src: []page.ID{1, 2}, Dst: []page.ID{7, 8}}); err != nil {
				t.Errorf("%s: independent pages: %v", name, err)
			}
			if string(m.Bytes()[8:24]) != string(m.Bytes()[56:72]) {
				t.Errorf("%s: pages 1 and 2 are not on 7 and 8", name)
			}
		}
	}
}

func TestOpenQueue_RefusesWhatDoesNotFit(t *testing.T) {
	h, other := openHost(t), openHost(t)
	a, b := newCache(t, flat(t, 10), h), newCache(t, flat(t, 10), h)
	wide, err := kv.NewGeometry(kv.Spec{
		Pages: 10, PageSize: 1, RegionBytes: []int64{160},
		Layers: []kv.Layer{{Planes: []kv.Plane{{Kind: kv.Opaque, PageStride: 16, Bytes: 16}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	longer, err := kv.NewGeometry(kv.Spec{
		Pages: 10, PageSize: 2, RegionBytes: []int64{80},
		Layers: []kv.Layer{{Planes: []kv.Plane{{Kind: kv.Opaque, PageStride: 8, Bytes: 8}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	m, _ := a.Region(0)
	lap, err := kv.Wrap(flat(t, 5), []*device.Memory{device.WrapHost(m.Bytes()[4:])})
	if err != nil {
		t.Fatal(err)
	}
	type caches = map[string]*kv.Cache
	for _, test := range []struct {
		name string
		o    copier.QueueOptions
		says []string
	}{
		{"no device", copier.QueueOptions{}, []string{"no device"}},
		{"no caches", copier.QueueOptions{Device: h}, []string{"no device caches"}},
		{"batches", copier.QueueOptions{Device: h, BatchOps: -1}, []string{"-1"}},
		{"host lacks a name", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": a, "k": b}, HostCaches: caches{"a": b}}, []string{`"k"`, "no host cache"}},
		{"device lacks a name", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": a}, HostCaches: caches{"a": b, "k": b}}, []string{`"k"`, "no device cache"}},
		{"nil", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": nil}, HostCaches: caches{"a": b}}, []string{`"a"`, "nil"}},
		{"bytes of a page", apart(h, a, newCache(t, wide, h)), []string{`"a"`, "8 bytes on the device and 16 on the host"}},
		{"tokens of a page", apart(h, a, newCache(t, longer, h)), []string{`"a"`}},
		{"two names share memory", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": a, "k": lap}, HostCaches: caches{"a": b, "k": newCache(t, flat(t, 5), h)}}, []string{`"a"`, `"k"`, "shares memory"}},
		{"one cache for two names", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": a, "k": a}, HostCaches: caches{"a": b, "k": newCache(t, flat(t, 10), h)}}, []string{`"a"`, `"k"`}},
		{"sides share part", apart(h, a, lap), []string{`"a"`, "share bytes"}},
		{"sides of two names share part", copier.QueueOptions{Device: h, DeviceCaches: caches{"a": a, "k": newCache(t, flat(t, 5), h)}, HostCaches: caches{"a": b, "k": lap}}, []string{`"k"`, `"a"`, "host", "device"}},
	} {
		q, err := copier.OpenQueue(test.o)
		kindIs(t, test.name, err, fault.Invalid, test.says...)
		if q != nil {
			t.Errorf("%s: there is a queue", test.name)
		}
	}
	s, err := other.NewStream("theirs")
	if err != nil {
		t.Fatal(err)
	}
	o := apart(h, a, b)
	o.LoadStream = refuser{s}
	_, err = copier.OpenQueue(o)
	kindIs(t, "stream of another device", err, fault.Invalid, "load stream")
	closing(t, s.Close)
}

func TestOpenQueue_RefusesAnEngineOfAnotherDevice(t *testing.T) {
	h := openHost(t)
	mine, _ := devicetest.OpenAccelerator(t, devicetest.Options{})
	theirs, _ := devicetest.OpenAccelerator(t, devicetest.Options{Name: "fake:1"})
	for _, dev := range []device.Device{h, mine} {
		o := apart(h, newCache(t, flat(t, 10), h), newCache(t, flat(t, 10), h))
		o.Device, o.Engine = dev, theirs.Engines()[0]
		q, err := copier.OpenQueue(o)
		kindIs(t, "engine of another device", err, fault.Invalid, "engine fake", dev.Name())
		if q != nil {
			t.Errorf("%s: there is a queue", dev.Name())
			_ = q.Shutdown(t.Context())
		}
	}
}

// refuser is a stream of another kind of device.
type refuser struct{ device.Stream }

func (refuser) Record(device.Event) error {
	return fault.New(fault.Invalid, "event", "of another device")
}

// Layers that take turns in every page of one memory share no byte.
func TestOpenQueue_TakesCachesThatInterleave(t *testing.T) {
	h := openHost(t)
	mem, err := h.Alloc(10 * 32)
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, mem.Free)
	copy(mem.Bytes(), queuePattern("interleaved", 320))
	o := copier.QueueOptions{Device: h, DeviceCaches: map[string]*kv.Cache{}, HostCaches: map[string]*kv.Cache{}}
	for i := range 4 {
		g, err := kv.NewGeometry(kv.Spec{
			Pages: 10, PageSize: 1, RegionBytes: []int64{9*32 + 8},
			Layers: []kv.Layer{{Planes: []kv.Plane{{Kind: kv.Opaque, PageStride: 32, Bytes: 8}}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		c, err := kv.Wrap(g, []*device.Memory{device.WrapHost(mem.Bytes()[i*8:])})
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprint("layer", i)
		o.DeviceCaches[name], o.HostCaches[name] = c, newCache(t, flat(t, 4), h)
	}
	q := openOrFail(t, o)
	if err := outcome(t, q, copier.Store, copier.Job{Src: []page.ID{2, 9}, Dst: []page.ID{3, 0}}); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		for to, from := range map[page.ID]int{3: 2, 0: 9} {
			got, _ := o.HostCaches[fmt.Sprint("layer", i)].Page(to)
			if string(got) != string(mem.Bytes()[from*32+i*8:][:8]) {
				t.Errorf("layer %d, page %d is wrong", i, to)
			}
		}
	}
}

var errBoom = errors.New("the link went down")

func TestQueue_FirstFailureEndsTheQueue(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		for _, dir := range directions {
			r := openQueue(t, b, nil)
			release := r.held(r.streams[dir])
			r.must(r.q.Submit(dir, one(0)))
			cause := r.fail(r.streams[dir])
			for i := int64(1); i < 20; i++ {
				r.must(r.q.Submit(dir, one(i)))
			}
			release()
			r.must(r.q.Barrier(t.Context()))
			var failed int
			for i, c := range r.q.Completed(dir, nil) {
				if c.Index != int64(i) {
					t.Fatalf("job %d was reported as number %d", c.Index, i)
				}
				if c.Err != nil {
					failed++
					kindIs(t, "job", c.Err, fault.Device, fmt.Sprintf("%v %d", dir, i))
					if !errors.Is(c.Err, cause) {
						t.Errorf("job %d ended with %v", i, c.Err)
					}
				} else if failed > 0 {
					t.Errorf("job %d is well, behind one that failed", i)
				}
			}
			if failed == 0 {
				t.Error("no job failed")
			}
			if err := r.q.Err(); !errors.Is(err, cause) || !errors.Is(err, fault.Device) {
				t.Errorf("the queue's failure is %v", err)
			}
			for _, d := range directions {
				err := r.q.Submit(d, one(1))
				kindIs(t, "submit", err, fault.Device, "failed before")
				if !errors.Is(err, cause) {
					t.Errorf("submit: %v does not tell the first cause", err)
				}
			}
			r.must(r.q.Shutdown(t.Context()))
		}
	})
}

// What is refused halfway is over only when the stream has drained.
func TestQueue_HalfAJobIsOverWhenItsStreamHasDrained(t *testing.T) {
	for _, rules := range []string{"(fail copy (at 2))", "(fail signal (at 1))", "(fail copy (at 3)) (fail signal)"} {
		h := openHost(t)
		in, err := devicetest.NewInjector(rules)
		if err != nil {
			t.Fatal(err)
		}
		b := hostBackend(t, nil)
		b.dev = in.Device(h)
		b.hold = func(s device.Stream) func() { return h.Hold(devicetest.Unwrap(s)) }
		b.cache = func(t testing.TB, g *kv.Geometry) *kv.Cache { t.Helper(); return newCache(t, g, h) }
		r := openQueue(t, b, func(o *copier.QueueOptions) { o.BatchOps = 2 })
		release := r.held(r.streams[copier.Store])
		half := r.submit(copier.Store, copier.Job{Index: 4, Src: []page.ID{1, 5, 9}, Dst: []page.ID{2, 4, 6}})
		next := one(5)
		next.Done = device.NewTicket()
		if err := r.q.Submit(copier.Store, next); err != nil { // the queue has failed already
			kindIs(t, rules, err, fault.Device, "failed before", "injected")
			next.Done.Complete(err)
		}
		for r.q.Err() == nil { // the job has failed
			if done, _ := half.Poll(); done {
				t.Fatalf("%s: the job is over while its stream is held", rules)
			}
			runtime.Gosched()
		}
		for range 5 { // loads come and go meanwhile, but the queue has failed
			kindIs(t, rules, r.q.Submit(copier.Load, one(1)), fault.Device)
		}
		if done, _ := half.Poll(); done {
			t.Errorf("%s: the job is over while its stream is held", rules)
		}
		release()
		kindIs(t, rules, half.Wait(t.Context()), fault.Device, "store 4", "injected")
		kindIs(t, rules, next.Done.Wait(t.Context()), fault.Device, "injected")
	}
}

func TestQueue_FullUntilReadOrEnded(t *testing.T) {
	r := openQueue(t, hostBackend(t, nil), func(o *copier.QueueOptions) { o.Limit = 3 })
	release := r.held(r.streams[copier.Store])
	r.must(r.q.Submit(copier.Store, one(0)))
	r.must(r.q.Submit(copier.Store, one(1)))
	ticket := r.submit(copier.Store, one(2))
	kindIs(t, "job 4 of 3", r.q.Submit(copier.Store, one(3)), fault.Full, "3 stores are unfinished")
	r.must(r.submit(copier.Load, one(0)).Wait(t.Context())) // loads have a limit of their own
	release()
	r.must(ticket.Wait(t.Context()))
	r.must(r.q.Submit(copier.Store, one(4))) // the one with a ticket makes room
	r.must(r.q.Barrier(t.Context()))
	kindIs(t, "three not read", r.q.Submit(copier.Store, one(5)), fault.Full, "3 were not read")
	if got := fmt.Sprint(r.indices(copier.Store)); got != "[0 1 4]" {
		t.Errorf("%s were reported", got)
	}
	r.must(r.q.Submit(copier.Store, one(6)))
}

func TestQueue_ReadyTells(t *testing.T) {
	r := openQueue(t, hostBackend(t, nil), nil)
	for _, dir := range directions {
		got := 0
		for i := range int64(100) {
			r.must(r.q.Submit(dir, one(i)))
		}
		for got < 100 {
			<-r.q.Ready(dir)
			for _, i := range r.indices(dir) {
				if i != int64(got) {
					t.Fatalf("job %d was reported as number %d", i, got)
				}
				got++
			}
		}
	}
}

func TestQueue_ShutdownSaysWhatStaysReserved(t *testing.T) {
	counted := &tally{}
	r, g, open := gated(t, hostBackend(t, nil), copier.Load, func(o *copier.QueueOptions) {
		counted.Stream = o.StoreStream
		o.StoreStream = counted
	})
	release := r.held(r.streams[copier.Store])
	enqueued := r.submit(copier.Store, one(11))
	for len(counted.take()) == 0 {
		runtime.Gosched()
	}
	r.must(r.q.Submit(copier.Store, one(12)))
	inHand := r.submit(copier.Load, one(21))
	<-g.entered
	r.must(r.q.Submit(copier.Load, one(22)))
	waiting := r.submit(copier.Load, one(23))

	kindIs(t, "shutdown", r.q.Shutdown(over()), fault.Busy, "store 11", "load 21", "latent", "layers")
	kindIs(t, "a job that did not start", waiting.Wait(t.Context()), fault.Closed, "load 23", "not started")
	if ended := r.q.Completed(copier.Load, nil); len(ended) != 1 || ended[0].Index != 22 || !errors.Is(ended[0].Err, fault.Closed) {
		t.Errorf("%v were reported, want load 22, closed", ended)
	}
	kindIs(t, "submit", r.q.Submit(copier.Store, one(1)), fault.Closed)
	kindIs(t, "shutdown again", r.q.Shutdown(over()), fault.Busy, "store 11", "load 21")
	for _, ticket := range []*device.Ticket{enqueued, inHand} {
		if done, _ := ticket.Poll(); done {
			t.Error("a job that the device still has is over")
		}
	}

	release()
	open()
	for range 2 {
		r.must(r.q.Shutdown(t.Context()))
	}
	r.must(enqueued.Wait(t.Context()))
	// The one in the driver's hands was cut off, or was through.
	if err := inHand.Wait(t.Context()); err != nil {
		kindIs(t, "the job in the driver's hands", err, fault.Closed, "load 21")
	}
	r.must(r.q.Err())
}

func TestQueue_ShutdownIsBoundByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := openHost(t)
		q, err := copier.OpenQueue(apart(h, newCache(t, flat(t, 10), h), newCache(t, flat(t, 10), h)))
		if err != nil {
			t.Fatal(err)
		}
		s, err := h.NewStream("kernels")
		if err != nil {
			t.Fatal(err)
		}
		release := h.Hold(s)
		e, err := h.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		// A copy on the stream that is held, so that there is something to wait for.
		m := newCache(t, flat(t, 10), h)
		to, _ := m.Region(0)
		other := newCache(t, flat(t, 10), h)
		from, _ := other.Region(0)
		if err := errors.Join(s.Copy([]device.Op{{Dst: to, Src: from, Bytes: 8}}), s.Record(e)); err != nil {
			t.Fatal(err)
		}
		job := one(5)
		job.Wait = e
		if err := q.Submit(copier.Load, job); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		kindIs(t, "shutdown", q.Shutdown(t.Context()), fault.Busy, "load 5")
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("it took %v, want 5 s", took)
		}
		release()
		closing(t, func() error { return q.Shutdown(t.Context()) }) // closes its own streams, too
		if ended := q.Completed(copier.Load, nil); len(ended) != 1 || ended[0].Err != nil {
			t.Errorf("%v were reported, want load 5", ended)
		}
		closing(t, s.Close)
	})
}

func TestQueue_ShutdownDrains(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		r := openQueue(t, b, nil)
		for i := range int64(200) {
			for _, dir := range directions {
				r.must(r.q.Submit(dir, one(i)))
			}
		}
		r.must(r.q.Shutdown(t.Context()))
		for _, dir := range directions {
			if got := r.indices(dir); len(got) != 200 || !slices.IsSorted(got) {
				t.Errorf("%d %vs were reported, want 200 in order", len(got), dir)
			}
		}
	})
}

func TestQueue_ManyGoroutines(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		r := openQueue(t, b, nil)
		var wg sync.WaitGroup
		for w := range int64(8) {
			wg.Go(func() {
				for i := range int64(50) {
					dir := directions[(w+i)%2]
					job := copier.Job{Index: w<<32 | i, Src: []page.ID{page.ID(w), 8}, Dst: []page.ID{page.ID(10 + w), 9}}
					if i%3 == 0 {
						job.Done = device.NewTicket()
					}
					err := r.q.Submit(dir, job)
					if err == nil && job.Done != nil {
						err = job.Done.Wait(t.Context())
					}
					if err == nil && i%10 == 0 {
						err = r.q.Barrier(t.Context())
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		r.must(r.q.Barrier(t.Context()))
		last := map[int64]int64{}
		n := 0
		for _, dir := range directions {
			clear(last)
			for _, i := range r.indices(dir) {
				if prev, ok := last[i>>32]; ok && prev >= i {
					t.Errorf("a goroutine's jobs were reported in the order %d, %d", prev&0xff, i&0xff)
				}
				last[i>>32] = i
				n++
			}
		}
		if n != 8*33 {
			t.Errorf("%d jobs were reported, want %d", n, 8*33)
		}
	})
}

func TestQueue_MemoryFreedUnderAJobIsNamed(t *testing.T) {
	h := openHost(t)
	mem, err := h.Alloc(80)
	if err != nil {
		t.Fatal(err)
	}
	c, err := kv.Wrap(flat(t, 10), []*device.Memory{mem})
	if err != nil {
		t.Fatal(err)
	}
	q := openOrFail(t, apart(h, c, newCache(t, flat(t, 10), h)))
	closing(t, mem.Free)
	kindIs(t, "store", outcome(t, q, copier.Store, one(1)), fault.Closed, "store 1", `cache "a"`, "freed")
	if err := q.Err(); err == nil || !strings.Contains(err.Error(), "freed") {
		t.Errorf("the queue's failure is %v", err)
	}
}
