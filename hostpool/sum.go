package hostpool

import (
	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/page"
)

// Sum is the xxh3-128 of a page's bytes.
type Sum struct{ Hi, Lo uint64 }

// Sum reads page id and returns its checksum. The page must be claimed or kept by
// the caller, with no copy into it in flight; a page without bytes has the sum of
// nothing. An id out of range is the caller's mistake, refused everywhere else
// before a page is summed.
func (p *Pool) Sum(id page.ID) Sum {
	n := p.PageBytes()
	h := xxh3.Hash128(p.mem[int64(id)*n : (int64(id)+1)*n])
	return Sum{Hi: h.Hi, Lo: h.Lo}
}
