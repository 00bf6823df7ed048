// Package cuda opens NVIDIA's devices, through libcuda alone: nothing of the CUDA
// toolkit need be installed. [Open] returns one as a [device.Accelerator]; [List] says
// which there are. Neither touches a device that was not asked for: to make a context on
// it would take some hundred MiB of its memory.
//
// The engines, best first:
//
//   - "cuda": libcuda's own copies, linear, of rows, and of boxes; batches from CUDA
//     12.8, in the form of nine words (12.8) or of eight (13.0), whichever the driver has.
//   - "libcudart": the runtime that the process has already mapped, or else one that the
//     loader finds. It may be missing, and [Driver.Missing] says why.
//
// What other processes and other devices have to do with is on the [Driver], which the
// accelerator's Driver method returns as a device.Driver, to be asserted to *cuda.Driver:
// [Driver.ExportMemory], [Driver.OpenMemory], [Driver.NewSharedEvent] and
// [Driver.OpenEvent] (by handles of 64 bytes), [Driver.AllocShared] and
// [Driver.ImportShared] (by descriptors), [Driver.CanAccessPeer], [Driver.EnablePeer] and
// [Driver.Pointer].
//
// # Traps
//
//   - A program that runs as root and loads libcuda makes /dev/nvidiactl, even when
//     there is no driver. So the library is looked for only where there is one, unless
//     it was named.
//   - Symbols without a suffix are of 32 bits. Each is asked for with the version that
//     brought the form called here, and never with one that is newer than the driver,
//     which would answer with the newest that it has.
//   - A symbol that is not there is "found" at address 0: code, status and address are
//     checked.
//   - The current context is a thread's. Each call is made on an OS thread that is bound
//     to the device for as long as it runs, and leaves that device current there.
package cuda
