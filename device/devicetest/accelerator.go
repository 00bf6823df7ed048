package devicetest

import (
	"context"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/device"
)

// OpenAccelerator opens an accelerator over a new [Driver]. When the test ends, it must
// have freed its memory and closed its streams; the device is closed then, and the test
// fails for every violation and race that it did not take away.
func OpenAccelerator(tb testing.TB, o Options) (*device.Accelerator, *Driver) {
	tb.Helper()
	d := NewDriver(o)
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := a.Close(); err != nil {
			tb.Errorf("close of the device: %v", err)
		}
		d.Check(tb)
	})
	return a, d
}

// Check fails the test for every violation and race so far, and forgets them.
func (d *Driver) Check(tb testing.TB) {
	tb.Helper()
	for _, v := range d.TakeViolations() {
		tb.Errorf("violation: %s", v)
	}
	for _, r := range d.TakeRaces() {
		tb.Errorf("race: %s", r)
	}
}

// Write writes b to bytes of m from off, which belongs to a or is host memory; a's by
// way of pinned host memory and a stream of their own. Everything enqueued before that
// touches them must be known to have run.
func Write(tb testing.TB, a *device.Accelerator, m *device.Memory, off int64, b []byte) {
	tb.Helper()
	if m.Bytes() != nil {
		copy(m.Bytes()[off:][:len(b)], b)
		return
	}
	if err := staged(a, m, off, b, true); err != nil {
		tb.Fatal(err)
	}
}

// Read returns bytes [off, off+n) of m: see Write.
func Read(tb testing.TB, a *device.Accelerator, m *device.Memory, off, n int64) []byte {
	tb.Helper()
	b := make([]byte, n)
	if m.Bytes() != nil {
		copy(b, m.Bytes()[off:][:n])
	} else if err := staged(a, m, off, b, false); err != nil {
		tb.Fatal(err)
	}
	return b
}

// staged copies between b and m.
func staged(a *device.Accelerator, m *device.Memory, off int64, b []byte, write bool) (err error) {
	h, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	stage, err := a.AllocHost(h, int64(len(b)), 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stage.Free()) }()
	s, err := a.NewStream("stage")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	op := device.Op{Dst: stage, Src: m, SrcOff: off, Bytes: int64(len(b))}
	if write {
		copy(stage.Bytes(), b)
		op = device.Op{Dst: m, DstOff: off, Src: stage, Bytes: int64(len(b))}
	}
	if err := s.Copy([]device.Op{op}); err != nil {
		return err
	}
	if err := s.Sync(context.Background()); err != nil {
		return err
	}
	if !write {
		copy(b, stage.Bytes())
	}
	return nil
}

// AcceleratorHarness returns a [Harness] of an accelerator over a new [Driver] with o,
// whose failures are of class c. It fails the test for violations.
func AcceleratorHarness(tb testing.TB, o Options, c device.Class) Harness {
	tb.Helper()
	o.Unordered = true // the suite looks at bytes, and breaks the order on purpose
	d := NewDriver(o)
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	host, err := device.OpenHost(device.HostOptions{PieceBytes: 1 << 20})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := host.Close(); err != nil {
			tb.Errorf("close of the host device: %v", err)
		}
		d.Check(tb)
	})
	handle := func(s device.Stream) device.StreamHandle {
		h, ok := a.Handle(s)
		if !ok {
			tb.Fatalf("%T is no stream of the device", s)
		}
		return h
	}
	return Harness{
		Device:      a,
		Hold:        func(s device.Stream) func() { return d.Hold(handle(s)) },
		Fail:        func(s device.Stream) error { return d.FailCopy(handle(s), c) },
		FailsDevice: c == device.Lost,
		Write:       func(m *device.Memory, off int64, b []byte) error { d.Poke(m.Base()+uintptr(off), b); return nil },
		Read:        func(m *device.Memory, off int64, b []byte) error { d.Peek(m.Base()+uintptr(off), b); return nil },
		Host:        func(bytes int64) (*device.Memory, error) { return a.AllocHost(host, bytes, 1) },
	}
}
