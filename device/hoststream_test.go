package device

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/invariants"
)

func newStream(t testing.TB, h *Host, name string) Stream {
	t.Helper()
	s, err := h.NewStream(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestHostStream_PoisonsTheHeadOfAHeldQueueAndNothingElse(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("this build checks no invariants: use -tags invariants")
	}
	h := openHost(t, HostOptions{})
	src, head, next := alloc(t, h, 4096, 1), alloc(t, h, 4096, 1), alloc(t, h, 4096, 1)
	s := newStream(t, h, "s")
	release := h.Hold(s)
	defer release()
	must(t, s.Copy([]Op{
		{Dst: head, DstOff: 1000, Src: src, Bytes: 500},
		{Dst: head, DstOff: 3000, Src: src, Bytes: 1},
	}))
	must(t, s.Copy([]Op{{Dst: next, Src: head, Bytes: 4096}}))

	want := make([]byte, 4096)
	for i := range want {
		if 1000 <= i && i < 1500 || i == 3000 {
			want[i] = invariants.Poison
		}
	}
	for !bytes.Equal(head.Bytes(), want) { // a hang here is a failure
		runtime.Gosched()
	}
	if !bytes.Equal(next.Bytes(), make([]byte, 4096)) {
		t.Error("the second copy is poisoned before its turn")
	}
	release()
	must(t, s.Sync(context.Background()))
	if !bytes.Equal(head.Bytes(), make([]byte, 4096)) || !bytes.Equal(next.Bytes(), make([]byte, 4096)) {
		t.Error("poison is left after the copies have run")
	}
}

func TestHostStream_FailedCopyLeavesPoison(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("this build checks no invariants: use -tags invariants")
	}
	h := openHost(t, HostOptions{})
	src, dst := alloc(t, h, 64, 1), alloc(t, h, 64, 1)
	s := newStream(t, h, "s")
	h.Fail(s, errors.New("broken"))
	must(t, s.Copy([]Op{{Dst: dst, Src: src, Bytes: 64}}))
	wantKind(t, s.Sync(context.Background()), fault.Device)
	if want := bytes.Repeat([]byte{invariants.Poison}, 64); !bytes.Equal(dst.Bytes(), want) {
		t.Errorf("destination of a failed copy: %x", dst.Bytes())
	}
}

func TestHost_HoldsNest(t *testing.T) {
	h := openHost(t, HostOptions{})
	s, other := newStream(t, h, "s"), newStream(t, h, "other")
	first, second := h.Hold(s), h.Hold(s)
	ticket := NewTicket()
	must(t, s.Signal(ticket))
	first()
	first() // once is enough
	must(t, other.Sync(context.Background()))
	for range 1000 {
		runtime.Gosched()
	}
	if done, _ := ticket.Poll(); done {
		t.Error("the stream runs although it is still held once")
	}
	second()
	must(t, ticket.Wait(context.Background()))
}

func TestHost_HoldWaitsForWhatIsRunning(t *testing.T) {
	h := openHost(t, HostOptions{})
	m := alloc(t, h, 8<<20, 1)
	s := newStream(t, h, "s")
	running := func() bool {
		hs := s.(*hostStream)
		hs.mu.Lock()
		defer hs.mu.Unlock()
		return hs.running
	}
	for range 20 {
		ticket := NewTicket()
		must(t, s.Copy([]Op{{Dst: m, DstOff: 4 << 20, Src: m, Bytes: 4 << 20}}))
		must(t, s.Signal(ticket))
		for done := false; !done && !running(); done, _ = ticket.Poll() {
			runtime.Gosched()
		}
		release := h.Hold(s)
		if running() {
			t.Error("held, and something runs")
		}
		release()
	}
	must(t, s.Sync(context.Background()))
}

func TestHost_HoldReturnsWhileTheStreamWaitsForAnother(t *testing.T) {
	h := openHost(t, HostOptions{})
	a, b := newStream(t, h, "a"), newStream(t, h, "b")
	releaseA := h.Hold(a)
	must(t, a.Signal(NewTicket()))
	e, err := h.NewEvent()
	must(t, err)
	must(t, a.Record(e))
	must(t, b.Wait(e))
	releaseB := h.Hold(b) // a hang here is a failure
	releaseA()
	must(t, e.Sync(context.Background()))
	ticket := NewTicket()
	must(t, b.Signal(ticket))
	if done, _ := ticket.Poll(); done {
		t.Error("the held stream runs")
	}
	releaseB()
	must(t, ticket.Wait(context.Background()))
}

func TestHostStream_WaitsForStreamsOfAnotherHostDevice(t *testing.T) {
	h1, h2 := openHost(t, HostOptions{}), openHost(t, HostOptions{})
	a, b := newStream(t, h1, "a"), newStream(t, h2, "b")
	src, mid, dst := alloc(t, h1, 64, 1), alloc(t, h1, 64, 1), alloc(t, h2, 64, 1)
	src.Bytes()[63] = 9
	release := h1.Hold(a)
	must(t, a.Copy([]Op{{Dst: mid, Src: src, Bytes: 64}}))
	e, err := h1.NewEvent()
	must(t, err)
	must(t, a.Record(e))
	must(t, b.Wait(e))
	must(t, b.Copy([]Op{{Dst: dst, Src: mid, Bytes: 64}}))
	release()
	must(t, b.Sync(context.Background()))
	if dst.Bytes()[63] != 9 {
		t.Error("the second device did not wait for the first")
	}
}

func TestHostStream_CopiesWrappedMemory(t *testing.T) {
	h := openHost(t, HostOptions{})
	s := newStream(t, h, "s")
	from, to, m := []byte("from the Go heap"), make([]byte, 16), alloc(t, h, 16, 1)
	src, dst := WrapHost(from), WrapHost(to)
	must(t, s.Copy([]Op{{Dst: m, Src: src, Bytes: 16}}))
	must(t, s.Copy([]Op{{Dst: dst, Src: m, Bytes: 16}}))
	must(t, s.Sync(context.Background()))
	if !bytes.Equal(from, to) {
		t.Errorf("got %q, want %q", to, from)
	}
}

func TestHostStream_RefusesMemoryThatTheHostCannotAddress(t *testing.T) {
	h := openHost(t, HostOptions{})
	s := newStream(t, h, "s")
	far, near := &Memory{device: "far", base: 0x1000, size: 64}, alloc(t, h, 64, 1)
	for _, op := range []Op{{Dst: far, Src: near, Bytes: 64}, {Dst: near, Src: far, Bytes: 64}} {
		err := s.Copy([]Op{op})
		wantKind(t, err, fault.Unsupported)
		if !strings.Contains(err.Error(), "far") {
			t.Errorf("error %q does not name the device", err)
		}
	}
}

func TestMemory_IsBusyWhileEnqueuedWorkUsesIt(t *testing.T) {
	h := openHost(t, HostOptions{})
	s := newStream(t, h, "s")
	src, dst, dst2, idle := alloc(t, h, 64, 1), alloc(t, h, 64, 1), alloc(t, h, 64, 1), alloc(t, h, 64, 1)
	release := h.Hold(s)
	must(t, s.Copy([]Op{
		{Dst: dst, Src: src, Bytes: 32},
		{Dst: dst2, Src: src, Bytes: 32},
		{Dst: dst, DstOff: 32, Src: src, Bytes: 32},
	}))
	ticket := NewTicket()
	must(t, s.Signal(ticket))
	for _, m := range []*Memory{src, dst, dst2} {
		wantKind(t, m.Free(), fault.Busy)
		if m.Bytes() == nil {
			t.Error("a refused free took the bytes away")
		}
	}
	must(t, idle.Free())
	// A refused call uses nothing, whichever op it is refused for.
	for _, bad := range []Op{{Dst: idle, Src: src, Bytes: 1}, {Dst: src, Src: idle, Bytes: 1}, {Dst: src, Src: src, Bytes: 65}} {
		if err := s.Copy([]Op{{Dst: dst, Src: dst2, Bytes: 1}, {Dst: dst, Src: src, Bytes: 1}, bad}); err == nil {
			t.Errorf("op %+v was taken", bad)
		}
	}
	release()
	must(t, ticket.Wait(context.Background()))
	for _, m := range []*Memory{src, dst, dst2} {
		must(t, m.Free())
	}
}

func TestMemory_IsFreeAgainWhenItsStreamFailedOrClosed(t *testing.T) {
	h := openHost(t, HostOptions{})
	s := newStream(t, h, "s")
	src, dst := alloc(t, h, 64, 1), alloc(t, h, 64, 1)
	ops := []Op{{Dst: dst, Src: src, Bytes: 64}}
	release := h.Hold(s)
	h.Fail(s, errors.New("broken"))
	must(t, s.Copy(ops))
	must(t, s.Copy(ops))
	release()
	wantKind(t, s.Sync(context.Background()), fault.Device)
	wantKind(t, s.Copy(ops), fault.Device)
	wantKind(t, s.Close(), fault.Device)
	wantKind(t, s.Copy(ops), fault.Closed)
	must(t, dst.Free())
	must(t, src.Free())
}

func TestHostStream_DropsTheBufferOfALargeBacklog(t *testing.T) {
	h := openHost(t, HostOptions{})
	s := newStream(t, h, "s")
	m := alloc(t, h, 2, 1)
	release := h.Hold(s)
	ops := make([]Op, keepOps+1)
	for i := range ops {
		ops[i] = Op{Dst: m, DstOff: 1, Src: m, Bytes: 0}
	}
	must(t, s.Copy(ops))
	release()
	for range 4 { // both buffers go round
		must(t, s.Copy(ops[:1]))
		must(t, s.Sync(context.Background()))
	}
	hs := s.(*hostStream)
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if cap(hs.ops) > keepOps {
		t.Errorf("the stream keeps room for %d ops", cap(hs.ops))
	}
}

// copyLoop returns a step that enqueues 512 copies of 64 KiB, with so many digests,
// and waits for them.
func copyLoop(t testing.TB, h *Host, digests int) (step func(), total int64) {
	t.Helper()
	const n, size = 512, 64 << 10
	src, dst := alloc(t, h, n*size, size), alloc(t, h, n*size, size)
	must(t, src.Populate(0, n*size))
	must(t, dst.Populate(0, n*size))
	s := newStream(t, h, "s")
	ops := make([]Op, n)
	for i := range ops {
		ops[i] = Op{Dst: dst, Src: src, DstOff: int64(i) * size, SrcOff: int64(n-1-i) * size, Bytes: size}
	}
	sums := make([]Digest, digests)
	for i := range ops {
		if digests > 0 {
			ops[i].Digest = &sums[i*digests/n]
		}
	}
	ctx := context.Background()
	return func() {
		must(t, s.Copy(ops))
		must(t, s.Sync(ctx))
	}, n * size
}

func TestHostStream_SaysHowLongDigestsTookAndDoesNotCallItCopying(t *testing.T) {
	h := openHost(t, HostOptions{Workers: 1})
	src, dst, s := alloc(t, h, 8<<20, 1), alloc(t, h, 8<<20, 1), newStream(t, h, "s")
	must(t, errors.Join(src.Populate(0, 8<<20), dst.Populate(0, 8<<20)))
	h.Kernels() // are measured now, not with the copy
	var d Digest
	began := time.Now()
	must(t, s.Copy([]Op{{Dst: dst, Src: src, Bytes: 8 << 20, Digest: &d}}))
	must(t, s.Sync(context.Background()))
	took := time.Since(began)
	bytes, busy := h.Copied(s)
	if bytes != 8<<20 || d.Took() <= 0 || busy <= 0 || busy+d.Took() > took {
		t.Errorf("%d bytes copied in %v and summed in %v, of %v", bytes, busy, d.Took(), took)
	}
	d.Reset()
	if d.Took() != 0 {
		t.Error("an empty digest took time")
	}
}

// orderLoop returns a step that has one stream wait for another.
func orderLoop(t testing.TB, h *Host) (step func()) {
	t.Helper()
	a, b := newStream(t, h, "a"), newStream(t, h, "b")
	m := WrapHost(make([]byte, 2))
	ops := []Op{{Dst: m, DstOff: 1, Src: m, Bytes: 1}}
	e, err := h.NewEvent()
	must(t, err)
	ctx := context.Background()
	return func() {
		must(t, a.Copy(ops))
		must(t, a.Record(e))
		must(t, b.Wait(e))
		must(t, b.Copy(ops))
		must(t, b.Sync(ctx))
	}
}

func TestHostStream_AllocatesNothingInSteadyState(t *testing.T) {
	if invariants.Enabled {
		t.Skip("only builds without checks are free of allocations")
	}
	h := openHost(t, HostOptions{})
	step, _ := copyLoop(t, h, 0)
	for name, step := range map[string]func(){"copy": step, "record and wait": orderLoop(t, h)} {
		for range 3 {
			step()
		}
		if got := testing.AllocsPerRun(20, step); got != 0 {
			t.Errorf("%s: %v allocations, want 0", name, got)
		}
	}
}

func BenchmarkHostStream_Copy512x64KiB(b *testing.B) {
	step, total := copyLoop(b, openHost(b, HostOptions{}), 0)
	step()
	b.SetBytes(total)
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
}

func BenchmarkHostStream_Copy512x64KiBWithDigests(b *testing.B) {
	step, total := copyLoop(b, openHost(b, HostOptions{}), 16)
	step()
	b.SetBytes(total)
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
}

func BenchmarkHostStream_RecordAndWait(b *testing.B) {
	step := orderLoop(b, openHost(b, HostOptions{}))
	step()
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
}

// A stream that is being closed still copies: who must not touch the memory before
// it is idle can wait for it all the same.
func TestHostStream_SyncWaitsForAStreamThatIsBeingClosed(t *testing.T) {
	h := openHost(t, HostOptions{})
	s, err := h.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	src, dst := WrapHost([]byte("bytes")), WrapHost(make([]byte, 5))
	release := h.Hold(s)
	if err := s.Copy([]Op{{Dst: dst, Src: src, Bytes: 5}}); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	for s.Copy(nil) == nil { // until Close has begun
		runtime.Gosched()
	}
	over, end := context.WithCancel(context.Background())
	end()
	if err := s.Sync(over); !errors.Is(err, context.Canceled) {
		t.Errorf("Sync of a stream that still copies: %v", err)
	}
	release()
	if err := s.Sync(context.Background()); !errors.Is(err, fault.Closed) || string(dst.Bytes()) != "bytes" {
		t.Errorf("Sync: %v, destination %q", err, dst.Bytes())
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}
