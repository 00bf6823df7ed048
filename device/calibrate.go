package device

import (
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// The measurement copies calibrateBytes a time, in rows of calibrateRow: three
	// times with each kernel, and up to calibrateRounds before calibrateLimit.
	calibrateBytes  = 2 << 20
	calibrateRow    = 16 << 10
	calibrateRounds = 5
	calibrateLimit  = 12 * time.Millisecond

	// A kernel must gain this much over Go's copy to be chosen: less is noise.
	leastGain = 1.05

	// defaultCacheBytes is the last-level cache of a machine that does not say.
	defaultCacheBytes = 16 << 20
)

// calibrate measures the kernels of this machine and returns the best of them,
// and how they did. It takes about as long as calibrateLimit, and 4 MiB of memory
// meanwhile; without that memory, Go's copy it is.
func calibrate(l *limits) (choices, Kernels) {
	c, none := choices{}, Choice{Kernel: "go", Gain: 1}
	result := Kernels{Cached: none, Streamed: none, CacheBytes: l.cacheBytes}
	cached, streamed := kernels()
	if len(streamed) == 0 {
		return c, result
	}
	b, err := unix.Mmap(-1, 0, 2*calibrateBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return c, result
	}
	defer func() { _ = unix.Munmap(b) }()
	ops, cold := calibrateOps(WrapHost(b[:calibrateBytes]), WrapHost(b[calibrateBytes:])), chillOps(b)

	// Time on the processor, not on the clock: others may have it in between.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	rivals := slices.Concat([]*kernel{nil}, cached, streamed)
	times := make([][]float64, len(rivals))
	began := time.Now()
	for round := 0; round < calibrateRounds && (round < 3 || time.Since(began) < calibrateLimit); round++ {
		for i, k := range rivals {
			copyTime(l, streamed[0], cold)
			times[i] = append(times[i], copyTime(l, k, ops))
		}
	}
	n := 1 + len(cached)
	c.cached, result.Cached = best(cached, times[0], times[1:n])
	c.streamed, result.Streamed = best(streamed, times[0], times[n:])
	return c, result
}

// best returns the kernel with the least median time, and its gain over Go's
// copy; none when that is too little. times[i] are those of kernels[i], taken in
// the same rounds as goTimes.
func best(kernels []*kernel, goTimes []float64, times [][]float64) (*kernel, Choice) {
	winner, choice := (*kernel)(nil), Choice{Kernel: "go", Gain: 1}
	for i, k := range kernels {
		gains := make([]float64, len(goTimes))
		for round := range gains {
			gains[round] = goTimes[round] / times[i][round]
		}
		slices.Sort(gains)
		if gain := gains[(len(gains)-1)/2]; gain >= max(leastGain, choice.Gain) {
			winner, choice = k, Choice{Kernel: k.name, Gain: gain}
		}
	}
	return winner, choice
}

// calibrateOps returns the copies of all of src to dst in rows, in an order that
// no prefetcher guesses.
func calibrateOps(dst, src *Memory) []Op {
	const n = calibrateBytes / calibrateRow // a power of 2, so the odd factors reach all
	ops := make([]Op, n)
	for i := range ops {
		ops[i] = Op{
			Dst: dst, DstOff: int64((i*21 + 3) % n * calibrateRow),
			Src: src, SrcOff: int64((i*37 + 1) % n * calibrateRow),
			Bytes: calibrateRow,
		}
	}
	return ops
}

// chillOps returns copies of a few bytes over all of b: by a streaming kernel,
// they throw it out of the caches, however large those are.
func chillOps(b []byte) []Op {
	from, to := WrapHost(make([]byte, 1<<10)), WrapHost(b)
	ops := make([]Op, len(b)>>10)
	for i := range ops {
		ops[i] = Op{Dst: to, DstOff: int64(i) << 10, Src: from, Bytes: 1 << 10}
	}
	return ops
}

// copyTime returns for how many nanoseconds this thread copies ops with k.
func copyTime(l *limits, k *kernel, ops []Op) float64 {
	c := newCrew(l, 1)
	began := threadTime()
	c.copy(ops, 0, k)
	return float64(max(1, threadTime()-began))
}

func threadTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // cannot fail with a clock that exists
	return t.Nano()
}

// lastLevelCache returns the bytes of the largest cache of the first processor,
// as the file system root has it.
func lastLevelCache(root fs.FS) int64 {
	dirs, err := fs.Glob(root, "sys/devices/system/cpu/cpu0/cache/index*")
	if err != nil {
		return defaultCacheBytes
	}
	var bytes int64
	for _, dir := range dirs {
		text, err := fs.ReadFile(root, path.Join(dir, "size"))
		if err != nil {
			continue
		}
		digits, unit := strings.TrimSpace(string(text)), int64(1)
		for suffix, factor := range map[string]int64{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30} {
			if d, ok := strings.CutSuffix(digits, suffix); ok {
				digits, unit = d, factor
			}
		}
		if n, err := strconv.ParseInt(digits, 10, 64); err == nil && n > 0 && n <= (1<<40)/unit {
			bytes = max(bytes, n*unit)
		}
	}
	if bytes == 0 {
		return defaultCacheBytes
	}
	return bytes
}
