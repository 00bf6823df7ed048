//go:build !nogpu

package cuda_test

import (
	"bytes"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// versions are those whose drivers differ in what they have.
func versions() []int {
	return []int{fakedriver.CUDA124, fakedriver.CUDA128, fakedriver.CUDA130}
}

// rig is a device of a fake driver.
type rig struct {
	*testing.T
	fake *fakedriver.Fake
	acc  *device.Accelerator
	drv  *cuda.Driver
}

// open opens device which of a fake that o describes. The end of the test closes it, and
// fails for what the fake has noted or what was left.
func open(t *testing.T, which string, o fakedriver.Options) *rig {
	t.Helper()
	r := openBare(t, which, o)
	t.Cleanup(func() { r.must(r.acc.Close()) })
	return r
}

// openOn opens another device of r's fake, which the test closes.
func openOn(r *rig, which string) (*rig, error) {
	acc, err := cuda.Open(which, cuda.Options{Library: r.fake.Path(), Runtime: r.fake.Runtime()})
	if err != nil {
		return nil, err
	}
	return &rig{T: r.T, fake: r.fake, acc: acc, drv: acc.Driver().(*cuda.Driver)}, nil
}

// openBare is open for who closes the device himself.
func openBare(t *testing.T, which string, o fakedriver.Options) *rig {
	t.Helper()
	r := &rig{T: t, fake: fakedriver.Load(t, o)}
	acc, err := cuda.Open(which, cuda.Options{Library: r.fake.Path(), Runtime: r.fake.Runtime()})
	r.must(err)
	r.acc, r.drv = acc, acc.Driver().(*cuda.Driver)
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// alloc returns device memory until the test ends.
func (r *rig) alloc(bytes int64) uintptr {
	r.Helper()
	addr, err := r.drv.Alloc(bytes)
	r.must(err)
	r.Cleanup(func() { r.must(r.drv.Free(addr)) })
	return addr
}

// stream returns a stream until the test ends.
func (r *rig) stream() device.StreamHandle {
	r.Helper()
	s, err := r.drv.NewStream(device.NormalPriority)
	r.must(err)
	r.Cleanup(func() { r.must(r.drv.CloseStream(s)) })
	return s
}

// filled returns device memory that holds its own pattern.
func (r *rig) filled(bytes int, seed byte) uintptr {
	r.Helper()
	addr := r.alloc(int64(bytes))
	r.fake.Poke(addr, pattern(bytes, seed))
	return addr
}

// sync waits for a stream.
func (r *rig) sync(s device.StreamHandle) error {
	drained, err := r.drv.SyncStream(s)
	if drained == (err != nil) {
		r.Errorf("drained: %v, with %v", drained, err)
	}
	return err
}

func (r *rig) want(what string, addr uintptr, want []byte) {
	r.Helper()
	got := r.fake.Peek(addr, len(want))
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			r.Fatalf("%s: byte %d is %#x, want %#x", what, i, got[i], want[i])
		}
	}
}

// pattern is bytes that tell who wrote them and where.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = seed ^ byte(i) ^ byte(i>>8)*31
	}
	return b
}

// Codes that the tests inject.
const (
	invalidValue   = 1
	outOfMemory    = 2
	illegalAddress = 700
	notSupported   = 801
)
