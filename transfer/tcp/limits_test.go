package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// large is a shape with more bytes than sockets have room for.
func large() kv.Config {
	return kv.Config{Layout: kv.MLA, DType: kv.INT8, Layers: 1, Pages: 64, PageSize: 16, LatentDim: 64 << 10}
}

// stuck returns a reader's connection to which an owner is sending, and that takes no
// more than the beginning.
func (p *pair) stuck() net.Conn {
	p.Helper()
	c := p.admitted(true)
	n := p.far.Geometry().PageBytes()
	o := order{runs: []run{{0, int32(p.far.Pages())}}, to: n * int64(p.far.Pages())}
	_, err := c.Write(o.append(nil))
	noError(p, err)
	noError(p, expect(c, sayData))
	return c
}

// A reader that takes nothing doesn't keep an owner from closing its publisher.
func TestOwner_WithdrawsFromAReaderThatTakesNothing(t *testing.T) {
	p := newPair(t, Options{Stall: time.Hour}, Options{}, large())
	c := p.stuck()
	s := p.source()
	noError(t, p.publisher.Close())
	ends(t, c)
	for range 2 {
		if _, err := s.Epoch(t.Context(), 0); !errors.Is(err, fault.NotFound) {
			t.Errorf("error %v, want kind not found", err)
		}
		if err := s.Copy(t.Context(), nil, p.plan()); !errors.Is(err, fault.NotFound) {
			t.Errorf("error %v, want kind not found", err)
		}
	}
	if _, err := p.open(t.Context()); !errors.Is(err, fault.NotFound) {
		t.Errorf("error %v, want kind not found", err)
	}
}

// A reader that takes nothing for too long loses its connection.
func TestOwner_EndsAReaderThatTakesNothing(t *testing.T) {
	p := newPair(t, Options{Stall: 50 * time.Millisecond}, Options{}, large())
	p.stuck()
	until(t, "its connection ends", func() bool { return p.owner.Stats().Readers == 0 })
	if sent, all := p.owner.Stats().Sent, uint64(p.far.Geometry().Bytes()); sent >= all {
		t.Errorf("%d bytes of %d were sent to nobody", sent, all)
	}
	p.owner.o.Stall = time.Hour // a slow machine is no stalled reader
	s := p.source()
	noError(t, s.Copy(t.Context(), nil, p.plan()))
}

// Strangers that say nothing have a bounded number of connections, and keep nobody out.
func TestOwner_BoundsStrangers(t *testing.T) {
	p := newPair(t, Options{Handshake: time.Hour, MaxConns: 2}, Options{Streams: 1}, small())
	var strangers []net.Conn
	for range maxWaiting {
		strangers = append(strangers, dial(t, p.owner.Addr()))
	}
	until(t, "all are there", func() bool { return p.owner.Stats().Readers == maxWaiting })
	s := p.source()
	noError(t, s.Copy(t.Context(), nil, p.plan()))
	if !p.same() {
		t.Error("other bytes")
	}
	if n := ends(t, strangers[0]); n > 0 { // the oldest, whose place it took
		t.Errorf("%d bytes for a stranger", n)
	}
	until(t, "the others are there still, beside two of a reader", func() bool { return p.owner.Stats().Readers == maxWaiting-1+2 })
	if err := p.log.first(t); !errors.Is(err, fault.Full) {
		t.Errorf("the logger was told %v", err)
	}
	for _, c := range strangers {
		noError(t, c.Close())
	}
}

// However many strangers come from one network, who comes from another one is not turned
// out, and may be slow.
func TestOwner_StrangersTurnOutEachOther(t *testing.T) {
	p := newPair(t, Options{Handshake: time.Hour}, Options{}, small())
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	c, err := from.DialContext(t.Context(), "tcp", p.owner.Addr())
	noError(t, err)
	defer func() { noError(t, c.Close()) }()
	until(t, "it is there", func() bool { return p.owner.Stats().Readers == 1 })
	for range 4 * maxWaiting {
		defer func(c net.Conn) { noError(t, c.Close()) }(dial(t, p.owner.Addr()))
	}
	until(t, "they have turned out each other", func() bool { return p.owner.Stats().Refused == 3*maxWaiting+1 })
	noError(t, proveReader(c, p.owner.o.Key, modePlain, nil))
	_, err = c.Write(appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint()))
	noError(t, err)
	noError(t, expect(c, sayDone))
}

func TestLobby(t *testing.T) {
	conn := func(address string) net.Conn {
		return &fakeConn{addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))}
	}
	var l lobby
	slow := conn("10.0.0.1:1")
	if l.add(slow) != nil || l.remove(conn("10.0.0.1:1")) || !l.remove(slow) || l.remove(slow) {
		t.Error("one that was added is not there once")
	}
	l.add(slow)
	// The addresses that one host can have are one network.
	var flood []net.Conn
	for i := range 3 * maxWaiting {
		flood = append(flood, conn(fmt.Sprintf("[2001:db8:0:1::%x]:%d", i, 1+i)))
		want := net.Conn(nil)
		if over := i - (maxWaiting - 1); over >= 0 {
			want = flood[over]
		}
		if out := l.add(flood[i]); out != want {
			t.Fatalf("%d: %v had to go, and not %v", i, out, want)
		}
	}
	// Where nobody has more than others, the oldest goes.
	l = lobby{}
	l.add(slow)
	for i := range maxWaiting - 1 {
		l.add(conn(fmt.Sprintf("[::ffff:10.1.0.%d]:1", i)))
	}
	if out := l.add(conn("10.2.0.1:1")); out != slow || len(l.all) != maxWaiting {
		t.Errorf("%v had to go, and not the oldest", out)
	}
}

type fakeConn struct {
	net.Conn
	addr net.Addr
}

func (c *fakeConn) RemoteAddr() net.Addr { return c.addr }

// A reader that is one too many is told so.
func TestOwner_BoundsReaders(t *testing.T) {
	p := newPair(t, Options{MaxConns: 2}, Options{Streams: 8}, large())
	s := p.source() // one is for what is joined, and one for pages
	faulttest.Refused(t, s.Copy(t.Context(), nil, p.plan()), fault.Full, "readers")
	until(t, "the connection for pages is free again", func() bool {
		_, err := s.Epoch(t.Context(), 0)
		return err == nil
	})
	_, err := p.open(t.Context())
	faulttest.Refused(t, err, fault.Full, "readers")
	if err := p.log.first(t); !errors.Is(err, fault.Full) {
		t.Errorf("the logger was told %v", err)
	}
	until(t, "who was refused has gone", func() bool { return p.owner.Stats().Readers <= 2 })
}

// Close ends readers that are in the middle of it.
func TestEngine_CloseWithReaders(t *testing.T) {
	p := newPair(t, Options{Stall: time.Hour}, Options{}, large())
	c, idle, silent := p.stuck(), p.source(), dial(t, p.owner.Addr())
	_, err := idle.Epoch(t.Context(), 0)
	noError(t, err)
	noError(t, p.owner.Close())
	ends(t, c)
	ends(t, silent)
	if _, err := idle.Epoch(t.Context(), 0); !errors.Is(err, fault.NotFound) { // nobody listens
		t.Errorf("error %v, want kind not found", err)
	}
	if err := idle.Join(transfer.Epoch{}); !errors.Is(err, fault.NotFound) {
		t.Errorf("error %v, want kind not found", err)
	}
	noError(t, p.publisher.Close())
}

// descriptors counts this process's.
func descriptors(tb testing.TB) int {
	tb.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	noError(tb, err)
	return len(dir)
}

// Many readers at the same time get what is theirs, and leave nothing behind.
func TestEngine_ManyReaders(t *testing.T) {
	for _, m := range modes()[:2] {
		t.Run(m.name, func(t *testing.T) {
			p := newPair(t, m.o, m.o, direct())
			was := descriptors(t)
			var sources []transfer.Source
			for range 4 {
				s, err := p.open(t.Context())
				noError(t, err)
				sources = append(sources, s)
			}
			size := p.near.PageSize()
			var readers sync.WaitGroup
			for id := range page.ID(12) {
				readers.Go(func() {
					s := sources[int(id)%len(sources)]
					for range 20 {
						var plan transfer.Plan
						err := plan.Set(0, size, []page.ID{id}, []page.ID{id}, size)
						if err == nil {
							err = s.Copy(t.Context(), nil, &plan)
						}
						if _, epochErr := s.Epoch(t.Context(), uint32(id)); err == nil {
							err = epochErr
						}
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			readers.Wait()
			if !p.same() {
				t.Error("other bytes")
			}
			for _, s := range sources {
				noError(t, s.Close())
			}
			until(t, "all connections have ended", func() bool { return p.owner.Stats().Readers == 0 })
			if n := descriptors(t); n != was {
				t.Errorf("%d descriptors are open, and were %d before", n, was)
			}
		})
	}
}

// What a reader joins ends when it leaves or has gone, and what has ended otherwise takes
// no room.
func TestOwner_Joins(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	arena, err := page.NewArena(page.ArenaOptions{Pages: p.far.Pages()})
	noError(t, err)
	all, err := arena.Acquire(nil, p.far.Pages())
	noError(t, err)
	noError(t, arena.Seal(all))
	publisher, err := transfer.NewPublisher(transfer.PublisherOptions{
		Cache: p.far, Host: p.host, Holder: transfer.HoldArena(arena), Engines: []transfer.Engine{p.owner}, Grace: time.Millisecond,
	})
	noError(t, err)
	t.Cleanup(func() { noError(t, publisher.Close()) })
	publish := func() *transfer.Descriptor {
		d, err := publisher.Publish(transfer.Lease{Pages: all[:1], TTL: time.Minute})
		noError(t, err)
		return d
	}
	first := publish()
	p.d = first
	s, err := p.open(t.Context())
	noError(t, err)
	for range 2 {
		noError(t, s.Join(first.Epoch))
	}
	noError(t, s.Join(transfer.Epoch{Word: 1 << 30})) // there is none
	noError(t, s.Leave(first.Epoch))
	until(t, "what was left has ended", func() bool { return publisher.Leased() == 0 })
	for range 4 * leastSweep {
		d := publish()
		noError(t, s.Join(d.Epoch))
		noError(t, publisher.Ack(d.Owner, d.Epoch)) // on another channel
	}
	last := publish()
	noError(t, s.Join(last.Epoch))
	_, err = s.Epoch(t.Context(), 0)
	noError(t, err)
	noError(t, s.Close())
	until(t, "what a reader had joined has ended with it", func() bool { return publisher.Leased() == 0 })
}

// Sweeping forgets what has ended, and nothing else.
func TestVisitor_ForgetsWhatHasEnded(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	left := 0
	x := p.owner.exports[p.d.Owner]
	x.Join = func(transfer.Epoch) func(bool) { return func(bool) { left++ } }
	v := &visitor{e: p.owner, tcp: dial(t, p.owner.Addr()), x: x, sweep: leastSweep}
	count, err := x.Words.LoadUint64(0)
	noError(t, err)
	there := transfer.Epoch{Count: count}
	noError(t, v.join(there))
	for i := range uint64(10 * leastSweep) {
		noError(t, v.join(transfer.Epoch{Count: count + 1 + i}))
	}
	if len(v.joined) > leastSweep || v.joined[there] == nil {
		t.Errorf("%d are joined", len(v.joined))
	}
	v.leave()
	if left != 1+10*leastSweep {
		t.Errorf("%d were left", left)
	}
}

// An owner that doesn't listen to what it is told doesn't stop its reader.
func TestSource_JoinNeverWaits(t *testing.T) {
	for _, m := range modes()[:2] {
		a, b := loopback(t)
		tcp := a.(*net.TCPConn)
		raw, err := tcp.SyscallConn()
		noError(t, err)
		p := newPair(t, m.o, m.o, small())
		var conn net.Conn = &eager{tcp, raw}
		var side sync.WaitGroup
		side.Go(func() {
			if _, err := p.owner.speak(context.Background(), b, rOwner); err != nil { // and reads no more
				t.Error(err)
			}
		})
		conn, err = p.reader.speak(t.Context(), conn, rReader)
		side.Wait()
		noError(t, err)
		s := &source{e: p.reader, address: "here", control: &link{e: p.reader, tcp: tcp, raw: raw, conn: conn}}
		for err == nil {
			err = s.Join(transfer.Epoch{Word: 1})
		}
		if !errors.Is(err, fault.Busy) {
			t.Errorf("error %v, want kind busy", err)
		}
		if err := s.Leave(transfer.Epoch{Word: 1}); fault.KindOf(err) == 0 {
			t.Errorf("error %v, want one with a kind", err)
		}
		noError(t, s.Close())
		_, _ = io.Copy(io.Discard, b) // what was told
	}
}
