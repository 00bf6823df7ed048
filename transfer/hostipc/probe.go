package hostipc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
)

const (
	noYama    = -1 // this kernel has no such setting, or it can't be read
	capPtrace = 19 // CAP_SYS_PTRACE
)

// Report says what this engine can do here.
type Report struct {
	// Dir is where sockets are made.
	Dir string
	// Sharing is why memory can't be handed to another process, nil when it can.
	Sharing error
	// Process is why memory that is no memfd can't be read by process_vm_readv, nil when
	// it can. What the owner allows besides is found out when it is opened.
	Process error
	// PtraceScope is the sysctl kernel.yama.ptrace_scope; less than 0 where there is none.
	PtraceScope int
}

// Probe tries what an owner and a reader do, in this process. It returns when ctx ends at
// the latest.
func Probe(ctx context.Context, o Options) Report {
	r := Report{Dir: o.Dir, PtraceScope: ptraceScope()}
	if r.Dir == "" {
		r.Dir = handoff.DefaultDir()
	}
	r.Sharing = probeSharing(ctx, o)
	r.Process = probeProcess(r.PtraceScope)
	return r
}

// probeSharing hands a page of memory to this process, and reads it.
func probeSharing(ctx context.Context, o Options) (err error) {
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	m, err := host.Alloc(8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Free()) }()
	const mark = 0x6b76666572727921
	if _, err := m.AddUint64(0, mark); err != nil {
		return err
	}
	x, from := extentOf(m, 8, nil)
	files, err := readOnly(from)
	if err != nil {
		return err
	}
	defer closeAll(files)
	l, err := handoff.Listen(handoff.ListenOptions{Dir: o.Dir, Prefix: "probe", Serve: func(ctx context.Context, c *handoff.Conn) {
		_ = c.SendHello(ctx, nil, files) // the other side is below, and says what it misses
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	c, hello, err := handoff.Dial(ctx, l.Name(), handoff.DialOptions{Dir: o.Dir})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	defer hello.Close()
	if len(hello.Files) != len(x.pieces) {
		return fault.New(fault.Device, "shared memory", "%d descriptors arrived of %d", len(hello.Files), len(x.pieces))
	}
	mapped, err := mapExtent(&x, hello.Files, 8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mapped.free()) }()
	if got, err := mapped.mem.LoadUint64(0); err != nil || got != mark {
		return fault.New(fault.Device, "shared memory", "reads %#x, and %#x was written; error %v", got, uint64(mark), err)
	}
	return nil
}

// probeProcess reads this process, which is always allowed where the call is, and says
// what stands in the way of reading another of the same user.
func probeProcess(scope int) error {
	const what = "process_vm_readv"
	from, to := []byte{1}, []byte{0}
	local, remote := unix.Iovec{Base: &to[0]}, unix.RemoteIovec{Base: device.WrapHost(from).Base(), Len: 1}
	local.SetLen(1)
	if n, err := unix.ProcessVMReadv(os.Getpid(), []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0); n != 1 || to[0] != from[0] {
		return fault.Wrap(fault.Unsupported, what, err).Hint("have the sandbox of this process allow the call")
	}
	if scope > 0 && (scope > 2 || !mayTrace()) {
		return fault.New(fault.Unsupported, what, "of another process is refused: the sysctl kernel.yama.ptrace_scope is %d", scope).Hint("%s", remedy(scope))
	}
	return nil
}

// mayTrace reports whether this process has CAP_SYS_PTRACE.
func mayTrace() bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&head, &data[0]) == nil && data[0].Effective&(1<<capPtrace) != 0
}

// ptraceScope returns the sysctl of that name.
func ptraceScope() int {
	text, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return noYama
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return noYama
	}
	return n
}

// remedy says what makes process_vm_readv of another process possible.
func remedy(scope int) string {
	const share = "keep the owner's cache in memory that can be shared (device.Host)"
	switch {
	case scope == 1:
		return share + ", or set the sysctl kernel.yama.ptrace_scope to 0, or have the owner allow this reader: prctl(PR_SET_PTRACER)"
	case scope == 2:
		return share + ", or give the reader CAP_SYS_PTRACE"
	case scope > 2:
		return share + fmt.Sprintf(": kernel.yama.ptrace_scope is %d until this machine starts anew", scope)
	default:
		return share + ", or run both sides as one user, in one PID namespace, and where seccomp allows process_vm_readv"
	}
}
