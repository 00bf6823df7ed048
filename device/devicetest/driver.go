package devicetest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// Mode is when a [Driver] runs what was queued.
type Mode uint8

// The modes. A program that is right is right in all of them.
const (
	Eager  Mode   = iota // as soon as it may run
	Lazy                 // not before somebody waits for it, or has asked a few times
	Random               // by seed: sooner or later, the rows of a copy in any order
	Modes  = iota        // how many there are
)

func (m Mode) String() string { return [...]string{"eager", "lazy", "random"}[m] }

// Options are the choices of a [Driver]. The zero value is a device with two engines, of
// which the first can do everything.
type Options struct {
	Name    string // "fake:0"
	Mode    Mode
	Seed    uint64         // of Random
	Engines []EngineOption // by default "fake", and "fake2d" without boxes and batches
	Bytes   int64          // of device memory; 1 GiB by default

	// Pageable allows copies of host memory that is not registered. They block the
	// caller. Otherwise they are violations.
	Pageable bool

	// Unordered leaves the order of accesses unchecked: for tests that break it on
	// purpose, and look at bytes.
	Unordered bool
}

// EngineOption is an engine of a [Driver].
type EngineOption struct {
	Name   string
	Limits device.EngineLimits
}

// maxPitch is that of CUDA's copies.
const maxPitch = 1<<31 - 1

func defaultEngines() []EngineOption {
	return []EngineOption{
		{"fake", device.EngineLimits{MaxPitch: maxPitch, Boxes: true, Batch: 8192, Library: "fake", Version: "1"}},
		{"fake2d", device.EngineLimits{MaxPitch: maxPitch, NoBatch: "it has none", Library: "fake2d", Version: "1"}},
	}
}

// Driver is an accelerator in Go, stricter than any that is sold. Its memory lies on the
// Go heap, behind addresses that nobody can use by mistake; host memory must be
// registered. A goroutine serves each stream, as late as [Mode] says, and scribbles over
// the destinations of a copy when the copy could start.
//
// It keeps two lists of what was done wrong, whatever came of it: violations of the
// rules of [device.Driver] and [device.Engine], and accesses of the same bytes that
// nothing orders (see [Driver.Races]).
//
// All methods may be called from any goroutine.
type Driver struct {
	o       Options
	engines []device.Engine

	mu         sync.Mutex
	changed    sync.Cond // any of what follows
	closed     bool
	lost       *device.DriverError
	next       uint64    // address of the next allocation
	used       int64     // bytes of device memory
	regions    []*region // by ascending address
	handles    uintptr   // made so far
	streams    map[device.StreamHandle]*queue
	events     map[device.EventHandle]*event
	refusals   map[string]*refusal
	violations []string
	pageable   int
	order      order
}

var _ device.Driver = (*Driver)(nil)

// region is memory that copies may touch: device memory, or registered host memory.
type region struct {
	lo, hi uint64
	host   bool
	bytes  []byte
	users  int  // queued copies that touch it
	gone   bool // freed
}

func (r *region) at(addr uint64, n int64) []byte { return r.bytes[addr-r.lo:][:n] }

type event struct{ latest *point }

// point is a recording of an event: the work queued on q up to index.
type point struct {
	q     *queue
	index uint64
	done  bool
	err   error
	asked int
	clock clock
}

// refusal makes calls fail: those behind the next skip calls.
type refusal struct {
	skip int
	err  *device.DriverError
}

// memoryBase is far from every address that a program can have.
const memoryBase = 0x5A << 52

// NewDriver returns a driver. Whoever opens an accelerator over it closes it with that.
func NewDriver(o Options) *Driver {
	if o.Name == "" {
		o.Name = "fake:0"
	}
	if o.Bytes == 0 {
		o.Bytes = 1 << 30
	}
	if o.Engines == nil {
		o.Engines = defaultEngines()
	}
	d := &Driver{
		o: o, next: memoryBase, handles: 0x1000, streams: map[device.StreamHandle]*queue{},
		events: map[device.EventHandle]*event{}, refusals: map[string]*refusal{},
	}
	d.changed.L = &d.mu
	for _, e := range o.Engines {
		d.engines = append(d.engines, &engine{d, e})
	}
	return d
}

// Name implements [device.Driver].
func (d *Driver) Name() string { return d.o.Name }

// Attributes implements [device.Driver].
func (d *Driver) Attributes() device.Attributes {
	pitch := int64(0)
	for _, e := range d.o.Engines {
		pitch = max(pitch, e.Limits.MaxPitch)
	}
	return device.Attributes{
		Model: "devicetest " + d.o.Mode.String(), UUID: "fake-" + d.o.Name, PCI: "ffff:ff:00.0", NUMANode: -1, Bytes: d.o.Bytes,
		MaxPitch: pitch, AsyncEngines: 2, UVA: true, Driver: "1",
	}
}

// Engines implements [device.Driver].
func (d *Driver) Engines() []device.Engine { return d.engines }

// Violations returns what was done against the rules so far.
func (d *Driver) Violations() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.violations)
}

// TakeViolations returns the violations, and forgets them: for tests that commit some.
func (d *Driver) TakeViolations() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.violations
	d.violations = nil
	return v
}

// PageableCopies returns how many copies of host memory that is not registered there
// were.
func (d *Driver) PageableCopies() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pageable
}

// violate notes a violation, and returns the error of the call that committed it.
func (d *Driver) violate(call, format string, args ...any) error {
	text := call + ": " + fmt.Sprintf(format, args...)
	if len(d.violations) < 100 {
		d.violations = append(d.violations, text)
	}
	return fault.Wrap(fault.Device, text, newError(call, 1, "INVALID_VALUE", device.Failed))
}

func newError(call string, code int, name string, class device.Class) *device.DriverError {
	return &device.DriverError{Library: "devicetest", Call: call, Code: code, Name: name, Class: class}
}

// Refuse makes the call behind the next skip calls of the named method fail with an
// error of class c, having done nothing. CopyRects counts its rects, and queues those
// before; CopyBatch queues half of its copies.
func (d *Driver) Refuse(call string, skip int, c device.Class) *device.DriverError {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := newError(call, 999, "REFUSED_ON_PURPOSE", c)
	d.refusals[call] = &refusal{skip, e}
	return e
}

// refused returns the error of a call of the device, nil when it is to go on.
func (d *Driver) refused(call string) error {
	if d.closed {
		return d.violate(call, "the driver was closed")
	}
	if d.lost != nil {
		return fault.Wrap(fault.Device, call, d.lost)
	}
	if r := d.refusals[call]; r != nil {
		if r.skip--; r.skip < 0 {
			delete(d.refusals, call)
			if r.err.Class == device.Lost {
				d.lose(r.err)
			}
			return fault.Wrap(fault.Device, call, r.err)
		}
	}
	return nil
}

// Lose takes the device away: nothing that is queued runs, and every call fails.
func (d *Driver) Lose() *device.DriverError {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lose(newError("Lose", 700, "DEVICE_LOST", device.Lost))
	return d.lost
}

func (d *Driver) lose(err *device.DriverError) {
	if d.lost == nil {
		d.lost = err
		d.changed.Broadcast()
	}
}

// Alloc implements [device.Driver].
func (d *Driver) Alloc(bytes int64) (uintptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("Alloc"); err != nil {
		return 0, err
	}
	if bytes <= 0 {
		return 0, d.violate("Alloc", "%d bytes", bytes)
	}
	if bytes > d.o.Bytes-d.used {
		return 0, fault.Wrap(fault.Memory, "Alloc", newError("Alloc", 2, "OUT_OF_MEMORY", device.Retry))
	}
	r := &region{lo: d.next, hi: d.next + uint64(bytes), bytes: make([]byte, bytes)}
	d.next += (uint64(bytes) + 1<<20) &^ 255
	d.used += bytes
	d.add(r)
	return uintptr(r.lo), nil
}

// add puts r into regions.
func (d *Driver) add(r *region) {
	i, _ := slices.BinarySearchFunc(d.regions, r.lo, func(x *region, lo uint64) int { return compare(x.lo, lo) })
	d.regions = slices.Insert(d.regions, i, r)
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// find returns the region that byte addr lies in, or nil.
func (d *Driver) find(addr uint64) *region {
	i, exact := slices.BinarySearchFunc(d.regions, addr, func(x *region, a uint64) int { return compare(x.lo, a) })
	if !exact {
		i--
	}
	if i < 0 || addr >= d.regions[i].hi {
		return nil
	}
	return d.regions[i]
}

// drop ends the region that starts at addr.
func (d *Driver) drop(call string, addr uintptr, host bool) error {
	r := d.find(uint64(addr))
	if r == nil || r.lo != uint64(addr) || r.host != host {
		return d.violate(call, "%#x was not returned or registered", addr)
	}
	var err error
	if r.users > 0 {
		err = d.violate(call, "%d copies that touch the memory at %#x are queued", r.users, addr)
	}
	r.gone = true
	d.regions = slices.DeleteFunc(d.regions, func(x *region) bool { return x == r })
	d.order.forget(r.lo, r.hi)
	if !host {
		d.used -= int64(r.hi - r.lo)
	}
	return err
}

// Free implements [device.Driver].
func (d *Driver) Free(addr uintptr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("Free"); err != nil {
		return err
	}
	return d.drop("Free", addr, false)
}

// Register implements [device.Driver].
func (d *Driver) Register(addr uintptr, bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("Register"); err != nil {
		return err
	}
	if bytes <= 0 || addr == 0 {
		return d.violate("Register", "%d bytes at %#x", bytes, addr)
	}
	page := uint64(os.Getpagesize())
	lo, hi := uint64(addr), uint64(addr)+uint64(bytes)
	for _, r := range d.regions {
		if r.host && r.lo/page <= (hi-1)/page && lo/page <= (r.hi-1)/page {
			return fault.Wrap(fault.Exists, fmt.Sprintf("Register: [%#x, %#x) and [%#x, %#x)", lo, hi, r.lo, r.hi),
				newError("Register", 712, "ALREADY_REGISTERED", device.Failed))
		}
	}
	d.add(&region{lo: lo, hi: hi, host: true, bytes: hostBytes(lo, bytes)})
	return nil
}

// Unregister implements [device.Driver].
func (d *Driver) Unregister(addr uintptr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("Unregister"); err != nil {
		return err
	}
	return d.drop("Unregister", addr, true)
}

// NewStream implements [device.Driver].
func (d *Driver) NewStream(device.Priority) (device.StreamHandle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("NewStream"); err != nil {
		return 0, err
	}
	d.handles += 16
	h := device.StreamHandle(d.handles)
	d.start(h)
	return h, nil
}

func (d *Driver) start(h device.StreamHandle) *queue {
	q := &queue{d: d, h: h, actor: d.order.actor(), rnd: rand.New(rand.NewPCG(d.o.Seed, uint64(h))), exited: make(chan struct{})}
	d.streams[h] = q
	go q.serve()
	return q
}

// queue returns the stream of h. The legacy stream is there from its first use on.
func (d *Driver) queue(call string, h device.StreamHandle) (*queue, error) {
	if h == device.LegacyStream {
		h = device.DefaultStream
	}
	q := d.streams[h]
	switch {
	case q == nil && h == device.DefaultStream:
		return d.start(h), nil
	case q == nil:
		return nil, d.violate(call, "%#x is no stream", h)
	case q.closed:
		return nil, d.violate(call, "stream %#x was closed", h)
	}
	return q, nil
}

// CloseStream implements [device.Driver].
func (d *Driver) CloseStream(h device.StreamHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("CloseStream"); err != nil {
		return err
	}
	q, err := d.queue("CloseStream", h)
	if err == nil {
		q.closed = true
		d.changed.Broadcast()
	}
	return err
}

// SyncStream implements [device.Driver].
func (d *Driver) SyncStream(h device.StreamHandle) (drained bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("SyncStream"); err != nil {
		return false, err
	}
	q, err := d.queue("SyncStream", h)
	if err != nil {
		return false, err
	}
	now := q.clock.clone()
	q.want(q.queued)
	for to := q.queued; q.ran < to && d.lost == nil; {
		d.changed.Wait()
	}
	d.order.host = d.order.host.joined(now)
	if d.lost != nil {
		return false, fault.Wrap(fault.Device, "SyncStream", d.lost)
	}
	return true, q.err
}

// NewEvent implements [device.Driver].
func (d *Driver) NewEvent() (device.EventHandle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.refused("NewEvent"); err != nil {
		return 0, err
	}
	d.handles += 16
	h := device.EventHandle(d.handles)
	d.events[h] = &event{}
	return h, nil
}

func (d *Driver) event(call string, h device.EventHandle) (*event, error) {
	if err := d.refused(call); err != nil {
		return nil, err
	}
	e := d.events[h]
	if e == nil {
		return nil, d.violate(call, "%#x is no event", h)
	}
	return e, nil
}

// CloseEvent implements [device.Driver].
func (d *Driver) CloseEvent(h device.EventHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.event("CloseEvent", h); err != nil {
		return err
	}
	delete(d.events, h)
	return nil
}

// Record implements [device.Driver].
func (d *Driver) Record(h device.EventHandle, s device.StreamHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.event("Record", h)
	if err != nil {
		return err
	}
	q, err := d.queue("Record", s)
	if err != nil {
		return err
	}
	e.latest = &point{q: q, index: q.queued + 1, clock: q.record()}
	q.push(command{record: e.latest})
	return nil
}

// Wait implements [device.Driver].
func (d *Driver) Wait(s device.StreamHandle, h device.EventHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.event("Wait", h)
	if err != nil {
		return err
	}
	q, err := d.queue("Wait", s)
	if err != nil {
		return err
	}
	if e.latest != nil {
		q.clock = q.clock.joined(e.latest.clock)
		q.push(command{wait: e.latest})
	}
	return nil
}

// lazyAnswers is how often a lazy driver says that work is not done before it runs it.
const lazyAnswers = 3

// EventDone implements [device.Driver].
func (d *Driver) EventDone(h device.EventHandle) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.event("EventDone", h)
	if err != nil || e.latest == nil {
		return err == nil, err
	}
	p := e.latest
	if p.asked++; p.asked > lazyAnswers {
		p.q.want(p.index)
	}
	return p.done, p.err
}

// SyncEvent implements [device.Driver].
func (d *Driver) SyncEvent(h device.EventHandle) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, err := d.event("SyncEvent", h)
	if err != nil || e.latest == nil {
		return err
	}
	p := e.latest
	p.q.want(p.index)
	for !p.done && d.lost == nil {
		d.changed.Wait()
	}
	if d.lost != nil {
		return fault.Wrap(fault.Device, "SyncEvent", d.lost)
	}
	return p.err
}

// Close implements [device.Driver]. What was not given back before is a violation.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return d.violate("Close", "the driver was closed before")
	}
	for _, q := range d.streams {
		if d.lost == nil && !q.closed && q.h != device.DefaultStream {
			_ = d.violate("Close", "stream %#x is open", q.h)
		}
		q.closed, q.holds = true, 0
	}
	if d.lost == nil {
		for _, r := range d.regions {
			_ = d.violate("Close", "memory at %#x is not freed, or registered", r.lo)
		}
	}
	d.closed = true
	d.changed.Broadcast()
	for _, q := range d.streams {
		d.mu.Unlock()
		<-q.exited
		d.mu.Lock()
	}
	return nil
}
