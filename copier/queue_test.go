package copier_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/house"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

var directions = []copier.Direction{copier.Store, copier.Load}

func TestQueue_CopiesEveryByteOfEveryCache(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		for _, streams := range []string{"given", "own", "default", "legacy"} {
			handle := map[string]device.StreamHandle{"default": device.DefaultStream, "legacy": device.LegacyStream}
			if _, ok := handle[streams]; ok && b.acc == nil {
				continue
			}
			r := openQueue(t, b, func(o *copier.QueueOptions) {
				switch streams {
				case "given":
				case "own":
					o.StoreStream, o.LoadStream = nil, nil
				default:
					s, err := b.acc.WrapStream(streams, handle[streams])
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { closing(t, s.Close) })
					o.StoreStream, o.LoadStream = s, s
				}
			})
			for _, dir := range directions {
				// A run, one that descends, scattered pages, and both ends of both sides.
				dst := []page.ID{5, 6, 7, 12, 11, 10, 0, 23, 17}
				src := []page.ID{2, 3, 4, 20, 19, 18, 23, 0, 9}
				shadows := map[string][2]*kv.Cache{}
				for name := range r.onDevice {
					d, s := r.ends(dir, name)
					to, from := r.shadow(d), r.shadow(s)
					for i := range dst {
						copyPage(t, to, dst[i], from, src[i])
					}
					shadows[name] = [2]*kv.Cache{to, from}
				}
				ticket := r.submit(dir, copier.Job{Src: src, Dst: dst, Sealed: dir == copier.Load})
				r.must(ticket.Wait(t.Context()))
				for name, s := range shadows {
					r.want(dir.String()+" on streams "+streams, name, dir, s[0], s[1])
				}
			}
		}
	})
}

// storeAfterKernel stores page 3, which a kernel that is held back is to write, and
// returns whether the host has what the kernel wrote.
func storeAfterKernel(t *testing.T, b *queueBackend, wait bool) (good bool) {
	r := openQueue(t, b, nil)
	const name = "layers"
	m, err := r.onDevice[name].Region(0)
	r.must(err)
	fresh := r.alloc(m.Size())
	r.write(t, fresh, queuePattern("written by the kernel", int(m.Size())))
	kernels, release := r.kernel()
	r.must(kernels.Copy([]device.Op{{Dst: m, Src: fresh, Bytes: m.Size()}}))
	job := copier.Job{Src: []page.ID{3}, Dst: []page.ID{30}}
	if wait {
		job.Wait = r.event(kernels)
	}
	stored := r.submit(copier.Store, job)
	if wait {
		if done, _ := stored.Poll(); done {
			t.Error("the store is done before what it waits for")
		}
		release()
		r.must(stored.Wait(t.Context()))
	} else {
		r.must(stored.Wait(t.Context()))
		release()
	}
	r.must(kernels.Sync(t.Context()))
	written := r.shadow(r.onDevice[name])
	return bytes.Equal(pageBytes(t, r.shadow(r.host[name]), 30), pageBytes(t, written, 3))
}

// loadAfterKernel loads onto page 3, which a kernel that is held back is to read, and
// returns whether the kernel has read what was there before.
func loadAfterKernel(t *testing.T, b *queueBackend, wait bool) (good bool) {
	r := openQueue(t, b, nil)
	const name = "layers"
	m, err := r.onDevice[name].Region(0)
	r.must(err)
	before := r.read(t, m)
	seen := r.alloc(m.Size())
	kernels, release := r.kernel()
	r.must(kernels.Copy([]device.Op{{Dst: seen, Src: m, Bytes: m.Size()}}))
	job := copier.Job{Src: []page.ID{30}, Dst: []page.ID{3}, Sealed: true}
	if wait {
		job.Wait = r.event(kernels)
	}
	loaded := r.submit(copier.Load, job)
	if wait {
		release()
		r.must(loaded.Wait(t.Context()))
	} else {
		r.must(loaded.Wait(t.Context()))
		release()
	}
	r.must(kernels.Sync(t.Context()))
	if got, want := pageBytes(t, r.shadow(r.onDevice[name]), 3), pageBytes(t, r.shadow(r.host[name]), 30); !bytes.Equal(got, want) {
		t.Error("the page was not loaded")
	}
	return bytes.Equal(r.read(t, seen), before)
}

func TestQueue_StoreWaitsForItsEvent(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		if !storeAfterKernel(t, b, true) {
			t.Error("the host has bytes from before the kernel")
		}
	})
}

func TestQueue_LoadWaitsForItsEvent(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		if !loadAfterKernel(t, b, true) {
			t.Error("the kernel has read what the load wrote")
		}
	})
}

func TestQueue_NegativeControl_WithoutItsEventAJobGoesWrong(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		if storeAfterKernel(t, b, false) {
			t.Error("a store that did not wait has what the kernel wrote later")
		}
		if n := b.races(); b.strict && n == 0 {
			t.Error("the device has seen no race of a store and a kernel")
		}
		if loadAfterKernel(t, b, false) {
			t.Error("a load that did not wait has left the page as it was")
		}
		if n := b.races(); b.strict && n == 0 {
			t.Error("the device has seen no race of a load and a kernel")
		}
	})
}

// gate is a copier that waits at every copy of a direction until it is opened.
type gate struct {
	copier.Copier
	stream  string
	entered chan struct{} // cap 1: has something once a copy has come
	pass    chan struct{}
}

func newGate(stream string) *gate {
	return &gate{Copier: copier.NewPortable(), stream: stream, entered: make(chan struct{}, 1), pass: make(chan struct{})}
}

// gated opens a queue whose submitter of a direction is stuck in the driver from its
// first copy on, until open is called.
func gated(t testing.TB, b *queueBackend, dir copier.Direction, change func(*copier.QueueOptions)) (r *queueRig, g *gate, open func()) {
	t.Helper()
	g = newGate(dir.String() + "s")
	open = sync.OnceFunc(func() { close(g.pass) })
	r = openQueue(t, b, func(o *copier.QueueOptions) {
		o.Copier = g
		if change != nil {
			change(o)
		}
	})
	t.Cleanup(open)
	return r, g, open
}

func (g *gate) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	if s.Name() == g.stream {
		select {
		case g.entered <- struct{}{}:
		default:
		}
		<-g.pass
	}
	return g.Copier.Copy(s, r, pairs)
}

func one(index int64) copier.Job {
	return copier.Job{Index: index, Src: []page.ID{1}, Dst: []page.ID{2}}
}

func (r *queueRig) indices(dir copier.Direction) (all []int64) {
	r.t.Helper()
	for _, c := range r.q.Completed(dir, nil) {
		r.must(c.Err)
		all = append(all, c.Index)
	}
	return all
}

func over() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestQueue_NothingEndsBeforeItIsEnqueued(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		for _, dir := range directions {
			r, g, open := gated(t, b, dir, nil)
			done := r.submit(dir, one(1)) // the first thing on an idle stream
			r.must(r.q.Submit(dir, one(2)))
			<-g.entered
			if over, _ := done.Poll(); over || len(r.q.Completed(dir, nil)) > 0 {
				t.Error("a job has ended whose copies are not enqueued")
			}
			if err := r.q.Barrier(over()); !errors.Is(err, context.Canceled) {
				t.Errorf("a barrier that can't have passed says %v", err)
			}
			open()
			r.must(r.q.Barrier(t.Context()))
			if over, err := done.Poll(); !over || err != nil {
				t.Errorf("behind the barrier job 1 is over: %v, error %v", over, err)
			}
			if got := r.indices(dir); len(got) != 1 || got[0] != 2 {
				t.Errorf("jobs %v were reported, want 2: job 1 has a ticket", got)
			}
		}
	})
}

func TestQueue_BarrierWaitsForJobsInTheList(t *testing.T) {
	for _, dir := range directions {
		r, g, open := gated(t, hostBackend(t, nil), dir, nil)
		for i := range int64(5) {
			r.must(r.q.Submit(dir, one(i)))
		}
		<-g.entered // four are in the list
		if err := r.q.Barrier(over()); !errors.Is(err, context.Canceled) {
			t.Errorf("%v: a barrier that can't have passed says %v", dir, err)
		}
		passed := make(chan int)
		go func() {
			if err := r.q.Barrier(t.Context()); err != nil {
				t.Error(err)
			}
			passed <- len(r.q.Completed(dir, nil))
		}()
		open()
		if n := <-passed; n != 5 {
			t.Errorf("%v: %d of 5 jobs had ended behind the barrier", dir, n)
		}
	}
}

func TestQueue_SubmitNeverWaitsForTheDevice(t *testing.T) {
	const jobs = 10_000
	t.Run("stream_held", func(t *testing.T) {
		onBackends(t, func(t *testing.T, b *queueBackend) {
			r := openQueue(t, b, nil)
			release := r.held(r.streams[copier.Store])
			for i := range int64(jobs) {
				r.must(r.q.Submit(copier.Store, one(i)))
			}
			if n := len(r.q.Completed(copier.Store, nil)); n > 0 {
				t.Errorf("%d jobs have ended on a stream that is held", n)
			}
			release()
			r.must(r.q.Barrier(t.Context()))
			if got := r.indices(copier.Store); len(got) != jobs || got[0] != 0 || got[jobs-1] != jobs-1 {
				t.Errorf("%d jobs were reported, want %d in order", len(got), jobs)
			}
		})
	})
	t.Run("driver_blocks", func(t *testing.T) {
		r, g, open := gated(t, hostBackend(t, nil), copier.Store, nil)
		for i := range int64(jobs) {
			r.must(r.q.Submit(copier.Store, one(i)))
			if i == 0 {
				<-g.entered
			}
		}
		open()
		r.must(r.q.Barrier(t.Context()))
	})
}

func TestQueue_StoreThatIsStuckDelaysNoLoad(t *testing.T) {
	r, g, open := gated(t, hostBackend(t, nil), copier.Store, nil)
	stuck := r.submit(copier.Store, one(1))
	<-g.entered
	for i := range int64(50) {
		r.must(r.submit(copier.Load, one(i)).Wait(t.Context()))
	}
	if done, _ := stuck.Poll(); done {
		t.Error("the store has ended")
	}
	open()
	r.must(stuck.Wait(t.Context()))
}

// tally is a stream that counts its copies.
type tally struct {
	device.Stream
	mu    sync.Mutex
	calls []int // ops of each call; guarded by mu
}

func (s *tally) Copy(ops []device.Op) error {
	s.mu.Lock()
	s.calls = append(s.calls, len(ops))
	s.mu.Unlock()
	return s.Stream.Copy(ops)
}

func (s *tally) take() (calls []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls, s.calls = s.calls, nil
	return calls
}

// flat is a cache of pages of 8 bytes in one stretch.
func flat(t testing.TB, pages int) *kv.Geometry {
	t.Helper()
	g, err := kv.NewGeometry(kv.Spec{
		Pages: pages, PageSize: 1, RegionBytes: []int64{8 * int64(pages)},
		Layers: []kv.Layer{{Planes: []kv.Plane{{Kind: kv.Opaque, PageStride: 8, Bytes: 8}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestQueue_BatchesAreCut(t *testing.T) {
	const pages = 20_000
	for _, test := range []struct {
		most, ops int
		want      string
	}{
		{0, 8191, "[8191]"},
		{0, 8192, "[8192]"},
		{0, 8193, "[8192 1]"},
		{0, 16_385, "[8192 8192 1]"},
		{3, 2, "[2]"},
		{3, 3, "[3]"},
		{3, 4, "[3 1]"},
		{1, 2, "[1 1]"},
	} {
		h := openHost(t)
		s, err := h.NewStream("stores")
		if err != nil {
			t.Fatal(err)
		}
		counted := &tally{Stream: s}
		caches := [2]map[string]*kv.Cache{{"a": newCache(t, flat(t, pages), h)}, {"a": newCache(t, flat(t, pages), h)}}
		q, err := copier.OpenQueue(copier.QueueOptions{
			Device: h, DeviceCaches: caches[0], HostCaches: caches[1], StoreStream: counted, BatchOps: test.most,
		})
		if err != nil {
			t.Fatal(err)
		}
		job := copier.Job{Done: device.NewTicket()}
		for i := range test.ops { // descending, so that nothing merges
			job.Src, job.Dst = append(job.Src, page.ID(i)), append(job.Dst, page.ID(pages-1-i))
		}
		m, _ := caches[0]["a"].Region(0)
		copy(m.Bytes(), queuePattern("batches", len(m.Bytes())))
		if err := errors.Join(q.Submit(copier.Store, job), job.Done.Wait(t.Context())); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(counted.take()); got != test.want {
			t.Errorf("%d copies, at most %d: batches of %s, want %s", test.ops, test.most, got, test.want)
		}
		for i := range job.Src {
			to, _ := caches[1]["a"].Page(job.Dst[i])
			from, _ := caches[0]["a"].Page(job.Src[i])
			if !bytes.Equal(to, from) {
				t.Fatalf("%d copies, at most %d: copy %d is wrong", test.ops, test.most, i)
			}
		}
		closing(t, func() error { return q.Shutdown(t.Context()) })
		closing(t, s.Close)
	}
}

func TestQueue_RunsAreMerged(t *testing.T) {
	h := openHost(t)
	s, err := h.NewStream("stores")
	if err != nil {
		t.Fatal(err)
	}
	counted := &tally{Stream: s}
	a, b := newCache(t, flat(t, 100), h), newCache(t, flat(t, 100), h)
	q, err := copier.OpenQueue(copier.QueueOptions{
		Device: h, DeviceCaches: map[string]*kv.Cache{"a": a}, HostCaches: map[string]*kv.Cache{"a": b}, StoreStream: counted,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, s.Close)
	defer closing(t, func() error { return q.Shutdown(t.Context()) })
	for _, test := range []struct {
		dst, src []page.ID
		want     string
	}{
		{[]page.ID{10, 11, 12, 13}, []page.ID{50, 51, 52, 53}, "[1]"},
		{[]page.ID{13, 11, 10, 12}, []page.ID{53, 51, 50, 52}, "[1]"}, // in any order
		{[]page.ID{10, 11, 20, 21}, []page.ID{50, 51, 52, 53}, "[2]"},
		{[]page.ID{10, 11}, []page.ID{51, 50}, "[2]"},
		{nil, nil, "[]"},
	} {
		done := device.NewTicket()
		if err := errors.Join(q.Submit(copier.Store, copier.Job{Src: test.src, Dst: test.dst, Done: done}), done.Wait(t.Context())); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(counted.take()); got != test.want {
			t.Errorf("%v onto %v: %s copies, want %s", test.src, test.dst, got, test.want)
		}
	}
}

// TestFaults_OfTheTableHaveTheirTests: a test that was renamed is renamed there.
func TestFaults_OfTheTableHaveTheirTests(t *testing.T) {
	names, err := house.ReadNames(os.DirFS(".."))
	if err != nil {
		t.Fatal(err)
	}
	found, err := names.CheckDoc("copier/faults.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range found {
		t.Error(v)
	}
	text, err := os.ReadFile("faults.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 22, 23, 24, 25, 34, 38} {
		if !strings.Contains(string(text), fmt.Sprintf("%d ", n)) && !strings.Contains(string(text), fmt.Sprintf("%d:", n)) {
			t.Errorf("fault %d is not in the table", n)
		}
	}
}

func kindIs(t *testing.T, what string, err error, kind fault.Kind, says ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: error %v, want kind %v", what, err, kind)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %q does not say %q", what, err, s)
		}
	}
}
