package device

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkCopyRows compares, by the processor time of one worker, every kernel
// and what a host device chooses with Go's copy: rows in random order, in jobs of
// job bytes, between two pools of pool bytes each. Each iteration copies the pool
// once with each of them, in random order. Reported are medians: GB/s (10^9) of
// Go's copy, and for the others the ratio to Go's copy in the same iteration.
//
//	go test ./device -run '^$' -bench CopyRows -benchtime 9x
func BenchmarkCopyRows(b *testing.B) {
	for _, set := range []struct {
		name      string
		pool, job int64
		rows      []int64
		off       int64 // by which the rows of the destination are past a line
	}{
		{"cold", 256 << 20, 32 << 20, []int64{1 << 10, 4 << 10, 8 << 10, 18 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 16 << 20}, 0},
		{"cold-odd", 256 << 20, 32 << 20, []int64{1000, 4100, 8191, 33_001, 65_537, 300_007, 1_000_003, 1_500_001}, 24},
		{"cold-mid", 256 << 20, 4 << 20, []int64{1 << 10, 8 << 10, 32 << 10, 64 << 10, 512 << 10, 1 << 20}, 0},
		{"hot-L3", 8 << 20, 4 << 20, []int64{1 << 10, 8 << 10, 32 << 10, 64 << 10, 512 << 10, 1 << 20}, 0},
		{"hot-L2", 256 << 10, 256 << 10, []int64{256, 1 << 10, 8 << 10, 64 << 10}, 0},
	} {
		for _, row := range set.rows {
			b.Run(fmt.Sprintf("%s/%d", set.name, row), func(b *testing.B) { benchmarkRows(b, set.pool, set.job, row, set.off) })
		}
	}
}

func benchmarkRows(b *testing.B, pool, job, row, off int64) {
	b.Helper()
	type rival struct {
		name   string
		stream Stream
		speeds []float64
		ratios []float64
	}
	rivals := make([]*rival, 0, 5)
	add := func(name string, o HostOptions) {
		h := openHost(b, o)
		h.Kernels()
		rivals = append(rivals, &rival{name: name, stream: newStream(b, h, name)})
	}
	add("go", HostOptions{Workers: 1, tune: &tune{limits: defaultLimits(0)}})
	for _, k := range allKernels() {
		add(k.name, HostOptions{Workers: 1, tune: &tune{limits: defaultLimits(0), choices: choices{cached: k, streamed: k}}})
	}
	add("chosen", HostOptions{Workers: 1})

	memories := openHost(b, HostOptions{})
	n := (pool - off) / row
	src, dst := alloc(b, memories, pool, 1), alloc(b, memories, pool, 1)
	must(b, src.Populate(0, pool))
	must(b, dst.Populate(0, pool))
	rnd := rand.New(rand.NewPCG(1, 1))
	ops := make([]Op, n)
	times := max(1, 256<<20/pool)
	ctx := context.Background()
	round := func() {
		for i, p := range rnd.Perm(int(n)) {
			ops[i].SrcOff = int64(p) * row
		}
		for i, p := range rnd.Perm(int(n)) {
			ops[i] = Op{Dst: dst, DstOff: off + int64(p)*row, Src: src, SrcOff: ops[i].SrcOff, Bytes: row}
		}
		for _, i := range rnd.Perm(len(rivals)) {
			r, nanoseconds := rivals[i], int64(0)
			for range times {
				for jobs := range slices.Chunk(ops, int(max(1, job/row))) {
					began := processTime()
					must(b, r.stream.Copy(jobs))
					must(b, r.stream.Sync(ctx))
					nanoseconds += processTime() - began
				}
			}
			r.speeds = append(r.speeds, float64(times*n*row)/float64(nanoseconds))
		}
		for _, r := range rivals {
			last := len(r.speeds) - 1
			r.ratios = append(r.ratios, r.speeds[last]/rivals[0].speeds[last])
		}
	}
	round()
	for _, r := range rivals {
		r.speeds, r.ratios = r.speeds[:0], r.ratios[:0]
	}
	for b.Loop() {
		round()
	}
	b.ReportMetric(0, "ns/op") // of all rivals together: means nothing
	for i, r := range rivals {
		slices.Sort(r.ratios)
		slices.Sort(r.speeds)
		if i == 0 {
			b.ReportMetric(r.speeds[len(r.speeds)/2], "go-GB/s")
			continue
		}
		b.ReportMetric(r.ratios[len(r.ratios)/2], r.name+"/go")
		if r.name == "chosen" {
			b.ReportMetric(r.ratios[0], "chosen/go-least")
		}
	}
}

func processTime() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
	return t.Nano()
}

func BenchmarkCalibrate(b *testing.B) {
	l := defaultLimits(32 << 20)
	for b.Loop() {
		_, k := calibrate(&l)
		b.ReportMetric(k.Cached.Gain, "cached/go")
		b.ReportMetric(k.Streamed.Gain, "streamed/go")
	}
}
