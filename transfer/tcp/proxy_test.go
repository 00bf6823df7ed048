package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// What an owner says on a connection for pages before the first byte of them: it has
// proved the key, has opened, and says how long the first segment is.
const beforePages = helloBytes + proofBytes + replyBytes + replyBytes + replyBytes

// What a reader says there before it asks for pages: it proves the key, and opens.
const beforeAsking = helloBytes + proofBytes + headBytes + 32

// proxy stands between a reader and an owner, and spoils what either says.
type proxy struct {
	l           net.Listener
	to          string
	spoil, asks spoil // what the owner says, and what the reader does
	conns       sync.WaitGroup
}

// spoil changes b, before which n bytes went. When it keeps fewer than all of b, that is
// the end.
type spoil = atomic.Pointer[func(n int64, b []byte) (keep int)]

func newProxy(tb testing.TB, to string) *proxy {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	noError(tb, err)
	x := &proxy{l: l, to: to}
	var accept sync.WaitGroup
	accept.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			far, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", to)
			if err != nil {
				_ = c.Close()
				continue
			}
			x.conns.Go(func() { pass(far, c, &x.asks); _ = far.Close() })
			x.conns.Go(func() { pass(c, far, &x.spoil); _ = c.Close(); _ = far.Close() })
		}
	})
	tb.Cleanup(func() {
		noError(tb, l.Close())
		accept.Wait()
		x.conns.Wait()
	})
	return x
}

func pass(to, from net.Conn, spoil *spoil) {
	b := make([]byte, 64<<10)
	for n := int64(0); ; {
		got, err := from.Read(b)
		keep := got
		if f := spoil.Load(); f != nil {
			keep = (*f)(n, b[:got])
		}
		if _, writeErr := to.Write(b[:keep]); writeErr != nil || err != nil || keep < got {
			return
		}
		n += int64(got)
	}
}

// set has the proxy spoil from now on; nil has it pass all.
func (x *proxy) set(f func(n int64, b []byte) (keep int)) {
	if f == nil {
		x.spoil.Store(nil)
		return
	}
	x.spoil.Store(&f)
}

// flip turns one bit of byte at of what is said on each connection, and turn any of them.
func flip(at int64) func(n int64, b []byte) int { return turn(at, 0x10) }

func turn(at int64, bits byte) func(n int64, b []byte) int {
	return func(n int64, b []byte) int {
		if n <= at && at < n+int64(len(b)) {
			b[at-n] ^= bits
		}
		return len(b)
	}
}

// cut ends each connection behind byte at.
func cut(at int64) func(n int64, b []byte) int {
	return func(n int64, b []byte) int { return int(min(max(at-n, 0), int64(len(b)))) }
}

// A bit that turns on its way is found, and the page that it was in is named; after that
// the same pages arrive.
func TestCopy_BitTurnsInFlight(t *testing.T) {
	for _, shape := range []string{"small", "direct"} {
		c := small()
		if shape == "direct" {
			c = direct()
		}
		p := newPair(t, Options{}, Options{}, c)
		x := newProxy(t, p.owner.Addr())
		p.by(x.l.Addr().String())
		plan := p.plan()
		bytes := p.near.Geometry().PageBytes()
		for _, at := range []int64{0, 1, bytes - 1, bytes, 5*bytes + 7, 11*bytes + bytes/2 - 1} {
			t.Run(fmt.Sprintf("%s/byte %d", shape, at), func(t *testing.T) {
				s := p.source()
				x.set(flip(beforePages + at + at/segmentBytes*replyBytes))
				err := s.Copy(t.Context(), nil, plan)
				faulttest.Refused(t, err, fault.Corrupt, "page", "checksum")
				if bytes >= segmentBytes {
					faulttest.Refused(t, err, fault.Corrupt, fmt.Sprintf("page %d", at/bytes))
				}
				x.set(nil)
				noError(t, s.Copy(t.Context(), nil, plan))
				if !p.same() {
					t.Error("other bytes")
				}
			})
		}
	}
}

// A request that changes on its way is refused: it would be answered with other pages,
// and their sums would be right.
func TestCopy_RequestTurnsInFlight(t *testing.T) {
	for _, unchecked := range []bool{false, true} {
		p := newPair(t, Options{}, Options{Unchecked: unchecked}, small())
		x := newProxy(t, p.owner.Addr())
		p.by(x.l.Addr().String())
		var plan transfer.Plan
		noError(t, plan.Set(0, 12, []page.ID{4, 5}, []page.ID{2, 3}, 8)) // a page, and half of one
		for at := range int64(headBytes + copyHead + runBytes + partSize) {
			for _, bit := range []byte{1, 2, 0x80} {
				s := p.source()
				f := turn(beforeAsking+at, bit)
				x.asks.Store(&f)
				limit := patience
				if 4 <= at && at < headBytes {
					limit = 50 * time.Millisecond // the owner may wait for more than was said
				}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				if err := s.Copy(ctx, nil, &plan); fault.KindOf(err) == 0 {
					t.Errorf("byte %d of the request, bit %#x: error %v, want one with a kind", at, bit, err)
				}
				cancel()
				x.asks.Store(nil)
			}
		}
		s := p.source()
		f := turn(beforeAsking+headBytes, 2)
		x.asks.Store(&f)
		_, err := s.Epoch(t.Context(), 4)
		faulttest.Refused(t, err, fault.Corrupt, "4 was asked for, and this is 6")
		x.asks.Store(nil)
		noError(t, s.Copy(t.Context(), nil, &plan))
	}
}

// Without sums nobody sees it: it is they that do.
func TestCopy_BitTurnsUnseenWithoutSums(t *testing.T) {
	p := newPair(t, Options{}, Options{Unchecked: true}, direct())
	x := newProxy(t, p.owner.Addr())
	s := p.by(x.l.Addr().String()).source()
	x.set(flip(beforePages + 5))
	noError(t, s.Copy(t.Context(), nil, p.plan()))
	if p.same() {
		t.Error("the proxy has turned nothing")
	}
}

// With TLS a turned bit ends the connection, sums or not.
func TestCopy_BitTurnsUnderTLS(t *testing.T) {
	p := newPair(t, Options{TLS: true}, Options{TLS: true, Unchecked: true}, direct())
	x := newProxy(t, p.owner.Addr())
	s := p.by(x.l.Addr().String()).source()
	x.set(flip(100 << 10))
	if err := s.Copy(t.Context(), nil, p.plan()); fault.KindOf(err) == 0 {
		t.Errorf("error %v, want one with a kind", err)
	}
}

// A header that changes on its way is refused, or is no header of what was asked for.
func TestCopy_HeaderTurnsInFlight(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	x := newProxy(t, p.owner.Addr())
	p.by(x.l.Addr().String())
	plan := p.plan()
	for at := range int64(beforePages) {
		x.set(nil)
		s := p.source()
		x.set(flip(at))
		if err := s.Copy(t.Context(), nil, plan); fault.KindOf(err) == 0 {
			t.Errorf("byte %d: error %v, want one with a kind", at, err)
		}
	}
}

// Wherever a connection is cut, the read fails, and the next one goes by a new one.
func TestCopy_Cut(t *testing.T) {
	for _, m := range modes()[:2] {
		p := newPair(t, m.o, m.o, direct())
		x := newProxy(t, p.owner.Addr())
		s := p.by(x.l.Addr().String()).source()
		plan := p.plan()
		for _, at := range []int64{0, 1, 40, 71, 72, 95, 96, 119, 120, 130, 143, 144, 145, 1000, 64 << 10, segmentBytes + beforePages, segmentBytes + beforePages + 10, 1 << 20} {
			x.set(cut(at))
			err := s.Copy(t.Context(), nil, plan)
			if fault.KindOf(err) == 0 {
				t.Errorf("%s, behind byte %d: error %v, want one with a kind", m.name, at, err)
			}
			x.set(nil)
			noError(t, s.Copy(t.Context(), nil, plan))
			if !p.same() {
				t.Errorf("%s, behind byte %d: other bytes", m.name, at)
			}
		}
	}
}

// A connection that stands still is left when ctx ends, and from then on nothing writes
// the pages: not even what comes when it goes on.
func TestCopy_Stalls(t *testing.T) {
	for _, m := range modes()[:2] {
		for _, at := range []int64{0, 100, beforePages, beforePages + 1000, 1 << 20} {
			t.Run(fmt.Sprintf("%s/byte %d", m.name, at), func(t *testing.T) {
				p := newPair(t, m.o, m.o, direct())
				x := newProxy(t, p.owner.Addr())
				s := p.by(x.l.Addr().String()).source()
				stalled, goOn := make(chan struct{}), make(chan struct{})
				var once sync.Once
				x.set(func(n int64, b []byte) int {
					if n+int64(len(b)) > at {
						once.Do(func() { close(stalled) })
						<-goOn
					}
					return len(b)
				})
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					<-stalled
					cancel()
				}()
				err := s.Copy(ctx, nil, p.plan())
				faulttest.Refused(t, err, fault.Busy)
				if !errors.Is(err, context.Canceled) {
					t.Errorf("error %v, want canceled", err)
				}
				was := bytes.Clone(mem(t, p.near))
				close(goOn)
				noError(t, s.Close())
				x.conns.Wait() // what the owner has said has arrived, or had nowhere to go
				if !bytes.Equal(was, mem(t, p.near)) {
					t.Error("a page was written after Copy had returned")
				}
			})
		}
	}
}

// An owner that doesn't answer the handshake is left when its time, or ctx, ends.
func TestOpen_Silence(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0") // and never accepts
	noError(t, err)
	defer func() { noError(t, l.Close()) }()
	for _, m := range modes()[:2] {
		o := m.o
		o.Handshake = 1
		p := newPair(t, m.o, o, small())
		_, err = p.by(l.Addr().String()).open(t.Context())
		faulttest.Refused(t, err, fault.Busy, l.Addr().String())
		p = newPair(t, m.o, m.o, small())
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		_, err = p.by(l.Addr().String()).open(ctx)
		faulttest.Refused(t, err, fault.Busy)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want canceled", err)
		}
	}
}
