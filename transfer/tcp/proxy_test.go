package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

// What an owner says on a connection for pages before the first byte of them: it has
// proved the key, has opened, and says how long the first segment is.
const beforePages = helloBytes + proofBytes + replyBytes + replyBytes + replyBytes

// proxy stands between a reader and an owner, and spoils what the owner says.
type proxy struct {
	l     net.Listener
	to    string
	spoil atomic.Pointer[func(n int64, b []byte) (keep int)] // n bytes went before b; fewer than all of b: the end
	conns sync.WaitGroup
}

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
			x.conns.Go(func() { _, _ = io.Copy(far, c); _ = far.Close() })
			x.conns.Go(func() { x.pass(c, far); _ = c.Close(); _ = far.Close() })
		}
	})
	tb.Cleanup(func() {
		noError(tb, l.Close())
		accept.Wait()
		x.conns.Wait()
	})
	return x
}

func (x *proxy) pass(to, from net.Conn) {
	b := make([]byte, 64<<10)
	for n := int64(0); ; {
		got, err := from.Read(b)
		keep := got
		if f := x.spoil.Load(); f != nil {
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

// flip turns one bit of byte at of what an owner says on each connection.
func flip(at int64) func(n int64, b []byte) int {
	return func(n int64, b []byte) int {
		if n <= at && at < n+int64(len(b)) {
			b[at-n] ^= 0x10
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
