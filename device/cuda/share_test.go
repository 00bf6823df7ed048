//go:build !nogpu

package cuda_test

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// role is set in processes that a test starts: what they do.
const role = "KVFERRY_TEST_ROLE"

// TestProcess is the other process of the tests below, and nothing in this one. It takes
// orders by lines, and answers each with one.
func TestProcess(t *testing.T) {
	version, err := strconv.Atoi(os.Getenv(role))
	if err != nil {
		t.Skip("only in processes that other tests start")
	}
	r := open(t, "0", fakedriver.Options{Version: version})
	p := &process{rig: r, s: r.stream()}
	p.say("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		answer, err := p.do(strings.Fields(in.Text()))
		if err != nil {
			answer = fmt.Sprint("error: ", fault.KindOf(err), ": ", strings.ReplaceAll(err.Error(), "\n", " "))
		}
		p.say("answer " + answer)
	}
}

// process is what a process of TestProcess has.
type process struct {
	*rig
	s      device.StreamHandle
	own    uintptr
	opened *cuda.Opened
	event  *cuda.SharedEvent
	shared *cuda.Shared
}

func (p *process) say(line string) {
	p.Helper()
	_, err := fmt.Fprintln(os.Stdout, line)
	p.must(err)
}

const shareBytes = 64 << 10

func (p *process) do(order []string) (answer string, err error) {
	switch order[0] {
	case "export": // memory with a pattern, from byte 4096 on
		if p.own, err = p.drv.Alloc(shareBytes); err != nil {
			return "", err
		}
		p.fake.Poke(p.own, pattern(shareBytes, 'x'))
		e, err := p.drv.ExportMemory(p.own + 4096)
		return fmt.Sprint(hex.EncodeToString(e.Handle[:]), " ", e.Offset, " ", e.Bytes), err
	case "free":
		return "", p.drv.Free(p.own)
	case "open":
		if p.opened, err = p.drv.OpenMemory(handle(order[1])); err != nil {
			return "", err
		}
		return fmt.Sprint(p.opened.Bytes, " ", hex.EncodeToString(p.fake.Peek(p.opened.Addr, 32))), nil
	case "write":
		p.fake.Poke(p.opened.Addr, pattern(int(p.opened.Bytes), 'y'))
		return "", nil
	case "close":
		return "", p.opened.Close()
	case "event":
		if p.event, err = p.drv.NewSharedEvent(); err != nil {
			return "", err
		}
		h, err := p.event.Export()
		return hex.EncodeToString(h[:]), err
	case "record":
		return "", p.drv.Record(p.event.Event, p.s)
	case "map": // descriptor 3
		bytes, err := strconv.ParseInt(order[1], 10, 64)
		if err != nil {
			return "", err
		}
		if p.shared, err = p.drv.ImportShared(3, bytes); err != nil {
			return "", err
		}
		return hex.EncodeToString(p.fake.Peek(p.shared.Addr, 32)), nil
	case "fill":
		p.fake.Poke(p.shared.Addr, pattern(int(p.shared.Bytes), 'z'))
		return "", nil
	case "unmap":
		return "", p.shared.Close()
	case "forget":
		return "", p.event.Close()
	}
	return "", fmt.Errorf("no order %q", order)
}

func handle(text string) (h cuda.Handle) {
	b, err := hex.DecodeString(text)
	if err != nil || copy(h[:], b) != len(h) {
		panic("a handle that is none: " + text)
	}
	return h
}

// other is a process of TestProcess, seen from the test that has started it.
type other struct {
	*testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, version int, files ...*os.File) *other {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProcess$")
	cmd.Env = append(os.Environ(), role+"="+strconv.Itoa(version))
	cmd.ExtraFiles, cmd.Stderr = files, os.Stderr
	o := &other{T: t, cmd: cmd}
	var err error
	if o.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	o.out = bufio.NewScanner(out)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line := o.line(); line != "ready" {
		t.Fatalf("the process says %q", line)
	}
	return o
}

func (o *other) line() string {
	o.Helper()
	if !o.out.Scan() {
		o.Fatalf("the process has ended: %v, %v", o.out.Err(), o.cmd.Wait())
	}
	return o.out.Text()
}

func (o *other) ask(order ...any) string {
	o.Helper()
	if _, err := fmt.Fprintln(o.in, order...); err != nil {
		o.Fatal(err)
	}
	line := o.line()
	answer, ok := strings.CutPrefix(line, "answer ")
	if !ok {
		o.Fatalf("%v: the process says %q", order, line)
	}
	return answer
}

// end ends the process, which then says whether it has left anything.
func (o *other) end() {
	o.Helper()
	if err := o.in.Close(); err != nil {
		o.Error(err)
	}
	var rest []string
	for o.out.Scan() {
		rest = append(rest, o.out.Text())
	}
	if err := o.cmd.Wait(); err != nil {
		o.Errorf("the process: %v\n%s", err, strings.Join(rest, "\n"))
	}
}

func (o *other) kill() {
	o.Helper()
	if err := o.cmd.Process.Kill(); err != nil {
		o.Fatal(err)
	}
	_ = o.cmd.Wait() // it was killed
}

// exported asks for an export of the process.
func (o *other) exported() (e cuda.Export) {
	o.Helper()
	var text string
	if _, err := fmt.Sscan(o.ask("export"), &text, &e.Offset, &e.Bytes); err != nil {
		o.Fatal(err)
	}
	e.Handle = handle(text)
	return e
}

func TestIPC_ReadsAndWritesMemoryOfAnotherProcess(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "0", fakedriver.Options{Version: version})
		o := start(t, version)
		e := o.exported()
		if e.Offset != 4096 || e.Bytes < shareBytes {
			t.Errorf("the export is %d bytes from %d", e.Bytes, e.Offset)
		}
		m, err := r.drv.OpenMemory(e.Handle)
		r.must(err)
		if m.Bytes != e.Bytes {
			t.Errorf("%d bytes were opened of %d", m.Bytes, e.Bytes)
		}
		// A second opening is the same memory, and lasts until both are closed.
		again, err := r.drv.OpenMemory(e.Handle)
		r.must(err)
		if again.Addr != m.Addr || r.fake.Calls("cuIpcOpenMemHandle_v2") != 1 {
			t.Errorf("opened at %#x and %#x by %d calls", m.Addr, again.Addr, r.fake.Calls("cuIpcOpenMemHandle_v2"))
		}
		r.must(m.Close())
		if err := m.Close(); !errors.Is(err, fault.Closed) {
			t.Errorf("second close: %v", err)
		}
		own, s := r.alloc(shareBytes), r.stream()
		n, err := r.engine("cuda").CopyRects(s, []device.Rect{{Dst: own, Src: again.Addr, Width: shareBytes, Rows: 1, Slices: 1}})
		if n != 1 || err != nil {
			t.Fatal(n, err)
		}
		r.must(r.sync(s))
		r.want("memory of the other process", own, pattern(shareBytes, 'x'))
		r.must(again.Close())
		if n := r.fake.Counts().OpenedMemories; n != 0 {
			t.Errorf("%d opened memories stay", n)
		}

		// And the other way round.
		back := r.filled(shareBytes, 'b')
		b, err := r.drv.ExportMemory(back)
		r.must(err)
		want := fmt.Sprint(b.Bytes, " ", hex.EncodeToString(pattern(32, 'b')))
		if got := o.ask("open", hex.EncodeToString(b.Handle[:])); got != want {
			t.Errorf("the other process reads %s, want %s", got, want)
		}
		o.ask("write")
		o.ask("close")
		r.want("memory that the other process has written", back, pattern(shareBytes, 'y'))
		o.ask("free")
		o.end()
	}
}

func TestIPC_RefusesWhatIsNoMoreOrIsItsOwn(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	o := start(t, fakedriver.CUDA130)
	freed := o.exported()
	o.ask("free")
	if _, err := r.drv.OpenMemory(freed.Handle); !errors.Is(err, fault.Device) {
		t.Errorf("a handle of memory that was freed: %v", err)
	}
	live := o.exported()
	m, err := r.drv.OpenMemory(live.Handle)
	r.must(err)
	o.kill()
	// What was opened stays until it is closed; nothing more can be opened.
	r.want("memory of a process that has ended", m.Addr, pattern(64, 'x'))
	r.must(m.Close())
	if _, err := r.drv.OpenMemory(live.Handle); !errors.Is(err, fault.Device) {
		t.Errorf("a handle of a process that has ended: %v", err)
	}

	addr, err := r.drv.Alloc(64)
	r.must(err)
	own, err := r.drv.ExportMemory(addr)
	r.must(err)
	if _, err := r.drv.OpenMemory(own.Handle); !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
		t.Errorf("a handle of its own: %v", err)
	}
	if n := r.fake.Calls("cuIpcOpenMemHandle_v2"); n != 3 {
		t.Errorf("%d handles were opened", n)
	}
	r.must(r.drv.Free(addr))
}

func TestIPC_WaitsForAnEventOfAnotherProcess(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	o := start(t, fakedriver.CUDA130)
	e, err := r.drv.OpenEvent(handle(o.ask("event")))
	r.must(err)
	if done, err := r.drv.EventDone(e.Event); !done || err != nil {
		t.Errorf("an event that was never recorded is done: %v, %v", done, err)
	}
	o.ask("record")
	s := r.stream()
	r.must(r.drv.Wait(s, e.Event))
	r.must(r.sync(s))
	r.must(r.drv.SyncEvent(e.Event))
	if done, err := r.drv.EventDone(e.Event); !done || err != nil {
		t.Errorf("an event that was waited for is done: %v, %v", done, err)
	}
	r.must(e.Close())
	o.ask("forget")
	o.end()
}

func TestShared_IsMappedByAnotherProcess(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	m, err := r.drv.AllocShared(3<<20 + 1)
	r.must(err)
	if m.Bytes < 3<<20+1 || m.Addr == 0 {
		t.Fatalf("%+v", m)
	}
	r.want("fresh shared memory", m.Addr, make([]byte, m.Bytes))
	r.fake.Poke(m.Addr, pattern(int(m.Bytes), 'v'))
	fd, err := m.Export()
	r.must(err)
	f := os.NewFile(uintptr(fd), "shared")
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the descriptor is left to children: flags %#x, %v", flags, err)
	}
	o := start(t, fakedriver.CUDA130, f)
	r.must(f.Close())
	if got, want := o.ask("map", m.Bytes), hex.EncodeToString(pattern(32, 'v')); got != want {
		t.Errorf("the other process reads %s, want %s", got, want)
	}
	o.ask("fill")
	r.want("what the other process has written", m.Addr, pattern(int(m.Bytes), 'z'))
	o.ask("unmap")
	o.end()
	r.must(m.Close())
	if err := m.Close(); !errors.Is(err, fault.Closed) {
		t.Errorf("second close: %v", err)
	}
	if _, err := m.Export(); !errors.Is(err, fault.Closed) {
		t.Errorf("export after close: %v", err)
	}
}

// TestShared_GivesBackWhatItCannotFinish has each step fail.
func TestShared_GivesBackWhatItCannotFinish(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	m, err := r.drv.AllocShared(1)
	r.must(err)
	fd, err := m.Export()
	r.must(err)
	defer unix.Close(fd) //nolint:errcheck // nothing was written to it
	for _, call := range []string{
		"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap",
		"cuMemSetAccess", "cuMemsetD8Async",
	} {
		before := r.fake.Counts()
		for what, do := range map[string]func() (*cuda.Shared, error){
			"alloc":  func() (*cuda.Shared, error) { return r.drv.AllocShared(1) },
			"import": func() (*cuda.Shared, error) { return r.drv.ImportShared(fd, m.Bytes) },
		} {
			if (call == "cuMemCreate" || call == "cuMemsetD8Async") && what == "import" || call == "cuMemImportFromShareableHandle" && what == "alloc" {
				continue
			}
			r.fake.FailCall(call, 1, outOfMemory)
			if _, err := do(); !errors.Is(err, fault.Memory) || !strings.Contains(err.Error(), call) {
				t.Errorf("%s, and %s fails: %v", what, call, err)
			}
		}
		after := r.fake.Counts()
		if after.Handles != before.Handles || after.Reservations != before.Reservations || after.Mappings != before.Mappings {
			t.Errorf("%s fails: %+v is left of %+v", call, after, before)
		}
	}
	for _, bytes := range []int64{0, -1, 1<<63 - 1} {
		if _, err := r.drv.AllocShared(bytes); !errors.Is(err, fault.Invalid) {
			t.Errorf("%d bytes: %v", bytes, err)
		}
		if _, err := r.drv.ImportShared(fd, bytes); !errors.Is(err, fault.Invalid) {
			t.Errorf("%d bytes: %v", bytes, err)
		}
	}
	r.must(m.Close())
}

// TestShared_OfSeveralPieces maps two memories one behind the other, and finds out what
// lies at an address of theirs.
func TestShared_OfSeveralPieces(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "0", fakedriver.Options{Version: version})
		var pieces []cuda.Piece
		for range 2 {
			m, err := r.drv.AllocShared(1)
			r.must(err)
			fd, err := m.Export()
			r.must(err)
			pieces = append(pieces, cuda.Piece{FD: fd, Bytes: m.Bytes})
			r.must(m.Close()) // its descriptor keeps it
		}
		m, err := r.drv.ImportPieces(pieces)
		r.must(err)
		if _, err := m.Export(); !errors.Is(err, fault.Unsupported) {
			t.Errorf("one descriptor of two pieces: %v", err)
		}
		at := m.Addr + uintptr(pieces[0].Bytes) - 4096
		own := r.filled(8192, 'p')
		s := r.stream()
		_, err = r.engine("cuda").CopyRects(s, []device.Rect{{Dst: at, Src: own, Width: 8192, Rows: 1, Slices: 1}})
		r.must(err)
		r.must(r.sync(s))

		again, offset, err := r.drv.ExportPieces(at, 8192, 2)
		r.must(err)
		if len(again) != 2 || offset != pieces[0].Bytes-4096 || again[0].Bytes != pieces[0].Bytes || again[1].Bytes != pieces[1].Bytes {
			t.Fatalf("%+v from byte %d on, of %+v", again, offset, pieces)
		}
		o, err := r.drv.ImportPieces(again)
		r.must(err)
		r.want("both pieces", o.Addr+uintptr(offset), pattern(8192, 'p'))
		r.must(o.Close())
		if one, offset, err := r.drv.ExportPieces(at+4096, 1, 1); len(one) != 1 || offset != 0 || err != nil {
			t.Errorf("the second piece: %+v from byte %d on, %v", one, offset, err)
		} else {
			r.must(unix.Close(one[0].FD))
		}

		// What can't be exported leaves nothing open.
		before, err := os.ReadDir("/proc/self/fd")
		r.must(err)
		handles := r.fake.Counts().Handles
		if _, _, err := r.drv.ExportPieces(at, 8192, 1); !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
			t.Errorf("more pieces than are wanted: %v", err)
		}
		if _, _, err := r.drv.ExportPieces(own, 8192, 2); !errors.Is(err, fault.Device) {
			t.Errorf("other memory: %v", err)
		}
		for _, call := range []string{"cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemGetAddressRange_v2"} {
			r.fake.FailCall(call, 2, invalidValue)
			if _, _, err := r.drv.ExportPieces(at, 8192, 2); !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), call) {
				t.Errorf("%s fails: %v", call, err)
			}
		}
		after, err := os.ReadDir("/proc/self/fd")
		r.must(err)
		if n := r.fake.Counts().Handles; n != handles || len(after) != len(before) {
			t.Errorf("%d handles and %d descriptors are open, and were %d and %d", n, len(after), handles, len(before))
		}
		if _, err := r.drv.ImportPieces(nil); !errors.Is(err, fault.Invalid) {
			t.Errorf("no pieces: %v", err)
		}
		r.must(m.Close())
		for _, p := range append(pieces, again...) {
			r.must(unix.Close(p.FD))
		}
	}
}
