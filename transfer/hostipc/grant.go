package hostipc

import (
	"encoding/binary"
	"math"
	"os"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/cursor"
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
	c := &payload{cursor.New("grant", b)}
	if v := c.U16(); c.Err() == nil && v != grantVersion {
		return nil, fault.New(fault.Unsupported, "grant", "version %d, and this build knows %d", v, grantVersion).
			Hint("run the same version of kvferry on both sides")
	}
	flags := c.U16()
	if flags&^knownFlags != 0 {
		c.Fail("flags %#x are not known", flags)
	}
	g := &grant{byProcess: flags&flagByProcess != 0}
	copy(g.owner[:], c.Bytes(len(g.owner)))
	copy(g.geometry[:], c.Bytes(len(g.geometry)))
	left := maxPieces
	g.words = c.extent(&left)
	if n := g.words.bytes; c.Err() == nil && (n < 8 || n%8 != 0 || n > maxWordBytes || len(g.words.pieces) == 0) {
		c.Fail("%d bytes of epoch words, in %d pieces", n, len(g.words.pieces))
	}
	for range c.List("regions", c.U32(), kv.MaxPlanes, extentBytes) {
		x := c.extent(&left)
		if bare := len(x.pieces) == 0 && x.bytes > 0; c.Err() == nil && (g.byProcess && len(x.pieces) > 0 || !g.byProcess && bare) {
			c.Fail("region %d of %d bytes has %d pieces", len(g.regions), x.bytes, len(x.pieces))
		}
		if c.Err() != nil {
			break
		}
		g.regions = append(g.regions, x)
	}
	if err := c.End(); err != nil {
		return nil, err
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

// payload reads what is said with the descriptors.
type payload struct{ cursor.Cursor }

// size returns a number of bytes.
func (c *payload) size() int64 {
	n := c.U64()
	if n > math.MaxInt64 {
		c.Fail("%d bytes", n)
		return 0
	}
	return int64(n)
}

// extent reads one; left is how many pieces there may still be.
func (c *payload) extent(left *int) (x extent) {
	x.base, x.bytes = c.U64(), c.size()
	if x.base > math.MaxUint64-uint64(x.bytes) {
		c.Fail("%d bytes at %#x", x.bytes, x.base)
	}
	page, rest := int64(os.Getpagesize()), x.bytes
	n := c.List("pieces", c.U32(), *left, pieceBytes)
	*left -= n
	for i := range n {
		p := piece{c.size(), c.size()}
		switch {
		case c.Err() != nil:
		case p.bytes < 1 || p.bytes > rest, i < n-1 && p.bytes%page != 0, p.off%page != 0 || p.off > math.MaxInt64-p.bytes:
			c.Fail("a piece of %d bytes from %d of its file, and %d are missing", p.bytes, p.off, rest)
		case i == n-1 && p.bytes != rest:
			c.Fail("%d bytes in no piece", rest-p.bytes)
		}
		if c.Err() != nil {
			return extent{}
		}
		rest -= p.bytes
		x.pieces = append(x.pieces, p)
	}
	if c.Err() != nil {
		return extent{}
	}
	return x
}
