package device_test

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// An error of a stream that has drained is one of its work: it fails the stream, and
// nothing else, however the accelerator came to ask.
func TestDrain_OfAStreamWhoseWorkHasFailedFailsThatStream(t *testing.T) {
	for mode := range devicetest.Mode(devicetest.Modes) {
		l := newLab(t, devicetest.Options{Mode: mode, Seed: 5})
		l.broken = true
		s, other, host := l.stream("s"), l.stream("other"), l.hostPage(64)
		want := l.d.FailCopy(l.handle(s), device.Failed)
		_ = l.d.Refuse("Record", 0, device.Failed) // so that the stream itself is asked
		must(t, s.Copy(op(l.page(64), host)))
		isRefusal(t, "sync", s.Sync(context.Background()), want)
		isRefusal(t, "close", s.Close(), want)
		if err := l.Lost(); err != nil {
			t.Errorf("%v: the device is lost: %v", mode, err)
		}
		must(t, other.Copy(op(l.page(64), host)))
		must(t, other.Sync(context.Background()))
		must(t, host.Free())
	}
}

// What a device that was given up may still copy is not freed, not unpinned and not
// unmapped, and what it does not use is.
func TestGivenUp_KeepsWhatItMayUse(t *testing.T) {
	broken := &device.DriverError{Call: "SyncStream", Name: "BROKEN", Class: device.Failed}
	d := &tally{}
	d.done = func(device.EventHandle) (bool, error) { return false, broken }
	d.drain = func(device.StreamHandle) (bool, error) { return false, broken }
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(t, err)
	pinned := func() *device.Memory {
		t.Helper()
		b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		must(t, err)
		t.Cleanup(func() { must(t, unix.Munmap(b)) })
		m := device.WrapHost(b)
		must(t, a.Pin(m, 0, m.Size()))
		return m
	}
	src, idle := pinned(), pinned()
	dst, err := a.Alloc(4096)
	must(t, err)
	spare, err := a.Alloc(4096)
	must(t, err)
	s, err := a.NewStream("s")
	must(t, err)
	e, err := a.NewEvent()
	must(t, err)
	must(t, s.Copy([]device.Op{{Dst: dst, Src: src, Bytes: 4096}}))
	recorded := s.Record(e) // an error when the stream has failed already
	for what, err := range map[string]error{"sync": s.Sync(context.Background()), "close": s.Close()} {
		if !errors.Is(err, broken) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if !errors.Is(a.Lost(), broken) {
		t.Errorf("lost: %v", a.Lost())
	}
	b, err := device.OpenAccelerator(&tally{}, device.AcceleratorOptions{})
	must(t, err)
	other, err := b.NewStream("of another device")
	must(t, err)
	if err := other.Wait(e); recorded == nil && !errors.Is(err, broken) {
		t.Errorf("wait for its event: %v", err)
	}
	must(t, errors.Join(other.Close(), b.Close()))
	for range 2 {
		for what, m := range map[string]*device.Memory{"source": src, "destination": dst} {
			if err := m.Free(); !errors.Is(err, fault.Device) || fault.RemedyOf(err) == "" {
				t.Errorf("free of the %s: %v", what, err)
			}
		}
	}
	if f, u := d.freed.Load(), d.unpinned.Load(); f+u != 0 {
		t.Errorf("%d frees, %d unpins", f, u)
	}
	must(t, errors.Join(idle.Free(), spare.Free()))
	if f, u := d.freed.Load(), d.unpinned.Load(); f != 1 || u != 1 {
		t.Errorf("of what nothing uses: %d frees, %d unpins", f, u)
	}
	if err := a.Close(); !errors.Is(err, fault.Device) {
		t.Errorf("close: %v", err)
	}
	device.Abandon(a)
}

// A device that its driver calls lost runs nothing, so what it used is given back.
func TestLost_KeepsNothing(t *testing.T) {
	gone := &device.DriverError{Call: "SyncStream", Name: "GONE", Class: device.Lost}
	d := &tally{}
	d.done = func(device.EventHandle) (bool, error) { return false, errors.New("no idea") }
	d.drain = func(device.StreamHandle) (bool, error) { return false, gone }
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	must(t, err)
	host, err := device.OpenHost(device.HostOptions{})
	must(t, err)
	m, err := a.AllocHost(host, 4096, 1)
	must(t, err)
	s, err := a.NewStream("s")
	must(t, err)
	must(t, s.Copy([]device.Op{{Dst: m, Src: m, DstOff: 100, Bytes: 100}}))
	if err := s.Close(); err == nil || a.Lost() == nil {
		t.Errorf("close: %v, lost: %v", err, a.Lost())
	}
	must(t, errors.Join(m.Free(), host.Close(), a.Close()))
	if u := d.unpinned.Load(); u != 0 {
		t.Errorf("a lost device is asked to unpin %d times", u)
	}
}

// tally counts what is given back.
type tally struct {
	script
	freed, unpinned atomic.Int64
}

func (d *tally) Free(uintptr) error       { d.freed.Add(1); return nil }
func (d *tally) Unregister(uintptr) error { d.unpinned.Add(1); return nil }
