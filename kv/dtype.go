package kv

import (
	"fmt"
	"strings"

	"github.com/kvferry/kvferry/fault"
)

// DType is the type of a cache's elements. The zero value is no type: legal
// only where no plane has rows of K, V or latents.
type DType uint8

// The element types. FP8, INT8, INT4 and FP4 are moved as bytes and never
// converted: which of the formats of that width it is, and its scales, are the
// engine's business. INT4 and FP4 pack two elements into a byte, so that rows
// have an even number of them.
const (
	FP8 DType = iota + 1
	INT8
	BF16
	FP16
	FP32
	INT4
	FP4
)

var dtypeNames = []string{"none", "fp8", "int8", "bf16", "fp16", "fp32", "int4", "fp4"}

// Bits returns the bits of one element, 0 for the zero value and for values
// outside the list.
func (d DType) Bits() int64 {
	switch d {
	case INT4, FP4:
		return 4
	case FP8, INT8:
		return 8
	case BF16, FP16:
		return 16
	case FP32:
		return 32
	}
	return 0
}

// Bytes returns the bytes of a row of n elements; n is even where two elements
// share a byte.
func (d DType) Bytes(n int64) int64 { return n * d.Bits() / 8 }

// packs reports whether two elements share a byte.
func (d DType) packs() bool { return d == INT4 || d == FP4 }

// unit returns the bytes of the least that has an address: an element, or two.
func (d DType) unit() int64 { return max(d.Bits()/8, 1) }

// checkDim refuses rows that would end inside a byte.
func (d DType) checkDim(field string, dim int) error {
	if d.packs() && dim%2 != 0 {
		return fault.New(fault.Invalid, field, "%d is odd, and %v packs two elements into a byte", dim, d).
			Hint("use an even number, or int8 for the bytes as they are")
	}
	return nil
}

func (d DType) String() string { return nameOf(dtypeNames, "dtype", int(d)) }

// ParseDType returns the type of that name, in any case. Kind: fault.Invalid.
func ParseDType(name string) (DType, error) {
	i, err := parseName(dtypeNames, "dtype", name)
	return DType(i), err
}

// Name number 0 stands for the zero value. It is read back too, so that an opaque
// geometry survives a round trip through text.

func nameOf(names []string, what string, i int) string {
	if i >= len(names) {
		return fmt.Sprintf("%s %d", what, i)
	}
	return names[i]
}

func parseName(names []string, what, name string) (int, error) {
	for i, n := range names {
		if strings.EqualFold(n, name) {
			return i, nil
		}
	}
	return 0, unknown(what, fmt.Sprintf("%q", name), names)
}
