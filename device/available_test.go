package device

import (
	"testing"
	"testing/fstest"

	"github.com/kvferry/kvferry/fault"
)

func TestAvailableMemory_IsTheLeastOfMachineAndGroups(t *testing.T) {
	const kib = 1 << 10
	meminfo := "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable:    1000 kB\n"
	v2 := func(dir, limit, used, cache string) map[string]string {
		return map[string]string{dir + "/memory.max": limit, dir + "/memory.current": used, dir + "/memory.stat": "anon 7\ninactive_file " + cache + "\n"}
	}
	v1 := func(dir, limit, used, cache string) map[string]string {
		return map[string]string{dir + "/memory.limit_in_bytes": limit, dir + "/memory.usage_in_bytes": used, dir + "/memory.stat": "inactive_file 1\ntotal_inactive_file " + cache + "\n"}
	}
	for _, c := range []struct {
		name   string
		cgroup string
		files  []map[string]string
		want   int64
	}{
		{"no groups", "", nil, 1000 * kib},
		{"v2 without a limit", "0::/a\n", []map[string]string{v2("sys/fs/cgroup/a", "max\n", "5\n", "0")}, 1000 * kib},
		{"v2", "0::/a\n", []map[string]string{v2("sys/fs/cgroup/a", "500\n", "200\n", "0")}, 300},
		{"v2 counts droppable cache as free", "0::/a\n", []map[string]string{v2("sys/fs/cgroup/a", "500\n", "200\n", "150")}, 450},
		{"v2 parent is tighter", "0::/a/b\n", []map[string]string{
			v2("sys/fs/cgroup/a/b", "max\n", "0\n", "0"), v2("sys/fs/cgroup/a", "100\n", "40\n", "0"),
		}, 60},
		{"v2 in a container that sees only its own group", "0::/host/path\n", []map[string]string{v2("sys/fs/cgroup", "90\n", "40\n", "0")}, 50},
		{"v2 outside of its name space", "0::/../x\n", []map[string]string{v2("sys/fs/cgroup", "90\n", "40\n", "0")}, 50},
		{"over the limit", "0::/a\n", []map[string]string{v2("sys/fs/cgroup/a", "100\n", "140\n", "0")}, 0},
		{"limit above the machine", "0::/a\n", []map[string]string{v2("sys/fs/cgroup/a", "9000000\n", "0\n", "0")}, 1000 * kib},
		{"v1", "4:cpu,memory:/a\n1:cpu:/b\n", []map[string]string{v1("sys/fs/cgroup/memory/a", "500\n", "200\n", "50")}, 350},
		{"v1 without a limit", "4:memory:/a\n", []map[string]string{v1("sys/fs/cgroup/memory/a", "9223372036854771712\n", "200\n", "50")}, 1000 * kib},
		{"v1 of another controller", "4:memory2:/a\n", []map[string]string{v1("sys/fs/cgroup/memory/a", "500\n", "200\n", "50")}, 1000 * kib},
		{"nonsense", "what\n0:::::\n", nil, 1000 * kib},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
		if c.cgroup != "" {
			root["proc/self/cgroup"] = &fstest.MapFile{Data: []byte(c.cgroup)}
		}
		for _, files := range c.files {
			for name, text := range files {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
		}
		if got, err := AvailableMemoryIn(root); err != nil || got != c.want {
			t.Errorf("%s: %d bytes (error %v), want %d", c.name, got, err, c.want)
		}
	}
}

func TestAvailableMemory_IsAnErrorWhenTheKernelDoesNotSay(t *testing.T) {
	for _, root := range []fstest.MapFS{{}, {"proc/meminfo": {Data: []byte("MemTotal: 5 kB\n")}}, {"proc/meminfo": {Data: []byte("MemAvailable: lots kB\n")}}} {
		_, err := AvailableMemoryIn(root)
		wantKind(t, err, fault.Memory)
	}
}
