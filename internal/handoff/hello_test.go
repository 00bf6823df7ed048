package handoff

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// What is handed over arrives whole, whatever its size.
func TestHello_Arrives(t *testing.T) {
	descriptors(t)
	fd := memfd(t, "bytes", 0)
	random := rand.NewChaCha8([32]byte{1})
	for _, size := range []struct{ payload, files int }{
		{0, 0},
		{1, 0},
		{0, 1},
		{100, 3},
		{chunkBytes, chunkFiles},
		{chunkBytes + 1, chunkFiles + 1},
		{0, 3 * chunkFiles},
		{MaxPayload, 2},
	} {
		payload := make([]byte, size.payload)
		_, _ = random.Read(payload) // never fails
		l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
			if err := c.SendHello(ctx, payload, slices.Repeat([]int{fd}, size.files)); err != nil {
				t.Error(err)
			}
		}})
		_, h := dial(t, l, DialOptions{})
		if !bytes.Equal(h.Payload, payload) || len(h.Files) != size.files {
			t.Errorf("%d bytes and %d descriptors of %d and %d", len(h.Payload), len(h.Files), size.payload, size.files)
		}
		for _, f := range h.Files {
			var b [5]byte
			if _, err := unix.Pread(f, b[:], 0); err != nil || string(b[:]) != "bytes" {
				t.Errorf("a descriptor reads %q, error %v", b, err)
			}
			if flags, err := unix.FcntlInt(uintptr(f), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("a descriptor has the flags %#x, error %v", flags, err)
			}
		}
		h.Close()
		noError(t, l.Close())
	}
}

func TestSendHello_Refuses(t *testing.T) {
	c := &Conn{}
	wantKind(t, c.SendHello(t.Context(), make([]byte, MaxPayload+1), nil), fault.Invalid, "bytes are more than")
	wantKind(t, c.SendHello(t.Context(), nil, make([]int, MaxFiles+1)), fault.Invalid, "descriptors are more than")
}

func number(n int, payload ...byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(n)), payload...)
}

// A listener that doesn't keep to the form costs its caller one error, and nothing stays
// open.
func TestDial_RefusesAHelloThatIsNone(t *testing.T) {
	descriptors(t)
	fd := memfd(t, "", 0)
	good := appendHead(nil, head{payload: 2, files: 2})
	version := bytes.Clone(good)
	version[4] = 9
	for _, x := range []struct {
		name    string
		packets [][]byte
		files   [][]int
		kind    fault.Kind
		text    string
	}{
		{"nothing", nil, nil, fault.Closed, "EOF"},
		{"short", [][]byte{good[:15]}, nil, fault.Invalid, "15 bytes"},
		{"long", [][]byte{append(bytes.Clone(good), 0)}, nil, fault.Invalid, "17 bytes"},
		{"huge", [][]byte{make([]byte, chunkBytes+100)}, nil, fault.Invalid, "a packet of more than"},
		{"another protocol", [][]byte{[]byte("GET / HTTP/1.1\r\n")}, nil, fault.Invalid, "begins with"},
		{"another version", [][]byte{version}, nil, fault.Unsupported, "version 9"},
		{"a status of no meaning", [][]byte{appendHead(nil, head{status: 77})}, nil, fault.Invalid, "unknown status 77"},
		{"too many bytes", [][]byte{appendHead(nil, head{payload: MaxPayload + 1})}, nil, fault.Invalid, "more than"},
		{"too many descriptors", [][]byte{appendHead(nil, head{files: 6})}, nil, fault.Invalid, "6 descriptors are more than 5"},
		{"descriptors with the head", [][]byte{good}, [][]int{{fd}}, fault.Invalid, "with its first packet"},
		{"an end in the middle", [][]byte{good}, nil, fault.Closed, "EOF"},
		{"an end after a part", [][]byte{appendHead(nil, head{payload: chunkBytes + 2}), number(0, make([]byte, chunkBytes)...)}, nil, fault.Closed, "EOF"},
		{"less than was said", [][]byte{good, number(0, 1)}, [][]int{nil, {fd, fd}}, fault.Invalid, "has 5 bytes, and not 6"},
		{"more than was said", [][]byte{good, number(0, 1, 2, 3)}, [][]int{nil, {fd, fd}}, fault.Invalid, "has 7 bytes"},
		{"out of turn", [][]byte{good, number(1, 1, 2)}, [][]int{nil, {fd, fd}}, fault.Invalid, "packet 1 comes where 0 is due"},
		{"no descriptors", [][]byte{good, number(0, 1, 2)}, nil, fault.Invalid, "0 descriptors after packet 0, and not 2"},
		{"too few of them", [][]byte{good, number(0, 1, 2)}, [][]int{nil, {fd}}, fault.Invalid, "1 descriptors"},
		{"too many of them", [][]byte{good, number(0, 1, 2)}, [][]int{nil, {fd, fd, fd}}, fault.Invalid, "3 descriptors"},
		{"hardly a packet, with descriptors", [][]byte{good, nil}, [][]int{nil, {fd, fd}}, fault.Invalid, "has 1 bytes"},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir, name := raw(t, x.packets, x.files, false)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, _, err := Dial(ctx, name, DialOptions{Dir: dir, MaxFiles: 5})
			wantKind(t, err, x.kind, x.text)
		})
	}
}

// A process that may open no more descriptors is told so, and keeps none.
func TestDial_RefusesDescriptorsThatWereLost(t *testing.T) {
	descriptors(t)
	fd := memfd(t, "", 0)
	many := slices.Repeat([]int{fd}, 200)
	dir, name := raw(t, [][]byte{appendHead(nil, head{files: 200}), number(0)}, [][]int{nil, many}, true)
	var was unix.Rlimit
	noError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	noError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(countFiles(t) + 40), Max: was.Max}))
	defer func() { noError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }()
	_, _, err := Dial(t.Context(), name, DialOptions{Dir: dir})
	wantKind(t, err, fault.Invalid, "descriptors were lost")
}

func TestDial_EndsWithItsContext(t *testing.T) {
	descriptors(t)
	for _, packets := range [][][]byte{nil, {appendHead(nil, head{payload: 2})}} {
		dir, name := raw(t, packets, nil, true)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, _, err := Dial(ctx, name, DialOptions{Dir: dir})
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want deadline exceeded", err)
		}
	}
}

func FuzzParseHead(f *testing.F) {
	f.Add(appendHead(nil, head{payload: 3, files: 4}))
	f.Add(appendHead(nil, head{status: refusedFull}))
	f.Add([]byte("KVFH"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHead(b, 1000, 10)
		if err != nil {
			if fault.KindOf(err) == 0 || h != (head{}) {
				t.Errorf("%v and error %v without a kind", h, err)
			}
			return
		}
		if h.payload > 1000 || h.files > 10 || !bytes.Equal(appendHead(nil, h), b) {
			t.Errorf("%x decodes to %+v", b, h)
		}
	})
}

func FuzzParseFrame(f *testing.F) {
	f.Add(Frame{Join, 7, 1 << 40}.append(nil))
	f.Add([]byte{2, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := parseFrame(b)
		if err != nil {
			if fault.KindOf(err) == 0 || x != (Frame{}) {
				t.Errorf("%v and error %v without a kind", x, err)
			}
			return
		}
		if !bytes.Equal(x.append(nil), b) {
			t.Errorf("%x decodes to %+v", b, x)
		}
	})
}

// Whatever packets arrive, a hello is as long as it was said to be.
func FuzzCheckChunk(f *testing.F) {
	f.Add(number(3, 1, 2), uint32(3), 2)
	f.Fuzz(func(t *testing.T, b []byte, n uint32, payload int) {
		if payload = min(max(payload, 0), chunkBytes); checkChunk(b, n, payload) == nil && len(b) != numberBytes+payload {
			t.Errorf("%d bytes are a packet of %d", len(b), payload)
		}
	})
}
