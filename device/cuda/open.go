package cuda

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// batchMost is the most copies of one batch, whose arguments are 24 MiB.
const batchMost = 1 << 20

// Options are the choices of an opened device. The zero value is a good one.
type Options struct {
	// Library is the driver: a path, or a name that the loader of libraries looks up. ""
	// stands for libcuda.so.1, where there is a driver, in the places where it may be.
	Library string
	// Runtime is libcudart, likewise. "" stands for the one that this process has mapped,
	// or else the newest that the loader finds.
	Runtime string
	// Batch is the most copies of one batch, 0 for 8192, up to 1048576.
	Batch int
	// Newest is the newest version of the driver's interface that is used, such as 12080;
	// 0 for the driver's own. A new driver then does as an older one did: for checks.
	Newest int
	// Root is the root of the file system that tells of this machine, nil for its own.
	Root fs.FS
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// List describes the devices that this process may use, by their ordinals.
//
// Kinds: fault.NotFound (no driver, no device), fault.Unsupported (a driver too old),
// fault.Device.
func List(o Options) ([]device.Attributes, error) {
	lib, err := load(o)
	if err != nil {
		return nil, err
	}
	defer lib.Blocks.Close()
	return gpu.List(lib, func(ordinal int) (device.Attributes, error) {
		_, a, err := describe(lib, ordinal, o.Root)
		return a, err
	})
}

// Open opens the device that which names: its ordinal in this process, or its UUID or
// the beginning of it.
//
// Kinds: fault.NotFound (no driver, no such device), fault.Invalid (what names no device, or
// could be more than one), fault.Unsupported (a driver too old), fault.Device, fault.Memory.
func Open(which string, o Options) (*device.Accelerator, error) {
	if err := gpu.CheckName("cuda", which); err != nil {
		return nil, err
	}
	lib, err := load(o)
	if err != nil {
		return nil, err
	}
	d, err := open(lib, which, o)
	if err != nil {
		lib.Blocks.Close()
		return nil, err
	}
	return device.OpenAccelerator(d, device.AcceleratorOptions{Logger: o.Logger})
}

func open(lib *gpu.Library, which string, o Options) (*Driver, error) {
	if o.Batch < 0 || o.Batch > batchMost {
		return nil, fault.New(fault.Invalid, "cuda", "batches of %d copies, of at most %d", o.Batch, batchMost)
	}
	ordinal, err := lib.Pick("cuda", which)
	if err != nil {
		return nil, err
	}
	handle, attrs, err := describe(lib, ordinal, o.Root)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("cuda:%d", ordinal)
	if !attrs.UVA {
		return nil, fault.New(fault.Unsupported, name, "the addresses of this device do not say where they point")
	}
	context, err := lib.Out(abi.CuDevicePrimaryCtxRetain, handle)
	if err != nil {
		return nil, fault.Wrap(fault.KindOf(err), name, err)
	}
	dev, err := gpu.OpenDevice(name, lib, handle, uintptr(context))
	if err != nil {
		err = errors.Join(err, lib.Call(abi.CuDevicePrimaryCtxRelease, handle))
		return nil, fault.Wrap(fault.KindOf(err), name, err)
	}
	return newDriver(dev, attrs, o), nil
}

// describe asks for what a device is, without a context on it.
func describe(lib *gpu.Library, ordinal int, root fs.FS) (handle uintptr, a device.Attributes, err error) {
	if handle, err = lib.Handle(ordinal); err != nil {
		return 0, a, err
	}
	var errs [4]error
	a.Model, errs[0] = lib.Text(abi.DeviceName, handle)
	a.UUID, errs[1] = lib.UUID(handle)
	a.PCI, errs[2] = lib.Text(abi.DevicePCI, handle)
	a.Bytes, errs[3] = lib.Bytes(handle)
	a.NUMANode = gpu.NUMANode(root, a.PCI)
	a.MaxPitch = int64(lib.Attribute(handle, abi.CUDeviceMaxPitch))
	a.AsyncEngines = lib.Attribute(handle, abi.CUDeviceAsyncEngineCount)
	a.Integrated = lib.Attribute(handle, abi.CUDeviceIntegrated) != 0
	a.UVA = lib.Attribute(handle, abi.CUDeviceUnifiedAddressing) != 0
	a.IPC = a.UVA && lib.CanExport()
	a.VMM = lib.CanMap() && lib.Attribute(handle, abi.CUDeviceVMM) != 0 && lib.Attribute(handle, abi.CUDevicePosixFD) != 0
	a.Driver = lib.Release
	return handle, a, errors.Join(errs[:]...)
}

// load opens the driver's library and binds its functions. It makes no context.
func load(o Options) (*gpu.Library, error) {
	names := []string{o.Library}
	if o.Library == "" {
		names = []string{"libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}
		if dl.Enabled && !driverLoaded(o.Root) {
			files := driverFiles()
			return nil, fault.New(fault.NotFound, "libcuda", "this machine has no driver of NVIDIA's: there is no %s and no %s",
				strings.Join(files[:len(files)-1], ", no "), files[len(files)-1]).
				Hint("install the driver and, in a container, let its devices in; or name the library")
		}
	}
	opened, err := dl.Open(names...)
	if err != nil {
		return nil, gpu.NotOpened("libcuda", err)
	}
	lib := &gpu.Library{Name: "libcuda", Visible: "CUDA_VISIBLE_DEVICES, and that there is a /dev/nvidia0"}
	lib.Fail = func(c abi.Call, code int) error { return driverError(lib, c, code) }
	find, err := resolver(lib, opened)
	if err != nil {
		return nil, err
	}
	if o.Newest > 0 {
		lib.Version = min(lib.Version, o.Newest)
	}
	if err := lib.Bind(abi.CUDA().Calls, find); err != nil {
		lib.Blocks.Close()
		return nil, err
	}
	if err := lib.Call(abi.Init, 0); err != nil {
		lib.Blocks.Close()
		return nil, lib.NoDevice("libcuda", err)
	}
	return lib, nil
}

// driverFiles are files of which a machine with a driver has one.
func driverFiles() []string {
	return []string{"/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg"}
}

func driverLoaded(root fs.FS) bool {
	for _, f := range driverFiles() {
		if _, err := fs.Stat(gpu.Root(root), f[1:]); err == nil {
			return true
		}
	}
	return false
}

// driverError makes an error of a code of libcuda.
func driverError(lib *gpu.Library, c abi.Call, code int) error {
	known := abi.CUDAError(code)
	e := &device.DriverError{Library: "libcuda", Call: c.Export(), Code: code, Name: known.Name, Class: device.Class(known.Class)}
	if name := errorName(lib, code); name != "" {
		e.Name = name
	}
	return fault.Wrap(known.Kind, "", e)
}

// errorName asks the library for its name of a code. It is asked with care: of a code
// that it does not know it says that its name is at address 0.
func errorName(lib *gpu.Library, code int) string {
	b, err := lib.Blocks.Get()
	if err != nil {
		return ""
	}
	defer lib.Blocks.Put(b)
	b.Words[0] = 0
	if r := lib.Func(abi.CuGetErrorName).Call(uintptr(uint32(int32(code))), b.Addr); gpu.Code(r) != 0 {
		return ""
	}
	return dl.GoString(uintptr(b.Words[0]))
}
