// Package evict decides which page goes next. It is pure: it knows slots, small
// numbers that stand for the entries of somebody's table, and neither pages nor
// bytes nor time.
//
// # Deepest first
//
// A page of a prefix is of use only together with all pages before it: what is
// behind a missing page cannot be matched. So a page must go before the pages it
// builds on. A flat list does that when a path is inserted deepest page first. Each
// use of a prefix inserts its whole path, and its pages become the most recent with
// the root the most recent of all. Hence at any time a page is more recent than
// every page behind it: whatever used the deeper page last also used this one, and
// put it ahead. Taking victims from the old end therefore always takes a page all
// of whose followers are gone, and no resident page ever lacks a resident page
// before it. That is the order in which a radix tree that evicts the least
// recently used leaf takes them, without the tree.
//
// The argument needs whole paths. A caller that inserts a page without the pages
// before it, or takes one out of the middle and leaves those behind it, has to
// answer for the rest of the path itself.
//
// # Memory
//
// The list is two links a slot (8 bytes) in one array. After [LRU.Grow] nothing
// allocates; without it the array grows when a higher slot first appears.
package evict

// LRU is a list of slots from the least to the most recently used. The zero
// value is an empty list. All operations are O(1) a slot. It is not safe for
// concurrent use. Slots are not negative.
type LRU struct {
	// links[0] is the end of a ring: next of it is the oldest slot, prev the most
	// recent. Slot s is links[s+1].
	links []link
	n     int
}

type link struct{ prev, next int32 }

// absent is what prev and next of a slot are that is not in the list.
const absent = -1

// Grow makes room for slots 0 to slots-1, so that inserting them does not allocate.
func (l *LRU) Grow(slots int) {
	if l.links == nil {
		l.links = append(make([]link, 0, slots+1), link{0, 0})
	}
	if more := slots + 1 - len(l.links); more > 0 {
		l.links = append(l.links, make([]link, more)...)
		for i := len(l.links) - more; i < len(l.links); i++ {
			l.links[i] = link{absent, absent}
		}
	}
}

// Insert makes slot the most recent, whether or not it was in the list.
func (l *LRU) Insert(slot int32) {
	l.Remove(slot)
	if int(slot)+1 >= len(l.links) {
		l.Grow(int(slot) + 1)
	}
	i, last := slot+1, l.links[0].prev
	l.links[i] = link{prev: last, next: 0}
	l.links[last].next = i
	l.links[0].prev = i
	l.n++
}

// Remove takes slot out of the list and reports whether it was there.
func (l *LRU) Remove(slot int32) bool {
	if !l.Contains(slot) {
		return false
	}
	i := slot + 1
	was := l.links[i]
	l.links[was.prev].next = was.next
	l.links[was.next].prev = was.prev
	l.links[i] = link{absent, absent}
	l.n--
	return true
}

// Contains reports whether slot is in the list.
func (l *LRU) Contains(slot int32) bool {
	return slot >= 0 && int(slot)+1 < len(l.links) && l.links[slot+1].next != absent
}

// AppendOldest takes the n least recently used slots out of the list, or all if
// there are fewer, and appends them to dst, oldest first.
func (l *LRU) AppendOldest(dst []int32, n int) []int32 {
	for ; n > 0 && l.n > 0; n-- {
		slot := l.links[0].next - 1
		l.Remove(slot)
		dst = append(dst, slot)
	}
	return dst
}

// Len returns how many slots are in the list.
func (l *LRU) Len() int { return l.n }
