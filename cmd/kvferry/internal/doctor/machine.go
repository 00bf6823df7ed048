package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/transfer/hostipc"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// Machine is how the doctor sees a machine; tests make up others.
type Machine struct {
	Root     fs.FS               // "/"
	Getenv   func(string) string // the environment of this process
	PageSize int64               // of the OS

	// Statfs says how large the file system at an absolute path is.
	Statfs func(path string) (bytes, free int64, err error)
	// Lock locks that much memory and gives it back.
	Lock func(bytes int) error
	// TakeFD takes a descriptor of a process: this one, which has every right to.
	TakeFD func() error
	// HostIPC tries to share host memory between processes.
	HostIPC func(context.Context) hostipc.Report
	// TCP has this process read from itself over loopback.
	TCP func(context.Context) (tcp.Report, error)
}

// ThisMachine is the machine that this process runs on.
func ThisMachine() *Machine {
	return &Machine{
		Root:     os.DirFS("/"),
		Getenv:   os.Getenv,
		PageSize: int64(os.Getpagesize()),
		Statfs: func(path string) (bytes, free int64, err error) {
			var s unix.Statfs_t
			if err := unix.Statfs(path, &s); err != nil {
				return 0, 0, err
			}
			return int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize, nil
		},
		Lock: func(bytes int) error {
			b, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Munmap(b) }() // which unlocks it, too
			return unix.Mlock(b)
		},
		TakeFD: func() error {
			process, err := unix.PidfdOpen(os.Getpid(), 0)
			if err != nil {
				return fmt.Errorf("pidfd_open: %w", err)
			}
			defer func() { _ = unix.Close(process) }()
			fd, err := unix.PidfdGetfd(process, process, 0)
			if err != nil {
				return fmt.Errorf("pidfd_getfd: %w", err)
			}
			return unix.Close(fd)
		},
		HostIPC: func(ctx context.Context) hostipc.Report { return hostipc.Probe(ctx, hostipc.Options{}) },
		TCP:     func(ctx context.Context) (tcp.Report, error) { return tcp.Check(ctx, tcp.Options{}) },
	}
}

// text returns what a file holds, without space around it, and whether it can be read.
func (m *Machine) text(name string) (string, bool) {
	b, err := fs.ReadFile(m.Root, name)
	return strings.TrimSpace(string(b)), err == nil
}

// exists reports whether there is a file, folder or node of that name.
func (m *Machine) exists(name string) bool {
	_, err := fs.Stat(m.Root, name)
	return err == nil
}

// field returns what stands behind key on its line of a file.
func (m *Machine) field(name, key string) (string, bool) {
	text, _ := m.text(name)
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(rest), true
		}
	}
	return "", false
}

// capable reports whether this process has a capability, by its number.
func (m *Machine) capable(number uint) bool {
	hex, _ := m.field("proc/self/status", "CapEff:")
	have, err := strconv.ParseUint(hex, 16, 64)
	return err == nil && have>>number&1 == 1
}

// Numbers of capabilities.
const (
	capIPCLock   = 14
	capSysPtrace = 19
)

// set reads a list as the kernel writes it: "0-1,4".
func set(list string) map[int]bool {
	members := map[int]bool{}
	for part := range strings.SplitSeq(list, ",") {
		from, to, ranged := strings.Cut(part, "-")
		lo, err := strconv.Atoi(from)
		if err != nil {
			continue
		}
		hi := lo
		if ranged {
			if hi, err = strconv.Atoi(to); err != nil {
				continue
			}
		}
		for i := lo; i <= hi && i < lo+4096; i++ {
			members[i] = true
		}
	}
	return members
}

// size writes a number of bytes for people.
func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	x, unit := float64(n), 0
	for ; x >= 1024 && unit < len(units)-1; unit++ {
		x /= 1024
	}
	if x == float64(int64(x)) || x >= 100 {
		return fmt.Sprintf("%.0f %s", x, units[unit])
	}
	return fmt.Sprintf("%.3g %s", x, units[unit])
}
