// Package devicetest is the suite that every device must pass, whatever is
// behind it. An implementation's test is one call of [Run].
//
// Contents are a function of who wrote them and of the offset, so that a wrong
// byte shows whose it is and a suite has nothing to remember. Every case that
// orders streams has a twin that leaves the order out and must be seen to fail:
// a device too polite to fail it would hide the same mistake elsewhere.
package devicetest

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// patience is how long a case waits for something that must happen. Nothing
// passes by it: it only turns a hang into a message.
const patience = 30 * time.Second

// Harness is a device and what the suite needs to test it. A new one is opened
// for each case; the case closes the device.
type Harness struct {
	Device device.Device

	// Hold keeps a stream from running anything more until release is called.
	// Without it, the cases of order are skipped.
	Hold func(s device.Stream) (release func())

	// Fail makes the next copy enqueued on a stream fail when its turn comes, and
	// returns the error to look for. Without it, the cases of failures are skipped.
	Fail func(s device.Stream) (want error)

	// FailsDevice says that such a failure takes the whole device with it.
	FailsDevice bool

	// Host returns host memory that the device can copy from and to. Without it, memory
	// of the device takes its place.
	Host func(bytes int64) (*device.Memory, error)

	// Write and Read move bytes between the test and idle memory. They may be
	// left out when the host can address the device's memory.
	Write func(m *device.Memory, off int64, b []byte) error
	Read  func(m *device.Memory, off int64, b []byte) error
}

// Run runs the suite, with a new harness from open for each case.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	for _, c := range cases() {
		t.Run(c.name, func(t *testing.T) {
			r := &rig{T: t, Harness: open(t)}
			t.Cleanup(r.close)
			c.run(r)
		})
	}
}

type testCase struct {
	name string
	run  func(r *rig)
}

func cases() []testCase {
	var all []testCase
	all = append(all, memoryCases...)
	all = append(all, copyCases...)
	all = append(all, digestCases...)
	all = append(all, orderCases()...)
	all = append(all, endCases...)
	all = append(all, hostCases...)
	all = append(all, acceleratorCases()...)
	return append(all, randomCases...)
}

// rig is one case's harness. It closes what it opened, in the right order.
type rig struct {
	*testing.T
	Harness
	memories []*device.Memory
	streams  []device.Stream
	releases []func()
	hosts    []*device.Host
	cause    error // the first failure that the case has injected
}

func (r *rig) close() {
	for _, release := range r.releases {
		release()
	}
	for _, s := range r.streams {
		if err := s.Close(); err != nil && (r.cause == nil || !errors.Is(err, fault.Device)) {
			r.Errorf("close of stream %s: %v", s.Name(), err)
		}
	}
	for _, m := range r.memories {
		if err := m.Free(); err != nil && !errors.Is(err, fault.Closed) {
			r.Errorf("free: %v", err)
		}
	}
	if err := r.Device.Close(); err != nil {
		r.Errorf("close of the device: %v", err)
	}
	for _, h := range r.hosts {
		if err := h.Close(); err != nil {
			r.Errorf("close of a host device: %v", err)
		}
	}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) wantKind(what string, err error, kind fault.Kind) {
	r.Helper()
	if !errors.Is(err, kind) {
		r.Errorf("%s: got error %v, want kind %q", what, err, kind)
	}
}

func (r *rig) alloc(bytes int64) *device.Memory {
	r.Helper()
	m, err := r.Device.Alloc(bytes)
	r.must(err)
	r.memories = append(r.memories, m)
	return m
}

// page returns memory that holds what who writes.
func (r *rig) page(bytes int64, who byte) *device.Memory {
	r.Helper()
	m := r.alloc(bytes)
	r.write(m, contents(who, 0, bytes))
	return m
}

// hostAlloc returns host memory that the device can reach.
func (r *rig) hostAlloc(bytes int64) *device.Memory {
	r.Helper()
	if r.Host == nil {
		return r.alloc(bytes)
	}
	m, err := r.Host(bytes)
	r.must(err)
	r.memories = append(r.memories, m)
	return m
}

// hostPage returns host memory that holds what who writes.
func (r *rig) hostPage(bytes int64, who byte) *device.Memory {
	r.Helper()
	m := r.hostAlloc(bytes)
	r.write(m, contents(who, 0, bytes))
	return m
}

func (r *rig) stream(name string) device.Stream {
	r.Helper()
	s, err := r.Device.NewStream(name)
	r.must(err)
	r.streams = append(r.streams, s)
	return s
}

func (r *rig) event() device.Event {
	r.Helper()
	e, err := r.Device.NewEvent()
	r.must(err)
	return e
}

// hold holds s back, at the latest until the case ends.
func (r *rig) hold(s device.Stream) (release func()) {
	r.Helper()
	if r.Hold == nil {
		r.Skip("this harness cannot hold a stream back")
	}
	release = r.Hold(s)
	r.releases = append(r.releases, release)
	return release
}

// sabotage makes the next copy enqueued on s fail.
func (r *rig) sabotage(s device.Stream) {
	r.Helper()
	if r.Fail == nil {
		r.Skip("this harness cannot make a stream fail")
	}
	if err := r.Fail(s); r.cause == nil {
		r.cause = err
	}
}

// alone skips the case when a failure is not one of a stream alone.
func (r *rig) alone() {
	r.Helper()
	if r.FailsDevice {
		r.Skip("a failure takes the whole device")
	}
}

func (r *rig) copy(s device.Stream, ops ...device.Op) {
	r.Helper()
	r.must(s.Copy(ops))
}

// signal returns a ticket of the work enqueued on s so far.
func (r *rig) signal(s device.Stream) *device.Ticket {
	r.Helper()
	t := device.NewTicket()
	r.must(s.Signal(t))
	return t
}

func (r *rig) record(s device.Stream) device.Event {
	r.Helper()
	e := r.event()
	r.must(s.Record(e))
	return e
}

func (r *rig) sync(s device.Stream) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Sync(ctx); err != nil {
		r.Fatalf("sync of stream %s: %v", s.Name(), err)
	}
}

// outcome waits for t and returns how the work ended.
func (r *rig) outcome(t *device.Ticket) error {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := t.Wait(ctx)
	if done, _ := t.Poll(); !done {
		r.Fatal("the ticket is not done, and nothing holds its work back")
	}
	return err
}

// settle gives work that wrongly may run every chance to do so: it has the
// device finish work on another stream, and yields.
func (r *rig) settle() {
	r.Helper()
	dst, src := r.alloc(64), r.alloc(64)
	s := r.stream("probe")
	for range 10 {
		r.copy(s, whole(dst, src))
		r.sync(s)
		for range 100 {
			runtime.Gosched()
		}
	}
}

func (r *rig) stillOpen(what string, t *device.Ticket) {
	r.Helper()
	r.settle()
	if done, err := t.Poll(); done {
		r.Errorf("%s: the ticket is done (error %v), want it open", what, err)
	}
}

func (r *rig) write(m *device.Memory, b []byte) {
	r.Helper()
	if m.Bytes() == nil {
		r.must(r.Write(m, 0, b))
		return
	}
	copy(m.Bytes()[:len(b)], b)
}

func (r *rig) read(m *device.Memory, off, n int64) []byte {
	r.Helper()
	b := make([]byte, n)
	if m.Bytes() == nil {
		r.must(r.Read(m, off, b))
		return b
	}
	copy(b, m.Bytes()[off:][:n])
	return b
}

// want fails the case unless the n bytes of m from off are want.
func (r *rig) want(what string, m *device.Memory, off int64, want []byte) {
	r.Helper()
	got := r.read(m, off, int64(len(want)))
	if i := firstDiff(got, want); i >= 0 {
		r.Errorf("%s: byte %d is %#x, want %#x", what, off+int64(i), got[i], want[i])
	}
}

func firstDiff(got, want []byte) int {
	if bytes.Equal(got, want) {
		return -1
	}
	for i := range want {
		if got[i] != want[i] {
			return i
		}
	}
	return -1
}

// whole copies all of src to the start of dst.
func whole(dst, src *device.Memory) device.Op {
	return device.Op{Dst: dst, Src: src, Bytes: src.Size()}
}

// contents returns what who writes at bytes [off, off+n): 1 to 199, so neither
// fresh memory nor poison.
func contents(who byte, off, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		x := (uint64(off) + uint64(i) + uint64(who)<<32 + 1) * 0x9E3779B97F4A7C15
		b[i] = byte(1 + (x>>33^x>>49)%199)
	}
	return b
}
