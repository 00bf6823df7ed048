package replay

import (
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
)

// CheckPageSize refuses page sizes (in tokens) that a trace cannot name: a page
// must be a part of an id's tokens or several ids' tokens, else a page would
// begin in the middle of one id and end in the middle of the next.
// Kinds: fault.Invalid.
func CheckPageSize(pageSize int) error {
	switch {
	case pageSize < 1 || pageSize > kv.MaxPageSize:
		return fault.New(fault.Invalid, "--page-size", "%d tokens is not in 1…%d", pageSize, kv.MaxPageSize).
			Hint("the default is --page-size %d", IDTokens)
	case IDTokens%pageSize == 0 || pageSize%IDTokens == 0:
		return nil
	}
	below := 1
	for IDTokens%(below*2) == 0 && below*2 < pageSize {
		below *= 2
	}
	above := below * 2
	if pageSize > IDTokens {
		below = pageSize / IDTokens * IDTokens
		above = below + IDTokens
	}
	return fault.New(fault.Invalid, "--page-size", "%d tokens neither divides %d nor is a multiple of it, and a trace has one id for each %d tokens",
		pageSize, IDTokens, IDTokens).Hint("the nearest sizes are --page-size %d and --page-size %d", below, above)
}

// Pages returns how many pages a prompt of input tokens needs (all are looked
// up) and how many of them are whole. A partial last page has no key: it is
// looked up, is a miss, and is never kept.
func Pages(input, pageSize int) (needed, whole int) {
	whole = input / pageSize
	needed = whole
	if input%pageSize != 0 {
		needed++
	}
	return needed, whole
}

// AppendKeys appends the keys of the whole pages of a request, first page
// first. pageSize must have passed [CheckPageSize]; root separates replays whose
// bytes must not be mixed.
//
//   - A page of IDTokens has the key chained over the ids up to its own.
//   - A page of several ids has the key chained over all ids up to its last.
//     It is whole only if every one of its ids is, so the key says all about it.
//   - A page that is part of an id has the key chained over the id and the
//     number of the part. An id that names fewer tokens (the last of a prompt)
//     may still hold whole pages; they have keys like any other. Two requests
//     share them only if they share that last id, and so all its tokens.
//
// Keys are made with one hash a page, or one an id if a page has several, and
// nothing is allocated but room in dst.
func AppendKeys(dst []page.Key, root page.Key, req *Request, pageSize int) []page.Key {
	key := root
	_, whole := Pages(req.Input, pageSize)
	if pageSize >= IDTokens {
		step := pageSize / IDTokens
		for i, id := range req.IDs[:whole*step] {
			key = prefix.NextID(key, uint64(id))
			if (i+1)%step == 0 {
				dst = append(dst, key)
			}
		}
		return dst
	}
	parts := IDTokens / pageSize
	for i := range whole {
		key = prefix.NextIDPart(key, uint64(req.IDs[i/parts]), uint32(i%parts))
		dst = append(dst, key)
	}
	return dst
}
