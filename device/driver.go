package device

// Driver is one accelerator through its vendor's library, at the level that
// [Accelerator] needs, which keeps all the books: bounds, uses of memory, tickets.
// Addresses and handles are the vendor's own words.
//
// All methods may be called from any goroutine. Each binds its OS thread to the device
// for as long as it runs, since vendors keep the current device per thread; none is
// called after Close. Their errors are of type [*DriverError], wrapped in a kind of
// package fault.
type Driver interface {
	// Name is the device's name, for people and metrics: "cuda:0".
	Name() string

	// Attributes says what the device is and can do.
	Attributes() Attributes

	// Alloc returns the address of bytes (more than 0) of zeroed device memory. Free
	// gives it back, and may wait for all work of the device.
	Alloc(bytes int64) (addr uintptr, err error)
	Free(addr uintptr) error

	// Register pins host memory, so that copies to and from it are asynchronous. A range
	// that shares an OS page with one that is registered already is fault.Exists, and
	// nothing changes. Unregister takes the address that was registered.
	Register(addr uintptr, bytes int64) error
	Unregister(addr uintptr) error

	// NewStream makes a stream that does not wait for the default stream. CloseStream
	// gives its handle back; work that is queued still runs.
	NewStream(p Priority) (StreamHandle, error)
	CloseStream(s StreamHandle) error

	// SyncStream blocks until what is queued on s has run, well or not, and says whether
	// it has. An error with true says that it has, and that some of it has failed; with
	// false, that nothing is known of it: the call itself has failed, or the device is
	// lost, as the class says. Without an error, it has run. A vendor's library that
	// reports a failure of work by losing the device has no error with true.
	SyncStream(s StreamHandle) (drained bool, err error)

	// NewEvent makes an event that was never recorded. Record makes it stand for what
	// is queued on s; Wait has what is queued on s from now on run after the latest
	// recording of e; EventDone reports whether that has run, and SyncEvent blocks until
	// it has. Done, for an event never recorded. An error of EventDone with true says
	// that the work is over and has failed; with false, that nothing is known of it. In
	// either case the stream is given up; where the class is Lost, the device.
	NewEvent() (EventHandle, error)
	CloseEvent(e EventHandle) error
	Record(e EventHandle, s StreamHandle) error
	Wait(s StreamHandle, e EventHandle) error
	EventDone(e EventHandle) (bool, error)
	SyncEvent(e EventHandle) error

	// Engines are the ways of copying that the device has, best first. There is at
	// least one, which can do linear copies.
	Engines() []Engine

	// Close releases the device: everything made by it was given back before, but
	// events. It is called once.
	Close() error
}

// Engine is one library's way of copying on the streams of one device. Only the
// Accelerator calls it, with work that it has checked.
type Engine interface {
	// Name is the name of the copier that uses this engine: "cuda", "libcudart",
	// "libamdhip64".
	Name() string

	// Limits says what the engine can do.
	Limits() EngineLimits

	// CopyRects queues rects on s in their order, each one call of the library, and says
	// how many it has queued: all, unless there is an error. Each is within the limits:
	// see Rect.
	CopyRects(s StreamHandle, rects []Rect) (queued int, err error)

	// CopyBatch queues the copies of b, at most Limits().Batch and at least one, in one
	// call of the library. They run in any order. An error leaves none or some of them
	// queued.
	CopyBatch(s StreamHandle, b *Batch, o SourceOrder) error
}

// EngineLimits says what an engine can do.
type EngineLimits struct {
	// MaxPitch is the largest pitch, in bytes, of a copy of more than one row. 0: linear
	// copies only.
	MaxPitch int64
	// Boxes: copies of more than one slice.
	Boxes bool
	// Batch is the most copies of one batch, 0 when there are no batches; NoBatch says why.
	Batch   int
	NoBatch string
	// Library and Version name what does the work: "/usr/lib/…/libcuda.so.1", "13.0".
	Library, Version string
}

// Rect is a copy between addresses: Slices × Rows rows of Width bytes. Row j of slice i
// goes from Src + i·SrcSlice + j·SrcPitch to Dst + i·DstSlice + j·DstPitch.
//
// What an engine is given is one of:
//   - linear: one slice, one row; the strides mean nothing;
//   - 2-D: one slice, both pitches from Width to EngineLimits.MaxPitch;
//   - 3-D, where the engine has boxes: pitches as in 2-D, and each slice stride a
//     multiple of its pitch, and at least Rows of them.
type Rect struct {
	Dst, Src           uintptr
	Width              int64
	Rows, Slices       int64
	DstPitch, SrcPitch int64
	DstSlice, SrcSlice int64
}

// Batch is a list of linear copies: copy i is of Bytes[i] bytes (more than 0) from Src[i]
// to Dst[i]. The slices are equally long.
type Batch struct {
	Dst, Src, Bytes []uint64
}

// SourceOrder says when a batch may read its sources.
type SourceOrder uint8

const (
	// StreamOrder reads sources when the stream has come to the batch.
	StreamOrder SourceOrder = iota
	// AnyOrder reads sources from the call on: only for memory that nobody writes until
	// the batch has run, and that nothing queued before the batch writes.
	AnyOrder
)

func (o SourceOrder) String() string { return [...]string{"stream", "any"}[o] }

// Priority is how urgent the work of a stream is, beside that of other streams.
type Priority uint8

// The priorities.
const (
	NormalPriority Priority = iota
	LowPriority
	HighPriority
)

// StreamHandle is a vendor's handle of a stream.
type StreamHandle uintptr

// EventHandle is a vendor's handle of an event.
type EventHandle uintptr

// Handles of the default streams, the same with CUDA and HIP: the legacy stream, by its
// two names, which waits for all others and takes no batches, and the thread's own, which
// means another queue on each OS thread, so nothing that Go enqueues is in order there.
const (
	DefaultStream   StreamHandle = 0
	LegacyStream    StreamHandle = 1
	PerThreadStream StreamHandle = 2
)

// Attributes say what an accelerator is and can do.
type Attributes struct {
	Model        string // as the vendor calls it
	UUID         string // stable across processes and masks of visible devices
	PCI          string // "0000:17:00.0"
	NUMANode     int    // of the card; -1 when not known
	Bytes        int64  // of memory, in all
	MaxPitch     int64
	AsyncEngines int  // copies that run beside kernels, and each other
	Integrated   bool // shares its memory with the host
	UVA          bool // an address says by itself where it points
	IPC          bool // memory can be opened by another process, by a handle of 64 bytes
	VMM          bool // memory can be exported as a file descriptor
	Driver       string
}

// Class says what an error of a driver means for what comes after.
type Class uint8

const (
	// Failed says that this call has failed, and would again; other work goes on.
	Failed Class = iota
	// Retry says that this call has failed, for want of something that may be there later.
	Retry
	// Lost says that the device, or this process's hold on it, is gone: every later call
	// fails, and nothing that was queued reads or writes memory any more.
	Lost
)

func (c Class) String() string { return [...]string{"failed", "retry", "device lost"}[c] }

// DriverError is an error code of a vendor's library. Find it with errors.As.
type DriverError struct {
	Library string // "libcuda", "libcudart", "libamdhip64"
	Call    string // "cuMemcpy2DAsync_v2"
	Code    int
	Name    string // the vendor's: "CUDA_ERROR_ILLEGAL_ADDRESS"
	Class   Class
}

func (e *DriverError) Error() string {
	s := e.Call + ": " + e.Name
	if e.Class == Lost {
		s += " (" + e.Class.String() + ")"
	}
	return s
}

// Is reports whether target is the same code of the same library, whichever call has
// returned it.
func (e *DriverError) Is(target error) bool {
	t, ok := target.(*DriverError)
	return ok && t.Library == e.Library && t.Code == e.Code
}
