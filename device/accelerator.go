package device

import (
	"context"
	"log/slog"

	"github.com/kvferry/kvferry/fault"
)

// AcceleratorOptions are the choices of an accelerator. The zero value is a good one.
type AcceleratorOptions struct {
	// Logger gets what no error can carry. Nil is silent.
	Logger *slog.Logger
}

// Accelerator is a device whose copies are made by its own engines, over a [Driver].
type Accelerator struct {
	driver Driver
}

var _ Device = (*Accelerator)(nil)

// OpenAccelerator returns the device behind d, which it closes with itself.
func OpenAccelerator(d Driver, o AcceleratorOptions) (*Accelerator, error) {
	_ = o
	return &Accelerator{driver: d}, nil
}

func todo() error { return fault.New(fault.Unsupported, "accelerator", "not built yet") }

// Name returns the driver's name for the device.
func (a *Accelerator) Name() string { return a.driver.Name() }

// Attributes says what the device is and can do.
func (a *Accelerator) Attributes() Attributes { return a.driver.Attributes() }

// Engines are the device's ways of copying, best first.
func (a *Accelerator) Engines() []Engine { return a.driver.Engines() }

// Driver returns the driver, for what only one vendor has: exports to other processes.
func (a *Accelerator) Driver() Driver { return a.driver }

// Lost returns the error with which the device was lost, nil while it is well.
func (a *Accelerator) Lost() error { return nil }

// Alloc implements [Device].
func (a *Accelerator) Alloc(bytes int64) (*Memory, error) { return nil, todo() }

// Wrap returns a memory over bytes of device memory at base that belong to somebody
// else, such as an engine's KV cache: freeing it ends its use here. They must stay
// allocated until then.
func (a *Accelerator) Wrap(base uintptr, bytes int64) (*Memory, error) { return nil, todo() }

// AllocHost returns zeroed host memory of h, populated and pinned, in pieces as
// [Host.AllocPieces] makes them. Free unpins it.
func (a *Accelerator) AllocHost(h *Host, bytes, cut int64) (*Memory, error) { return nil, todo() }

// Pin makes bytes [off, off+n) of m, which is host memory that is not on the Go heap,
// ready for copies by this device, so that they are asynchronous and fast. It may be
// called for one stretch after the other, while others are in use. No copy crosses two
// stretches in one operation: those that would are split. m.Free unpins all of it.
//
// Stretches of one memory that share an OS page can't be pinned apart: cut where both
// pages of the OS and of the cache end.
func (a *Accelerator) Pin(m *Memory, off, n int64) error { return todo() }

// AdmitPageable lets copies use host memory m that could not be pinned: they block the
// caller, and are slow.
func (a *Accelerator) AdmitPageable(m *Memory) error { return todo() }

// NewStream implements [Device]: a stream of normal priority.
func (a *Accelerator) NewStream(name string) (Stream, error) {
	return a.NewStreamOf(name, NormalPriority)
}

// NewStreamOf is NewStream with a priority.
func (a *Accelerator) NewStreamOf(name string, p Priority) (Stream, error) { return nil, todo() }

// WrapStream returns a stream over an engine's own, whose handle stays the engine's.
// Closing it waits for what was enqueued here. LegacyStream and DefaultStream are legal;
// PerThreadStream is fault.Unsupported.
func (a *Accelerator) WrapStream(name string, h StreamHandle) (Stream, error) { return nil, todo() }

// NewEvent implements [Device].
func (a *Accelerator) NewEvent() (Event, error) { return nil, todo() }

// Close implements [Device], and closes the driver.
func (a *Accelerator) Close() error { return nil }

// Box is Slices × Rows rows to be copied between two memories, as in kv.Box: row j of
// slice i goes from SrcOff + i·SrcSlice + j·SrcPitch to DstOff + i·DstSlice + j·DstPitch.
type Box struct {
	Dst, Src           *Memory
	DstOff, SrcOff     int64
	Width              int64
	Rows, Slices       int
	DstPitch, SrcPitch int64
	DstSlice, SrcSlice int64
}

// CopyBoxes enqueues boxes on s, a stream of this device, through e, one of its engines:
// as few calls of the library as its limits allow, linear copies where nothing else
// goes. The rules are those of [Stream.Copy].
func (a *Accelerator) CopyBoxes(s Stream, e Engine, boxes []Box) error { return todo() }

// CopyBatch is [Stream.Copy] through the batches of e. The legacy stream, and an engine
// without batches, take linear copies. With AnyOrder the sources must be host memory
// that nobody writes until a later ticket or event is done. most is the most copies of
// one batch, 0 for what the engine allows.
func (a *Accelerator) CopyBatch(s Stream, e Engine, ops []Op, o SourceOrder, most int) error {
	return todo()
}

// On reports whether s is a stream of this device.
func (a *Accelerator) On(s Stream) bool { return false }

// Calls counts what the device's streams were given.
type Calls struct {
	Linear, Rects, Boxes, Batches, BatchOps uint64 // calls of the library, and copies in batches
	Pageable                                uint64 // copies to or from memory that is not pinned
}

// Calls returns the counts since the device was opened.
func (a *Accelerator) Calls() Calls { return Calls{} }

var _ = context.Background
