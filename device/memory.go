package device

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// hugeBytes is the size of the huge pages that shared memory can have on a
// machine whose OS page is 4 KiB. Other machines go without.
const hugeBytes = 2 << 20

// Memory is a contiguous range of a device's memory. A Memory must not be
// copied. All methods may be called from any goroutine; the bytes themselves
// are guarded by nothing but the order of streams.
type Memory struct {
	device string
	base   uintptr
	size   int64
	bytes  []byte       // nil when the host cannot address the memory
	pieces []Piece      // in order of Off, without gaps; nil when not made of memfds
	free   func() error // nil when the bytes belong to somebody else
	on     *Accelerator // whose own memory it is; nil for other devices

	// What accelerators can reach of host memory; replaced under pinning. See pin.go.
	pinning sync.Mutex
	pins    atomic.Pointer[pins]

	// uses counts the enqueued calls and running methods that need the bytes;
	// −1 once the memory is freed. One word, so that neither can slip past the
	// other.
	uses atomic.Int64
	kept atomic.Bool // some of them are for good: see Free
}

// Piece is the part of a memory that lies in one memfd: Bytes bytes from FileOff
// in the file FD are those from Off in the memory. Its file is sealed against
// resizing (SHRINK, GROW, SEAL). FD belongs to the memory, which closes it when
// it is freed.
type Piece struct {
	FD           int
	Off, FileOff int64
	Bytes        int64
}

// WrapHost returns a memory over b, which belongs to somebody else: freeing the
// memory ends its use here and leaves the bytes alone. b must stay mapped until
// then.
func WrapHost(b []byte) *Memory {
	if b == nil {
		b = []byte{}
	}
	return &Memory{device: "host", base: uintptr(unsafe.Pointer(unsafe.SliceData(b))), size: int64(len(b)), bytes: b}
}

// Bytes returns the memory as the host sees it, or nil when the host cannot
// address it or it was freed. It is not nil for a memory of 0 bytes.
func (m *Memory) Bytes() []byte {
	if m.uses.Load() < 0 {
		return nil
	}
	return m.bytes
}

// Base returns the address of the first byte, in the device's own address
// space. It means nothing for a memory of 0 bytes.
func (m *Memory) Base() uintptr { return m.base }

// Size returns the number of bytes.
func (m *Memory) Size() int64 { return m.size }

// Device returns the name of the device that the memory belongs to.
func (m *Memory) Device() string { return m.device }

// Pieces returns the memfds behind the memory, by ascending offset and without
// gaps; nil when there are none (wrapped memory, 0 bytes). The slice must not be
// changed.
func (m *Memory) Pieces() []Piece { return m.pieces }

// Populate has the OS find memory for bytes [off, off+n) now, so that their
// first use does not stop for it. The bytes do not change, and others may use
// them meanwhile. Wrapped memory is its owner's to populate: nothing happens.
// Kinds: fault.Invalid (range), fault.Closed (freed), fault.Memory.
func (m *Memory) Populate(off, n int64) error {
	if off < 0 || n < 0 || off > m.size-n {
		return fault.New(fault.Invalid, "populate", "bytes [%d, %d+%d) of a memory of %d", off, off, n, m.size)
	}
	if !m.use() {
		return fault.New(fault.Closed, "populate", "the memory was freed")
	}
	defer m.unuse()
	if n == 0 || m.pieces == nil {
		return nil
	}
	page := int64(os.Getpagesize())
	b := m.bytes[off/page*page : off+n]
	for {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); err {
		case nil:
			return nil
		case unix.EINTR, unix.EAGAIN:
		case unix.EINVAL: // before Linux 5.14
			touch(b)
			return nil
		default:
			return fault.Wrap(fault.Memory, "populate "+size(n), err).
				Hint("ask for less memory, or raise the memory limit of this process")
		}
	}
}

// touch makes the OS back b, which starts on an OS page, by a write to each page
// that changes nothing, not even what another thread writes meanwhile.
func touch(b []byte) {
	for off := 0; off < len(b); off += os.Getpagesize() {
		atomic.OrUint32((*uint32)(unsafe.Pointer(&b[off])), 0)
	}
}

// LoadUint64 reads the 8 bytes at off, a multiple of 8, as one number in the order of
// this machine: whole, whoever adds to it meanwhile. What a goroutine does afterwards
// comes after the reading. Kinds: fault.Invalid (off), fault.Unsupported (memory that
// the host can't address), fault.Closed (freed).
func (m *Memory) LoadUint64(off int64) (n uint64, err error) {
	err = m.word(off, func(p *uint64) { n = atomic.LoadUint64(p) })
	return n, err
}

// AddUint64 adds n to the number that LoadUint64 reads, and returns the sum. Kinds:
// those of LoadUint64.
func (m *Memory) AddUint64(off int64, n uint64) (sum uint64, err error) {
	err = m.word(off, func(p *uint64) { sum = atomic.AddUint64(p, n) })
	return sum, err
}

// word calls f with the address of the 8 bytes at off, which stay where they are
// meanwhile.
func (m *Memory) word(off int64, f func(*uint64)) error {
	if off < 0 || off > m.size-8 || off%8 != 0 || m.base%8 != 0 {
		return fault.New(fault.Invalid, "word", "at byte %d of a memory of %d: it is 8 bytes, at a multiple of 8", off, m.size)
	}
	if !m.use() {
		return fault.New(fault.Closed, "word", "the memory was freed")
	}
	defer m.unuse()
	if m.bytes == nil {
		return fault.New(fault.Unsupported, "word", "the host cannot address memory of %s", m.device)
	}
	f((*uint64)(unsafe.Pointer(&m.bytes[off])))
	return nil
}

// OSPageBytes returns the size of the OS pages that back the memory: 2 MiB when
// at least nine tenths of what is in memory now is mapped by huge pages, else
// the OS's usual page. Memory that was never populated or used has the usual
// page. It reads /proc: keep the answer.
func (m *Memory) OSPageBytes() int {
	if m.pieces == nil {
		return os.Getpagesize()
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return os.Getpagesize()
	}
	defer func() { _ = f.Close() }() // was only read
	rss, huge := mapped(f, uint64(m.base), uint64(m.base)+uint64(m.size))
	if huge == 0 || huge < rss-rss/10 {
		return os.Getpagesize()
	}
	return hugeBytes
}

// mapped sums, over the mappings that smaps lists with a start in [lo, hi), the
// KiB that are in memory and those mapped by huge pages.
func mapped(smaps io.Reader, lo, hi uint64) (rss, huge int64) {
	inside := false
	for in := bufio.NewScanner(smaps); in.Scan(); {
		name, rest, _ := strings.Cut(in.Text(), " ")
		if !strings.HasSuffix(name, ":") {
			start, _, _ := strings.Cut(name, "-")
			at, err := strconv.ParseUint(start, 16, 64)
			inside = err == nil && lo <= at && at < hi
			continue
		}
		if !inside || name != "Rss:" && name != "ShmemPmdMapped:" {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch {
		case err != nil:
		case name == "Rss:":
			rss += kib
		default:
			huge += kib
		}
	}
	return rss, huge
}

// Free gives the memory back; of wrapped memory, only the right to use it. Kinds:
// fault.Busy while enqueued work uses it, fault.Closed the second time, fault.Device
// when a driver can't unpin it: then nothing is given back, and it can be tried again.
// Work of a device that was given up (see [Accelerator]) uses it until the process ends,
// which is fault.Device as well.
func (m *Memory) Free() error {
	if !m.uses.CompareAndSwap(0, -1) {
		if m.kept.Load() {
			return fault.New(fault.Device, "free "+size(m.size), "a device that was given up may still copy to or from it").
				Hint("restart this process: nothing else ends that copy")
		}
		if n := m.uses.Load(); n > 0 {
			return fault.New(fault.Busy, "free "+size(m.size), "used by %d calls still in flight", n).
				Hint("wait for their tickets first")
		}
		return fault.New(fault.Closed, "free "+size(m.size), "freed before")
	}
	if err := m.unpin(); err != nil {
		// A driver would take whatever came to lie at these addresses for what it has
		// pinned, and copy other bytes.
		m.uses.Store(0)
		return err
	}
	if m.free == nil {
		return nil
	}
	return m.free()
}

// use keeps the memory from being freed until unuse. It reports false when the
// memory was freed.
func (m *Memory) use() bool {
	for {
		n := m.uses.Load()
		if n < 0 {
			return false
		}
		if m.uses.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (m *Memory) unuse() { m.uses.Add(-1) }

// size writes a number of bytes for people.
func size(n int64) string {
	switch {
	case n >= 1<<30:
		return strconv.FormatFloat(float64(n)/(1<<30), 'f', 1, 64) + " GiB"
	case n >= 1<<20:
		return strconv.FormatFloat(float64(n)/(1<<20), 'f', 1, 64) + " MiB"
	default:
		return strconv.FormatInt(n, 10) + " B"
	}
}

// MemoryOptions describe the memory of a device that is implemented elsewhere.
type MemoryOptions struct {
	Device string // the device's name
	Base   uintptr
	Size   int64
	Bytes  []byte       // when the host can address it
	Free   func() error // called once, when nothing uses the memory any more; nil: it is somebody else's
}

// NewMemory returns a memory for a device that is implemented elsewhere.
func NewMemory(o MemoryOptions) *Memory {
	return &Memory{device: o.Device, base: o.Base, size: o.Size, bytes: o.Bytes, free: o.Free}
}
