package page

import "encoding/hex"

// ID is the number of a page in one cache: 0 ≤ ID < pages.
type ID int32

// Sink is the page that a cache may reserve for padding rows.
const Sink ID = 0

// None is no page.
const None ID = -1

// Key names the contents of a sealed page. Equal keys mean equal bytes, so a
// key must cover everything that decides the bytes (see package prefix).
type Key [32]byte

func (k Key) String() string { return hex.EncodeToString(k[:8]) }

// Pair asks for one page to be copied: page Src of the source onto page Dst of
// the destination.
type Pair struct{ Dst, Src ID }

// Run is N pages that are adjacent in the source and in the destination.
type Run struct {
	Dst, Src ID
	N        int
}
