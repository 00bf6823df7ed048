package hip

import (
	"cmp"
	"fmt"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/gpu"
)

type operations = gpu.Driver[device.StreamHandle, device.EventHandle]

// Driver is a device of AMD's, as a [device.Driver]: its methods
// Name, Alloc, Free, Register, Unregister, CloseStream, SyncStream, NewEvent, CloseEvent,
// Record, Wait, EventDone and SyncEvent are documented there. What else it can do, for
// other processes and other devices, is below. All methods may be called from any
// goroutine, and none after Close.
type Driver struct {
	operations
	sharing gpu.Sharing[device.EventHandle]
	dev     *gpu.Device
	attrs   device.Attributes
	engine  *engine
}

var _ device.Driver = (*Driver)(nil)

func newDriver(dev *gpu.Device, attrs device.Attributes, o Options) *Driver {
	return &Driver{
		operations: gpu.NewDriver[device.StreamHandle, device.EventHandle](dev),
		sharing:    gpu.NewSharing[device.EventHandle](dev),
		dev:        dev,
		attrs:      attrs,
		engine:     newEngine(dev, attrs, cmp.Or(o.Batch, gpu.CopyMost)),
	}
}

// Attributes says what the device is and can do.
func (d *Driver) Attributes() device.Attributes { return d.attrs }

// Engines are the device's ways of copying: one.
func (d *Driver) Engines() []device.Engine { return []device.Engine{d.engine} }

// NewStream makes a stream that does not wait for the default stream.
func (d *Driver) NewStream(p device.Priority) (device.StreamHandle, error) {
	switch p {
	case device.HighPriority:
		return d.NewStreamOf(1)
	case device.LowPriority:
		return d.NewStreamOf(-1)
	default:
		return d.NewStreamOf(0)
	}
}

// Close gives up this process's hold on the device. Memory that is open must be closed
// before.
func (d *Driver) Close() error {
	err := d.dev.Close()
	d.engine.batches.Close()
	d.dev.Lib.Blocks.Close()
	return err
}

// engine copies by libamdhip64.
type engine struct {
	dev     *gpu.Device
	limits  device.EngineLimits
	batches *gpu.Batches
}

func newEngine(dev *gpu.Device, attrs device.Attributes, most int) *engine {
	lib := dev.Lib
	e := &engine{dev: dev, limits: device.EngineLimits{MaxPitch: attrs.MaxPitch, Library: lib.File, Version: lib.Release}}
	switch {
	case lib.Has(abi.HipMemcpyBatchAsync):
		e.limits.Batch = most
		form := gpu.BatchForm{Attributes: lib.Version >= abi.HIPAttributes, FailedAt: true}
		e.batches = gpu.NewBatches(dev, lib, abi.HipMemcpyBatchAsync, form, most)
	case lib.Version < abi.HIPBatch:
		e.limits.NoBatch = fmt.Sprintf("the library is of ROCm %s, and batches came with %s", lib.Release, release(abi.HIPBatch))
	default:
		e.limits.NoBatch = fmt.Sprintf("the library, of ROCm %s, has no hipMemcpyBatchAsync", lib.Release)
	}
	return e
}

func (e *engine) Name() string                { return libraryName }
func (e *engine) Limits() device.EngineLimits { return e.limits }

func (e *engine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	return e.dev.Each(len(rects), func(i int) error {
		r := &rects[i]
		err := e.copy(s, r)
		if err != nil {
			err = gpu.Failed(err, "copy %d of %d: %d rows of %d bytes from %#x to %#x", i, len(rects), r.Rows, r.Width, r.Src, r.Dst)
		}
		return err
	})
}

func (e *engine) copy(s device.StreamHandle, r *device.Rect) error {
	if r.Rows > 1 {
		return e.dev.Lib.Call(abi.HipMemcpy2DAsync, r.Dst, uintptr(r.DstPitch), r.Src, uintptr(r.SrcPitch),
			uintptr(r.Width), uintptr(r.Rows), abi.CUDAMemcpyDefault, uintptr(s))
	}
	return e.dev.Lib.Call(abi.HipMemcpyAsync, r.Dst, r.Src, uintptr(r.Width), abi.CUDAMemcpyDefault, uintptr(s))
}

func (e *engine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	return e.batches.Copy(uintptr(s), b.Dst, b.Src, b.Bytes, o == device.AnyOrder)
}
