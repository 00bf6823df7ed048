package hostipc

import (
	"encoding/binary"
	"math"
	"os"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// The payload of a hello, all numbers little-endian:
//
//	version u16  flags u16  owner [16]  geometry [16]  words extent  regions u32  extents
//
// An extent is base u64, bytes u64, pieces u32, and for each piece its offset in its file,
// u64, and its bytes, u64. The descriptors follow in the order of the pieces.
const (
	grantVersion = 1

	flagByProcess = 1 << 0 // regions have no pieces: they are read from the process
	knownFlags    = flagByProcess

	maxPieces    = 1 << 14
	maxWordBytes = 8 << 20 // of 1,048,576 publications
	extentBytes  = 8 + 8 + 4
	pieceBytes   = 8 + 8
)

// grant is what an owner says of its memory.
type grant struct {
	owner     transfer.OwnerID
	geometry  kv.Fingerprint
	byProcess bool
	words     extent
	regions   []extent
}

// extent is one contiguous memory of the owner's.
type extent struct {
	base   uint64 // in the owner's process
	bytes  int64
	pieces []piece
}

// piece is the part of an extent that lies in one file, behind those before it.
type piece struct{ off, bytes int64 }

// extentOf describes the first n bytes of m, and appends the descriptors of its pieces.
func extentOf(m *device.Memory, n int64, files []int) (extent, []int) {
	x := extent{base: uint64(m.Base()), bytes: n}
	for _, p := range m.Pieces() {
		if p.Off >= n {
			break
		}
		x.pieces = append(x.pieces, piece{p.FileOff, min(p.Bytes, n-p.Off)})
		files = append(files, p.FD)
	}
	return x, files
}

// form returns the encoding of g.
func (g *grant) form() (b []byte) {
	le := binary.LittleEndian
	var flags uint16
	if g.byProcess {
		flags |= flagByProcess
	}
	b = le.AppendUint16(le.AppendUint16(b, grantVersion), flags)
	b = append(append(b, g.owner[:]...), g.geometry[:]...)
	b = g.words.append(b)
	b = le.AppendUint32(b, uint32(len(g.regions)))
	for i := range g.regions {
		b = g.regions[i].append(b)
	}
	return b
}

func (x *extent) append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(le.AppendUint64(b, x.base), uint64(x.bytes))
	b = le.AppendUint32(b, uint32(len(x.pieces)))
	for _, p := range x.pieces {
		b = le.AppendUint64(le.AppendUint64(b, uint64(p.off)), uint64(p.bytes))
	}
	return b
}

// parseGrant is the inverse of form, for bytes from anybody. Extents that it returns
// have addresses that exist, and no pieces or those that they are made of. Kinds:
// fault.Invalid, fault.Unsupported (another version).
func parseGrant(b []byte) (*grant, error) {
	c := &cursor{rest: b}
	if v := c.u16(); c.err == nil && v != grantVersion {
		return nil, fault.New(fault.Unsupported, "grant", "version %d, and this build knows %d", v, grantVersion).
			Hint("run the same version of kvferry on both sides")
	}
	flags := c.u16()
	if flags&^knownFlags != 0 {
		c.fail("flags %#x are not known", flags)
	}
	g := &grant{byProcess: flags&flagByProcess != 0}
	copy(g.owner[:], c.bytes(len(g.owner)))
	copy(g.geometry[:], c.bytes(len(g.geometry)))
	left := maxPieces
	g.words = c.extent(&left)
	if n := g.words.bytes; c.err == nil && (n < 8 || n%8 != 0 || n > maxWordBytes || len(g.words.pieces) == 0) {
		c.fail("%d bytes of epoch words, in %d pieces", n, len(g.words.pieces))
	}
	for range c.count("regions", kv.MaxPlanes, extentBytes) {
		x := c.extent(&left)
		if bare := len(x.pieces) == 0 && x.bytes > 0; c.err == nil && (g.byProcess && len(x.pieces) > 0 || !g.byProcess && bare) {
			c.fail("region %d of %d bytes has %d pieces", len(g.regions), x.bytes, len(x.pieces))
		}
		if c.err != nil {
			break
		}
		g.regions = append(g.regions, x)
	}
	if c.err == nil && len(c.rest) > 0 {
		c.fail("%d trailing bytes", len(c.rest))
	}
	if c.err != nil {
		return nil, c.err
	}
	return g, nil
}

// check refuses a grant of another owner or cache than d says, and one that has less
// memory than the geometry needs. Kind: fault.Invalid.
func (g *grant) check(d *transfer.Descriptor, files int) error {
	sizes := d.Geometry.Spec().RegionBytes
	pieces := len(g.words.pieces)
	for i := range g.regions {
		pieces += len(g.regions[i].pieces)
	}
	switch {
	case g.owner != d.Owner:
		return fault.New(fault.Invalid, "offer", "is of owner %v, and not of %v", g.owner, d.Owner)
	case g.geometry != d.Geometry.Fingerprint():
		return fault.New(fault.Invalid, "descriptor", "has another geometry than its owner's cache")
	case len(g.regions) != len(sizes):
		return fault.New(fault.Invalid, "grant", "%d regions, and the geometry has %d", len(g.regions), len(sizes))
	case files != pieces:
		return fault.New(fault.Invalid, "grant", "comes with %d descriptors, and not %d", files, pieces)
	}
	for i, need := range sizes {
		if have := g.regions[i].bytes; have < need {
			return fault.New(fault.Invalid, "grant", "region %d has %d bytes, and its geometry needs %d", i, have, need)
		}
	}
	return nil
}

// cursor reads a payload. After the first failure all it returns is zero, and nothing is
// allocated.
type cursor struct {
	rest []byte
	err  error
}

func (c *cursor) fail(format string, args ...any) {
	if c.err == nil {
		c.err, c.rest = fault.New(fault.Invalid, "grant", format, args...), nil
	}
}

func (c *cursor) bytes(n int) []byte {
	if n > len(c.rest) {
		c.fail("truncated: %d bytes where %d are needed", len(c.rest), n)
	}
	if c.err != nil {
		return nil
	}
	b := c.rest[:n]
	c.rest = c.rest[n:]
	return b
}

func (c *cursor) u16() uint16 {
	if b := c.bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) u64() uint64 {
	if b := c.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// size returns a number of bytes.
func (c *cursor) size() int64 {
	n := c.u64()
	if n > math.MaxInt64 {
		c.fail("%d bytes", n)
		return 0
	}
	return int64(n)
}

// count returns the length of a list, given its limit and the least bytes of an entry.
func (c *cursor) count(what string, most, each int) int {
	var n uint32
	if b := c.bytes(4); b != nil {
		n = binary.LittleEndian.Uint32(b)
	}
	switch {
	case uint64(n) > uint64(max(most, 0)):
		c.fail("%d %s are more than %d", n, what, most)
	case uint64(n)*uint64(each) > uint64(len(c.rest)):
		c.fail("truncated: %d %s in %d bytes", n, what, len(c.rest))
	}
	if c.err != nil {
		return 0
	}
	return int(n)
}

// extent reads one; left is how many pieces there may still be.
func (c *cursor) extent(left *int) (x extent) {
	x.base, x.bytes = c.u64(), c.size()
	if x.base > math.MaxUint64-uint64(x.bytes) {
		c.fail("%d bytes at %#x", x.bytes, x.base)
	}
	page, rest := int64(os.Getpagesize()), x.bytes
	n := c.count("pieces", *left, pieceBytes)
	*left -= n
	for i := range n {
		p := piece{c.size(), c.size()}
		switch {
		case c.err != nil:
		case p.bytes < 1 || p.bytes > rest, i < n-1 && p.bytes%page != 0, p.off%page != 0 || p.off > math.MaxInt64-p.bytes:
			c.fail("a piece of %d bytes from %d of its file, and %d are missing", p.bytes, p.off, rest)
		case i == n-1 && p.bytes != rest:
			c.fail("%d bytes in no piece", rest-p.bytes)
		}
		if c.err != nil {
			return extent{}
		}
		rest -= p.bytes
		x.pieces = append(x.pieces, p)
	}
	if c.err != nil {
		return extent{}
	}
	return x
}
