//go:build !nogpu

package dl

// CallHandle calls f(out, h, flags), where h is a struct of 64 bytes passed by value: the
// first 8 words of b. The C ABI of arm64 passes the address of a copy that is the
// callee's to change: b may be changed.
func (f Func) CallHandle(out uintptr, b *Block, flags uintptr) uintptr {
	return f.Call(out, b.Addr, flags)
}
