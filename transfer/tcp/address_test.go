package tcp

import (
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

func TestCheckPeer(t *testing.T) {
	for address, good := range map[string]bool{
		"127.0.0.1:7":              true,
		"10.1.2.3:65535":           true,
		"[::1]:7":                  true,
		"[fe80::1%eth0]:7":         true,
		"node7.example:7":          true,
		"node_7:7":                 true,
		"7days.example.:7":         true,
		"":                         false,
		"127.0.0.1":                false,
		":7":                       false,
		"0.0.0.0:7":                false,
		"[::]:7":                   false,
		"[::ffff:0.0.0.0]:7":       false,
		"[::%lo]:7":                false,
		"[ff02::1%lo]:7":           false,
		"0:7":                      false, // resolvers take it for 0.0.0.0
		"0x0:7":                    false,
		"127.1:7":                  false,
		"1.2.3.0x4:7":              false,
		"224.0.0.1:7":              false,
		"[ff02::1]:7":              false,
		"255.255.255.255:7":        false,
		"127.0.0.1:0":              false,
		"127.0.0.1:65536":          false,
		"127.0.0.1:07":             false,
		"127.0.0.1:+7":             false,
		"127.0.0.1:http":           false,
		"a b:7":                    false,
		"a/b:7":                    false,
		"user@host:7":              false,
		"host\x00:7":               false,
		"höst:7":                   false,
		"...:7":                    false,
		string(make([]byte, 1000)): false,
	} {
		if err := checkPeer(address); (err == nil) != good || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: error %v, want good %t", address, err, good)
		}
	}
}

// An engine listens where it was told, on one address.
func TestNew_Listens(t *testing.T) {
	for _, listen := range []string{":0", "0.0.0.0:0", "[::]:0", "0:0", "*:0", "127.0.0.1", "localhost:http"} {
		_, err := New(Options{Key: testKey(), Listen: listen})
		faulttest.Refused(t, err, fault.Invalid, "Listen")
	}
	e, err := New(Options{Key: testKey(), Listen: "localhost:0"})
	noError(t, err)
	host, port, err := checkAddress(e.Addr())
	if err != nil || host != "localhost" || port == 0 {
		t.Errorf("readers come by %q, error %v", e.Addr(), err)
	}
	_, err = New(Options{Key: testKey(), Listen: e.listener.Addr().String()})
	faulttest.Refused(t, err, fault.Busy, "Listen")
	noError(t, e.Close())
	noError(t, e.Close())

	e, err = New(Options{Key: testKey(), Listen: "127.0.0.1:0", Advertise: "gate.example:7000"})
	noError(t, err)
	if e.Addr() != "gate.example:7000" {
		t.Errorf("readers come by %q", e.Addr())
	}
	noError(t, e.Close())
}

func TestNew_Refuses(t *testing.T) {
	for _, o := range []Options{
		{},
		{Key: testKey()[1:]},
		{Key: make([]byte, maxKeyBytes+1)},
		{Key: testKey(), Streams: -1},
		{Key: testKey(), Streams: maxStreams + 1},
		{Key: testKey(), MaxConns: -1},
		{Key: testKey(), Handshake: -1},
		{Key: testKey(), Stall: -1},
		{Key: testKey(), Advertise: "node7:7000"},
		{Key: testKey(), Listen: "127.0.0.1:0", Advertise: ":7000"},
	} {
		e, err := New(o)
		if err == nil {
			_ = e.Close()
		}
		faulttest.Refused(t, err, fault.Invalid)
	}
}

// What keeps a reader from its owner's address has a remedy, whatever it is.
func TestSource_FailedHasARemedy(t *testing.T) {
	s := &source{address: "node7:7000"}
	for _, err := range []error{unix.ECONNREFUSED, unix.ECONNRESET, unix.ENETUNREACH, unix.EHOSTUNREACH, &net.DNSError{Err: "no such host"}, io.EOF} {
		is := s.failed(t.Context(), &net.OpError{Op: "dial", Err: err})
		if fault.KindOf(is) == 0 || fault.RemedyOf(is) == "" {
			t.Errorf("error %v of kind %v has no remedy", is, fault.KindOf(is))
		}
	}
}

// Who doesn't listen lets nobody read; pages that the host can't address aren't offered.
func TestEngine_Offer(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	_, _, err := p.reader.Offer(transfer.Export{Owner: transfer.NewOwnerID(), Cache: p.far})
	faulttest.Refused(t, err, fault.Unsupported, "doesn't listen")
	_, _, err = p.owner.Offer(transfer.Export{Owner: p.d.Owner, Cache: p.far})
	faulttest.Refused(t, err, fault.Exists, p.d.Owner.String())

	g := p.far.Geometry()
	far, err := kv.Wrap(g, []*device.Memory{device.NewMemory(device.MemoryOptions{Device: "cuda:0", Base: 1 << 40, Size: g.Bytes()})})
	noError(t, err)
	_, _, err = p.owner.Offer(transfer.Export{Owner: transfer.NewOwnerID(), Cache: far})
	faulttest.Refused(t, err, fault.Unsupported, "cuda:0")
	if fault.RemedyOf(err) == "" {
		t.Error("no remedy")
	}
	noError(t, p.owner.Close())
	_, _, err = p.owner.Offer(transfer.Export{Owner: transfer.NewOwnerID(), Cache: p.far})
	faulttest.Refused(t, err, fault.Closed)
}

// A publisher leaves out an engine that doesn't listen, and says so only when it has no
// other.
func TestEngine_ThatDoesNotListenIsLeftOut(t *testing.T) {
	p := newPair(t, Options{}, Options{}, small())
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	defer func() { noError(t, host.Close()) }()
	for _, c := range []struct {
		engines []transfer.Engine
		offers  int
	}{{[]transfer.Engine{p.reader}, 0}, {[]transfer.Engine{p.reader, p.owner}, 1}} {
		publisher, err := transfer.NewPublisher(transfer.PublisherOptions{Cache: p.far, Host: host, Engines: c.engines})
		noError(t, err)
		d, err := publisher.Descriptor()
		if c.offers > 0 {
			noError(t, err)
			if len(d.Offers) != c.offers {
				t.Errorf("offers %+v", d.Offers)
			}
		} else {
			faulttest.Refused(t, err, fault.Unsupported, "engine tcp: this side doesn't listen")
			if fault.RemedyOf(err) != "set Options.Listen" {
				t.Errorf("remedy %q", fault.RemedyOf(err))
			}
		}
		noError(t, publisher.Close())
	}
}

// An offer is anybody's bytes.
func FuzzDecodeOffer(f *testing.F) {
	f.Add(newOffer("127.0.0.1:7", false))
	f.Add(newOffer("[::1]:7", true))
	f.Add([]byte{offerVersion, 0xff, ':'})
	f.Fuzz(func(t *testing.T, b []byte) {
		address, tls, err := decodeOffer(b)
		if err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("error %v has no kind", err)
			}
			return
		}
		if string(newOffer(address, tls)) != string(b) {
			t.Errorf("%q is not the encoding of %q, TLS %t", b, address, tls)
		}
	})
}

func TestCheck(t *testing.T) {
	for _, m := range modes()[:2] {
		r, err := Check(t.Context(), m.o)
		noError(t, err)
		if r.RoundTrip <= 0 {
			t.Errorf("%s: %+v", m.name, r)
		}
	}
	_, err := Check(t.Context(), Options{Listen: ":0"})
	faulttest.Refused(t, err, fault.Invalid)
}
