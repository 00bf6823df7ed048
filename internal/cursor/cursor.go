// Package cursor reads numbers and lists out of bytes that come from anybody.
//
// A [Cursor] latches its first failure: from then on it returns zeros, so that a decoder
// asks once, at its end, whether all went well. It believes a count only as far as there
// are bytes for that many entries, so what a decoder allocates is bounded by what it was
// given. Numbers are little-endian.
package cursor

import (
	"encoding/binary"

	"github.com/kvferry/kvferry/fault"
)

// Cursor is a place in some bytes. It allocates nothing but its error, and belongs to one
// goroutine.
type Cursor struct {
	object string
	rest   []byte
	err    error
}

// New returns a cursor at the beginning of b. object names b in errors.
func New(object string, b []byte) Cursor { return Cursor{object: object, rest: b} }

// Fail notes that the bytes are none that can be decoded (kind fault.Invalid), unless
// something was noted before.
func (c *Cursor) Fail(format string, args ...any) {
	if c.err == nil {
		c.err, c.rest = fault.New(fault.Invalid, c.object, format, args...), nil
	}
}

// Err returns the first failure so far.
func (c *Cursor) Err() error { return c.err }

// End returns the first failure; bytes that are left are one.
func (c *Cursor) End() error {
	if len(c.rest) > 0 {
		c.Fail("%d trailing bytes", len(c.rest))
	}
	return c.err
}

// Bytes returns the next n bytes, which are not copied; nil when they are not there.
func (c *Cursor) Bytes(n int) []byte {
	if n > len(c.rest) {
		c.Fail("truncated: %d bytes where %d are needed", len(c.rest), n)
	}
	if c.err != nil {
		return nil
	}
	b := c.rest[:n:n]
	c.rest = c.rest[n:]
	return b
}

// U8 returns the next byte.
func (c *Cursor) U8() uint8 {
	if b := c.Bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// U16 returns the next 2 bytes as a number.
func (c *Cursor) U16() uint16 {
	if b := c.Bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// U32 returns the next 4 bytes as a number.
func (c *Cursor) U32() uint32 {
	if b := c.Bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// U64 returns the next 8 bytes as a number.
func (c *Cursor) U64() uint64 {
	if b := c.Bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// List returns n, the length of a list that comes next, if it is at most most and there
// are bytes for so many entries of at least each bytes; else 0.
func (c *Cursor) List(what string, n uint32, most, each int) int {
	switch {
	case int64(n) > int64(most):
		c.Fail("%d %s are more than %d", n, what, most)
	case uint64(n)*uint64(each) > uint64(len(c.rest)):
		c.Fail("truncated: %d %s in %d bytes", n, what, len(c.rest))
	}
	if c.err != nil {
		return 0
	}
	return int(n)
}
