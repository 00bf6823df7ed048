package tcp

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// NewKeyFile makes a key and writes it to a new file that only its owner may read and
// write, as a line of hexadecimal digits. Kinds: fault.Exists (nothing is overwritten),
// fault.NotFound, fault.Invalid.
func NewKeyFile(path string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return keyFileError(path, err)
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(path) // made here, and of no use to anybody
			err = keyFileError(path, err)
		}
	}()
	var key [MinKeyBytes]byte
	_, _ = rand.Read(key[:]) // never fails
	if _, err = f.Write(append(hex.AppendEncode(nil, key[:]), '\n')); err != nil {
		return err
	}
	return f.Sync()
}

// ReadKeyFile returns the key of a file that NewKeyFile made, or of any that has one in
// hexadecimal digits and that nobody else may touch: it belongs to this user, and has no
// rights for others; or it is root's, whose group may read it too, as containers get
// their secrets.
//
// Kinds: fault.NotFound, fault.Invalid (rights, owner, contents).
func ReadKeyFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // or a pipe would have us wait for its writer
	if err != nil {
		return nil, keyFileError(path, err)
	}
	defer func() { _ = f.Close() }() // was only read
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, keyFileError(path, err)
	}
	if err := checkRights(path, &st, os.Geteuid()); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, 2*maxKeyBytes+3))
	if err != nil {
		return nil, keyFileError(path, err)
	}
	key, err := hex.DecodeString(string(bytes.TrimSpace(text)))
	if err != nil || len(key) < MinKeyBytes || len(key) > maxKeyBytes {
		// Not a word of the contents: it may be a key all the same.
		return nil, fault.New(fault.Invalid, path, "is not one key of %d to %d bytes in hexadecimal digits", MinKeyBytes, maxKeyBytes).
			Hint("make one with tcp.NewKeyFile")
	}
	return key, nil
}

func checkRights(path string, st *unix.Stat_t, uid int) error {
	others := uint32(0o077)
	if st.Uid == 0 {
		others &^= 0o040
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fault.New(fault.Invalid, path, "is not a regular file")
	case st.Uid != 0 && int(st.Uid) != uid:
		return fault.New(fault.Invalid, path, "belongs to user %d, and this process is user %d's", st.Uid, uid).
			Hint("take a file of your own: whoever owns it has the key")
	case st.Mode&others != 0:
		return fault.New(fault.Invalid, path, "has the rights %#o: others may read or change the key", st.Mode&0o777).
			Hint("chmod 600 %s, and make a new key if others had the time to read this one", path)
	}
	return nil
}

func keyFileError(path string, err error) error {
	kind := fault.Invalid
	switch {
	case errors.Is(err, fs.ErrNotExist):
		kind = fault.NotFound
	case errors.Is(err, fs.ErrExist):
		kind = fault.Exists
	}
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err // the path is said already
	}
	return fault.Wrap(kind, path, err)
}
