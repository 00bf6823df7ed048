package hostpool

import (
	"slices"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Checks says when the bytes of host pages are compared with their checksum, which
// is taken when they first come to host memory. A check at departure reads the page
// once more; one at arrival does where CopyInSummed can't sum what is copied.
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

// summer is a copier that gives digests the bytes of the pages that it copies, in
// packed order.
type summer interface {
	CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (copier.Moved, error)
}

// Arrival takes the sums of the pages of one copy at a time. It can be used again
// for the next one, and then allocates nothing.
type Arrival struct {
	hosts   []page.ID       // in the order of the pairs
	digests []device.Digest // of hosts; none if they are summed once they are there
}

// CopyInSummed is CopyIn whose pages get their sums, which AppendSums returns once t
// is done. On the host device they are taken while the bytes are copied and lie in the
// processor's cache: of what was read from the device cache. That is a third of the
// cost of reading the page again, and it finds more: a copy that wrote anything else
// than it read is a mismatch at the page's next check. Elsewhere they are taken of
// what arrived. Until t is done a is the copy's.
func (p *Pool) CopyInSummed(s device.Stream, pairs []page.Pair, a *Arrival, t *device.Ticket) (copier.Moved, error) {
	a.hosts, a.digests = a.hosts[:0], a.digests[:0]
	for _, x := range pairs {
		a.hosts = append(a.hosts, x.Dst)
	}
	if p.summer != nil && p.PageBytes() > 0 {
		a.digests = slices.Grow(a.digests, len(pairs))[:len(pairs)]
		for i := range a.digests {
			a.digests[i].Reset()
		}
	}
	return p.copyIn(s, pairs, a.digests, t)
}

// AppendSums appends the sums of the pages of a, in the order in which its pairs were
// given, and returns how long it took to take them: now, or while the pages were
// copied. The ticket of the copy is done, without an error.
func (p *Pool) AppendSums(sums []Sum, a *Arrival) ([]Sum, time.Duration) {
	began := time.Now()
	if len(a.digests) == 0 {
		for _, id := range a.hosts {
			sums = append(sums, p.Sum(id))
		}
		return sums, time.Since(began)
	}
	var copying time.Duration
	for i := range a.digests {
		d := &a.digests[i]
		hi, lo := d.Sum128()
		sums, copying = append(sums, Sum{Hi: hi, Lo: lo}), copying+d.Took()
	}
	return sums, copying + time.Since(began)
}
