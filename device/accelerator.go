package device

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/fault"
)

// lostPatience is how long closing a lost device waits for calls into its driver that
// have not returned. Those of a device that is well are waited for as long as they take.
const lostPatience = 5 * time.Second

// AcceleratorOptions are the choices of an accelerator. The zero value is a good one.
type AcceleratorOptions struct {
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// Accelerator is a device whose copies are made by its own engines, over a [Driver].
//
// When the driver says that the device is lost, every stream of it fails with that
// error, everything enqueued counts as run, and closing gives back what is ours without
// asking the driver any more.
//
// When the driver fails again and again to say whether work has run, the device is given
// up: it counts as lost, with one difference. What was enqueued may still run, so the
// memory that it uses stays in use until this process ends: Free of it is an error, and
// nothing of it is unpinned, unmapped or given back. The device stays open for that.
// Bytes in it that a ticket, which ends with an error, was to tell of may still change.
type Accelerator struct {
	driver  Driver
	name    string
	attr    Attributes
	engines []Engine
	limits  []EngineLimits // theirs
	log     *slog.Logger
	learns  learner // nil but in tests

	seq    atomic.Uint64 // of marks, in the order in which they were recorded
	lost   atomic.Pointer[error]
	gone   atomic.Bool      // the driver has said that the device is lost, so nothing runs
	linear atomic.Bool      // see UseBatches
	calls  [6]atomic.Uint64 // in the order of the fields of Calls
	reap   *reaper
	calm   sync.WaitGroup // goroutines in SyncStream

	mu        sync.Mutex
	closed    bool         // guarded by mu
	memories  int          // guarded by mu; allocated or wrapped, and not freed
	bytes     int64        // guarded by mu; theirs
	pinned    int          // guarded by mu; host memories with stretches pinned
	making    int          // guarded by mu; streams that the driver is asked for
	streams   []*accStream // guarded by mu; open
	changes   uint64       // guarded by mu; of streams
	freeMarks []*mark      // guarded by mu; each with its event
}

var _ Device = (*Accelerator)(nil)

// learner is what a driver of tests may be as well. It is told what the program has
// learned from the accelerator, which a driver can't see: that the work before the n-th
// recording on a stream has run, and that a stream was to wait for such a point when
// that had been reached, so that no call of the driver was needed.
type learner interface {
	Learned(s StreamHandle, n uint64)
	WaitedFor(s, on StreamHandle, n uint64)
}

// OpenAccelerator returns the device behind d, which it closes with itself.
// Kind: fault.Invalid (no driver, or a driver without engines).
func OpenAccelerator(d Driver, o AcceleratorOptions) (*Accelerator, error) {
	if d == nil {
		return nil, fault.New(fault.Invalid, "accelerator", "no driver")
	}
	a := &Accelerator{driver: d, name: d.Name(), attr: d.Attributes(), engines: d.Engines(), log: o.Logger}
	if len(a.engines) == 0 {
		return nil, fault.New(fault.Invalid, "accelerator "+a.name, "its driver has no engine that copies")
	}
	for _, e := range a.engines {
		a.limits = append(a.limits, e.Limits())
	}
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	a.learns, _ = d.(learner)
	a.reap = newReaper(a)
	go a.reap.run()
	return a, nil
}

// Name returns the driver's name for the device.
func (a *Accelerator) Name() string { return a.name }

// Attributes says what the device is and can do.
func (a *Accelerator) Attributes() Attributes { return a.attr }

// Engines are the device's ways of copying, best first. The slice must not be changed.
func (a *Accelerator) Engines() []Engine { return a.engines }

// Driver returns the driver, for what only one vendor has: exports to other processes.
func (a *Accelerator) Driver() Driver { return a.driver }

// UseBatches says whether [Stream.Copy] may use the batches of the first engine, which it
// does until told. A device whose batches were found to be wrong goes without: each copy
// is then a call of the library. [Accelerator.CopyBatch] does as its caller says.
func (a *Accelerator) UseBatches(use bool) { a.linear.Store(!use) }

// UsesBatches says what UseBatches was told last; true if it never was.
func (a *Accelerator) UsesBatches() bool { return !a.linear.Load() }

// Lost returns the error with which the device was lost, nil while it is well.
func (a *Accelerator) Lost() error {
	if err := a.lost.Load(); err != nil {
		return *err
	}
	return nil
}

// blame looks at an error of the driver. It reports whether the device is lost, in
// which case all streams have failed when it returns.
func (a *Accelerator) blame(err error) bool {
	var e *DriverError
	if !errors.As(err, &e) || e.Class != Lost {
		return false
	}
	a.gone.Store(true)
	a.lose(err)
	return true
}

// givenUp reports whether the device counts as lost while its driver may run what is
// queued.
func (a *Accelerator) givenUp() bool { return a.Lost() != nil && !a.gone.Load() }

// lose fails all streams: the device is lost, as err says. Whoever knows that nothing
// runs any more has stored gone before.
func (a *Accelerator) lose(err error) {
	err = fault.Wrap(fault.Device, "device "+a.name, err)
	if a.lost.CompareAndSwap(nil, &err) {
		a.log.Error("the device is lost", slog.String("device", a.name), slog.Any("error", err))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.streams {
		s.fail(a.Lost())
	}
	a.reap.kick()
}

// usable returns why nothing can be made on the device.
func (a *Accelerator) usable() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return a.errClosed()
	}
	return a.Lost()
}

func (a *Accelerator) errClosed() error {
	return fault.New(fault.Closed, "device "+a.name, "closed before")
}

// take counts one more of what keeps the device open, unless it is closed. give counts
// one less.
func (a *Accelerator) take(n *int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	*n++
	return true
}

func (a *Accelerator) give(n *int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	*n--
}

// Alloc implements [Device].
func (a *Accelerator) Alloc(bytes int64) (*Memory, error) {
	if bytes < 0 {
		return nil, fault.New(fault.Invalid, a.name+" memory", "%d bytes: want at least 0", bytes)
	}
	return a.newMemory(bytes, func() (uintptr, error) {
		if bytes == 0 {
			return 0, nil
		}
		return a.driver.Alloc(bytes)
	}, a.driver.Free)
}

// Wrap returns a memory over bytes of device memory at base that belong to somebody
// else, such as an engine's KV cache: freeing it ends its use here. They must stay
// allocated until then. Kinds: fault.Invalid, fault.Closed.
func (a *Accelerator) Wrap(base uintptr, bytes int64) (*Memory, error) {
	if bytes < 0 || bytes > 0 && (base == 0 || base+uintptr(bytes) < base) {
		return nil, fault.New(fault.Invalid, a.name+" memory", "%d bytes at %#x", bytes, base)
	}
	return a.newMemory(bytes, func() (uintptr, error) { return base, nil }, nil)
}

func (a *Accelerator) newMemory(bytes int64, alloc func() (uintptr, error), free func(uintptr) error) (*Memory, error) {
	if err := a.usable(); err != nil {
		return nil, err
	}
	if !a.take(&a.memories) {
		return nil, a.errClosed()
	}
	base, err := alloc()
	if err != nil {
		a.give(&a.memories)
		a.blame(err)
		return nil, fault.Wrap(kindOf(err), a.name+" memory: "+size(bytes), err)
	}
	m := &Memory{device: a.name, on: a, base: base, size: bytes}
	m.free = func() error {
		var err error
		if free != nil && bytes > 0 && !a.gone.Load() {
			if err = free(base); err != nil && a.blame(err) {
				err = nil // it is gone with the device
			}
		}
		a.mu.Lock()
		a.memories--
		a.bytes -= bytes
		a.mu.Unlock()
		if err != nil {
			return fault.Wrap(kindOf(err), "free "+size(bytes)+" of "+a.name, err)
		}
		return nil
	}
	a.mu.Lock()
	a.bytes += bytes
	a.mu.Unlock()
	return m, nil
}

// kindOf returns the kind that the driver has given err, or fault.Device.
func kindOf(err error) fault.Kind {
	if k := fault.KindOf(err); k != 0 {
		return k
	}
	return fault.Device
}

// NewStream implements [Device]: a stream of normal priority.
func (a *Accelerator) NewStream(name string) (Stream, error) {
	return a.NewStreamOf(name, NormalPriority)
}

// NewStreamOf is NewStream with a priority.
func (a *Accelerator) NewStreamOf(name string, p Priority) (Stream, error) {
	if err := a.usable(); err != nil {
		return nil, err
	}
	if !a.take(&a.making) {
		return nil, a.errClosed()
	}
	defer a.give(&a.making)
	h, err := a.driver.NewStream(p)
	if err != nil {
		a.blame(err)
		return nil, fault.Wrap(kindOf(err), "stream "+name+" of "+a.name, err)
	}
	s, err := a.addStream(name, h, true)
	if err != nil {
		_ = a.driver.CloseStream(h) // nothing was queued
		return nil, err
	}
	return s, nil
}

// WrapStream returns a stream over an engine's own, whose handle stays the engine's.
// Closing it waits for what was enqueued here. LegacyStream and DefaultStream are legal;
// PerThreadStream is fault.Unsupported.
func (a *Accelerator) WrapStream(name string, h StreamHandle) (Stream, error) {
	if h == PerThreadStream {
		return nil, fault.New(fault.Unsupported, "stream "+name, "the default stream of a thread is another queue on each thread").
			Hint("give the handle of a stream that was created")
	}
	s, err := a.addStream(name, h, false)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (a *Accelerator) addStream(name string, h StreamHandle, owned bool) (*accStream, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, a.errClosed()
	}
	if err := a.Lost(); err != nil {
		return nil, err
	}
	s := &accStream{a: a, name: name, handle: h, owned: owned, gone: make(chan struct{})}
	s.progress.L = &s.qmu
	a.streams = append(a.streams, s)
	a.changes++
	return s, nil
}

func (a *Accelerator) dropStream(s *accStream) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, x := range a.streams {
		if x == s {
			a.streams = append(a.streams[:i], a.streams[i+1:]...)
			break
		}
	}
	a.changes++
}

// NewEvent implements [Device].
func (a *Accelerator) NewEvent() (Event, error) {
	if err := a.usable(); err != nil {
		return nil, err
	}
	return &accEvent{a: a}, nil
}

// Handle returns the driver's handle of s; false when s is no stream of this device.
func (a *Accelerator) Handle(s Stream) (StreamHandle, bool) {
	if s, ok := s.(*accStream); ok && s.a == a {
		return s.handle, true
	}
	return 0, false
}

// On reports whether s is a stream of this device.
func (a *Accelerator) On(s Stream) bool {
	_, ok := a.Handle(s)
	return ok
}

// akin reports whether streams of the two devices can wait for each other's events:
// those of one driver can.
func (a *Accelerator) akin(b *Accelerator) bool {
	return a == b || reflect.TypeOf(a.driver) == reflect.TypeOf(b.driver)
}

// Close implements [Device], and closes the driver. Host memory that the device has
// pinned keeps it open, as its own memory does.
func (a *Accelerator) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	if streams := len(a.streams) + a.making; a.memories > 0 || streams > 0 || a.pinned > 0 {
		defer a.mu.Unlock()
		if streams == 0 && a.givenUp() {
			return fault.New(fault.Device, "device "+a.name, "given up: it stays open for %d memories (%s) and %d pinned host memories that it may still use",
				a.memories, size(a.bytes), a.pinned)
		}
		return fault.New(fault.Busy, "device "+a.name, "%d memories (%s), %d streams and %d pinned host memories are open",
			a.memories, size(a.bytes), streams, a.pinned).
			Hint("free the memories and close the streams first")
	}
	a.closed = true
	a.mu.Unlock()

	lost := a.Lost() != nil
	if !a.reap.close(lost) || !a.settled(lost) {
		// Closing would take things away from under a call that is still running.
		return fault.New(fault.Device, "device "+a.name, "lost, and calls into its driver have not returned for %v: it stays open", lostPatience)
	}
	if !lost {
		for _, m := range a.freeMarks { // nobody adds to them any more
			_ = a.driver.CloseEvent(m.event) // the driver's own Close ends what is left
		}
	}
	if err := a.driver.Close(); err != nil && !lost {
		return fault.Wrap(kindOf(err), "device "+a.name, err)
	}
	return nil
}

// settled waits for who is in the driver, of a lost device not for ever.
func (a *Accelerator) settled(lost bool) bool {
	over := make(chan struct{})
	go func() { a.calm.Wait(); close(over) }()
	return within(over, lost)
}

func within(over <-chan struct{}, lost bool) bool {
	if !lost {
		<-over
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), lostPatience)
	defer cancel()
	select {
	case <-over:
		return true
	case <-ctx.Done():
		return false
	}
}

// Calls counts what the device's streams were given.
type Calls struct {
	Linear, Rects, Boxes, Batches, BatchOps uint64 // calls of the library, and copies in batches
	Pageable                                uint64 // copies to or from memory that is not pinned
}

const (
	linearCalls = iota
	rectCalls
	boxCalls
	batchCalls
	batchedOps
	pageableCopies
)

// Calls returns the counts since the device was opened.
func (a *Accelerator) Calls() Calls {
	n := func(i int) uint64 { return a.calls[i].Load() }
	return Calls{n(linearCalls), n(rectCalls), n(boxCalls), n(batchCalls), n(batchedOps), n(pageableCopies)}
}
