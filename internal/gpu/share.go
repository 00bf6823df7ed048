package gpu

import (
	"sync/atomic"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
)

// Handle names memory or an event to other processes of this machine. It is opaque, and
// it names nothing any more once its process has ended or has freed what it names.
type Handle [8 * dl.HandleWords]byte

// Export is device memory as another process can open it: the handle is of the whole
// allocation that the memory lies in.
type Export struct {
	Handle Handle
	Offset int64 // of the memory in its allocation
	Bytes  int64 // of the allocation
}

// opened is memory of another process, opened once however often it was asked for.
type opened struct {
	addr  uintptr
	bytes int64
	refs  int // guarded by the device's opening
}

// Sharing are the operations on memory and events that processes share. E is the type
// of handles of events.
type Sharing[E ~uintptr] struct{ d *Device }

// NewSharing returns the operations on d.
func NewSharing[E ~uintptr](d *Device) Sharing[E] { return Sharing[E]{d} }

// ExportMemory returns what another process opens the memory at addr by. Memory that was
// made by AllocShared is exported by its descriptor instead.
func (x Sharing[E]) ExportMemory(addr uintptr) (Export, error) {
	d := x.d
	base, bytes, err := d.Range(addr)
	if err != nil {
		return Export{}, err
	}
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return Export{}, err
	}
	defer d.Lib.Blocks.Put(b)
	clear(b.Words[:dl.HandleWords])
	if err := d.Do(abi.IpcExport, b.Addr, base); err != nil {
		return Export{}, err
	}
	e := Export{Handle: Handle(b.Bytes), Offset: int64(addr - base), Bytes: bytes}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.exported[e.Handle] = base
	return e, nil
}

// Range returns the allocation, or the piece, that the memory at addr lies in.
func (d *Device) Range(addr uintptr) (base uintptr, bytes int64, err error) {
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return 0, 0, err
	}
	defer d.Lib.Blocks.Put(b)
	b.Words[0], b.Words[1] = 0, 0
	err = d.Do(abi.AddressRange, b.Addr, b.Addr+8, addr)
	return uintptr(b.Words[0]), int64(b.Words[1]), err
}

// forget forgets the exports of the memory at base, which is being freed.
func (d *Device) forget(base uintptr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for h, at := range d.exported {
		if at == base {
			delete(d.exported, h)
		}
	}
}

// OpenMemory opens memory that another process has exported. A handle that is open
// already is opened no second time. Kinds: fault.Invalid (the memory is this process's
// own), fault.Device (the handle names nothing any more).
func (x Sharing[E]) OpenMemory(h Handle) (*Opened, error) {
	d := x.d
	d.opening.Lock()
	defer d.opening.Unlock()
	if d.own(h) {
		return nil, fault.New(fault.Invalid, d.Name, "the memory to be opened is this process's own").Hint("use its address")
	}
	o := d.opened[h]
	if o == nil {
		addr, err := d.openHandle(abi.IpcOpen, h, abi.CUIpcLazyPeerAccess)
		if err != nil {
			return nil, err
		}
		_, bytes, _ := d.Range(addr) // 0 is said of it
		o = &opened{addr: addr, bytes: bytes}
		d.opened[h] = o
	}
	o.refs++
	return &Opened{Addr: o.addr, Bytes: o.bytes, d: d, handle: h}, nil
}

// own reports whether h names memory that this process has exported.
func (d *Device) own(h Handle) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, own := d.exported[h]
	return own
}

// openHandle makes a call that takes a handle by value.
func (d *Device) openHandle(c int, h Handle, flags uintptr) (uintptr, error) {
	if !d.Lib.Has(c) {
		return 0, d.Lib.lacks(c)
	}
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return 0, err
	}
	defer d.Lib.Blocks.Put(b)
	if err := d.Enter(); err != nil {
		return 0, err
	}
	defer d.Leave()
	copy(b.Bytes, h[:])
	out := dl.HandleWords
	b.Words[out] = 0
	err = d.Lib.Check(c, d.Lib.funcs[c].CallHandle(b.Addr+uintptr(8*out), b, flags))
	return uintptr(b.Words[out]), err
}

// Opened is memory of another process. Its bytes are the other's to change at any time.
type Opened struct {
	Addr  uintptr
	Bytes int64 // 0 when the library does not say

	d      *Device
	handle Handle
	closed atomic.Bool
}

// Close gives the memory back; it stays the other process's. Kind: fault.Closed the
// second time.
func (o *Opened) Close() error {
	if o.closed.Swap(true) {
		return fault.New(fault.Closed, o.d.Name, "the opened memory at %#x was closed before", o.Addr)
	}
	o.d.opening.Lock()
	defer o.d.opening.Unlock()
	at := o.d.opened[o.handle]
	if at.refs--; at.refs > 0 {
		return nil
	}
	delete(o.d.opened, o.handle)
	return o.d.Do(abi.IpcClose, at.addr)
}

// NewSharedEvent makes an event that other processes can open. It is slower to wait for
// than others.
func (x Sharing[E]) NewSharedEvent() (*SharedEvent[E], error) {
	e, err := x.d.newEvent(abi.CUEventDisableTiming | abi.CUEventInterprocess)
	if err != nil {
		return nil, err
	}
	return &SharedEvent[E]{Event: E(e), d: x.d}, nil
}

// OpenEvent opens an event that another process has exported.
func (x Sharing[E]) OpenEvent(h Handle) (*SharedEvent[E], error) {
	e, err := x.d.openHandle(abi.IpcOpenEvent, h, 0)
	if err != nil {
		return nil, err
	}
	if err := x.d.keep(e); err != nil {
		return nil, err
	}
	return &SharedEvent[E]{Event: E(e), d: x.d}, nil
}

// SharedEvent is an event of more than one process.
type SharedEvent[E ~uintptr] struct {
	Event E // for the methods of the driver
	d     *Device
}

// Export returns what another process opens the event by.
func (e *SharedEvent[E]) Export() (Handle, error) {
	b, err := e.d.Lib.Blocks.Get()
	if err != nil {
		return Handle{}, err
	}
	defer e.d.Lib.Blocks.Put(b)
	if err := e.d.Do(abi.IpcExportEvent, b.Addr, uintptr(e.Event)); err != nil {
		return Handle{}, err
	}
	return Handle(b.Bytes), nil
}

// Close destroys the event in this process. Kind: fault.Closed the second time, and once
// the device is closed, with which its events end.
func (e *SharedEvent[E]) Close() error { return e.d.closeEvent(uintptr(e.Event)) }

// CanAccessPeer reports whether this device can read and write the memory of other by
// itself, once EnablePeer was called.
func (x Sharing[E]) CanAccessPeer(other Sharing[E]) (bool, error) {
	can, err := x.d.Out(abi.CanAccessPeer, x.d.Handle, other.d.Handle)
	return int32(can) != 0, err
}

// EnablePeer lets this device read and write the memory of other by itself. Calling it
// again does nothing.
func (x Sharing[E]) EnablePeer(other Sharing[E]) error {
	d := x.d
	if !d.Lib.Has(abi.EnablePeer) {
		return d.Lib.lacks(abi.EnablePeer)
	}
	if err := d.Enter(); err != nil {
		return err
	}
	defer d.Leave()
	r := d.Lib.funcs[abi.EnablePeer].Call(other.d.bound, 0)
	if Code(r) == abi.CUPeerAlreadyEnabled {
		d.Lib.clear()
		return nil
	}
	return d.Lib.Check(abi.EnablePeer, r)
}
