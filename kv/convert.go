package kv

import (
	"encoding/binary"
	"math/bits"
)

// convertible reports whether rows of type from can be written into a cache of
// type to.
func convertible(to, from DType) bool { return to == from || (to.float() && from.float()) }

func (d DType) float() bool { return d == BF16 || d == FP16 || d == FP32 }

// convert fills dst with the elements of src. Their types are convertible, their
// numbers equal.
func convert(dst []byte, to DType, src []byte, from DType) {
	if to == from {
		copy(dst, src)
		return
	}
	d, s := int(to.Bits()/8), int(from.Bits()/8)
	for i, n := 0, len(src)/s; i < n; i++ {
		// Both 16-bit types fit FP32 exactly, so there is one rounding.
		var f uint32
		switch in := src[i*s:]; from {
		case BF16:
			f = uint32(binary.LittleEndian.Uint16(in)) << 16
		case FP16:
			f = fp16ToFP32(binary.LittleEndian.Uint16(in))
		case FP32:
			f = binary.LittleEndian.Uint32(in)
		default: // not convertible
		}
		switch out := dst[i*d:]; to {
		case BF16:
			binary.LittleEndian.PutUint16(out, fp32ToBF16(f))
		case FP16:
			binary.LittleEndian.PutUint16(out, fp32ToFP16(f))
		case FP32:
			binary.LittleEndian.PutUint32(out, f)
		default: // not convertible
		}
	}
}

const (
	fp32Inf    = 0x7F800000
	fp32Abs    = 0x7FFFFFFF
	fp16Inf    = 0x7C00
	fp16Sign   = 0x8000
	biasChange = (127 - 15) << 23 // between the exponents of FP32 and FP16, in FP32's place
)

// roundShift returns m >> n, rounded to nearest, ties to even. 1 ≤ n ≤ 31.
func roundShift(m uint32, n int) uint32 {
	return (m + 1<<(n-1) - 1 + m>>n&1) >> n
}

// The bits of a NaN's payload are kept as far as they fit. When none do, the
// quiet bit keeps it from becoming an infinity.

func fp32ToBF16(f uint32) uint16 {
	if f&fp32Abs > fp32Inf {
		h := uint16(f >> 16)
		if h&0x7F == 0 {
			h |= 0x40
		}
		return h
	}
	return uint16(roundShift(f, 16)) // a carry runs into the exponent, up to infinity
}

func fp32ToFP16(f uint32) uint16 {
	sign, abs := uint16(f>>16)&fp16Sign, f&fp32Abs
	switch {
	case abs > fp32Inf:
		h := uint16(abs>>13) & 0x3FF
		if h == 0 {
			h = 0x200
		}
		return sign | fp16Inf | h
	case abs >= biasChange+31<<23: // 2^16; what is just below rounds up to infinity by its carry
		return sign | fp16Inf
	case abs >= biasChange+1<<23: // 2^-14: normal
		return sign | uint16(roundShift(abs-biasChange, 13))
	case abs < 102<<23: // below 2^-25: nearer to 0 than to the least subnormal
		return sign
	}
	// The least subnormal is 2^-24; abs is m × 2^(exponent - 150).
	m, exponent := abs&0x7FFFFF|1<<23, int(abs>>23)
	return sign | uint16(roundShift(m, 126-exponent))
}

func fp16ToFP32(h uint16) uint32 {
	sign, abs := uint32(h&fp16Sign)<<16, uint32(h&^fp16Sign)
	switch {
	case abs >= fp16Inf:
		return sign | fp32Inf | abs<<13&0x7FFFFF
	case abs >= 1<<10:
		return sign | (abs<<13 + biasChange)
	case abs == 0:
		return sign
	}
	// Subnormal: shift its leading 1 to where FP32 implies it.
	n := bits.LeadingZeros32(abs) - 8
	return sign | (abs<<n&0x7FFFFF + uint32(126-n)<<23) // abs × 2^-24
}
