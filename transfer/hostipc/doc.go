// Package hostipc reads caches in host memory of other processes of the same host.
//
// # What is handed over
//
// An owner's [Engine] listens on a Unix socket (package handoff). Whoever connects, and is
// of the same user, is handed the files of the cache's memory, for reading only, and that
// of the epoch words. The offer in a descriptor is the socket's name and nothing else:
// the directory is this side's own business.
//
// # How pages are read
//
//   - Memory that is made of memfds, as that of device.Host is, is mapped. Pages are copied
//     from there on the reader's own stream, as from memory of its own: another process's
//     costs nothing. Where the stream is a device's, the mapping is pinned, or pages pass
//     through host memory ([transfer.Staged]).
//   - Other memory of the owner's, such as an engine's own allocation, is read by
//     process_vm_readv: slower, and only where the system lets one process read another.
//     [Probe] says whether it does. The epoch words are mapped all the same.
//
// A file is mapped when nobody can change its size any more, and it has what the geometry
// needs. A process is read that is the connection's other end by the kernel's books, at
// addresses inside what it said of its own regions.
//
// # Who dies, and who stands still
//
// Nothing asks the owner while pages are read, so one that is stopped doesn't hold up
// reads that it was opened for. Memory that is mapped outlives its owner; the kernel is
// asked (a pidfd), behind every look at the epoch word, and a read that ends after its
// owner has failed. When the owner goes, or withdraws, its memory is unmapped as soon as
// no copy reads it: a dead owner's pages are the system's again.
//
// # Traps
//
//   - Both sides have one directory for sockets: Options.Dir, or the same
//     $XDG_RUNTIME_DIR. Containers share it; and a PID namespace too, where memory is not
//     mapped, or Linux is older than 6.5.
//   - A mapping that was never used costs a page fault where it is first read:
//     Options.Populate has Open pay for all of them.
package hostipc
