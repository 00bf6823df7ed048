package replay

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/internal/needtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestProgress_IsSilentInAPipe(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	var buffer bytes.Buffer
	for _, out := range []io.Writer{w, &buffer} {
		p := NewProgress(out, 3)
		p.Step()
		p.Close()
		p.Close()
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b)+buffer.Len() > 0 {
		t.Errorf("wrote %q and %q, %v", b, buffer.Bytes(), err)
	}
}

func TestProgress_CountsOnATerminalAndGoesAway(t *testing.T) {
	screen, tty := openTerminal(t)
	p := NewProgress(tty, 3)
	if p == nil {
		t.Fatal("a terminal is not recognised")
	}
	p.Step()
	p.Step()
	readUntil(t, screen, "2 of 3 requests")
	p.Close()
	p.Close()
	if _, err := tty.WriteString("after"); err != nil {
		t.Fatal(err)
	}
	if last := readUntil(t, screen, "after"); !strings.Contains(last, "\x1b[") {
		t.Errorf("the bar was not taken away: %q", last)
	}
}

// readUntil reads what was written to a terminal up to a text that must come.
func readUntil(t *testing.T, screen *os.File, text string) string {
	t.Helper()
	var got strings.Builder
	for b := make([]byte, 4096); !strings.Contains(got.String(), text); {
		n, err := screen.Read(b)
		got.Write(b[:n])
		if err != nil {
			t.Fatalf("no %q: %v after %q", text, err, got.String())
		}
	}
	return got.String()
}

// openTerminal returns both ends of a pseudo-terminal.
func openTerminal(t *testing.T) (screen, tty *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		needtest.Missing(t, fmt.Sprintf("this machine has no pseudo-terminals: %v", err))
	}
	t.Cleanup(func() { _ = screen.Close() })
	if err := unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		needtest.Missing(t, fmt.Sprintf("this machine has no pseudo-terminals: %v", err))
	}
	t.Cleanup(func() { _ = tty.Close() })
	if err := unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 120}); err != nil {
		t.Fatal(err)
	}
	return screen, tty
}
