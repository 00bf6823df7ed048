// Package accel opens the device that a verb is to work on, by the name that the user
// gave it: host, cuda:N, cuda:UUID or hip:N.
//
// Nothing is opened that was not named: no library is loaded for the host, and no
// device is touched but the one.
package accel

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
)

// The vendors, as the names of devices begin.
const (
	Host = "host"
	CUDA = "cuda"
	HIP  = "hip"
)

// Libraries say where the vendors' libraries are: paths, or names that the dynamic
// linker looks up. "" stands for the names that each vendor gives them.
type Libraries struct {
	CUDA   string // the driver: libcuda.so.1
	CUDART string // the runtime, which is optional: libcudart.so
	HIP    string // libamdhip64.so
}

// Options are the choices of an opened device. The zero value is a good one.
type Options struct {
	Libraries
	// Copier is the name of the copier to use, "" for the one that a self-test chooses.
	Copier string
	// Calibrate is how long may be measured which way of copying is best for which rows.
	// 0: not at all, the copier guesses.
	Calibrate time.Duration
	// Workers is how many threads the host device copies with: see device.HostOptions.
	Workers int
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// Opened is a device with what is needed to copy pages to and from it.
type Opened struct {
	// Device is the device that was named.
	Device device.Device
	// Accelerator is Device, when that is one; nil for the host.
	Accelerator *device.Accelerator
	// Host is where host memory comes from: Device itself, when that is the host.
	Host *device.Host
	// Copier moves pages on the streams of Device, and Selection says how it was chosen.
	Copier    copier.Copier
	Selection *copier.Selection
}

// Close closes what Open has opened. What was made of it must be closed first.
func (o *Opened) Close() error {
	var errs []error
	if o.Accelerator != nil {
		errs = append(errs, o.Accelerator.Close())
	}
	return errors.Join(append(errs, o.Host.Close())...)
}

// Parse splits the name of a device into its vendor and which of the vendor's devices
// it is: a number or a UUID, "" for the host. "" is the host. Kind: fault.Invalid.
func Parse(name string) (vendor, which string, err error) {
	vendor, which, found := strings.Cut(name, ":")
	switch {
	case name == "" || name == Host:
		return Host, "", nil
	case found && which != "" && (vendor == CUDA || vendor == HIP):
		return vendor, which, nil
	}
	return "", "", fault.New(fault.Invalid, "--device", "no such device: %q", name).
		Hint("it is host, cuda:N, cuda:UUID or hip:N; kvferry doctor lists those of this machine")
}

// Open opens the device of that name and chooses its copier.
//
// Kinds: fault.Invalid (the name), fault.NotFound (no library, no such device),
// fault.Unsupported (a library too old, a copier that does not work here),
// fault.Device.
func Open(ctx context.Context, name string, o Options) (_ *Opened, err error) {
	vendor, which, err := Parse(name)
	if err != nil {
		return nil, err
	}
	host, err := device.OpenHost(device.HostOptions{Workers: o.Workers})
	if err != nil {
		return nil, err
	}
	x := &Opened{Device: host, Host: host}
	if vendor != Host {
		if x.Accelerator, err = openAccelerator(vendor, which, o); err != nil {
			return nil, errors.Join(err, host.Close())
		}
		x.Device = x.Accelerator
	}
	choice := copier.SelectOptions{Force: o.Copier, Host: host, Logger: o.Logger}
	if o.Calibrate > 0 {
		choice.Calibrate = &copier.CalibrateOptions{Budget: o.Calibrate}
	}
	if x.Selection, err = copier.Select(ctx, x.Device, choice); err != nil {
		return nil, errors.Join(err, x.Close())
	}
	x.Copier = x.Selection.Copier
	return x, nil
}

// openAccelerator opens one device of a vendor.
func openAccelerator(vendor, which string, o Options) (*device.Accelerator, error) {
	if vendor == CUDA {
		return cuda.Open(which, cuda.Options{Library: o.CUDA, Runtime: o.CUDART, Logger: o.Logger})
	}
	return hip.Open(which, hip.Options{Library: o.HIP, Logger: o.Logger})
}
