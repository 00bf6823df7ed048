package mooncake

import (
	"encoding/binary"
	"hash/crc32"
	"math"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// The bytes of an offer, all numbers little-endian:
//
//	"KVMO"  version u16  length of the segment's name u16  regions u32  crc u32
//	owner [16]  fingerprint of the geometry  header u64  words u64  their bytes u64
//	for each region: base u64  bytes u64
//	the name
//
// Addresses are those that the owner's worker sees, and mean nothing here: they are given
// back to it. crc is the CRC-32C of all but itself.
const (
	offerMagic   = "KVMO"
	offerVersion = 1
	offerFixed   = 16 + 16 + len(kv.Fingerprint{}) + 24
	maxRegions   = 1 << 15
)

// Stretch is memory of an owner: an address that its library knows.
type Stretch struct {
	Base  uint64
	Bytes int64
}

// Offer is what an owner's engine offers. One of another make can write it too: then it
// can be read from as if it were kvferry, and it knows from one how to read.
type Offer struct {
	Owner       transfer.OwnerID
	Fingerprint kv.Fingerprint // of the cache's geometry
	Segment     string         // by which the library finds the owner
	Header      uint64         // where HeaderBytes lie, as AppendHeader writes them
	Words       Stretch        // the epoch words, of 8 bytes each, in the order of the owner's machine
	Regions     []Stretch      // of the cache
}

// AppendBinary appends the encoding of o. Kind: fault.Invalid (the segment's name, the
// number of regions).
func (o *Offer) AppendBinary(b []byte) ([]byte, error) {
	if len(o.Segment) == 0 || len(o.Segment) > maxName || len(o.Regions) > maxRegions {
		return b, fault.New(fault.Invalid, "offer", "a name of %d bytes and %d regions: want 1 to %d, and at most %d", len(o.Segment), len(o.Regions), maxName, maxRegions)
	}
	le := binary.LittleEndian
	start := len(b)
	b = append(b, offerMagic...)
	b = le.AppendUint16(b, offerVersion)
	b = le.AppendUint16(b, uint16(len(o.Segment)))
	b = le.AppendUint32(b, uint32(len(o.Regions)))
	b = le.AppendUint32(b, 0)
	b = append(append(b, o.Owner[:]...), o.Fingerprint[:]...)
	b = le.AppendUint64(b, o.Header)
	b = le.AppendUint64(le.AppendUint64(b, o.Words.Base), uint64(o.Words.Bytes))
	for _, s := range o.Regions {
		b = le.AppendUint64(le.AppendUint64(b, s.Base), uint64(s.Bytes))
	}
	b = append(b, o.Segment...)
	le.PutUint32(b[start+12:], offerSum(b[start:]))
	return b, nil
}

func offerSum(b []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	return crc32.Update(crc32.Checksum(b[:12], table), table, b[16:])
}

// ParseOffer is the inverse of AppendBinary, for bytes from anybody. The segment's name is not
// looked at. Kinds: fault.Invalid, fault.Unsupported (another version), fault.Corrupt.
func ParseOffer(b []byte) (*Offer, error) {
	le := binary.LittleEndian
	switch {
	case len(b) < offerFixed || len(b) > transfer.MaxOfferBytes:
		return nil, fault.New(fault.Invalid, "offer", "of %d bytes", len(b))
	case string(b[:4]) != offerMagic:
		return nil, fault.New(fault.Invalid, "offer", "begins with %q, and not with %q", b[:4], offerMagic)
	case le.Uint16(b[4:]) != offerVersion:
		return nil, fault.New(fault.Unsupported, "offer", "version %d, and this build knows %d", le.Uint16(b[4:]), offerVersion).
			Hint("run the same version of kvferry on both sides")
	}
	name, regions := int(le.Uint16(b[6:])), int64(le.Uint32(b[8:]))
	if name == 0 || name > maxName || regions > maxRegions || int64(len(b)) != int64(offerFixed)+16*regions+int64(name) {
		return nil, fault.New(fault.Invalid, "offer", "%d bytes for a name of %d and %d regions", len(b), name, regions)
	}
	if want, is := le.Uint32(b[12:]), offerSum(b); want != is {
		return nil, fault.New(fault.Corrupt, "offer", "its CRC-32C is %08x, and it says %08x", is, want)
	}
	o := &Offer{}
	rest := b[16:]
	rest = rest[copy(o.Owner[:], rest):]
	rest = rest[copy(o.Fingerprint[:], rest):]
	o.Header = le.Uint64(rest)
	if o.Header > math.MaxInt64-HeaderBytes {
		return nil, fault.New(fault.Invalid, "offer", "a header at %#x", o.Header)
	}
	rest = rest[8:]
	for i := range regions + 1 {
		base, bytes := le.Uint64(rest), le.Uint64(rest[8:])
		rest = rest[16:]
		if bytes > maxRegionBytes || base > math.MaxInt64-bytes {
			return nil, fault.New(fault.Invalid, "offer", "%d bytes at %#x", bytes, base)
		}
		if i == 0 {
			o.Words = Stretch{base, int64(bytes)}
		} else {
			o.Regions = append(o.Regions, Stretch{base, int64(bytes)})
		}
	}
	o.Segment = string(rest)
	return o, nil
}

// check refuses an offer that is not what d was made with. Kind: fault.Invalid.
func (o *Offer) check(d *transfer.Descriptor) error {
	spec := d.Geometry.Spec()
	switch {
	case o.Owner != d.Owner:
		return fault.New(fault.Invalid, "offer", "is of owner %v, and not of %v", o.Owner, d.Owner)
	case o.Fingerprint != d.Geometry.Fingerprint():
		return fault.New(fault.Invalid, "descriptor", "has another geometry than its owner's cache")
	case len(o.Regions) != len(spec.RegionBytes):
		return fault.New(fault.Invalid, "offer", "%d regions, and the geometry has %d", len(o.Regions), len(spec.RegionBytes))
	}
	for i, s := range o.Regions {
		if s.Bytes < spec.RegionBytes[i] {
			return fault.New(fault.Invalid, "offer", "region %d has %d bytes, and the geometry needs %d", i, s.Bytes, spec.RegionBytes[i])
		}
	}
	return nil
}
