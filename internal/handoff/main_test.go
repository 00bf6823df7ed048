package handoff

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

// patience turns a hang into a message.
const patience = 20 * time.Second

const childEnv = "KVFERRY_TEST_HANDOFF"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		child(dir)
		return
	}
	leaktest.Main(m)
}

// child is a listener that says "hello" until its standard input ends or it is killed.
func child(dir string) {
	l, err := Listen(ListenOptions{Dir: dir, Prefix: "child", Serve: func(ctx context.Context, c *Conn) {
		if err := c.SendHello(ctx, []byte("hello"), nil); err == nil {
			_, _ = c.Receive(ctx)
		}
	}})
	if err != nil {
		panic(err)
	}
	_, _ = fmt.Fprintln(os.Stdout, l.Name())
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	if err := l.Close(); err != nil {
		panic(err)
	}
}

// process is a child, and the name of its socket.
type process struct {
	*exec.Cmd
	name string
	end  func()
}

func start(t testing.TB, dir string) *process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0]) //nolint:gosec // this test
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	noError(t, err)
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	name, err := bufio.NewReader(out).ReadString('\n')
	noError(t, err)
	return &process{cmd, strings.TrimSpace(name), func() {
		_ = in.Close()
		noError(t, cmd.Wait())
	}}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t testing.TB, err error, kind fault.Kind, text string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("error %v, want kind %q and %q", err, kind, text)
	}
}

// directory is for sockets: its path is short.
func directory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvf") //nolint:usetesting // the test's name would be in its path
	noError(t, err)
	t.Cleanup(func() { noError(t, os.RemoveAll(dir)) })
	return filepath.Join(dir, "s")
}

// descriptors fails a test that leaves more of them open than there were.
func descriptors(t testing.TB) {
	t.Helper()
	before := countFiles(t)
	t.Cleanup(func() {
		if after := countFiles(t); after != before {
			t.Errorf("%d descriptors are open, and %d were", after, before)
		}
	})
}

func countFiles(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	noError(t, err)
	n := 0
	for _, e := range all {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(to, "anon_inode:[event") { // the runtime's own
			n++
		}
	}
	return n
}

// listen serves until the test ends.
func listen(t testing.TB, o ListenOptions) *Listener {
	t.Helper()
	if o.Dir == "" {
		o.Dir = directory(t)
	}
	o.Prefix = "test"
	l, err := Listen(o)
	noError(t, err)
	t.Cleanup(func() { noError(t, l.Close()) })
	return l
}

func dial(t testing.TB, l *Listener, o DialOptions) (*Conn, *Hello) {
	t.Helper()
	o.Dir = l.o.Dir
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, h, err := Dial(ctx, l.Name(), o)
	noError(t, err)
	t.Cleanup(func() { noError(t, c.Close()) })
	t.Cleanup(h.Close)
	return c, h
}

// memfd is shared memory with text, closed when the test ends.
func memfd(t testing.TB, text string, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("kvferry-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	noError(t, err)
	t.Cleanup(func() { noError(t, unix.Close(fd)) })
	_, err = unix.Write(fd, []byte(text))
	noError(t, err)
	if seals != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		noError(t, err)
	}
	return fd
}

// raw is a listener that sends packets as they are, with descriptors, and then closes or
// waits until the test ends.
func raw(t testing.TB, packets [][]byte, files [][]int, wait bool) (dir, name string) {
	t.Helper()
	dir, name = directory(t), newName("raw")
	noError(t, ownDir(dir))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unixpacket"})
	noError(t, err)
	over, served := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(served)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		for i, b := range packets {
			var rights []byte
			if i < len(files) && len(files[i]) > 0 {
				rights = unix.UnixRights(files[i]...)
			}
			if _, _, err := c.WriteMsgUnix(b, rights, nil); err != nil {
				break
			}
		}
		if wait {
			<-over
		}
		_ = c.Close()
	}()
	t.Cleanup(func() {
		_ = l.Close()
		close(over)
		<-served
	})
	return dir, name
}
