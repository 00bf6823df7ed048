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
//   - A slice from Memory.Bytes is dangling after Free. Touching it is a crash that
//     no recover stops.
package device
