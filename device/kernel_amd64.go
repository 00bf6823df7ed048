package device

import "golang.org/x/sys/cpu"

// kernels returns the kernels that this machine can run: those that store as
// usual, and those with non-temporal stores.
func kernels() (cached, streamed []*kernel) {
	if cpu.X86.HasAVX2 {
		cached = append(cached, &kernel{"avx2×4", 4, 1, copyAVX2})
		streamed = append(streamed, &kernel{"avx2-nt×8", 8, lineBytes, streamAVX2})
	}
	if cpu.X86.HasAVX512F {
		streamed = append(streamed, &kernel{"avx512-nt×8", 8, lineBytes, streamAVX512})
	}
	return cached, streamed
}

// copyAVX2 is the copy of a kernel with 4 lanes. Four rows are what the first
// cache has room for when all of them and all destinations start at the same
// place in an OS page, as rows of a power of two do.
//
//go:noescape
func copyAVX2(rows *[maxLanes]row, n uintptr)

// streamAVX2 is the copy of a kernel with 8 lanes.
//
//go:noescape
func streamAVX2(rows *[maxLanes]row, n uintptr)

// streamAVX512 is streamAVX2 with registers of a whole line.
//
//go:noescape
func streamAVX512(rows *[maxLanes]row, n uintptr)
