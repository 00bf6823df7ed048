package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// maxVec is how many stretches one system call fills: unix.Readv has room for so many
// without allocating.
const maxVec = 8

// rawConn is what is used of a connection's descriptor.
type rawConn interface {
	Read(f func(fd uintptr) bool) error
	Write(f func(fd uintptr) bool) error
}

// link is one connection to an owner, at the reader's side. One goroutine at a time has
// it. One that was interrupted, or whose answer has not been taken whole, is closed.
type link struct {
	e    *Engine
	tcp  *net.TCPConn
	conn net.Conn // what is spoken over: tcp, or TLS on it
	raw  rawConn
	ask  []byte
	head [replyBytes]byte

	some func(fd uintptr) bool // readSome
	todo [][]byte
	got  int
	err  error
}

// dial connects to the owner, proves the key and opens what s is about. Writes of a
// control connection never wait.
func (s *source) dial(ctx context.Context, control bool) (l *link, err error) {
	late := fault.New(fault.Busy, "handshake", "was not over after %v", s.e.o.Handshake)
	ctx, cancel := context.WithTimeoutCause(ctx, s.e.o.Handshake, late)
	defer cancel()
	dialer := net.Dialer{KeepAliveConfig: keepAlive()}
	c, err := dialer.DialContext(ctx, "tcp", s.address)
	if err != nil {
		return nil, s.failed(ctx, err)
	}
	l = &link{e: s.e, tcp: c.(*net.TCPConn)} //nolint:errcheck // it was asked for
	l.some = l.readSome
	stop := context.AfterFunc(ctx, l.interrupt)
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			l.close()
			l, err = nil, s.failed(ctx, err)
		}
	}()
	if err := checkConnected(s.address, c.RemoteAddr()); err != nil {
		return l, err
	}
	if l.raw, err = l.tcp.SyscallConn(); err != nil {
		return l, err
	}
	if control {
		c = &eager{l.tcp, l.raw}
	}
	if l.conn, err = s.e.speak(ctx, c, rReader); err != nil {
		return l, err
	}
	l.ask = appendOpen(l.ask[:0], s.owner, s.print)
	_, err = l.call(l.ask, sayDone)
	return l, err
}

// interrupt ends what waits for the connection, for good.
func (l *link) interrupt() {
	_ = l.tcp.SetDeadline(time.Unix(1, 0)) // or it is closed, and nothing waits
}

func (l *link) close() { _ = l.tcp.Close() } // what was lost by that was said before

// call asks, and returns the answer.
func (l *link) call(ask []byte, want byte) (r reply, err error) {
	if _, err := l.conn.Write(ask); err != nil {
		return r, err
	}
	if _, err := io.ReadFull(l.conn, l.head[:]); err != nil {
		return r, err
	}
	return decodeReply(&l.head, want)
}

// ended reports whether the owner has closed an idle connection: there is nothing else
// that it says unasked.
func (l *link) ended() bool {
	var peeked error
	err := l.raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, peeked = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return true
	})
	return err != nil || !errors.Is(peeked, unix.EAGAIN)
}

// failed says what a failed use of a connection means.
func (s *source) failed(ctx context.Context, err error) error {
	if late := context.Cause(ctx); late != nil { // which is why, whatever broke
		if fault.KindOf(late) == 0 {
			late = fault.Wrap(fault.Busy, "", late)
		}
		return fault.Wrap(fault.Busy, "owner at "+s.address, late)
	}
	e := fault.Wrap(ioKind(err), "owner at "+s.address, err)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return e.Hint("it closed the connection: it has ended, has too many of them, or has TLS where this side has not")
	case errors.Is(err, unix.ECONNREFUSED):
		return e.Hint("see whether the owner runs, and listens on this address")
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return e.Hint("see whether there is a way to this address: it is the one that the owner has said")
	case isUnknown(err):
		return e.Hint("have the owner say an address that this host knows")
	}
	return e
}

// isUnknown reports whether err is about a name that stands for no address.
func isUnknown(err error) bool {
	_, ok := errors.AsType[*net.DNSError](err)
	return ok
}

// ioKind is the kind of err, given that it is of a connection when it has none.
func ioKind(err error) fault.Kind {
	switch kind := fault.KindOf(err); {
	case kind != 0:
		return kind
	case errors.Is(err, unix.ECONNREFUSED):
		return fault.NotFound
	case errors.Is(err, unix.EADDRINUSE), errors.Is(err, os.ErrDeadlineExceeded):
		return fault.Busy
	}
	return fault.Device
}
