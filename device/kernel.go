package device

import (
	"strconv"
	"time"
	"unsafe"
)

const (
	// maxLanes is the most rows that a kernel copies at once.
	maxLanes = 8

	// kernelStep is what the bytes that a kernel copies are a multiple of, and
	// lineBytes a line of the cache. Non-temporal stores must write whole lines: of
	// others, what they do not overwrite would have to be read first.
	kernelStep = 128
	lineBytes  = 64

	// laneBytes is the longest stretch of a row that one lane is given: long
	// enough for the hardware's prefetcher, short enough that all lanes together
	// stay below copySlice, since a kernel cannot be preempted either.
	laneBytes = 64 << 10

	// Digests are given what was copied for them once it is digestBytes, while it is
	// still in the processor's own cache, or maxOwed stretches.
	digestBytes = 256 << 10
	maxOwed     = 64
)

// kernel copies rows side by side: a step of the first row, a step of the
// second, and so on. One row after the other would start each with the cache and
// TLB misses of a place not seen before, and would wait for them; side by side,
// the misses of one row hide behind the bytes of the others. On cold memory that
// is worth more than the kind of store.
type kernel struct {
	name  string
	lanes int // rows at once, at most maxLanes
	align int // destinations start at multiples of this

	// copy copies n bytes of each of the first lanes rows. n is a multiple of
	// kernelStep and not 0.
	copy func(rows *[maxLanes]row, n uintptr)
}

type row struct{ dst, src unsafe.Pointer }

// choices are the kernels that a job can be copied with; nil is Go's copy.
type choices struct {
	// cached is for jobs that fit into the caches: plain stores, which leave the
	// destination where whoever reads it next will look. streamed is for jobs that
	// do not: non-temporal stores, which write to memory without reading it first
	// and leave the caches alone. On data in the caches those can be several times
	// slower than plain ones.
	cached, streamed *kernel
}

// limits are the sizes by which copies are told apart.
type limits struct {
	cacheBytes int64 // of the last-level cache
	smallJob   int64 // jobs of fewer bytes are left to Go's copy
	crewJob    int64 // jobs of fewer bytes have one worker
	claimBytes int64 // what a worker takes of a job at a time

	// Rows shorter than minRow are left to Go's copy, and so are those of which
	// a kernel could copy less than minEighths eighths, because they do not start
	// and end where it would like. Of a long row, stretches that follow each other
	// are copied side by side as rows are.
	minRow, minEighths int64
}

func defaultLimits(cacheBytes int64) limits {
	return limits{
		cacheBytes: cacheBytes, smallJob: 1 << 20, crewJob: 4 << 20, claimBytes: copySlice,
		minRow: 256, minEighths: 7,
	}
}

// kernel returns what to copy a job of bytes with, in a burst of so many bytes so far.
// A copy touches its bytes twice, as source and as destination: a burst of half the
// last-level cache turns all of it over.
func (l *limits) kernel(c choices, bytes, burst int64) *kernel {
	switch {
	case bytes < l.smallJob:
		return nil
	case burst < l.cacheBytes/2:
		return c.cached
	default:
		return c.streamed
	}
}

// worker copies ops, or the part of them that it claims.
type worker struct {
	limits *limits

	ops      []Op  // what is left of the claim
	from, to int64 // where the first of ops starts and the last ends

	lanes [maxLanes]lane
	rows  [maxLanes]row // here, since an argument of an unknown function would be allocated

	owed      [maxOwed]owed // what digests are to be given, in order, once it is copied
	owes      int           // how many of them there are
	owedBytes int64
	digested  time.Duration // how long digests took, since the owner set it to 0
}

// owed is a stretch of a row that was handed out, and that its digest has not been
// given.
type owed struct {
	digest *Digest
	src    []byte
}

// lane is a stretch of a row: bytes [at, end) are still to be copied by the
// kernel, a multiple of kernelStep that starts in dst where the kernel wants it.
// The ragged ends, before head and from end, come after them, when their lines of
// src have been fetched.
type lane struct {
	dst, src      []byte
	head, at, end int
}

// run copies with k what w has claimed and what claim gives it, until there is
// nothing more.
func (w *worker) run(k *kernel, claim func(*worker) bool) {
	if k == nil {
		for more := true; more; more = claim(w) {
			for dst, src := w.next(copySlice); dst != nil; dst, src = w.next(copySlice) {
				copy(dst, src)
				if w.owedBytes >= digestBytes || w.owes == maxOwed {
					w.digest()
				}
			}
		}
		w.digest()
		return
	}
	lanes := w.lanes[:k.lanes]
	for full := true; full; {
		for w.fill(k, lanes, claim) {
			n, dry := laneBytes, true
			for i := range lanes {
				n = min(n, lanes[i].end-lanes[i].at)
			}
			for i := range lanes {
				l := &lanes[i]
				w.rows[i] = row{unsafe.Pointer(&l.dst[l.at]), unsafe.Pointer(&l.src[l.at])}
				l.at += n
				dry = dry && l.at == l.end
			}
			k.copy(&w.rows, uintptr(n))
			if dry && w.owedBytes >= digestBytes {
				for i := range lanes {
					lanes[i].finish()
				}
				w.digest()
			}
		}
		for i := range lanes { // too few rows are left for all lanes, or there is too much owed
			l := &lanes[i]
			copy(l.dst[l.at:l.end], l.src[l.at:])
			l.at = l.end
			l.finish()
		}
		full = w.owes == maxOwed
		w.digest()
	}
	w.rows = [maxLanes]row{} // hold on to no memory
}

// digest gives the digests what they are owed. All of it is copied.
func (w *worker) digest() {
	if w.owes == 0 {
		return
	}
	all, began := w.owed[:w.owes], time.Now()
	for i := range all {
		d := all[i].digest
		_, _ = d.Write(all[i].src)
		if i+1 == len(all) || all[i+1].digest != d {
			now := time.Now()
			d.took += now.Sub(began)
			w.digested += now.Sub(began)
			began = now
		}
	}
	clear(all) // hold on to no memory
	w.owes, w.owedBytes = 0, 0
}

// fill gives each lane that has run dry something to copy. It reports false when
// there is not enough left, or no room for what digests are owed.
func (w *worker) fill(k *kernel, lanes []lane, claim func(*worker) bool) bool {
	for i := range lanes {
		l := &lanes[i]
		for l.at == l.end {
			if w.owes == maxOwed {
				return false
			}
			l.finish()
			dst, src := w.next(laneBytes)
			if dst == nil {
				if !claim(w) {
					return false
				}
				continue
			}
			head := int(-uintptr(unsafe.Pointer(&dst[0])) % uintptr(k.align))
			body := (len(dst) - head) / kernelStep * kernelStep
			if n := int64(len(dst)); body <= 0 || n < w.limits.minRow || int64(body)*8 < n*w.limits.minEighths {
				copy(dst, src)
				continue
			}
			*l = lane{dst: dst, src: src, head: head, at: head, end: head + body}
		}
	}
	return true
}

// finish copies the ragged ends and leaves the lane empty.
func (l *lane) finish() {
	copy(l.dst[:l.head], l.src)
	copy(l.dst[l.end:], l.src[l.end:])
	*l = lane{}
}

// next returns the next stretch of the claim: at most limit bytes. It returns nil when
// the claim is used up.
func (w *worker) next(limit int64) (dst, src []byte) {
	for len(w.ops) > 0 {
		op, left := &w.ops[0], w.to-w.from
		if len(w.ops) > 1 {
			left = w.ops[0].Bytes - w.from
		}
		if n := min(limit, left); n > 0 {
			dst = op.Dst.bytes[op.DstOff+w.from:][:n:n]
			src = op.Src.bytes[op.SrcOff+w.from:][:n:n]
			w.from += n
			if op.Digest != nil {
				w.owed[w.owes] = owed{op.Digest, src}
				w.owes++
				w.owedBytes += n
			}
			return dst, src
		}
		w.ops, w.from = w.ops[1:], 0
	}
	w.ops = nil // hold on to no buffer
	return nil, nil
}

// Kernels says how a host device copies; see [Host.Kernels].
type Kernels struct {
	// Cached is for jobs that fit into the caches, Streamed for those that do
	// not. Jobs of less than 1 MiB are left to Go's copy, and so are rows of less
	// than 256 bytes.
	Cached, Streamed Choice

	// CacheBytes is the size of the last-level cache: a burst of copies of at
	// least half of it is streamed.
	CacheBytes int64
}

// Choice is a kernel that won its measurement.
type Choice struct {
	Kernel string  // "go" for Go's copy
	Gain   float64 // its speed on cold memory over that of Go's copy; 1 for that itself
}

func (c Choice) String() string {
	return c.Kernel + " (" + strconv.FormatFloat(c.Gain, 'f', 2, 64) + " × Go's copy)"
}

func (k Kernels) String() string {
	return "cached " + k.Cached.String() + ", streamed " + k.Streamed.String() + ", cache " + size(k.CacheBytes)
}
