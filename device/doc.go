// Package device holds the memories that pages live in and the queues that move
// bytes between them.
//
// A [Device] has memory and streams. A [Stream] is an ordered queue: its calls
// only enqueue, and the work runs later, on the device's own time. An [Event] is
// a point in a stream's queue, for other streams to wait for; a [Ticket] is how
// the rest of the program learns that work is over, and how it ended. The [Host]
// device has all of this without an accelerator: its streams are queues served
// by a goroutine each, as late and as concurrent as those of a GPU.
//
// # Memory
//
// A [Memory] of the host device is one range of addresses over one or more
// memfds, its pieces. It lies outside the Go heap: the garbage collector does
// not see it, a piece can be handed to another process, and nothing but Free
// gives it back. Wrapped memory belongs to somebody else and is only looked at.
// A memory cannot be freed while enqueued work uses it: Free is fault.Busy then.
// That is the last line of defence, not a plan: owners release memory through
// tickets.
//
// # Copies
//
// The host device copies the rows of a large job several at a time, a step of
// each in turn, by kernels in assembly: on memory that is in no cache, that is
// about twice as fast as one row after the other, which waits for the first
// lines of each. A burst of jobs that turns the last-level cache over is written by
// non-temporal stores as well. What this machine's kernels gain is measured once
// a device, at its first large copy; what gains nothing is not used, and small
// jobs are left to Go's copy. [Host.Kernels] tells. Jobs of 4 MiB and more are
// shared by several workers (HostOptions.Workers).
//
// Ops may have a [Digest], which is given the bytes that the host device has read for
// them a few rows later, while they are in the processor's own cache: that costs a
// third of reading them again. All ops of one digest are one worker's.
//
// # Accelerators
//
// An [Accelerator] is the Device over a [Driver], which is a vendor's library and nothing
// more: package cuda and package hip have one each. All books are kept here, once:
// bounds, uses of memory, what is pinned, how work stands. What the driver is given is
// checked; what it can't take in one call is cut.
//
// Memory that copies of an accelerator may name is its own (Alloc, Wrap) or host memory
// that it has pinned (AllocHost, Pin). Host memory that can't be pinned must be admitted
// (AdmitPageable): such copies block whoever enqueues them. A memory is pinned by
// stretches, so that a pool can grow while it is used; a library takes no copy that
// crosses from one to the next, so those are split. Free unpins before it unmaps, and a
// memory that is pinned keeps the device open.
//
// [Accelerator.CopyBoxes] and [Accelerator.CopyBatch] are the fast ways, each through an
// [Engine] of the caller's choice; Stream.Copy takes the first engine. A box becomes as
// few calls as the engine's limits allow: one when its strides can be told to the
// library, rows and slices turned, a pitch beyond the limit taken for slices; in the end
// a copy a row.
//
// A driver says how work stands only when it is asked. Each call that enqueues copies
// records an event of the driver behind them, unless one is there already, and one
// goroutine for each device, the reaper, asks for the first such event of every stream.
// It finishes what is over in the order in which it was recorded, whatever the stream:
// when a ticket is done, so is everything that its work came after, and no memory of
// that is in use. Nothing calls back from the driver into Go.
//
// An error of the driver while enqueueing fails the call; parts of it may be queued, and
// what they use stays in use until they have run. An error found later fails the stream,
// or all streams when the device is lost: then everything enqueued counts as run, and
// closing gives back what is ours without asking the driver. A device whose driver can't
// say whether work has run is given up: it counts as lost, and what that work uses is
// kept until the process ends, since it may be copied yet.
//
// # Traps
//
//   - Only events order streams. Two streams that touch the same bytes need one in
//     both directions: the reader waits for the writer, and the next writer waits
//     for the reader.
//   - An event says that work is over, not that it went well. Errors travel in
//     tickets and in Sync. Whoever passes a page from one stream to another looks
//     at the first stream's ticket before trusting the page.
//   - Event, Wait and Record are exact: they mean the latest recording at the time
//     of the call. Waiting for an event before it is recorded waits for nothing.
//   - The race detector does not see memory outside the Go heap. What it cannot
//     find, poison does: with `-tags invariants` the host device overwrites the
//     destinations of a copy with 0xDE at the moment at which the copy could
//     start, so that a reader that does not wait gets bytes that are plainly wrong.
//   - No memory on the Go heap may be pinned or admitted: Go frees it, or moves a stack,
//     under a copy. WrapHost can't tell whose bytes it is given.
//   - A copy in AnyOrder may read its source at once, before what is queued ahead of it:
//     for pinned pages that nobody writes, sealed ones.
//   - A stream over an engine's handle shares its queue. What is enqueued there by the
//     engine is ordered with ours, but our tickets and uses know nothing of it.
//   - The order in which things are over holds within one accelerator. Across two, a
//     ticket may be done a moment before memory of the other is free.
//   - A slice from Memory.Bytes is dangling after Free. Touching it is a crash that
//     no recover stops.
package device
