package kv

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
)

// format is a 16-bit type by its definition.
type format struct {
	dtype              DType
	mantissa, exponent int // bits
	toFP32             func(uint16) uint32
	fromFP32           func(uint32) uint16
}

func formats() []format {
	return []format{
		{BF16, 7, 8, func(h uint16) uint32 { return uint32(h) << 16 }, fp32ToBF16},
		{FP16, 10, 5, fp16ToFP32, fp32ToFP16},
	}
}

// value is what the bits mean: sign × 2^exponent × 1.mantissa, or 0.mantissa.
func (f format) value(h uint16) float64 {
	sign := 1.0
	if h>>15 == 1 {
		sign = -1
	}
	bias := 1<<(f.exponent-1) - 1
	e, m := int(h>>f.mantissa)&(1<<f.exponent-1), float64(int(h)&(1<<f.mantissa-1))
	one := float64(int(1) << f.mantissa)
	switch {
	case e == 1<<f.exponent-1 && m != 0:
		return math.NaN()
	case e == 1<<f.exponent-1:
		return sign * math.Inf(1)
	case e == 0:
		return sign * math.Ldexp(m/one, 1-bias)
	}
	return math.Copysign(math.Ldexp(1+m/one, e-bias), sign)
}

func TestConvert_Every16BitNumberWidensExactlyAndComesBack(t *testing.T) {
	for _, f := range formats() {
		for i := range 1 << 16 {
			h := uint16(i)
			wide := f.toFP32(h)
			got, want := float64(math.Float32frombits(wide)), f.value(h)
			if math.IsNaN(want) != math.IsNaN(got) || (!math.IsNaN(want) && math.Float64bits(got) != math.Float64bits(math.Copysign(want, got))) {
				t.Fatalf("%v %#04x is %v, want %v", f.dtype, h, got, want)
			}
			if wide>>31 != uint32(h>>15) {
				t.Fatalf("%v %#04x loses its sign", f.dtype, h)
			}
			if back := f.fromFP32(wide); back != h {
				t.Fatalf("%v %#04x comes back as %#04x", f.dtype, h, back)
			}
		}
	}
}

// nearest rounds to nearest, ties to even, by looking at all numbers of the
// format: ascending has the finite ones from 0, whose index is their bits.
func (f format) nearest(x float64, ascending []float64) uint16 {
	sign := uint16(0)
	if math.Signbit(x) {
		sign, x = 1<<15, -x
	}
	// The first number beyond the largest has even bits and stands for infinity.
	i, _ := slices.BinarySearch(ascending, x)
	switch {
	case i == len(ascending):
		return sign | uint16(len(ascending)-1)
	case i == 0 || ascending[i] == x:
		return sign | uint16(i)
	}
	below, above := x-ascending[i-1], ascending[i]-x
	if below < above || (below == above && (i-1)%2 == 0) {
		i--
	}
	return sign | uint16(i)
}

func TestConvert_RoundsToNearestEven(t *testing.T) {
	for _, f := range formats() {
		var ascending []float64
		for h := uint16(0); !math.IsInf(f.value(h), 1); h++ {
			ascending = append(ascending, f.value(h))
		}
		n := len(ascending)
		beyond := ascending[n-1] + (ascending[n-1] - ascending[n-2])
		ascending = append(ascending, beyond)
		check := func(x float32) {
			for _, x := range []float32{x, -x} {
				if got, want := f.fromFP32(math.Float32bits(x)), f.nearest(float64(x), ascending); got != want {
					t.Fatalf("%v of %v (%#08x) is %#04x, want %#04x", f.dtype, x, math.Float32bits(x), got, want)
				}
			}
		}
		for i := range n {
			tie := float32((ascending[i] + ascending[i+1]) / 2)
			for _, x := range []float32{float32(ascending[i]), tie, math.Nextafter32(tie, 0), math.Nextafter32(tie, math.MaxFloat32)} {
				check(x)
			}
		}
		check(math.MaxFloat32)
		check(math.SmallestNonzeroFloat32)
		check(float32(math.Inf(1)))
		for i := uint32(0); i < 1<<31; i += 4093 { // a prime: all mantissas, all exponents
			if i < fp32Inf {
				check(math.Float32frombits(i))
			}
		}
		for _, nan := range []uint32{0x7F800001, 0x7FC00000, 0xFF800001, 0x7FFFFFFF, 0xFFC01000} {
			if h := f.fromFP32(nan); !math.IsNaN(f.value(h)) || h>>15 != uint16(nan>>31) {
				t.Errorf("%v of NaN %#08x is %#04x", f.dtype, nan, h)
			}
		}
	}
}

func TestConvert_EveryPairOfTypes(t *testing.T) {
	values := []float32{0, 1, -2.5, 65504, 1e30, 6e-8, float32(math.Inf(-1))}
	encode := func(d DType) (out []byte) {
		for _, v := range values {
			switch bits := math.Float32bits(v); d {
			case FP32:
				out = binary.LittleEndian.AppendUint32(out, bits)
			case BF16:
				out = binary.LittleEndian.AppendUint16(out, fp32ToBF16(bits))
			case FP16:
				out = binary.LittleEndian.AppendUint16(out, fp32ToFP16(bits))
			default:
				t.Fatalf("%v is not one of the floats", d)
			}
		}
		return out
	}
	decode := func(b []byte, d DType, i int) uint32 {
		switch d {
		case BF16:
			return uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16
		case FP16:
			return fp16ToFP32(binary.LittleEndian.Uint16(b[2*i:]))
		default:
			return binary.LittleEndian.Uint32(b[4*i:])
		}
	}
	floats := []DType{BF16, FP16, FP32}
	for _, from := range floats {
		for _, to := range floats {
			src := encode(from)
			dst := make([]byte, int64(len(values))*to.Bytes(1))
			convert(dst, to, src, from)
			for i := range values {
				want := decode(src, from, i)
				switch to {
				case BF16:
					want = uint32(fp32ToBF16(want)) << 16
				case FP16:
					want = fp16ToFP32(fp32ToFP16(want))
				default: // FP32 holds all of them
				}
				if got := decode(dst, to, i); got != want {
					t.Errorf("%v to %v: %v is %#08x, want %#08x", from, to, values[i], got, want)
				}
			}
		}
	}
	for _, d := range dtypes {
		for _, e := range dtypes {
			float := func(d DType) bool { return slices.Contains(floats, d) }
			if got, want := convertible(d, e), d == e || (float(d) && float(e)); got != want {
				t.Errorf("convertible(%v, %v) is %v", d, e, got)
			}
		}
	}
}
