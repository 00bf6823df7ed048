package mooncake_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// patience only turns a hang into a message.
const patience = 30 * time.Second

// ownerVariable has the test binary be an owner: its value is the mode.
const ownerVariable = "KVFERRY_MOONCAKE_OWNER"

// big is a cache that is not read in an instant: 128 MiB, or half of it with the race
// detector, which takes its time to fill it.
var big = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 8, Pages: bigPages, PageSize: 16, KVHeads: 8, HeadDim: 128}

const bigSeed = 11

// own is an owner of a big cache until standard input ends. It writes its descriptor to
// standard output.
func own(mode string) error {
	if mode == "removed" {
		if err := os.Remove(os.Args[0]); err != nil {
			return err
		}
	}
	s, err := side(mooncake.Options{InProcess: mode == "in process"})
	if err != nil {
		return err
	}
	g, err := big.PageMajor()
	if err != nil {
		return err
	}
	served, err := transfertest.Serve(s, g, bigSeed)
	if err != nil {
		return err
	}
	d, err := served.Publish(ids(0, big.Pages), false, time.Minute)
	if err == nil {
		_, err = fmt.Println(hex.EncodeToString(d)) //nolint:forbidigo // to its parent
	}
	if err == nil {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	return errors.Join(err, served.Close(), s.Engine.Close())
}

func ids(from, n int) (pages []page.ID) {
	for i := range n {
		pages = append(pages, page.ID(from+i))
	}
	return pages
}

// owner is a process that owns a big cache.
type owner struct {
	testing.TB
	cmd *exec.Cmd
	in  io.Closer
	d   *transfer.Descriptor
}

func startOwner(tb testing.TB, mode string) *owner {
	tb.Helper()
	need(tb)
	exe := must(os.Executable())(tb)
	if mode == "removed" { // a copy of it
		program := must(os.ReadFile(exe))(tb)
		exe = filepath.Join(tb.TempDir(), "owner")
		noError(tb, os.WriteFile(exe, program, 0o700))
	}
	o := &owner{TB: tb, cmd: exec.CommandContext(context.Background(), exe)}
	o.cmd.Env = append(os.Environ(), ownerVariable+"="+mode)
	o.cmd.Stderr = os.Stderr
	out := must(o.cmd.StdoutPipe())(tb)
	o.in = must(o.cmd.StdinPipe())(tb)
	noError(tb, o.cmd.Start())
	tb.Cleanup(func() {
		_ = o.in.Close()
		_ = o.cmd.Process.Signal(unix.SIGCONT) // if it was stopped
		_ = o.cmd.Wait()                       // it may have been killed
	})
	line := must(bufio.NewReaderSize(out, 1<<20).ReadString('\n'))(tb)
	o.d = must(transfer.Decode(must(hex.DecodeString(strings.TrimSpace(line)))(tb)))(tb)
	return o
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		noError(tb, err)
		return v
	}
}

func noError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// bench is a reader of a big cache.
type bench struct {
	testing.TB
	cache, image *kv.Cache
	reader       *transfer.Reader
}

func newBench(tb testing.TB, o mooncake.Options) *bench {
	tb.Helper()
	b := &bench{TB: tb}
	host := must(device.OpenHost(device.HostOptions{}))(tb)
	b.cache = must(kv.NewCache(must(big.LayerMajor())(tb), host))(tb)
	b.image = must(kv.NewCache(must(big.LayerMajor())(tb), host))(tb)
	noError(tb, transfertest.Fill(b.image, bigSeed, ids(5, 2)))
	s := must(side(o))(tb)
	b.reader = must(transfer.NewReader(transfer.Options{Cache: b.cache, Device: host, Engines: []transfer.Engine{s.Engine}, Deadline: patience}))(tb)
	tb.Cleanup(func() {
		noError(tb, errors.Join(b.reader.Close(), s.Engine.Close(), b.image.Close(), b.cache.Close(), host.Close()))
	})
	return b
}

// start starts to read n pages, and returns when some of their bytes are there, and not
// all of them.
func (b *bench) start(d *transfer.Descriptor, n int) *device.Ticket {
	b.Helper()
	m := must(b.cache.Region(0))(b)
	t := b.reader.StartRetrieve(b.Context(), 0, n*big.PageSize, ids(0, n), ids(0, n), d)
	for tick := time.NewTicker(50 * time.Microsecond); ; <-tick.C {
		for off := int64(0); off < m.Size(); off += 64 << 10 {
			if must(m.LoadUint64(off))(b) != 0 {
				return t
			}
		}
		if over, err := t.Poll(); over {
			b.Fatalf("the read is over before its first byte: %v", err)
		}
	}
}

// wait returns the outcome of a ticket.
func (b *bench) wait(t *device.Ticket) error {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := t.Wait(ctx)
	if ctx.Err() != nil {
		b.Fatal("the read does not end")
	}
	return err
}

// quiet writes all pages, and returns what must then be there after whatever was in
// flight: the same.
func (b *bench) quiet() (check func()) {
	b.Helper()
	m := must(b.cache.Region(0))(b).Bytes()
	for i := range m {
		m[i] = 0xa5
	}
	return func() {
		b.Helper()
		if n := bytes.Count(m, []byte{0xa5}); n != len(m) {
			b.Errorf("%d bytes were written when the read was over", len(m)-n)
		}
	}
}

// readsAgain reads two pages, and compares all bytes of theirs.
func (b *bench) readsAgain(d *transfer.Descriptor) {
	b.Helper()
	noError(b, b.reader.Retrieve(b.Context(), 0, 2*big.PageSize, ids(3, 2), ids(5, 2), d))
	for layer := range big.Layers {
		for plane := range 2 {
			for i := range 2 {
				got := must(b.cache.Plane(layer, plane, page.ID(3+i)))(b)
				want := must(b.image.Plane(layer, plane, page.ID(5+i)))(b)
				if !bytes.Equal(got, want) {
					b.Fatalf("layer %d, plane %d of page %d has other bytes", layer, plane, 5+i)
				}
			}
		}
	}
}

// children returns the processes that a process has started to have the library.
func children(tb testing.TB, parent int) (pids []int) {
	tb.Helper()
	stats := must(filepath.Glob("/proc/[0-9]*/stat"))(tb)
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(text), ") ") // state, parent, …
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[1] != strconv.Itoa(parent) {
			continue
		}
		line, err := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline"))
		if err == nil && strings.Contains(string(line), "\x00"+mooncake.Verb+"\x00") {
			pids = append(pids, must(strconv.Atoi(filepath.Base(filepath.Dir(name))))(tb))
		}
	}
	return pids
}

// leavesNothing has the test fail when a child is left at its end.
func leavesNothing(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if left := children(t, os.Getpid()); len(left) > 0 {
			t.Errorf("children %v are left", left)
		}
	})
}

// child returns the only one.
func child(tb testing.TB, parent int) int {
	tb.Helper()
	pids := children(tb, parent)
	if len(pids) != 1 {
		tb.Fatalf("process %d has the children %v", parent, pids)
	}
	return pids[0]
}

func exists(pid int) bool { return unix.Kill(pid, 0) == nil }

func TestChild_KilledInTheMiddleOfARead(t *testing.T) {
	leavesNothing(t)
	o := startOwner(t, "child")
	b := newBench(t, mooncake.Options{})
	ticket := b.start(o.d, big.Pages)
	pid := child(t, os.Getpid())
	noError(t, unix.Kill(pid, unix.SIGKILL))
	err := b.wait(ticket)
	if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), fmt.Sprintf("child process %d: signal: killed", pid)) {
		t.Errorf("error %v, want kind device and how the child ended", err)
	}
	check := b.quiet()
	if exists(pid) {
		t.Error("the read is over, and the child is not")
	}
	check()
	b.readsAgain(o.d)
}

// A child that stands still can't keep a read: it is killed, and what it said is told.
func TestChild_StoppedInTheMiddleOfARead(t *testing.T) {
	leavesNothing(t)
	o := startOwner(t, "child")
	b := newBench(t, mooncake.Options{Patience: 100 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	m := must(b.cache.Region(0))(b)
	ticket := b.reader.StartRetrieve(ctx, 0, big.Pages*big.PageSize, ids(0, big.Pages), ids(0, big.Pages), o.d)
	for tick := time.NewTicker(50 * time.Microsecond); must(m.LoadUint64(0))(b) == 0; <-tick.C {
	}
	pid := child(t, os.Getpid())
	noError(t, unix.Kill(pid, unix.SIGSTOP))
	cancel()
	err := b.wait(ticket)
	if !errors.Is(err, fault.Busy) || !strings.Contains(err.Error(), "killed: a read that was given up did not end in 100ms") {
		t.Errorf("error %v, want kind busy, and that the child was killed", err)
	}
	check := b.quiet()
	if exists(pid) {
		t.Error("the read is over, and the child is not")
	}
	check()
	b.readsAgain(o.d)
}

func TestOwner_KilledInTheMiddleOfARead(t *testing.T) {
	leavesNothing(t)
	ownerKilled(t, mooncake.Options{})
}

// What is read in process waits for the library most of the time.
func TestOwner_KilledInTheMiddleOfAReadInProcess(t *testing.T) {
	t.Parallel()
	ownerKilled(t, mooncake.Options{InProcess: true, Stall: time.Second})
}

func ownerKilled(t *testing.T, reader mooncake.Options) {
	t.Helper()
	for _, mode := range []string{"child", "in process"} {
		o := startOwner(t, mode)
		b := newBench(t, reader)
		ticket := b.start(o.d, big.Pages)
		var pids []int
		if mode == "child" {
			pids = children(t, o.cmd.Process.Pid)
		}
		noError(t, o.cmd.Process.Kill())
		if err := b.wait(ticket); !errors.Is(err, fault.Device) {
			t.Errorf("owner %s: error %v, want kind device", mode, err)
		}
		check := b.quiet()
		_ = o.cmd.Wait() // says that it was killed
		waitFor(t, "the owner's child to end", func() bool { return len(pids) == 0 || !exists(pids[0]) })
		if err := b.reader.Retrieve(t.Context(), 0, 1, ids(0, 1), ids(0, 1), o.d); fault.KindOf(err) == 0 {
			t.Errorf("of a dead owner: error %v, want one with a kind", err)
		}
		check()
	}
}

// An owner outlives its child: what it publishes next is offered by another one.
func TestOwner_OffersAnewWhenItsChildDies(t *testing.T) {
	leavesNothing(t)
	need(t)
	s := must(side(mooncake.Options{}))(t)
	served := must(transfertest.Serve(s, must(big.PageMajor())(t), bigSeed))(t)
	t.Cleanup(func() { noError(t, served.Close()) })
	first := child(t, os.Getpid())
	publish := func() (d *transfer.Descriptor, err error) {
		b, err := served.Publish(ids(0, big.Pages), false, time.Minute)
		if err == nil {
			d, err = transfer.Decode(b)
		}
		return d, err
	}
	old := must(publish())(t)
	b := newBench(t, mooncake.Options{})
	b.readsAgain(old)
	noError(t, unix.Kill(first, unix.SIGKILL))
	var d *transfer.Descriptor
	waitFor(t, "another offer", func() bool {
		var err error
		if d, err = publish(); err != nil && !errors.Is(err, fault.Device) {
			t.Fatalf("error %v, want kind device", err)
		}
		return err == nil && !bytes.Equal(d.Offers[0].Data, old.Offers[0].Data)
	})
	if exists(first) {
		t.Errorf("child %d is there, and another serves", first)
	}
	b.readsAgain(d)
	if err := b.reader.Retrieve(t.Context(), 0, 1, ids(0, 1), ids(0, 1), old); fault.KindOf(err) == 0 {
		t.Errorf("by an offer that is lost: error %v, want one with a kind", err)
	}
}

func waitFor(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	limit := time.After(patience)
	for tick := time.NewTicker(time.Millisecond); !done(); {
		select {
		case <-tick.C:
		case <-limit:
			tb.Fatal("waited in vain for ", what)
		}
	}
}

// An owner whose library stands still is given up at the deadline, and read again when
// it goes on.
func TestOwner_StoppedInTheMiddleOfARead(t *testing.T) {
	leavesNothing(t)
	ownerStopped(t, mooncake.Options{Patience: 50 * time.Millisecond})
}

func TestOwner_StoppedInTheMiddleOfAReadInProcess(t *testing.T) {
	t.Parallel()
	ownerStopped(t, mooncake.Options{InProcess: true, Stall: time.Second})
}

func ownerStopped(t *testing.T, reader mooncake.Options) {
	t.Helper()
	o := startOwner(t, "in process")
	b := newBench(t, reader)
	ctx, cancel := context.WithCancel(t.Context())
	m := must(b.cache.Region(0))(b)
	ticket := b.reader.StartRetrieve(ctx, 0, big.Pages*big.PageSize, ids(0, big.Pages), ids(0, big.Pages), o.d)
	for tick := time.NewTicker(50 * time.Microsecond); must(m.LoadUint64(0))(b) == 0; <-tick.C {
	}
	noError(t, o.cmd.Process.Signal(unix.SIGSTOP))
	cancel()
	err := b.wait(ticket)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	check := b.quiet()
	noError(t, o.cmd.Process.Signal(unix.SIGCONT))
	check()
	// Connections that the library gave up may fail a read once more, by name.
	waitFor(t, "the owner to be read again", func() bool {
		err := b.reader.Retrieve(t.Context(), 0, 1, ids(0, 1), ids(0, 1), o.d)
		if err != nil && !errors.Is(err, fault.Device) {
			t.Fatalf("error %v, want kind device", err)
		}
		return err == nil
	})
	b.readsAgain(o.d)
	for i, x := range must(b.cache.Plane(0, 0, 7))(t) {
		if x != 0xa5 {
			t.Fatalf("byte %d of a page that was given up is %#x", i, x)
		}
	}
}
