package transfer

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// descriptor is one that says what it says, of an owner that is not there.
func descriptor(t *testing.T, change func(*transfer.Descriptor)) *transfer.Descriptor {
	t.Helper()
	g, err := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 3, PageSize: 4, KVHeads: 1, HeadDim: 8}.PageMajor()
	if err != nil {
		t.Fatal(err)
	}
	d := &transfer.Descriptor{
		Owner: transfer.NewOwnerID(), Entity: entity + "5", Leases: true, Expires: time.Now().Add(time.Hour).Round(0),
		Geometry: g, Pages: []page.ID{0, 2}, Offers: []transfer.Offer{{Engine: "hostipc", Data: []byte("nowhere")}},
	}
	if change != nil {
		change(d)
	}
	return d
}

func encoded(t *testing.T, d *transfer.Descriptor) []byte {
	t.Helper()
	b, err := d.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReadDescriptor_FromAFileOrALine(t *testing.T) {
	d := descriptor(t, nil)
	plain := encoded(t, d)
	text := base64.StdEncoding.EncodeToString(plain)
	for name, b := range map[string]string{
		"as it is": string(plain), "a line": text + "\n", "a line without an end": text, "more lines": text + "\nAAAA\n", "carriage returns": text + "\r\n",
	} {
		got, err := readDescriptor(t.Context(), Stdio, strings.NewReader(b))
		if err != nil || got.Owner != d.Owner {
			t.Errorf("%s, on standard input: %v", name, err)
		}
		if strings.Contains(name, "more") {
			continue // a file is one descriptor
		}
		file := filepath.Join(t.TempDir(), "d")
		if err := os.WriteFile(file, []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := readDescriptor(t.Context(), file, nil); err != nil || got.Owner != d.Owner {
			t.Errorf("%s, in a file: %v", name, err)
		}
	}
	for name, b := range map[string]string{
		"nothing": "", "a word": "hello\n", "half": text[:len(text)/2] + "\n", "half of a file": string(plain[:len(plain)/2]),
		"broken": string(plain[:20]) + "x" + string(plain[21:]), "endless": strings.Repeat("A", maxText+1000),
	} {
		if _, err := readDescriptor(t.Context(), Stdio, strings.NewReader(b)); !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := readDescriptor(t.Context(), filepath.Join(t.TempDir(), "none"), nil); !errors.Is(err, fault.NotFound) || fault.RemedyOf(err) == "" {
		t.Errorf("no file: %v", err)
	}
	if _, err := readDescriptor(t.Context(), t.TempDir(), nil); !errors.Is(err, fault.Invalid) {
		t.Errorf("a folder: %v", err)
	}
}

func TestReadDescriptor_GivesUpOnALineThatDoesNotCome(t *testing.T) {
	in, out := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := readDescriptor(ctx, Stdio, in); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := out.Close(); err != nil { // its reader ends
		t.Fatal(err)
	}
}

func TestPublished_OneWriterAtATime(t *testing.T) {
	file := filepath.Join(t.TempDir(), "d")
	a, err := publishTo(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := publishTo(file, nil); !errors.Is(err, fault.Busy) || fault.RemedyOf(err) == "" {
		t.Errorf("two at once: %v", err)
	}
	for range 2 {
		d := descriptor(t, nil)
		if err := a.write(d); err != nil {
			t.Fatal(err)
		}
		if got, err := readDescriptor(t.Context(), file, nil); err != nil || got.Owner != d.Owner {
			t.Errorf("got %v", err)
		}
	}
	if s, err := os.Stat(file); err != nil || s.Mode() != 0o600 {
		t.Errorf("mode %v, %v", s.Mode(), err)
	}
	if err := a.close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	// The next one has it, and leaves alone what is not its own any more.
	b, err := publishTo(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.write(descriptor(t, nil)), os.WriteFile(file, []byte("another's"), 0o600), b.close()); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "another's" {
		t.Errorf("%q, %v", text, err)
	}
	var line bytes.Buffer
	c, err := publishTo(Stdio, &line)
	if err != nil {
		t.Fatal(err)
	}
	d := descriptor(t, nil)
	if err := errors.Join(c.write(d), c.close()); err != nil {
		t.Fatal(err)
	}
	if got, err := readDescriptor(t.Context(), Stdio, &line); err != nil || got.Owner != d.Owner {
		t.Errorf("by a line: %v", err)
	}
}

func TestPublished_SaysWhatToDoWhenItsFolderIsGone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p, err := publishTo(filepath.Join(dir, "d"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.write(descriptor(t, nil)), os.RemoveAll(dir)); err != nil {
		t.Fatal(err)
	}
	if err := p.write(descriptor(t, nil)); !errors.Is(err, fault.Busy) || !strings.Contains(fault.RemedyOf(err), "folder") {
		t.Errorf("%v, remedy %q", err, fault.RemedyOf(err))
	}
	if err := p.close(); err != nil { // there is nothing to take away
		t.Error(err)
	}
	p = &published{path: Stdio, out: broken{}}
	if err := p.write(descriptor(t, nil)); !errors.Is(err, fault.Busy) || !errors.Is(err, unix.EPIPE) || fault.RemedyOf(err) == "" {
		t.Errorf("standard output: %v", err)
	}
}

// broken is a pipe that nobody reads any more.
type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, unix.EPIPE }

func TestOwnFolder_IsNobodyElses(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "own")
	if err := errors.Join(ownFolder(dir), ownFolder(dir)); err != nil {
		t.Errorf("a new one: %v", err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(base, "open")
	if err := errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o770)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{link, open, file, filepath.Join(base, "none", "own")} {
		if err := ownFolder(bad); !errors.Is(err, fault.Unsupported) || !strings.Contains(fault.RemedyOf(err), "XDG_RUNTIME_DIR") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// What a pipe gives is waited for until ctx ends, also where nobody writes into it.
func TestReadDescriptor_WaitsForAPipeNoLongerThanCtx(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, err := readDescriptor(ctx, path, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	say := func() error { // once somebody listens
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString("no descriptor\n")
		return errors.Join(err, f.Close())
	}
	if err := say(); err != nil { // to who was given up
		t.Fatal(err)
	}
	for { // until that one has closed it: it would take the next line, too
		f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
	said := make(chan error, 1)
	go func() { said <- say() }()
	if _, err := readDescriptor(t.Context(), path, nil); !errors.Is(err, fault.Invalid) {
		t.Errorf("error %v, want kind invalid", err)
	}
	if err := <-said; err != nil {
		t.Error(err)
	}
}
