package device

import (
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/fault"
)

// AvailableMemory returns how many bytes this process could still use: the least
// of what the machine has available and what each memory cgroup (v1 or v2) that
// it is in has left. File cache that the kernel can drop counts as available.
// Kind: fault.Memory, when the kernel does not say.
func AvailableMemory() (int64, error) { return AvailableMemoryIn(os.DirFS("/")) }

// AvailableMemoryIn is AvailableMemory of the machine whose files are in root.
func AvailableMemoryIn(root fs.FS) (int64, error) {
	meminfo, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, fault.Wrap(fault.Memory, "available memory", err)
	}
	kib, ok := field(meminfo, "MemAvailable:")
	if !ok {
		return 0, fault.New(fault.Memory, "available memory", "no MemAvailable in /proc/meminfo")
	}
	least := kib << 10

	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return least, nil //nolint:nilerr // a kernel without cgroups has no limits
	}
	for line := range strings.Lines(string(groups)) {
		// hierarchy:controllers:path, where v2 has no controllers.
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		room := roomV2
		if part[1] != "" {
			if !strings.Contains(","+part[1]+",", ",memory,") {
				continue
			}
			room = roomV1
		}
		// Every ancestor limits too. In a container the path may be the host's,
		// with nothing here but the container's own group, mounted as the root.
		for dir := path.Clean("/" + part[2]); ; dir = path.Dir(dir) {
			if n, limited := room(root, dir); limited {
				least = max(0, min(least, n))
			}
			if dir == "/" {
				break
			}
		}
	}
	return least, nil
}

func roomV1(root fs.FS, dir string) (bytes int64, limited bool) {
	return room(root, path.Join("sys/fs/cgroup/memory", dir), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
}

func roomV2(root fs.FS, dir string) (bytes int64, limited bool) {
	return room(root, path.Join("sys/fs/cgroup", dir), "memory.max", "memory.current", "inactive_file")
}

// room returns what the memory cgroup in dir has left, which is negative when it
// is over its limit, and whether it has a limit at all.
func room(root fs.FS, dir, limitFile, usedFile, cacheKey string) (bytes int64, limited bool) {
	limit, ok := number(root, path.Join(dir, limitFile))
	if !ok { // no such group, or "max"
		return 0, false
	}
	used, ok := number(root, path.Join(dir, usedFile))
	if !ok {
		return 0, false
	}
	stat, _ := fs.ReadFile(root, path.Join(dir, "memory.stat"))
	cache, _ := field(stat, cacheKey)
	return limit - max(0, used-cache), true
}

// field returns the number after key on its line of text.
func field(text []byte, key string) (int64, bool) {
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
