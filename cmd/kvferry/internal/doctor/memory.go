package doctor

import (
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/device"
)

const (
	// littleMemory is what makes pools too small to be of use.
	littleMemory = 1 << 30
	// enoughLock is a limit that nobody runs into.
	enoughLock = 64 << 30
	// lockTest is how much memory is locked to see whether it works.
	lockTest = 16 << 20
)

// memory says how much there is for pools: what a pool would be granted.
func (m *Machine) memory() Finding {
	const name = "memory"
	kib := func(key string) int64 {
		s, _ := m.field("proc/meminfo", key)
		n, _ := strconv.ParseInt(strings.TrimSuffix(s, " kB"), 10, 64)
		return n << 10
	}
	all, free := kib("MemTotal:"), kib("MemAvailable:")
	granted, err := device.AvailableMemoryIn(m.Root)
	switch {
	case err != nil:
		return yellow(name, limitRemedy(err, "mount /proc in this container"), "not known: %v", err)
	case granted < littleMemory:
		return yellow(name, "end what needs memory, or raise the container's limit",
			"%s available of %s: little for pools", size(granted), size(all))
	case granted < free:
		return green(name, "%s, the rest of this memory cgroup's limit; the machine has %s available of %s", size(granted), size(free), size(all))
	}
	return green(name, "%s available of %s", size(granted), size(all))
}

// lock says how much memory may be locked.
func (m *Machine) lock() Finding {
	const name = "locking"
	line, _ := m.field("proc/self/limits", "Max locked memory")
	f := strings.Fields(line)
	if len(f) < 2 {
		return yellow(name, "mount /proc in this container", "the limit is not known")
	}
	limit, err := strconv.ParseInt(f[0], 10, 64)
	free := err != nil || limit >= enoughLock || m.capable(capIPCLock) // "unlimited" is no number
	tried := m.Lock(lockTest)
	const (
		remedy = "docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a unit of systemd"
		cost   = "RDMA pins no more than that, and a GPU's driver may count what it pins"
	)
	switch {
	case free && tried != nil:
		return yellow(name, "look for what else refuses: a security module, or a memory cgroup that is full",
			"nothing should limit it, yet a test with %s failed: %v", size(lockTest), tried)
	case err != nil:
		return green(name, "no limit")
	case free && limit < enoughLock:
		return green(name, "no limit for this process (CAP_IPC_LOCK); it is %s for others", size(limit))
	case free:
		return green(name, "up to %s", size(limit))
	}
	switch hard, err := strconv.ParseInt(f[1], 10, 64); {
	case err != nil:
		return yellow(name, "ulimit -l unlimited; "+remedy, "up to %s, and no limit to who asks: %s", size(limit), cost)
	case hard > limit:
		return yellow(name, "ulimit -l "+strconv.FormatInt(hard>>10, 10)+"; "+remedy, "up to %s, and %s to who asks: %s", size(limit), size(hard), cost)
	}
	return yellow(name, remedy, "up to %s: %s", size(limit), cost)
}

// hugePages says whether pools, which are shared memory, get huge pages.
func (m *Machine) hugePages() Finding {
	const name = "huge pages"
	if m.PageSize != 4096 {
		return green(name, "not needed: the pages of this OS are %s", size(m.PageSize))
	}
	const file = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
	text, ok := m.text(file)
	_, chosen, _ := strings.Cut(text, "[")
	chosen, _, _ = strings.Cut(chosen, "]")
	switch {
	case !ok || chosen == "":
		return yellow(name, "use a kernel with transparent huge pages, and mount /sys",
			"none for shared memory: pools are slower to fill and to pin")
	case chosen == "never" || chosen == "deny":
		return yellow(name, "echo advise > /"+file,
			"none for shared memory (shmem_enabled is %s): pools are slower to fill and to pin", chosen)
	}
	return green(name, "for pools (shmem_enabled is %s)", chosen)
}

// numa says which memory this process may use, and whether the cards are near it.
func (m *Machine) numa() Finding {
	const name = "NUMA"
	online, ok := m.text("sys/devices/system/node/online")
	if nodes := set(online); !ok || len(nodes) < 2 {
		return green(name, "one node")
	}
	list, ok := m.field("proc/self/status", "Mems_allowed_list:")
	allowed := set(list)
	if !ok || len(allowed) == 0 {
		return green(name, "nodes %s", online)
	}
	for _, c := range m.pciCards() {
		if c.node >= 0 && !allowed[c.node] {
			return yellow(name, "give the container the node of its card: docker run --cpuset-mems, or numactl --membind",
				"nodes %s; this process gets memory of %s only, and card %s is at node %d: every copy crosses between them", online, list, c.address, c.node)
		}
	}
	return green(name, "nodes %s, of which this process gets memory of %s", online, list)
}
