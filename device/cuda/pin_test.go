//go:build !nogpu

package cuda_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// A page that is pinned already is told from a lack of memory to pin.
func TestRegister_OfAPageTwice(t *testing.T) {
	r := open(t, "0", fakedriver.Options{AllowViolations: true})
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	r.must(err)
	t.Cleanup(func() { r.must(unix.Munmap(b)) })
	one, two := device.WrapHost(b[:page+100]), device.WrapHost(b[page+100:])
	r.must(r.acc.Pin(one, 0, one.Size()))
	var e *device.DriverError
	if err := r.acc.Pin(two, 0, two.Size()); !errors.Is(err, fault.Exists) || !errors.As(err, &e) || e.Code != 712 {
		t.Errorf("pin: %v", err)
	}
	r.must(errors.Join(one.Free(), two.Free()))
}
