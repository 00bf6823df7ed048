package device_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// Two memories that share a page of the OS can't both be pinned, and more memory to lock
// would not help.
func TestPin_OfAPageThatAnotherMemoryHasPinned(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(b)) })
	one, two := device.WrapHost(b[:page+100]), device.WrapHost(b[page+100:])
	must(t, l.Pin(one, 0, one.Size()))
	err = l.Pin(two, 0, two.Size())
	if remedy := fault.RemedyOf(err); !errors.Is(err, fault.Exists) || !strings.Contains(remedy, "share no pages") || strings.Contains(remedy, "ulimit") {
		t.Errorf("pin: %v (%s)", err, fault.RemedyOf(err))
	}
	must(t, one.Free())
	must(t, l.Pin(two, 0, two.Size()))
	must(t, two.Free())
}

func TestDriverError_SaysWhatItsReaderKnows(t *testing.T) {
	for class, want := range map[device.Class]string{
		device.Failed: "cuMemAlloc: NO", device.Retry: "cuMemAlloc: NO", device.Lost: "cuMemAlloc: NO (device lost)",
	} {
		if got := (&device.DriverError{Call: "cuMemAlloc", Name: "NO", Class: class}).Error(); got != want {
			t.Errorf("%v: %q", class, got)
		}
	}
}
