package tcp

import (
	"errors"
	"io"
	"net"
	"os"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

const (
	// A segment whose stretches are shorter than this, taken all together, goes through a
	// buffer: a system call takes longer for each of them than a copy does.
	directBytes = 4 << 10
	maxPieces   = segmentBytes / directBytes
)

// flow is what one side of one copy needs. It is used again, and grows no more then.
type flow struct {
	order  order // what the owner is asked for
	local  order // the same of the reader's own pages; unused by owners
	walk   walk
	pieces [][]byte
	vec    [][]byte
	out    net.Buffers
	buffer []byte // a segment, and a reply before or behind it; nil before it is needed
	digest device.Digest
	head   [replyBytes]byte
	ask    []byte
}

func (e *Engine) flow() *flow {
	return e.flows.Get().(*flow) //nolint:errcheck // made by New and put back by who takes it
}

// next takes the next n bytes. They are direct when they are in few enough pieces; else
// pieces is a beginning of them.
func (fl *flow) next(n int64, tls bool) (direct bool) {
	var got int64
	fl.pieces, got = fl.walk.pieces(fl.pieces[:0], n, maxPieces)
	return !tls && got == n && (int64(len(fl.pieces)) <= n/directBytes || len(fl.pieces) == 1)
}

// each calls f with all pieces of n bytes, of which next has taken the first.
func (fl *flow) each(n int64, f func(piece []byte)) {
	for {
		for _, p := range fl.pieces {
			f(p)
			n -= int64(len(p))
		}
		if n == 0 {
			return
		}
		fl.pieces, _ = fl.walk.pieces(fl.pieces[:0], n, maxPieces)
	}
}

func (fl *flow) room() []byte {
	if fl.buffer == nil {
		fl.buffer = make([]byte, segmentBytes+replyBytes)
	}
	return fl.buffer
}

// sum is the sum of all pieces.
func (fl *flow) sum() (hi, lo uint64) {
	if len(fl.pieces) == 1 {
		return sumOf(fl.pieces[0])
	}
	fl.digest.Reset()
	for _, p := range fl.pieces {
		_, _ = fl.digest.Write(p) // never fails
	}
	return fl.digest.Sum128()
}

func sumOf(b []byte) (hi, lo uint64) {
	s := xxh3.Hash128(b)
	return s.Hi, s.Lo
}

// send answers fl.order, segment by segment.
func (v *visitor) send(fl *flow) error {
	fl.walk.start(v.x.form, &fl.order)
	for left := fl.order.to - fl.order.from; left > 0; {
		n := min(left, segmentBytes)
		if !v.x.begin(v) {
			return v.fail(codeGone, errGone())
		}
		err := v.segment(fl, n)
		v.x.end(v)
		if err != nil {
			return err
		}
		v.e.stats.sent.Add(uint64(n))
		left -= n
	}
	return nil
}

// segment sends the next n bytes. They are summed first, so that what is sent is in the
// processor's cache.
func (v *visitor) segment(fl *flow, n int64) (err error) {
	r := reply{kind: sayData, body: uint32(n)}
	if fl.order.sums {
		r.flags = flagSums
	}
	if fl.next(n, v.e.o.TLS) {
		if fl.order.sums {
			r.a, r.b = fl.sum()
		}
		r.put(&fl.head)
		fl.vec = append(append(fl.vec[:0], fl.head[:]), fl.pieces...)
		fl.out = fl.vec
		_, err = fl.out.WriteTo(v.conn)
		return err
	}
	b := fl.room()[:replyBytes+n]
	at := b[replyBytes:]
	fl.each(n, func(p []byte) { at = at[copy(at, p):] })
	if fl.order.sums {
		r.a, r.b = sumOf(b[replyBytes:])
	}
	r.put((*[replyBytes]byte)(b))
	_, err = v.conn.Write(b)
	return err
}

// receive takes the answer to fl.order into the pages of fl.local. When it has failed
// these hold undefined bytes.
func (l *link) receive(fl *flow, local *form) error {
	fl.walk.start(local, &fl.local)
	if _, err := io.ReadFull(l.conn, fl.head[:]); err != nil {
		return err
	}
	for at := fl.order.from; at < fl.order.to; {
		n := min(fl.order.to-at, segmentBytes)
		r, err := decodeReply(&fl.head, sayData)
		if err != nil {
			return err
		}
		if int64(r.body) != n || (r.flags&flagSums != 0) != fl.order.sums {
			return fault.New(fault.Invalid, "reply", "a segment of %d bytes, flags %#x, where %d are next", r.body, r.flags, n)
		}
		next := fl.head[:] // behind the segment
		if at+n == fl.order.to {
			next = nil
		}
		hi, lo, err := l.segment(fl, n, next)
		if err != nil {
			return err
		}
		if fl.order.sums && (hi != r.a || lo != r.b) {
			return errSum(fl, local, at, n, [2]uint64{hi, lo}, [2]uint64{r.a, r.b})
		}
		l.e.stats.arrived.Add(uint64(n))
		at += n
	}
	return nil
}

// segment takes the next n bytes, and what follows them into next.
func (l *link) segment(fl *flow, n int64, next []byte) (hi, lo uint64, err error) {
	if fl.next(n, l.e.o.TLS) {
		fl.vec = append(fl.vec[:0], fl.pieces...)
		if len(next) > 0 {
			fl.vec = append(fl.vec, next)
		}
		return l.readPieces(fl, n)
	}
	b := fl.room()[:int(n)+len(next)]
	if _, err := io.ReadFull(l.conn, b); err != nil {
		return 0, 0, err
	}
	copy(next, b[n:])
	if fl.order.sums {
		hi, lo = sumOf(b[:n])
	}
	fl.each(n, func(p []byte) { b = b[copy(p, b):] })
	return hi, lo, nil
}

// readPieces reads fl.vec full. The first n bytes are summed as they come, while the
// processor's cache has them, and while more arrive.
func (l *link) readPieces(fl *flow, n int64) (hi, lo uint64, err error) {
	fl.digest.Reset()
	l.todo = fl.vec
	for len(l.todo) > 0 {
		if err := l.raw.Read(l.some); err != nil {
			return 0, 0, err
		}
		if l.err != nil {
			return 0, 0, l.err
		}
		for got := l.got; got > 0; {
			b := l.todo[0]
			if len(b) > got {
				l.todo[0] = b[got:]
				b = b[:got]
			} else {
				l.todo = l.todo[1:]
			}
			got -= len(b)
			if b = b[:min(int64(len(b)), n)]; fl.order.sums {
				_, _ = fl.digest.Write(b) // never fails
			}
			n -= int64(len(b))
		}
	}
	hi, lo = fl.digest.Sum128()
	return hi, lo, nil
}

// readSome reads what is there into l.todo. It reports false when that is nothing.
func (l *link) readSome(fd uintptr) bool {
	for {
		l.got, l.err = unix.Readv(int(fd), l.todo[:min(len(l.todo), maxVec)])
		switch {
		case errors.Is(l.err, unix.EINTR):
			continue
		case errors.Is(l.err, unix.EAGAIN):
			return false
		case l.err != nil:
			l.err = os.NewSyscallError("readv", l.err)
		case l.got == 0:
			l.err = io.ErrUnexpectedEOF
		}
		return true
	}
}

func writeOnce(fd int, b []byte) (int, error) {
	for {
		n, err := unix.Write(fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, fault.New(fault.Busy, "owner", "doesn't take what it is told")
		}
		return max(n, 0), os.NewSyscallError("write", err)
	}
}
