package cudaipc

import (
	"encoding/binary"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/cursor"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// The payload of an owner's hello, all numbers little-endian:
//
//	version u16  flags u16  owner [16]  geometry [16]  bytes of the epoch words u64
//	UUID: length u8, text   PCI address: length u8, text
//	the handle of an event [64], with flagEvent
//	allocations u32, each: by handle: 1 u8, bytes u64, handle [64]
//	                       by pieces: 2 u8, pieces u32, bytes u64 of each
//	regions u32, each: allocation u32, offset u64
//
// The descriptors with it are the file of the epoch words, and those of all pieces in
// their order. One grant has one encoding.
const (
	grantVersion = 1
	flagEvent    = 1 << 0

	byHandle = 1
	byPieces = 2

	maxWordBytes = 8 << 20 // as many as there can be publications
	maxPieces    = 1 << 14 // of all regions together: 32 GiB of the smallest
	maxIDBytes   = 64      // of a UUID, of a PCI address
	maxBytes     = 1 << 48 // of an allocation: more than a device can address
	noAllocation = 1<<32 - 1
)

// grant is what opens an owner's cache.
type grant struct {
	owner     transfer.OwnerID
	geometry  kv.Fingerprint
	wordBytes int64
	device    deviceID
	event     *handle
	allocs    []alloc
	regions   []region
}

// alloc is one allocation: what one call of the library opens.
type alloc struct {
	handle handle
	pieces []int64 // bytes of each; nil when it is opened by the handle
	bytes  int64   // of all
}

// region says where a region of the cache lies. One of no bytes lies nowhere.
type region struct {
	alloc  uint32
	offset int64
}

// deviceID is what a device is known by in all processes.
type deviceID struct{ uuid, pci string }

func idOf(a *device.Accelerator) deviceID {
	attrs := a.Attributes()
	return deviceID{attrs.UUID, attrs.PCI}
}

// check refuses a device that is another one than ours, or can't be known to be it. Kind:
// fault.Unsupported.
func (theirs deviceID) check(ours deviceID, name string) error {
	plain := func(id string) string {
		id = strings.ToLower(id)
		return strings.TrimPrefix(strings.TrimPrefix(id, "gpu-"), "mig-")
	}
	switch {
	case theirs.uuid != "" && ours.uuid != "":
		if plain(theirs.uuid) == plain(ours.uuid) {
			return nil
		}
	case theirs.pci != "" && ours.pci != "":
		if plain(theirs.pci) == plain(ours.pci) {
			return nil
		}
	default:
		return fault.New(fault.Unsupported, name, "nothing says whether it is the device with the memory: UUID %q here and %q there, PCI address %q and %q",
			ours.uuid, theirs.uuid, ours.pci, theirs.pci).Hint("use another engine, such as tcp")
	}
	return fault.New(fault.Unsupported, name, "is another device than the one with the memory: UUID %q here and %q there, PCI address %q and %q",
		ours.uuid, theirs.uuid, ours.pci, theirs.pci).Hint("read on the owner's device, or use another engine, such as hostipc or tcp")
}

// files returns how many descriptors come with g.
func (g *grant) files() int {
	n := 1
	for _, a := range g.allocs {
		n += len(a.pieces)
	}
	return n
}

// encode is the inverse of parseGrant.
func (g *grant) encode() (b []byte) {
	le := binary.LittleEndian
	var flags uint16
	if g.event != nil {
		flags |= flagEvent
	}
	b = le.AppendUint16(le.AppendUint16(b, grantVersion), flags)
	b = append(append(b, g.owner[:]...), g.geometry[:]...)
	b = le.AppendUint64(b, uint64(g.wordBytes))
	for _, id := range []string{g.device.uuid, g.device.pci} {
		b = append(append(b, byte(len(id))), id...)
	}
	if g.event != nil {
		b = append(b, g.event[:]...)
	}
	b = le.AppendUint32(b, uint32(len(g.allocs)))
	for i := range g.allocs {
		a := &g.allocs[i]
		if a.pieces == nil {
			b = le.AppendUint64(append(b, byHandle), uint64(a.bytes))
			b = append(b, a.handle[:]...)
			continue
		}
		b = le.AppendUint32(append(b, byPieces), uint32(len(a.pieces)))
		for _, n := range a.pieces {
			b = le.AppendUint64(b, uint64(n))
		}
	}
	b = le.AppendUint32(b, uint32(len(g.regions)))
	for _, r := range g.regions {
		b = le.AppendUint64(le.AppendUint32(b, r.alloc), uint64(r.offset))
	}
	return b
}

// parseGrant reads a grant, for bytes from anybody. Kinds: fault.Invalid,
// fault.Unsupported (another version).
func parseGrant(b []byte) (*grant, error) {
	c := &payload{cursor.New("grant", b)}
	if v := c.U16(); c.Err() == nil && v != grantVersion {
		return nil, fault.New(fault.Unsupported, "grant", "version %d, and this build knows %d", v, grantVersion).
			Hint("run the same version of kvferry on both sides")
	}
	flags := c.U16()
	if flags&^flagEvent != 0 {
		c.Fail("flags %#x are not known", flags)
	}
	g := &grant{}
	copy(g.owner[:], c.Bytes(len(g.owner)))
	copy(g.geometry[:], c.Bytes(len(g.geometry)))
	g.wordBytes = c.size(maxWordBytes)
	if g.wordBytes%8 != 0 {
		c.Fail("%d bytes of words of 8", g.wordBytes)
	}
	g.device.uuid, g.device.pci = c.id(), c.id()
	if flags&flagEvent != 0 {
		g.event = new(handle)
		copy(g.event[:], c.Bytes(handleBytes))
	}
	pieces := 0
	for range c.List("allocations", c.U32(), kv.MaxPlanes, 1+4+8) {
		a := alloc{}
		switch kind := c.U8(); kind {
		case byHandle:
			a.bytes = c.size(maxBytes)
			copy(a.handle[:], c.Bytes(handleBytes))
		case byPieces:
			n := c.List("pieces", c.U32(), maxPieces-pieces, 8)
			if n == 0 {
				c.Fail("an allocation of no pieces")
			}
			pieces += n
			a.pieces = make([]int64, n)
			for i := range a.pieces {
				a.pieces[i] = c.size(maxBytes)
				a.bytes += a.pieces[i] // at most maxPieces · maxBytes
			}
		default:
			c.Fail("an allocation of kind %d", kind)
		}
		if c.Err() != nil {
			break
		}
		g.allocs = append(g.allocs, a)
	}
	for range c.List("regions", c.U32(), kv.MaxPlanes, 4+8) {
		r := region{alloc: c.U32()}
		switch offset := c.U64(); {
		case r.alloc == noAllocation && offset == 0:
		case int64(r.alloc) >= int64(len(g.allocs)):
			c.Fail("a region in allocation %d of %d", r.alloc, len(g.allocs))
		case offset > uint64(g.allocs[r.alloc].bytes):
			c.Fail("a region at byte %d of %d", offset, g.allocs[r.alloc].bytes)
		default:
			r.offset = int64(offset)
		}
		g.regions = append(g.regions, r)
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
	switch {
	case g.owner != d.Owner:
		return fault.New(fault.Invalid, "offer", "is of owner %v, and not of %v", g.owner, d.Owner)
	case g.geometry != d.Geometry.Fingerprint():
		return fault.New(fault.Invalid, "descriptor", "has another geometry than its owner's cache")
	case len(g.regions) != len(sizes):
		return fault.New(fault.Invalid, "grant", "%d regions, and the geometry has %d", len(g.regions), len(sizes))
	case files != g.files():
		return fault.New(fault.Invalid, "grant", "comes with %d descriptors, and not %d", files, g.files())
	}
	for i, need := range sizes {
		if err := g.holds(i, need); err != nil {
			return err
		}
	}
	return nil
}

// holds refuses a region that is said to have less than need bytes.
func (g *grant) holds(i int, need int64) error {
	r := g.regions[i]
	if need == 0 {
		return nil
	}
	if r.alloc == noAllocation {
		return fault.New(fault.Invalid, "grant", "region %d lies nowhere, and has %d bytes", i, need)
	}
	if have := g.allocs[r.alloc].bytes - r.offset; have < need {
		return fault.New(fault.Invalid, "grant", "region %d has %d bytes, and its geometry needs %d", i, have, need)
	}
	return nil
}

// payload reads what is said with the descriptors.
type payload struct{ cursor.Cursor }

// size returns a number of bytes of 1 … most.
func (c *payload) size(most int64) int64 {
	n := c.U64()
	if c.Err() == nil && (n < 1 || n > uint64(most)) {
		c.Fail("a size of %d bytes is not in 1 … %d", n, most)
	}
	if c.Err() != nil {
		return 0
	}
	return int64(n)
}

func (c *payload) id() string {
	n := int(c.U8())
	if n > maxIDBytes {
		c.Fail("an id of %d bytes is longer than %d", n, maxIDBytes)
	}
	return string(c.Bytes(n))
}
