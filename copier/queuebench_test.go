package copier_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// nullDevice has streams that do nothing, at once: what is left is the queue's own time.
type nullDevice struct{ device.Device }

type nullStream struct{ device.Stream }

func (nullDevice) NewStream(string) (device.Stream, error) { return nullStream{}, nil }
func (nullDevice) NewEvent() (device.Event, error)         { return struct{ device.Event }{}, nil }

func (nullStream) Name() string               { return "null" }
func (nullStream) Copy([]device.Op) error     { return nil }
func (nullStream) Record(device.Event) error  { return nil }
func (nullStream) Wait(device.Event) error    { return nil }
func (nullStream) Sync(context.Context) error { return nil }
func (nullStream) Close() error               { return nil }
func (nullStream) Signal(t *device.Ticket) error {
	t.Complete(nil)
	return nil
}

func nullQueue(t testing.TB, caches, pages int) *copier.Queue {
	t.Helper()
	h := openHost(t)
	o := copier.QueueOptions{Device: nullDevice{}, DeviceCaches: map[string]*kv.Cache{}, HostCaches: map[string]*kv.Cache{}}
	for i := range caches {
		name := fmt.Sprint("layer", i)
		o.DeviceCaches[name], o.HostCaches[name] = newCache(t, flat(t, pages), h), newCache(t, flat(t, pages), h)
	}
	q, err := copier.OpenQueue(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, func() error { return q.Shutdown(context.Background()) }) })
	return q
}

// scattered is a job of n pages in random order.
func scattered(n int) copier.Job {
	rnd := rand.New(rand.NewPCG(1, 2))
	var j copier.Job
	for i, p := range rnd.Perm(n) {
		j.Src, j.Dst = append(j.Src, page.ID(i)), append(j.Dst, page.ID(p))
	}
	return j
}

func TestQueue_JobsDoNotAllocate(t *testing.T) {
	q := nullQueue(t, 2, 64)
	job := scattered(64)
	job.Wait = struct{ device.Event }{}
	var ended []copier.Completion
	run := func() {
		for range 100 {
			if err := q.Submit(copier.Load, job); err != nil {
				t.Fatal(err)
			}
		}
		for n := 0; n < 100; {
			<-q.Ready(copier.Load)
			ended = q.Completed(copier.Load, ended[:0])
			n += len(ended)
		}
	}
	// Tickets are made by 64, so 100 jobs are at most two allocations, and the runtime's own.
	if n := testing.AllocsPerRun(100, run); n > 10 {
		t.Errorf("100 jobs make %v allocations", n)
	}
}

// BenchmarkQueue_Job queues and ends small jobs: the queue's own time for a job.
func BenchmarkQueue_Job(b *testing.B) {
	q := nullQueue(b, 1, 64)
	job := copier.Job{Src: []page.ID{1}, Dst: []page.ID{2}}
	benchmarkQueue(b, q, job, 256, 1)
}

// BenchmarkQueue_Op queues and ends jobs of 10^5 copies: the queue's own time for a copy.
func BenchmarkQueue_Op(b *testing.B) {
	for _, caches := range []int{1, 10} {
		for name, job := range map[string]copier.Job{"shuffled": scattered(100_000 / caches)} {
			b.Run(fmt.Sprintf("%s/caches=%d", name, caches), func(b *testing.B) {
				benchmarkQueue(b, nullQueue(b, caches, 100_000/caches), job, 2, 100_000)
			})
		}
	}
}

// benchmarkQueue has batch jobs in the queue at a time.
func benchmarkQueue(b *testing.B, q *copier.Queue, job copier.Job, batch, ops int) {
	b.Helper()
	b.ReportAllocs()
	var ended []copier.Completion
	open := 0
	wait := func(least int) {
		for open > least {
			<-q.Ready(copier.Store)
			ended = q.Completed(copier.Store, ended[:0])
			open -= len(ended)
		}
	}
	for b.Loop() {
		if err := q.Submit(copier.Store, job); err != nil {
			b.Fatal(err)
		}
		if open++; open >= batch {
			wait(batch / 2)
		}
	}
	wait(0)
	if ops > 1 {
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(ops), "ns/copy")
	}
}
