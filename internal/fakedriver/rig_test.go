package fakedriver

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/dl"
)

// Codes that the tests expect.
const (
	ok              = 0
	invalidValue    = 1
	outOfMemory     = 2
	badPitch        = 12
	badPointer      = 17
	invalidContext  = 201
	invalidHandle   = 400
	notFound        = 500
	notReady        = 600
	illegalAddress  = 700
	registered      = 712
	notRegistered   = 713
	launchFailed    = 719
	notPermitted    = 800
	notSupported    = 801
	junk            = 0xDB // what a destination holds before its copy
	fresh           = 0xCD // what memory holds that nobody has written
	memoryHost      = 1
	memoryDevice    = 2
	memoryUnified   = 4
	osPage          = 4096
	orderStream     = 1
	orderDuringCall = 2
	orderAny        = 3
)

// rig is a test's hold on a fake: a thread that is bound to device 0, and memory for
// arguments.
type rig struct {
	*Fake
	tb   testing.TB
	args *dl.Block
}

func newRig(tb testing.TB, o Options) *rig {
	tb.Helper()
	r := &rig{Fake: Load(tb, o), tb: tb}
	var err error
	r.args, err = dl.NewBlock(1 << 13)
	check(tb, err)
	tb.Cleanup(r.args.Free)
	if o.Vendor == CUDA {
		r.must("cuInit", 0)
		r.bind(0)
	} else {
		runtime.LockOSThread()
		tb.Cleanup(runtime.UnlockOSThread)
		r.must("hipInit", 0)
		r.must("hipSetDevice", 0)
	}
	return r
}

// bind locks the thread and makes the context of a device current, until the test ends.
func (r *rig) bind(device uintptr) {
	r.tb.Helper()
	runtime.LockOSThread()
	c := r.word("cuDevicePrimaryCtxRetain", device)
	r.must("cuCtxSetCurrent", c)
	r.tb.Cleanup(func() {
		r.must("cuCtxSetCurrent", 0)
		r.must("cuDevicePrimaryCtxRelease_v2", device)
		runtime.UnlockOSThread()
	})
}

func (r *rig) call(name string, args ...uintptr) int {
	r.tb.Helper()
	return int(int32(r.Find(name).Call(args...)))
}

func (r *rig) must(name string, args ...uintptr) {
	r.tb.Helper()
	r.want(ok, name, args...)
}

func (r *rig) want(code int, name string, args ...uintptr) {
	r.tb.Helper()
	if got := r.call(name, args...); got != code {
		r.tb.Fatalf("%s: got %d, want %d; violations %q", name, got, code, r.Violations())
	}
}

// expect is Expect, where "" wants no violation.
func (r *rig) expect(says string) {
	r.tb.Helper()
	if all := r.Violations(); says == "" && len(all) > 0 {
		r.tb.Errorf("violations %q", all)
	}
	if says != "" {
		r.Expect(says)
	}
}

// word calls a function whose first argument is where its answer goes.
func (r *rig) word(name string, args ...uintptr) uintptr {
	r.tb.Helper()
	r.args.Words[0] = 0
	r.must(name, append([]uintptr{r.args.Addr}, args...)...)
	return uintptr(r.args.Words[0])
}

func (r *rig) hip() bool { return r.options.Vendor == HIP }

// either is the name of a function in both vendors' words.
func (r *rig) either(cuda, hip string) string {
	if r.hip() {
		return hip
	}
	return cuda
}

// alloc returns device memory until the test ends.
func (r *rig) alloc(bytes int) uintptr {
	r.tb.Helper()
	p := r.word(r.either("cuMemAlloc_v2", "hipMalloc"), uintptr(bytes))
	r.tb.Cleanup(func() { r.call(r.either("cuMemFree_v2", "hipFree"), p) })
	return p
}

func (r *rig) newStream() uintptr {
	r.tb.Helper()
	s := r.word(r.either("cuStreamCreateWithPriority", "hipStreamCreateWithPriority"), 1, 0)
	r.tb.Cleanup(func() { r.call(r.either("cuStreamDestroy_v2", "hipStreamDestroy"), s) })
	return s
}

func (r *rig) newEvent(flags uintptr) uintptr {
	r.tb.Helper()
	e := r.word(r.either("cuEventCreate", "hipEventCreateWithFlags"), flags)
	r.tb.Cleanup(func() { r.call(r.either("cuEventDestroy_v2", "hipEventDestroy"), e) })
	return e
}

func (r *rig) sync(s uintptr) {
	r.tb.Helper()
	r.must(r.either("cuStreamSynchronize", "hipStreamSynchronize"), s)
}

func (r *rig) copy(dst, src uintptr, n int, s uintptr) {
	r.tb.Helper()
	if r.hip() {
		r.must("hipMemcpyAsync", dst, src, uintptr(n), 4, s)
		return
	}
	r.must("cuMemcpyAsync", dst, src, uintptr(n), s)
}

// addr is where bytes outside of the Go heap lie.
func addr(b []byte) uintptr { return reflect.ValueOf(b).Pointer() }

// shared returns host memory that is shared, as a pool's is, and not registered.
func shared(tb testing.TB, n int) []byte {
	tb.Helper()
	fd, err := unix.MemfdCreate("fakedriver-test", unix.MFD_CLOEXEC)
	check(tb, err)
	f := os.NewFile(uintptr(fd), "fakedriver-test")
	defer f.Close() //nolint:errcheck // the mapping keeps the memory
	check(tb, f.Truncate(int64(n)))
	b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(tb, err)
	tb.Cleanup(func() { _ = unix.Munmap(b) }) // a test may have done it
	return b
}

// host returns shared host memory that is registered until the test ends.
func (r *rig) host(n int) []byte {
	r.tb.Helper()
	b := shared(r.tb, n)
	r.register(b)
	return b
}

func (r *rig) register(b []byte) {
	r.tb.Helper()
	r.must(r.either("cuMemHostRegister_v2", "hipHostRegister"), addr(b), uintptr(len(b)), 0)
	r.tb.Cleanup(func() { r.call(r.either("cuMemHostUnregister", "hipHostUnregister"), addr(b)) })
}

// noise fills b with bytes that tell where they belong.
func noise(b []byte, seed uint64) {
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)}).Read(b) // never fails
}

func same(tb testing.TB, what string, got, want []byte) {
	tb.Helper()
	if !bytes.Equal(got, want) {
		for i := range want {
			if got[i] != want[i] {
				tb.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(want), got[i], want[i])
			}
		}
	}
}

// versions calls f for each version of each vendor.
func versions(t *testing.T, f func(t *testing.T, o Options)) {
	for _, o := range []Options{{Version: CUDA124}, {Version: CUDA128}, {Version: CUDA130}, {Vendor: HIP, Version: ROCm64}, {Vendor: HIP, Version: ROCm72}, {Vendor: HIP, Version: ROCm713}} {
		t.Run(fmt.Sprintf("%s-%d", o.Vendor, o.Version), func(t *testing.T) { f(t, o) })
	}
}
