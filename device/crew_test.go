package device

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
)

// hookKernel is a kernel of one lane in Go that calls hook before each copy.
func hookKernel(hook func()) *kernel {
	return &kernel{"hook", 1, 1, func(rows *[maxLanes]row, n uintptr) {
		hook()
		copy(unsafe.Slice((*byte)(rows[0].dst), n), unsafe.Slice((*byte)(rows[0].src), n))
	}}
}

func withHook(workers int, hook func()) HostOptions {
	k := hookKernel(hook)
	return HostOptions{Workers: workers, tune: &tune{
		limits:  limits{claimBytes: 4096},
		choices: choices{streamed: k},
	}}
}

func TestHost_RefusesWorkersThatCannotBe(t *testing.T) {
	for _, n := range []int{-1, maxWorkers + 1} {
		_, err := OpenHost(HostOptions{Workers: n})
		wantKind(t, err, fault.Invalid)
	}
}

func TestClaims_AreEveryByteOnceInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.Int64Range(0, 300), 0, 20).Draw(t, "sizes")
		claimBytes := rapid.Int64Range(1, 500).Draw(t, "claim")
		limit := rapid.Int64Range(1, 200).Draw(t, "limit")
		m := WrapHost(make([]byte, 300*20))
		l := &limits{claimBytes: claimBytes}
		c := newCrew(l, 1)
		var want, got []int64
		digests := map[*Digest]int{} // of how many ops
		var digest *Digest
		for i, n := range sizes {
			switch rapid.IntRange(0, 4).Draw(t, "digest") {
			case 0:
				digest = new(Digest)
			case 1:
				digest = nil
			}
			op := Op{Dst: m, DstOff: int64(i) * 300, Src: m, SrcOff: int64(len(sizes)-1-i) * 300, Bytes: n, Digest: digest}
			digests[digest]++
			c.ops = append(c.ops, op)
			for b := range n {
				want = append(want, op.DstOff+b, op.SrcOff+b)
			}
		}
		w, base := &worker{limits: l}, uintptr(unsafe.Pointer(&m.bytes[0]))
		for c.claimNext(w) {
			claimed, limited := int64(0), true
			for i := 0; i < len(w.ops); i++ {
				d := w.ops[i].Digest
				if d == nil {
					continue
				}
				limited = false
				for digests[d]--; i+1 < len(w.ops) && w.ops[i+1].Digest == d; i++ {
					digests[d]--
				}
				if digests[d] != 0 || w.from != 0 {
					t.Fatalf("a claim from %d has a digest without %d of its ops", w.from, digests[d])
				}
			}
			for dst, src := w.next(limit); dst != nil; dst, src = w.next(limit) {
				if len(dst) != len(src) || int64(len(dst)) > limit || len(dst) == 0 {
					t.Fatalf("a stretch of %d and %d bytes, limit %d", len(dst), len(src), limit)
				}
				claimed += int64(len(dst))
				w.owes, w.owedBytes = 0, 0
				for b := range dst {
					got = append(got, int64(uintptr(unsafe.Pointer(&dst[b]))-base), int64(uintptr(unsafe.Pointer(&src[b]))-base))
				}
			}
			if limited && claimed > claimBytes {
				t.Fatalf("%d bytes in a claim of %d", claimed, claimBytes)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d bytes, want %d", len(got)/2, len(want)/2)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("byte %d: %d, want %d", i/2, got[i], want[i])
			}
		}
	})
}

func TestCrew_WorkersShareALargeJob(t *testing.T) {
	const workers = 3
	var inside atomic.Int64
	all := make(chan struct{})
	h := openHost(t, withHook(workers, func() { // a hang here is a failure
		if inside.Add(1) == workers {
			close(all)
		}
		<-all
	}))
	src, dst, s := alloc(t, h, 1<<20, 1), alloc(t, h, 1<<20, 1), newStream(t, h, "s")
	must(t, s.Copy([]Op{{Dst: dst, Src: src, Bytes: 1 << 20}}))
	must(t, s.Sync(context.Background()))
}

func TestCrew_OneWorkerIsOneThread(t *testing.T) {
	var inside, calls atomic.Int64
	h := openHost(t, withHook(1, func() {
		if inside.Add(1) != 1 {
			t.Error("two workers")
		}
		calls.Add(1)
		inside.Add(-1)
	}))
	src, dst, s := alloc(t, h, 1<<20, 1), alloc(t, h, 1<<20, 1), newStream(t, h, "s")
	must(t, s.Copy([]Op{{Dst: dst, Src: src, Bytes: 1 << 20}}))
	must(t, s.Sync(context.Background()))
	if calls.Load() == 0 || s.(*hostStream).crew.started {
		t.Errorf("%d calls of the kernel; helpers started: %v", calls.Load(), s.(*hostStream).crew.started)
	}
}

func TestCrew_SmallJobsWakeNobody(t *testing.T) {
	h := openHost(t, HostOptions{Workers: 4})
	m, s := alloc(t, h, 4<<20, 1), newStream(t, h, "s")
	must(t, s.Copy([]Op{{Dst: m, DstOff: 2 << 20, Src: m, Bytes: 2<<20 - 1}}))
	must(t, s.Sync(context.Background()))
	if s.(*hostStream).crew.started {
		t.Error("a job of less than 2 MiB has helpers")
	}
}

func TestCrew_TheJobIsNotOverBeforeItsLastWorker(t *testing.T) {
	// One of two workers gets no further than its first row until it is let go.
	// The other finishes all the rest, and must wait.
	var calls atomic.Int64
	release, rest := make(chan struct{}), make(chan struct{})
	const rows = 64
	h := openHost(t, withHook(2, func() {
		switch calls.Add(1) {
		case 1:
			<-release
		case rows:
			close(rest)
		}
	}))
	src, dst, s := alloc(t, h, rows*4096, 1), alloc(t, h, rows*4096, 1), newStream(t, h, "s")
	for i := range src.Bytes() {
		src.Bytes()[i] = byte(i>>12) + 1
	}
	ops := make([]Op, rows)
	for i := range ops {
		ops[i] = Op{Dst: dst, DstOff: int64(i) * 4096, Src: src, SrcOff: int64(i) * 4096, Bytes: 4096}
	}
	ticket := NewTicket()
	must(t, s.Copy(ops))
	must(t, s.Signal(ticket))
	<-rest
	probe := newStream(t, h, "probe")
	must(t, probe.Sync(context.Background()))
	if done, _ := ticket.Poll(); done {
		t.Error("the ticket is done before a worker is")
	}
	wantKind(t, dst.Free(), fault.Busy)
	close(release)
	must(t, ticket.Wait(context.Background()))
	if !bytes.Equal(dst.Bytes(), src.Bytes()) {
		t.Error("the copy is wrong")
	}
}

func TestCrew_SkipsTheJobOfAFailedStream(t *testing.T) {
	h := openHost(t, withHook(2, func() { t.Error("a failed stream copies") }))
	m, s := alloc(t, h, 1<<20, 1), newStream(t, h, "s")
	h.Fail(s, errors.New("broken"))
	must(t, s.Copy([]Op{{Dst: m, DstOff: 1 << 19, Src: m, Bytes: 1 << 19}}))
	wantKind(t, s.Sync(context.Background()), fault.Device)
}

func TestCrew_JobsOfAllSizesInTurn(t *testing.T) {
	for _, workers := range []int{1, 2, 4} {
		o := HostOptions{Workers: workers, tune: &tune{limits: limits{claimBytes: 10_000, minRow: 256, crewJob: 20_000, smallJob: 10_000, cacheBytes: 200_000}}}
		if cached, streamed := kernels(); len(streamed) > 0 {
			o.tune.choices = choices{cached: cached[0], streamed: streamed[len(streamed)-1]}
		}
		h := openHost(t, o)
		const size = 1 << 19
		m, s := alloc(t, h, size, 1), newStream(t, h, "s")
		rnd := rand.New(rand.NewPCG(uint64(workers), 1))
		fillRandom(1, m.Bytes())
		want := bytes.Clone(m.Bytes())
		// Each job reads what the one before has written.
		for range 200 {
			half := int64(rnd.IntN(2)) * size / 2
			var ops []Op
			for off := int64(0); off < size/2; {
				n := min(size/2-off, rnd.Int64N(1+rnd.Int64N(60_000)))
				ops = append(ops, Op{Dst: m, DstOff: half + off, Src: m, SrcOff: size/2 - half + rnd.Int64N(size/2-n+1), Bytes: n})
				off += n + rnd.Int64N(100)
				if rnd.IntN(20) == 0 {
					break
				}
			}
			must(t, s.Copy(ops))
			for _, op := range ops {
				copy(want[op.DstOff:][:op.Bytes], want[op.SrcOff:])
			}
		}
		must(t, s.Sync(context.Background()))
		if !bytes.Equal(m.Bytes(), want) {
			t.Errorf("%d workers: the bytes are wrong", workers)
		}
	}
}

func TestCrew_AllocatesNothingInSteadyState(t *testing.T) {
	if invariants.Enabled {
		t.Skip("only builds without checks are free of allocations")
	}
	for _, name := range KernelNames() {
		for _, digests := range []int{0, 16} {
			step, _ := copyLoop(t, openHost(t, WithKernel(name, 2)), digests)
			for range 3 {
				step()
			}
			if got := testing.AllocsPerRun(5, step); got != 0 {
				t.Errorf("%s, %d digests: %v allocations, want 0", name, digests, got)
			}
		}
	}
}
