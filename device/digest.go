package device

import (
	"encoding/binary"
	"math/bits"
	"time"
	"unsafe"

	"github.com/zeebo/xxh3"
)

const (
	stripeBytes = 64
	blockBytes  = 16 * stripeBytes
)

// Digest is the xxh3-128 of the bytes written to it so far, as github.com/zeebo/xxh3
// has it. That package's own Hasher takes bytes that come in pieces through a buffer,
// at a third of the speed that it has for one piece; this one reads them where they
// lie. The zero value is the digest of nothing. One goroutine at a time may use it.
//
// A block of 1 KiB is worked in only when a byte behind it is known: the last one ends
// differently. Until then it waits in buf.
type Digest struct {
	accumulate accumulator // nil until the first byte, or for good with slow
	acc        [8]uint64
	blocks     uint64                         // worked in
	n          int                            // bytes that wait, 1 … blockBytes unless the digest is of nothing
	buf        [stripeBytes + blockBytes]byte // those, behind the last stripe before them
	slow       *xxh3.Hasher                   // instead, where there is no accumulator

	took time.Duration // by the stream that was given it
}

// accumulator works blocks ≥ 1 blocks of data into acc.
type accumulator func(acc *[8]uint64, data unsafe.Pointer, secret *[192]byte, blocks uintptr)

// Reset makes d the digest of nothing again.
func (d *Digest) Reset() {
	d.accumulate, d.acc, d.blocks, d.n, d.took = fastest(), start, 0, 0, 0
	switch {
	case d.accumulate != nil:
	case d.slow == nil:
		d.slow = xxh3.New()
	default:
		d.slow.Reset()
	}
}

// Write works in the bytes of b. It never fails.
func (d *Digest) Write(b []byte) (int, error) {
	if d.accumulate == nil {
		if d.slow == nil {
			d.Reset()
		}
		if d.slow != nil {
			return d.slow.Write(b)
		}
	}
	all := len(b)
	if d.n > 0 || len(b) <= blockBytes {
		taken := copy(d.buf[stripeBytes+d.n:], b)
		d.n += taken
		if b = b[taken:]; len(b) == 0 {
			return all, nil
		}
		d.accumulate(&d.acc, unsafe.Pointer(&d.buf[stripeBytes]), &secret, 1)
		copy(d.buf[:stripeBytes], d.buf[blockBytes:])
		d.blocks++
		d.n = 0
	}
	if blocks := (len(b) - 1) / blockBytes; blocks > 0 {
		d.accumulate(&d.acc, unsafe.Pointer(&b[0]), &secret, uintptr(blocks))
		b = b[blocks*blockBytes-stripeBytes:]
		b = b[copy(d.buf[:stripeBytes], b):]
		d.blocks += uint64(blocks)
	}
	d.n = copy(d.buf[stripeBytes:], b)
	return all, nil
}

// Sum128 returns the xxh3-128 of what was written. d can be written to afterwards.
func (d *Digest) Sum128() (hi, lo uint64) {
	if d.slow != nil && d.accumulate == nil {
		h := d.slow.Sum128()
		return h.Hi, h.Lo
	}
	if d.blocks == 0 {
		h := xxh3.Hash128(d.buf[stripeBytes:][:d.n])
		return h.Hi, h.Lo
	}
	acc := d.acc
	for i := range (d.n - 1) / stripeBytes {
		accumulateStripe(&acc, d.buf[stripeBytes*(i+1):], secret[8*i:])
	}
	accumulateStripe(&acc, d.buf[d.n:], secret[len(secret)-stripeBytes-7:])
	n := d.blocks*blockBytes + uint64(d.n)
	return merge(&acc, secret[len(secret)-stripeBytes-11:], ^(n * prime64_2)), merge(&acc, secret[11:], n*prime64_1)
}

// Took is how long the stream that was given d needed for it: what came on top of the
// copy. Other writes are not counted.
func (d *Digest) Took() time.Duration { return d.took }

func accumulateStripe(acc *[8]uint64, data, key []byte) {
	for i := range acc {
		word := binary.LittleEndian.Uint64(data[8*i:])
		keyed := word ^ binary.LittleEndian.Uint64(key[8*i:])
		acc[i^1] += word
		acc[i] += keyed >> 32 * (keyed & (1<<32 - 1))
	}
}

func merge(acc *[8]uint64, key []byte, sum uint64) uint64 {
	for i := 0; i < len(acc); i += 2 {
		hi, lo := bits.Mul64(acc[i]^binary.LittleEndian.Uint64(key[8*i:]), acc[i+1]^binary.LittleEndian.Uint64(key[8*i+8:]))
		sum += hi ^ lo
	}
	sum ^= sum >> 37
	sum *= 0x165667919e3779f9
	return sum ^ sum>>32
}

// The constants of xxh3.
const (
	prime32_1 = 0x9e3779b1
	prime32_2 = 0x85ebca77
	prime32_3 = 0xc2b2ae3d
	prime64_1 = 0x9e3779b185ebca87
	prime64_2 = 0xc2b2ae3d27d4eb4f
	prime64_3 = 0x165667b19e3779f9
	prime64_4 = 0x85ebca77c2b2ae63
	prime64_5 = 0x27d4eb2f165667c5
)

var start = [8]uint64{prime32_3, prime64_1, prime64_2, prime64_3, prime64_4, prime32_2, prime64_5, prime32_1}

var secret = [192]byte{
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
	0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
	0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
	0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
	0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
	0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
	0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
	0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
	0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
	0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
	0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
}
