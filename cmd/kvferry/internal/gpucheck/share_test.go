package gpucheck

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
)

// lender is set, to a vendor, in the process that lends memory.
const lender = "KVFERRY_GPUCHECK_LENDS"

const lent = 1 << 20

// export returns what another process opens memory of a by, and where it lies in that.
func export(a *device.Accelerator, addr uintptr) (h [64]byte, offset int64, err error) {
	switch d := a.Driver().(type) {
	case *cuda.Driver:
		e, err := d.ExportMemory(addr)
		return e.Handle, e.Offset, err
	case *hip.Driver:
		e, err := d.ExportMemory(addr)
		return e.Handle, e.Offset, err
	}
	return h, 0, fault.New(fault.Unsupported, a.Name(), "it lends no memory")
}

// openLent opens memory that another process has exported, for a.
func openLent(a *device.Accelerator, h [64]byte) (addr uintptr, opened io.Closer, err error) {
	switch d := a.Driver().(type) {
	case *cuda.Driver:
		o, err := d.OpenMemory(h)
		if err != nil {
			return 0, nil, err
		}
		return o.Addr, o, nil
	case *hip.Driver:
		o, err := d.OpenMemory(h)
		if err != nil {
			return 0, nil, err
		}
		return o.Addr, o, nil
	}
	return 0, nil, fault.New(fault.Unsupported, a.Name(), "it borrows no memory")
}

func pattern(who byte) []byte {
	b := make([]byte, lent)
	for i := range b {
		b[i] = who ^ byte(i*167>>3)
	}
	return b
}

// TestLender is the process that lends, and nothing in this one.
func TestLender(t *testing.T) {
	vendor := os.Getenv(lender)
	if vendor == "" {
		t.Skip("only in the process that TestReal_IPC starts")
	}
	a := open(t, vendor, 0)
	closing(t, a.Close)
	m, err := a.Alloc(lent)
	if err != nil {
		t.Fatal(err)
	}
	closing(t, m.Free)
	devicetest.Write(t, a, m, 0, pattern('x'))
	h, off, err := export(a, m.Base())
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintln(os.Stdout, "lent", hex.EncodeToString(h[:]), off) // or the other gives up
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')                     // until the other has read and written
	if !bytes.Equal(devicetest.Read(t, a, m, 0, lent), pattern('y')) {
		t.Error("the other process's bytes are not here")
	}
}

// TestReal_IPC reads and writes memory of another process by a handle.
func TestReal_IPC(t *testing.T) {
	onDevices(t, func(t *testing.T, vendor string) {
		a := open(t, vendor, 0)
		closing(t, a.Close)
		if !a.Attributes().IPC {
			t.Skip("this device lends no memory by handles")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLender$")
		cmd.Env = append(os.Environ(), lender+"="+vendor, "GORACE=atexit_sleep_ms=10")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		cmd.Stderr = &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(out)
		line := ""
		for !strings.HasPrefix(line, "lent ") {
			if line, err = lines.ReadString('\n'); err != nil {
				t.Fatalf("the other process ended: %v %v\n%s%s", err, cmd.Wait(), &said, line)
			}
			said.WriteString(line)
		}
		var text string
		var off int64
		if _, err := fmt.Sscanf(line, "lent %s %d", &text, &off); err != nil {
			t.Fatal(err)
		}
		var h [64]byte
		if _, err := hex.Decode(h[:], []byte(text)); err != nil {
			t.Fatal(err)
		}
		borrow(t, a, h, off)
		_ = in.Close()
		rest, _ := io.ReadAll(lines)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the other process: %v\n%s%s", err, &said, rest)
		}
	})
}

// borrow opens what was lent, reads it, and writes it.
func borrow(t *testing.T, a *device.Accelerator, h [64]byte, off int64) {
	t.Helper()
	addr, opened, err := openLent(a, h)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := opened.Close(); err != nil {
			t.Error(err)
		}
	}()
	m, err := a.Wrap(addr+uintptr(off), lent)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(devicetest.Read(t, a, m, 0, lent), pattern('x')) {
		t.Error("what was lent is not here")
	}
	devicetest.Write(t, a, m, 0, pattern('y'))
	if err := m.Free(); err != nil {
		t.Error(err)
	}
}
