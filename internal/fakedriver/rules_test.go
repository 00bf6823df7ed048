package fakedriver

import (
	"runtime/debug"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/dl"
)

// Each test here breaks a rule, and wants the fake to have seen it.

// faults reports whether f touches memory that it has no access to.
func faults(f func()) (faulted bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	f()
	return false
}

func TestBadBoxes(t *testing.T) {
	r := newRig(t, Options{})
	h, d, s := r.host(4096), r.alloc(4096), r.newStream()
	good := box{dst: d, src: addr(h), width: 16, rows: 4, slices: 2, dstPitch: 32, srcPitch: 16, dstRows: 8, srcRows: 4, dstType: memoryDevice, srcType: memoryHost}
	for _, c := range []struct {
		name   string
		bad    func(*box)
		says   string
		slices bool // only copies of slices have it
	}{
		{"pitch less than width", func(b *box) { b.srcPitch = 15 }, "pitch 15 of rows of 16", false},
		{"pitch above the limit", func(b *box) { b.dstPitch = 1 << 31 }, "pitch 2147483648", false},
		{"rows outside of the slice", func(b *box) { b.dstRows, b.dstY = 8, 5 }, "slices of 8 rows", true},
		{"x outside of the pitch", func(b *box) { b.dstX = 17 }, "pitch 32", false},
		{"memory type of an array", func(b *box) { b.srcType = 3 }, "memory type 3", false},
		{"host memory said to be the device's", func(b *box) { b.srcType = memoryDevice }, "memory type 2 of address", false},
		{"device memory said to be the host's", func(b *box) { b.dstType = memoryHost }, "memory type 1 of address", false},
		{"a field that is not used", func(b *box) { b.dstHostToo = 1 }, "is not 0", false},
		{"reserved field", func(b *box) { b.reserved = 1 }, "reserved", true},
		{"past the end", func(b *box) { b.dst += 4000 }, "runs past the end", false},
		{"past all memory", func(b *box) { b.slices, b.srcRows, b.srcPitch = 1<<40, 1<<30, 1<<30 }, "larger than memory", true},
		{"source and destination overlap", func(b *box) { b.src, b.srcType = d+16, memoryDevice }, "overlap", false},
	} {
		b := good
		c.bad(&b)
		want := invalidValue
		if c.says == "overlap" {
			want = ok // what it does is not defined, but it is done
		}
		if code := r.call("cuMemcpy3DAsync_v2", r.put3D(b), s); code != want {
			t.Errorf("%s: code %d", c.name, code)
		}
		r.Expect(c.says)
		if b.slices = 1; c.slices {
			continue
		}
		if code := r.call("cuMemcpy2DAsync_v2", r.put2D(b), s); code != want {
			t.Errorf("%s, 2-D: code %d", c.name, code)
		}
		r.Expect(c.says)
	}
	r.sync(s)
}

func TestBadHIPRectangles(t *testing.T) {
	r := newRig(t, Options{Vendor: HIP})
	h, d, s := addr(r.host(4096)), r.alloc(4096), r.newStream()
	for _, c := range []struct {
		name string
		code int
		args []uintptr
		says string
	}{
		{"pitch less than width", badPitch, []uintptr{d, 15, h, 16, 16, 4, 4, s}, "pitches 15 and 16"},
		{"pitch above the limit", invalidValue, []uintptr{d, 1 << 31, h, 16, 16, 4, 4, s}, "pitches 2147483648"},
		{"wrong kind", invalidValue, []uintptr{d, 16, h, 16, 16, 4, 2, s}, "kind 2"},
		{"no kind", 21, []uintptr{d, 16, h, 16, 16, 4, 9, s}, "kind 9"},
		{"nothing to copy", ok, []uintptr{d, 0, h, 0, 0, 4, 4, s}, ""},
	} {
		if code := r.call("hipMemcpy2DAsync", c.args...); code != c.code {
			t.Errorf("%s: code %d, want %d", c.name, code, c.code)
		}
		r.expect(c.says)
		r.want(c.code, "hipGetLastError")
		r.want(ok, "hipGetLastError")
	}
}

func TestBadBatches(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		h, d, s := addr(r.host(8192)), r.alloc(8192), r.newStream()
		good := []op{{d, h, 100}, {d + 200, h + 200, 100}, {d + 400, h + 400, 100}}
		for _, name := range r.batchNames() {
			attributes := r.orders() != nil
			with := func(i int, o op) []op {
				ops := slices.Clone(good)
				ops[i] = o
				return ops
			}
			for _, c := range []struct {
				name    string
				ops     []op
				orders  []uint32
				index   []int
				stream  uintptr
				says    string
				code    int
				failed  int
				anyAttr bool // also where batches have no attributes
			}{
				{"legacy stream", good, []uint32{1}, []int{0}, 0, "legacy stream", invalidValue, -1, true},
				{"legacy stream by its other name", good, []uint32{1}, []int{0}, 1, "legacy stream", invalidValue, -1, true},
				{"no stream", good, []uint32{1}, []int{0}, d, "not a stream", invalidHandle, -1, true},
				{"no copies", nil, []uint32{1}, []int{0}, s, "", invalidValue, -1, true},
				{"invalid order", good, []uint32{0}, []int{0}, s, "bad attributes", invalidValue, -1, false},
				{"unknown order", good, []uint32{4}, []int{0}, s, "bad attributes", invalidValue, -1, false},
				{"attributes that begin late", good, []uint32{1}, []int{1}, s, "bad attributes", invalidValue, -1, false},
				{"attributes out of order", good, []uint32{1, 1, 1}, []int{0, 2, 1}, s, "bad attributes", invalidValue, -1, false},
				{"more attributes than copies", good, []uint32{1, 1, 1, 1}, []int{0, 1, 2, 3}, s, "bad attributes", invalidValue, -1, false},
				{"an empty copy", with(1, op{d, h, 0}), []uint32{1}, []int{0}, s, "copy 1 of a batch is empty", invalidValue, 1, true},
				{"a bad address", with(2, op{d + 8000, h, 400}), []uint32{1}, []int{0}, s, "runs past the end", invalidValue, 2, true},
				{"destinations that overlap", with(2, op{d + 50, h + 400, 100}), []uint32{1}, []int{0}, s, "destinations of a batch overlap", ok, -1, true},
				{"copies that depend on each other", with(2, op{d + 600, d + 250, 100}), []uint32{1}, []int{0}, s, "depend on each other", ok, -1, true},
			} {
				if !attributes && !c.anyAttr {
					continue
				}
				if !attributes {
					c.orders, c.index = nil, nil
				}
				if code := r.batch(name, c.ops, c.orders, c.index, c.stream); code != c.code {
					t.Errorf("%s, %s: code %d, want %d", name, c.name, code, c.code)
				}
				r.expect(c.says)
				if name != "cuMemcpyBatchAsync_v2" && r.failed() != c.failed {
					t.Errorf("%s, %s: failed at %d, want %d", name, c.name, r.failed(), c.failed)
				}
			}
		}
		r.sync(s)
	})
}

// TestBatchesOfHIP: what attributes a version takes, that a batch fails on the way, and that
// it has a limit.
func TestBatchesOfHIP(t *testing.T) {
	old := newRig(t, Options{Vendor: HIP, Version: ROCm72})
	h, d, s := addr(old.host(8192)), old.alloc(8192), old.newStream()
	ops := []op{{d, h, 100}}
	if code := old.batch("hipMemcpyBatchAsync", ops, []uint32{1}, []int{0}, s); code != notSupported {
		t.Errorf("attributes in 7.2: %d", code)
	}
	old.Expect("which came later")
	if code := old.batch("hipMemcpyBatchAsync", ops, []uint32{1}, nil, s); code != invalidValue {
		t.Errorf("an address of no attributes in 7.2: %d", code)
	}
	old.Expect("address of some")

	now := newRig(t, Options{Vendor: HIP, Version: ROCm713})
	hb := now.host(8192)
	h, d, s = addr(hb), now.alloc(8192), now.newStream()
	ops = []op{{d, h, 100}, {d + 8000, h, 400}}
	noise(hb, 1)
	if code := now.batch("hipMemcpyBatchAsync", ops, []uint32{1}, []int{0}, s); code != invalidValue {
		t.Errorf("a bad copy: %d", code)
	}
	now.Expect("runs past the end")
	now.sync(s)
	same(t, "what came before a bad copy", now.Peek(d, 100), hb[:100])

	const many = 8193
	block, err := dl.NewBlock(4 * many)
	check(t, err)
	defer block.Free()
	for i := range many {
		block.Words[i], block.Words[many+i], block.Words[2*many+i] = uint64(d), uint64(h), 1
	}
	now.must("hipMemcpyBatchAsync", block.Addr, block.Addr+many*8, block.Addr+2*many*8, many, 0, 0, 0, block.Addr+3*many*8, s)
	now.Expect("batch of 8193 copies")
	now.want(illegalAddress, "hipStreamSynchronize", s)
}

// TestArgumentsOfTheOtherForm: 8 arguments where 9 belong, and the reverse.
func TestArgumentsOfTheOtherForm(t *testing.T) {
	r := newRig(t, Options{})
	h, d, s := addr(r.host(4096)), r.alloc(4096), r.newStream()
	if code := r.batch("cuMemcpyBatchAsync_v2", []op{{d, h, 8}}, []uint32{1}, []int{0}, s); code != ok {
		t.Fatal(code)
	}
	r.sync(s)
	a := r.args.Addr
	list := []uintptr{a + 128*8, a + 384*8, a + 640*8, 1, a + 896*8, a + 960*8, 1}
	r.want(invalidHandle, "cuMemcpyBatchAsync_v2", append(slices.Clone(list), a, s)...)
	r.Expect("is not a stream")
	r.want(invalidValue, "cuMemcpyBatchAsync", append(slices.Clone(list), s)...)
	r.Expect("form of 9 arguments")
}

var goData [64]byte

func TestMemoryRules(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		s := r.newStream()
		free := r.either("cuMemFree_v2", "hipFree")
		register, unregister := r.either("cuMemHostRegister_v2", "hipHostRegister"), r.either("cuMemHostUnregister", "hipHostUnregister")
		send := func(code int, dst, src uintptr, n int) {
			t.Helper()
			args := []uintptr{dst, src, uintptr(n), s}
			if r.hip() {
				args = []uintptr{dst, src, uintptr(n), 4, s}
			}
			r.want(code, r.either("cuMemcpyAsync", "hipMemcpyAsync"), args...)
		}
		h := r.host(4 * osPage)
		d := r.alloc(1000)

		// Memory ends where the caller has said, not where it is convenient.
		send(invalidValue, d+1, addr(h), 1000)
		r.Expect("runs past the end")
		send(invalidValue, d-1, addr(h), 8)
		r.Expect("begins outside of")

		gone := r.word(r.either("cuMemAlloc_v2", "hipMalloc"), 100)
		r.must(free, gone)
		send(invalidValue, gone, addr(h), 8)
		r.Expect("was freed")
		r.want(invalidValue, free, gone)
		r.Expect("freed twice")
		r.want(invalidValue, free, d+8)
		r.Expect("not what was allocated")

		// The processor can't reach device memory.
		if !faults(func() { dl.GoString(d) }) || !faults(func() { dl.GoString(gone) }) {
			t.Error("a device pointer can be read")
		}

		// Each copy lies in one registration.
		b := shared(t, 4*osPage)
		r.must(register, addr(b)+osPage, osPage, 0)
		r.must(register, addr(b)+2*osPage, osPage, 0)
		r.want(registered, register, addr(b)+2*osPage+100, 8, 0)
		r.want(registered, register, addr(b), 2*osPage, 0)
		send(ok, d, addr(b)+osPage, 1000)
		send(invalidValue, d, addr(b)+2*osPage-8, 16)
		r.Expect("into the next")
		send(invalidValue, d, addr(b)+osPage-8, 16)
		r.Expect("begins outside of")
		send(invalidValue, d, addr(b)+3*osPage-8, 16)
		r.Expect("runs past the end")
		r.want(notRegistered, unregister, addr(b)+osPage+8)
		r.Expect("not what was registered")
		r.sync(s)
		r.must(unregister, addr(b)+osPage)
		r.must(unregister, addr(b)+2*osPage)
		r.want(notRegistered, unregister, addr(b)+osPage)
		r.Expect("not what was registered")

		// Go memory is for nobody else, and what is not mapped can't be pinned.
		heap, stack := make([]byte, 1<<20), make([]byte, 64)
		for _, p := range []uintptr{addr(heap), addr(stack), addr(goData[:])} {
			r.want(invalidValue, register, p, 8, 0)
			r.Expect("to Go memory")
			send(invalidValue, d, p, 8)
			r.Expect("is Go memory")
			r.want(invalidValue, r.either("cuMemAlloc_v2", "hipMalloc"), p, 8)
			r.Expect("to Go memory")
		}
		unmapped := d + 1<<40
		r.want(invalidValue, register, unmapped, osPage, 0)
		r.Expect("not mapped")
		send(invalidValue, d, unmapped, 8)
		r.Expect("not mapped")

		// Memory is not without end, and a registration has a limit.
		r.Set("memory", "1000")
		r.want(outOfMemory, r.either("cuMemAlloc_v2", "hipMalloc"), r.args.Addr, 1)
		r.Set("register_limit", "4096")
		r.want(outOfMemory, register, addr(h), 4097, 0)
		r.Set("register_code", "801")
		r.want(notSupported, register, addr(h), 1, 0)
	})
}

// TestUnmappedWhileRegistered: the owner of pinned memory must not take it away.
func TestUnmappedWhileRegistered(t *testing.T) {
	r := newRig(t, Options{})
	b := shared(t, osPage)
	r.must("cuMemHostRegister_v2", addr(b), osPage, 0)
	check(t, unix.Munmap(b))
	r.must("cuMemHostUnregister", addr(b))
	r.Expect("unmapped while it was registered")

	// Memory that is not shared can't have a second mapping: a copy finds nothing there.
	private, err := unix.Mmap(-1, 0, osPage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	check(t, err)
	d, s := r.alloc(osPage), r.newStream()
	r.must("cuMemHostRegister_v2", addr(private), osPage, 0)
	release := r.Hold(s)
	r.copy(addr(private), d, osPage, s)
	at := addr(private)
	check(t, unix.Munmap(private))
	release()
	r.want(illegalAddress, "cuStreamSynchronize", s)
	r.Expect("host memory of a queued copy is gone")
	r.want(illegalAddress, "cuMemHostUnregister", at)
	r.Expect("unmapped while it was registered")
}

// TestGivenBackWhileInUse: memory and streams that queued copies need.
func TestGivenBackWhileInUse(t *testing.T) {
	r := newRig(t, Options{})
	b, d, s := shared(t, osPage), r.alloc(osPage), r.newStream()
	r.must("cuMemHostRegister_v2", addr(b), osPage, 0)
	release := r.Hold(s)
	r.copy(d, addr(b), osPage, s)
	r.must("cuMemHostUnregister", addr(b))
	r.Expect("unregistered while copies of it are queued")

	// A stream that is destroyed runs what it was given.
	own := r.word("cuStreamCreateWithPriority", 1, 0)
	ownRelease := r.Hold(own)
	h := r.host(osPage)
	h[0] = 7
	r.copy(d, addr(h), 1, own)
	r.must("cuStreamDestroy_v2", own)
	r.want(invalidHandle, "cuStreamSynchronize", own)
	r.Expect("was destroyed")
	release()
	r.sync(s)
	ownRelease()

	// Freeing device memory waits for it.
	mine := r.word("cuMemAlloc_v2", 64)
	r.copy(mine, addr(h), 64, s)
	r.must("cuMemFree_v2", mine)
	if n := r.Queued(s); n != 0 {
		t.Errorf("%d operations of freed memory are queued", n)
	}
	if got := r.Peek(d, 1)[0]; got != 7 {
		t.Errorf("the destroyed stream has not copied: %#x", got)
	}
}

// sink keeps the compiler from leaving a read out.
var sink byte

func TestProtection(t *testing.T) {
	r := newRig(t, Options{Protect: true})
	h, d, s := r.host(3*osPage), r.alloc(3*osPage), r.newStream()
	release := r.Hold(s)
	r.copy(addr(h)+osPage, d, 100, s)
	r.copy(d, addr(h)+2*osPage, 100, s)
	h[0] = 1
	for name, c := range map[string]struct {
		faults bool
		touch  func()
	}{
		"another page":           {false, func() { h[8]++ }},
		"read of a destination":  {true, func() { sink = h[osPage+10] }},
		"write of a destination": {true, func() { h[osPage+10] = 1 }},
		"read of a source":       {false, func() { sink = h[2*osPage] }},
		"write of a source":      {true, func() { h[2*osPage] = 1 }},
	} {
		if got := faults(c.touch); got != c.faults {
			t.Errorf("%s faults: %v", name, got)
		}
	}
	release()
	r.sync(s)
	h[osPage]++
	h[2*osPage]++
}

func TestPageableIsSlow(t *testing.T) {
	for _, allow := range []bool{false, true} {
		r := newRig(t, Options{AllowPageable: allow})
		b, d, s := shared(t, osPage), r.alloc(osPage), r.newStream()
		release := r.Hold(s)
		b[0] = 1
		r.copy(d, addr(b), 8, s) // read in the call
		b[0] = 2
		release()
		r.copy(addr(b)+8, d, 8, s) // done in the call
		if b[8] != 1 {
			t.Errorf("the copy to pageable memory has not ended: %#x", b[8])
		}
		if n := r.Counts().Pageable; n != 2 {
			t.Errorf("%d copies of pageable memory are counted", n)
		}
		if !allow {
			r.Expect("slow path: pageable memory")
		}
	}
}
