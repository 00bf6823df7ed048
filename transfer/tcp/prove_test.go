package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

// shake runs both sides of a handshake, each until its end.
func shake(tb testing.TB, reader, owner func(c net.Conn) error) (readerErr, ownerErr error) {
	tb.Helper()
	a, b := loopback(tb)
	var sides sync.WaitGroup
	sides.Go(func() { readerErr = errors.Join(reader(a), a.Close()) })
	sides.Go(func() { ownerErr = errors.Join(owner(b), b.Close()) })
	sides.Wait()
	return readerErr, ownerErr
}

// loopback returns the ends of a connection.
func loopback(tb testing.TB) (a, b net.Conn) {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	noError(tb, err)
	a = dial(tb, l.Addr().String())
	b, err = l.Accept()
	noError(tb, errors.Join(err, l.Close()))
	tb.Cleanup(func() { _ = b.Close() })
	return a, b
}

func dial(tb testing.TB, address string) net.Conn {
	tb.Helper()
	c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", address)
	noError(tb, err)
	tb.Cleanup(func() { _ = c.Close() }) // a test may have closed it
	return c
}

func as(side func(io.ReadWriter, []byte, byte, []byte) error, key []byte, mode byte, binding string) func(net.Conn) error {
	return func(c net.Conn) error { return side(c, key, mode, []byte(binding)) }
}

func TestProve(t *testing.T) {
	other := append([]byte{8}, testKey()[1:]...)
	for _, c := range []struct {
		name          string
		reader, owner func(net.Conn) error
		kind          fault.Kind
		says          string
	}{
		{"one key", as(proveReader, testKey(), modePlain, ""), as(proveOwner, testKey(), modePlain, ""), 0, ""},
		{"one key and binding", as(proveReader, testKey(), modeTLS, "x"), as(proveOwner, testKey(), modeTLS, "x"), 0, ""},
		{"two keys", as(proveReader, other, modePlain, ""), as(proveOwner, testKey(), modePlain, ""), fault.Invalid, "different keys"},
		{"two bindings", as(proveReader, testKey(), modeTLS, "x"), as(proveOwner, testKey(), modeTLS, "y"), fault.Invalid, "somebody is between"},
		{"a reader without TLS", as(proveReader, testKey(), modePlain, ""), as(proveOwner, testKey(), modeTLS, ""), fault.Unsupported, "configured for"},
		{"an owner without TLS", as(proveReader, testKey(), modeTLS, ""), as(proveOwner, testKey(), modePlain, ""), fault.Unsupported, "configured for"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, o := shake(t, c.reader, c.owner)
			if c.kind == 0 {
				noError(t, errors.Join(r, o))
				return
			}
			faulttest.Refused(t, r, c.kind, c.says)
			faulttest.Refused(t, o, c.kind, c.says)
		})
	}
}

// tape keeps what one side has written.
type tape struct {
	net.Conn
	b bytes.Buffer
}

func (t *tape) Write(b []byte) (int, error) {
	t.b.Write(b)
	return t.Conn.Write(b)
}

// play writes b, and reads until the other side has said what it has to say.
func play(b []byte) func(net.Conn) error {
	return func(c net.Conn) error {
		if _, err := c.Write(b); err != nil {
			return err
		}
		_, err := io.CopyN(io.Discard, c, helloBytes+proofBytes+replyBytes)
		return err
	}
}

// What was said in one handshake is worth nothing in another one.
func TestProve_Replayed(t *testing.T) {
	var reader, owner *tape
	r, o := shake(t, func(c net.Conn) error {
		reader = &tape{Conn: c}
		return proveReader(reader, testKey(), modePlain, nil)
	}, func(c net.Conn) error {
		owner = &tape{Conn: c}
		return proveOwner(owner, testKey(), modePlain, nil)
	})
	noError(t, errors.Join(r, o))
	_, o = shake(t, play(reader.b.Bytes()), as(proveOwner, testKey(), modePlain, ""))
	faulttest.Refused(t, o, fault.Invalid, "different keys")
	r, _ = shake(t, as(proveReader, testKey(), modePlain, ""), func(c net.Conn) error {
		_, err := c.Write(owner.b.Bytes())
		_, _ = io.CopyN(io.Discard, c, helloBytes+proofBytes)
		return err
	})
	faulttest.Refused(t, r, fault.Invalid, "different keys")
}

// A side is not satisfied by what it said itself: neither word for word, nor with the
// hello made the other role's.
func TestProve_Reflected(t *testing.T) {
	r, _ := shake(t, as(proveReader, testKey(), modePlain, ""), func(c net.Conn) error {
		_, err := io.Copy(c, c)
		return err
	})
	faulttest.Refused(t, r, fault.Invalid, "role")

	// The owner's own proof of this very handshake, as the reader's.
	for _, label := range []string{ownerLabel, readerLabel} {
		_, o := shake(t, func(c net.Conn) error {
			mine := newHello(modePlain, rReader)
			if _, err := c.Write(mine.append(nil)); err != nil {
				return err
			}
			theirs, err := readHello(c, rOwner)
			if err != nil {
				return err
			}
			var proof [proofBytes]byte
			if _, err := io.ReadFull(c, proof[:]); err != nil {
				return err
			}
			if !bytes.Equal(proof[:], prove(testKey(), ownerLabel, &mine, &theirs, nil)) {
				return errors.New("the owner's proof is another one")
			}
			_, err = c.Write(prove(testKey(), label, &mine, &theirs, nil))
			_, _ = io.CopyN(io.Discard, c, replyBytes)
			return err
		}, as(proveOwner, testKey(), modePlain, ""))
		if label == readerLabel { // the control: it is the label that is refused
			noError(t, o)
			continue
		}
		faulttest.Refused(t, o, fault.Invalid, "different keys")
	}
}

func TestProve_RefusesAnotherVersion(t *testing.T) {
	h := newHello(modePlain, rReader)
	h.version = version + 1
	r, o := shake(t, func(c net.Conn) error {
		if _, err := c.Write(h.append(nil)); err != nil {
			return err
		}
		_, err := readHello(c, rOwner) // says which version it is
		return err
	}, as(proveOwner, testKey(), modePlain, ""))
	noError(t, r)
	faulttest.Refused(t, o, fault.Unsupported, "version 2")
	h.role = rOwner
	r, _ = shake(t, as(proveReader, testKey(), modePlain, ""), play(append(h.append(nil), make([]byte, proofBytes)...)))
	faulttest.Refused(t, r, fault.Unsupported, "version 2")
}

// Both sides say that the keys differ, and no page has moved.
func TestEngine_WrongKey(t *testing.T) {
	for _, m := range modes()[:2] {
		t.Run(m.name, func(t *testing.T) {
			other := m.o
			other.Key = append([]byte{8}, testKey()[1:]...)
			p := newPair(t, m.o, other, small())
			_, err := p.open(t.Context())
			faulttest.Refused(t, err, fault.Invalid, "different keys", p.owner.Addr())
			faulttest.Refused(t, p.log.first(t), fault.Invalid, "different keys")
			if s := p.owner.Stats(); s.Accepted != 0 || s.Refused != 1 || s.Sent != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Who is configured for TLS doesn't speak without it, whatever an offer says.
func TestEngine_Downgrade(t *testing.T) {
	for _, c := range []struct {
		name          string
		owner, reader bool
	}{{"a reader without TLS", true, false}, {"an owner without TLS", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, Options{TLS: c.owner}, Options{TLS: c.reader}, small())
			_, err := p.open(t.Context())
			faulttest.Refused(t, err, fault.Unsupported, "configured for", p.owner.Addr())
			if m, ok := errors.AsType[*ModeError](err); !ok || m.TLS != c.owner {
				t.Errorf("error %v, want that TLS of the other side is %v", err, c.owner)
			}
			if s := p.owner.Stats(); s.Refused != 0 {
				t.Errorf("it connected: %+v", s)
			}
			p.d.Offers[0].Data = newOffer(p.owner.Addr(), c.reader) // a lie
			if _, err := p.open(t.Context()); fault.KindOf(err) == 0 {
				t.Errorf("error %v, want one with a kind", err)
			}
			faulttest.Refused(t, p.log.first(t), fault.Unsupported, "configured for")
		})
	}
}

// Who sits between two sides with TLS has keys with each that are not the other's.
func TestEngine_ManInTheMiddle(t *testing.T) {
	p := newPair(t, Options{TLS: true}, Options{TLS: true}, small())
	theirs, err := newSecrets()
	noError(t, err)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	noError(t, err)
	var middle sync.WaitGroup
	middle.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		a, b := tls.Server(c, theirs.owner), tls.Client(dial(t, p.owner.Addr()), theirs.reader)
		middle.Go(func() { _, _ = io.Copy(a, b); _ = a.Close() })
		_, _ = io.Copy(b, a)
		_ = b.Close()
	})
	_, err = p.by(l.Addr().String()).open(t.Context())
	faulttest.Refused(t, err, fault.Invalid, "somebody is between")
	faulttest.Refused(t, p.log.first(t), fault.Invalid, "somebody is between")
	noError(t, l.Close())
	middle.Wait()
}

// FuzzProveOwner gives an owner a reader's side of a handshake that nobody with the key
// has written.
func FuzzProveOwner(f *testing.F) {
	h := newHello(modePlain, rReader)
	f.Add(append(h.append(nil), make([]byte, proofBytes)...))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &script{in: bytes.NewReader(b)}
		if err := proveOwner(c, testKey(), modePlain, nil); err == nil {
			t.Fatalf("%x is a proof", b)
		}
		if n := c.out.Len(); n > helloBytes+proofBytes+replyBytes {
			t.Errorf("%d bytes for a stranger", n)
		}
	})
}

// FuzzProveReader is the other side of it.
func FuzzProveReader(f *testing.F) {
	h := newHello(modePlain, rOwner)
	f.Add(append(h.append(nil), make([]byte, proofBytes+replyBytes)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := proveReader(&script{in: bytes.NewReader(b)}, testKey(), modePlain, nil); err == nil {
			t.Fatalf("%x is a proof", b)
		}
	})
}

// script is a connection whose other side says what it has to say, whatever it hears.
type script struct {
	in  io.Reader
	out bytes.Buffer
}

func (s *script) Read(b []byte) (int, error)  { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error) { return s.out.Write(b) }
