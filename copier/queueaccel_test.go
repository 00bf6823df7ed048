package copier_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// nullDriver runs everything at once, which moves no byte: what is left is what it was
// asked for, and the time of everybody else.
type nullDriver struct {
	device.Driver
	engines []device.Engine
	base    atomic.Uintptr
	stream  atomic.Uintptr
	low     atomic.Int32 // streams of low priority
}

func (*nullDriver) Name() string                  { return "null:0" }
func (*nullDriver) Attributes() device.Attributes { return device.Attributes{} }
func (d *nullDriver) Engines() []device.Engine    { return d.engines }

func (d *nullDriver) Alloc(n int64) (uintptr, error) { return d.base.Add(uintptr(n)) - uintptr(n), nil }
func (*nullDriver) Free(uintptr) error               { return nil }
func (*nullDriver) Register(uintptr, int64) error    { return nil }
func (*nullDriver) Unregister(uintptr) error         { return nil }

func (d *nullDriver) NewStream(p device.Priority) (device.StreamHandle, error) {
	if p == device.LowPriority {
		d.low.Add(1)
	}
	return device.StreamHandle(d.stream.Add(1)), nil
}
func (*nullDriver) CloseStream(device.StreamHandle) error                { return nil }
func (*nullDriver) SyncStream(device.StreamHandle) (bool, error)         { return true, nil }
func (*nullDriver) NewEvent() (device.EventHandle, error)                { return 1, nil }
func (*nullDriver) CloseEvent(device.EventHandle) error                  { return nil }
func (*nullDriver) Record(device.EventHandle, device.StreamHandle) error { return nil }
func (*nullDriver) Wait(device.StreamHandle, device.EventHandle) error   { return nil }
func (*nullDriver) EventDone(device.EventHandle) (bool, error)           { return true, nil }
func (*nullDriver) SyncEvent(device.EventHandle) error                   { return nil }
func (*nullDriver) Close() error                                         { return nil }

// nullEngine keeps what it was asked for, unless it is quiet.
type nullEngine struct {
	batch   int
	quiet   bool
	batches []int // copies of each
	orders  []device.SourceOrder
	rects   int
}

func (*nullEngine) Name() string { return "null" }

func (e *nullEngine) Limits() device.EngineLimits { return device.EngineLimits{Batch: e.batch} }

func (e *nullEngine) CopyRects(_ device.StreamHandle, rects []device.Rect) (int, error) {
	if !e.quiet {
		e.rects += len(rects)
	}
	return len(rects), nil
}

func (e *nullEngine) CopyBatch(_ device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	if !e.quiet {
		e.batches, e.orders = append(e.batches, len(b.Bytes)), append(e.orders, o)
	}
	return nil
}

// nullRig is a queue on an accelerator that copies nothing.
type nullRig struct {
	q   *copier.Queue
	acc *device.Accelerator
}

func openNull(t testing.TB, pages int, handle device.StreamHandle, change func(*copier.QueueOptions), engines ...device.Engine) nullRig {
	t.Helper()
	d := &nullDriver{engines: engines}
	d.base.Store(1 << 40)
	d.stream.Store(100)
	acc, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, acc.Close) })
	mem, err := acc.AllocHost(openHost(t), 8*int64(pages), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, mem.Free) })
	host, err := kv.Wrap(flat(t, pages), []*device.Memory{mem})
	if err != nil {
		t.Fatal(err)
	}
	o := copier.QueueOptions{
		Device: acc, DeviceCaches: map[string]*kv.Cache{"a": newCache(t, flat(t, pages), acc)}, HostCaches: map[string]*kv.Cache{"a": host},
	}
	if handle != ownStreams {
		s, err := acc.WrapStream("engine's", handle)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { closing(t, s.Close) })
		o.StoreStream, o.LoadStream = s, s
	}
	if change != nil {
		change(&o)
	}
	r := nullRig{acc: acc}
	if r.q, err = copier.OpenQueue(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, func() error { return r.q.Shutdown(context.Background()) }) })
	return r
}

const ownStreams device.StreamHandle = 99

// reversed is a job of n pages of which no two are adjacent on both sides.
func reversed(n int) (j copier.Job) {
	for i := range n {
		j.Src, j.Dst = append(j.Src, page.ID(i)), append(j.Dst, page.ID(n-1-i))
	}
	return j
}

func TestQueue_BatchesOfTheEngine(t *testing.T) {
	for _, test := range []struct {
		batch, most, ops int
		want             string
	}{
		{8192, 0, 8191, "[8191]"},
		{8192, 0, 8192, "[8192]"},
		{8192, 0, 8193, "[8192 1]"},
		{1 << 20, 0, 8193, "[8192 1]"}, // a driver that promises more is not asked for it
		{1 << 20, 1 << 20, 8193, "[8193]"},
		{100, 0, 250, "[100 100 50]"},
	} {
		e := &nullEngine{batch: test.batch}
		loop := &nullEngine{}
		r := openNull(t, 20_000, ownStreams, func(o *copier.QueueOptions) { o.BatchOps = test.most }, loop, e)
		if err := outcome(t, r.q, copier.Store, reversed(test.ops)); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(e.batches); got != test.want || e.rects+loop.rects > 0 {
			t.Errorf("%d copies of at most %d and %d: batches of %s, want %s; %d others", test.ops, test.batch, test.most, got, test.want, e.rects+loop.rects)
		}
	}
}

func TestQueue_OnlySealedLoadsReadInAnyOrder(t *testing.T) {
	for _, test := range []struct {
		dir    copier.Direction
		sealed bool
		want   device.SourceOrder
	}{{copier.Store, false, device.StreamOrder}, {copier.Load, false, device.StreamOrder}, {copier.Load, true, device.AnyOrder}} {
		e := &nullEngine{batch: 8192}
		r := openNull(t, 100, ownStreams, nil, e)
		job := reversed(100)
		job.Sealed = test.sealed
		if err := outcome(t, r.q, test.dir, job); err != nil {
			t.Fatal(err)
		}
		if len(e.orders) != 1 || e.orders[0] != test.want {
			t.Errorf("%v, sealed %v: orders %v, want %v", test.dir, test.sealed, e.orders, test.want)
		}
	}
}

func TestQueue_ItsOwnStreamsAreOfLowPriority(t *testing.T) {
	for handle, want := range map[device.StreamHandle]int32{ownStreams: 2, 77: 0} {
		r := openNull(t, 10, handle, nil, &nullEngine{})
		if low := r.acc.Driver().(*nullDriver).low.Load(); low != want {
			t.Errorf("%d streams of low priority, want %d", low, want)
		}
	}
}

func TestQueue_LegacyStreamTakesLinearCopies(t *testing.T) {
	for handle, batches := range map[device.StreamHandle]int{device.DefaultStream: 0, device.LegacyStream: 0, 77: 1} {
		e := &nullEngine{batch: 8192}
		r := openNull(t, 100, handle, nil, e)
		if err := outcome(t, r.q, copier.Store, reversed(100)); err != nil {
			t.Fatal(err)
		}
		if want := 100 * (1 - batches); len(e.batches) != batches || e.rects != want {
			t.Errorf("stream %d: %d batches and %d linear copies, want %d and %d", handle, len(e.batches), e.rects, batches, want)
		}
	}
}

func TestQueue_WithoutBatchesCopiesAreLinear(t *testing.T) {
	for name, test := range map[string]struct {
		batch          int
		linear, failed bool
	}{"the engine has none": {0, false, false}, "they are switched off": {8192, true, false}, "they failed their self-test": {8192, false, true}} {
		e := &nullEngine{batch: test.batch}
		r := openNull(t, 100, ownStreams, func(o *copier.QueueOptions) {
			o.Linear = test.linear
			acc, ok := o.Device.(*device.Accelerator)
			if test.failed && ok {
				acc.UseBatches(false)
			}
		}, e)
		if err := outcome(t, r.q, copier.Load, reversed(100)); err != nil {
			t.Fatal(err)
		}
		if len(e.batches) > 0 || e.rects != 100 {
			t.Errorf("%s: %d batches and %d linear copies, want 100 linear ones", name, len(e.batches), e.rects)
		}
	}
}

func TestOpenQueue_RefusesStreamsOfAnotherAccelerator(t *testing.T) {
	other := openNull(t, 10, ownStreams, nil, &nullEngine{})
	theirs, err := other.acc.NewStream("theirs")
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, theirs.Close)
	h := openHost(t)
	mine, err := device.OpenAccelerator(&nullDriver{engines: []device.Engine{&nullEngine{}}}, device.AcceleratorOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, mine.Close)
	o := apart(h, newCache(t, flat(t, 10), h), newCache(t, flat(t, 10), h))
	o.Device, o.StoreStream = mine, theirs
	_, err = copier.OpenQueue(o)
	kindIs(t, "stream of another device", err, fault.Invalid, "store stream", "theirs", "null:0")
	o.Device = h
	_, err = copier.OpenQueue(o)
	kindIs(t, "stream of an accelerator, on the host", err, fault.Invalid, "store stream")
}

func TestQueue_PagesThatAreNotPinnedFailTheirJobAlone(t *testing.T) {
	h := openHost(t)
	host := newCache(t, flat(t, 10), h)
	e := &nullEngine{batch: 8192}
	r := openNull(t, 10, ownStreams, func(o *copier.QueueOptions) { o.HostCaches = map[string]*kv.Cache{"a": host} }, e)
	for _, dir := range directions {
		kindIs(t, dir.String(), outcome(t, r.q, dir, one(3)), fault.Unsupported, dir.String()+" 3", `cache "a"`, "not pinned")
	}
	m, err := host.Region(0)
	if err := errors.Join(err, r.acc.AdmitPageable(m)); err != nil {
		t.Fatal(err)
	}
	for _, dir := range directions {
		if err := outcome(t, r.q, dir, one(4)); err != nil {
			t.Error(err)
		}
	}
	sealed := copier.Job{Src: []page.ID{1}, Dst: []page.ID{2}, Sealed: true}
	if err := outcome(t, r.q, copier.Load, sealed); err != nil || e.orders[len(e.orders)-1] != device.StreamOrder {
		t.Errorf("sealed, and not pinned: error %v, read in the orders %v", err, e.orders)
	}
	if err := r.q.Err(); err != nil {
		t.Error(err)
	}
}

// BenchmarkQueue_Batches queues and ends jobs of 10^5 copies on an accelerator whose driver
// takes no time.
func BenchmarkQueue_Batches(b *testing.B) {
	r := openNull(b, 100_000, ownStreams, nil, &nullEngine{batch: 8192, quiet: true})
	benchmarkQueue(b, r.q, scattered(100_000), 2, 100_000)
}

// BenchmarkQueue_AcceleratorJob queues and ends small jobs there.
func BenchmarkQueue_AcceleratorJob(b *testing.B) {
	r := openNull(b, 64, ownStreams, nil, &nullEngine{batch: 8192, quiet: true})
	benchmarkQueue(b, r.q, copier.Job{Src: []page.ID{1}, Dst: []page.ID{2}}, 256, 1)
}
