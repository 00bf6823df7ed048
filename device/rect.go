package device

// A box is cut into what an engine takes in three steps, each a function of its
// arguments alone: simplify makes it as simple as it is, cutBox makes rects within the
// limits of the engine, and fences split those that would leave a pinned stretch.

// maxFolds is how many ways of folding a pitch are tried.
const maxFolds = 64

// simplify makes r, whose counts are all at least 1, one of the fewest rows: what is
// adjacent on both sides becomes wider or longer, and what is left of one dimension
// becomes rows. Slices are more than 1 only when rows are.
func simplify(r *Rect) {
	for {
		switch {
		case r.Rows > 1 && r.DstPitch == r.Width && r.SrcPitch == r.Width:
			r.Width, r.Rows = r.Width*r.Rows, 1
		case r.Slices > 1 && r.DstSlice == r.Width && r.SrcSlice == r.Width:
			r.Width, r.Slices = r.Width*r.Slices, 1
		case r.Rows == 1 && r.Slices > 1:
			*r = turn(*r)
		case r.Slices > 1 && r.DstSlice == r.Rows*r.DstPitch && r.SrcSlice == r.Rows*r.SrcPitch:
			r.Rows, r.Slices = r.Rows*r.Slices, 1
		case r.Slices > 1 && r.DstPitch == r.Slices*r.DstSlice && r.SrcPitch == r.Slices*r.SrcSlice:
			*r = turn(*r)
		default:
			return
		}
	}
}

// turn takes the slices of r for rows and its rows for slices.
func turn(r Rect) Rect {
	return Rect{
		Dst: r.Dst, Src: r.Src, Width: r.Width, Rows: r.Slices, Slices: r.Rows,
		DstPitch: r.DstSlice, SrcPitch: r.SrcSlice, DstSlice: r.DstPitch, SrcSlice: r.SrcPitch,
	}
}

// cutBox appends to out the rects, each within the limits l, that copy what r does, which
// is within no limits.
func cutBox(out []Rect, r Rect, l *EngineLimits) []Rect {
	if r.Width <= 0 || r.Rows <= 0 || r.Slices <= 0 {
		return out
	}
	simplify(&r)
	if r.Slices == 1 && (r.Rows == 1 || isFlat(&r, l)) {
		return append(out, r)
	}
	if r.Slices == 1 {
		return cutSlice(out, r, l)
	}
	if isBox(&r, l) {
		return append(out, r)
	}
	turned := turn(r)
	if isBox(&turned, l) {
		return append(out, turned)
	}
	if turned.Slices*calls(turned, l) < r.Slices*calls(r, l) {
		r = turned
	}
	for range r.Slices {
		out = cutSlice(out, r, l)
		r.Dst += uintptr(r.DstSlice)
		r.Src += uintptr(r.SrcSlice)
	}
	return out
}

// cutSlice is cutBox for the first slice of r.
func cutSlice(out []Rect, r Rect, l *EngineLimits) []Rect {
	r.Slices, r.DstSlice, r.SrcSlice = 1, 0, 0
	if r.Rows == 1 || isFlat(&r, l) {
		return append(out, r)
	}
	if f, ok := fold(r, l); ok {
		return append(out, f)
	}
	line := Rect{Dst: r.Dst, Src: r.Src, Width: r.Width, Rows: 1, Slices: 1}
	for range r.Rows {
		out = append(out, line)
		line.Dst += uintptr(r.DstPitch)
		line.Src += uintptr(r.SrcPitch)
	}
	return out
}

// calls returns how many rects cutSlice makes of a slice of r.
func calls(r Rect, l *EngineLimits) int64 {
	if isFlat(&r, l) {
		return 1
	}
	if _, ok := fold(r, l); ok {
		return 1
	}
	return r.Rows
}

// isFlat reports whether a slice of r can be one 2-D copy.
func isFlat(r *Rect, l *EngineLimits) bool {
	return r.Width <= min(r.DstPitch, r.SrcPitch) && max(r.DstPitch, r.SrcPitch) <= l.MaxPitch
}

// isBox reports whether r can be one 3-D copy.
func isBox(r *Rect, l *EngineLimits) bool {
	if !l.Boxes || !isFlat(r, l) {
		return false
	}
	dst, src := r.DstSlice/r.DstPitch, r.SrcSlice/r.SrcPitch
	return dst >= r.Rows && dst*r.DstPitch == r.DstSlice && src >= r.Rows && src*r.SrcPitch == r.SrcSlice
}

// fold makes the rows of r, which has one slice, slices of one row. Their stride may be
// larger than any pitch: it only needs to be a multiple of one.
func fold(r Rect, l *EngineLimits) (Rect, bool) {
	if !l.Boxes {
		return r, false
	}
	dst, src := foldPitch(r.DstPitch, r.Width, l.MaxPitch), foldPitch(r.SrcPitch, r.Width, l.MaxPitch)
	return Rect{
		Dst: r.Dst, Src: r.Src, Width: r.Width, Rows: 1, Slices: r.Rows,
		DstPitch: dst, SrcPitch: src, DstSlice: r.DstPitch, SrcSlice: r.SrcPitch,
	}, dst > 0 && src > 0
}

// foldPitch returns a pitch from width to most of which stride is a multiple, 0 when a
// short search finds none.
func foldPitch(stride, width, most int64) int64 {
	if most <= 0 {
		return 0
	}
	n := max(1, (stride-1)/most+1)
	for end := n + maxFolds; n < end && stride/n >= width; n++ {
		if stride%n == 0 {
			return stride / n
		}
	}
	return 0
}

// extent returns how many bytes lie between the first and the last of rows, on one
// side; false when that is more than there can be.
func extent(width, rows, pitch, slices, slice int64) (int64, bool) {
	a, okA := spread(rows, pitch)
	b, okB := spread(slices, slice)
	n := a + b + width // each less than 2^62
	return n, okA && okB && width < 1<<62 && n >= 0
}

// spread returns how far the last of count things is from the first.
func spread(count, stride int64) (int64, bool) {
	if count <= 1 {
		return 0, true
	}
	if uint64(count|stride) < 1<<31 { // as nearly always: without the division
		return (count - 1) * stride, true
	}
	if stride < 0 || stride >= (1<<62)/count {
		return 0, false
	}
	return (count - 1) * stride, true
}

// fence is a side of rects: a memory at base, and what may not be crossed in it.
type fence struct {
	base     uintptr
	size     int64
	pins     *pins  // nil: nothing, it is the device's own
	pageable uint64 // rects that were found outside the pinned stretches
}

// end returns where the stretch or gap of the byte at addr ends.
func (f *fence) end(addr uintptr) uintptr {
	if f.pins == nil {
		return f.base + uintptr(f.size)
	}
	_, hi, pinned := f.pins.at(int64(addr-f.base), f.size)
	if !pinned {
		f.pageable++
	}
	return f.base + uintptr(hi)
}

// split appends r to out, in parts that cross no fence: halves of its slices, of its
// rows, and at last its row cut at the fence. Parts of a rect within the limits of an
// engine are within them, too.
func split(out []Rect, r Rect, dst, src *fence) []Rect {
	if dst.pins == nil && src.pins == nil {
		return append(out, r)
	}
	d, _ := extent(r.Width, r.Rows, r.DstPitch, r.Slices, r.DstSlice)
	s, _ := extent(r.Width, r.Rows, r.SrcPitch, r.Slices, r.SrcSlice)
	before := [2]uint64{dst.pageable, src.pageable}
	dstRoom, srcRoom := int64(dst.end(r.Dst)-r.Dst), int64(src.end(r.Src)-r.Src)
	if d <= dstRoom && s <= srcRoom {
		return append(out, r)
	}
	dst.pageable, src.pageable = before[0], before[1] // its parts count themselves
	a, b := r, r
	switch {
	case r.Slices > 1:
		a.Slices = r.Slices / 2
		b.Slices -= a.Slices
		b.Dst += uintptr(a.Slices * r.DstSlice)
		b.Src += uintptr(a.Slices * r.SrcSlice)
	case r.Rows > 1:
		a.Rows = r.Rows / 2
		b.Rows -= a.Rows
		b.Dst += uintptr(a.Rows * r.DstPitch)
		b.Src += uintptr(a.Rows * r.SrcPitch)
	default:
		a.Width = min(dstRoom, srcRoom)
		b.Width -= a.Width
		b.Dst += uintptr(a.Width)
		b.Src += uintptr(a.Width)
	}
	return split(split(out, a, dst, src), b, dst, src)
}
