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

// Shared is device memory that is made of descriptors: its own process exports them,
// another maps them.
type Shared struct {
	Addr  uintptr
	Bytes int64

	d        *Device
	memories []uintptr // the library's words for its pieces, in their order
	closed   atomic.Bool
}

// Piece is memory behind one descriptor.
type Piece struct {
	FD    int
	Bytes int64 // all that it has
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
	s, err := d.mapShared([]uintptr{uintptr(memory)}, []int64{bytes})
	if err != nil {
		return nil, err
	}
	if err := d.zero(s.Addr, bytes); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// ImportShared maps the memory behind descriptors that another process has exported, all
// bytes of each, one behind the other. The descriptors stay the caller's.
func (x Sharing[E]) ImportShared(pieces ...Piece) (*Shared, error) {
	d := x.d
	grain, err := d.granularity()
	if err != nil {
		return nil, err
	}
	var sizes []int64
	for _, p := range pieces {
		if p.Bytes <= 0 || p.Bytes > 1<<62/int64(len(pieces)) || p.Bytes%grain != 0 {
			return nil, fault.New(fault.Invalid, d.Name, "%d bytes of shared memory, which comes in pieces of %d", p.Bytes, grain)
		}
		sizes = append(sizes, p.Bytes)
	}
	if len(pieces) == 0 {
		return nil, fault.New(fault.Invalid, d.Name, "shared memory of no pieces")
	}
	var memories []uintptr
	for _, p := range pieces {
		m, err := d.importFD(p.FD)
		if err != nil {
			return nil, errors.Join(err, d.release(memories))
		}
		memories = append(memories, m)
	}
	return d.mapShared(memories, sizes)
}

// importFD returns the library's word for the memory behind a descriptor.
func (d *Device) importFD(fd int) (uintptr, error) {
	b, err := d.Lib.Blocks.Get()
	if err != nil {
		return 0, err
	}
	defer d.Lib.Blocks.Put(b)
	b.Words[0] = uint64(uint32(fd))
	from := uintptr(uint32(fd))
	if d.Lib.FDByAddress {
		from = b.Addr
	}
	m, err := d.Out(abi.MemImport, from, abi.CUHandlePosixFD)
	return uintptr(m), err
}

func (d *Device) release(memories []uintptr) error {
	var errs []error
	for _, m := range memories {
		errs = append(errs, d.Do(abi.MemRelease, m))
	}
	return errors.Join(errs...)
}

// PiecesAt returns new descriptors, which are the caller's to close, of the memory that
// [addr, addr+bytes) lies in, and how far in it addr is: memory that is made of
// descriptors, whoever in this process has made it. Kinds: fault.Device (it is other
// memory, or can't be exported), fault.Unsupported (more pieces than most).
func (x Sharing[E]) PiecesAt(addr uintptr, bytes int64, most int) (pieces []Piece, offset int64, err error) {
	d := x.d
	if !d.Lib.CanMap() || !d.Lib.Has(abi.MemRetain) {
		return nil, 0, d.Lib.lacks(abi.MemRetain)
	}
	defer func() {
		if err != nil {
			for _, p := range pieces {
				_ = unix.Close(p.FD) // nothing was written to it
			}
			pieces = nil
		}
	}()
	for at, end := addr, addr+uintptr(bytes); at < end; {
		if len(pieces) == most {
			return pieces, 0, fault.New(fault.Unsupported, d.Name, "%d bytes of memory lie in more than %d pieces", bytes, most).
				Hint("have it allocated in larger pieces")
		}
		base, size, err := d.Range(at)
		if err != nil {
			return pieces, 0, err
		}
		if base > at || size <= int64(at-base) {
			return pieces, 0, fault.New(fault.Device, d.Name, "the memory at %#x is said to be %d bytes at %#x", at, size, base)
		}
		fd, err := d.exportAt(base)
		if err != nil {
			return pieces, 0, err
		}
		if len(pieces) == 0 {
			offset = int64(at - base)
		}
		pieces = append(pieces, Piece{fd, size})
		at = base + uintptr(size)
	}
	return pieces, offset, nil
}

// exportAt returns a descriptor of the memory that is mapped at base.
func (d *Device) exportAt(base uintptr) (fd int, err error) {
	m, err := d.Out(abi.MemRetain, base)
	if err != nil {
		return -1, err
	}
	fd, err = d.export(uintptr(m))
	if release := d.Do(abi.MemRelease, uintptr(m)); err == nil && release != nil {
		_ = unix.Close(fd) // nothing was written to it
		return -1, release
	}
	return fd, err
}

func (d *Device) export(memory uintptr) (fd int, err error) {
	v, err := d.Out(abi.MemExport, memory, abi.CUHandlePosixFD, 0)
	if err != nil {
		return -1, err
	}
	fd = int(int32(v))
	unix.CloseOnExec(fd)
	return fd, nil
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

// mapShared gives memories of these sizes addresses that follow each other, or gives
// them back.
func (d *Device) mapShared(memories []uintptr, sizes []int64) (_ *Shared, err error) {
	var undo []func() error
	defer func() {
		if err == nil {
			return
		}
		for _, f := range slices.Backward(undo) {
			err = errors.Join(err, f())
		}
	}()
	undo = append(undo, func() error { return d.release(memories) })
	var bytes int64
	for _, n := range sizes {
		bytes += n
	}
	at, err := d.Out(abi.MemReserve, uintptr(bytes), 0, 0, 0)
	if err != nil {
		return nil, err
	}
	addr := uintptr(at)
	undo = append(undo, func() error { return d.Do(abi.MemUnreserve, addr, uintptr(bytes)) })
	end := addr
	for i, m := range memories {
		from, n := end, uintptr(sizes[i])
		if err := d.Do(abi.MemMap, from, n, 0, m, 0); err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return d.Do(abi.MemUnmap, from, n) })
		end += n
	}
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
	return &Shared{Addr: addr, Bytes: bytes, d: d, memories: memories}, nil
}

// Export returns a new descriptor of the memory, which is one piece. It is the caller's
// to close. Kind: fault.Unsupported, of more pieces: see PiecesAt.
func (s *Shared) Export() (fd int, err error) {
	switch {
	case s.closed.Load():
		return -1, s.wasClosed()
	case len(s.memories) != 1:
		return -1, fault.New(fault.Unsupported, s.d.Name, "a descriptor of shared memory that has %d", len(s.memories))
	}
	return s.d.export(s.memories[0])
}

// Close gives the memory back; it lasts for as long as any process has it. Nothing may
// use it any more. Kind: fault.Closed the second time.
func (s *Shared) Close() error {
	if s.closed.Swap(true) {
		return s.wasClosed()
	}
	n := uintptr(s.Bytes)
	return errors.Join(s.d.Do(abi.MemUnmap, s.Addr, n), s.d.Do(abi.MemUnreserve, s.Addr, n), s.d.release(s.memories))
}

func (s *Shared) wasClosed() error {
	return fault.New(fault.Closed, s.d.Name, "the shared memory at %#x was closed before", s.Addr)
}

// put writes 4 bytes at byte off of b.
func put(b *dl.Block, off int, v uint32) { binary.LittleEndian.PutUint32(b.Bytes[off:], v) }
