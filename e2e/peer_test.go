package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/needtest"
	"golang.org/x/sys/unix"
)

// patience only turns a hang into a message.
const patience = 60 * time.Second

// fetched is the folder of Mooncake's peers.
func fetched() string {
	dir := os.Getenv("KVFERRY_VENDOR")
	if dir == "" {
		dir = filepath.Join("..", ".vendor")
	}
	return filepath.Join(dir, "mooncake")
}

// libraries returns the C library and what is to be opened before it.
func libraries(tb testing.TB) []string {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join(fetched(), "libraries"))
	if err != nil {
		needtest.Missing(tb, "Mooncake's library is missing: e2e/fetch fetches it: "+err.Error())
	}
	return strings.Fields(string(text))
}

// python is a peer in Python: see peer.py.
type python struct {
	testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
	name string // by which its library is found
}

func startPython(tb testing.TB) *python {
	tb.Helper()
	libraries(tb) // or the test ends: both are fetched together
	dir := must(filepath.Abs(filepath.Join(fetched(), "python")))(tb)
	p := &python{TB: tb, cmd: exec.CommandContext(context.Background(), "python3", "peer.py", "127.0.0.1")}
	p.cmd.Env = append(os.Environ(), "PYTHONPATH="+dir)
	p.cmd.Stderr = os.Stderr
	p.in = must(p.cmd.StdinPipe())(tb)
	p.out = bufio.NewScanner(must(p.cmd.StdoutPipe())(tb))
	p.out.Buffer(nil, 64<<20)
	noError(tb, p.cmd.Start())
	tb.Cleanup(func() {
		_ = p.in.Close()
		_ = p.cmd.Process.Signal(unix.SIGKILL) // its library takes its time, and it has nothing to lose
		_ = p.cmd.Wait()
	})
	p.answer(&p.name)
	return p
}

// answer reads the next answer.
func (p *python) answer(to any) {
	p.Helper()
	hang := time.AfterFunc(patience, func() { _ = p.cmd.Process.Signal(unix.SIGKILL) })
	defer hang.Stop()
	for p.out.Scan() {
		if text, ok := strings.CutPrefix(p.out.Text(), "ANSWER "); ok {
			noError(p, json.Unmarshal([]byte(text), to))
			return
		}
	}
	p.Fatalf("the peer in Python has ended: %v", errors.Join(p.out.Err(), p.cmd.Wait()))
}

// do runs a command, with its arguments in pairs.
func (p *python) do(to any, command string, arguments ...any) {
	p.Helper()
	m := map[string]any{"do": command}
	for i := 0; i < len(arguments); i += 2 {
		m[arguments[i].(string)] = arguments[i+1]
	}
	must(p.in.Write(append(must(json.Marshal(m))(p), '\n')))(p)
	p.answer(to)
}

// alloc has the peer make memory with the contents of that seed, that others can reach.
func (p *python) alloc(n int64, seed uint64) (base uint64) {
	p.Helper()
	p.do(&base, "alloc", "bytes", n, "seed", seed)
	return base
}

func (p *python) set(base uint64, off int64, b []byte) {
	p.Helper()
	var none any
	p.do(&none, "set", "base", base, "off", off, "hex", fmt.Sprintf("%x", b))
}

// contents are the bytes that both sides know.
func contents(seed uint64, n int64) []byte {
	var b []byte
	for i := uint64(0); int64(len(b)) < n; i++ {
		sum := sha256.Sum256(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, seed), i))
		b = append(b, sum[:]...)
	}
	return b[:n]
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
