package tcp

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// benchBytes is what one read moves: more than the caches of processors.
const benchBytes = 128 << 20

// BenchmarkCopy reads pages over loopback, and in turn the same bytes by a raw stream of
// Go's that is summed on both sides too. Each line shows the medians of both, and how
// many of the raw stream's bytes a second the engine has: share, with its quartiles.
// The stream goes through memory from one end to the other, also where the engine's pages
// are scattered: what that costs counts against the engine.
// cpu/raw is what it takes of the processors, on both sides, in what the stream takes.
//
// One iteration is a pair; 0 allocations a page is for the benchmark to show.
func BenchmarkCopy(b *testing.B) {
	for _, m := range []struct {
		name string
		o    Options
	}{{"plain", Options{}}, {"plain/streams=1", Options{Streams: 1}}, {"unchecked", Options{Unchecked: true}}, {"TLS", Options{TLS: true}}} {
		for _, size := range []int{4 << 10, 64 << 10, 512 << 10, 4 << 20} {
			for _, runs := range []bool{true, false} {
				name := fmt.Sprintf("%s/page=%dKiB/scattered", m.name, size>>10)
				if runs {
					name = fmt.Sprintf("%s/page=%dKiB/run", m.name, size>>10)
				}
				b.Run(name, func(b *testing.B) { benchCopy(b, m.o, size, runs) })
			}
		}
	}
}

func benchCopy(b *testing.B, o Options, size int, runs bool) {
	b.Helper()
	n := benchBytes / size
	p := newPair(b, o, o, kv.Config{Layout: kv.MLA, DType: kv.INT8, Layers: 1, Pages: n, PageSize: 16, LatentDim: size / 16})
	var plan transfer.Plan
	ids := make([]page.ID, n)
	for i := range ids {
		ids[i] = page.ID(i)
	}
	remote := slices.Clone(ids)
	if !runs {
		r := rand.New(rand.NewPCG(1, 2))
		r.Shuffle(n, func(i, j int) { remote[i], remote[j] = remote[j], remote[i] })
	}
	noError(b, plan.Set(0, n*16, ids, remote, 16))
	raw := newRaw(b, p.far, p.near, !o.Unchecked)
	s := p.source()
	ctx := context.Background()
	read := func() { noError(b, s.Copy(ctx, nil, &plan)) }
	read() // connections, buffers, and the OS's pages
	raw.read(b)

	var ours, theirs, costs []float64
	var before, after runtime.MemStats
	var allocs uint64
	for b.Loop() {
		t, cpu := time.Now(), cpuTime(b)
		raw.read(b)
		theirs = append(theirs, time.Since(t).Seconds())
		rawCPU := cpuTime(b) - cpu
		runtime.ReadMemStats(&before)
		t, cpu = time.Now(), cpuTime(b)
		read()
		ours = append(ours, time.Since(t).Seconds())
		costs = append(costs, float64(cpuTime(b)-cpu)/float64(rawCPU))
		runtime.ReadMemStats(&after)
		allocs += after.Mallocs - before.Mallocs
	}
	shares := make([]float64, len(ours))
	for i := range ours {
		shares[i] = theirs[i] / ours[i]
	}
	slices.Sort(shares)
	slices.Sort(ours)
	slices.Sort(theirs)
	slices.Sort(costs)
	at := func(x []float64, q int) float64 { return x[(len(x)-1)*q/4] }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(benchBytes/at(ours, 2)/1e9, "GB/s")
	b.ReportMetric(benchBytes/at(theirs, 2)/1e9, "raw-GB/s")
	b.ReportMetric(at(shares, 1), "share-q1")
	b.ReportMetric(at(shares, 2), "share")
	b.ReportMetric(at(shares, 3), "share-q3")
	b.ReportMetric(at(costs, 2), "cpu/raw")
	b.ReportMetric(float64(allocs)/float64(len(ours))/float64(n), "allocs/page")
	b.ReportMetric(float64(allocs)/float64(len(ours)), "allocs/read")
}

// cpuTime is what this process has used of its processors, for both sides.
func cpuTime(tb testing.TB) time.Duration {
	tb.Helper()
	var u unix.Rusage
	noError(tb, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkEpoch is a round trip.
func BenchmarkEpoch(b *testing.B) {
	for _, m := range modes()[:2] {
		b.Run(m.name, func(b *testing.B) {
			s := newPair(b, m.o, m.o, kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: 4, PageSize: 4, KVHeads: 1, HeadDim: 4}).source()
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Epoch(ctx, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkOpen is what a peer costs before its first page.
func BenchmarkOpen(b *testing.B) {
	for _, m := range modes()[:2] {
		b.Run(m.name, func(b *testing.B) {
			p := newPair(b, m.o, m.o, kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: 4, PageSize: 4, KVHeads: 1, HeadDim: 4})
			ctx := context.Background()
			for b.Loop() {
				s, err := p.reader.Open(ctx, p.target, p.d, p.d.Offers[0].Data)
				noError(b, err)
				noError(b, s.Close())
			}
		})
	}
}

// raw is one stream of Go's.
type raw struct {
	conn net.Conn
	to   []byte
	sums bool
}

// newRaw starts a sender of all of far, again and again as it is asked.
func newRaw(b *testing.B, far, near *kv.Cache, sums bool) *raw {
	b.Helper()
	from, err := far.Region(0)
	noError(b, err)
	to, err := near.Region(0)
	noError(b, err)
	l, err := (&net.ListenConfig{}).Listen(b.Context(), "tcp", "127.0.0.1:0")
	noError(b, err)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		var ask [1]byte
		head := make([]byte, 16)
		for {
			if _, err := io.ReadFull(c, ask[:]); err != nil {
				return
			}
			for rest := from.Bytes(); len(rest) > 0; {
				n := min(segmentBytes, len(rest))
				if sums {
					s := xxh3.Hash128(rest[:n]).Bytes()
					copy(head, s[:])
				}
				if _, err := c.Write(head); err != nil {
					return
				}
				if _, err := c.Write(rest[:n]); err != nil {
					return
				}
				rest = rest[n:]
			}
		}
	}()
	c, err := (&net.Dialer{}).DialContext(b.Context(), "tcp", l.Addr().String())
	noError(b, err)
	b.Cleanup(func() {
		noError(b, c.Close())
		noError(b, l.Close())
	})
	return &raw{c, to.Bytes(), sums}
}

func (r *raw) read(b *testing.B) {
	b.Helper()
	_, err := r.conn.Write([]byte{1})
	noError(b, err)
	var head [16]byte
	for rest := r.to; len(rest) > 0; {
		n := min(segmentBytes, len(rest))
		_, err := io.ReadFull(r.conn, head[:])
		noError(b, err)
		_, err = io.ReadFull(r.conn, rest[:n])
		noError(b, err)
		if r.sums && xxh3.Hash128(rest[:n]).Bytes() != head {
			b.Fatal("the raw stream broke")
		}
		rest = rest[n:]
	}
}
