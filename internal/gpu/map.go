package gpu

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
)

// Shared is device memory that is made of a descriptor: its own process exports one,
// another maps it.
type Shared struct {
	Addr  uintptr
	Bytes int64

	d      *Device
	memory uintptr // the library's word for it
	closed atomic.Bool
}

// AllocShared returns zeroed device memory of at least bytes that other processes can
// map by a descriptor.
func (x Sharing[E]) AllocShared(bytes int64) (_ *Shared, err error) {
	d := x.d
	grain, err := d.granularity()
	if err != nil {
		return nil, err
	}
	if bytes <= 0 || bytes > 1<<62 {
		return nil, fault.New(fault.Invalid, d.Name, "%d bytes of shared memory", bytes)
	}
	bytes = (bytes + grain - 1) / grain * grain
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return nil, err
	}
	defer d.Lib.Blocks.Put(b)
	d.describe(b)
	memory, err := d.Out(abi.MemCreate, uintptr(bytes), b.Addr, 0)
	if err != nil {
		return nil, err
	}
	s, err := d.mapShared(uintptr(memory), bytes)
	if err != nil {
		return nil, err
	}
	if err := d.zero(s.Addr, bytes); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// ImportShared maps the memory behind a descriptor that another process has exported,
// all of its bytes. The descriptor stays the caller's.
func (x Sharing[E]) ImportShared(fd int, bytes int64) (*Shared, error) {
	d := x.d
	grain, err := d.granularity()
	if err != nil {
		return nil, err
	}
	if bytes <= 0 || bytes%grain != 0 {
		return nil, fault.New(fault.Invalid, d.Name, "%d bytes of shared memory, which comes in pieces of %d", bytes, grain)
	}
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return nil, err
	}
	defer d.Lib.Blocks.Put(b)
	b.Words[0] = uint64(uint32(fd))
	from := uintptr(uint32(fd))
	if d.Lib.FDByAddress {
		from = b.Addr
	}
	memory, err := d.Out(abi.MemImport, from, abi.CUHandlePosixFD)
	if err != nil {
		return nil, err
	}
	return d.mapShared(uintptr(memory), bytes)
}

// describe writes into b which memory is asked for, at its beginning.
func (d *Device) describe(b *dl.Block) {
	clear(b.Bytes[:abi.AllocationPropBytes])
	put(b, abi.AllocationPropType, abi.CUAllocationPinned)
	put(b, abi.AllocationPropHandleTypes, abi.CUHandlePosixFD)
	put(b, abi.AllocationPropLocationType, abi.CULocationDevice)
	put(b, abi.AllocationPropLocationID, uint32(d.Handle))
}

// granularity returns what sizes of shared memory are multiples of.
func (d *Device) granularity() (int64, error) {
	if !d.Lib.CanMap() {
		return 0, d.Lib.lacks(abi.MemCreate)
	}
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return 0, err
	}
	defer d.Lib.Blocks.Put(b)
	d.describe(b)
	grain, err := d.Out(abi.MemGranularity, b.Addr, abi.CUGranularityMinimum)
	if err == nil && grain == 0 {
		err = fault.New(fault.Device, d.Name, "shared memory comes in pieces of 0 bytes")
	}
	return int64(grain), err
}

// mapShared gives memory an address, or gives it back.
func (d *Device) mapShared(memory uintptr, bytes int64) (_ *Shared, err error) {
	var undo []func() error
	defer func() {
		if err == nil {
			return
		}
		for _, f := range slices.Backward(undo) {
			err = errors.Join(err, f())
		}
	}()
	undo = append(undo, func() error { return d.Do(abi.MemRelease, memory) })
	at, err := d.Out(abi.MemReserve, uintptr(bytes), 0, 0, 0)
	if err != nil {
		return nil, err
	}
	addr := uintptr(at)
	undo = append(undo, func() error { return d.Do(abi.MemUnreserve, addr, uintptr(bytes)) })
	if err := d.Do(abi.MemMap, addr, uintptr(bytes), 0, memory, 0); err != nil {
		return nil, err
	}
	undo = append(undo, func() error { return d.Do(abi.MemUnmap, addr, uintptr(bytes)) })
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return nil, err
	}
	defer d.Lib.Blocks.Put(b)
	clear(b.Bytes[:abi.AccessDescBytes])
	put(b, abi.AccessDescLocationType, abi.CULocationDevice)
	put(b, abi.AccessDescLocationID, uint32(d.Handle))
	put(b, abi.AccessDescFlags, abi.CUAccessReadWrite)
	if err := d.Do(abi.MemSetAccess, addr, uintptr(bytes), b.Addr, 1); err != nil {
		return nil, err
	}
	return &Shared{Addr: addr, Bytes: bytes, d: d, memory: memory}, nil
}

// Export returns a new descriptor of the memory, which is the caller's to close.
func (s *Shared) Export() (fd int, err error) {
	if s.closed.Load() {
		return -1, s.wasClosed()
	}
	v, err := s.d.Out(abi.MemExport, s.memory, abi.CUHandlePosixFD, 0)
	if err != nil {
		return -1, err
	}
	fd = int(int32(v))
	unix.CloseOnExec(fd)
	return fd, nil
}

// Close gives the memory back; it lasts for as long as any process has it. Nothing may
// use it any more. Kind: fault.Closed the second time.
func (s *Shared) Close() error {
	if s.closed.Swap(true) {
		return s.wasClosed()
	}
	n := uintptr(s.Bytes)
	return errors.Join(s.d.Do(abi.MemUnmap, s.Addr, n), s.d.Do(abi.MemUnreserve, s.Addr, n), s.d.Do(abi.MemRelease, s.memory))
}

func (s *Shared) wasClosed() error {
	return fault.New(fault.Closed, s.d.Name, "the shared memory at %#x was closed before", s.Addr)
}

// put writes 4 bytes at byte off of b.
func put(b *dl.Block, off int, v uint32) { binary.LittleEndian.PutUint32(b.Bytes[off:], v) }
