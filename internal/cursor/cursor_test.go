package cursor

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestCursor_ReadsInOrder(t *testing.T) {
	c := New("frame", []byte{1, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x80, 'a', 'b', 2, 9, 9})
	if a, b, x, y := c.U8(), c.U16(), c.U32(), c.U64(); a != 1 || b != 2 || x != 3 || y != 1<<63|4 {
		t.Errorf("%d, %d, %d, %#x", a, b, x, y)
	}
	if s := string(c.Bytes(2)); s != "ab" {
		t.Errorf("%q", s)
	}
	if n := c.List("nines", uint32(c.U8()), 2, 1); n != 2 || c.U8() != 9 || c.U8() != 9 {
		t.Errorf("%d nines", n)
	}
	if err := c.End(); err != nil {
		t.Error(err)
	}
}

// The first failure is the one that is told, and nothing is read behind it.
func TestCursor_LatchesItsFirstFailure(t *testing.T) {
	for name, test := range map[string]struct {
		read func(c *Cursor)
		says string
	}{
		"too short":     {func(c *Cursor) { c.U64() }, "truncated: 4 bytes where 8 are needed"},
		"bytes":         {func(c *Cursor) { c.Bytes(5) }, "truncated: 4 bytes where 5 are needed"},
		"too many":      {func(c *Cursor) { c.List("pages", 3, 2, 1) }, "3 pages are more than 2"},
		"none allowed":  {func(c *Cursor) { c.List("pages", 1, -1, 1) }, "1 pages are more than -1"},
		"no room":       {func(c *Cursor) { c.List("pages", 2, 9, 3) }, "truncated: 2 pages in 4 bytes"},
		"a giant count": {func(c *Cursor) { c.List("pages", 1<<32-1, 1<<40, 1<<20) }, "truncated: 4294967295 pages in 4 bytes"},
		"by its reader": {func(c *Cursor) { c.Fail("page %d is none", 7) }, "page 7 is none"},
		"trailing":      {func(c *Cursor) { _ = c.End() }, "4 trailing bytes"},
	} {
		c := New("frame", []byte{1, 2, 3, 4})
		test.read(&c)
		if a, b, x, y := c.U8(), c.U16(), c.U32(), c.U64(); a != 0 || b != 0 || x != 0 || y != 0 || c.Bytes(0) != nil || c.List("pages", 1, 9, 0) != 0 {
			t.Errorf("%s: something is read behind the failure", name)
		}
		c.Fail("another")
		if err := c.End(); !errors.Is(err, fault.Invalid) || !errors.Is(c.Err(), err) || !strings.Contains(err.Error(), "frame: "+test.says) {
			t.Errorf("%s: %v, want kind invalid, %q", name, err, test.says)
		}
	}
}
