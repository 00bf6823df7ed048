package hostpool

import (
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Checks says when the bytes of host pages are compared with their checksum, which
// is taken when they are first complete in host memory. Each check reads the page
// once more.
type Checks uint8

// The checks. The zero value is the strictest.
const (
	ChecksAlways  Checks = iota // at every later arrival in host memory and before every departure from it
	ChecksArrival               // at every later arrival
	ChecksOff                   // never: no sums are taken
)

var checkNames = [...]string{ChecksAlways: "always", ChecksArrival: "arrival", ChecksOff: "off"}

func (c Checks) String() string {
	if int(c) < len(checkNames) {
		return checkNames[c]
	}
	return "unknown"
}

// ParseChecks is the inverse of String. Kind: fault.Invalid.
func ParseChecks(name string) (Checks, error) {
	for i, n := range checkNames {
		if n == name {
			return Checks(i), nil
		}
	}
	return 0, fault.New(fault.Invalid, "checks", "no such choice: %q", name).Hint("there are %s", strings.Join(checkNames[:], ", "))
}

// Sum is the xxh3-128 of a page's bytes.
type Sum struct{ Hi, Lo uint64 }

// Sum reads page id and returns its checksum. The page must be claimed or kept by
// the caller, with no copy into it in flight, and the pool open; a page without bytes
// has the sum of nothing. An id out of range, or a closed pool, is the caller's
// mistake, refused everywhere else before a page is summed.
func (p *Pool) Sum(id page.ID) Sum {
	n := p.PageBytes()
	h := xxh3.Hash128(p.mem[int64(id)*n : (int64(id)+1)*n])
	return Sum{Hi: h.Hi, Lo: h.Lo}
}
