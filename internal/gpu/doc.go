// Package gpu makes the calls that CUDA's driver and HIP have in one form: device
// memory, pinned host memory, streams, events, and memory shared between processes.
// What only one of them has (contexts, copies, names of errors) is in device/cuda and
// device/hip, which embed what is here.
//
//   - [Library] is an opened library, its functions found.
//   - [Device] is one device of it. A call is made between Enter and Leave, which bind
//     the OS thread to the device, since both libraries keep the current device per
//     thread, and a goroutine may find itself on any.
//   - [Driver] and [Sharing] are the operations on a device.
//
// # Rules
//
//   - Whatever a library reads or writes lies in a block of the pool: no Go memory
//     reaches it, and no copy allocates.
//   - A code other than 0 is an error, on the thread that got it, before anything else is
//     called there: the libraries keep a last error per thread.
package gpu
