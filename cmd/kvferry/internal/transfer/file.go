package transfer

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/transfer"
)

// Stdio as a file's name is standard output, or standard input. There a descriptor is a
// line of base64, so that it can be copied from one terminal into another.
const Stdio = "-"

// magic is what a descriptor begins with.
const magic = "KVFD"

// DefaultDescriptor is the file by which serve and read find each other on one host: in
// the folder of the user's own where their sockets are, too.
func DefaultDescriptor() string { return filepath.Join(handoff.DefaultDir(), "transfer.kvfd") }

// ownFolder makes the folder of the default descriptor, and refuses one that others can
// use. Kind: fault.Unsupported.
func ownFolder(dir string) error {
	const hint = "set XDG_RUNTIME_DIR to a folder of your own, or name a file with --descriptor"
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fault.Wrap(fault.Unsupported, "--descriptor", err).Hint(hint)
	}
	var s unix.Stat_t
	if err := unix.Lstat(dir, &s); err != nil {
		return fault.Wrap(fault.Unsupported, "--descriptor: "+dir, err).Hint(hint)
	}
	if s.Mode&unix.S_IFMT != unix.S_IFDIR || int(s.Uid) != os.Geteuid() || s.Mode&0o077 != 0 {
		return fault.New(fault.Unsupported, "--descriptor: "+dir, "is not of this user alone (mode %#o, owner %d)", s.Mode&0o7777, s.Uid).Hint(hint)
	}
	return nil
}

// published is the file of an owner's descriptors. One process at a time writes it.
type published struct {
	path string
	lock *os.File // nil for standard output
	out  io.Writer
	last []byte // what was written last
}

// checkTarget refuses to put a descriptor where something else is, which would be lost.
// Kinds: fault.Exists, fault.Unsupported.
func checkTarget(path string) error {
	s, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault.Wrap(fault.Unsupported, "--descriptor", err).Hint("name a file in a folder that can be written to")
	}
	if !s.Mode().IsRegular() {
		return fault.New(fault.Exists, "--descriptor: "+path, "is there, and is no regular file").
			Hint("name a new file, or give --descriptor - for standard output")
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fault.Wrap(fault.Unsupported, "--descriptor", err).Hint("name another file")
	}
	defer func() { _ = f.Close() }() // it was only read
	var head [len(magic)]byte
	if n, _ := io.ReadFull(f, head[:]); n > 0 && string(head[:n]) != magic {
		return fault.New(fault.Exists, "--descriptor: "+path, "is something else than a descriptor, and would be lost").
			Hint("name another file, or remove this one")
	}
	return nil
}

// publishTo takes a descriptor's file for this process. Kinds: fault.Busy (another one
// has it), fault.Exists (it is something else), fault.Unsupported.
func publishTo(path string, stdout io.Writer) (*published, error) {
	if path == Stdio {
		return &published{path: path, out: stdout}, nil
	}
	if path == DefaultDescriptor() {
		if err := ownFolder(filepath.Dir(path)); err != nil {
			return nil, err
		}
	}
	if err := checkTarget(path); err != nil {
		return nil, err
	}
	p := &published{path: path}
	name := path + ".lock"
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fault.Wrap(fault.Unsupported, "--descriptor", err).Hint("name a file in a folder that can be written to")
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close() // nothing was written
			return nil, fault.New(fault.Busy, "--descriptor: "+path, "another kvferry transfer serve writes it").
				Hint("end that one, or give each a file of its own with --descriptor")
		}
		// Who held the lock before may have removed the file that was opened here.
		var ours, there unix.Stat_t
		if unix.Fstat(int(f.Fd()), &ours) == nil && unix.Stat(name, &there) == nil && ours.Ino == there.Ino && ours.Dev == there.Dev {
			p.lock = f
			return p, nil
		}
		_ = f.Close() // nothing was written
	}
}

// write makes d what readers find. Nobody sees part of it. Kind: fault.Busy (it can't be
// written any more).
func (p *published) write(d *transfer.Descriptor) error {
	b, err := d.AppendBinary(nil)
	if err != nil {
		return err
	}
	p.last = b
	if p.path == Stdio {
		if _, err := fmt.Fprintln(p.out, base64.StdEncoding.EncodeToString(b)); err != nil {
			return fault.Wrap(fault.Busy, "--descriptor -", err).Hint("what reads standard output has to stay as long as serve does")
		}
		return nil
	}
	if err := p.replace(b); err != nil {
		return fault.Wrap(fault.Busy, "--descriptor "+p.path+": can't be written", err).
			Hint("see whether its folder is still there, can be written to and has room; then start serve again")
	}
	return nil
}

func (p *published) replace(b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(p.path), ".kvferry-*") // for its owner only
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), p.path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// close takes the file away, unless somebody else has put another one there.
func (p *published) close() error {
	if p.lock == nil {
		return nil
	}
	var err error
	if there, readErr := os.ReadFile(p.path); readErr == nil && bytes.Equal(there, p.last) {
		err = os.Remove(p.path)
	}
	unlock := os.Remove(p.lock.Name())
	if errors.Is(unlock, fs.ErrNotExist) { // with its folder, maybe
		unlock = nil
	}
	return errors.Join(err, unlock, p.lock.Close())
}

// readDescriptor reads a descriptor's file. Kinds: fault.NotFound, fault.Invalid.
func readDescriptor(ctx context.Context, path string, stdin io.Reader) (*transfer.Descriptor, error) {
	var b []byte
	var err error
	switch {
	case path == Stdio:
		b, err = readLine(ctx, stdin, path)
	case onlyOnce(path):
		b, err = readLine(ctx, &opener{path: path}, path)
	default:
		b, err = readFile(path)
	}
	if err != nil {
		return nil, err
	}
	if text := bytes.TrimSpace(b); !bytes.HasPrefix(b, []byte(magic)) && len(text) > 0 {
		plain := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
		if n, err := base64.StdEncoding.Decode(plain, text); err == nil {
			b = plain[:n]
		}
	}
	d, err := transfer.Decode(b)
	if err != nil {
		hint := fault.RemedyOf(err)
		if hint == "" {
			hint = "copy it again: kvferry transfer serve writes it"
		}
		// Also where its checksum is wrong: no page was read.
		return nil, fault.Wrap(fault.Invalid, "--descriptor "+path, err).Hint("%s", hint)
	}
	return d, nil
}

// maxText is how long the base64 of a descriptor can be.
const maxText = transfer.MaxDescriptorBytes/3*4 + 8

// readFile reads a file of at most so many bytes. Kind: fault.NotFound, fault.Invalid.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, unreadable(path, err)
	}
	defer func() { _ = f.Close() }() // it was only read
	b, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "--descriptor "+path, err).Hint("name the file that kvferry transfer serve wrote")
	}
	return b, nil
}

// unreadable says why a file can't be opened. Kinds: fault.NotFound, fault.Invalid (rights).
func unreadable(path string, err error) error {
	if !errors.Is(err, fs.ErrPermission) {
		return fault.Wrap(fault.NotFound, "--descriptor", err).
			Hint("start kvferry transfer serve in another terminal, or name the file that it wrote with --descriptor")
	}
	const hint = "let this user read it, or copy it to where this user can: it is not secret, but only its owner should change it"
	var s unix.Stat_t
	if unix.Stat(path, &s) != nil { // its folder's rights are in the way
		return fault.Wrap(fault.Invalid, "--descriptor", err).Hint(hint)
	}
	return fault.Wrap(fault.Invalid, fmt.Sprintf("--descriptor: it has the rights %#o, belongs to user %d, and this process is user %d's", s.Mode&0o7777, s.Uid, os.Geteuid()), err).Hint(hint)
}

// onlyOnce reports whether what path gives is gone once it was read, and may be long in
// coming: standard input, or a pipe.
func onlyOnce(path string) bool {
	s, err := os.Stat(path)
	return path == Stdio || err == nil && s.Mode()&(fs.ModeNamedPipe|fs.ModeDevice) != 0
}

// opener opens its file when it is read from: to open a pipe is to wait for its writer.
type opener struct {
	path string
	file *os.File
}

func (o *opener) Read(b []byte) (n int, err error) {
	if o.file == nil {
		if o.file, err = os.Open(o.path); err != nil {
			return 0, err
		}
	}
	return o.file.Read(b)
}

func (o *opener) Close() error {
	if o.file == nil {
		return nil
	}
	return o.file.Close()
}

// readLine reads the first line of r, or until ctx ends: then its goroutine stays until r
// does. It closes r if it is one of ours.
func readLine(ctx context.Context, r io.Reader, path string) ([]byte, error) {
	type line struct {
		b   []byte
		err error
	}
	got := make(chan line, 1)
	go func() {
		var l line
		var one [4096]byte
		if o, ok := r.(*opener); ok {
			defer func() { _ = o.Close() }() // it was only read
		}
		isFile := func() bool { return bytes.HasPrefix(l.b, []byte(magic)) }
		for l.err == nil && len(l.b) <= maxText && (isFile() || !bytes.ContainsRune(l.b, '\n')) {
			var n int
			n, l.err = r.Read(one[:])
			l.b = append(l.b, one[:n]...)
		}
		if errors.Is(l.err, io.EOF) {
			l.err = nil
		}
		got <- l
	}()
	select {
	case l := <-got:
		if errors.Is(l.err, fs.ErrPermission) {
			return nil, unreadable(path, l.err)
		}
		if l.err != nil {
			return nil, fault.Wrap(fault.Invalid, "--descriptor "+path, l.err).Hint("give it the line that kvferry transfer serve --descriptor - wrote")
		}
		b, _, _ := bytes.Cut(l.b, []byte("\n"))
		if bytes.HasPrefix(l.b, []byte(magic)) {
			b = l.b // as it is in a file
		}
		return b, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
