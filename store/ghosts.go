package store

import (
	"math/bits"

	"github.com/kvferry/kvferry/fault"
)

// maxGhosts bounds the history: 2^26 keys take 1.5 GiB.
const maxGhosts = 1 << 26

// ghosts remembers why keys left the store, in fixed memory: a ring of 64-bit
// fingerprints, the newest overwriting the oldest, and a table from fingerprint to
// place. A fingerprint is the hash that the index goes by, its low bits given to the
// reason. Two keys share one with a chance of 2^-59 a pair: a wrong reason at worst,
// never a wrong byte.
type ghosts struct {
	ring       []uint64 // 0: forgotten
	next       int
	table      []ghost // linear probing, at most half full
	shift      uint
	overflowed bool // a key was overwritten before it was forgotten
}

// ghost is a cell of the table: as in the index, enough of the fingerprint to find
// its home and to tell it from most others without a look at the ring.
type ghost struct {
	tag   uint32
	place int32 // in the ring, + 1; 0: empty
}

const reasonBits = 4

func newGhosts(keys int) *ghosts {
	n := 16
	for n < 2*keys {
		n *= 2
	}
	return &ghosts{ring: make([]uint64, keys), table: make([]ghost, n), shift: uint(32 - bits.Len(uint(n-1)))}
}

func (g *ghosts) bytes() int64 { return int64(len(g.ring))*8 + int64(len(g.table))*8 }

// print makes a fingerprint of a hash: never 0, whatever the reason.
func print(h uint64) uint64 { return (h | 1<<reasonBits) &^ (1<<reasonBits - 1) }

// touch is to ghosts what it is to the index.
func (g *ghosts) touch(h uint64) uint32 { return g.table[uint32(print(h)>>32)>>g.shift].tag }

// find returns the cell of a print, or the empty cell where it would go.
func (g *ghosts) find(print uint64) int {
	mask, tag := len(g.table)-1, uint32(print>>32)
	for i := int(tag >> g.shift); ; i = (i + 1) & mask {
		c := g.table[i]
		if c.place == 0 || (c.tag == tag && g.ring[c.place-1]&^(1<<reasonBits-1) == print) {
			return i
		}
	}
}

// remember notes that the key with hash h left for why.
func (g *ghosts) remember(h uint64, why fault.Reason) {
	p := print(h)
	i := g.find(p)
	if g.table[i].place != 0 {
		g.ring[g.table[i].place-1] = p | uint64(why)
		return
	}
	if old := g.ring[g.next] &^ (1<<reasonBits - 1); old != 0 {
		g.overflowed = true
		g.remove(old)
		i = g.find(p) // cells have moved
	}
	g.ring[g.next] = p | uint64(why)
	g.table[i] = ghost{tag: uint32(p >> 32), place: int32(g.next + 1)}
	g.next = (g.next + 1) % len(g.ring)
}

// forget is called when the key with hash h is stored again.
func (g *ghosts) forget(h uint64) { g.remove(print(h)) }

func (g *ghosts) remove(print uint64) {
	mask := len(g.table) - 1
	gap := g.find(print)
	if g.table[gap].place == 0 {
		return
	}
	g.ring[g.table[gap].place-1] = 0
	for i := (gap + 1) & mask; g.table[i].place != 0; i = (i + 1) & mask {
		if (i-int(g.table[i].tag>>g.shift))&mask >= (i-gap)&mask {
			g.table[gap] = g.table[i]
			gap = i
		}
	}
	g.table[gap] = ghost{}
}

// why returns the reason for which the key with hash h is not there.
func (g *ghosts) why(h uint64) fault.Reason {
	if c := g.table[g.find(print(h))]; c.place != 0 {
		return fault.Reason(g.ring[c.place-1] & (1<<reasonBits - 1))
	}
	if g.overflowed {
		return fault.HistoryFull
	}
	return fault.NeverStored
}
