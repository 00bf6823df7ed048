package hip

import (
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/gpu"
)

// Handle names memory or an event to other processes of this machine: bytes to be sent to
// them as they are. It names nothing any more once its process has ended, or has freed
// or closed what it names.
type Handle [64]byte

// Export is device memory as another process can open it. The handle is of the whole
// allocation that the memory lies in.
type Export struct {
	Handle Handle
	Offset int64 // of the memory in its allocation, in bytes
	Bytes  int64 // of the allocation
}

// ExportMemory returns what another process opens the device memory at addr by, which
// this process has allocated: addr may be any address in an allocation. It must stay
// allocated while others have it open. Memory of AllocShared is exported by its own
// Export instead.
//
// Kinds: fault.Device (no device memory, or of a kind that can't be exported), with a
// [device.DriverError]; fault.Unsupported (a library without these calls). It may be
// called from any goroutine, as all methods for sharing.
func (d *Driver) ExportMemory(addr uintptr) (Export, error) {
	e, err := d.sharing.ExportMemory(addr)
	return Export{Handle(e.Handle), e.Offset, e.Bytes}, err
}

// OpenMemory opens the whole allocation that another process has exported. What this
// process has open already is opened no second time in the library: each Opened is
// closed for itself, and the last Close gives the memory back. It waits for other calls
// of OpenMemory and Opened.Close on this driver.
//
// Kinds: fault.Invalid (the memory is this process's own: use its address), fault.Device
// (the handle names nothing, or nothing any more), fault.Unsupported.
func (d *Driver) OpenMemory(h Handle) (*Opened, error) {
	o, err := d.sharing.OpenMemory(gpu.Handle(h))
	if err != nil {
		return nil, err
	}
	return &Opened{Addr: o.Addr, Bytes: o.Bytes, of: o}, nil
}

// Opened is memory of another process, until it is closed. Its bytes are the other's to
// change at any time; [device.Accelerator.Wrap] makes a memory of it.
type Opened struct {
	Addr  uintptr // of the allocation, in this process
	Bytes int64   // of the allocation; 0 when the library does not say
	of    *gpu.Opened
}

// Close gives the memory back; it stays the other process's. Nothing may use it any more.
// Kinds: fault.Closed the second time, fault.Device.
func (o *Opened) Close() error { return o.of.Close() }

// NewSharedEvent makes an event that other processes can open. It is slower to wait for
// than others. Kinds: fault.Device, fault.Closed (the driver).
func (d *Driver) NewSharedEvent() (*SharedEvent, error) {
	return sharedEvent(d.sharing.NewSharedEvent())
}

// OpenEvent opens an event that another process has exported. Kinds: fault.Device (the
// handle names nothing), fault.Unsupported, fault.Closed (the driver).
func (d *Driver) OpenEvent(h Handle) (*SharedEvent, error) {
	return sharedEvent(d.sharing.OpenEvent(gpu.Handle(h)))
}

func sharedEvent(e *gpu.SharedEvent[device.EventHandle], err error) (*SharedEvent, error) {
	if err != nil {
		return nil, err
	}
	return &SharedEvent{Event: e.Event, of: e}, nil
}

// SharedEvent is an event of more than one process, until it is closed. Each process may
// record it, wait for it, and ask whether it is over.
type SharedEvent struct {
	Event device.EventHandle // for Record, Wait, EventDone and SyncEvent of the driver
	of    *gpu.SharedEvent[device.EventHandle]
}

// Export returns what another process opens the event by. Kinds: fault.Device (of an
// event that was opened, not made), fault.Unsupported.
func (e *SharedEvent) Export() (Handle, error) {
	h, err := e.of.Export()
	return Handle(h), err
}

// Close destroys the event in this process. Kinds: fault.Closed the second time, and once
// the device is closed, with which its events end; fault.Device.
func (e *SharedEvent) Close() error { return e.of.Close() }

// AllocShared returns zeroed device memory of at least bytes, which is more than 0, that
// other processes map by a descriptor. It is rounded up to what the device shares memory
// by, which is some MiB; Attributes().VMM says whether the device can do this.
//
// Kinds: fault.Invalid (bytes), fault.Memory, fault.Device, fault.Unsupported.
func (d *Driver) AllocShared(bytes int64) (*Shared, error) {
	return sharedMemory(d.sharing.AllocShared(bytes))
}

// ImportShared maps the memory behind descriptor fd, which another process has exported
// and sent (SCM_RIGHTS), with read and write access. bytes is all that it has: the
// Shared.Bytes of its maker. The descriptor stays the caller's to close, at any time.
//
// Kinds: fault.Invalid (bytes that no such memory can have), fault.Device (no such
// descriptor), fault.Unsupported.
func (d *Driver) ImportShared(fd int, bytes int64) (*Shared, error) {
	return d.ImportPieces([]Piece{{FD: fd, Bytes: bytes}})
}

// ImportPieces is ImportShared of memory that has several descriptors: of each piece all
// bytes, at addresses that follow each other.
func (d *Driver) ImportPieces(pieces []Piece) (*Shared, error) {
	all := make([]gpu.Piece, len(pieces))
	for i, p := range pieces {
		all[i] = gpu.Piece(p)
	}
	return sharedMemory(d.sharing.ImportShared(all...))
}

// Piece is memory behind one descriptor.
type Piece struct {
	FD    int
	Bytes int64 // all that it has
}

// ExportPieces returns what another process maps [addr, addr+bytes) by, at most most
// pieces, whose descriptors are the caller's to close, and how far behind the beginning
// of the first piece addr is. It is for memory that is made of descriptors, such as that
// of AllocShared or of an engine's allocator: each piece must have been made so that it
// can be exported.
//
// Kinds: fault.Device (other memory, or such as can't be exported), with a
// [device.DriverError]; fault.Unsupported (more pieces; a library without these calls).
func (d *Driver) ExportPieces(addr uintptr, bytes int64, most int) (pieces []Piece, offset int64, err error) {
	all, offset, err := d.sharing.PiecesAt(addr, bytes, most)
	for _, p := range all {
		pieces = append(pieces, Piece(p))
	}
	return pieces, offset, err
}

func sharedMemory(s *gpu.Shared, err error) (*Shared, error) {
	if err != nil {
		return nil, err
	}
	return &Shared{Addr: s.Addr, Bytes: s.Bytes, of: s}, nil
}

// Shared is device memory behind a descriptor, until it is closed;
// [device.Accelerator.Wrap] makes a memory of it.
type Shared struct {
	Addr  uintptr // in this process
	Bytes int64
	of    *gpu.Shared
}

// Export returns a new descriptor of the memory, which is the caller's to close, and is
// not inherited by programs that are started. Kinds: fault.Closed, fault.Device.
func (s *Shared) Export() (fd int, err error) { return s.of.Export() }

// Close unmaps the memory here; it lasts for as long as any process or descriptor has it.
// Nothing may use it any more. Kinds: fault.Closed the second time, fault.Device.
func (s *Shared) Close() error { return s.of.Close() }

// CanAccessPeer reports whether this device can read and write the memory of other by
// itself, once EnablePeer was called. Kind: fault.Device.
func (d *Driver) CanAccessPeer(other *Driver) (bool, error) {
	return d.sharing.CanAccessPeer(other.sharing)
}

// EnablePeer lets this device read and write the memory of other by itself, in one
// direction. Calling it again does nothing. Kinds: fault.Device (it can't),
// fault.Unsupported.
func (d *Driver) EnablePeer(other *Driver) error { return d.sharing.EnablePeer(other.sharing) }
