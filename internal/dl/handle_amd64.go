//go:build !nogpu

package dl

// CallHandle calls f(out, h, flags), where h is a struct of 64 bytes passed by value: the
// first 8 words of b. The C ABI of amd64 puts it on the stack, and later arguments into
// the registers that follow out's.
func (f Func) CallHandle(out uintptr, b *Block, flags uintptr) uintptr {
	var h [HandleWords]uintptr
	for i := range h {
		h[i] = uintptr(b.Words[i])
	}
	return f.Call(out, flags, 0, 0, 0, 0, h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7])
}
