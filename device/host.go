package device

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// maxPieceBytes is the largest piece of host memory.
const maxPieceBytes = 64 << 30

// HostOptions are the choices of a host device. The zero value is a good one.
type HostOptions struct {
	// PieceBytes is the most that one memfd holds: at least one OS page, at most
	// and by default 64 GiB.
	PieceBytes int64

	// Workers is how many goroutines share a Copy of 4 MiB or more: 1 to 64, by
	// default 2, or 1 where GOMAXPROCS is 1. A second worker gains as much as
	// memory has bandwidth left, and nothing where no processor is idle.
	Workers int

	tune *tune // by tests
}

// tune replaces what a host device measures and looks up about copies.
type tune struct {
	limits  limits
	choices choices
}

// maxWorkers is the most workers that share a Copy.
const maxWorkers = 64

// Host is the host as a device: memory in memfds, and streams that are served by
// a goroutine each, with helpers for large copies. Copies can read and write
// wrapped memory as well.
type Host struct {
	pieceBytes int64
	page       int64 // bytes of an OS page
	huge       bool  // shared memory can have huge pages
	workers    int   // that share a large copy
	limits     limits
	kernels    func() (choices, Kernels) // measures at the first call

	mu       sync.Mutex
	closed   bool                 // guarded by mu
	memories map[*Memory]struct{} // guarded by mu; allocated and not yet freed
	streams  int                  // guarded by mu; open
}

var _ Device = (*Host)(nil)

// OpenHost returns a host device. Kind: fault.Invalid.
func OpenHost(o HostOptions) (*Host, error) {
	page := int64(os.Getpagesize())
	switch {
	case o.PieceBytes == 0:
		o.PieceBytes = maxPieceBytes
	case o.PieceBytes < page || o.PieceBytes > maxPieceBytes:
		return nil, fault.New(fault.Invalid, "host device", "pieces of %d bytes: want %d to %d, or 0 for the most",
			o.PieceBytes, page, int64(maxPieceBytes))
	}
	switch {
	case o.Workers == 0:
		o.Workers = min(2, runtime.GOMAXPROCS(0))
	case o.Workers < 1 || o.Workers > maxWorkers:
		return nil, fault.New(fault.Invalid, "host device", "%d workers: want 1 to %d, or 0 for the default", o.Workers, maxWorkers)
	}
	t := tune{limits: defaultLimits(lastLevelCache(os.DirFS("/")))}
	kernels := func() (choices, Kernels) { return calibrate(&t.limits) }
	if o.tune != nil {
		t = *o.tune
		kernels = func() (choices, Kernels) { return t.choices, Kernels{} }
	}
	return &Host{
		pieceBytes: o.PieceBytes,
		page:       page,
		huge:       page == 4096 && shmemHuge(os.DirFS("/")),
		workers:    o.Workers,
		limits:     t.limits,
		kernels:    sync.OnceValues(kernels),
		memories:   map[*Memory]struct{}{},
	}, nil
}

// shmemHuge reports whether the kernel may give huge pages to memfds that ask.
func shmemHuge(root fs.FS) bool {
	text, err := fs.ReadFile(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled")
	if err != nil {
		return false
	}
	_, chosen, _ := strings.Cut(string(text), "[")
	chosen, _, ok := strings.Cut(chosen, "]")
	return ok && chosen != "never" && chosen != "deny"
}

// Name returns "host".
func (h *Host) Name() string { return "host" }

// Alloc returns bytes of zeroed memory: one range of addresses, over pieces that
// end where it suits the OS. The OS finds the memory at first use, or when it is
// asked to by Memory.Populate. Kinds: fault.Invalid, fault.Memory (more than
// there is: nothing was mapped), fault.Closed.
func (h *Host) Alloc(bytes int64) (*Memory, error) { return h.AllocPieces(bytes, 1) }

// AllocPieces is Alloc with pieces that end on multiples of cut bytes from the
// start of the memory, so that none of the cut-sized pages that fill the memory
// lies in two pieces. It gives way where it must: when no such piece is both a
// whole number of OS pages and at most HostOptions.PieceBytes long. Kinds: as
// Alloc.
func (h *Host) AllocPieces(bytes, cut int64) (*Memory, error) {
	if bytes < 0 || cut < 1 {
		return nil, fault.New(fault.Invalid, "host memory", "%d bytes in pieces cut at %d: want at least 0 and 1", bytes, cut)
	}
	// Under the lock all the way: nobody else may be promised the same bytes.
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fault.New(fault.Closed, "host device", "closed before")
	}
	if err := h.checkRoom(bytes); err != nil {
		return nil, err
	}
	m := &Memory{device: h.Name(), size: bytes, bytes: []byte{}}
	unmap := func() error { return nil }
	if bytes > 0 {
		var err error
		if unmap, err = h.mapPieces(m, cutPieces(bytes, cut, h.pieceBytes, h.units())); err != nil {
			return nil, err
		}
	}
	m.free = func() error {
		h.mu.Lock()
		delete(h.memories, m)
		h.mu.Unlock()
		return unmap()
	}
	h.memories[m] = struct{}{}
	return m, nil
}

// checkRoom refuses bytes that are not there. Memory that was allocated but not
// yet used is spoken for, although the kernel still counts it as available.
func (h *Host) checkRoom(bytes int64) error {
	available, err := AvailableMemory()
	if err != nil {
		return err
	}
	promised := h.promised()
	if left := max(0, available-promised); bytes > left {
		return fault.New(fault.Memory, "host memory", "%s asked for, %s left (%d and %d bytes; %d more are allocated and not yet used)",
			size(bytes), size(left), bytes, left, promised).
			Hint("ask for at most %d bytes, free memory, or raise the memory limit of this process", left)
	}
	return nil
}

// promised returns how many allocated bytes the OS has still to find memory for.
// The caller holds mu.
func (h *Host) promised() int64 {
	var n int64
	for m := range h.memories {
		n += m.size - m.resident()
	}
	return n
}

// resident returns how many bytes of the pieces the OS has found memory for, at
// most the memory's size.
func (m *Memory) resident() int64 {
	var n int64
	for _, p := range m.pieces {
		var st unix.Stat_t
		if err := unix.Fstat(p.FD, &st); err == nil {
			n += min(p.Bytes, st.Blocks*512)
		}
	}
	return n
}

// units returns the sizes that pieces should be multiples of, best first.
func (h *Host) units() []int64 {
	if h.huge {
		return []int64{hugeBytes, h.page}
	}
	return []int64{h.page}
}

// cutPieces divides bytes, which are more than 0, into pieces of at most limit
// bytes. All but the last are equally long: a multiple of cut and of the first
// of units if there is such a length, else of cut and a later unit, else of a
// unit alone. limit is at least the last unit.
func cutPieces(bytes, cut, limit int64, units []int64) []Piece {
	step := int64(0)
	for _, c := range []int64{cut, 1} {
		for _, unit := range units {
			if step == 0 {
				step = commonMultiple(c, unit, limit)
			}
		}
	}
	length := limit / step * step
	pieces := make([]Piece, 0, (bytes-1)/length+1)
	for off := int64(0); off < bytes; off += length {
		pieces = append(pieces, Piece{FD: -1, Off: off, Bytes: min(length, bytes-off)})
	}
	return pieces
}

// commonMultiple returns the least common multiple of a and b, or 0 when it is
// more than limit.
func commonMultiple(a, b, limit int64) int64 {
	gcd, r := a, b
	for r != 0 {
		gcd, r = r, gcd%r
	}
	if a/gcd > limit/b {
		return 0
	}
	return a / gcd * b
}

// mapPieces makes a memfd for each piece and maps them side by side, as the
// bytes of m. It returns what undoes that; on an error it has undone it.
func (h *Host) mapPieces(m *Memory, pieces []Piece) (unmap func() error, err error) {
	align := h.units()[0]
	length := (m.size + h.page - 1) / h.page * h.page
	reserved := uintptr(length + align) // room to start on a multiple of align

	// First the addresses: what is mapped over them later cannot hit anything.
	start, err := unix.MmapPtr(-1, 0, nil, reserved, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fault.Wrap(fault.Memory, "address space for "+size(m.size), err).Hint("raise ulimit -v")
	}
	unmap = func() error {
		err := unix.MunmapPtr(start, reserved)
		for _, p := range pieces {
			if p.FD >= 0 {
				_ = unix.Close(p.FD)
			}
		}
		if err != nil {
			return fault.Wrap(fault.Memory, "unmap "+size(m.size), err)
		}
		return nil
	}
	skip := -uintptr(start) & uintptr(align-1)
	base := unsafe.Add(start, skip)
	for i := range pieces {
		if err := h.mapPiece(&pieces[i], base, fmt.Sprintf("kvferry-%s-%d", h.Name(), i)); err != nil {
			_ = unmap()
			return nil, err
		}
	}
	m.base, m.bytes, m.pieces = uintptr(base), unsafe.Slice((*byte)(base), m.size), pieces
	// Advice, which a kernel is free to refuse: huge pages, and no pages of
	// users' prompts in core dumps.
	if h.huge {
		_ = unix.Madvise(m.bytes, unix.MADV_HUGEPAGE)
	}
	_ = unix.Madvise(m.bytes, unix.MADV_DONTDUMP)
	return unmap, nil
}

// mapPiece makes the memfd of p and maps it at its place in the range from base.
func (h *Host) mapPiece(p *Piece, base unsafe.Pointer, name string) error {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return fault.Wrap(fault.Memory, name, err).Hint("raise ulimit -n, or use fewer and larger pieces")
	}
	p.FD = fd
	length := (p.Bytes + h.page - 1) / h.page * h.page
	if err := unix.Ftruncate(fd, length); err != nil {
		return fault.Wrap(fault.Memory, name+": "+size(length), err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fault.Wrap(fault.Memory, name+": seals", err)
	}
	if _, err := unix.MmapPtr(fd, p.FileOff, unsafe.Add(base, p.Off), uintptr(length),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return fault.Wrap(fault.Memory, name+": map "+size(length), err).Hint("raise the sysctl vm.max_map_count")
	}
	return nil
}

// NewStream returns an idle stream. Close stops its goroutines. Kind:
// fault.Closed.
func (h *Host) NewStream(name string) (Stream, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fault.New(fault.Closed, "host device", "closed before")
	}
	h.streams++
	return newHostStream(h, name), nil
}

// NewEvent returns an event that was never recorded. Kind: fault.Closed.
func (h *Host) NewEvent() (Event, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fault.New(fault.Closed, "host device", "closed before")
	}
	return &hostEvent{}, nil
}

// Close releases the device. Kind: fault.Busy, while any memory or stream of it
// is open; nothing has changed then. Closing it again does nothing.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.memories) > 0 || h.streams > 0 {
		var bytes int64
		for m := range h.memories {
			bytes += m.size
		}
		return fault.New(fault.Busy, "host device", "%d memories (%s) and %d streams are open", len(h.memories), size(bytes), h.streams).
			Hint("free the memories and close the streams first")
	}
	h.closed = true
	return nil
}

// Hold is for tests: it holds s, a stream of a host device, back. Nothing more
// runs on s until release is called; when Hold returns, what was running has
// finished. With invariants on, the copy at the head of the queue already has
// its destinations poisoned. A stream may be held more than once. Closing a held
// stream, or waiting for its work, waits for release.
func (h *Host) Hold(s Stream) (release func()) { return s.(*hostStream).hold() } //nolint:errcheck // a test gives its own stream

// Copied says how many bytes s, a stream of a host device, has copied, and how
// long it was busy copying them, without the digests. What waits in the queue is not counted yet.
func (h *Host) Copied(s Stream) (bytes int64, busy time.Duration) {
	hs := s.(*hostStream) //nolint:errcheck // as documented: only streams of a host device
	return hs.copied.Load(), time.Duration(hs.busy.Load())
}

// Kernels says how this device copies large jobs. The kernels are measured at
// the first large copy or call, whichever is sooner, which takes up to 20 ms.
func (h *Host) Kernels() Kernels {
	_, k := h.kernels()
	return k
}

// Fail is for tests: the first copy enqueued on s, a stream of a host device,
// from now on fails with err when its turn comes.
func (h *Host) Fail(s Stream, err error) { s.(*hostStream).fail(err) } //nolint:errcheck // a test gives its own stream
