package handoff

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

const (
	maxPath   = len(unix.RawSockaddrUnix{}.Path) - 1 // what an address holds, but for its final 0
	maxSwept  = 4096                                 // sockets that are looked at when a new one is made
	nameBytes = 16                                   // of chance in a name
)

// names are the names of sockets. A name comes from outside too, and has no way out of
// its directory.
var names = regexp.MustCompile(`^[a-z]{1,16}-[0-9a-f]{32}$`)

// DefaultDir is where sockets lie when nothing else is said: kvferry in the runtime
// directory of the user ($XDG_RUNTIME_DIR) where there is one, else kvferry-<uid> among
// the temporary files. Both sides must have the same.
func DefaultDir() string {
	if run := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
		if st, err := os.Stat(run); err == nil && st.IsDir() {
			return filepath.Join(run, "kvferry")
		}
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("kvferry-%d", os.Getuid()))
}

// socketPath returns the path of the socket of that name, as an address can hold it.
// Kind: fault.Invalid.
func socketPath(dir, name string) (string, error) {
	if !names.MatchString(name) {
		return "", fault.New(fault.Invalid, "socket", "%.80q is no name of one", name)
	}
	if dir == "" {
		dir = DefaultDir()
	}
	path := filepath.Join(dir, name)
	if len(path) > maxPath {
		return "", fault.New(fault.Invalid, "socket "+path, "its path has %d bytes, and an address holds %d", len(path), maxPath).
			Hint("choose a directory with a path of at most %d bytes", maxPath-len(name)-1)
	}
	return path, nil
}

func newName(prefix string) string {
	var b [nameBytes]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + "-" + hex.EncodeToString(b[:])
}

// ownDir makes dir if need be, and refuses one that anybody else can write to or look
// into. Kinds: fault.Invalid, fault.NotFound (the directory above it).
func ownDir(dir string) error {
	what := "directory " + dir
	if !filepath.IsAbs(dir) {
		return fault.New(fault.Invalid, what, "its path is not absolute")
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		kind := fault.Invalid
		if errors.Is(err, fs.ErrNotExist) {
			kind = fault.NotFound
		}
		return fault.Wrap(kind, what, err).Hint("make the directory above it, or choose another one")
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Dir(dir), &st); err != nil {
		return fault.Wrap(fault.Invalid, what, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o002 != 0 && st.Mode&unix.S_ISVTX == 0 {
		return fault.New(fault.Invalid, what, "everybody can replace it: the directory above has the mode %#o", st.Mode&0o7777).
			Hint("choose a directory of your own, such as $XDG_RUNTIME_DIR")
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fault.Wrap(fault.Invalid, what+": is no directory of this user", err).Hint("remove it, or choose another one")
	}
	defer func() { _ = unix.Close(fd) }() // was only looked at
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		return fault.Wrap(fault.Invalid, what, err)
	case int(st.Uid) != os.Geteuid():
		return fault.New(fault.Invalid, what, "belongs to user %d, and this process runs as %d", st.Uid, os.Geteuid()).
			Hint("choose another directory")
	case st.Mode&0o077 != 0:
		return fault.New(fault.Invalid, what, "others can use it: its mode is %#o", st.Mode&0o7777).Hint("chmod 700 %s", dir)
	}
	return nil
}

// sweep removes the sockets in dir whose listener is gone.
func sweep(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // it will be seen by who listens
	}
	for i, e := range entries {
		if i == maxSwept {
			return
		}
		if e.Type() != fs.ModeSocket || !names.MatchString(e.Name()) {
			continue
		}
		if path := filepath.Join(dir, e.Name()); stale(path) {
			_ = os.Remove(path) // somebody else sweeps too
		}
	}
}

// stale reports whether nobody has the socket at path. It asks for a connection of a kind
// that no listener has, so that those that live are not disturbed, nor those that are
// about to listen.
func stale(path string) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }() // was never connected
	return unix.Connect(fd, &unix.SockaddrUnix{Name: path}) == unix.ECONNREFUSED
}
