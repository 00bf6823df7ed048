package store

import (
	"math/bits"
	"math/rand/v2"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// maxGhosts bounds the history: 2^26 keys take 1 GiB.
const maxGhosts = 1 << 26

// ghosts remembers why keys left the store, in fixed memory: a ring of 64-bit
// fingerprints, the newest overwriting the oldest, and a table from fingerprint to
// place. A fingerprint gives its low bits to the reason. Two keys share one with a
// chance of 2^-60 a pair: a wrong reason at worst, never a wrong byte.
type ghosts struct {
	ring       []uint64 // 0: forgotten
	next       int
	table      []int32 // place in ring + 1, 0: empty; linear probing
	shift      uint
	seed       [2]uint64
	overflowed bool // a key was overwritten before it was forgotten
}

const reasonBits = 4

func newGhosts(keys int) *ghosts {
	n := 16
	for n < 2*keys {
		n *= 2
	}
	return &ghosts{
		ring: make([]uint64, keys), table: make([]int32, n), shift: uint(64 - bits.Len(uint(n-1))),
		seed: [2]uint64{rand.Uint64() | 1, rand.Uint64()},
	}
}

func (g *ghosts) bytes() int64 { return int64(len(g.ring))*8 + int64(len(g.table))*4 }

func (g *ghosts) print(key *page.Key) uint64 {
	return (hash(key, g.seed) | 1<<63) &^ (1<<reasonBits - 1) // never 0
}

// home spreads the prints, whose top bit is always set.
func (g *ghosts) home(print uint64) int { return int((print << 1) >> g.shift) }

// find returns the cell of print, or the empty cell where it would go.
func (g *ghosts) find(print uint64) int {
	mask := len(g.table) - 1
	for i := g.home(print); ; i = (i + 1) & mask {
		if g.table[i] == 0 || g.ring[g.table[i]-1]&^(1<<reasonBits-1) == print {
			return i
		}
	}
}

// remember notes that key left for why.
func (g *ghosts) remember(key page.Key, why fault.Reason) {
	print := g.print(&key)
	if i := g.find(print); g.table[i] != 0 {
		g.ring[g.table[i]-1] = print | uint64(why)
		return
	}
	if old := g.ring[g.next] &^ (1<<reasonBits - 1); old != 0 {
		g.overflowed = true
		g.remove(old)
	}
	g.ring[g.next] = print | uint64(why)
	g.table[g.find(print)] = int32(g.next + 1)
	g.next = (g.next + 1) % len(g.ring)
}

// forget is called when key is stored again.
func (g *ghosts) forget(key *page.Key) { g.remove(g.print(key)) }

func (g *ghosts) remove(print uint64) {
	mask := len(g.table) - 1
	gap := g.find(print)
	if g.table[gap] == 0 {
		return
	}
	g.ring[g.table[gap]-1] = 0
	for i := (gap + 1) & mask; g.table[i] != 0; i = (i + 1) & mask {
		home := g.home(g.ring[g.table[i]-1] &^ (1<<reasonBits - 1))
		if (i-home)&mask >= (i-gap)&mask {
			g.table[gap] = g.table[i]
			gap = i
		}
	}
	g.table[gap] = 0
}

// why returns the reason for which key is not there.
func (g *ghosts) why(key *page.Key) fault.Reason {
	if i := g.find(g.print(key)); g.table[i] != 0 {
		return fault.Reason(g.ring[g.table[i]-1] & (1<<reasonBits - 1))
	}
	if g.overflowed {
		return fault.HistoryFull
	}
	return fault.NeverStored
}
