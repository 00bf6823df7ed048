package gpu

import (
	"errors"
	"runtime"
	"sync"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
)

// Device is one device of a library.
type Device struct {
	Name   string // for people: "cuda:0"
	Lib    *Library
	Handle uintptr // what queries take
	bound  uintptr // what binds a thread to the device

	least, greatest int     // priorities of streams: the greatest is the smallest number
	zeroer          uintptr // the stream on which memory is zeroed

	mu       sync.Mutex
	events   map[uintptr]struct{} // guarded by mu; those that were not destroyed; nil when closed
	exported map[Handle]uintptr   // guarded by mu; to the base of the memory

	// opening is held while the library opens and closes memory of other processes, which
	// may take long; mu never is in a call of the library.
	opening sync.Mutex
	opened  map[Handle]*opened // guarded by opening
}

// OpenDevice returns the device that threads are bound to by bound.
func OpenDevice(name string, lib *Library, handle, bound uintptr) (*Device, error) {
	d := &Device{
		Name: name, Lib: lib, Handle: handle, bound: bound,
		events: map[uintptr]struct{}{}, exported: map[Handle]uintptr{}, opened: map[Handle]*opened{},
	}
	if err := d.Enter(); err != nil {
		return nil, err
	}
	defer d.Leave()
	b, err := lib.Blocks.Get()
	if err != nil {
		return nil, err
	}
	defer lib.Blocks.Put(b)
	b.Words[0], b.Words[1] = 0, 0
	if err := lib.Call(abi.PriorityRange, b.Addr, b.Addr+8); err != nil {
		return nil, err
	}
	d.least, d.greatest = int(int32(b.Words[0])), int(int32(b.Words[1]))
	d.zeroer, err = d.newStream(0)
	return d, err
}

// Enter binds the OS thread of the caller to the device, until Leave. Without an error
// Leave must be called.
func (d *Device) Enter() error {
	runtime.LockOSThread()
	err := d.Lib.Call(abi.Bind, d.bound)
	if err != nil {
		runtime.UnlockOSThread()
	}
	return err
}

// Leave ends what Enter has begun.
func (d *Device) Leave() { runtime.UnlockOSThread() }

// Do makes one call on a thread that is bound to the device.
func (d *Device) Do(c int, args ...uintptr) error {
	if err := d.Enter(); err != nil {
		return err
	}
	defer d.Leave()
	return d.Lib.Call(c, args...)
}

// Out makes one call as [Library.Out] does, on a thread that is bound to the device.
func (d *Device) Out(c int, args ...uintptr) (uint64, error) {
	if err := d.Enter(); err != nil {
		return 0, err
	}
	defer d.Leave()
	return d.Lib.Out(c, args...)
}

func (d *Device) newStream(priority int) (uintptr, error) {
	s, err := d.Out(abi.StreamCreate, abi.CUStreamNonBlocking, uintptr(uint32(int32(priority))))
	return uintptr(s), err
}

// zero zeroes device memory, and waits until it is.
func (d *Device) zero(addr uintptr, bytes int64) error {
	if err := d.Enter(); err != nil {
		return err
	}
	defer d.Leave()
	if err := d.Lib.Call(abi.Fill, addr, 0, uintptr(bytes), d.zeroer); err != nil {
		return err
	}
	return d.Lib.Call(abi.StreamSync, d.zeroer)
}

// Close destroys what is left of the device: events, and its own stream.
func (d *Device) Close() error {
	d.mu.Lock()
	events := d.events
	d.events = nil
	d.mu.Unlock()
	var errs []error
	for e := range events {
		errs = append(errs, d.Do(abi.EventDestroy, e))
	}
	return errors.Join(append(errs, d.Do(abi.StreamDestroy, d.zeroer))...)
}

// Driver is what both libraries do in one form of what device.Driver asks for. S and E
// are its types of handles.
type Driver[S, E ~uintptr] struct{ d *Device }

// NewDriver returns the operations on d.
func NewDriver[S, E ~uintptr](d *Device) Driver[S, E] { return Driver[S, E]{d} }

// Name returns the name of the device.
func (x Driver[S, E]) Name() string { return x.d.Name }

// Alloc returns zeroed device memory.
func (x Driver[S, E]) Alloc(bytes int64) (uintptr, error) {
	addr, err := x.d.Out(abi.Alloc, uintptr(bytes))
	if err != nil {
		return 0, err
	}
	if err := x.d.zero(uintptr(addr), bytes); err != nil {
		return 0, errors.Join(err, x.d.Do(abi.Free, uintptr(addr)))
	}
	return uintptr(addr), nil
}

// Free gives device memory back.
func (x Driver[S, E]) Free(addr uintptr) error {
	x.d.forget(addr)
	return x.d.Do(abi.Free, addr)
}

// Register pins host memory. Kind, of pages that are pinned: fault.Exists.
func (x Driver[S, E]) Register(addr uintptr, bytes int64) error {
	if err := x.d.Enter(); err != nil {
		return err
	}
	defer x.d.Leave()
	r := x.d.Lib.funcs[abi.Register].Call(addr, uintptr(bytes), abi.CUHostRegisterPortable)
	err := x.d.Lib.Check(abi.Register, r)
	if Code(r) == abi.CUAlreadyRegistered {
		return fault.Wrap(fault.Exists, "", err)
	}
	return err
}

// Unregister unpins it.
func (x Driver[S, E]) Unregister(addr uintptr) error { return x.d.Do(abi.Unregister, addr) }

// NewStreamOf makes a stream. A priority is 0 for a usual one, 1 for the most urgent
// that the device has, -1 for the least.
func (x Driver[S, E]) NewStreamOf(priority int) (S, error) {
	p := min(max(0, x.d.greatest), x.d.least)
	switch {
	case priority > 0:
		p = x.d.greatest
	case priority < 0:
		p = x.d.least
	}
	s, err := x.d.newStream(p)
	return S(s), err
}

// CloseStream destroys a stream, whose work still runs.
func (x Driver[S, E]) CloseStream(s S) error { return x.d.Do(abi.StreamDestroy, uintptr(s)) }

// SyncStream waits for a stream, and reports whether it has drained. An error says
// nothing of that: work that fails fails the whole device, and every other code is of
// the call.
func (x Driver[S, E]) SyncStream(s S) (drained bool, err error) {
	err = x.d.Do(abi.StreamSync, uintptr(s))
	return err == nil, err
}

// NewEvent makes an event.
func (x Driver[S, E]) NewEvent() (E, error) {
	e, err := x.d.newEvent(abi.CUEventDisableTiming | abi.CUEventBlockingSync)
	return E(e), err
}

func (d *Device) newEvent(flags uintptr) (uintptr, error) {
	e, err := d.Out(abi.EventCreate, flags)
	if err != nil {
		return 0, err
	}
	return uintptr(e), d.keep(uintptr(e))
}

// keep puts e, which was made, among the events of the device; of a closed one it
// destroys it.
func (d *Device) keep(e uintptr) error {
	d.mu.Lock()
	closed := d.events == nil
	if !closed {
		d.events[e] = struct{}{}
	}
	d.mu.Unlock()
	if closed {
		return errors.Join(fault.New(fault.Closed, d.Name, "closed before"), d.Do(abi.EventDestroy, e))
	}
	return nil
}

// CloseEvent destroys an event.
func (x Driver[S, E]) CloseEvent(e E) error { return x.d.closeEvent(uintptr(e)) }

func (d *Device) closeEvent(e uintptr) error {
	d.mu.Lock()
	_, ours := d.events[e]
	delete(d.events, e)
	d.mu.Unlock()
	if !ours { // the handle may be somebody else's by now
		return fault.New(fault.Closed, d.Name, "event %#x was closed before", e)
	}
	return d.Do(abi.EventDestroy, e)
}

// Record makes e stand for what is queued on s.
func (x Driver[S, E]) Record(e E, s S) error { return x.d.Do(abi.EventRecord, uintptr(e), uintptr(s)) }

// Wait has s wait for e.
func (x Driver[S, E]) Wait(s S, e E) error {
	return x.d.Do(abi.StreamWait, uintptr(s), uintptr(e), 0)
}

// EventDone reports whether what e stands for has run. An error says nothing of that:
// the question has failed, or work before it, which others may outlast.
func (x Driver[S, E]) EventDone(e E) (bool, error) {
	if err := x.d.Enter(); err != nil {
		return false, err
	}
	defer x.d.Leave()
	r := x.d.Lib.funcs[abi.EventQuery].Call(uintptr(e))
	if Code(r) == abi.CUNotReady {
		x.d.Lib.clear()
		return false, nil
	}
	err := x.d.Lib.Check(abi.EventQuery, r)
	return err == nil, err
}

// SyncEvent waits for e.
func (x Driver[S, E]) SyncEvent(e E) error { return x.d.Do(abi.EventSync, uintptr(e)) }
