package gpu

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

// While memory of another process is being opened, which may take long, events are made
// and memory is freed.
func TestDevice_MakesEventsWhileMemoryIsOpened(t *testing.T) {
	d := &Device{events: map[uintptr]struct{}{}, exported: map[Handle]uintptr{{1}: 100}, opened: map[Handle]*opened{}}
	d.opening.Lock() // as OpenMemory and Close of what it has opened do
	defer d.opening.Unlock()
	if err := d.keep(7); err != nil {
		t.Error(err)
	}
	if _, kept := d.events[7]; !kept || !d.own(Handle{1}) {
		t.Error("an event or an export is missing")
	}
	if d.forget(100); d.own(Handle{1}) {
		t.Error("freed memory is exported")
	}
}

func TestCheckName_TakesNumbersAndUUIDs(t *testing.T) {
	for _, which := range []string{"0", "03", "99999999999", "GPU-", "gpu-8F01", "MIG-8f010203-0405", "4b5f2a9e", "deadbeef-"} {
		if err := CheckName("cuda", which); err != nil {
			t.Errorf("%q: %v", which, err)
		}
	}
	for _, which := range []string{"", " ", "x", "-1", "+1", "-", "GPU-x", "GPU--", "0x0", "1 ", "0,1", "cuda:0", "☃", "GPU-\x00", strings.Repeat("z", 1<<16)} {
		err := CheckName("cuda", which)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "a number from 0, or a UUID") || fault.RemedyOf(err) == "" || len(err.Error()) > 200 {
			t.Errorf("%.100q: %v", which, err)
		}
	}
}
