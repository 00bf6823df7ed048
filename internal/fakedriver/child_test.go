package fakedriver

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/dl"
)

// The environment of a child process: what it is to do, and with which library.
const (
	childVerb    = "FAKEDRIVER_CHILD"
	childLibrary = "FAKEDRIVER_LIBRARY"
	childHandle  = "FAKEDRIVER_HANDLE"
)

// kid is a child process that uses a fake.
type kid struct {
	tb  testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// spawn starts a child for one verb.
func (r *rig) spawn(verb string, handle []byte, files ...*os.File) *kid {
	r.tb.Helper()
	return r.spawnFor(r.tb, verb, handle, files...)
}

func (r *rig) spawnFor(tb testing.TB, verb string, handle []byte, files ...*os.File) *kid {
	r.tb.Helper()
	cmd := exec.CommandContext(r.tb.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childVerb+"="+verb, childLibrary+"="+r.Path(), childHandle+"="+hex.EncodeToString(handle))
	cmd.Env = append(cmd.Env, Env(tb, Options{Vendor: r.options.Vendor})...)
	cmd.Env = append(cmd.Env, "GORACE=atexit_sleep_ms=0") // or each would end a second later
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = files
	in, err := cmd.StdinPipe()
	check(r.tb, err)
	out, err := cmd.StdoutPipe()
	check(r.tb, err)
	check(r.tb, cmd.Start())
	return &kid{r.tb, cmd, in, bufio.NewScanner(out)}
}

// line reads what the child says next.
func (k *kid) line() string {
	k.tb.Helper()
	if !k.out.Scan() {
		k.tb.Fatalf("the child has gone: %v", k.out.Err())
	}
	return k.out.Text()
}

// wants wants the child to say something, and to end well when it has said all.
func (k *kid) wants(lines ...string) {
	k.tb.Helper()
	for _, want := range lines {
		if got := k.line(); got != want {
			k.tb.Errorf("the child says %q, want %q", got, want)
		}
	}
}

// tell lets a child go on that waits.
func (k *kid) tell() {
	k.tb.Helper()
	_, err := io.WriteString(k.in, "\n")
	check(k.tb, err)
}

func (k *kid) wait() {
	k.tb.Helper()
	_ = k.in.Close() // it may have ended
	check(k.tb, k.cmd.Wait())
}

// childRig is what a child has of a fake: the same names as a rig, but it prints codes.
type childRig struct {
	lib  *dl.Library
	args *dl.Block
	hip  bool
	in   *bufio.Reader
}

func child(verb string) int {
	runtime.LockOSThread()
	lib, err := dl.Open(os.Getenv(childLibrary))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	args, err := dl.NewBlock(1024)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c := &childRig{lib, args, lib.Find("hipInit") != 0, bufio.NewReader(os.Stdin)}
	end := c.begin()
	defer end()
	switch verb {
	case "open":
		c.open()
	case "export":
		c.export()
	case "event":
		c.event()
	case "import":
		c.imports()
	case "forget":
		c.out("cuMemAlloc_v2", "hipMalloc", 64)
		c.call("cuMemFree_v2", "hipFree", 1)
	}
	return 0
}

func (c *childRig) name(cuda, hip string) string {
	if c.hip {
		return hip
	}
	return cuda
}

func (c *childRig) call(cuda, hip string, args ...uintptr) int {
	return int(int32(c.lib.Find(c.name(cuda, hip)).Call(args...)))
}

// out calls a function that answers through its first argument.
func (c *childRig) out(cuda, hip string, args ...uintptr) uintptr {
	c.args.Words[0] = 0
	if code := c.call(cuda, hip, append([]uintptr{c.args.Addr}, args...)...); code != 0 {
		fmt.Fprintln(os.Stderr, c.name(cuda, hip), code)
	}
	return uintptr(c.args.Words[0])
}

func (c *childRig) begin() (end func()) {
	if c.hip {
		c.call("", "hipSetDevice", 0)
		return func() {}
	}
	c.call("cuInit", "", 0)
	c.call("cuCtxSetCurrent", "", c.out("cuDevicePrimaryCtxRetain", "", 0))
	return func() { c.call("cuDevicePrimaryCtxRelease_v2", "", 0) }
}

// handle puts the handle from the environment where a call finds it.
func (c *childRig) handle() *dl.Block {
	b, err := dl.NewBlock(8)
	if err != nil {
		panic(err)
	}
	text, err := hex.DecodeString(os.Getenv(childHandle))
	if err != nil {
		panic(err)
	}
	copy(b.Bytes, text)
	return b
}

func (c *childRig) stay() { _, _ = c.in.ReadString('\n') } // the end of the input is as good

func (c *childRig) say(what ...any) { _, _ = os.Stdout.Write(fmt.Appendln(nil, what...)) } // the parent may be gone

func (c *childRig) openHandle() (uintptr, int) {
	c.args.Words[0] = 0
	code := int32(c.lib.Find(c.name("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle")).CallHandle(c.args.Addr, c.handle(), 1))
	return uintptr(c.args.Words[0]), int(code)
}

func (c *childRig) copy(dst, src uintptr, n int) {
	s := c.out("cuStreamCreateWithPriority", "hipStreamCreateWithPriority", 1, 0)
	if c.hip {
		c.call("", "hipMemcpyAsync", dst, src, uintptr(n), 4, s)
	} else {
		c.call("cuMemcpyAsync", "", dst, src, uintptr(n), s)
	}
	c.call("cuStreamSynchronize", "hipStreamSynchronize", s)
	c.call("cuStreamDestroy_v2", "hipStreamDestroy", s)
}

// buffer is pinned memory for what is copied.
func (c *childRig) buffer() ([]byte, func()) {
	b, err := unix.Mmap(-1, 0, osPage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	c.call("cuMemHostRegister_v2", "hipHostRegister", addr(b), osPage, 0)
	return b, func() { c.call("cuMemHostUnregister", "hipHostUnregister", addr(b)) }
}

// open reads what another process has exported, twice, and writes into it.
func (c *childRig) open() {
	p, code := c.openHandle()
	c.say("open", code)
	if code != 0 {
		return
	}
	again, _ := c.openHandle()
	c.say("same address", p == again)
	b, free := c.buffer()
	defer free()
	c.copy(addr(b), p, 16)
	c.say(strings.TrimRight(string(b[:16]), "\x00"))
	c.copy(p, addr(text(b, "from the child")), 16)
	c.say("close", c.call("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", p))
	c.say("close", c.call("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", again))
	c.stay()
	p, code = c.openHandle()
	c.say("open", code)
	if code == 0 {
		c.call("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", p)
	}
}

func text(b []byte, s string) []byte {
	clear(b)
	copy(b, s)
	return b
}

// export gives memory to another process, until it is told to end.
func (c *childRig) export() {
	d := c.out("cuMemAlloc_v2", "hipMalloc", 64)
	c.call("cuIpcGetMemHandle", "hipIpcGetMemHandle", c.args.Addr, d)
	c.say(hex.EncodeToString(c.args.Bytes[:64]))
	c.stay()
	c.call("cuMemFree_v2", "hipFree", d)
}

// event waits for a recording of another process.
func (c *childRig) event() {
	c.args.Words[0] = 0
	code := int32(c.lib.Find(c.name("cuIpcOpenEventHandle", "hipIpcOpenEventHandle")).CallHandle(c.args.Addr, c.handle(), 0))
	e := uintptr(c.args.Words[0])
	c.say("open", code)
	s := c.out("cuStreamCreateWithPriority", "hipStreamCreateWithPriority", 1, 0)
	c.call("cuStreamWaitEvent", "hipStreamWaitEvent", s, e, 0)
	c.say("query", c.call("cuEventQuery", "hipEventQuery", e), c.call("cuStreamQuery", "hipStreamQuery", s))
	c.stay()
	c.say("sync", c.call("cuStreamSynchronize", "hipStreamSynchronize", s), c.call("cuEventSynchronize", "hipEventSynchronize", e))
	c.call("cuStreamDestroy_v2", "hipStreamDestroy", s)
	c.call("cuEventDestroy_v2", "hipEventDestroy", e)
}

// imports maps memory that it was given as descriptor 3.
func (c *childRig) imports() {
	const size = 2 << 20
	fd := uintptr(3)
	if c.hip && int(c.out("", "hipRuntimeGetVersion")&0xffffffff) < 70100000 {
		c.args.Words[10] = 3
		fd = c.args.Addr + 80
	}
	h := c.out("cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle", fd, 1)
	p := c.out("cuMemAddressReserve", "hipMemAddressReserve", size, 0, 0, 0)
	c.say("map", c.call("cuMemMap", "hipMemMap", p, size, 0, h, 0))
	desc := c.args.Bytes[512:524]
	copy(desc, []byte{1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0})
	c.say("access", c.call("cuMemSetAccess", "hipMemSetAccess", p, size, c.args.Addr+512, 1))
	b, free := c.buffer()
	c.copy(addr(b), p+100, 16)
	free()
	c.say(strings.TrimRight(string(b[:16]), "\x00"))
	c.call("cuMemUnmap", "hipMemUnmap", p, size)
	c.call("cuMemAddressFree", "hipMemAddressFree", p, size)
	c.call("cuMemRelease", "hipMemRelease", h)
}
