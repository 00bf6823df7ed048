package tcp

import (
	"encoding/binary"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// The frames of a connection; all numbers are little-endian. First the handshake:
//
//	reader  hello
//	owner   hello, proof [32]
//	reader  proof [32]; zeros: the owner's is wrong
//	owner   reply
//
//	hello:    "KVFT"  version u16  mode u8  role u8 | nonce [32]
//
// The first 8 bytes of a hello are the same in all versions. Then requests of the reader,
// each answered before the next is sent; join and leave have no answer:
//
//	request:  kind u8  flags u8  0 u16  body u32 | body
//	open:     owner [16]  fingerprint [16]                the first, and once
//	word:     number u32
//	copy:     sum u64  from u64  to u64  runs u32  parts u32 | runs | parts
//	            run:   page u32  pages u32
//	            part:  page u32  t0 u32  t1 u32
//	join:     word u32  count u64
//	leave:    as join
//
//	reply:    kind u8  flags u8  code u16  body u32  a u64  b u64 | body
//	done:     to the proof and to open
//	value:    a is the word, b its number
//	data:     body is the next segment; with flagSums a and b are the sum's Hi and Lo
//	failed:   code says why; the owner closes the connection
//
// Pages of a copy are numbered by runs, then parts; its answer is bytes [from, to) of
// them all, one behind the other: segments of segmentBytes, and the rest. The sum is the
// xxh3 of all behind it, whether the pages have sums or not: one wrong bit of a list is a
// page that nobody asked for, with a sum that is right.
const (
	magic        = "KVFT"
	version      = 1
	prefaceBytes = 8
	nonceBytes   = 32
	helloBytes   = prefaceBytes + nonceBytes
	proofBytes   = 32

	modePlain, modeTLS = 1, 2
	rReader, rOwner    = 1, 2

	headBytes  = 8
	replyBytes = 24

	segmentBytes = 512 << 10

	flagSums = 1 << 0

	maxRuns  = transfer.MaxPublished
	maxParts = 2
	sumBytes = 8
	copyHead = sumBytes + 8 + 8 + 4 + 4
	runBytes = 8
	partSize = 12
	maxBody  = copyHead + maxRuns*runBytes + maxParts*partSize
)

// Requests.
const (
	askOpen = iota + 1
	askWord
	askCopy
	askJoin
	askLeave
)

// Replies.
const (
	sayDone = iota + 1
	sayValue
	sayData
	sayFailed
)

// Codes of sayFailed.
const (
	codeGone = iota + 1 // the owner is not here, or not any more
	codeGeometry
	codeInvalid // a request out of range, or that none of this state
	codeDenied  // the proof is wrong
	codeChanged // a request is not what its sum is of
	codeFull    // there is no room for another reader
)

// hello is the beginning of a connection.
type hello struct {
	version    uint16
	mode, role byte
	nonce      [nonceBytes]byte
}

func (h *hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint16(b, h.version)
	b = append(b, h.mode, h.role)
	return append(b, h.nonce[:]...)
}

// decodePreface reads the first bytes of a hello from anybody. Kinds: fault.Invalid,
// fault.Unsupported (another version).
func decodePreface(b *[prefaceBytes]byte, role byte) (h hello, err error) {
	switch {
	case b[0] == 0x15 && b[1] == 3, b[0] == 0x16 && b[1] == 3:
		return h, errMode(true)
	case string(b[:4]) != magic:
		return h, fault.New(fault.Invalid, "hello", "begins with %q, and not with %q", b[:4], magic).Hint("something else than kvferry is at this address")
	}
	h.version, h.mode, h.role = binary.LittleEndian.Uint16(b[4:]), b[6], b[7]
	switch {
	case h.version != version:
		return h, fault.New(fault.Unsupported, "hello", "version %d, and this build knows %d", h.version, version).
			Hint("run the same version of kvferry on both sides")
	case h.mode != modePlain && h.mode != modeTLS:
		return h, fault.New(fault.Invalid, "hello", "mode %d is not known", h.mode)
	case h.role != role:
		return h, fault.New(fault.Invalid, "hello", "role %d, and not %d", h.role, role)
	}
	return h, nil
}

// ModeError says that of two sides only one has TLS.
type ModeError struct {
	TLS bool // the other side has it
}

func (e *ModeError) Error() string {
	theirs, ours := "plain", "TLS"
	if e.TLS {
		theirs, ours = ours, theirs
	}
	return "the other side speaks " + theirs + ", and this one is configured for " + ours
}

func errMode(theirTLS bool) error {
	return fault.Wrap(fault.Unsupported, "hello", &ModeError{TLS: theirTLS}).Hint("set TLS on both sides, or on neither")
}

// head is what a request begins with.
type head struct {
	kind, flags byte
	body        int
}

func appendHead(b []byte, h head) []byte {
	return binary.LittleEndian.AppendUint32(append(b, h.kind, h.flags, 0, 0), uint32(h.body))
}

// decodeHead is the inverse of appendHead, for bytes from anybody. The length of the
// body is one that its kind can have. Kind: fault.Invalid.
func decodeHead(b *[headBytes]byte) (h head, err error) {
	h = head{kind: b[0], flags: b[1]}
	body := binary.LittleEndian.Uint32(b[4:])
	var least, most uint32
	var flags byte
	switch h.kind {
	case askOpen:
		least, most = 32, 32
	case askWord:
		least, most = 4, 4
	case askCopy:
		least, most, flags = copyHead, maxBody, flagSums
	case askJoin, askLeave:
		least, most = 12, 12
	default:
		return h, fault.New(fault.Invalid, "request", "kind %d is not known", h.kind)
	}
	switch {
	case body < least || body > most:
		return h, fault.New(fault.Invalid, "request", "kind %d with a body of %d bytes: want %d to %d", h.kind, body, least, most)
	case h.flags&^flags != 0 || b[2] != 0 || b[3] != 0:
		return h, fault.New(fault.Invalid, "request", "kind %d with the flags %#x %#x %#x", h.kind, h.flags, b[2], b[3])
	}
	h.body = int(body)
	return h, nil
}

func appendOpen(b []byte, owner transfer.OwnerID, print kv.Fingerprint) []byte {
	b = appendHead(b, head{kind: askOpen, body: len(owner) + len(print)})
	return append(append(b, owner[:]...), print[:]...)
}

func decodeOpen(body []byte) (owner transfer.OwnerID, print kv.Fingerprint) {
	copy(print[:], body[copy(owner[:], body):])
	return owner, print
}

func appendWord(b []byte, word uint32) []byte {
	return binary.LittleEndian.AppendUint32(appendHead(b, head{kind: askWord, body: 4}), word)
}

func decodeWord(body []byte) uint32 { return binary.LittleEndian.Uint32(body) }

func appendEpoch(b []byte, kind byte, e transfer.Epoch) []byte {
	b = appendHead(b, head{kind: kind, body: 12})
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint32(b, e.Word), e.Count)
}

func decodeEpoch(body []byte) transfer.Epoch {
	return transfer.Epoch{Word: binary.LittleEndian.Uint32(body), Count: binary.LittleEndian.Uint64(body[4:])}
}

// run is n pages with ids that follow each other.
type run struct {
	first page.ID
	n     int32
}

// part is tokens [t0, t1) of a page.
type part struct {
	page   page.ID
	t0, t1 int32
}

// order is what is asked of an owner's pages.
type order struct {
	sums     bool
	from, to int64
	runs     []run
	parts    []part
}

func (o *order) append(b []byte) []byte {
	le := binary.LittleEndian
	h := head{kind: askCopy, body: copyHead + len(o.runs)*runBytes + len(o.parts)*partSize}
	if o.sums {
		h.flags |= flagSums
	}
	b = appendHead(b, h)
	sum := len(b)
	b = append(b, make([]byte, sumBytes)...)
	b = le.AppendUint64(le.AppendUint64(b, uint64(o.from)), uint64(o.to))
	b = le.AppendUint32(le.AppendUint32(b, uint32(len(o.runs))), uint32(len(o.parts)))
	for _, r := range o.runs {
		b = le.AppendUint32(le.AppendUint32(b, uint32(r.first)), uint32(r.n))
	}
	for _, p := range o.parts {
		b = le.AppendUint32(le.AppendUint32(le.AppendUint32(b, uint32(p.page)), uint32(p.t0)), uint32(p.t1))
	}
	le.PutUint64(b[sum:], xxh3.Hash(b[sum+sumBytes:]))
	return b
}

// decode is the inverse of append, for a body from anybody, of a length that decodeHead
// has passed. It says nothing of which pages there are. Kinds: fault.Invalid,
// fault.Corrupt (it changed on its way).
func (o *order) decode(flags byte, body []byte) error {
	le := binary.LittleEndian
	sum, body := le.Uint64(body), body[sumBytes:]
	if is := xxh3.Hash(body); is != sum {
		return fault.New(fault.Corrupt, "copy", "the request's checksum is %016x, and it says %016x", is, sum)
	}
	from, to := le.Uint64(body), le.Uint64(body[8:])
	runs, parts := le.Uint32(body[16:]), le.Uint32(body[20:])
	o.sums, o.runs, o.parts = flags&flagSums != 0, o.runs[:0], o.parts[:0]
	switch {
	case runs > maxRuns || parts > maxParts || len(body) != copyHead-sumBytes+int(runs)*runBytes+int(parts)*partSize:
		return fault.New(fault.Invalid, "copy", "%d runs and %d parts in %d bytes", runs, parts, len(body))
	case from > to || to > math.MaxInt64:
		return fault.New(fault.Invalid, "copy", "bytes [%d, %d)", from, to)
	}
	o.from, o.to = int64(from), int64(to)
	b, pages := body[copyHead-sumBytes:], uint64(0)
	for ; runs > 0; runs-- {
		first, n := le.Uint32(b), le.Uint32(b[4:])
		if pages += uint64(n); n == 0 || pages > maxRuns || uint64(first)+uint64(n) > kv.MaxPages {
			return fault.New(fault.Invalid, "copy", "%d pages from %d", n, first)
		}
		o.runs = append(o.runs, run{page.ID(first), int32(n)})
		b = b[runBytes:]
	}
	for ; parts > 0; parts-- {
		id, t0, t1 := le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:])
		if id >= kv.MaxPages || t0 >= t1 || t1 > kv.MaxPageSize {
			return fault.New(fault.Invalid, "copy", "tokens [%d, %d) of page %d", t0, t1, id)
		}
		o.parts = append(o.parts, part{page.ID(id), int32(t0), int32(t1)})
		b = b[partSize:]
	}
	return nil
}

// reply is what an owner answers.
type reply struct {
	kind, flags byte
	code        uint16
	body        uint32
	a, b        uint64
}

func (r *reply) put(b *[replyBytes]byte) {
	le := binary.LittleEndian
	b[0], b[1] = r.kind, r.flags
	le.PutUint16(b[2:], r.code)
	le.PutUint32(b[4:], r.body)
	le.PutUint64(b[8:], r.a)
	le.PutUint64(b[16:], r.b)
}

// decodeReply is the inverse of put, for bytes from anybody: what wants is the kind of
// answer. Whatever an owner has refused is an error. Kinds: fault.Invalid,
// fault.NotFound, fault.Corrupt, fault.Full, and errKey.
func decodeReply(b *[replyBytes]byte, want byte) (r reply, err error) {
	le := binary.LittleEndian
	r = reply{kind: b[0], flags: b[1], code: le.Uint16(b[2:]), body: le.Uint32(b[4:]), a: le.Uint64(b[8:]), b: le.Uint64(b[16:])}
	if r.kind == sayFailed {
		switch r.code {
		case codeGone:
			return r, errGone()
		case codeGeometry:
			return r, fault.New(fault.Invalid, "descriptor", "has another geometry than its owner's cache")
		case codeDenied:
			return r, errKey()
		case codeChanged:
			return r, fault.New(fault.Corrupt, "request", "changed on its way to the owner").Hint("%s", lookAtNetwork)
		case codeFull:
			return r, fault.New(fault.Full, "owner", "has all the readers that it lets in").
				Hint("close readers, or have it let in more: tcp.Options.MaxConns")
		}
		return r, fault.New(fault.Invalid, "request", "the owner refuses it (code %d)", r.code)
	}
	ok := r.kind == want && r.code == 0
	switch r.kind {
	case sayValue:
		ok = ok && r.flags == 0 && r.body == 0
	case sayData:
		ok = ok && r.body <= segmentBytes && (r.flags == flagSums || r.flags == 0 && r.a == 0 && r.b == 0)
	default:
		ok = ok && r.flags == 0 && r.body == 0 && r.a == 0 && r.b == 0
	}
	if !ok {
		return r, fault.New(fault.Invalid, "reply", "%+v where kind %d was asked for", r, want)
	}
	return r, nil
}

// lookAtNetwork is what to do about bytes that changed on their way.
const lookAtNetwork = "read it again; if that happens often, look at the network, and use TLS where others have access to it"

func errGone() error {
	return fault.New(fault.NotFound, "owner", "has closed its publisher").Hint("ask it to publish again")
}

func errKey() error {
	return fault.New(fault.Invalid, "key", "the two sides have different keys, or somebody is between them").
		Hint("give both sides the same key file")
}
