package fakedriver

import (
	"runtime"
	"testing"

	"github.com/kvferry/kvferry/internal/dl"
)

// cudart is the runtime of a rig, opened as a program opens it.
func (r *rig) cudart() func(name string, args ...uintptr) int {
	r.tb.Helper()
	lib, err := dl.Open(r.Runtime())
	check(r.tb, err)
	return func(name string, args ...uintptr) int {
		r.tb.Helper()
		f := lib.Find(name)
		if f == 0 {
			r.tb.Fatalf("the runtime has no %s", name)
		}
		return int(int32(f.Call(args...)))
	}
}

func TestRuntimeCopies(t *testing.T) {
	for _, version := range []int{CUDA124, CUDA128, CUDA130} {
		r := newRig(t, Options{Version: version})
		call := r.cudart()
		if code := call("cudaRuntimeGetVersion", r.args.Addr); code != ok || int(int32(r.args.Words[0])) != version {
			t.Errorf("version %d, code %d", r.args.Words[0], code)
		}
		h, d, s := r.host(4096), r.alloc(4096), r.newStream()
		noise(h[:1024], 1)
		if code := call("cudaMemcpy2DAsync", d, 64, addr(h), 32, 32, 32, 1, s); code != ok {
			t.Fatal(code)
		}
		if code := call("cudaMemcpy2DAsync", addr(h)+1024, 32, d, 64, 32, 32, 4, s); code != ok {
			t.Fatal(code)
		}
		if version >= CUDA128 {
			args := []uintptr{r.args.Addr, r.args.Addr + 8, r.args.Addr + 16, 1, r.args.Addr + 24, r.args.Addr + 48, 1}
			for i, w := range []uint64{uint64(addr(h) + 2048), uint64(addr(h)), 1024, orderStream, 0, 0, 0} {
				r.args.Words[i] = w
			}
			if version < CUDA130 {
				args = append(args, r.args.Addr+56)
			}
			if code := call("cudaMemcpyBatchAsync", append(args, s)...); code != ok {
				t.Fatal(code)
			}
		}
		r.sync(s)
		same(t, "through the runtime", h[1024:2048], h[:1024])
		if version >= CUDA128 {
			same(t, "batch of the runtime", h[2048:3072], h[:1024])
		}
		if n := r.Calls("cudaMemcpy2DAsync"); n != 2 {
			t.Errorf("%d calls", n)
		}
	}
}

// TestRuntimeErrorsAreKept: who does not ask for the error of a call leaves it to the next
// who asks.
func TestRuntimeErrorsAreKept(t *testing.T) {
	r := newRig(t, Options{})
	call := r.cudart()
	s := r.newStream()
	h, d := addr(r.host(64)), r.alloc(64)
	for _, c := range []struct {
		code int
		args []uintptr
		says string
	}{
		{badPitch, []uintptr{d, 8, h, 16, 16, 2, 4, s}, "pitch"},
		{21, []uintptr{d, 16, h, 16, 16, 2, 5, s}, ""},
		{invalidValue, []uintptr{d, 16, h, 16, 16, 2, 2, s}, "kind"},
	} {
		if code := call("cudaMemcpy2DAsync", c.args...); code != c.code {
			t.Errorf("%s: code %d", c.says, code)
		}
		r.expect(c.says)
		if n := r.Counts().PendingErrors; n != 1 {
			t.Errorf("%d errors to ask for", n)
		}
		if code := call("cudaPeekAtLastError"); code != c.code {
			t.Errorf("peek: %d", code)
		}
		if code := call("cudaGetLastError"); code != c.code {
			t.Errorf("get: %d", code)
		}
		if code := call("cudaGetLastError"); code != ok {
			t.Errorf("get again: %d", code)
		}
	}
	r.FailCall("cudaHostRegister", 1, notSupported)
	if code := call("cudaHostRegister", h, 8, 0); code != notSupported {
		t.Errorf("injected: %d", code)
	}
	if c := r.Counts(); c.Leaks() == "" {
		t.Error("an error that nobody has asked for is no leak")
	}
	call("cudaGetLastError")
}

// TestRuntimeNeedsContext: without one the real runtime would use device 0.
func TestRuntimeNeedsContext(t *testing.T) {
	r := newRig(t, Options{})
	call := r.cudart()
	s := r.newStream()
	h, d := addr(r.host(64)), r.alloc(64)
	elsewhere(func() {
		if code := call("cudaMemcpyAsync", d, h, 8, 4, s); code != invalidContext {
			t.Errorf("code %d", code)
		}
		call("cudaGetLastError")
		r.Expect("this thread has no context")
		if code := call("cudaSetDevice", 1); code != ok {
			t.Errorf("set the device: %d", code)
		}
		if code := call("cudaGetDevice", r.args.Addr); code != ok || int32(r.args.Words[0]) != 1 {
			t.Errorf("device %d, code %d", r.args.Words[0], code)
		}
		call("cudaSetDevice", 0)
		if code := call("cudaMemcpyAsync", d, h, 8, 4, s); code != ok {
			t.Errorf("code %d", code)
		}
	})
	r.sync(s)
	runtime.KeepAlive(r)
}

// TestRuntimeTooNew: a driver of an older major version does not carry it.
func TestRuntimeTooNew(t *testing.T) {
	r := newRig(t, Options{Version: CUDA124, Runtime: CUDA130})
	call := r.cudart()
	if code := call("cudaGetDeviceCount", r.args.Addr); code != 35 {
		t.Errorf("code %d", code)
	}
	call("cudaGetLastError")
	older := newRig(t, Options{Version: CUDA124, Runtime: CUDA128})
	call = older.cudart()
	a := older.args.Addr
	if code := call("cudaMemcpyBatchAsync", a, a, a, 1, a, a, 1, a, older.newStream()); code != 36 {
		t.Errorf("a batch of an older driver: code %d", code)
	}
	call("cudaGetLastError")
	none := Load(t, Options{Devices: -1})
	lib, err := dl.Open(none.Runtime())
	check(t, err)
	if code := int32(lib.Find("cudaGetDeviceCount").Call(older.args.Addr)); code != 100 {
		t.Errorf("no device: %d", code)
	}
	lib.Find("cudaGetLastError").Call()
}

// TestRuntimeFindsDriver beside itself, by either name.
func TestRuntimeFindsDriver(t *testing.T) {
	for _, sonames := range []bool{false, true} {
		_, path := Build(t, Options{Version: CUDA128, Sonames: sonames})
		lib := open(t, path)
		b, err := dl.NewBlock(1)
		check(t, err)
		if code := int32(lib.Find("cudaDriverGetVersion").Call(b.Addr)); code != ok || int32(b.Words[0]) != CUDA128 {
			t.Errorf("version %d, code %d", b.Words[0], code)
		}
		b.Free()
	}
}
