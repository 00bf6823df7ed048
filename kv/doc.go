// Package kv knows where every byte of a paged KV cache lies.
//
// # Geometry is data
//
// A [Geometry] is a list of layers, and a layer is a list of planes. A [Plane]
// is a rule of a few numbers: the bytes of page p are the Bytes bytes at
// Offset + p·PageStride of one memory region. One tensor for everything, a
// tensor for each layer, K and V joined or apart, a page-major host pool and
// layers of different size are all such lists, so nothing in this package
// branches on who made the cache. [Config] has constructors for the usual
// arrangements; [NewGeometry] takes any list. [Geometry.Packed] and
// [Geometry.PackedLayerMajor] make a pool's geometry for the pages of a cache.
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
// [Cache.CopySlots] enqueue work; what writes and reads rows and scales, and
// [Cache.Page] and [Cache.Plane], touch host memory at once, and waiting for
// copies in flight is up to the caller. Rows in memory that the host can't address
// pass through pinned memory of the cache, and are there when the call returns.
//
// # Route and Box
//
// A [Route] is worked out once for two caches: which stretches of a source page
// go to which stretches of a destination page. Stretches that are neighbours on
// both sides become one; stretches at equal distances on both sides become the
// steps of an axis, and so do groups of them. Each run of pages is then a handful
// of boxes, each of which a device can copy with one strided copy, and which
// [Route.AppendOps] turns into single ops for a device that can't. A box has two
// axes beside its width: where heads, K and V, layers and pages leave more, the
// shortest is unrolled into boxes.
//
// [NewRoute] wants the same heads on both sides; [NewHeadRoute] copies those that
// both sides hold, and leaves the others alone.
//
// # Quantised caches and states
//
// Scales are planes beside the rows, one for K and one for V, and move with them.
// Scales of single tokens can be cut with the tokens; with one scale for a page,
// part of a page would take a scale that belongs to other tokens too, so such
// caches move whole pages only, like recurrent states. Both are bytes to this
// package: [Cache.WriteScales], [Cache.ReadScales] and [Cache.Plane] convert
// nothing.
//
// # Traps
//
//   - A page is not one stretch of memory, except in a page-major geometry.
//   - In NHD a range of tokens is one stretch in each plane, in HND one in each
//     head, and with [JoinBlocks] two: ask [Geometry.Chunks] for as many as there
//     are. For ranges of heads it is the other way round.
//   - Which way K and V are joined can't be seen from shapes: vLLM's
//     (blocks, heads, block, 2·dim) is [JoinRows] by its shape, and [JoinBlocks] as
//     its CPU kernels see it. Whole pages move alike either way, tokens do not.
//   - Two elements of a 4-bit type share a byte: no address is that of the second.
//   - Strides belong to one side. Two caches of 100 and 200 pages have different
//     strides, and an address computed with the peer's is somebody else's page.
//   - A zero-layer geometry is legal: its pages have no bytes, it has no
//     regions, and copies of its pages are no boxes.
//   - Methods never ask who owns a page or whether a copy of it is in flight.
package kv
