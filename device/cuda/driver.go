package cuda

import (
	"cmp"
	"errors"
	"slices"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/gpu"
)

type operations = gpu.Driver[device.StreamHandle, device.EventHandle]

// Driver is a device of NVIDIA's, as a [device.Driver]: its methods
// Name, Alloc, Free, Register, Unregister, CloseStream, SyncStream, NewEvent, CloseEvent,
// Record, Wait, EventDone and SyncEvent are documented there. What else it can do, for
// other processes and other devices, is below. All methods may be called from any
// goroutine, and none after Close.
type Driver struct {
	operations
	sharing gpu.Sharing[device.EventHandle]
	dev     *gpu.Device
	attrs   device.Attributes
	engines []device.Engine
	missing []device.MissingEngine
	close   []func() // what is not the driver's
}

var _ device.Driver = (*Driver)(nil)

func newDriver(dev *gpu.Device, attrs device.Attributes, o Options) *Driver {
	d := &Driver{
		operations: gpu.NewDriver[device.StreamHandle, device.EventHandle](dev),
		sharing:    gpu.NewSharing[device.EventHandle](dev),
		dev:        dev,
		attrs:      attrs,
	}
	most := cmp.Or(o.Batch, gpu.CopyMost)
	e := newEngine(dev, attrs, most)
	d.engines, d.close = append(d.engines, e), append(d.close, e.close)
	if e, err := openRuntime(dev, attrs, o.Runtime, most); err == nil {
		d.engines, d.close = append(d.engines, e), append(d.close, e.close)
	} else {
		d.missing = append(d.missing, device.MissingEngine{Name: runtimeName, Err: err})
	}
	return d
}

// Attributes says what the device is and can do.
func (d *Driver) Attributes() device.Attributes { return d.attrs }

// Engines are the device's ways of copying, best first.
func (d *Driver) Engines() []device.Engine { return slices.Clone(d.engines) }

// Missing are the engines that the device could have and has not.
func (d *Driver) Missing() []device.MissingEngine { return slices.Clone(d.missing) }

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
	for _, c := range d.close {
		c()
	}
	err = errors.Join(err, d.dev.Lib.Call(abi.CuDevicePrimaryCtxRelease, d.dev.Handle))
	d.dev.Lib.Blocks.Close()
	return err
}

// Pointer is what the driver knows of an address.
type Pointer struct {
	Known    bool // false: host memory that the driver has nothing to do with
	OnDevice bool
	Ordinal  int     // of the device that it was allocated or pinned for
	Buffer   uint64  // different for each allocation of this process
	Base     uintptr // of the allocation
	Bytes    int64
	// Exports reports whether ExportMemory can do it: not of memory that is made of
	// descriptors or of a pool.
	Exports bool
}

// Pointer says what the driver knows of addr.
func (d *Driver) Pointer(addr uintptr) (p Pointer, err error) {
	b, err := d.dev.Lib.Blocks.Get()
	if err != nil {
		return p, err
	}
	defer d.dev.Lib.Blocks.Put(b)
	attributes := [...]uintptr{
		abi.CUPointerMemoryType, abi.CUPointerDeviceOrdinal, abi.CUPointerBufferID,
		abi.CUPointerRangeStart, abi.CUPointerRangeSize, abi.CUPointerIpcCapable,
	}
	values := b.Words[:len(attributes)]
	clear(values)
	_, err = d.dev.Each(len(attributes), func(i int) error {
		return d.dev.Lib.Call(abi.CuPointerGetAttribute, b.Addr+uintptr(8*i), attributes[i], addr)
	})
	if e, ok := errors.AsType[*device.DriverError](err); ok && e.Code == 1 {
		return p, nil
	}
	return Pointer{
		Known: true, OnDevice: uint32(values[0]) == abi.CUPointerTypeDevice, Ordinal: int(int32(values[1])),
		Buffer: values[2], Base: uintptr(values[3]), Bytes: int64(values[4]), Exports: byte(values[5]) != 0,
	}, err
}
