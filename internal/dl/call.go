//go:build !nogpu && (amd64 || arm64)

package dl

import (
	"unsafe"

	_ "github.com/ebitengine/purego" // brings the runtime's side of calls into C
)

// words is what the trampoline loads before a call. Its layout is known to the
// assembly.
type words struct {
	fn  uintptr
	arg [MaxArgs]uintptr
	ret uintptr
}

// cgocall switches to the system stack and calls fn(arg) as C. The runtime promises
// in its source that this name stays as it is, for the packages that do without cgo.
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(fn, arg unsafe.Pointer) int32

// trampoline returns the address of the C function that unpacks words.
func trampoline() unsafe.Pointer

// Call calls f with up to MaxArgs words and returns the word that it returns. What
// the words mean is between the caller and f: integers and addresses of any width up to
// 64 bits, no floats. A Func of 0 must not be called, and more words are a bug that panics.
func (f Func) Call(args ...uintptr) uintptr {
	x := words{fn: uintptr(f)}
	copy(x.arg[:len(args)], args)
	cgocall(trampoline(), unsafe.Pointer(&x))
	return x.ret
}
