package device

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// fastest returns the best [accumulator] of this machine, nil if it has none.
func fastest() accumulator {
	switch {
	case cpu.X86.HasAVX512F:
		return accumulateAVX512
	case cpu.X86.HasAVX2:
		return accumulateAVX2
	}
	return nil
}

// accumulateAVX512 is an [accumulator].
//
//go:noescape
func accumulateAVX512(acc *[8]uint64, data unsafe.Pointer, secret *[192]byte, blocks uintptr)

// accumulateAVX2 is an [accumulator].
//
//go:noescape
func accumulateAVX2(acc *[8]uint64, data unsafe.Pointer, secret *[192]byte, blocks uintptr)
