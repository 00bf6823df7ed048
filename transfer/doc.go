// Package transfer reads pages of other owners' caches: every byte in its place, or one
// named failure.
//
// Everybody pulls. An owner publishes pages, and a reader copies them into pages of its
// own; nobody writes into memory that belongs to somebody else. A read that comes late
// can be rejected, a write can't.
//
//   - A [Publisher] lends pages of one cache: it holds them for a bounded time, and makes
//     the [Descriptor] by which they are read.
//   - A [Descriptor] is bytes on any channel that both sides have: geometry, owner, epoch,
//     pages, and what each engine offers.
//   - A [Reader] reads by descriptors into one cache, and answers with tickets.
//   - An [Engine] is one way to reach memory: the children of this package. A read goes by
//     the owner's first choice among those that both sides have and that can open it: on
//     another host than the owner's, its engines for one host are passed over.
//
// # What is read
//
// [AppendReads] says which tokens of which pages a range is, and a [Plan] says the same
// with all layers together and adjacent pages as one run, for copies. Where the bytes
// lie is up to the geometries: number of pages, strides and the order of layers may
// differ, and each side is addressed with its own.
//
// # Leases and epochs
//
// A lease is a promise of the owner's; the epoch word is how a reader knows whether it
// was kept. The word is in memory that the reader reads in the same way as the pages,
// before the first byte and after the last: nobody has to answer who doesn't send the
// bytes, and a stopped or dead owner can't deceive. It grows before pages are released. A lease that expires by
// clocks that differ is a read that fails, never a wrong byte.
//
// A publication is over when its readers have acknowledged it ([Reader.Ack]), when they
// have gone without that (where the engine has a connection that tells), or when its
// lease ends.
//
// A way to the pages can be lost while they are published: a process that served it dies.
// Later descriptors have another one ([PublisherOptions.Changed]).
//
// # What was checked
//
// A read that succeeded has: geometries that are exchangeable; a copy that is over, by
// the ticket of its last part; the same epoch before and after; and, for whole pages in
// memory that the host can address, the owner's checksums, where it gave them. Parts of
// pages, pages of a device, and pages whose owner has no sums carry no more than the
// first three.
//
// # Traps
//
//   - No event crosses between processes: the work that writes a page is over before
//     it is published.
//   - A descriptor is somebody's claim. Nothing local follows from it: no address, no
//     length, no file, no process.
//   - The ticket is about memory. Whoever waits less long than it gives up the outcome,
//     and not the pages.
//   - Sealing pages is their owner's decision. Publishing pages of an arena that are not
//     sealed is refused.
package transfer
