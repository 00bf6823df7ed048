package cudaipc

import (
	"errors"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// Sharing says how memory of a device can be shared with other processes of this host:
// nil where it can, else why not.
type Sharing struct {
	// Engine is the name of the engine for the device.
	Engine string
	// Handles is about memory that is allocated as usual.
	Handles error
	// Descriptors is about memory that is mapped piece by piece.
	Descriptors error
}

// Probe tries on a device what an owner does: it allocates memory of both kinds, and
// exports it. That another process can open it, as it can't where containers hide
// processes from each other, is not tried. Kind: fault.Unsupported (a driver that shares
// nothing).
func Probe(a *device.Accelerator) (Sharing, error) {
	name, driver, err := sharingOf(a)
	if err != nil {
		return Sharing{}, err
	}
	return Sharing{Engine: name, Handles: probeHandles(a, driver), Descriptors: probeDescriptors(a, driver)}, nil
}

const probeBytes = 4096

func probeHandles(a *device.Accelerator, driver sharing) error {
	if !a.Attributes().IPC {
		return fault.New(fault.Unsupported, a.Name(), "its library exports no memory by handle").Hint("install a newer driver")
	}
	m, err := a.Alloc(probeBytes)
	if err != nil {
		return err
	}
	_, _, _, err = driver.exportMemory(m.Base())
	return errors.Join(err, m.Free())
}

func probeDescriptors(a *device.Accelerator, driver sharing) error {
	if !a.Attributes().VMM {
		return fault.New(fault.Unsupported, a.Name(), "it exports no memory as descriptors").
			Hint("memory that is allocated as usual has handles: start engines with expandable_segments:False")
	}
	addr, free, err := driver.allocShared(probeBytes)
	if err != nil {
		return err
	}
	pieces, _, err := driver.exportPieces(addr, probeBytes, 1)
	for _, p := range pieces {
		closeAll([]int{p.fd})
	}
	return errors.Join(err, free())
}
