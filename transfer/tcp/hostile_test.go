package tcp

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// admitted connects as a reader that has the key, and says whatever it likes then.
func (p *pair) admitted(opened bool) net.Conn {
	p.Helper()
	c := dial(p, p.owner.Addr())
	noError(p, proveReader(c, p.owner.o.Key, modePlain, nil))
	if opened {
		_, err := c.Write(appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint()))
		noError(p, err)
		noError(p, expect(c, sayDone))
	}
	return c
}

// resum gives a copy that was changed the sum of what it is now.
func resum(ask []byte) {
	binary.LittleEndian.PutUint64(ask[headBytes:], xxh3.Hash(ask[headBytes+sumBytes:]))
}

func expect(c io.Reader, kind byte) error {
	var b [replyBytes]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return err
	}
	_, err := decodeReply(&b, kind)
	return err
}

// ends tells how long what the other side says is, which must come to its end.
func ends(tb testing.TB, c net.Conn) int64 {
	tb.Helper()
	noError(tb, c.SetDeadline(time.Now().Add(patience)))
	n, err := io.Copy(io.Discard, c)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		tb.Fatal("the connection does not end")
	}
	return n
}

// Whatever a stranger says, and wherever it stops, costs its connection and nothing else.
func TestOwner_RefusesStrangers(t *testing.T) {
	says := func(spoil func(h *hello)) []byte {
		h := newHello(modePlain, rReader)
		spoil(&h)
		return h.append(nil)
	}
	p := newPair(t, Options{Handshake: 200 * time.Millisecond}, Options{}, small())
	for name, b := range map[string][]byte{
		"nothing":           nil,
		"a byte":            {'K'},
		"half a hello":      says(func(*hello) {})[:20],
		"a hello":           says(func(*hello) {}),
		"zeros as proof":    append(says(func(*hello) {}), make([]byte, proofBytes)...),
		"noise as proof":    append(says(func(*hello) {}), bytes.Repeat([]byte{0xaa}, proofBytes)...),
		"half a proof":      append(says(func(*hello) {}), make([]byte, proofBytes/2)...),
		"another version":   says(func(h *hello) { h.version = 9 }),
		"another mode":      says(func(h *hello) { h.mode = modeTLS }),
		"an unknown mode":   says(func(h *hello) { h.mode = 9 }),
		"the owner's role":  says(func(h *hello) { h.role = rOwner }),
		"HTTP":              []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"TLS":               {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3},
		"1 MiB of zeros":    make([]byte, 1<<20),
		"requests at once":  appendWord(appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint()), 0),
		"a hello, requests": append(says(func(*hello) {}), appendWord(appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint()), 0)...),
	} {
		c := dial(t, p.owner.Addr())
		_, _ = c.Write(b) // it may be closed by then
		if n := ends(t, c); n > helloBytes+proofBytes+replyBytes {
			t.Errorf("%s: %d bytes for a stranger", name, n)
		}
	}
	if s := p.owner.Stats(); s.Accepted != 0 || s.Sent != 0 {
		t.Errorf("%+v", s)
	}
	s := p.source()
	noError(t, s.Copy(t.Context(), nil, p.plan()))
}

// A reader that has the key, and says what it must not, costs its connection.
func TestOwner_RefusesRequests(t *testing.T) {
	p := newPair(t, Options{Handshake: 200 * time.Millisecond}, Options{}, small())
	open := appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint())
	one := order{runs: []run{{1, 1}}, to: 1}
	lying := one.append(nil)
	lying[headBytes+sumBytes+16]++ // runs
	resum(lying)
	changed := one.append(nil)
	changed[headBytes+copyHead]++ // a page
	for name, c := range map[string]struct {
		opened bool
		b      []byte
	}{
		"a word before open":      {false, appendWord(nil, 0)},
		"a copy before open":      {false, one.append(nil)},
		"a join before open":      {false, appendEpoch(nil, askJoin, transfer.Epoch{})},
		"another owner":           {false, appendOpen(nil, transfer.OwnerID{1}, p.d.Geometry.Fingerprint())},
		"another geometry":        {false, appendOpen(nil, p.d.Owner, kv.Fingerprint{1})},
		"half an open":            {false, open[:20]},
		"open, twice":             {true, open},
		"a word that is none":     {true, appendWord(nil, math.MaxUint32)},
		"an unknown kind":         {true, appendHead(nil, head{kind: 99})},
		"a hostile length":        {true, appendHead(nil, head{kind: askCopy, body: math.MaxUint32})},
		"a long join":             {true, appendHead(nil, head{kind: askJoin, body: 13})},
		"half a head":             {true, appendWord(nil, 0)[:5]},
		"half a body":             {true, appendWord(nil, 0)[:10]},
		"a copy without its runs": {true, one.append(nil)[:headBytes+copyHead]},
		"a copy that lies":        {true, lying},
		"a copy that changed":     {true, changed},
		"pages that are none":     {true, (&order{runs: []run{{page.ID(p.far.Pages()), 1}}, to: 1}).append(nil)},
		"tokens that are none":    {true, (&order{parts: []part{{1, 0, 9}}, to: 1}).append(nil)},
		"bytes that are none":     {true, (&order{runs: []run{{1, 1}}, to: math.MaxInt64}).append(nil)},
		"bytes backwards":         {true, (&order{runs: []run{{1, 1}}, from: 2, to: 1}).append(nil)},
		"nothing":                 {false, nil},
		"HTTP":                    {true, []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")},
	} {
		x := p.admitted(c.opened)
		_, err := x.Write(c.b)
		noError(t, err)
		if n := ends(t, x); n > replyBytes {
			t.Errorf("%s: %d bytes of an answer", name, n)
		}
	}
	if s := p.owner.Stats(); s.Sent != 0 {
		t.Errorf("%+v", s)
	}
	// A reader may be silent for longer than it may take to say something.
	c := p.admitted(true)
	until(t, "the others have ended", func() bool { return p.owner.Stats().Readers == 1 })
	_, err := c.Write(appendWord(nil, 0))
	noError(t, err)
	noError(t, expect(c, sayValue))
}

// bad is an owner that has the key, and says what it must not.
type bad struct {
	l     net.Listener
	conns sync.WaitGroup
}

// newBad answers each open, and each copy by say.
func newBad(tb testing.TB, say func(c net.Conn)) *bad {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	noError(tb, err)
	x := &bad{l: l}
	x.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			x.conns.Go(func() {
				defer func() { _ = c.Close() }()
				if proveOwner(c, testKey(), modePlain, nil) != nil {
					return
				}
				in := bufio.NewReader(c)
				for {
					var b [headBytes]byte
					if _, err := io.ReadFull(in, b[:]); err != nil {
						return
					}
					h, err := decodeHead(&b)
					if err == nil {
						_, err = in.Discard(h.body)
					}
					switch {
					case err != nil:
						return
					case h.kind == askOpen:
						_, _ = c.Write(put(reply{kind: sayDone}))
					case h.kind != askJoin && h.kind != askLeave:
						say(c)
						return
					}
				}
			})
		}
	})
	tb.Cleanup(func() {
		noError(tb, l.Close())
		x.conns.Wait()
	})
	return x
}

// An owner that has the key, and says what it must not, fails the read. It gets no byte of
// the reader's, and none of the reader's pages but those that it was asked for.
func TestReader_RefusesAnswers(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	bytesAPage := p.near.Geometry().PageBytes()
	body := make([]byte, bytesAPage)
	for name, say := range map[string][]byte{
		"nothing":            nil,
		"half a header":      put(reply{kind: sayData, flags: flagSums, body: 1})[:10],
		"another kind":       put(reply{kind: sayValue}),
		"no sums":            append(put(reply{kind: sayData, body: uint32(bytesAPage)}), body...),
		"a wrong sum":        append(put(reply{kind: sayData, flags: flagSums, body: uint32(bytesAPage)}), body...),
		"a short segment":    append(put(reply{kind: sayData, flags: flagSums, body: uint32(bytesAPage - 1)}), body...),
		"a long segment":     append(put(reply{kind: sayData, flags: flagSums, body: uint32(bytesAPage + 1)}), make([]byte, bytesAPage+1)...),
		"a hostile length":   append(put(reply{kind: sayData, flags: flagSums, body: math.MaxUint32}), make([]byte, 1<<20)...),
		"half a segment":     append(put(reply{kind: sayData, flags: flagSums, body: uint32(bytesAPage)}), body[:bytesAPage/2]...),
		"gone":               put(reply{kind: sayFailed, code: codeGone}),
		"an unknown failure": put(reply{kind: sayFailed, code: 777}),
		"noise":              bytes.Repeat([]byte{0xa5}, 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			x := newBad(t, func(c net.Conn) { _, _ = c.Write(say) })
			p.TB = t
			s := p.by(x.l.Addr().String()).source()
			want := bytes.Clone(mem(t, p.near))
			var plan transfer.Plan
			noError(t, plan.Set(0, 8, []page.ID{4}, []page.ID{2}, 8))
			if err := s.Copy(t.Context(), nil, &plan); fault.KindOf(err) == 0 {
				t.Errorf("error %v, want one with a kind", err)
			}
			if _, err := s.Epoch(t.Context(), 0); name != "another kind" && fault.KindOf(err) == 0 {
				t.Errorf("the epoch: error %v, want one with a kind", err)
			}
			got := mem(t, p.near)
			copy(want[4*bytesAPage:][:bytesAPage], got[4*bytesAPage:][:bytesAPage])
			if !bytes.Equal(got, want) {
				t.Error("other pages were written")
			}
		})
	}
}

// FuzzVisitor is an owner's connection from the proof on, with any requests.
func FuzzVisitor(f *testing.F) {
	p := newPair(f, Options{Handshake: time.Hour, Stall: time.Hour}, Options{}, small())
	open := appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint())
	f.Add(open, []byte{})
	f.Add(open, appendWord(nil, 3))
	f.Add(open, (&order{sums: true, runs: []run{{1, 2}}, parts: []part{{4, 1, 5}}, from: 3, to: 700}).append(nil))
	f.Add(open, appendEpoch(appendEpoch(nil, askJoin, transfer.Epoch{Count: 1}), askLeave, transfer.Epoch{Count: 1}))
	f.Fuzz(func(t *testing.T, open, requests []byte) {
		requests = bytes.Clone(requests)
		for b := requests; len(b) >= headBytes; { // or no copy would get behind its sum
			h, err := decodeHead((*[headBytes]byte)(b))
			if err != nil || len(b) < headBytes+h.body {
				break
			}
			if h.kind == askCopy {
				resum(b[:headBytes+h.body])
			}
			b = b[headBytes+h.body:]
		}
		a, b := net.Pipe()
		v := &visitor{e: p.owner, tcp: b, conn: b}
		noError(t, p.owner.enter(b))
		var sides sync.WaitGroup
		sides.Go(func() {
			if err := v.serve(); err == nil {
				t.Error("a connection has no end")
			}
			v.leave()
			noError(t, p.owner.exit(v))
		})
		sides.Go(func() { _, _ = io.Copy(io.Discard, a) })
		_, _ = a.Write(open)
		_, _ = a.Write(requests)
		_ = a.Close()
		sides.Wait()
	})
}

// FuzzReceive is a reader that has asked for pages, with any answer.
func FuzzReceive(f *testing.F) {
	p := newPair(f, Options{}, Options{}, small())
	form, err := newForm(p.near)
	noError(f, err)
	n := form.pageBytes + 2*form.tokenBytes
	good := append(put(reply{kind: sayData, body: uint32(n)}), make([]byte, n)...)
	f.Add(good, false)
	f.Add(good, true)
	f.Fuzz(func(t *testing.T, answer []byte, sums bool) {
		e := p.reader
		fl := e.flow()
		defer e.flows.Put(fl)
		var plan transfer.Plan
		noError(t, plan.Set(0, 10, []page.ID{4, 5}, []page.ID{2, 3}, 8))
		fl.order.sums = sums
		form.share(&plan, 0, n, &fl.order, &fl.local)
		a, b := net.Pipe()
		var side sync.WaitGroup
		side.Go(func() {
			_, _ = a.Write(answer)
			_ = a.Close()
		})
		err := (&link{e: e, conn: b}).receive(fl, form)
		_ = b.Close()
		side.Wait()
		if err == nil && len(answer) < replyBytes+int(n) {
			t.Errorf("%d bytes are enough", len(answer))
		}
	})
}

// A handshake of TLS that doesn't end is ended, and so is one of something else.
func TestOwner_RefusesStrangersWithTLS(t *testing.T) {
	p := newPair(t, Options{TLS: true, Handshake: 200 * time.Millisecond}, Options{TLS: true}, small())
	for name, b := range map[string]string{
		"nothing": "", "a beginning": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "HTTP": "GET / HTTP/1.1\r\n\r\n",
		"a long record": "\x16\x03\x01\xff\xff" + strings.Repeat("x", 1<<17),
	} {
		c := dial(t, p.owner.Addr())
		_, _ = io.WriteString(c, b) // it may be closed by then
		if n := ends(t, c); n > 256 {
			t.Errorf("%s: %d bytes for a stranger", name, n)
		}
	}
	// TLS is no proof.
	c := tls.Client(dial(t, p.owner.Addr()), p.reader.secrets.reader)
	_, err := fmt.Fprintf(c, "%s", appendOpen(nil, p.d.Owner, p.d.Geometry.Fingerprint()))
	noError(t, err)
	if n := ends(t, c); n > 0 {
		t.Errorf("%d bytes for a stranger with TLS", n)
	}
	old := p.reader.secrets.reader.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if err := tls.Client(dial(t, p.owner.Addr()), old).HandshakeContext(t.Context()); err == nil {
		t.Error("TLS 1.2 is spoken")
	}
	noError(t, p.source().Copy(t.Context(), nil, p.plan()))
}
