package handoff

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

func greet(ctx context.Context, c *Conn) {
	if err := c.SendHello(ctx, nil, nil); err == nil {
		_, _ = c.Receive(ctx)
	}
}

func TestListen_LeavesNothing(t *testing.T) {
	descriptors(t)
	dir := directory(t)
	l := listen(t, ListenOptions{Dir: dir, Serve: greet})
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, l.Name()): 0o600} {
		if st, err := os.Lstat(path); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: mode %v, error %v, want %v", path, st.Mode(), err, want)
		}
	}
	c, _ := dial(t, l, DialOptions{})
	noError(t, l.Close()) // ends the connection, and waits for its goroutine
	_, err := c.Receive(t.Context())
	wantKind(t, err, fault.Closed, "EOF")
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("%v is left, error %v", left, err)
	}
	noError(t, l.Close())
	_, _, err = Dial(t.Context(), l.Name(), DialOptions{Dir: dir})
	wantKind(t, err, fault.NotFound, l.Name())
}

func TestListen_Refuses(t *testing.T) {
	for name, o := range map[string]ListenOptions{
		"no server":   {Prefix: "a"},
		"no prefix":   {Serve: greet},
		"a path":      {Serve: greet, Prefix: "../a"},
		"less than 0": {Serve: greet, Prefix: "a", MaxConns: -1},
		"too many":    {Serve: greet, Prefix: "a", MaxConns: maxConns + 1},
	} {
		if _, err := Listen(o); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: %v, want kind invalid", name, err)
		}
	}
}

// A directory that somebody else could have a hand in is not used.
func TestListen_WantsADirectoryOfItsOwn(t *testing.T) {
	descriptors(t)
	base := directory(t)
	noError(t, os.Mkdir(base, 0o700))
	at := func(name string) string { return filepath.Join(base, name) }
	noError(t, os.WriteFile(at("file"), nil, 0o600))
	noError(t, os.Mkdir(at("real"), 0o700))
	noError(t, os.Symlink(at("real"), at("link")))
	noError(t, os.Mkdir(at("wide"), 0o700))
	noError(t, os.Chmod(at("wide"), 0o750)) //nolint:gosec // what must be refused
	noError(t, os.Mkdir(at("open"), 0o700))
	noError(t, os.Chmod(at("open"), 0o777)) //nolint:gosec // what must be refused
	for dir, x := range map[string]struct {
		kind fault.Kind
		text string
	}{
		"relative":        {fault.Invalid, "not absolute"},
		at("none/below"):  {fault.NotFound, "no such file"},
		at("file"):        {fault.Invalid, "is no directory"},
		at("link"):        {fault.Invalid, "is no directory"},
		at("wide"):        {fault.Invalid, "0750"},
		at("open/inside"): {fault.Invalid, "everybody can replace it"},
		"/proc/self":      {fault.Invalid, ""},
		at(strings.Repeat("x", maxPath-len(base)-len(newName("test")))): {fault.Invalid, "bytes, and an address holds"},
	} {
		_, err := Listen(ListenOptions{Dir: dir, Prefix: "test", Serve: greet})
		wantKind(t, err, x.kind, x.text)
	}
	if os.Geteuid() == 0 { // only root can give a directory away
		noError(t, os.Mkdir(at("given"), 0o700))
		noError(t, os.Chown(at("given"), 12345, 12345))
		_, err := Listen(ListenOptions{Dir: at("given"), Prefix: "test", Serve: greet})
		wantKind(t, err, fault.Invalid, "belongs to user 12345")
	}
	longest := at(strings.Repeat("x", maxPath-len(base)-len(newName("test"))-2))
	dial(t, listen(t, ListenOptions{Dir: longest, Serve: greet}), DialOptions{})
}

func TestDefaultDir(t *testing.T) {
	run, temp := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temp)
	for set, want := range map[string]string{
		run:           filepath.Join(run, "kvferry"),
		"":            temp + "/kvferry-",
		"relative":    temp + "/kvferry-",
		run + "/gone": temp + "/kvferry-",
	} {
		t.Setenv("XDG_RUNTIME_DIR", set)
		if got := DefaultDir(); !strings.HasPrefix(got, want) {
			t.Errorf("$XDG_RUNTIME_DIR %q: %s, want %s…", set, got, want)
		}
	}
	// Both sides find it by themselves.
	t.Setenv("XDG_RUNTIME_DIR", filepath.Dir(directory(t)))
	l, err := Listen(ListenOptions{Prefix: "test", Serve: greet})
	noError(t, err)
	c, _, err := Dial(t.Context(), l.Name(), DialOptions{})
	noError(t, err)
	noError(t, c.Close())
	noError(t, l.Close())
}

func TestDial_RefusesNamesThatLeadElsewhere(t *testing.T) {
	dir := directory(t)
	for _, name := range []string{"", ".", "..", "../" + newName("test"), "/etc/passwd", "test-", newName("test") + "x", newName("TEST"), newName("a") + "\n"} {
		_, _, err := Dial(t.Context(), name, DialOptions{Dir: dir})
		wantKind(t, err, fault.Invalid, "is no name of one")
	}
	_, _, err := Dial(t.Context(), newName("test"), DialOptions{Dir: dir, MaxFiles: MaxFiles + 1})
	wantKind(t, err, fault.Invalid, "MaxFiles")
	_, _, err = Dial(t.Context(), newName("test"), DialOptions{Dir: dir})
	wantKind(t, err, fault.NotFound, "no such file")
}

// Users are those of the kernel's books, on both sides, and nobody else is served.
func TestUsers_MustBeTrusted(t *testing.T) {
	descriptors(t)
	other := pretence{user: func() int { return os.Geteuid() + 1 }}
	l := listen(t, ListenOptions{Serve: greet})
	_, _, err := Dial(t.Context(), l.Name(), DialOptions{Dir: l.o.Dir, test: other})
	wantKind(t, err, fault.Invalid, "is of another user")
	dial(t, l, DialOptions{test: other, AllowUIDs: []int{os.Geteuid()}})

	served := false
	l = listen(t, ListenOptions{test: other, Serve: func(context.Context, *Conn) { served = true }})
	_, _, err = Dial(t.Context(), l.Name(), DialOptions{Dir: l.o.Dir})
	wantKind(t, err, fault.Invalid, "does not trust the user")
	noError(t, l.Close())
	if served {
		t.Error("a stranger was served")
	}
	l = listen(t, ListenOptions{Serve: greet, test: other, AllowUIDs: []int{7, os.Geteuid()}})
	dial(t, l, DialOptions{})
}

func TestListener_BoundsConnections(t *testing.T) {
	descriptors(t)
	l := listen(t, ListenOptions{Serve: greet, MaxConns: 2})
	first, _ := dial(t, l, DialOptions{})
	dial(t, l, DialOptions{})
	_, _, err := Dial(t.Context(), l.Name(), DialOptions{Dir: l.o.Dir})
	wantKind(t, err, fault.Full, "as many connections")
	noError(t, first.Close())
	for { // as soon as the end was seen
		c, _, err := Dial(t.Context(), l.Name(), DialOptions{Dir: l.o.Dir})
		if err == nil {
			noError(t, c.Close())
			return
		}
		wantKind(t, err, fault.Full, "")
	}
}

// Sockets that live are left alone, and not even disturbed: neither one that is served
// nor one that is about to be.
func TestSweep_TakesTheDeadOnly(t *testing.T) {
	descriptors(t)
	dir := directory(t)
	served := make(chan struct{}, 10)
	l := listen(t, ListenOptions{Dir: dir, Serve: func(context.Context, *Conn) { served <- struct{}{} }})
	dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, newName("dead")), Net: "unixpacket"})
	noError(t, err)
	dead.SetUnlinkOnClose(false)
	noError(t, dead.Close())
	bound, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	noError(t, err)
	defer func() { noError(t, unix.Close(bound)) }()
	young := newName("young")
	noError(t, unix.Bind(bound, &unix.SockaddrUnix{Name: filepath.Join(dir, young)}))
	file := newName("file")
	noError(t, os.WriteFile(filepath.Join(dir, file), nil, 0o600))

	next := listen(t, ListenOptions{Dir: dir, Serve: greet})
	left, err := os.ReadDir(dir)
	noError(t, err)
	if len(left) != 4 {
		t.Errorf("%v are left", left)
	}
	for _, name := range []string{l.Name(), young, file, next.Name()} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	if len(served) > 0 {
		t.Error("a live listener was disturbed")
	}
}
