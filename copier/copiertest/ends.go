package copiertest

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

func (r *rig) event() device.Event {
	r.t.Helper()
	e, err := r.h.Device.NewEvent()
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

func failedStream(t *testing.T, h Harness) {
	if h.Fail == nil {
		t.Skip("this harness cannot make a copy fail")
	}
	r := openAt(t, h, place{}, packed(small, 20), small.LayerMajor)
	other := r.stream("other")
	want := h.Fail(r.s)
	_, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}, {Dst: 3, Src: 3}})
	if !errors.Is(err, want) || !errors.Is(err, fault.Device) {
		t.Errorf("error %v, want kind device, caused by %v", err, want)
	}
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); !errors.Is(err, fault.Device) {
		t.Errorf("the stream failed, and the next copy says %v", err)
	}
	r.s = other
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); (err == nil) == h.FailsDevice || err != nil && !errors.Is(err, fault.Device) {
		t.Errorf("the device failed too (%t), and a copy on another stream says %v", h.FailsDevice, err)
	}
}

// lostDevice loses the device between a copy and its turn.
func lostDevice(t *testing.T, h Harness) {
	if h.Lose == nil {
		t.Skip("this harness cannot lose its device")
	}
	r := openAt(t, h, place{}, packed(small, 20), small.LayerMajor)
	release := r.hold()
	ticket := device.NewTicket()
	_, err := h.Copier.Copy(r.s, r.route, plans(r.pages())["gaps in both"])
	if err = errors.Join(err, r.s.Signal(ticket)); err != nil {
		t.Fatal(err)
	}
	h.Lose()
	release()
	if err := ticket.Wait(t.Context()); !errors.Is(err, fault.Device) {
		t.Errorf("the ticket says %v, want kind device", err)
	}
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); !errors.Is(err, fault.Device) {
		t.Errorf("the device is lost, and a copy says %v", err)
	}
}

// heldMemory frees memory under a copy, and copies with memory that is gone.
func heldMemory(t *testing.T, h Harness) {
	for _, at := range h.places() {
		t.Run(at.name, func(t *testing.T) {
			r := openAt(t, h, at, packed(small, 20), small.LayerMajor)
			pairs := plans(r.pages())["descending in both"]
			want := r.expect(pairs)
			release := r.hold()
			if _, err := h.Copier.Copy(r.s, r.route, append([]page.Pair(nil), pairs...)); err != nil {
				t.Fatal(err)
			}
			dst, _ := r.dst.Region(0)
			src, _ := r.src.Region(0)
			for side, m := range map[string]*device.Memory{"destination": dst, "source": src} {
				if err := m.Free(); !errors.Is(err, fault.Busy) {
					t.Errorf("free of the %s under a copy: error %v, want kind busy", side, err)
				}
			}
			release()
			r.sync(r.s)
			r.compare("destination", r.dst, want)
			if err := src.Free(); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Copier.Copy(r.s, r.route, []page.Pair{{Dst: 0, Src: 0}}); !errors.Is(err, fault.Closed) {
				t.Errorf("copy out of freed memory: error %v, want kind closed", err)
			}
			r.sync(r.s)
			r.compare("destination", r.dst, want)
		})
	}
}

func closedStream(t *testing.T, h Harness) {
	r := open(t, h, packed(small, 20), small.LayerMajor)
	if err := r.s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.copyAndWait([]page.Pair{{Dst: 1, Src: 1}}); !errors.Is(err, fault.Closed) {
		t.Errorf("error %v, want kind closed", err)
	}
}
