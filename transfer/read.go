package transfer

import (
	"fmt"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Read is what is read of one page in one layer: tokens [T0, T1) of page Remote, onto
// the same tokens of page Local.
type Read struct {
	Layer         int // position in the local cache
	Local, Remote page.ID
	T0, T1        int
}

// AppendReads appends the reads of tokens [start, end) of a sequence, page by page and
// in each page layer by layer. local and remote are the pages of the whole sequence on
// either side, so token t lies in page t/pageSize of both lists. An empty range has no
// reads.
//
// It is the definition of what a read moves. Copies are made from a [Plan], which says
// the same in fewer words. Kind: fault.Invalid (a range that is negative or that the
// lists don't cover); reads comes back as it was.
func AppendReads(reads []Read, layers, start, end int, local, remote []page.ID, pageSize int) ([]Read, error) {
	first, last, err := positions(start, end, local, remote, pageSize)
	if err != nil {
		return reads, err
	}
	for p := first; p <= last; p++ {
		t0, t1 := tokensAt(p, start, end, pageSize)
		for layer := range layers {
			reads = append(reads, Read{Layer: layer, Local: local[p], Remote: remote[p], T0: t0, T1: t1})
		}
	}
	return reads, nil
}

// positions returns the first and the last position of the pages of a range of tokens;
// of an empty range the last comes before the first.
func positions(start, end int, local, remote []page.ID, pageSize int) (first, last int, err error) {
	switch {
	case pageSize < 1:
		return 0, -1, fault.New(fault.Invalid, "tokens", "[%d, %d) in pages of %d", start, end, pageSize)
	case start < 0:
		return 0, -1, fault.New(fault.Invalid, "tokens", "[%d, %d) begin before the sequence", start, end)
	case end <= start:
		return 0, -1, nil
	}
	first, last = start/pageSize, (end-1)/pageSize
	if last >= min(len(local), len(remote)) {
		return 0, -1, fault.New(fault.Invalid, "tokens", "[%d, %d) end in page %d of the sequence, and there are %d local pages and %d remote ones",
			start, end, last, len(local), len(remote)).Hint("give the pages of the whole sequence, from its first token on")
	}
	return first, last, nil
}

// tokensAt returns the tokens of the page at position p that lie in [start, end).
func tokensAt(p, start, end, pageSize int) (t0, t1 int) {
	return max(start-p*pageSize, 0), min(end-p*pageSize, pageSize)
}

// Plan is a read with all layers taken together: pages that move whole, merged to runs,
// and the first and the last page where only a part of them does. The zero value is an
// empty plan. A plan that is set again allocates nothing once it has grown.
type Plan struct {
	Pairs []page.Pair // pages that move whole, ascending by their destination
	Runs  []page.Run  // the same, merged
	Parts []Part      // at most two
}

// Part is a page of which tokens [T0, T1) move, and not all.
type Part struct {
	Local, Remote page.ID
	T0, T1        int
}

// Set makes p the plan of what AppendReads lists. No local page may be named twice.
// Kind: fault.Invalid, also as AppendReads; p is empty then. Ids are compared with no
// cache: AppendBoxes does that.
func (p *Plan) Set(start, end int, local, remote []page.ID, pageSize int) error {
	p.Pairs, p.Runs, p.Parts = p.Pairs[:0], p.Runs[:0], p.Parts[:0]
	first, last, err := positions(start, end, local, remote, pageSize)
	if err != nil {
		return err
	}
	for i := first; i <= last; i++ {
		if t0, t1 := tokensAt(i, start, end, pageSize); t1-t0 < pageSize {
			p.Parts = append(p.Parts, Part{Local: local[i], Remote: remote[i], T0: t0, T1: t1})
			continue
		}
		p.Pairs = append(p.Pairs, page.Pair{Dst: local[i], Src: remote[i]})
	}
	if p.Runs, err = page.AppendRuns(p.Runs, p.Pairs); err == nil {
		err = p.checkParts()
	}
	if err != nil {
		p.Pairs, p.Runs, p.Parts = p.Pairs[:0], p.Runs[:0], p.Parts[:0]
	}
	return err
}

// checkParts refuses parts of a page that is written already.
func (p *Plan) checkParts() error {
	for i, part := range p.Parts {
		twice := i > 0 && part.Local == p.Parts[0].Local
		for _, r := range p.Runs {
			twice = twice || r.Dst <= part.Local && int(part.Local) < int(r.Dst)+r.N
		}
		if twice {
			return fault.New(fault.Invalid, fmt.Sprintf("page %d", part.Local), "is the destination of two pages")
		}
	}
	return nil
}

// Empty reports whether there is nothing to be read.
func (p *Plan) Empty() bool { return len(p.Pairs)+len(p.Parts) == 0 }

// Bytes returns the bytes that p moves by r. Parts count by their tokens; what they
// have of a page is the same for each token.
func (p *Plan) Bytes(r *kv.Route) int64 {
	sum := int64(len(p.Pairs)) * r.PageBytes()
	for _, part := range p.Parts {
		sum += r.PageBytes() / int64(r.Dst().PageSize()) * int64(part.T1-part.T0)
	}
	return sum
}

// AppendBoxes appends the boxes of all that p moves, in every layer: one box for many
// pages where runs allow it. It allocates nothing but room for them. Kinds: those of
// [kv.Route.AppendBoxes] and [kv.Route.AppendTokenBoxes]; boxes comes back as it was.
func (p *Plan) AppendBoxes(boxes []kv.Box, r *kv.Route) ([]kv.Box, error) {
	n := len(boxes)
	var err error
	for _, run := range p.Runs {
		if boxes, err = r.AppendBoxes(boxes, run); err != nil {
			return boxes[:n], err
		}
	}
	for _, part := range p.Parts {
		if boxes, err = r.AppendTokenBoxes(boxes, part.Local, part.Remote, part.T0, part.T1); err != nil {
			return boxes[:n], err
		}
	}
	return boxes, nil
}
