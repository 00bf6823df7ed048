package handoff

import (
	"context"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

const (
	helloMagic   = "KVFH"
	helloVersion = 1
	headBytes    = 16
	numberBytes  = 4
	chunkBytes   = 32 << 10 // of the payload in one packet
	chunkFiles   = 253      // the kernel's limit for one message

	// MaxPayload is the most bytes of a hello.
	MaxPayload = 1 << 20
	// MaxFiles is the most descriptors of a hello.
	MaxFiles = 1 << 16

	defaultFiles = 1024
)

// status is what a hello begins with.
type status uint16

const (
	welcome     status = iota
	refusedUser        // not of a user that the listener trusts
	refusedFull        // as many connections as there may be
)

// Hello is what a listener hands to who connects.
type Hello struct {
	Payload []byte
	Files   []int // descriptors, closed when a process executes another program
}

// Close closes the descriptors. Calling it again does nothing.
func (h *Hello) Close() {
	for _, fd := range h.Files {
		_ = unix.Close(fd) // was only read
	}
	h.Files = nil
}

// head is the first packet of a hello.
type head struct {
	status         status
	payload, files int
}

func appendHead(b []byte, h head) []byte {
	le := binary.LittleEndian
	b = append(b, helloMagic...)
	b = le.AppendUint16(b, helloVersion)
	b = le.AppendUint16(b, uint16(h.status))
	b = le.AppendUint32(b, uint32(h.payload))
	return le.AppendUint32(b, uint32(h.files))
}

// parseHead is the inverse of appendHead, for bytes from anybody. Kinds: fault.Invalid,
// fault.Unsupported (another version), and those of a refusal.
func parseHead(b []byte, maxPayload, maxFiles int) (h head, err error) {
	le := binary.LittleEndian
	switch {
	case len(b) != headBytes:
		return h, errHello("its first packet has %d bytes, and not %d", len(b), headBytes)
	case string(b[:4]) != helloMagic:
		return h, errHello("begins with %q, and not with %q", b[:4], helloMagic)
	case le.Uint16(b[4:]) != helloVersion:
		return h, fault.New(fault.Unsupported, "hello", "version %d, and this build knows %d", le.Uint16(b[4:]), helloVersion).
			Hint("run the same version of kvferry on both sides")
	}
	payload, files := le.Uint32(b[8:]), le.Uint32(b[12:])
	switch status(le.Uint16(b[6:])) {
	case welcome:
	case refusedUser:
		return h, fault.New(fault.Invalid, "peer", "does not trust the user of this process").
			Hint("run both sides as one user, or have the owner allow this one")
	case refusedFull:
		return h, fault.New(fault.Full, "peer", "has as many connections as it allows").Hint("close readers, or have the owner allow more")
	default:
		return h, errHello("refused with the unknown status %d", le.Uint16(b[6:]))
	}
	switch {
	case int64(payload) > int64(maxPayload):
		return h, errHello("%d bytes are more than %d", payload, maxPayload)
	case int64(files) > int64(maxFiles):
		return h, errHello("%d descriptors are more than %d", files, maxFiles)
	}
	return head{welcome, int(payload), int(files)}, nil
}

func errHello(format string, args ...any) *fault.Error {
	return fault.New(fault.Invalid, "hello", format, args...)
}

// SendHello sends what a listener hands over. The descriptors stay the caller's. It
// returns when ctx ends at the latest; after an error the connection is good for nothing
// but Close. Kinds: fault.Invalid (too much of it), fault.Closed (the other side has gone),
// fault.Full (too many descriptors on their way).
func (c *Conn) SendHello(ctx context.Context, payload []byte, files []int) error {
	switch {
	case len(payload) > MaxPayload:
		return errHello("%d bytes are more than %d", len(payload), MaxPayload)
	case len(files) > MaxFiles:
		return errHello("%d descriptors are more than %d", len(files), MaxFiles)
	}
	err := c.within(ctx, c.socket.SetWriteDeadline, func() error {
		b := appendHead(make([]byte, 0, headBytes+numberBytes+min(len(payload), chunkBytes)), head{payload: len(payload), files: len(files)})
		if err := c.write(b, nil); err != nil {
			return err
		}
		for number := uint32(0); len(payload)+len(files) > 0; number++ {
			n, k := min(len(payload), chunkBytes), min(len(files), chunkFiles)
			b = append(binary.LittleEndian.AppendUint32(b[:0], number), payload[:n]...)
			var rights []byte
			if k > 0 {
				rights = unix.UnixRights(files[:k]...)
			}
			if err := c.write(b, rights); err != nil {
				return err
			}
			payload, files = payload[n:], files[k:]
		}
		return nil
	})
	c.greeted.Store(err == nil)
	return err
}

func (c *Conn) write(b, rights []byte) error {
	_, _, err := c.socket.WriteMsgUnix(b, rights, nil)
	if errors.Is(err, unix.ETOOMANYREFS) {
		return fault.Wrap(fault.Full, "hello", err).Hint("raise ulimit -n")
	}
	return err
}

// receiveHello reads a hello. On an error no descriptor is left open.
func (c *Conn) receiveHello(ctx context.Context, maxFiles int) (*Hello, error) {
	h := &Hello{}
	err := c.within(ctx, c.socket.SetReadDeadline, func() error { return c.readHello(h, maxFiles) })
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

func (c *Conn) readHello(h *Hello, maxFiles int) error {
	b := make([]byte, numberBytes+chunkBytes+1)
	rights := make([]byte, unix.CmsgSpace(chunkFiles*4))
	n, err := c.readPacket(h, b, rights)
	if err != nil {
		return err
	}
	head, err := parseHead(b[:n], MaxPayload, maxFiles)
	if err != nil {
		return err
	}
	if len(h.Files) > 0 {
		return errHello("%d descriptors with its first packet", len(h.Files))
	}
	for number := uint32(0); len(h.Payload) < head.payload || len(h.Files) < head.files; number++ {
		wantBytes := min(head.payload-len(h.Payload), chunkBytes)
		wantFiles := min(len(h.Files)+chunkFiles, head.files)
		if n, err = c.readPacket(h, b, rights); err != nil {
			return err
		}
		if err := checkChunk(b[:n], number, wantBytes); err != nil {
			return err
		}
		if len(h.Files) != wantFiles {
			return errHello("%d descriptors after packet %d, and not %d", len(h.Files), number, wantFiles)
		}
		h.Payload = append(h.Payload, b[numberBytes:n]...)
	}
	return nil
}

// checkChunk refuses a packet of a hello that is not that number with so much payload.
func checkChunk(b []byte, number uint32, payload int) error {
	switch {
	case len(b) != numberBytes+payload:
		return errHello("packet %d has %d bytes, and not %d", number, len(b), numberBytes+payload)
	case binary.LittleEndian.Uint32(b) != number:
		return errHello("packet %d comes where %d is due", binary.LittleEndian.Uint32(b), number)
	}
	return nil
}

// readPacket reads one packet, and adds the descriptors that come with it to h before
// anything else can go wrong.
func (c *Conn) readPacket(h *Hello, b, rights []byte) (int, error) {
	n, nr, flags, _, err := c.socket.ReadMsgUnix(b, rights) // close-on-exec, by itself
	if bad := h.take(rights[:nr]); err == nil {
		err = bad
	}
	switch {
	case err != nil:
		return 0, err
	case flags&unix.MSG_CTRUNC != 0:
		return 0, errHello("descriptors were lost: too many in one packet, or more than this process may have open").Hint("raise ulimit -n")
	case flags&unix.MSG_TRUNC != 0:
		return 0, errHello("a packet of more than %d bytes", len(b))
	}
	return n, nil
}

// take adds the descriptors of control data to h.
func (h *Hello) take(control []byte) error {
	if len(control) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return fault.Wrap(fault.Invalid, "hello: control data", err)
	}
	for i := range messages {
		m := &messages[i]
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			err = errHello("control data of the kind %d/%d", m.Header.Level, m.Header.Type)
			continue
		}
		fds, bad := unix.ParseUnixRights(m)
		h.Files = append(h.Files, fds...)
		if bad != nil {
			err = fault.Wrap(fault.Invalid, "hello: control data", bad)
		}
	}
	return err
}

// Frame is what both sides say after the hello.
type Frame struct {
	Kind  Kind
	Word  uint32
	Count uint64
}

// Kind says what a frame means. Those that are not listed here are their user's.
type Kind uint8

// Kinds of frames about publications, which Word and Count name.
const (
	Join  Kind = 1 // the sender reads this publication
	Leave Kind = 2 // it has what it wants of it
)

const (
	frameVersion = 1
	frameBytes   = 16
)

func (f Frame) append(b []byte) []byte {
	b = append(b, frameVersion, byte(f.Kind), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, f.Word)
	return binary.LittleEndian.AppendUint64(b, f.Count)
}

// parseFrame is the inverse of append, for bytes from anybody. Kinds: fault.Invalid,
// fault.Unsupported (another version).
func parseFrame(b []byte) (Frame, error) {
	switch {
	case len(b) != frameBytes:
		return Frame{}, fault.New(fault.Invalid, "frame", "%d bytes, and not %d", len(b), frameBytes)
	case b[0] != frameVersion:
		return Frame{}, fault.New(fault.Unsupported, "frame", "version %d, and this build knows %d", b[0], frameVersion).
			Hint("run the same version of kvferry on both sides")
	case b[2] != 0 || b[3] != 0:
		return Frame{}, fault.New(fault.Invalid, "frame", "bytes 2 and 3 are %#02x %#02x, and not 0", b[2], b[3])
	}
	return Frame{Kind(b[1]), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint64(b[8:])}, nil
}
