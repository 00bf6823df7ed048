package kv

import (
	"fmt"
	"strings"
)

// DType is the type of a cache's elements. The zero value is no type: legal
// only where no plane has rows of K, V or latents.
type DType uint8

// The element types. FP8 and INT8 are moved as bytes and never converted:
// which of the FP8 formats it is, and its scales, are the engine's business.
const (
	FP8 DType = iota + 1
	INT8
	BF16
	FP16
	FP32
)

var dtypeNames = []string{"none", "fp8", "int8", "bf16", "fp16", "fp32"}

// Size returns the bytes of one element, 0 for the zero value and for values
// outside the list.
func (d DType) Size() int64 {
	switch d {
	case FP8, INT8:
		return 1
	case BF16, FP16:
		return 2
	case FP32:
		return 4
	}
	return 0
}

func (d DType) String() string { return nameOf(dtypeNames, "dtype", int(d)) }

// ParseDType returns the type of that name, in any case. Kind: fault.Invalid.
func ParseDType(name string) (DType, error) {
	i, err := parseName(dtypeNames, "dtype", name)
	return DType(i), err
}

// MarshalText returns the type's name. Kind: fault.Invalid.
func (d DType) MarshalText() ([]byte, error) { return marshalName(dtypeNames, "dtype", int(d)) }

// UnmarshalText is [ParseDType].
func (d *DType) UnmarshalText(text []byte) (err error) {
	*d, err = ParseDType(string(text))
	return err
}

// Name number 0 stands for the zero value. It is printed and marshalled, so
// that an opaque geometry survives a round trip through text.

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

func marshalName(names []string, what string, i int) ([]byte, error) {
	if i >= len(names) {
		return nil, unknown(what, i, names)
	}
	return []byte(names[i]), nil
}
