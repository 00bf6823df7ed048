package fakedriver

import (
	"bytes"
	"encoding/hex"
	"os"
	"testing"

	"github.com/kvferry/kvferry/internal/dl"
)

// exported returns the handle of device memory.
func (r *rig) exported(p uintptr) []byte {
	r.tb.Helper()
	r.must(r.either("cuIpcGetMemHandle", "hipIpcGetMemHandle"), r.args.Addr, p)
	return bytes.Clone(r.args.Bytes[:64])
}

// open opens a handle, and returns the code.
func (r *rig) open(handle []byte) (uintptr, int) {
	r.tb.Helper()
	b, err := dl.NewBlock(8)
	check(r.tb, err)
	defer b.Free()
	copy(b.Bytes, handle)
	code := int32(r.Find(r.either("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle")).CallHandle(r.args.Addr, b, 1))
	return uintptr(r.args.Words[0]), int(code)
}

func (r *rig) badHandle() int {
	if r.hip() {
		return badPointer
	}
	return invalidValue
}

func TestMemoryOfAnotherProcess(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		d := r.word(r.either("cuMemAlloc_v2", "hipMalloc"), 1000)
		r.Poke(d, []byte("from the parent\x00"))
		h := r.exported(d)
		inside := r.exported(d + 100)
		if bytes.Equal(h, inside) == r.hip() {
			t.Errorf("the handle of an inner address differs: %v", !r.hip())
		}
		if _, code := r.open(h); code != invalidContext {
			t.Errorf("opened in its own process: %d", code)
		}
		for _, h := range [][]byte{h, inside} {
			r.Poke(d, []byte("from the parent\x00"))
			kid := r.spawn("open", h)
			same := "same address true"
			if r.hip() {
				same = "same address false"
			}
			kid.wants("open 0", same, "from the parent", "close 0", "close 0")
			if got := string(r.Peek(d, 14)); got != "from the child" {
				t.Errorf("the child has written %q", got)
			}
			kid.tell()
			kid.wants("open 0")
			kid.wait()
		}
		kid := r.spawn("open", h)
		for range 5 {
			kid.line()
		}
		r.must(r.either("cuMemFree_v2", "hipFree"), d)
		kid.tell()
		kid.wants("open " + map[bool]string{false: "1", true: "17"}[r.hip()])
		kid.wait()
	})
}

func TestExporterDies(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		kid := r.spawn("export", nil)
		h, err := hex.DecodeString(kid.line())
		check(t, err)
		p, code := r.open(h)
		if code != ok {
			t.Fatalf("open: %d", code)
		}
		if got := r.Peek(p, 1)[0]; got != fresh {
			t.Errorf("opened memory holds %#x", got)
		}
		if !faults(func() { dl.GoString(p) }) {
			t.Error("opened memory can be read by the processor")
		}
		kid.wait()
		if _, code := r.open(h); !r.hip() && code != ok {
			t.Errorf("open again, while it is open: %d", code)
		} else if r.hip() && code != badPointer {
			t.Errorf("open again: %d", code)
		}
		if got := r.Peek(p, 1)[0]; got != 0xDF {
			t.Errorf("freed memory of another process holds %#x", got)
		}
		opens := 1
		if !r.hip() {
			opens = 2
		}
		for range opens {
			r.must(r.either("cuIpcCloseMemHandle", "hipIpcCloseMemHandle"), p)
		}
		r.want(invalidValue, r.either("cuIpcCloseMemHandle", "hipIpcCloseMemHandle"), p)
		r.Expect("not what was opened")
		if _, code := r.open(h); code != r.badHandle() {
			t.Errorf("open of a dead exporter: %d", code)
		}

		h[20] ^= 1
		if _, code := r.open(h); code != r.badHandle() {
			t.Errorf("open of a garbled handle: %d", code)
		}
		r.Expect("passed by value")
	})
}

func TestEventOfAnotherProcess(t *testing.T) {
	for _, vendor := range []Vendor{CUDA, HIP} {
		r := newRig(t, Options{Vendor: vendor})
		s := r.newStream()
		r.want(invalidValue, r.either("cuEventCreate", "hipEventCreateWithFlags"), r.args.Addr, 4) // must have no timing
		plain := r.newEvent(2)
		export := r.either("cuIpcGetEventHandle", "hipIpcGetEventHandle")
		r.want(invalidHandle, export, r.args.Addr, plain)
		e := r.newEvent(6)
		release := r.Hold(s)
		r.must(r.either("cuEventRecord", "hipEventRecord"), e, s)
		r.must(export, r.args.Addr, e)
		kid := r.spawn("event", bytes.Clone(r.args.Bytes[:64]))
		kid.wants("open 0", "query 600 600")
		release()
		r.sync(s)
		kid.tell()
		kid.wants("sync 0 0")
		kid.wait()
	}
}

// physical makes a handle of memory that can be exported.
func (r *rig) physical(size uintptr) uintptr {
	r.tb.Helper()
	prop := r.args.Words[16:20]
	clear(prop)
	prop[0], prop[1] = 1|1<<32, 1 // pinned, by descriptor; of device 0
	return r.word(r.either("cuMemCreate", "hipMemCreate"), size, r.args.Addr+16*8, 0)
}

func (r *rig) access(p, size uintptr) {
	r.tb.Helper()
	r.args.Words[24], r.args.Words[25] = 1, 3
	r.must(r.either("cuMemSetAccess", "hipMemSetAccess"), p, size, r.args.Addr+24*8, 1)
}

func TestMappedMemory(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		const size = 2 << 20
		r := newRig(t, o)
		mapping, unmap := r.either("cuMemMap", "hipMemMap"), r.either("cuMemUnmap", "hipMemUnmap")
		release := r.either("cuMemRelease", "hipMemRelease")
		b, s := r.host(8192), r.newStream()
		a, c := r.physical(size), r.physical(size)
		p := r.word(r.either("cuMemAddressReserve", "hipMemAddressReserve"), 3*size, 0, 0, 0)
		r.must(mapping, p, size, 0, a, 0)
		r.want(invalidValue, mapping, p, size, 0, c, 0)
		r.Expect("can't be mapped")
		r.must(mapping, p+size, size, 0, c, 0)
		copyAsync := r.either("cuMemcpyAsync", "hipMemcpyAsync")
		send := []uintptr{p + size - 4096, addr(b), 8192, s}
		if r.hip() {
			send = []uintptr{p + size - 4096, addr(b), 8192, 4, s}
		}
		r.want(invalidValue, copyAsync, send...)
		r.Expect("not mapped with access")
		r.access(p, 2*size)

		// A copy may cross pieces, and they outlive their handles.
		r.must(release, a)
		r.must(release, c)
		noise(b, 4)
		r.must(copyAsync, send...)
		r.sync(s)
		same(t, "across pieces", r.Peek(p+size-4096, 8192), b)
		send[0] = p + 2*size - 100
		r.want(invalidValue, copyAsync, send...)
		r.Expect("not mapped with access")
		r.want(invalidValue, r.either("cuIpcGetMemHandle", "hipIpcGetMemHandle"), r.args.Addr, p)

		// What another process gets is the memory of a descriptor.
		handle := r.word(r.either("cuMemRetainAllocationHandle", "hipMemRetainAllocationHandle"), p)
		fd := r.word(r.either("cuMemExportToShareableHandle", "hipMemExportToShareableHandle"), handle, 1, 0)
		r.must(release, handle)
		r.Poke(p+100, []byte("a piece of mine\x00"))
		file := os.NewFile(fd&0xffffffff, "piece")
		kid := r.spawn("import", nil, file)
		check(t, file.Close())
		kid.wants("map 0", "access 0", "a piece of mine")
		kid.wait()

		r.want(invalidValue, r.either("cuMemAddressFree", "hipMemAddressFree"), p, 3*size)
		r.Expect("with memory mapped into it")
		r.want(invalidValue, unmap, p, size/2)
		r.Expect("not what was mapped")
		r.must(unmap, p, 2*size)
		r.must(r.either("cuMemAddressFree", "hipMemAddressFree"), p, 3*size)
		r.want(invalidValue, release, a)
		r.Expect("no handle of memory")
	})
}
