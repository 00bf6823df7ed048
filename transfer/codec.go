package transfer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/cursor"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// The bytes of a descriptor, all numbers little-endian:
//
//	"KVFD"  version u16  flags u16  body u32  crc u32 | body
//
// body counts the bytes behind the header; crc is the CRC-32C of the first 12 bytes and
// the body. The body has the fields in the order in which AppendBinary writes them. One
// descriptor has one encoding: what decodes encodes to the same bytes.
const (
	codecMagic   = "KVFD"
	codecVersion = 1
	headerBytes  = 16

	flagLeases = 1 << 0
	flagSums   = 1 << 1
	flagSink   = 1 << 2
	flagExpiry = 1 << 3
	knownFlags = flagLeases | flagSums | flagSink | flagExpiry

	planeBytes = 1 + 4 + 6*8 // least bytes of an entry of each list: a count is believed
	layerBytes = 5 * 4       // only as far as there are bytes for it
	offerBytes = 1 + 4
	sumBytes   = 16
)

// AppendBinary appends the encoding of d. Kind: fault.Invalid (d is out of its limits).
func (d *Descriptor) AppendBinary(b []byte) ([]byte, error) {
	if err := d.check(); err != nil {
		return b, err
	}
	start := len(b)
	s, le := d.Geometry.Spec(), binary.LittleEndian
	var flags uint16
	for _, f := range []struct {
		bit uint16
		set bool
	}{{flagLeases, d.Leases}, {flagSums, len(d.Sums) > 0}, {flagSink, s.Sink}, {flagExpiry, !d.Expires.IsZero()}} {
		if f.set {
			flags |= f.bit
		}
	}
	b = append(b, codecMagic...)
	b = le.AppendUint16(b, codecVersion)
	b = le.AppendUint16(b, flags)
	b = append(b, make([]byte, 8)...) // body and crc

	b = append(b, d.Owner[:]...)
	b = le.AppendUint32(b, d.Epoch.Word)
	b = le.AppendUint64(b, d.Epoch.Count)
	if flags&flagExpiry != 0 {
		b = le.AppendUint64(b, uint64(d.Expires.UnixNano()))
	}
	b = append(append(b, byte(len(d.Entity))), d.Entity...)
	b = append(append(b, byte(len(d.Session))), d.Session...)
	print := d.Geometry.Fingerprint()
	b = append(b, print[:]...)
	b = appendSpec(b, &s)
	b = append(b, byte(len(d.Offers)))
	for _, o := range d.Offers {
		b = append(append(b, byte(len(o.Engine))), o.Engine...)
		b = append(le.AppendUint32(b, uint32(len(o.Data))), o.Data...)
	}
	b = le.AppendUint32(b, uint32(len(d.Pages)))
	for _, id := range d.Pages {
		b = le.AppendUint32(b, uint32(id))
	}
	for _, sum := range d.Sums {
		b = le.AppendUint64(le.AppendUint64(b, sum.Hi), sum.Lo)
	}

	if n := len(b) - start; n > MaxDescriptorBytes {
		return b[:start], fault.New(fault.Invalid, "descriptor", "%d bytes are more than %d", n, MaxDescriptorBytes)
	}
	whole := b[start:]
	le.PutUint32(whole[8:], uint32(len(whole)-headerBytes))
	le.PutUint32(whole[12:], checksum(whole))
	return b, nil
}

func appendSpec(b []byte, s *kv.Spec) []byte {
	le := binary.LittleEndian
	b = append(b, byte(s.Layout), byte(s.DType))
	b = le.AppendUint32(b, uint32(s.Pages))
	b = le.AppendUint32(b, uint32(s.PageSize))
	b = le.AppendUint32(b, uint32(len(s.RegionBytes)))
	for _, n := range s.RegionBytes {
		b = le.AppendUint64(b, uint64(n))
	}
	b = le.AppendUint32(b, uint32(len(s.Layers)))
	for _, l := range s.Layers {
		for _, n := range [...]int{l.ID, l.FirstHead, l.Heads, l.Dim, len(l.Planes)} {
			b = le.AppendUint32(b, uint32(n))
		}
		for _, p := range l.Planes {
			b = le.AppendUint32(append(b, byte(p.Kind)), uint32(p.Region))
			for _, n := range [...]int64{p.Offset, p.PageStride, p.TokenStride, p.HeadStride, p.KVStride, p.Bytes} {
				b = le.AppendUint64(b, uint64(n))
			}
		}
	}
	return b
}

// checksum is the CRC-32C of a whole descriptor without its own place.
func checksum(whole []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	return crc32.Update(crc32.Checksum(whole[:12], table), table, whole[headerBytes:])
}

// Decode is the inverse of AppendBinary, for bytes from anybody. Nothing of b is kept.
//
// Kinds: fault.Invalid (no descriptor, too long or too short, bytes behind it, numbers
// out of range), fault.Unsupported (another version), fault.Corrupt (its sum is wrong).
func Decode(b []byte) (*Descriptor, error) {
	le := binary.LittleEndian
	switch {
	case len(b) > MaxDescriptorBytes:
		return nil, fault.New(fault.Invalid, "descriptor", "%d bytes are more than %d", len(b), MaxDescriptorBytes)
	case len(b) < headerBytes:
		return nil, fault.New(fault.Invalid, "descriptor", "truncated: %d bytes, and its header has %d", len(b), headerBytes)
	case string(b[:4]) != codecMagic:
		return nil, fault.New(fault.Invalid, "descriptor", "begins with %q, and not with %q", b[:4], codecMagic)
	case le.Uint16(b[4:]) != codecVersion:
		return nil, fault.New(fault.Unsupported, "descriptor", "version %d, and this build knows %d", le.Uint16(b[4:]), codecVersion).
			Hint("run the same version of kvferry on both sides")
	}
	switch body := uint64(le.Uint32(b[8:])); {
	case body > uint64(len(b)-headerBytes):
		return nil, fault.New(fault.Invalid, "descriptor", "truncated: %d bytes of a body of %d", len(b)-headerBytes, body)
	case body < uint64(len(b)-headerBytes):
		return nil, fault.New(fault.Invalid, "descriptor", "%d trailing bytes", uint64(len(b)-headerBytes)-body)
	}
	if want, is := le.Uint32(b[12:]), checksum(b); want != is {
		return nil, fault.New(fault.Corrupt, "descriptor", "its CRC-32C is %08x, and it says %08x", is, want)
	}
	flags := le.Uint16(b[6:])
	if flags&^knownFlags != 0 {
		return nil, fault.New(fault.Invalid, "descriptor", "flags %#x are not known", flags&^knownFlags)
	}
	r := &body{cursor.New("descriptor", b[headerBytes:])}
	d, print, spec := r.descriptor(flags)
	if err := r.End(); err != nil {
		return nil, err
	}
	var err error
	if d.Geometry, err = kv.NewGeometry(spec); err != nil {
		return nil, fault.Wrap(fault.Invalid, "descriptor", err)
	}
	if is := d.Geometry.Fingerprint(); is != print {
		return nil, fault.New(fault.Invalid, "descriptor", "its geometry has the fingerprint %v, and it says %v", is, print)
	}
	if err := d.check(); err != nil {
		return nil, err
	}
	if d.order, err = orderOf(d.Pages); err != nil {
		return nil, err
	}
	return d, nil
}

// body reads what is behind the header.
type body struct{ cursor.Cursor }

func (r *body) name() string { return string(r.Bytes(int(r.U8()))) }

func (r *body) descriptor(flags uint16) (d *Descriptor, print kv.Fingerprint, spec kv.Spec) {
	d = &Descriptor{Leases: flags&flagLeases != 0}
	copy(d.Owner[:], r.Bytes(len(d.Owner)))
	d.Epoch = Epoch{Word: r.U32(), Count: r.U64()}
	if flags&flagExpiry != 0 {
		d.Expires = time.Unix(0, int64(r.U64()))
	}
	d.Entity, d.Session = r.name(), r.name()
	copy(print[:], r.Bytes(len(print)))
	spec = r.spec(flags)
	for range r.List("offers", uint32(r.U8()), MaxOffers, offerBytes) {
		o := Offer{Engine: r.name()}
		n := r.List(fmt.Sprintf("bytes of the offer of %q", o.Engine), r.U32(), MaxOfferBytes, 1)
		o.Data = append([]byte{}, r.Bytes(n)...)
		d.Offers = append(d.Offers, o)
	}
	if n := r.List("pages", r.U32(), MaxPublished, 4); n > 0 {
		d.Pages = make([]page.ID, n)
		for i := range d.Pages {
			d.Pages[i] = page.ID(r.U32())
		}
	}
	if flags&flagSums != 0 {
		if len(d.Pages) == 0 {
			r.Fail("sums of no pages")
		}
		d.Sums = make([]Sum, r.List("sums", uint32(len(d.Pages)), MaxPublished, sumBytes))
		for i := range d.Sums {
			d.Sums[i] = Sum{Hi: r.U64(), Lo: r.U64()}
		}
	}
	return d, print, spec
}

func (r *body) spec(flags uint16) kv.Spec {
	s := kv.Spec{Sink: flags&flagSink != 0}
	s.Layout, s.DType = kv.Layout(r.U8()), kv.DType(r.U8())
	s.Pages, s.PageSize = int(r.U32()), int(r.U32())
	for range r.List("regions", r.U32(), kv.MaxPlanes, 8) {
		s.RegionBytes = append(s.RegionBytes, int64(r.U64()))
	}
	for range r.List("layers", r.U32(), kv.MaxLayers, layerBytes) {
		l := kv.Layer{ID: int(r.U32()), FirstHead: int(r.U32()), Heads: int(r.U32()), Dim: int(r.U32())}
		for range r.List("planes", r.U32(), kv.MaxPlanes, planeBytes) {
			l.Planes = append(l.Planes, kv.Plane{
				Kind: kv.PlaneKind(r.U8()), Region: int(r.U32()), Offset: int64(r.U64()), PageStride: int64(r.U64()),
				TokenStride: int64(r.U64()), HeadStride: int64(r.U64()), KVStride: int64(r.U64()), Bytes: int64(r.U64()),
			})
		}
		s.Layers = append(s.Layers, l)
	}
	return s
}
