//go:build !nogpu

package hip_test

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// role is set in the process that the test below starts: the version of its library.
const role = "KVFERRY_TEST_ROLE"

const shareBytes = 64 << 10

// TestProcess is the other process, and nothing in this one. It exports memory, an event
// and, by its descriptor 3, fills shared memory; it ends when its input does.
func TestProcess(t *testing.T) {
	version, err := strconv.Atoi(os.Getenv(role))
	if err != nil {
		t.Skip("only in the process that another test starts")
	}
	r := open(t, "0", fakedriver.Options{Version: version})
	addr, s := r.memory(shareBytes, 'x'), r.stream()
	e, err := r.drv.ExportMemory(addr + 4096)
	r.must(err)
	event, err := r.drv.NewSharedEvent()
	r.must(err)
	r.must(r.drv.Record(event.Event, s))
	h, err := event.Export()
	r.must(err)
	shared, err := r.drv.ImportShared(3, 2<<20)
	r.must(err)
	r.want("shared memory of the other process", shared.Addr, pattern(4096, 'v'))
	r.fake.Poke(shared.Addr, pattern(4096, 'w'))
	r.must(shared.Close())
	_, err = fmt.Fprintf(os.Stdout, "exports %x %d %d %x\n", e.Handle, e.Offset, e.Bytes, h)
	r.must(err)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
	}
	r.must(event.Close())
}

// TestSharing_WithAnotherProcess shares memory by handle and by descriptor, and an event.
// An import of a descriptor is another call before 7.1.
func TestSharing_WithAnotherProcess(t *testing.T) {
	for _, version := range versions() {
		r := open(t, "1", fakedriver.Options{Version: version})
		shared, err := r.drv.AllocShared(1)
		r.must(err)
		r.want("fresh shared memory", shared.Addr, make([]byte, 4096))
		r.fake.Poke(shared.Addr, pattern(4096, 'v'))
		fd, err := shared.Export()
		r.must(err)
		file := os.NewFile(uintptr(fd), "shared")

		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProcess$")
		cmd.Env = append(os.Environ(), role+"="+strconv.Itoa(version))
		cmd.ExtraFiles, cmd.Stderr = []*os.File{file}, os.Stderr
		in, err := cmd.StdinPipe()
		r.must(err)
		out, err := cmd.StdoutPipe()
		r.must(err)
		r.must(cmd.Start())
		r.must(file.Close())
		lines := bufio.NewScanner(out)
		var memory, event string
		var offset, bytes int64
		var said []string
		for memory == "" && lines.Scan() {
			said = append(said, lines.Text())
			_, _ = fmt.Sscanf(lines.Text(), "exports %s %d %d %s", &memory, &offset, &bytes, &event) // others are not for us
		}
		if memory == "" {
			t.Fatalf("the process has ended: %v\n%s", cmd.Wait(), strings.Join(said, "\n"))
		}
		r.want("shared memory", shared.Addr, pattern(4096, 'w'))
		r.must(shared.Close())

		if offset != 4096 || bytes < shareBytes {
			t.Errorf("the export is %d bytes from %d", bytes, offset)
		}
		m, err := r.drv.OpenMemory(handle(memory))
		r.must(err)
		again, err := r.drv.OpenMemory(handle(memory))
		r.must(err)
		if again.Addr != m.Addr || m.Bytes != bytes || r.fake.Calls("hipIpcOpenMemHandle") != 1 {
			t.Errorf("opened %d bytes at %#x and %#x by %d calls", m.Bytes, m.Addr, again.Addr, r.fake.Calls("hipIpcOpenMemHandle"))
		}
		s := r.stream()
		e, err := r.drv.OpenEvent(handle(event))
		r.must(err)
		r.must(r.drv.Wait(s, e.Event))
		dst := r.memory(shareBytes, 'd')
		_, err = r.drv.Engines()[0].CopyRects(s, []device.Rect{{Dst: dst, Src: m.Addr, Width: shareBytes, Rows: 1, Slices: 1}})
		r.must(err)
		r.must(r.sync(s))
		r.want("memory of the other process", dst, pattern(shareBytes, 'x'))
		r.must(errors.Join(e.Close(), m.Close(), again.Close()))
		r.must(in.Close())
		for lines.Scan() {
			said = append(said, lines.Text())
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the process: %v\n%s", err, strings.Join(said, "\n"))
		}
		if _, err := r.drv.OpenMemory(handle(memory)); !errors.Is(err, fault.Device) {
			t.Errorf("a handle of a process that has ended: %v", err)
		}
	}
}

func handle(text string) (h hip.Handle) {
	b, err := hex.DecodeString(text)
	if err != nil || copy(h[:], b) != len(h) {
		panic("a handle that is none: " + text)
	}
	return h
}

// TestExport_IsAlwaysOfTheBase: the fake's handles differ by the address that they are
// made from, as AMD's do.
func TestExport_IsAlwaysOfTheBase(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	addr := r.memory(shareBytes, 'x')
	a, err := r.drv.ExportMemory(addr)
	r.must(err)
	b, err := r.drv.ExportMemory(addr + 100)
	r.must(err)
	if a.Handle != b.Handle || a.Offset != 0 || b.Offset != 100 {
		t.Errorf("exports of one memory are at %d and %d, of the same handle: %v", a.Offset, b.Offset, a.Handle == b.Handle)
	}
	if _, err := r.drv.OpenMemory(a.Handle); !errors.Is(err, fault.Invalid) {
		t.Errorf("a handle of its own: %v", err)
	}
}
