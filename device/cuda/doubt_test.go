//go:build !nogpu

package cuda_test

import (
	"context"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// An error of a question about an event says nothing of the work before it, unless the
// device is lost: what that uses stays in use until the stream has drained.
func TestEventQuery_ThatFailsEndsNoWork(t *testing.T) {
	r := open(t, "0", fakedriver.Options{})
	host, err := device.OpenHost(device.HostOptions{})
	r.must(err)
	src, err := r.acc.AllocHost(host, 4096, 1)
	r.must(err)
	dst, err := r.acc.Alloc(4096)
	r.must(err)
	s, err := r.acc.NewStream("s")
	r.must(err)
	h, _ := r.acc.Handle(s)
	release := r.fake.Hold(uintptr(h))
	r.fake.FailCall("cuEventQuery", 1, invalidValue)
	r.must(s.Copy([]device.Op{{Dst: dst, Src: src, Bytes: 4096}}))
	for s.Copy(nil) == nil { // until the stream has failed
	}
	ticket := device.NewTicket()
	if err := s.Signal(ticket); !errors.Is(err, fault.Device) {
		t.Errorf("signal: %v", err)
	}
	r.acc.Attributes()
	if err := src.Free(); !errors.Is(err, fault.Busy) {
		t.Errorf("free under a copy: %v", err)
	}
	release()
	if err := s.Sync(context.Background()); !errors.Is(err, fault.Device) {
		t.Errorf("sync: %v", err)
	}
	r.must(errors.Join(src.Free(), dst.Free(), host.Close()))
	if err := s.Close(); !errors.Is(err, fault.Device) {
		t.Errorf("close: %v", err)
	}
}
