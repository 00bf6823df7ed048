// Package cudaipc reads caches in the memory of a device from other processes of the same
// host that use the same device: by CUDA IPC, as engine "cudaipc", and by HIP IPC, as
// engine "hipipc". Pages are copied from device memory to device memory, on the reader's
// own stream; no byte of them passes the host.
//
// # What is handed over
//
// An owner's [Engine] listens on a Unix socket (package handoff). Whoever connects, and is
// of the same user, is handed what opens the regions of the cache, by what their memory
// is: a handle of 64 bytes for what was allocated as usual (always the allocation's own,
// with the offset of the region), and descriptors for memory that is mapped piece by
// piece. With it comes the file of the epoch words, which is mapped for reading only. The
// offer in a descriptor is the socket's name and nothing else.
//
// [OpenTensors] opens a cache that a Python engine has allocated with torch, by what torch
// itself makes of a tensor for other processes.
//
// # Which device
//
// Ordinals differ between processes, so the device is known by its UUID, or where there
// is none by its PCI address. Memory of another device is refused, though a library may
// be able to open it.
//
// # When bytes may be read
//
// Either the work that writes pages is over before they are published, or the owner
// records an event between processes behind it before it publishes: Options.Event. A
// reader waits for that event on the host, until its deadline: work of another process
// never holds up the reader's own stream. The epoch word is read when the stream has
// drained.
//
// # Who dies, and who leaves
//
// Memory that was opened outlives its owner, and a driver says nothing of the owner's
// end. It is the kernel that is asked (a pidfd), behind every look at the epoch word: a
// read that ends after its owner has failed. What was opened is closed when the last copy
// of it is over, and not before, whatever the owner does.
//
// An owner that withdraws tells its readers, and waits until they have closed its memory,
// for [Options].Linger at most: libraries promise nothing of memory that is freed while
// another process has it open. A reader that is stopped for longer finds a withdrawn
// publication when it goes on, and its bytes are rejected.
//
// # Traps
//
//   - Handles and descriptors give write access: the libraries know no other. Nothing
//     here writes through them, and only processes of the same user get them.
//   - A library opens no memory of its own process. Two caches in one process need package
//     local.
//   - Memory of a stream-ordered pool (cudaMallocAsync) can't be shared by either means.
//   - In containers both sides must see each other's processes: one PID namespace.
package cudaipc
