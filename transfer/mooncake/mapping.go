package mooncake

import (
	"bytes"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
)

const (
	maxPieces      = 253     // that one message can carry: SCM_MAX_FD
	maxRegionBytes = 1 << 46 // far above any memory, and far below any overflow
)

// piece is a stretch of a region that lies in one memfd.
type piece struct{ off, fileOff, bytes int64 }

// region is memory as a worker sees it: a range of addresses of its own.
type region struct {
	base       uintptr
	bytes      int64
	pages      []byte // the range, when it is a mapping of this package's
	registered bool
}

// mapRegion maps memfds side by side. They are looked at first: what can shrink under a
// mapping is a crash of whoever touches it. Kinds: fault.Invalid, fault.Memory.
func mapRegion(size int64, pieces []piece, fds []int, write bool) (*region, error) {
	osPage := int64(os.Getpagesize())
	if err := checkPieces(size, pieces, len(fds), osPage); err != nil {
		return nil, err
	}
	for i, p := range pieces {
		if err := handoff.CheckSealed(fds[i], p.fileOff+p.bytes); err != nil {
			return nil, err
		}
	}
	what := fmt.Sprintf("region of %d bytes", size)
	pages, err := unix.Mmap(-1, 0, int((size+osPage-1)/osPage*osPage), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fault.Wrap(fault.Memory, what+": addresses", err).Hint("raise ulimit -v")
	}
	r := &region{base: device.WrapHost(pages).Base(), bytes: size, pages: pages}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	for i, p := range pieces {
		if err := mapOver(r.base+uintptr(p.off), p.bytes, prot, unix.MAP_SHARED, fds[i], p.fileOff); err != nil {
			_ = unix.Munmap(pages)
			return nil, fault.Wrap(fault.Memory, what, err)
		}
	}
	_ = unix.Madvise(pages, unix.MADV_DONTDUMP) // advice: no pages of users' prompts in core dumps
	return r, nil
}

// checkPieces refuses pieces that don't make up a region without gaps.
func checkPieces(size int64, pieces []piece, fds int, osPage int64) error {
	if size < 1 || size > maxRegionBytes || len(pieces) != fds || len(pieces) == 0 || len(pieces) > maxPieces {
		return fault.New(fault.Invalid, "region", "%d bytes of %d pieces and %d descriptors", size, len(pieces), fds)
	}
	var at int64
	for i, p := range pieces {
		whole := p.off%osPage == 0 && p.fileOff%osPage == 0
		if p.off != at || p.bytes < 1 || p.bytes > size-at || p.fileOff < 0 || p.fileOff > math.MaxInt64-maxRegionBytes || !whole {
			return fault.New(fault.Invalid, "region", "piece %d of %d has %d bytes at %d, of a file at %d", i, len(pieces), p.bytes, p.off, p.fileOff)
		}
		at += p.bytes
	}
	if at != size {
		return fault.New(fault.Invalid, "region", "%d bytes of pieces, and it has %d", at, size)
	}
	return nil
}

// mapOver replaces what is mapped at addr, a range of this package's.
func mapOver(addr uintptr, size int64, prot, flags, fd int, off int64) error {
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(size), uintptr(prot), uintptr(flags|unix.MAP_FIXED), uintptr(fd), uintptr(off))
	if errno != 0 {
		return errno
	}
	return nil
}

// onesMost is the largest region that is filled with ones when it is vacated: larger than
// all epoch words of an owner, which must not be read as 0.
const onesMost = 16 << 20

// vacate gives the memory back and keeps the addresses: a transfer that still reads there
// finds ones or zeros, and nothing else comes to lie there.
func (r *region) vacate(o *ones) error {
	n := int64(len(r.pages))
	if n == 0 {
		return nil
	}
	if n > onesMost {
		return mapOver(r.base, n, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE, -1, 0)
	}
	if err := o.grow(n); err != nil {
		return err
	}
	return mapOver(r.base, n, unix.PROT_READ, unix.MAP_SHARED, o.fd, 0)
}

// ones is memory full of ones, which all that was vacated has in common: it costs as much
// as the largest, however often an owner comes and goes. Its zero value is empty.
type ones struct {
	fd   int // when there are bytes
	size int64
}

// grow has at least n bytes be there.
func (o *ones) grow(n int64) error {
	if o.size == 0 {
		fd, err := unix.MemfdCreate("kvferry-vacated", unix.MFD_CLOEXEC)
		if err != nil {
			return err
		}
		o.fd = fd
	}
	for block := bytes.Repeat([]byte{0xff}, 64<<10); o.size < n; {
		k, err := unix.Pwrite(o.fd, block[:min(n-o.size, int64(len(block)))], o.size)
		if err != nil {
			if o.size == 0 {
				_ = unix.Close(o.fd) // is empty
			}
			return err
		}
		o.size += int64(k)
	}
	return nil
}

func (o *ones) close() {
	if o.size > 0 {
		_ = unix.Close(o.fd) // of memory; mappings keep it
		o.size = 0
	}
}

// unmap ends the region, when no transfer is left.
func (r *region) unmap() {
	if r.pages != nil {
		_ = unix.Munmap(r.pages) // was mapped by mapRegion
		r.pages = nil
	}
}
