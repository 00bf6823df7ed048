package cuda

import (
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// engineName is the name of libcuda's own copies.
const engineName = "cuda"

// engine copies by libcuda itself.
type engine struct {
	dev     *gpu.Device
	limits  device.EngineLimits
	batches *gpu.Batches
}

func newEngine(dev *gpu.Device, attrs device.Attributes, most int) *engine {
	e := &engine{dev: dev, limits: device.EngineLimits{
		MaxPitch: attrs.MaxPitch, Boxes: true, Library: dev.Lib.File, Version: dev.Lib.Release,
	}}
	call, form, no := batchForm(dev.Lib)
	if no != "" {
		e.limits.NoBatch = no
		return e
	}
	e.limits.Batch = most
	e.batches = gpu.NewBatches(dev, dev.Lib, call, form, most)
	return e
}

func (e *engine) close() { e.batches.Close() }

func (e *engine) Name() string                { return engineName }
func (e *engine) Limits() device.EngineLimits { return e.limits }

// Where the structs lie in a block, in words. Nobody else writes there, so the fields
// that are never set stay 0.
const (
	rectAt = 64
	boxAt  = rectAt + abi.Memcpy2DBytes/8
)

func (e *engine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	b, err := e.dev.Lib.Blocks.Get()
	if err != nil {
		return 0, err
	}
	defer e.dev.Lib.Blocks.Put(b)
	return e.dev.Each(len(rects), func(i int) error { return e.copy(b, s, rects, i) })
}

// copy queues one rect with one call. The driver has read the struct when it returns.
func (e *engine) copy(b *dl.Block, s device.StreamHandle, rects []device.Rect, i int) error {
	var err error
	switch r := &rects[i]; {
	case r.Slices > 1:
		box(b.Words[boxAt:][:abi.Memcpy3DBytes/8], r)
		err = e.dev.Lib.Call(abi.CuMemcpy3DAsync, b.Addr+8*boxAt, uintptr(s))
	case r.Rows > 1:
		rows(b.Words[rectAt:][:abi.Memcpy2DBytes/8], r)
		err = e.dev.Lib.Call(abi.CuMemcpy2DAsync, b.Addr+8*rectAt, uintptr(s))
	default:
		err = e.dev.Lib.Call(abi.CuMemcpyAsync, r.Dst, r.Src, uintptr(r.Width), uintptr(s))
	}
	return failed(err, rects, i)
}

// failed says which of the rects it was.
func failed(err error, rects []device.Rect, i int) error {
	if err == nil {
		return nil
	}
	r := &rects[i]
	return gpu.Failed(err, "copy %d of %d: %d × %d rows of %d bytes from %#x to %#x",
		i, len(rects), r.Slices, r.Rows, r.Width, r.Src, r.Dst)
}

// rows fills in a CUDA_MEMCPY2D. A memory type "unified" lets an address say by itself
// where it points.
func rows(w []uint64, r *device.Rect) {
	w[abi.Memcpy2DSrcMemoryType/8] = abi.CUMemoryTypeUnified
	w[abi.Memcpy2DSrcDevice/8] = uint64(r.Src)
	w[abi.Memcpy2DSrcPitch/8] = uint64(r.SrcPitch)
	w[abi.Memcpy2DDstMemoryType/8] = abi.CUMemoryTypeUnified
	w[abi.Memcpy2DDstDevice/8] = uint64(r.Dst)
	w[abi.Memcpy2DDstPitch/8] = uint64(r.DstPitch)
	w[abi.Memcpy2DWidth/8] = uint64(r.Width)
	w[abi.Memcpy2DHeight/8] = uint64(r.Rows)
}

// box fills in a CUDA_MEMCPY3D, whose heights are the strides of slices in rows.
func box(w []uint64, r *device.Rect) {
	w[abi.Memcpy3DSrcMemoryType/8] = abi.CUMemoryTypeUnified
	w[abi.Memcpy3DSrcDevice/8] = uint64(r.Src)
	w[abi.Memcpy3DSrcPitch/8] = uint64(r.SrcPitch)
	w[abi.Memcpy3DSrcHeight/8] = uint64(r.SrcSlice / r.SrcPitch)
	w[abi.Memcpy3DDstMemoryType/8] = abi.CUMemoryTypeUnified
	w[abi.Memcpy3DDstDevice/8] = uint64(r.Dst)
	w[abi.Memcpy3DDstPitch/8] = uint64(r.DstPitch)
	w[abi.Memcpy3DDstHeight/8] = uint64(r.DstSlice / r.DstPitch)
	w[abi.Memcpy3DWidth/8] = uint64(r.Width)
	w[abi.Memcpy3DHeight/8] = uint64(r.Rows)
	w[abi.Memcpy3DDepth/8] = uint64(r.Slices)
}

func (e *engine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	return e.batches.Copy(uintptr(s), b.Dst, b.Src, b.Bytes, o == device.AnyOrder)
}
