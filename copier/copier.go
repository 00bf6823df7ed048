// Package copier moves pages between two caches: the engine's device cache and
// the host pool, or two device caches.
//
// A copy is asked for as pairs of pages. Pairs are sorted and merged into runs
// (pages adjacent on both sides, package page), runs become boxes (slices × rows of
// equal width, with the strides of both sides, package kv), and boxes become what the
// device is best at.
//
// # Copiers
//
//   - [Portable] turns a box into rows, each one op of a stream's copy. It works on
//     every device, is what host devices have, and is the yardstick for all others. Where
//     the device can, it also gives digests the bytes that it reads:
//     [Portable.CopySummed].
//   - [Accelerated] takes boxes to one engine of an accelerator: "cuda" (the driver),
//     "libcudart" or "libamdhip64". It copies a box in one of three ways: as one
//     rectangle, a 2-D or 3-D copy with the layer's stride for a pitch; as entries of
//     batches; or row by row. Which, it looks up in [Crossovers], by what is linked, bytes
//     a row and rows a rectangle. Where the engine can't (a pitch too large, no
//     batches), it takes another way: that is slower, never an error.
//   - [Queue] copies in the background, in jobs.
//
// # Who chooses
//
// [Select], once a device, and the caller keeps its answer. It tries engines in order
// and takes the first that passes [SelfTest] on this very device, in every way that it
// would copy: a library that loads and says yes can still copy the wrong bytes, on the
// wrong device, or out of order. Batches pass their own, or the copier goes without. The
// answer names what was rejected, and why. [Calibrate] measures the crossovers; without
// it they are a guess.
//
// # Traps
//
// Traps that every copier has to respect:
//
//   - Nothing is enqueued before everything was checked: a refused copy has
//     touched no byte.
//   - A copy only enqueues. The pages of both sides stay reserved until a ticket
//     signalled on the same stream afterwards is done.
//   - When the device refuses halfway, earlier parts are already queued. The
//     destination is then undefined, and both sides stay reserved until the
//     stream has drained: signal a ticket and wait for it, error or not.
//   - The order of pairs means nothing, so no page may be written twice, nor
//     written and read, by one call. Permutations inside one cache are
//     kv.Cache.CopyPages' job.
//   - Pages that are read in any order ([Accelerated.CopySealed]) may be read before the
//     copy's turn on its stream: an event that the stream waits for does not hold the
//     read back, so nothing that is still queued may write them.
//   - A copier of accelerators reaches pinned host memory only. Memory that is merely
//     admitted is copied, slowly, and the caller waits for it.
package copier

import (
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Copier enqueues copies of pages. Implementations may be used from any
// goroutine, with any stream of the devices that they were made for.
type Copier interface {
	// Name says which copier this is: "portable".
	Name() string

	// Copy enqueues on s, for every pair, the copy of all layers of page Src of
	// r's source onto page Dst of r's destination. It sorts pairs in place and
	// keeps no reference to them. No pairs, and pages with no bytes, are done at
	// once and enqueue nothing.
	//
	// Refused before anything is enqueued: ids out of range, a destination named
	// twice, and inside one cache a destination that is another pair's source
	// (fault.Invalid). Errors of the stream keep their kind; see the package
	// comment for what they leave behind.
	Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error)

	// CopyRows enqueues on s the copy of src's rows onto dst's: same number, same
	// width, each side with its own pitch. It serves what is not whole pages: a
	// token range of one page in every layer, for instance. Refused before
	// anything is enqueued: rows outside their memory, unequal shapes, a pitch
	// below the width, overlapping sides (fault.Invalid).
	CopyRows(s device.Stream, dst, src Rows) (Moved, error)
}

// Rows are N rows of Width bytes in one memory, Pitch bytes apart, the first
// one at Off.
type Rows struct {
	Mem               *device.Memory
	Off, Width, Pitch int64
	N                 int
}

// Moved says what a call enqueued.
type Moved struct {
	Pages int   // pairs of pages; 0 for CopyRows
	Runs  int   // runs that they merged into
	Rows  int   // contiguous copies
	Bytes int64 // in all
}

// Check reports why r and src cannot be copied onto each other, or nil.
func (r Rows) Check(src Rows) error {
	for _, side := range []struct {
		name string
		Rows
	}{{"destination rows", r}, {"source rows", src}} {
		switch {
		case side.N < 0 || side.Width < 0 || side.Off < 0:
			return fault.New(fault.Invalid, side.name, "%d rows of %d bytes at offset %d: none may be negative", side.N, side.Width, side.Off)
		case side.N == 0 || side.Width == 0:
		case side.Mem == nil:
			return fault.New(fault.Invalid, side.name, "no memory")
		case side.N > 1 && side.Pitch < side.Width:
			return fault.New(fault.Invalid, side.name, "pitch %d is below the width %d: rows would overlap", side.Pitch, side.Width)
		case side.Width > side.Mem.Size() || side.Off > side.Mem.Size()-side.Width ||
			(side.N > 1 && side.Pitch > (side.Mem.Size()-side.Width-side.Off)/int64(side.N-1)):
			return fault.New(fault.Invalid, side.name, "%d rows of %d bytes at offset %d, pitch %d, end beyond the %d bytes of the memory",
				side.N, side.Width, side.Off, side.Pitch, side.Mem.Size())
		}
	}
	switch {
	case r.N != src.N || r.Width != src.Width:
		return fault.New(fault.Invalid, "rows", "destination has %d rows of %d bytes, source %d of %d", r.N, r.Width, src.N, src.Width)
	case r.N > 0 && r.Width > 0 && r.Mem == src.Mem && r.overlaps(src):
		return fault.New(fault.Invalid, "rows", "destination and source overlap in one memory")
	}
	return nil
}

// overlaps reports whether any row of r shares a byte with any row of o, both
// in the same memory. Rows of equal pitch are compared exactly; otherwise two
// stretches that cross are called overlapping.
func (r Rows) overlaps(o Rows) bool {
	end := func(x Rows) int64 { return x.Off + int64(x.N-1)*x.Pitch + x.Width }
	if end(r) <= o.Off || end(o) <= r.Off {
		return false
	}
	if r.N == 1 || o.N == 1 || r.Pitch != o.Pitch {
		return true
	}
	d := (r.Off - o.Off) % r.Pitch
	if d < 0 {
		d += r.Pitch
	}
	return d < r.Width || r.Pitch-d < r.Width
}
