package store

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"

	"github.com/kvferry/kvferry/page"
)

// index maps keys to entries: open addressing with linear probing, made once
// for the most entries there can be, at most half full. A cell holds the upper 32
// bits of the key's hash beside the ref: they say where the cell's home is, so that
// cells move without a look at their keys, and tell keys apart well enough that a
// probe seldom touches another entry's key. Keys may be chosen by somebody else, so
// the hash is seeded. A caller that asks twice hashes once: the history of evictions
// (ghosts.go) goes by the same hash.
type index struct {
	cells []cell
	keys  []page.Key // by ref
	shift uint
	seed  [2]uint64
	n     int
}

type cell struct {
	tag uint32 // the upper half of the hash
	ref Ref    // NoRef: empty
}

func newIndex(most int) *index {
	n := 16
	for n < 2*most {
		n *= 2
	}
	x := &index{
		cells: make([]cell, n), keys: make([]page.Key, most), shift: uint(64 - bits.Len(uint(n-1))),
		seed: [2]uint64{rand.Uint64() | 1, rand.Uint64()},
	}
	for i := range x.cells {
		x.cells[i].ref = NoRef
	}
	return x
}

// hash mixes all of the key with the seed.
func hash(k *page.Key, seed [2]uint64) uint64 {
	h := seed[1]
	for i := 0; i < len(k); i += 8 {
		hi, lo := bits.Mul64(h^binary.LittleEndian.Uint64(k[i:]), seed[0]^0x9e3779b97f4a7c15)
		h = hi ^ lo
	}
	return h
}

func (x *index) hash(key *page.Key) uint64 { return hash(key, x.seed) }

// home is where the search for a tag begins.
func (x *index) home(tag uint32) int { return int(tag >> (x.shift - 32)) }

// touch reads the cell where the search for a hash begins. Asked for several hashes in
// a row, before they are searched for one by one, it lets the machine fetch the cells
// side by side: the table is larger than the near caches.
func (x *index) touch(h uint64) uint32 { return x.cells[x.home(uint32(h>>32))].tag }

// find returns the cell of key, or the empty cell where it would go.
func (x *index) find(key *page.Key, h uint64) int {
	mask, tag := len(x.cells)-1, uint32(h>>32)
	for i := x.home(tag); ; i = (i + 1) & mask {
		c := x.cells[i]
		if c.ref == NoRef || (c.tag == tag && x.keys[c.ref] == *key) {
			return i
		}
	}
}

func (x *index) lookup(key *page.Key, h uint64) Ref { return x.cells[x.find(key, h)].ref }

// insert maps a key that is not there to ref.
func (x *index) insert(key *page.Key, h uint64, ref Ref) {
	x.cells[x.find(key, h)] = cell{tag: uint32(h >> 32), ref: ref}
	x.keys[ref] = *key
	x.n++
}

// remove takes a key out, if it is there, and closes the gap it leaves.
func (x *index) remove(key *page.Key, h uint64) {
	mask := len(x.cells) - 1
	gap := x.find(key, h)
	if x.cells[gap].ref == NoRef {
		return
	}
	x.n--
	for i := (gap + 1) & mask; x.cells[i].ref != NoRef; i = (i + 1) & mask {
		// Move the cell back unless its home lies between the gap and itself.
		if (i-x.home(x.cells[i].tag))&mask >= (i-gap)&mask {
			x.cells[gap] = x.cells[i]
			gap = i
		}
	}
	x.cells[gap] = cell{ref: NoRef}
}
