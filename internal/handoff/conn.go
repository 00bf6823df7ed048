package handoff

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// Peer is the process at the other end, as the kernel says: the one that connected, or
// the one that began to listen.
type Peer struct{ PID, UID, GID int }

// Conn is one connection. All methods but Close may be called from any goroutine, and
// Receive by one at a time.
type Conn struct {
	socket  *net.UnixConn
	raw     rawConn
	peer    Peer
	greeted atomic.Bool // the hello is over

	mu     sync.Mutex
	pidfd  [1]unix.PollFd // guarded by mu; of the peer
	closed bool           // guarded by mu
}

// rawConn is what is used of a syscall.RawConn.
type rawConn interface {
	Control(f func(fd uintptr)) error
	Write(f func(fd uintptr) (done bool)) error
}

// DialOptions are the choices of who connects.
type DialOptions struct {
	// Dir is where the socket lies; "" means DefaultDir. It is never the listener's word.
	Dir string
	// AllowUIDs are users whose listeners are trusted besides this process's own.
	AllowUIDs []int
	// MaxFiles bounds the descriptors of the hello, at most MaxFiles; 0 means 1024.
	MaxFiles int

	test pretence
}

// pretence is what tests make believe. The zero value is what there is.
type pretence struct {
	user  func() int // that this process runs as
	byPID bool       // the kernel has no SO_PEERPIDFD
}

// Dial connects to the listener of that name, and reads its hello. It returns when ctx
// ends at the latest. Kinds: fault.Invalid (a name or a hello that is none; a user that is
// not trusted, on either side), fault.NotFound (nobody listens there any more),
// fault.Full (too many connections), fault.Unsupported (another version; what the kernel
// refuses), fault.Busy (the deadline of ctx).
func Dial(ctx context.Context, name string, o DialOptions) (*Conn, *Hello, error) {
	if o.MaxFiles < 0 || o.MaxFiles > MaxFiles {
		return nil, nil, fault.New(fault.Invalid, "MaxFiles", "%d is not in 0 … %d", o.MaxFiles, MaxFiles)
	}
	if o.MaxFiles == 0 {
		o.MaxFiles = defaultFiles
	}
	path, err := socketPath(o.Dir, name)
	if err != nil {
		return nil, nil, err
	}
	socket, err := new(net.Dialer).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, nil, dialError(path, err)
	}
	c, err := newConn(socket.(*net.UnixConn), o.AllowUIDs, o.test) //nolint:errcheck // of that network
	if err != nil {
		_ = socket.Close()
		return nil, nil, err
	}
	h, err := c.receiveHello(ctx, o.MaxFiles)
	if err != nil {
		_ = c.Close()
		if errors.Is(err, fault.Closed) { // as late a comer as who finds no socket
			err = fault.Wrap(fault.NotFound, "hello", err).Hint("its owner has closed, or this process was too slow to read")
		}
		return nil, nil, err
	}
	c.greeted.Store(true)
	return c, h, nil
}

// dialError says what it means that a socket can't be reached.
func dialError(path string, err error) error {
	what := "socket " + path
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ECONNREFUSED):
		return fault.Wrap(fault.NotFound, what, err).Hint("its owner has closed, or has its sockets in another directory")
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fault.Wrap(fault.Unsupported, what, err).Hint("run both sides as one user")
	case errors.Is(err, unix.EAGAIN):
		return fault.Wrap(fault.Full, what, err).Hint("its owner accepts no connections at the moment: try again")
	case errors.Is(err, unix.EPROTOTYPE):
		return fault.Wrap(fault.Invalid, what, err)
	case errors.Is(err, context.DeadlineExceeded): // package net looks at the clock, maybe before ctx does
		return fault.Wrap(fault.Busy, what, err)
	default:
		return err
	}
}

// newConn finds out who is at the other end. On an error the socket is still the
// caller's. Kinds: fault.Invalid (another user), fault.NotFound (the process has ended),
// fault.Unsupported.
func newConn(socket *net.UnixConn, allow []int, test pretence) (*Conn, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &Conn{socket: socket, raw: raw}
	if bad := raw.Control(func(fd uintptr) { err = c.identify(int(fd), allow, test) }); bad != nil {
		return nil, bad
	}
	return c, err
}

var errUser = errors.New("is of another user")

// identify fills in the peer and its pidfd.
func (c *Conn) identify(fd int, allow []int, test pretence) error {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fault.Wrap(fault.Unsupported, "credentials of the peer", err)
	}
	c.peer = Peer{int(cred.Pid), int(cred.Uid), int(cred.Gid)}
	self := os.Geteuid
	if test.user != nil {
		self = test.user
	}
	if c.peer.UID != self() && !slices.Contains(allow, c.peer.UID) {
		return fault.Wrap(fault.Invalid, fmt.Sprintf("peer, user %d", c.peer.UID), errUser).
			Hint("run both sides as one user, or allow that one")
	}
	pidfd, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if test.byPID && err == nil {
		_ = unix.Close(pidfd) // was never used
		err = unix.ENOPROTOOPT
	}
	switch {
	case err == unix.ENOPROTOOPT:
		if pidfd, err = pidfdOf(fd, c.peer.PID); err != nil {
			return err
		}
	case err == unix.ESRCH || err == unix.EINVAL || err == unix.ENODATA:
		return fault.Wrap(fault.NotFound, fmt.Sprintf("process %d has ended", c.peer.PID), err)
	case err != nil:
		return fault.Wrap(fault.Device, "pidfd of the peer", err)
	}
	c.pidfd[0] = unix.PollFd{Fd: int32(pidfd), Events: unix.POLLIN}
	return nil
}

// pidfdOf opens the process at the other end of a socket by its number, before Linux 6.5.
// The number can be another process's by then, but not while the connection lasts.
func pidfdOf(socket, pid int) (int, error) {
	if pid <= 0 {
		return -1, fault.New(fault.Unsupported, "peer", "is in a PID namespace that this process does not see").
			Hint("run both sides in one PID namespace")
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	switch {
	case err == unix.ESRCH:
		return -1, fault.New(fault.NotFound, "peer", "process %d has ended", pid)
	case err != nil:
		return -1, fault.Wrap(fault.Unsupported, "pidfd of the peer", err).Hint("pidfds need Linux 5.3, and a sandbox that allows them")
	}
	if ended(socket) {
		_ = unix.Close(pidfd) // maybe of somebody else
		return -1, fault.New(fault.NotFound, "peer", "process %d has closed the connection", pid)
	}
	return pidfd, nil
}

// ended reports whether the other end of a socket is closed.
func ended(socket int) bool {
	p := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLRDHUP}}
	return pollNow(p) != 0
}

// pollNow returns the events of the only descriptor in p, without waiting.
func pollNow(p []unix.PollFd) int16 {
	for {
		n, err := unix.Poll(p, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return 0
		}
		return p[0].Revents
	}
}

// Peer returns the process at the other end.
func (c *Conn) Peer() Peer { return c.peer }

// Alive reports whether the process at the other end has not ended. One that is stopped
// is alive. It asks the kernel, and allocates nothing.
func (c *Conn) Alive() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed && pollNow(c.pidfd[:]) == 0
}

// Send sends a frame if that can be done at once: it never waits for a process that may
// be stopped. Kinds: fault.Busy (the other side does not read, or the hello is not over),
// fault.Closed.
func (c *Conn) Send(f Frame) error {
	if !c.greeted.Load() { // who sends the hello has the socket until all of it was read
		return fault.New(fault.Busy, "connection", "process %d has not read the hello", c.peer.PID)
	}
	var room [frameBytes]byte
	return c.sendNow(f.append(room[:0]))
}

func (c *Conn) sendNow(b []byte) (err error) {
	bad := c.raw.Write(func(fd uintptr) bool {
		err = unix.Sendmsg(int(fd), b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return true
	})
	switch {
	case bad != nil:
		return c.failure(bad)
	case err == unix.EAGAIN:
		return fault.New(fault.Busy, "connection", "process %d does not read what it is sent", c.peer.PID)
	case err != nil:
		return c.failure(err)
	}
	return nil
}

// Receive waits for the next frame, until ctx ends. After an error the connection is good
// for nothing but Close. Kinds: fault.Closed (the other side has gone, or this one),
// fault.Invalid and fault.Unsupported (no frame).
func (c *Conn) Receive(ctx context.Context) (f Frame, err error) {
	err = c.within(ctx, c.socket.SetReadDeadline, func() error {
		var b [frameBytes + 1]byte
		// Without room for control data the kernel closes descriptors that come along.
		n, _, flags, _, err := c.socket.ReadMsgUnix(b[:], nil)
		switch {
		case err != nil:
			return err
		case flags&unix.MSG_CTRUNC != 0:
			return fault.New(fault.Invalid, "frame", "comes with descriptors")
		}
		f, err = parseFrame(b[:n])
		return err
	})
	return f, err
}

// within runs f, a call that deadline ends early when ctx ends.
func (c *Conn) within(ctx context.Context, deadline func(time.Time) error, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	over := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = deadline(time.Unix(1, 0)) // fails when it is closed, which ends f as well
		close(over)
	})
	err := f()
	if !stop() {
		<-over
		_ = deadline(time.Time{})
		if err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			return ctx.Err()
		}
	}
	if err == nil {
		return nil
	}
	return c.failure(err)
}

// failure gives an error of the socket a kind.
func (c *Conn) failure(err error) error {
	switch {
	case fault.KindOf(err) != 0:
		return err
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE), errors.Is(err, unix.ENOTCONN):
		return fault.Wrap(fault.Closed, fmt.Sprintf("connection to process %d", c.peer.PID), err)
	default:
		return fault.Wrap(fault.Device, fmt.Sprintf("connection to process %d", c.peer.PID), err)
	}
}

// Close ends the connection, and calls of it that wait. Calling it again does nothing.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	return errors.Join(c.socket.Close(), unix.Close(int(c.pidfd[0].Fd)))
}
