package mooncake

import (
	"encoding/binary"
	"math"
	"net/netip"

	"github.com/kvferry/kvferry/fault"
)

// What goes between a process and its child, all numbers little-endian. A packet of the
// socket is one frame:
//
//	"KVMC"  version u8  type u8  0 u16  call u64 | body
//
// Each call has one answer, with its number; stop has none. Descriptors come with
// mapCall only.
const (
	frameMagic   = "KVMC"
	frameVersion = 1
	frameHeader  = 16
	frameMost    = 64 << 10

	requestBytes  = 24
	wordCallBytes = 12
	pieceBytes    = 24
	frameRequests = 2560 // of one readCall
	maxLibraries  = 64
)

// The types of frames.
const (
	startCall  uint8 = iota + 1 // config → name, release
	mapCall                     // region → base
	unmapCall                   // region →
	openCall                    // name → segment
	readCall                    // segment, requests →
	wordsCall                   // segment, words → bytes
	stopCall                    // of a read or words: no more of it
	answerGood                  // what the call returns
	answerBad                   // kind, object, detail, remedy
)

// frame is one packet. Of its fields those of its type are set.
type frame struct {
	kind uint8
	call uint64

	config   config    // startCall
	number   uint32    // mapCall, unmapCall: region; readCall, wordsCall, openCall's answer: segment
	write    bool      // mapCall
	remote   bool      // mapCall
	bytes    int64     // mapCall
	pieces   []piece   // mapCall
	text     string    // openCall
	requests []request // readCall
	words    []word    // wordsCall
	data     []byte    // answerGood
	fault    *fault.Error
}

// append encodes f. What it holds is within the limits.
func (f *frame) append(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, frameMagic...)
	b = append(b, frameVersion, f.kind, 0, 0)
	b = le.AppendUint64(b, f.call)
	switch f.kind {
	case startCall:
		c := &f.config
		b = appendText(appendText(appendText(b, c.metadata), c.name), c.protocol)
		b = appendText(b, addrText(c.listen))
		b = le.AppendUint32(b, uint32(c.maxStuck))
		b = append(b, byte(len(c.libraries)))
		for _, s := range c.libraries {
			b = appendText(b, s)
		}
	case mapCall:
		b = le.AppendUint32(b, f.number)
		b = append(b, flags(f.write, f.remote))
		b = le.AppendUint64(b, uint64(f.bytes))
		b = append(b, byte(len(f.pieces)))
		for _, p := range f.pieces {
			b = le.AppendUint64(le.AppendUint64(le.AppendUint64(b, uint64(p.off)), uint64(p.fileOff)), uint64(p.bytes))
		}
	case unmapCall:
		b = le.AppendUint32(b, f.number)
	case openCall:
		b = appendText(b, f.text)
	case readCall:
		b = le.AppendUint32(b, f.number)
		for i := range f.requests {
			q := &f.requests[i]
			b = le.AppendUint32(le.AppendUint32(b, q.region), q.bytes)
			b = le.AppendUint64(le.AppendUint64(b, q.local), q.remote)
		}
	case wordsCall:
		b = le.AppendUint32(b, f.number)
		for _, w := range f.words {
			b = le.AppendUint32(le.AppendUint64(b, w.remote), w.bytes)
		}
	case answerGood:
		b = append(b, f.data...)
	case answerBad:
		b = append(b, byte(f.fault.Kind))
		b = appendText(appendText(appendText(b, f.fault.Object), f.fault.Detail), f.fault.Remedy)
	}
	return b
}

func flags(write, remote bool) (b byte) {
	if write {
		b |= 1
	}
	if remote {
		b |= 2
	}
	return b
}

// maxText is the longest text of a frame: a longer one is cut.
const maxText = 4096

func appendText(b []byte, s string) []byte {
	s = s[:min(len(s), maxText)]
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

// parse is the inverse of append. Data is a part of b. Kinds: fault.Invalid, fault.Unsupported (another version).
func (f *frame) parse(b []byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) < frameHeader || len(b) > frameMost:
		return fault.New(fault.Invalid, "frame", "of %d bytes", len(b))
	case string(b[:4]) != frameMagic || b[6] != 0 || b[7] != 0:
		return fault.New(fault.Invalid, "frame", "begins with %q", b[:8])
	case b[4] != frameVersion:
		return fault.New(fault.Unsupported, "frame", "version %d, and this build knows %d", b[4], frameVersion).
			Hint("Options.Executable must be of the same build")
	}
	*f = frame{kind: b[5], call: le.Uint64(b[8:])}
	r := &body{rest: b[frameHeader:]}
	switch f.kind {
	case startCall:
		c := &f.config
		c.metadata, c.name, c.protocol = r.text(), r.text(), r.text()
		c.listen = r.addr()
		c.maxStuck = int(r.u32())
		for range r.count(int(r.u8()), maxLibraries, 2) {
			c.libraries = append(c.libraries, r.text())
		}
	case mapCall:
		f.number = r.u32()
		bits := r.u8()
		f.write, f.remote = bits&1 != 0, bits&2 != 0
		r.bad = r.bad || bits > 3
		f.bytes = r.i64()
		for range r.count(int(r.u8()), maxPieces, pieceBytes) {
			f.pieces = append(f.pieces, piece{off: r.i64(), fileOff: r.i64(), bytes: r.i64()})
		}
	case unmapCall:
		f.number = r.u32()
	case openCall:
		f.text = r.text()
	case readCall:
		f.number = r.u32()
		n := r.count(len(r.rest)/requestBytes, frameRequests, requestBytes)
		f.requests = make([]request, 0, n)
		for range n {
			f.requests = append(f.requests, request{region: r.u32(), bytes: r.u32(), local: r.u64(), remote: r.u64()})
		}
	case wordsCall:
		f.number = r.u32()
		for range r.count(len(r.rest)/wordCallBytes, wordsMost, wordCallBytes) {
			w := word{remote: r.u64(), bytes: r.u32()}
			r.bad = r.bad || w.bytes == 0 || w.bytes > wordMost
			f.words = append(f.words, w)
		}
	case stopCall:
	case answerGood:
		f.data, r.rest = r.rest, nil
	case answerBad:
		kind := fault.Kind(r.u8())
		f.fault = &fault.Error{Kind: kind, Object: r.text(), Detail: r.text(), Remedy: r.text()}
		r.bad = r.bad || kind < fault.Invalid || kind > fault.Closed
	default:
		return fault.New(fault.Invalid, "frame", "of unknown type %d", f.kind)
	}
	if r.bad || len(r.rest) > 0 {
		return fault.New(fault.Invalid, "frame", "of type %d is malformed", f.kind)
	}
	return nil
}

// body reads the body of a frame. After the first failure all it returns is zero.
type body struct {
	rest []byte
	bad  bool
}

func (r *body) take(n int) []byte {
	if r.bad || n > len(r.rest) {
		r.bad, r.rest = true, nil
		return make([]byte, 8)
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *body) u8() uint8   { return r.take(1)[0] }
func (r *body) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *body) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *body) i64() int64 {
	n := r.u64()
	r.bad = r.bad || n > math.MaxInt64
	return int64(n & math.MaxInt64)
}

func (r *body) text() string {
	n := int(binary.LittleEndian.Uint16(r.take(2)))
	if n > maxText {
		r.bad = true
	}
	if b := r.take(n); !r.bad {
		return string(b)
	}
	return ""
}

// addrText is an address, "" when there is none.
func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func (r *body) addr() (a netip.Addr) {
	if s := r.text(); s != "" {
		var err error
		a, err = netip.ParseAddr(s)
		r.bad = r.bad || err != nil || addrText(a) != s
	}
	return a
}

// count returns n when a list may have so many entries, and there are bytes for them.
func (r *body) count(n, most, each int) int {
	if r.bad || n > most || n*each > len(r.rest) {
		r.bad = true
		return 0
	}
	return n
}
