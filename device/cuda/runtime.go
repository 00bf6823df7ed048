package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// runtimeName is the name of the copies of the CUDA runtime, and its library's.
const runtimeName = "libcudart"

// runtimeEngine copies by libcudart. It uses the context that the thread is bound to.
type runtimeEngine struct {
	dev     *gpu.Device
	lib     *gpu.Library
	limits  device.EngineLimits
	batches *gpu.Batches
}

// openRuntime returns the engine of the first runtime that works with this device. An
// error says of each what is wrong with it.
func openRuntime(dev *gpu.Device, attrs device.Attributes, name string, most int) (*runtimeEngine, error) {
	names := []string{name}
	if name == "" {
		names = append(mappedRuntimes(), "libcudart.so.13", "libcudart.so.12")
	}
	var tried []error
	for _, name := range names {
		lib, err := loadRuntime(dev, name)
		if err == nil {
			return newRuntimeEngine(dev, lib, attrs, most), nil
		}
		tried = append(tried, err)
	}
	kind := fault.NotFound // unless one was found
	for _, err := range tried {
		if k := fault.KindOf(err); kind == fault.NotFound {
			kind = k
		}
	}
	return nil, fault.Wrap(kind, runtimeName, errors.Join(tried...))
}

// mappedRuntimes are those that this process has opened already, PyTorch's among them,
// whose name has a hash in it.
func mappedRuntimes() []string {
	var found []string
	for _, file := range dl.Mapped(runtimeName) {
		if strings.Contains(file, ".so") {
			found = append(found, file)
		}
	}
	return found
}

// loadRuntime opens a runtime and asks it for the device that the thread is bound to: one
// that is too new for the driver, or that uses another, has another answer.
func loadRuntime(dev *gpu.Device, name string) (_ *gpu.Library, err error) {
	opened, err := dl.Open(name)
	if err != nil {
		return nil, err
	}
	version := opened.Find("cudaRuntimeGetVersion")
	if version == 0 {
		return nil, gpu.NotOne(runtimeName, name, "cudaRuntimeGetVersion", "CUDA runtime")
	}
	lib := &gpu.Library{Name: runtimeName, File: version.File()}
	lib.Fail = func(c abi.Call, code int) error { return runtimeError(lib, c, code) }
	b, err := dl.NewBlock(1)
	if err != nil {
		return nil, err
	}
	defer b.Free()
	if r := version.Call(b.Addr); gpu.Code(r) != 0 {
		return nil, fault.New(fault.Device, name, "cudaRuntimeGetVersion returns %d", gpu.Code(r))
	}
	lib.Version = int(int32(b.Words[0]))
	lib.Release = release(lib.Version)
	err = lib.Bind(abi.CUDART().Calls, func(c abi.Call) dl.Func {
		if c.Version > lib.Version {
			return 0
		}
		return opened.Find(c.Export())
	})
	defer func() {
		if err != nil {
			lib.Blocks.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	lib.Clear = func() { lib.Func(abi.CudaGetLastError).Call() }
	if err := dev.Enter(); err != nil {
		return nil, err
	}
	defer dev.Leave()
	at, err := lib.Out(abi.CudaGetDevice)
	if err == nil && uintptr(at) != dev.Handle {
		err = fault.New(fault.Device, name, "takes %s for device %d", dev.Name, int32(at))
	}
	return lib, err
}

func newRuntimeEngine(dev *gpu.Device, lib *gpu.Library, attrs device.Attributes, most int) *runtimeEngine {
	e := &runtimeEngine{dev: dev, lib: lib, limits: device.EngineLimits{
		MaxPitch: attrs.MaxPitch, Library: lib.File, Version: lib.Release,
	}}
	call, form, no := runtimeBatchForm(lib)
	if no != "" {
		e.limits.NoBatch = no
		return e
	}
	e.limits.Batch = most
	e.batches = gpu.NewBatches(dev, lib, call, form, most)
	return e
}

func (e *runtimeEngine) close() {
	e.batches.Close()
	e.lib.Blocks.Close()
}

// runtimeBatchForm says which form of batches a runtime has. There is one name for all,
// so a version that is not known is not called.
func runtimeBatchForm(lib *gpu.Library) (call int, form gpu.BatchForm, no string) {
	switch {
	case lib.Version < abi.CUDABatch:
		return 0, form, fmt.Sprintf("libcudart is of CUDA %s, and batches came with %s", lib.Release, release(abi.CUDABatch))
	case lib.Version >= abi.CUDAUnknown:
		return 0, form, fmt.Sprintf("libcudart is of CUDA %s, whose form of batches is not known here", lib.Release)
	case !lib.Has(abi.CudaMemcpyBatchAsync):
		return 0, form, fmt.Sprintf("libcudart, of CUDA %s, has no cudaMemcpyBatchAsync", lib.Release)
	case lib.Version >= abi.CUDABatch8:
		return abi.CudaMemcpyBatchAsync8, gpu.BatchForm{Attributes: true}, ""
	}
	return abi.CudaMemcpyBatchAsync, gpu.BatchForm{Attributes: true, FailedAt: true}, ""
}

// runtimeError makes an error of a code of libcudart.
func runtimeError(lib *gpu.Library, c abi.Call, code int) error {
	known := abi.CUDARTError(code)
	e := &device.DriverError{Library: runtimeName, Call: c.Export(), Code: code, Name: known.Name, Class: device.Class(known.Class)}
	if name := dl.GoString(lib.Func(abi.CudaGetErrorName).Call(uintptr(uint32(int32(code))))); name != "" {
		e.Name = name
	}
	return fault.Wrap(known.Kind, "", e)
}

func (e *runtimeEngine) Name() string                { return runtimeName }
func (e *runtimeEngine) Limits() device.EngineLimits { return e.limits }

func (e *runtimeEngine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	return e.dev.Each(len(rects), func(i int) error { return failed(e.copy(s, &rects[i]), rects, i) })
}

func (e *runtimeEngine) copy(s device.StreamHandle, r *device.Rect) error {
	if r.Rows > 1 {
		return e.lib.Call(abi.CudaMemcpy2DAsync, r.Dst, uintptr(r.DstPitch), r.Src, uintptr(r.SrcPitch),
			uintptr(r.Width), uintptr(r.Rows), abi.CUDAMemcpyDefault, uintptr(s))
	}
	return e.lib.Call(abi.CudaMemcpyAsync, r.Dst, r.Src, uintptr(r.Width), abi.CUDAMemcpyDefault, uintptr(s))
}

func (e *runtimeEngine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	return e.batches.Copy(uintptr(s), b.Dst, b.Src, b.Bytes, o == device.AnyOrder)
}
