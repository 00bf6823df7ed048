package hostipc

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
)

const (
	hugeBytes = 2 << 20  // what mappings begin on a multiple of, so that huge pages fit
	stride    = 64 << 20 // of populating, between looks at the context
)

// mapping is a memory of the owner's, mapped here for reading. The zero value is none.
type mapping struct {
	reserved []byte // all that was mapped; nil of nothing
	bytes    []byte // the memory
	mem      *device.Memory
}

// mapExtent maps the first need bytes of x side by side, from files that nobody can resize
// and that are as long as x says. On an error nothing is mapped. Kinds: fault.Invalid,
// fault.Memory.
func mapExtent(x *extent, files []int, need int64) (m mapping, err error) {
	if need == 0 {
		return mapping{mem: device.WrapHost(nil)}, nil
	}
	page := int64(os.Getpagesize())
	length := (need + page - 1) / page * page
	if length < need || int64(int(length+hugeBytes)) != length+hugeBytes || length+hugeBytes < 0 {
		return m, fault.New(fault.Memory, "shared memory", "%d bytes are more than there are addresses", need)
	}
	// First the addresses: what is mapped over them later cannot hit anything.
	m.reserved, err = unix.Mmap(-1, 0, int(length+hugeBytes), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return mapping{}, fault.Wrap(fault.Memory, fmt.Sprintf("address space for %d bytes", need), err).Hint("raise ulimit -v")
	}
	base := device.WrapHost(m.reserved).Base()
	skip := -base & (hugeBytes - 1)
	m.bytes = m.reserved[skip:][:need:need]
	for i, done := 0, int64(0); err == nil && done < need; i++ {
		p := x.pieces[i]
		n := min(p.bytes, need-done)
		if err = handoff.CheckSealed(files[i], p.off+n); err == nil {
			err = mapOver(base+skip+uintptr(done), n, files[i], p.off)
		}
		done += n
	}
	if err != nil {
		return mapping{}, errors.Join(err, m.unmap())
	}
	// Advice, which a kernel is free to refuse: huge pages, where the owner has them, and
	// no pages of users' prompts in core dumps.
	_ = unix.Madvise(m.bytes, unix.MADV_HUGEPAGE)
	_ = unix.Madvise(m.bytes, unix.MADV_DONTDUMP)
	m.mem = device.WrapHost(m.bytes)
	return m, nil
}

// mapOver maps a file for reading at an address that is reserved.
func mapOver(addr uintptr, n int64, fd int, off int64) error {
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(n), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED, uintptr(fd), uintptr(off))
	switch errno {
	case 0:
		return nil
	case unix.EACCES, unix.EPERM:
		return fault.Wrap(fault.Invalid, "shared memory: the descriptor is not for reading", errno)
	default:
		return fault.Wrap(fault.Memory, fmt.Sprintf("map %d bytes of shared memory", n), errno).Hint("raise the sysctl vm.max_map_count, or ulimit -v")
	}
}

// populate maps all pages that the file has, and makes those that it has not. A kernel
// that can't do that leaves them to be found when they are first read.
func (m *mapping) populate(ctx context.Context) error {
	for off := 0; off < len(m.bytes); off += stride {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := m.bytes[off:min(off+stride, len(m.bytes))]
		if err := unix.Madvise(part, unix.MADV_POPULATE_READ); err == unix.ENOMEM {
			return fault.Wrap(fault.Memory, fmt.Sprintf("populate %d bytes of shared memory", len(m.bytes)), err)
		}
	}
	return nil
}

// free ends the mapping. Nothing reads it any more. Where a device can't be made to let go
// of it, it stays.
func (m *mapping) free() error {
	if m.mem == nil {
		return nil
	}
	if err := m.mem.Free(); err != nil {
		return err
	}
	m.mem = nil
	return m.unmap()
}

func (m *mapping) unmap() error {
	if m.reserved == nil {
		return nil
	}
	b := m.reserved
	m.reserved, m.bytes = nil, nil
	return handoff.Unmap(b)
}
