package device

import "github.com/kvferry/kvferry/fault"

// rectChunk is how many rects an engine is given in one call of ours: enough that the
// call costs nothing, few enough to stay in the cache.
const rectChunk = 256

// keepRects is the most entries of a list of rects that is kept for the next box.
const keepRects = 1 << 14

// buffers are what a stream builds the engine's arguments in.
type buffers struct {
	rects []Rect
	boxes []Rect // of one box, before fences split them
	batch Batch
}

// place is one side of the ops of a call: the memory that the latest op named, and the
// stretch of it that the op was in.
type place struct {
	fence
	m      *Memory
	lo, hi int64
	pinned bool // so are bytes [lo, hi), or they are the device's own
	any    bool // may be read from the call on
}

// has reports whether bytes [off, off+n) of m, more than 0, are in the stretch.
func (p *place) has(m *Memory, off, n int64) bool {
	return p.m == m && p.lo <= off && off < p.hi && n <= p.hi-off
}

// enter makes m the memory of p, without a use.
func (p *place) enter(a *Accelerator, m *Memory) {
	p.m, p.fence = m, fence{base: m.base, size: m.size}
	p.lo, p.hi, p.pinned = 0, m.size, true
	if p.any {
		p.hi = 0 // where it is has to be seen
	}
	if m.on != a {
		if p.pins = a.pinsOf(m); p.pins == nil {
			p.pins = &pins{by: a}
		}
		p.hi = 0
	}
}

// seek moves p to the stretch of byte off of its memory.
func (p *place) seek(off int64) {
	if p.pins != nil {
		p.lo, p.hi, p.pinned = p.pins.at(off, p.size)
	}
}

// holds makes m the memory of p, and reports whether all of b's side in it is in one
// pinned stretch.
func (p *place) holds(a *Accelerator, b *Box, m *Memory, off, pitch, slice int64) bool {
	if p.m != m {
		p.enter(a, m)
	}
	n, _ := extent(b.Width, int64(b.Rows), pitch, int64(b.Slices), slice)
	if !p.has(m, off, n) {
		p.seek(off)
	}
	return p.pinned && p.has(m, off, n)
}

// object is what an error of an entry of a call is about.
type object struct {
	call, entry, side string
	i                 int
}

func (o object) errorf(kind fault.Kind, format string, args ...any) *fault.Error {
	return fault.New(kind, o.call, "%s %d: "+format, append([]any{o.entry, o.i}, args...)...)
}

// visit checks that bytes [off, off+n) of m are there, and takes a use of m for s when p
// was not in it.
func (s *accStream) visit(o object, p *place, m *Memory, off, n int64) error {
	switch {
	case m == nil:
		return o.errorf(fault.Invalid, "no %s", o.side)
	case n < 0 || off < 0 || off > m.size-n:
		return o.errorf(fault.Invalid, "%s bytes [%d, %d+%d) of a memory of %d", o.side, off, off, n, m.size)
	case p.m == m:
		return nil
	case m.on == nil && m.bytes == nil || m.on != nil && m.on != s.a:
		return o.errorf(fault.Unsupported, "%s cannot address the %s, on device %s", s.a.name, o.side, m.device)
	case !m.use():
		return o.errorf(fault.Closed, "the memory of its %s was freed", o.side)
	}
	s.uses = append(s.uses, m)
	p.enter(s.a, m)
	return nil
}

// reach checks that bytes [off, off+n) of the memory of p can be copied.
func (s *accStream) reach(o object, p *place, off, n int64) error {
	for end := off + n; off < end; off = p.hi {
		p.seek(off)
		switch {
		case p.any && (p.pins == nil || !p.pinned):
			return o.errorf(fault.Invalid, "%s bytes [%d, %d) are not pinned host memory, and are to be read in any order", o.side, off, min(end, p.hi)).
				Hint("copy in the order of the stream")
		case !p.pinned && !p.pins.pageable:
			return o.errorf(fault.Unsupported, "%s bytes [%d, %d) of host memory are not pinned by %s", o.side, off, min(end, p.hi), s.a.name).
				Hint("pin them with Accelerator.Pin, or admit slow copies with AdmitPageable")
		}
	}
	return nil
}

// giveBack ends the uses that a call has taken which enqueued nothing.
func (s *accStream) giveBack() {
	for _, m := range s.uses {
		m.unuse()
	}
	clear(s.uses)
	s.uses = s.uses[:0]
}

// enqueued ends a call that has given something to the driver: its uses last until that
// has run. err is what the driver has refused.
func (s *accStream) enqueued(err error, pageable uint64) error {
	s.a.calls[pageableCopies].Add(pageable)
	s.work++
	s.mustSettle()
	if err != nil {
		return s.refusal("copy", err)
	}
	return nil
}

func (s *accStream) Copy(ops []Op) error {
	return s.copyOps(0, ops, StreamOrder, 0, len(ops) > 1 && !s.a.linear.Load())
}

// copyOps enqueues ops through engine e, in batches of up to most copies if it has them
// and is to.
func (s *accStream) copyOps(e int, ops []Op, o SourceOrder, most int, batches bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	empty, err := s.checkOps(ops, o)
	if err == nil {
		err = s.refused()
	}
	if err != nil || empty {
		s.giveBack()
		return err
	}
	limit := 0
	if batches && s.handle != DefaultStream && s.handle != LegacyStream {
		limit = s.a.limits[e].Batch
		if most > 0 {
			limit = min(limit, most)
		}
	}
	pageable := uint64(0)
	var dst, src place
	for i := range ops {
		op := &ops[i]
		to, from := op.DstOff, op.SrcOff
		for left := op.Bytes; left > 0; {
			if !dst.has(op.Dst, to, 1) {
				if dst.m != op.Dst {
					dst.enter(s.a, op.Dst)
				}
				dst.seek(to)
			}
			if !src.has(op.Src, from, 1) {
				if src.m != op.Src {
					src.enter(s.a, op.Src)
				}
				src.seek(from)
			}
			if !dst.pinned || !src.pinned {
				pageable++
			}
			n := min(left, dst.hi-to, src.hi-from)
			if limit > 0 {
				b := &s.batch
				b.Dst = append(b.Dst, uint64(dst.base)+uint64(to))
				b.Src = append(b.Src, uint64(src.base)+uint64(from))
				b.Bytes = append(b.Bytes, uint64(n))
				if len(b.Bytes) == limit {
					err = s.flushBatch(e, o)
				}
			} else {
				s.rects = append(s.rects, Rect{Dst: dst.base + uintptr(to), Src: src.base + uintptr(from), Width: n, Rows: 1, Slices: 1})
				if len(s.rects) == rectChunk {
					err = s.flushRects(e)
				}
			}
			if err != nil {
				return s.enqueued(err, pageable)
			}
			left, to, from = left-n, to+n, from+n
		}
	}
	if limit > 0 {
		err = s.flushBatch(e, o)
	} else {
		err = s.flushRects(e)
	}
	return s.enqueued(err, pageable)
}

// checkOps checks ops and takes their uses. It reports whether there is nothing to copy.
func (s *accStream) checkOps(ops []Op, o SourceOrder) (empty bool, err error) {
	var dst, src place
	src.any = o == AnyOrder
	empty = true
	for i := range ops {
		op := &ops[i]
		if op.Bytes > 0 {
			empty = false
			if op.Digest == nil && dst.has(op.Dst, op.DstOff, op.Bytes) && src.has(op.Src, op.SrcOff, op.Bytes) {
				continue // as most ops do
			}
		}
		if err := s.checkOp(i, op, &dst, &src); err != nil {
			return false, err
		}
	}
	return empty, nil
}

func (s *accStream) checkOp(i int, op *Op, dst, src *place) error {
	to, from := object{"copy", "op", "destination", i}, object{"copy", "op", "source", i}
	if op.Digest != nil {
		return to.errorf(fault.Unsupported, "%s gives no digests of what it copies", s.a.name).
			Hint("sum the bytes when they have arrived in host memory")
	}
	if err := s.visit(to, dst, op.Dst, op.DstOff, op.Bytes); err != nil {
		return err
	}
	if err := s.visit(from, src, op.Src, op.SrcOff, op.Bytes); err != nil {
		return err
	}
	if err := s.reach(to, dst, op.DstOff, op.Bytes); err != nil {
		return err
	}
	return s.reach(from, src, op.SrcOff, op.Bytes)
}

// flushBatch gives the batch to engine e.
func (s *accStream) flushBatch(e int, o SourceOrder) error {
	b := &s.batch
	if len(b.Bytes) == 0 {
		return nil
	}
	s.a.calls[batchCalls].Add(1)
	s.a.calls[batchedOps].Add(uint64(len(b.Bytes)))
	err := s.a.engines[e].CopyBatch(s.handle, b, o)
	b.Dst, b.Src, b.Bytes = b.Dst[:0], b.Src[:0], b.Bytes[:0]
	return err
}

// flushRects gives the rects to engine e.
func (s *accStream) flushRects(e int) error {
	if len(s.rects) == 0 {
		return nil
	}
	n, err := s.a.engines[e].CopyRects(s.handle, s.rects)
	var calls [boxCalls + 1]uint64
	for i := range s.rects[:min(max(n, 0), len(s.rects))] {
		switch r := &s.rects[i]; {
		case r.Slices > 1:
			calls[boxCalls]++
		case r.Rows > 1:
			calls[rectCalls]++
		default:
			calls[linearCalls]++
		}
	}
	for i, n := range calls {
		if n > 0 {
			s.a.calls[i].Add(n)
		}
	}
	s.rects = s.rects[:0]
	return err
}

// Box is Slices × Rows rows to be copied between two memories, as in kv.Box: row j of
// slice i goes from SrcOff + i·SrcSlice + j·SrcPitch to DstOff + i·DstSlice + j·DstPitch.
// With more than one row (slice), the pitches (slice strides) are at least Width.
type Box struct {
	Dst, Src           *Memory
	DstOff, SrcOff     int64
	Width              int64
	Rows, Slices       int
	DstPitch, SrcPitch int64
	DstSlice, SrcSlice int64
}

// CopyBoxes enqueues boxes on s, a stream of this device, through e, one of its engines:
// as few calls of the library as its limits allow, linear copies where nothing else
// goes. The rules are those of [Stream.Copy].
func (a *Accelerator) CopyBoxes(s Stream, e Engine, boxes []Box) error {
	as, i, err := a.route(s, e)
	if err != nil {
		return err
	}
	return as.copyBoxes(i, boxes)
}

// CopyBatch is [Stream.Copy] through the batches of e. The legacy stream, and an engine
// without batches, take linear copies. With AnyOrder the sources must be host memory
// that nobody writes until a later ticket or event is done. most is the most copies of
// one batch, 0 for what the engine allows.
func (a *Accelerator) CopyBatch(s Stream, e Engine, ops []Op, o SourceOrder, most int) error {
	as, i, err := a.route(s, e)
	if err != nil {
		return err
	}
	if o > AnyOrder || most < 0 {
		return fault.New(fault.Invalid, "copy", "batches of at most %d copies in order %d", most, o)
	}
	return as.copyOps(i, ops, o, most, true)
}

// route checks that s is a stream of the device and e an engine.
func (a *Accelerator) route(s Stream, e Engine) (*accStream, int, error) {
	as, ok := s.(*accStream)
	if !ok || as == nil || as.a != a {
		return nil, 0, fault.New(fault.Invalid, "copy", "a %T that is no stream of %s", s, a.name)
	}
	for i := range a.engines {
		if a.engines[i] == e {
			return as, i, nil
		}
	}
	return nil, 0, fault.New(fault.Invalid, "copy", "a %T that is no engine of %s", e, a.name)
}

func (s *accStream) copyBoxes(e int, boxes []Box) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var dst, src place
	empty := true
	err := s.refused()
	for i := range boxes {
		if err == nil {
			err = s.checkBox(i, &boxes[i], &dst, &src)
		}
		empty = empty && boxes[i].empty()
	}
	if err != nil || empty {
		s.giveBack()
		return err
	}
	pageable := uint64(0)
	dst, src = place{}, place{}
	for i := range boxes {
		b := &boxes[i]
		if b.empty() {
			continue
		}
		whole := dst.holds(s.a, b, b.Dst, b.DstOff, b.DstPitch, b.DstSlice)
		whole = src.holds(s.a, b, b.Src, b.SrcOff, b.SrcPitch, b.SrcSlice) && whole
		r := Rect{
			Dst: dst.base + uintptr(b.DstOff), Src: src.base + uintptr(b.SrcOff),
			Width: b.Width, Rows: int64(b.Rows), Slices: int64(b.Slices),
			DstPitch: b.DstPitch, SrcPitch: b.SrcPitch, DstSlice: b.DstSlice, SrcSlice: b.SrcSlice,
		}
		if whole {
			s.rects = cutBox(s.rects, r, &s.a.limits[e])
		} else {
			s.boxes = cutBox(s.boxes[:0], r, &s.a.limits[e])
			for _, r := range s.boxes {
				s.rects = split(s.rects, r, &dst.fence, &src.fence)
			}
			pageable += dst.pageable + src.pageable
			dst.pageable, src.pageable = 0, 0
		}
		if len(s.rects) >= rectChunk {
			if err := s.flushRects(e); err != nil {
				return s.enqueued(err, pageable)
			}
		}
	}
	err = s.flushRects(e)
	if cap(s.boxes) > keepRects {
		s.boxes = nil
	}
	if cap(s.rects) > keepRects {
		s.rects = nil
	}
	return s.enqueued(err, pageable)
}

func (b *Box) empty() bool { return b.Width == 0 || b.Rows == 0 || b.Slices == 0 }

// checkBox checks b and takes its uses.
func (s *accStream) checkBox(i int, b *Box, dst, src *place) error {
	to, from := object{"copy", "box", "destination", i}, object{"copy", "box", "source", i}
	if b.Width < 0 || b.Rows < 0 || b.Slices < 0 {
		return to.errorf(fault.Invalid, "%d × %d rows of %d bytes", b.Slices, b.Rows, b.Width)
	}
	if err := s.checkSide(to, dst, b, b.Dst, b.DstOff, b.DstPitch, b.DstSlice); err != nil {
		return err
	}
	return s.checkSide(from, src, b, b.Src, b.SrcOff, b.SrcPitch, b.SrcSlice)
}

func (s *accStream) checkSide(o object, p *place, b *Box, m *Memory, off, pitch, slice int64) error {
	n := int64(0)
	if !b.empty() {
		var ok bool
		n, ok = extent(b.Width, int64(b.Rows), pitch, int64(b.Slices), slice)
		if !ok || b.Rows > 1 && pitch < b.Width || b.Slices > 1 && slice < b.Width {
			return o.errorf(fault.Invalid, "%d × %d rows of %d bytes with a %s stride of %d and %d", b.Slices, b.Rows, b.Width, o.side, pitch, slice)
		}
	}
	if err := s.visit(o, p, m, off, n); err != nil {
		return err
	}
	if n == 0 || p.has(m, off, n) {
		return nil
	}
	p.seek(off)
	if n <= p.hi-off { // all in one stretch: as good as its first row
		return s.reach(o, p, off, b.Width)
	}
	for i := range int64(b.Slices) {
		for j := range int64(b.Rows) {
			if err := s.reach(o, p, off+i*slice+j*pitch, b.Width); err != nil {
				return err
			}
		}
	}
	return nil
}
