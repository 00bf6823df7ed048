package gpu

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
)

// CopyMost is the most copies of one batch unless another number is asked for. Some
// drivers fault with more.
const CopyMost = abi.HIPBatchMost

// Each calls do for 0 to n-1 on a thread that is bound to the device, until one fails,
// and says how many did not.
func (d *Device) Each(n int, do func(i int) error) (int, error) {
	if err := d.Enter(); err != nil {
		return 0, err
	}
	defer d.Leave()
	for i := range n {
		if err := do(i); err != nil {
			return i, err
		}
	}
	return n, nil
}

// Failed says of err what was being done.
func Failed(err error, format string, args ...any) error {
	return fault.Wrap(fault.KindOf(err), fmt.Sprintf(format, args...), err)
}

// Batches makes the calls of a library that copy many stretches at once. A nil one is of
// a library that has none.
type Batches struct {
	d    *Device
	lib  *Library
	call int
	form BatchForm
	most int
	pool *dl.Pool
}

// BatchForm says what a call of a batch takes besides the copies.
type BatchForm struct {
	Attributes bool // when the sources are read; without, in the order of the stream
	FailedAt   bool // where to write which copy it refused
}

// What follows the three arrays in a block.
const (
	batchAttributes = 0
	batchIndex      = batchAttributes + abi.MemcpyAttributesBytes/8
	batchFailed     = batchIndex + 1
	batchExtra      = batchFailed + 1
)

// NewBatches returns the batches of a call of lib, which is the device's own library or
// one beside it. most is the most copies of one.
func NewBatches(d *Device, lib *Library, call int, form BatchForm, most int) *Batches {
	return &Batches{d: d, lib: lib, call: call, form: form, most: most, pool: dl.NewPool(3*most + batchExtra)}
}

// Close frees what the batches hold.
func (x *Batches) Close() {
	if x != nil {
		x.pool.Close()
	}
}

// Copy queues copies of bytes[i] bytes from src[i] to dst[i] on a stream, in one call.
// With anyOrder their sources are read from now on.
func (x *Batches) Copy(stream uintptr, dst, src, bytes []uint64, anyOrder bool) error {
	if x == nil {
		return fault.New(fault.Unsupported, "batch", "this library has none")
	}
	n := len(dst)
	if n == 0 || n > x.most || len(src) != n || len(bytes) != n {
		return fault.New(fault.Invalid, "batch", "%d destinations, %d sources and %d sizes, of at most %d", n, len(src), len(bytes), x.most)
	}
	b, err := x.pool.Get()
	if err != nil {
		return err
	}
	defer x.pool.Put(b)
	copy(b.Words, dst)
	copy(b.Words[x.most:], src)
	copy(b.Words[2*x.most:], bytes)
	extra := b.Words[3*x.most:][:batchExtra]
	clear(extra)
	extra[batchAttributes] = abi.CUAccessOrderStream
	if anyOrder {
		extra[batchAttributes] = abi.CUAccessOrderAny
	}
	extra[batchFailed] = math.MaxUint64
	if err := x.d.Enter(); err != nil {
		return err
	}
	defer x.d.Leave()
	word := func(i int) uintptr { return b.Addr + uintptr(8*i) }
	args := [9]uintptr{word(0), word(x.most), word(2 * x.most), uintptr(n)}
	if x.form.Attributes {
		args[4], args[5], args[6] = word(3*x.most+batchAttributes), word(3*x.most+batchIndex), 1
	}
	last := 7
	if x.form.FailedAt {
		args[last] = word(3*x.most + batchFailed)
		last++
	}
	args[last] = stream
	if err := x.lib.Call(x.call, args[:last+1]...); err != nil {
		if i := extra[batchFailed]; i < uint64(n) {
			return Failed(err, "copy %d of a batch of %d: %d bytes from %#x to %#x", i, n, bytes[i], src[i], dst[i])
		}
		return Failed(err, "batch of %d copies", n)
	}
	return nil
}
