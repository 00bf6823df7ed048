package handoff

import (
	"context"
	"errors"
	"net"
	"os"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

const (
	defaultConns = 256
	maxConns     = 1 << 14
	retry        = 20 * time.Millisecond // after an accept that found no room for a descriptor
)

var prefixes = regexp.MustCompile(`^[a-z]{1,16}$`)

// ListenOptions are the choices of a listener.
type ListenOptions struct {
	// Dir is where the socket is made; "" means DefaultDir. It is made too when it is not
	// there, and must be nobody else's to look into.
	Dir string
	// Prefix is what the socket's name begins with: 1 to 16 small letters. Required.
	Prefix string
	// AllowUIDs are users that may connect besides this process's own. They must be able
	// to reach the socket, too: root is.
	AllowUIDs []int
	// MaxConns bounds the connections at a time, at most 16,384; 0 means 256.
	MaxConns int
	// Serve has one connection, in a goroutine of its own: it sends the hello, and
	// receives frames until that fails. The connection is closed when it returns. ctx
	// ends when the listener closes. Required.
	Serve func(ctx context.Context, c *Conn)

	test pretence
}

// Listener waits for connections. All methods may be called from any goroutine.
type Listener struct {
	o          ListenOptions
	name, path string
	socket     *net.UnixListener
	ctx        context.Context //nolint:containedctx // ends when the listener is closed
	cancel     context.CancelFunc
	conns      sync.WaitGroup // the accept loop and connections
	slots      chan struct{}
}

// Listen makes a socket with a random name, and serves who connects. Sockets in the
// directory whose processes have ended are removed. Kinds: fault.Invalid (options; a
// directory that is not the user's own; a path that is too long), fault.NotFound (the
// directory above it), fault.Device (what the kernel refuses).
func Listen(o ListenOptions) (*Listener, error) {
	switch {
	case o.Serve == nil || !prefixes.MatchString(o.Prefix):
		return nil, fault.New(fault.Invalid, "listener", "Serve and a Prefix of 1 to 16 small letters are required")
	case o.MaxConns < 0 || o.MaxConns > maxConns:
		return nil, fault.New(fault.Invalid, "MaxConns", "%d is not in 0 … %d", o.MaxConns, maxConns)
	}
	if o.MaxConns == 0 {
		o.MaxConns = defaultConns
	}
	if o.Dir == "" {
		o.Dir = DefaultDir()
	}
	name := newName(o.Prefix)
	path, err := socketPath(o.Dir, name)
	if err != nil {
		return nil, err
	}
	if err := ownDir(o.Dir); err != nil {
		return nil, err
	}
	sweep(o.Dir)
	socket, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fault.Wrap(fault.Device, "socket "+path, err)
	}
	// Nobody else could reach it meanwhile: the directory is closed to them.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = socket.Close() // and removes it
		return nil, fault.Wrap(fault.Device, "socket "+path, err)
	}
	l := &Listener{o: o, name: name, path: path, socket: socket, slots: make(chan struct{}, o.MaxConns)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.conns.Go(l.accept)
	return l, nil
}

// Name returns the socket's name, by which [Dial] finds it in the same directory.
func (l *Listener) Name() string { return l.name }

// accept serves connections until the listener is closed.
func (l *Listener) accept() {
	for {
		socket, err := l.socket.AcceptUnix()
		switch {
		case err == nil:
			l.admit(socket)
		case l.ctx.Err() != nil, errors.Is(err, net.ErrClosed):
			return
		default: // no room for a descriptor, or the peer has gone already
			select {
			case <-time.After(retry):
			case <-l.ctx.Done():
				return
			}
		}
	}
}

// admit starts to serve a connection, or refuses it.
func (l *Listener) admit(socket *net.UnixConn) {
	c, err := newConn(socket, l.o.AllowUIDs, l.o.test)
	if err != nil {
		if errors.Is(err, errUser) {
			refuse(socket, refusedUser)
		}
		_ = socket.Close() // a stranger's
		return
	}
	select {
	case l.slots <- struct{}{}:
	default:
		refuse(socket, refusedFull)
		_ = c.Close()
		return
	}
	l.conns.Go(func() {
		defer func() { <-l.slots }()
		defer func() { _ = c.Close() }()
		// Whatever Serve waits for in the connection ends with the listener.
		defer context.AfterFunc(l.ctx, func() { _ = c.Close() })()
		l.o.Serve(l.ctx, c)
	})
}

// refuse says why a connection is closed, if that can be said at once.
func refuse(socket *net.UnixConn, why status) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Write(func(fd uintptr) bool {
		_ = unix.Sendmsg(int(fd), appendHead(nil, head{status: why}), nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return true
	})
}

// Close removes the socket, ends all connections, and waits until Serve has returned
// from each. Calling it again does nothing.
func (l *Listener) Close() error {
	l.cancel()
	err := l.socket.Close() // removes it from its directory
	l.conns.Wait()
	if err == nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fault.Wrap(fault.Device, "socket "+l.path, err)
}
