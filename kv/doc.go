// Package kv knows where every byte of a paged KV cache lies.
//
// # Geometry is data
//
// A [Geometry] is a list of layers, and a layer is a list of planes. A [Plane]
// is a rule of four numbers: the bytes of page p are the Bytes bytes at
// Offset + p·PageStride of one memory region. One tensor for everything, a
// tensor for each layer, K and V joined or apart, a page-major host pool and
// layers of different size are all such lists, so nothing in this package
// branches on who made the cache. [Config] has constructors for the usual
// arrangements; [NewGeometry] takes any list.
//
// A geometry is immutable and is validated once, when it is made: every sum and
// product is checked for overflow, every plane lies inside its region and no
// two planes share a byte. After that only ids and token ranges have to be
// compared with their limits, which every method does, so that each address it
// returns is in range.
//
// Layers have a position (0 … Layers-1, what methods take) and a global id
// (what another rank or process means by "layer 17"). Two caches are paired by
// id and kind of plane, never by position.
//
// # Cache
//
// A [Cache] is a geometry and one [device.Memory] for each region, which it
// owns ([NewCache]) or borrows ([Wrap]). Page memory never lies in the Go heap;
// a Cache is a few small slices of numbers. Only [Cache.CopyPages] and
// [Cache.CopySlots] enqueue work; [Cache.WriteTokens], [Cache.ReadTokens] and
// [Cache.Page] touch host memory at once, and waiting for copies in flight is
// up to the caller.
//
// # Route and Box
//
// A [Route] is worked out once for two caches: which stretches of a source page
// go to which stretches of a destination page. Stretches that are neighbours on
// both sides become one; stretches at equal distances on both sides become the
// rows of one [Box]. Each run of pages is then a handful of boxes, each of
// which a device can copy with one strided copy, and which [Route.AppendOps]
// turns into single ops for a device that can't.
//
// # Traps
//
//   - A page is not one stretch of memory, except in a packed geometry.
//   - In NHD a range of tokens is one stretch in each plane, in HND one in each
//     head: partial pages of HND are refused (fault.Unsupported) rather than
//     copied wrongly. Opaque and state planes are known only as whole pages.
//   - Strides belong to one side. Two caches of 100 and 200 pages have different
//     strides, and an address computed with the peer's is somebody else's page.
//   - A zero-layer geometry is legal: its pages have no bytes, it has no
//     regions, and copies of its pages are no boxes.
//   - Methods never ask who owns a page or whether a copy of it is in flight.
package kv
