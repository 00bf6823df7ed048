package hip

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// libraryName is the library's, and that of its engine.
const libraryName = "libamdhip64"

// Options are the choices of an opened device. The zero value is a good one.
type Options struct {
	// Library is libamdhip64: a path, or a name that the loader of libraries looks up. ""
	// stands for the newest that it finds.
	Library string
	// Batch is the most copies of one batch, 0 for 8192.
	Batch int
	// Root is the root of the file system that tells of this machine, nil for its own.
	Root fs.FS
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// List describes the devices that this process may use, by their ordinals.
//
// Kinds: fault.NotFound (no library, no device), fault.Unsupported (no library that is
// known here), fault.Device.
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
// Kinds: fault.NotFound (no library, no such device), fault.Invalid (what names no device, or
// could be more than one), fault.Unsupported (no library that is known here), fault.Device,
// fault.Memory.
func Open(which string, o Options) (*device.Accelerator, error) {
	if err := gpu.CheckName("hip", which); err != nil {
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
	if o.Batch < 0 || o.Batch > abi.HIPBatchMost {
		return nil, fault.New(fault.Invalid, "hip", "batches of %d copies, of at most %d", o.Batch, abi.HIPBatchMost)
	}
	ordinal, err := lib.Pick("hip", which)
	if err != nil {
		return nil, err
	}
	handle, attrs, err := describe(lib, ordinal, o.Root)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("hip:%d", ordinal)
	dev, err := gpu.OpenDevice(name, lib, handle, uintptr(ordinal))
	if err != nil {
		return nil, fault.Wrap(fault.KindOf(err), name, err)
	}
	return newDriver(dev, attrs, o), nil
}

// describe asks for what a device is. The runtime touches it when its memory is used.
func describe(lib *gpu.Library, ordinal int, root fs.FS) (handle uintptr, a device.Attributes, err error) {
	if handle, err = lib.Handle(ordinal); err != nil {
		return 0, a, err
	}
	var errs [4]error
	a.Model, errs[0] = lib.Text(abi.DeviceName, handle)
	if lib.Has(abi.DeviceUUID) {
		a.UUID, errs[1] = lib.UUID(handle)
	}
	a.PCI, errs[2] = lib.Text(abi.DevicePCI, handle)
	a.Bytes, errs[3] = lib.Bytes(handle)
	a.NUMANode = gpu.NUMANode(root, a.PCI)
	a.MaxPitch = int64(lib.Attribute(handle, abi.HIPDeviceMaxPitch))
	a.AsyncEngines = lib.Attribute(handle, abi.HIPDeviceAsyncEngineCount)
	a.Integrated = lib.Attribute(handle, abi.HIPDeviceIntegrated) != 0
	a.UVA = lib.Attribute(handle, abi.HIPDeviceUnifiedAddressing) != 0
	a.IPC = lib.CanExport()
	a.VMM = lib.CanMap() && lib.Attribute(handle, abi.HIPDeviceVMM) != 0
	a.Driver = lib.Release
	return handle, a, errors.Join(errs[:]...)
}

// load opens the library and binds its functions. It touches no device.
func load(o Options) (*gpu.Library, error) {
	names := []string{o.Library}
	if o.Library == "" {
		names = nil
		for _, name := range []string{".so.7", ".so.6", ".so.5", ".so"} {
			names = append(names, libraryName+name)
		}
		names = append(names, "/opt/rocm/lib/"+libraryName+".so")
	}
	opened, err := dl.Open(names...)
	if err != nil {
		return nil, gpu.NotOpened(libraryName, err)
	}
	lib := &gpu.Library{Name: libraryName, Visible: "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and that this user may open /dev/kfd"}
	lib.Fail = func(c abi.Call, code int) error { return hipError(lib, c, code) }
	if err := askVersion(lib, opened); err != nil {
		return nil, err
	}
	lib.FDByAddress = lib.Version < abi.HIPFDByValue
	err = lib.Bind(abi.HIP().Calls, func(c abi.Call) dl.Func {
		if c.Version > lib.Version {
			return 0
		}
		return opened.Find(c.Export())
	})
	if err == nil {
		lib.Clear = func() { lib.Func(abi.HipGetLastError).Call() }
		if err = lib.Call(abi.Init, 0); err != nil {
			err = lib.NoDevice(libraryName, err)
		}
	}
	if err != nil {
		lib.Blocks.Close()
		return nil, err
	}
	return lib, nil
}

// askVersion asks a library which one it is. Kind: fault.Unsupported.
func askVersion(lib *gpu.Library, opened *dl.Library) error {
	version := opened.Find("hipRuntimeGetVersion")
	if version == 0 {
		return gpu.NotOne(libraryName, opened.Name(), "hipRuntimeGetVersion", "runtime of AMD's")
	}
	lib.File = version.File()
	b, err := dl.NewBlock(1)
	if err != nil {
		return err
	}
	defer b.Free()
	if r := version.Call(b.Addr); gpu.Code(r) != 0 {
		return fault.New(fault.Unsupported, libraryName, "hipRuntimeGetVersion of %s returns %d", lib.File, gpu.Code(r))
	}
	lib.Version = int(int32(b.Words[0]))
	lib.Release = release(lib.Version)
	return nil
}

// release writes a version for people.
func release(v int) string { return fmt.Sprintf("%d.%d", v/10_000_000, v/100_000%100) }

// hipError makes an error of a code of the library.
func hipError(lib *gpu.Library, c abi.Call, code int) error {
	known := abi.HIPError(code)
	e := &device.DriverError{Library: libraryName, Call: c.Export(), Code: code, Name: known.Name, Class: device.Class(known.Class)}
	if name := dl.GoString(lib.Func(abi.HipGetErrorName).Call(uintptr(uint32(int32(code))))); name != "" {
		e.Name = name
	}
	return fault.Wrap(known.Kind, "", e)
}
