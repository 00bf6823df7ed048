package fakedriver

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// modes calls f with each mode.
func modes(t *testing.T, o Options, f func(t *testing.T, r *rig)) {
	for _, m := range []Mode{Random, Eager, Lazy} {
		t.Run(m.String(), func(t *testing.T) {
			o.Mode = m
			f(t, newRig(t, o))
		})
	}
}

func TestLinearRoundTrip(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			const n = 100_000
			h, d, s := r.host(2*n), r.alloc(n), r.newStream()
			noise(h[:n], 1)
			r.copy(d, addr(h), n, s)
			r.copy(addr(h)+n, d, n, s)
			r.sync(s)
			same(t, "round trip", h[n:], h[:n])
		})
	})
}

// box is a copy of slices × rows rows between two memories.
type box struct {
	dst, src                               uintptr
	width, rows, slices                    int
	dstPitch, srcPitch, dstRows, srcRows   int // rows of a slice, with those that are not copied
	dstX, dstY, dstZ, srcX, srcY, srcZ     int
	dstType, srcType, dstHostToo, reserved uint64
}

// put2D writes b as the struct of cuMemcpy2DAsync, put3D as that of cuMemcpy3DAsync.
func (r *rig) put2D(b box) uintptr {
	w := r.args.Words[64:80]
	clear(w)
	w[0], w[1], w[2], w[6] = uint64(b.srcX), uint64(b.srcY), b.srcType, uint64(b.srcPitch)
	w[7], w[8], w[9], w[13] = uint64(b.dstX), uint64(b.dstY), b.dstType, uint64(b.dstPitch)
	w[14], w[15] = uint64(b.width), uint64(b.rows)
	w[3+host(b.srcType)], w[10+host(b.dstType)] = uint64(b.src), uint64(b.dst)
	if b.dstHostToo != 0 {
		w[10] = b.dstHostToo
	}
	return r.args.Addr + 64*8
}

func (r *rig) put3D(b box) uintptr {
	w := r.args.Words[64:89]
	clear(w)
	w[0], w[1], w[2], w[4], w[8], w[9], w[10] = uint64(b.srcX), uint64(b.srcY), uint64(b.srcZ), b.srcType, b.reserved, uint64(b.srcPitch), uint64(b.srcRows)
	w[11], w[12], w[13], w[15], w[20], w[21] = uint64(b.dstX), uint64(b.dstY), uint64(b.dstZ), b.dstType, uint64(b.dstPitch), uint64(b.dstRows)
	w[22], w[23], w[24] = uint64(b.width), uint64(b.rows), uint64(b.slices)
	w[5+host(b.srcType)], w[16+host(b.dstType)] = uint64(b.src), uint64(b.dst)
	if b.dstHostToo != 0 {
		w[16] = b.dstHostToo
	}
	return r.args.Addr + 64*8
}

// host is the offset of the field that an address of a memory type belongs into.
func host(memoryType uint64) int {
	if memoryType == memoryHost {
		return 0
	}
	return 1
}

// TestBoxes copies boxes of all shapes to the device and back, and compares every byte,
// those that must not change among them.
func TestBoxes(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			const size = 1 << 16
			random := rand.New(rand.NewPCG(7, uint64(r.options.Mode)))
			h, d, s := r.host(2*size), r.alloc(size), r.newStream()
			want := make([]byte, size)
			for range 50 {
				noise(h, random.Uint64())
				b := box{width: 1 + random.IntN(300), rows: 1 + random.IntN(9), slices: 1, dstType: memoryUnified, srcType: memoryUnified}
				b.dstPitch, b.srcPitch = b.width+random.IntN(100), b.width+random.IntN(100)
				b.dstRows, b.srcRows = b.rows, b.rows
				if !r.hip() {
					b.slices = 1 + random.IntN(5)
					b.dstRows, b.srcRows = b.rows+random.IntN(5), b.rows+random.IntN(5)
				}
				r.copy(d, addr(h)+size, size, s)
				copy(want, h[size:])
				for z := range b.slices {
					for y := range b.rows {
						copy(want[(z*b.dstRows+y)*b.dstPitch:][:b.width], h[(z*b.srcRows+y)*b.srcPitch:])
					}
				}
				b.dst, b.src = d, addr(h)
				r.box(b, s)
				r.copy(addr(h)+size, d, size, s)
				r.sync(s)
				same(t, fmt.Sprintf("%+v", b), h[size:], want)
			}
		})
	})
}

func (r *rig) box(b box, s uintptr) {
	r.tb.Helper()
	switch {
	case r.hip():
		r.must("hipMemcpy2DAsync", b.dst, uintptr(b.dstPitch), b.src, uintptr(b.srcPitch), uintptr(b.width), uintptr(b.rows), 4, s)
	case b.slices == 1:
		r.must("cuMemcpy2DAsync_v2", r.put2D(b), s)
	default:
		r.must("cuMemcpy3DAsync_v2", r.put3D(b), s)
	}
}

// op is a copy of a batch.
type op struct {
	dst, src uintptr
	bytes    int
}

// batchWords is where the arrays of a batch begin in the arguments, and maxBatch how many
// copies there is room for.
const (
	batchWords = 128
	maxBatch   = 256
)

// batch calls the batch function with its arguments as they are, wrong ones too.
func (r *rig) batch(name string, ops []op, orders []uint32, indices []int, s uintptr) int {
	w := r.args.Words[batchWords:]
	at := func(i int) uintptr { return r.args.Addr + uintptr(batchWords+i)*8 }
	for i, o := range ops {
		w[i], w[maxBatch+i], w[2*maxBatch+i] = uint64(o.dst), uint64(o.src), uint64(o.bytes)
	}
	attrs, index, failed := 3*maxBatch, 3*maxBatch+64, 3*maxBatch+96
	for i, order := range orders {
		clear(w[attrs+3*i:][:3])
		w[attrs+3*i] = uint64(order)
	}
	for i, n := range indices {
		w[index+i] = uint64(n)
	}
	w[failed] = 0
	args := []uintptr{at(0), at(maxBatch), at(2 * maxBatch), uintptr(len(ops)), at(attrs), at(index), uintptr(len(indices))}
	if len(orders) == 0 {
		args[4], args[5] = 0, 0
	}
	if name != "cuMemcpyBatchAsync_v2" {
		args = append(args, at(failed))
	}
	return r.call(name, append(args, s)...)
}

func (r *rig) failed() int { return int(int64(r.args.Words[batchWords+3*maxBatch+96])) }

// batchNames are the functions that a version has for batches.
func (r *rig) batchNames() (names []string) {
	for _, name := range []string{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "hipMemcpyBatchAsync"} {
		if r.Has(name) {
			names = append(names, name)
		}
	}
	return names
}

func (r *rig) orders() []uint32 {
	if r.options.Vendor == HIP && r.options.version() < ROCm713 {
		return nil
	}
	return []uint32{orderAny}
}

func TestBatches(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			const n, bytes = 64, 1000
			h, d, s := r.host(2*n*bytes), r.alloc(n*bytes), r.newStream()
			for _, name := range r.batchNames() {
				noise(h, 3)
				var in, out []op
				for i := range n {
					in = append(in, op{d + uintptr((n-1-i)*bytes), addr(h) + uintptr(i*bytes), bytes})
					out = append(out, op{addr(h) + uintptr((n+i)*bytes), d + uintptr(i*bytes), bytes})
				}
				var index []int
				if r.orders() != nil {
					index = []int{0}
				}
				if code := r.batch(name, in, r.orders(), index, s); code != ok {
					t.Fatalf("%s: %d", name, code)
				}
				// The source of what is queued now is what the first batch writes.
				order := r.orders()
				if order != nil {
					order = []uint32{orderStream}
				}
				if code := r.batch(name, out, order, index, s); code != ok {
					t.Fatalf("%s: %d", name, code)
				}
				r.sync(s)
				for i := range n {
					same(t, name, h[(n+i)*bytes:][:bytes], h[(n-1-i)*bytes:][:bytes])
				}
			}
		})
	})
}

// TestAnyOrderReadsEarly: a batch that may read its sources in any order has read some of
// them before the stream came to it.
func TestAnyOrderReadsEarly(t *testing.T) {
	r := newRig(t, Options{})
	const n, bytes = 64, 64
	h, d, s := r.host(n*bytes), r.alloc(n*bytes), r.newStream()
	fill := func(b byte) {
		for i := range h {
			h[i] = b
		}
	}
	for _, c := range []struct {
		order     uint32
		early, at bool // sources are read in the call, and when the batch runs
	}{{orderStream, false, true}, {orderDuringCall, true, false}, {orderAny, true, true}} {
		fill(1)
		release := r.Hold(s)
		var ops []op
		for i := range n {
			ops = append(ops, op{d + uintptr(i*bytes), addr(h) + uintptr(i*bytes), bytes})
		}
		if code := r.batch("cuMemcpyBatchAsync_v2", ops, []uint32{c.order}, []int{0}, s); code != ok {
			t.Fatal(code)
		}
		fill(2)
		release()
		r.sync(s)
		seen := map[byte]bool{}
		for _, b := range r.Peek(d, n*bytes) {
			seen[b] = true
		}
		if seen[1] != c.early || seen[2] != c.at || len(seen) > 2 {
			t.Errorf("order %d: saw %v", c.order, seen)
		}
	}
}

// TestReadBeforeSync: what a copy has not delivered is not there by luck.
func TestReadBeforeSync(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		r := newRig(t, o)
		h, d, s := r.host(4096), r.alloc(4096), r.newStream()
		release := r.Hold(s)
		h[100] = 1
		r.copy(addr(h), d, 4096, s)
		if h[100] != 1 || r.Queued(s) != 1 {
			t.Errorf("a held stream has copied: %#x, %d queued", h[100], r.Queued(s))
		}
		release()
		r.sync(s)
		if h[100] != fresh {
			t.Errorf("after the copy: %#x", h[100])
		}
		// A copy that fails is the one that can be seen half done.
		r.FailCopy(s, 1, illegalAddress)
		r.copy(addr(h), d, 4096, s)
		r.want(illegalAddress, r.either("cuStreamSynchronize", "hipStreamSynchronize"), s)
		if h[100] != junk {
			t.Errorf("a destination holds %#x before its copy", h[100])
		}
	})
}

// TestStreamsAreNotOrdered: only an event orders two streams.
func TestStreamsAreNotOrdered(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			h, d := r.host(3*4096), r.alloc(4096)
			a, b := r.newStream(), r.newStream()
			e := r.newEvent(2)
			record := r.either("cuEventRecord", "hipEventRecord")
			wait := r.either("cuStreamWaitEvent", "hipStreamWaitEvent")
			noise(h[:4096], 5)

			r.must(wait, b, e, 0) // never recorded: nothing to wait for
			release := r.Hold(a)
			r.copy(d, addr(h), 4096, a)
			r.copy(addr(h)+4096, d, 4096, b)
			r.sync(b)
			if h[4096] != fresh {
				t.Errorf("an unordered copy saw %#x", h[4096])
			}
			r.must(record, e, a)
			r.must(wait, b, e, 0)
			r.copy(addr(h)+2*4096, d, 4096, b)
			if n := r.Queued(b); n == 0 {
				t.Error("a stream has not waited")
			}
			// The event now stands for a later point, but who waits has its own.
			r.want(notReady, r.either("cuEventQuery", "hipEventQuery"), e)
			release()
			r.sync(b)
			same(t, "ordered copy", h[2*4096:], h[:4096])
			r.must(r.either("cuEventSynchronize", "hipEventSynchronize"), e)
			r.must(r.either("cuEventQuery", "hipEventQuery"), e)
			r.sync(a)
		})
	})
}

// TestLegacyStreamWaitsForBlockingOnes, and not for the others.
func TestLegacyStreamWaitsForBlockingOnes(t *testing.T) {
	r := newRig(t, Options{})
	h, d := r.host(2*4096), r.alloc(4096)
	blocking := r.word("cuStreamCreateWithPriority", 0, 0)
	defer r.must("cuStreamDestroy_v2", blocking)
	other := r.newStream()
	noise(h[:4096], 1)
	held, heldToo := r.Hold(blocking), r.Hold(other)
	r.copy(d, addr(h), 4096, blocking)
	r.copy(d, addr(h), 1, other)
	r.copy(addr(h)+4096, d, 4096, 0)
	r.want(notReady, "cuStreamQuery", 0)
	held()
	r.sync(1)
	same(t, "copy of the legacy stream", h[4096:], h[:4096])
	heldToo()
	r.sync(other)
}
