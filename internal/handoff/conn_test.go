package handoff

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// echo says hello, and sends back what it receives; err has why it ended.
func echo(errs chan<- error) func(context.Context, *Conn) {
	return func(ctx context.Context, c *Conn) {
		err := c.SendHello(ctx, nil, nil)
		for err == nil {
			var f Frame
			if f, err = c.Receive(ctx); err == nil {
				err = c.Send(f)
			}
		}
		errs <- err
	}
}

func TestConn_FramesGoBothWays(t *testing.T) {
	descriptors(t)
	errs := make(chan error, 1)
	c, _ := dial(t, listen(t, ListenOptions{Serve: echo(errs)}), DialOptions{})
	for _, f := range []Frame{{Join, 0, 0}, {Leave, 1<<32 - 1, 1<<64 - 1}, {200, 3, 4}} {
		noError(t, c.Send(f))
		got, err := c.Receive(t.Context())
		noError(t, err)
		if got != f {
			t.Errorf("%v came back as %v", f, got)
		}
	}
	if p := c.Peer(); p.PID != os.Getpid() || p.UID != os.Getuid() || !c.Alive() {
		t.Errorf("the peer is %+v, alive %t", p, c.Alive())
	}
	// The other side sees the end, without a word.
	noError(t, c.Close())
	wantKind(t, <-errs, fault.Closed, "connection to process")
	wantKind(t, c.Send(Frame{}), fault.Closed, "")
	noError(t, c.Close())
	if c.Alive() {
		t.Error("a closed connection has a peer")
	}
}

// What is no frame ends one connection, and the listener serves the next.
func TestConn_RefusesWhatIsNoFrame(t *testing.T) {
	descriptors(t)
	fd := memfd(t, "", 0)
	errs := make(chan error, 1)
	l := listen(t, ListenOptions{Serve: echo(errs)})
	for _, x := range []struct {
		name string
		b    []byte
		fds  []int
		kind fault.Kind
		text string
	}{
		{"short", []byte{1, 1}, nil, fault.Invalid, "2 bytes"},
		{"long", make([]byte, 1000), nil, fault.Invalid, "17 bytes"},
		{"another version", append([]byte{2}, make([]byte, 15)...), nil, fault.Unsupported, "version 2"},
		{"what must be 0", append([]byte{1, 1, 1}, make([]byte, 13)...), nil, fault.Invalid, "bytes 2 and 3"},
		{"descriptors", Frame{Join, 1, 1}.append(nil), []int{fd}, fault.Invalid, "comes with descriptors"},
	} {
		c, _ := dial(t, l, DialOptions{})
		var rights []byte
		if x.fds != nil {
			rights = unix.UnixRights(x.fds...)
		}
		_, _, err := c.socket.WriteMsgUnix(x.b, rights, nil)
		noError(t, err)
		wantKind(t, <-errs, x.kind, x.text)
		_, err = c.Receive(t.Context())
		wantKind(t, err, fault.Closed, "EOF")
	}
}

// A side that doesn't read is not waited for.
func TestConn_SendNeverWaits(t *testing.T) {
	release := make(chan struct{})
	l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
		if err := c.SendHello(ctx, nil, nil); err != nil {
			t.Error(err)
		}
		<-release
	}})
	defer close(release)
	c, _ := dial(t, l, DialOptions{})
	var err error
	for i := uint64(0); err == nil; i++ {
		err = c.Send(Frame{Join, 1, i})
	}
	wantKind(t, err, fault.Busy, "does not read")
}

func TestConn_WaitsEndWithTheirContext(t *testing.T) {
	quiet, received := make(chan struct{}), make(chan error, 1)
	l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
		if err := c.SendHello(ctx, nil, nil); err != nil {
			t.Error(err)
		}
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		if _, err := c.Receive(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want deadline exceeded", err)
		}
		if _, err := c.Receive(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want deadline exceeded", err)
		}
		close(quiet) // The next wait has all the time again.
		_, err := c.Receive(ctx)
		received <- err
		// A hello that nobody reads.
		short, cancel = context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		for err = nil; err == nil; {
			err = c.SendHello(short, make([]byte, MaxPayload), nil)
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want deadline exceeded", err)
		}
		close(received)
	}})
	c, _ := dial(t, l, DialOptions{})
	<-quiet
	noError(t, c.Send(Frame{}))
	noError(t, <-received)
	<-received
}

// Another process is alive until it is dead, whatever it does; what it leaves in the
// directory is removed by the next listener.
func TestConn_SeesDeath(t *testing.T) {
	descriptors(t)
	dir := directory(t)
	for _, byPID := range []bool{false, true} {
		p := start(t, dir)
		c, h, err := Dial(t.Context(), p.name, DialOptions{Dir: dir, test: pretence{byPID: byPID}})
		noError(t, err)
		if string(h.Payload) != "hello" || c.Peer().PID != p.Process.Pid {
			t.Errorf("%q from process %d, want %d", h.Payload, c.Peer().PID, p.Process.Pid)
		}
		noError(t, p.Process.Signal(unix.SIGSTOP))
		noError(t, unix.Waitid(unix.P_PID, p.Process.Pid, nil, unix.WSTOPPED, nil))
		if !c.Alive() {
			t.Error("a stopped process is dead")
		}
		short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if _, _, err := Dial(short, p.name, DialOptions{Dir: dir}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a stopped listener: %v, want deadline exceeded", err)
		}
		cancel()
		noError(t, p.Process.Kill())
		_, err = c.Receive(t.Context())
		wantKind(t, err, fault.Closed, "connection to process")
		_ = p.Wait() // was killed
		if c.Alive() {
			t.Error("a dead process is alive")
		}
		noError(t, c.Close())
		_, _, err = Dial(t.Context(), p.name, DialOptions{Dir: dir})
		wantKind(t, err, fault.NotFound, "refused")
		if _, err := os.Lstat(dir + "/" + p.name); err != nil {
			t.Error("the socket of the dead is gone already")
		}
		next := start(t, dir)
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != next.name {
			t.Errorf("%v is left, error %v", left, err)
		}
		next.end()
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%v is left, error %v", left, err)
		}
	}
}

// The number of a process that has closed the connection says nothing.
func TestPidfdOf_WantsALiveConnection(t *testing.T) {
	descriptors(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	noError(t, err)
	defer func() { noError(t, unix.Close(pair[0])) }()
	fd, err := pidfdOf(pair[0], os.Getpid())
	noError(t, err)
	noError(t, unix.Close(fd))
	_, err = pidfdOf(pair[0], 0)
	wantKind(t, err, fault.Unsupported, "namespace")
	noError(t, unix.Close(pair[1]))
	_, err = pidfdOf(pair[0], os.Getpid())
	wantKind(t, err, fault.NotFound, "has closed the connection")
}

// A hello that nobody reads keeps no frame, and whoever sends one, waiting.
func TestSend_WhileAHelloIsOnItsWay(t *testing.T) {
	conns, over := make(chan *Conn), make(chan error)
	l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
		conns <- c
		over <- c.SendHello(ctx, make([]byte, MaxPayload), nil)
		<-ctx.Done()
	}})
	socket, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: l.path, Net: "unixpacket"})
	noError(t, err)
	t.Cleanup(func() { _ = socket.Close() })
	c := <-conns
	head := make([]byte, headBytes)
	_, err = io.ReadFull(socket, head) // so the hello has begun, and it has no end in sight
	noError(t, err)
	for range 100 {
		sent := make(chan error, 1)
		go func() { sent <- c.Send(Frame{Kind: Join}) }()
		select {
		case err := <-sent:
			wantKind(t, err, fault.Busy, "hello")
		case <-time.After(patience):
			t.Fatal("Send waits for a peer that reads nothing")
		}
	}
	noError(t, socket.Close())
	wantKind(t, <-over, fault.Closed, "connection")
}

// Who closes in the middle of a hello has gone, as has who closed before.
func TestDial_ClosedInTheMiddleOfAHello(t *testing.T) {
	descriptors(t)
	for _, packets := range [][][]byte{nil, {appendHead(nil, head{payload: 10})}} {
		dir, name := raw(t, packets, nil, false)
		_, _, err := Dial(t.Context(), name, DialOptions{Dir: dir})
		wantKind(t, err, fault.NotFound, "hello")
	}
}

// A deadline that has passed is one, whoever sees it first.
func TestDialError_Deadline(t *testing.T) {
	d := net.Dialer{Deadline: time.Unix(1, 0)}
	_, err := d.Dial("unixpacket", "nobody")
	wantKind(t, dialError("nobody", err), fault.Busy, "timeout")
}
