package doctor

import (
	"io/fs"
	"strings"
)

const (
	// littleShared is what containers get when nobody asks for more, and then some.
	littleShared = 1 << 30
	// initialPIDs is the inode of the machine's own PID namespace, the same on all kernels.
	initialPIDs = "pid:[4026531836]"
)

// sharedMemory says how much engines can share through files in memory.
func (m *Machine) sharedMemory() Finding {
	const (
		name   = "/dev/shm"
		remedy = "docker run --shm-size=16g or --ipc=host; an emptyDir with medium: Memory in a pod"
	)
	if !m.mounted("/dev/shm") {
		return yellow(name, remedy, "not there: workers of engines exchange through it (kvferry's pools need none)")
	}
	bytes, free, err := m.Statfs("/dev/shm")
	switch {
	case err != nil:
		return yellow(name, remedy, "%v", err)
	case bytes < littleShared:
		return yellow(name, remedy, "%s, %s of it free: workers of engines exchange through it (kvferry's pools need none)", size(bytes), size(free))
	case free < littleShared:
		return yellow(name, "remove files that ended programs have left in /dev/shm", "%s free of %s", size(free), size(bytes))
	}
	return green(name, "%s, %s of it free", size(bytes), size(free))
}

// mounted reports whether a file system is mounted at path.
func (m *Machine) mounted(path string) bool {
	text, _ := m.text("proc/self/mountinfo")
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == path {
			return true
		}
	}
	return false
}

// pidNamespace says who can open whose device memory.
func (m *Machine) pidNamespace() Finding {
	const name = "PID namespace"
	switch inode, err := fs.ReadLink(m.Root, "proc/self/ns/pid"); {
	case err != nil:
		return yellow(name, "mount /proc in this container", "not known: %v", err)
	case inode == initialPIDs:
		return green(name, "the machine's own")
	}
	return yellow(name, "start kvferry and engines with --pid=host, or in one pod with shareProcessNamespace: true",
		"a container's own: memory of a GPU is shared by handle only among processes in it")
}

// reach says whether this process may take descriptors of others of the same user, and
// why not.
func (m *Machine) reach() (ok bool, why string) {
	scope, known := m.text("proc/sys/kernel/yama/ptrace_scope")
	switch {
	case !known || scope == "0":
		return true, ""
	case scope == "3":
		return false, "ptrace_scope 3 allows nothing"
	case m.capable(capSysPtrace):
		return true, ""
	case scope == "1":
		return false, "ptrace_scope 1 allows its own children only"
	}
	return false, "ptrace_scope " + scope + " asks for CAP_SYS_PTRACE"
}

// ptrace says whether descriptors of other processes can be taken.
func (m *Machine) ptrace() Finding {
	const name = "ptrace"
	scope, known := m.text("proc/sys/kernel/yama/ptrace_scope")
	ok, why := m.reach()
	switch {
	case !ok && scope == "3":
		return yellow(name, "set kernel.yama.ptrace_scope below 3 where the system sets it, and restart the machine",
			"%s: what an engine exports by descriptors can't be taken", why)
	case !ok:
		return yellow(name, "sysctl kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE",
			"%s: what an engine exports by descriptors can't be taken", why)
	case !known:
		return green(name, "this process reaches those of its user (no Yama)")
	case scope != "0":
		return green(name, "this process reaches others (CAP_SYS_PTRACE; ptrace_scope is %s)", scope)
	}
	return green(name, "this process reaches those of its user (ptrace_scope is 0)")
}

// takeFD says whether the kernel and its filters let descriptors be taken at all.
func (m *Machine) takeFD() Finding {
	const name = "descriptors"
	if err := m.TakeFD(); err != nil {
		return yellow(name, limitRemedy(err, "Linux 5.6 or newer, and a seccomp profile that allows pidfd_open and pidfd_getfd"),
			"can't be taken from a process: %v", err)
	}
	return green(name, "can be taken from a process that this one reaches")
}

// expandable says how torch will export its memory, if it has this environment.
func (m *Machine) expandable() Finding {
	const name = "torch's memory"
	for _, variable := range []string{"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} {
		value := strings.ToLower(strings.ReplaceAll(m.Getenv(variable), " ", ""))
		if !strings.Contains(value, "expandable_segments:true") {
			continue
		}
		why := "kvferry has to reach the engine's process for them"
		if ok, no := m.reach(); !ok {
			why = "they can't be taken here (" + no + ")"
		}
		return yellow(name, "unset expandable_segments for engines that share their cache",
			"%s asks for expandable segments, which are exported by descriptors, not by handle: %s", variable, why)
	}
	return green(name, "no expandable segments in this environment (an engine's may differ)")
}
