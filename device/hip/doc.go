// Package hip opens AMD's devices, through libamdhip64 alone. [Open] returns one as a
// [device.Accelerator]; [List] says which there are. Neither touches a device that was
// not asked for.
//
// There is one engine, "libamdhip64": linear copies and copies of rows; batches from
// ROCm 7.1. It has no boxes.
//
// What other processes and other devices have to do with is on the [Driver], which the
// accelerator's Driver method returns as a device.Driver, to be asserted to *hip.Driver:
// [Driver.ExportMemory], [Driver.OpenMemory], [Driver.NewSharedEvent] and
// [Driver.OpenEvent] (by handles of 64 bytes), [Driver.AllocShared] and
// [Driver.ImportShared] (by descriptors), from ROCm 6 on; [Driver.CanAccessPeer] and
// [Driver.EnablePeer].
//
// # Traps
//
//   - A batch may have no attributes before 7.13: some versions refuse them. Its sources
//     are then read in the order of the stream.
//   - A batch of more than 8192 copies makes some versions fault.
//   - Memory types have other numbers in each major version, so no call that takes one is
//     used: the runtime finds the direction of a copy itself.
//   - A handle of memory is always of a whole allocation, and its bytes are not the same
//     each time it is made from an address inside.
//   - The library keeps a last error for each thread, which the next call that somebody
//     else makes there would report. It is cleared after each failure.
package hip
