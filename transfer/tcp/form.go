package tcp

import (
	"cmp"
	"math"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// form says where the bytes of a cache's pages lie, in the order in which they are sent.
// That of an exchangeable cache has the same bytes in the same order, and other places.
type form struct {
	whole, cut []stretch // of a page; of a token, none where pages move whole only
	pageBytes  int64
	tokenBytes int64
	first      page.ID // that holds tokens
	pages      int
	pageSize   int
}

// stretch is bytes that lie together in each page, or in each token of each page.
type stretch struct {
	mem         []byte // the region's
	region      int
	off         int64 // of page 0, token 0
	bytes       int64
	page, token int64 // from one to the next; in form.whole token is 0, in form.cut it is bytes
}

// newForm returns the form of a cache in host memory. Kind: fault.Unsupported.
func newForm(c *kv.Cache) (*form, error) {
	g := c.Geometry()
	f := &form{pageBytes: g.PageBytes(), pages: g.Pages(), pageSize: g.PageSize()}
	if g.Sink() {
		f.first = page.Sink + 1
	}
	mem := make([][]byte, g.Regions())
	for i := range mem {
		m, err := c.Region(i)
		if err != nil {
			return nil, err
		}
		if mem[i] = m.Bytes(); mem[i] == nil {
			return nil, fault.New(fault.Unsupported, "cache", "is in memory of %s, which the host can't address", m.Device()).
				Hint("offload the pages to a pool of host memory, and publish that")
		}
	}
	cuttable := g.PageSize() > 1 // until a layer is found that isn't
	layers, bases := g.Spec().Layers, make([]uintptr, g.Regions())
	order := make([]int, len(layers))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(layers[a].ID, layers[b].ID) })
	for _, i := range order {
		var chunks []kv.Chunk
		if cuttable {
			var err error
			if chunks, err = g.Chunks(nil, bases, i, 0, 0, 1); err != nil {
				cuttable = false // there is nothing else to be wrong with the first token of the first page
			}
		}
		planes := slices.Clone(layers[i].Planes)
		slices.SortStableFunc(planes, func(a, b kv.Plane) int { return cmp.Compare(a.Kind, b.Kind) })
		for _, p := range planes {
			f.add(stretch{mem: mem[p.Region], region: p.Region, off: p.Offset, bytes: p.Bytes, page: p.PageStride})
			for _, x := range chunks {
				if x.Region == p.Region && p.Offset <= x.Off && x.Off < p.Offset+p.Bytes {
					f.cut = append(f.cut, stretch{mem: mem[p.Region], region: p.Region, off: x.Off, bytes: x.Bytes, page: p.PageStride, token: x.Bytes})
					f.tokenBytes += x.Bytes
				}
			}
		}
	}
	if !cuttable {
		f.cut, f.tokenBytes = nil, 0
	}
	return f, nil
}

// add adds a stretch of whole pages. One that goes on where the last one ends, in every
// page, is the same.
func (f *form) add(s stretch) {
	if n := len(f.whole); n > 0 {
		last := &f.whole[n-1]
		if last.region == s.region && last.page == s.page && last.off+last.bytes == s.off {
			last.bytes += s.bytes
			return
		}
	}
	f.whole = append(f.whole, s)
}

// check refuses an order that is not about this cache's pages. Kind: fault.Invalid.
func (f *form) check(o *order) error {
	for _, r := range o.runs {
		if r.first < f.first || int(r.first)+int(r.n) > f.pages {
			return fault.New(fault.Invalid, "copy", "pages %d … %d are not in %d … %d", r.first, int(r.first)+int(r.n)-1, f.first, f.pages-1)
		}
	}
	for _, p := range o.parts {
		if p.page < f.first || int(p.page) >= f.pages || p.t0 < 0 || p.t0 >= p.t1 || int(p.t1) > f.pageSize || len(f.cut) == 0 {
			return fault.New(fault.Invalid, "copy", "tokens [%d, %d) of page %d: pages are %d … %d of %d tokens", p.t0, p.t1, p.page, f.first, f.pages-1, f.pageSize)
		}
	}
	if n, ok := f.bytes(o); !ok || o.to > n {
		return fault.New(fault.Invalid, "copy", "bytes [%d, %d) of %d", o.from, o.to, n)
	}
	return nil
}

// bytes returns the bytes of all that o lists. It reports false where they are too many
// to be counted, which takes pages that are named more than once.
func (f *form) bytes(o *order) (sum int64, ok bool) {
	add := func(n, each int64) {
		if each > 0 && n > (math.MaxInt64-sum)/each {
			ok = false
			return
		}
		sum += n * each
	}
	ok = true
	for _, r := range o.runs {
		add(int64(r.n), f.pageBytes)
	}
	for _, p := range o.parts {
		add(int64(p.t1-p.t0), f.tokenBytes)
	}
	return sum, ok
}

// walk goes through the bytes of an order, piece by piece. Its order has been checked.
type walk struct {
	f *form
	o *order

	at  int   // among runs, and behind them parts
	nth int32 // page of the run
	st  int   // stretch of the page
	off int64 // in the stretch
}

// start puts w at byte o.from.
func (w *walk) start(f *form, o *order) {
	*w = walk{f: f, o: o}
	left := o.from
	for left > 0 && w.at < len(o.runs) {
		pages := min(left/f.pageBytes, int64(o.runs[w.at].n))
		left -= pages * f.pageBytes
		if w.nth = int32(pages); w.nth < o.runs[w.at].n {
			break
		}
		w.at, w.nth = w.at+1, 0
	}
	for left > 0 {
		n := min(left, w.bytes()-w.off)
		left -= n
		w.step(n)
	}
}

// bytes returns how long the stretch is that w is in.
func (w *walk) bytes() int64 {
	if n := len(w.o.runs); w.at >= n {
		p := &w.o.parts[w.at-n]
		return w.f.cut[w.st].bytes * int64(p.t1-p.t0)
	}
	return w.f.whole[w.st].bytes
}

// place returns where w is.
func (w *walk) place() (s *stretch, off int64) {
	if n := len(w.o.runs); w.at >= n {
		p := &w.o.parts[w.at-n]
		s = &w.f.cut[w.st]
		return s, s.off + int64(p.page)*s.page + int64(p.t0)*s.token + w.off
	}
	s = &w.f.whole[w.st]
	return s, s.off + (int64(w.o.runs[w.at].first)+int64(w.nth))*s.page + w.off
}

// step goes on by n bytes, to the end of the stretch at most.
func (w *walk) step(n int64) {
	if w.off += n; w.off < w.bytes() {
		return
	}
	w.off = 0
	stretches := len(w.f.whole)
	if w.at >= len(w.o.runs) {
		stretches = len(w.f.cut)
	}
	if w.st++; w.st < stretches {
		return
	}
	w.st = 0
	if w.at < len(w.o.runs) {
		if w.nth++; w.nth < w.o.runs[w.at].n {
			return
		}
	}
	w.at, w.nth = w.at+1, 0
}

// pieces appends the next n bytes, or fewer where that takes more than room pieces, and
// returns how many there are. What lies together is one piece. The caller knows that so
// many are left.
func (w *walk) pieces(to [][]byte, n int64, room int) (pieces [][]byte, bytes int64) {
	var last *stretch
	var start, end int64 // of the last piece
	for bytes < n {
		s, off := w.place()
		take := min(n-bytes, w.bytes()-w.off)
		if last != nil && last.region == s.region && end == off {
			end += take
			to[len(to)-1] = s.mem[start:end:end]
		} else {
			if room == 0 {
				break
			}
			room--
			last, start, end = s, off, off+take
			to = append(to, s.mem[start:end:end])
		}
		bytes += take
		w.step(take)
	}
	return to, bytes
}

// page returns which page byte at of an order is in.
func (f *form) page(o *order, at int64) page.ID {
	for _, r := range o.runs {
		bytes := int64(r.n) * f.pageBytes
		if at < bytes {
			return r.first + page.ID(at/f.pageBytes)
		}
		at -= bytes
	}
	for _, p := range o.parts {
		bytes := int64(p.t1-p.t0) * f.tokenBytes
		if at < bytes {
			return p.page
		}
		at -= bytes
	}
	return 0
}
