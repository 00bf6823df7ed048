package device

import "context"

// Device is a memory with copy engines. All methods may be called from any
// goroutine.
type Device interface {
	// Name says which device this is, for people and metrics: "host", "cuda:0".
	Name() string

	// Alloc returns bytes of zeroed memory of this device. 0 bytes are legal.
	// Kinds: fault.Invalid (negative), fault.Memory, fault.Closed.
	Alloc(bytes int64) (*Memory, error)

	// NewStream returns an idle stream of this device. Kind: fault.Closed.
	NewStream(name string) (Stream, error)

	// NewEvent returns an event that was never recorded. Kind: fault.Closed.
	NewEvent() (Event, error)

	// Close releases the device. Its memory and streams must be closed first:
	// closing a device with either open is fault.Busy, and changes nothing.
	// Closing it again does nothing.
	Close() error
}

// Op is one entry of a batched copy: Bytes bytes from Src[SrcOff:] to
// Dst[DstOff:].
type Op struct {
	Dst, Src       *Memory
	DstOff, SrcOff int64
	Bytes          int64

	// Digest, if there is one, is given the bytes that were read from Src: those of
	// the ops that share it in the order of these, which must follow each other. It is
	// complete when the copy has run, and nobody's but the stream's until then; after
	// a copy that failed it means nothing. Not every device can: see [Stream].
	Digest *Digest
}

// Stream is an ordered queue of work on one device. Work on one stream runs in
// the order in which it was enqueued; streams run concurrently, and only events
// order them. Every method but Sync and Close only enqueues: it returns before
// the work has run. All methods may be called from any goroutine; each call is
// enqueued as a whole.
//
// A stream whose work failed stays failed: what was enqueued behind the failure
// is skipped, and every later ticket, Sync and call reports the first error
// (fault.Device). Skipped work counts as run, in its turn and after everything
// it was to wait for, so Sync still tells when nothing touches the memory any
// more. Destinations of a failed or skipped copy hold undefined bytes.
type Stream interface {
	Name() string

	// Copy enqueues ops. Before any is enqueued, each is checked against the
	// bounds of its memories (fault.Invalid), and that they were not freed
	// (fault.Closed) and are within reach of this device (fault.Unsupported). A
	// device on which the processor does not copy refuses ops with a Digest
	// (fault.Unsupported): sum the bytes once they have arrived.
	// The ops of one call may run in any order and at once: no destination may
	// overlap another op's source or destination, or its own source. The slice
	// may be reused when Copy returns; the memory must stay valid until a later
	// ticket or event is done.
	Copy(ops []Op) error

	// Record makes e stand for the work enqueued on this stream so far. On an
	// error return e stands for what it stood for before. Of two calls with one
	// event at once, it may come to stand for either.
	Record(e Event) error

	// Wait makes work enqueued on this stream from now on run after the point
	// that e stands for at this call. Recording e again later changes nothing.
	// An event never recorded is not waited for. The streams may be of
	// different devices of the same kind.
	Wait(e Event) error

	// Signal completes t when all work enqueued so far has run, with the
	// stream's error if it failed. On an error return t was not taken.
	Signal(t *Ticket) error

	// Sync waits until all work enqueued before the call has run, or ctx ends.
	// It returns the stream's error, or ctx's. A stream that is being closed is
	// waited for as well, before Sync says so (fault.Closed).
	Sync(ctx context.Context) error

	// Close waits for the work enqueued so far and releases the stream, whatever
	// it returns: the stream's error if it failed. Later calls but Close are
	// fault.Closed.
	Close() error
}

// Event is a point in a stream's queue. It can be recorded again and again; it
// stands for its latest recording. It says that work has run, or was skipped
// because its stream had failed: errors travel only in tickets and in Sync. An
// event needs no closing. All methods may be called from any goroutine.
type Event interface {
	// Done reports whether the work that the event stands for has run. True for
	// an event never recorded.
	Done() bool

	// Sync waits until Done, or ctx ends.
	Sync(ctx context.Context) error
}
