package kvferry

import (
	"log/slog"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
)

// Options say what a manager manages. The zero value of every field but Cache is
// useful.
type Options struct {
	// Cache is the paged KV cache on the device, owned by the caller or wrapped
	// around an engine's memory. Required. The manager hands out its pages;
	// nobody else may. It must stay open as long as the manager.
	Cache *kv.Cache
	// Device is the device that Cache lives on, such as a *device.Accelerator. Nil: the
	// host device, opened by the manager.
	Device device.Device
	// Host is where the memory of the host pool comes from. Nil: Device, if that is a
	// host device, else one opened by the manager. One a process is best: it knows what
	// memory is promised already.
	Host *device.Host
	// HostPages is the size of the host pool. 0: a page that leaves the device is
	// gone. The pool grows in the background: see Manager.Ready.
	HostPages int
	// Inclusive keeps a page's host copy when it is promoted. The zero value is
	// exclusive: a page is on the device or on the host, never on both for long.
	Inclusive bool
	// WriteThrough copies every page to the host pool when it is put or used, rather
	// than when it leaves the device: more copies, and a device page that can be
	// given up at once. It implies Inclusive.
	WriteThrough bool
	// Compute is the stream on which the engine reads and writes pages. When set,
	// copies are ordered behind its work and it behind theirs, and nobody waits.
	// When nil, the engine waits for Admission.Wait before it touches the pages,
	// and for its own work before Commit, Reset and Remove.
	Compute device.Stream
	// Copier moves the pages. Nil: the portable one, which is slow on an accelerator:
	// see copier.Select.
	Copier copier.Copier
	// MustPin ends the growth of the host pool where Device refuses to pin its memory.
	// Otherwise the pool says so and goes on: see hostpool.Options.
	MustPin bool
	// Checks says when the bytes of pages in host memory are checked. The zero value is
	// at every arrival and before every departure.
	Checks hostpool.Checks
	// ScrubAfter is how long no look-up must have come before cold host pages are
	// checked in the background. 0 means a second, negative never.
	ScrubAfter time.Duration
	// History is how many evicted keys are remembered: see store.Options.
	History int
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

func (o *Options) validate() error {
	switch {
	case o.Cache == nil:
		return fault.New(fault.Invalid, "Options.Cache", "is nil: a manager needs a cache")
	case o.HostPages < 0 || int64(o.HostPages) > 1<<31-1:
		return fault.New(fault.Invalid, "Options.HostPages", "%d: the range is 0 to %d", o.HostPages, 1<<31-1)
	case usable(o.Cache.Geometry()) < 1:
		return fault.New(fault.Invalid, "Options.Cache", "has %d pages: at least 1 is needed besides the sink", o.Cache.Geometry().Pages())
	}
	return nil
}

func usable(g *kv.Geometry) int {
	if g.Sink() {
		return g.Pages() - 1
	}
	return g.Pages()
}
