package device

import (
	"cmp"
	"errors"
	"os"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// pins is what one accelerator can reach of a host memory. It is immutable: Pin replaces
// it, so that copies look it up without a lock.
type pins struct {
	by        *Accelerator
	stretches []span // pinned; sorted, and they do not overlap
	pageable  bool   // bytes outside the stretches may be copied, too
	next      *pins  // of another accelerator
}

// span is bytes [off, end) of a memory, registered with the driver by one call.
type span struct{ off, end int64 }

// at returns the stretch or the gap between stretches that byte off lies in.
func (p *pins) at(off, size int64) (lo, hi int64, pinned bool) {
	i, j := 0, len(p.stretches)
	for i < j { // the first stretch that ends behind off
		if h := (i + j) / 2; p.stretches[h].end <= off {
			i = h + 1
		} else {
			j = h
		}
	}
	lo, hi = 0, size
	if i < len(p.stretches) {
		if s := p.stretches[i]; s.off <= off {
			return s.off, s.end, true
		}
		hi = p.stretches[i].off
	}
	if i > 0 {
		lo = p.stretches[i-1].end
	}
	return lo, hi, false
}

// pinsOf returns what a can reach of host memory m, nil when that is nothing.
func (a *Accelerator) pinsOf(m *Memory) *pins {
	for p := m.pins.Load(); p != nil; p = p.next {
		if p.by == a {
			return p
		}
	}
	return nil
}

// publish puts p in the place of what there was of its accelerator. The caller holds
// m.pinning.
func (m *Memory) publish(p *pins) {
	var others *pins
	for q := m.pins.Load(); q != nil; q = q.next {
		if q.by != p.by {
			others = &pins{by: q.by, stretches: q.stretches, pageable: q.pageable, next: others}
		}
	}
	p.next = others
	m.pins.Store(p)
}

// hostUse takes a use of m, which must be host memory.
func (a *Accelerator) hostUse(what string, m *Memory) error {
	switch {
	case m == nil:
		return fault.New(fault.Invalid, what, "no memory")
	case m.on != nil || m.bytes == nil && m.uses.Load() >= 0:
		return fault.New(fault.Invalid, what, "memory of device %s is not the host's", m.device)
	}
	if err := a.usable(); err != nil {
		return err
	}
	if !m.use() {
		return fault.New(fault.Closed, what, "the memory was freed")
	}
	return nil
}

// Pin makes bytes [off, off+n) of m, which is host memory that is not on the Go heap,
// ready for copies by this device, so that they are asynchronous and fast. It may be
// called for one stretch after the other, while others are in use. No copy crosses two
// stretches in one operation: those that would are split. m.Free unpins all of it.
//
// Stretches of one memory that share an OS page can't be pinned apart: cut where both
// pages of the OS and of the cache end.
//
// Kinds: fault.Invalid (range, device memory, a shared OS page), fault.Exists (bytes of
// it are pinned, or an OS page that they share with other memory), fault.Closed, and what
// the driver says when it can't.
func (a *Accelerator) Pin(m *Memory, off, n int64) error {
	const what = "pin host memory"
	if err := a.hostUse(what, m); err != nil {
		return err
	}
	defer m.unuse()
	if off < 0 || n < 0 || off > m.size-n {
		return fault.New(fault.Invalid, what, "bytes [%d, %d+%d) of a memory of %d", off, off, n, m.size)
	}
	if n == 0 {
		return nil
	}
	m.pinning.Lock()
	defer m.pinning.Unlock()
	p := pins{by: a}
	if old := a.pinsOf(m); old != nil {
		p.pageable, p.stretches = old.pageable, slices.Clone(old.stretches)
	}
	if err := checkPins(p.stretches, m.base, off, n, int64(os.Getpagesize())); err != nil {
		return err
	}
	if !a.take(&a.pinned) {
		return a.errClosed()
	}
	added := cutStretches(m.pieces, m.base, off, n, int64(os.Getpagesize()))
	for i, s := range added {
		if err := a.driver.Register(m.base+uintptr(s.off), s.end-s.off); err != nil {
			for _, s := range added[:i] {
				_ = a.driver.Unregister(m.base + uintptr(s.off)) // it was registered a moment ago
			}
			a.give(&a.pinned)
			kind := fault.KindOf(err)
			if kind == 0 {
				kind = fault.Memory
			}
			a.blame(err)
			refused := fault.Wrap(kind, what+": "+size(s.end-s.off)+" of "+size(m.size), err)
			if kind == fault.Exists {
				return refused.Hint("another memory has pinned a page of the OS that these bytes lie in, or somebody else in this process has: let memories share no pages of %d bytes", os.Getpagesize())
			}
			return refused.
				Hint("raise the limit of locked memory (ulimit -l, LimitMEMLOCK= of a service) or that of the cgroup, pin less, or admit slow copies with AdmitPageable")
		}
	}
	p.stretches = append(p.stretches, added...)
	slices.SortFunc(p.stretches, func(x, y span) int { return int(min(max(x.off-y.off, -1), 1)) })
	if had := a.pinsOf(m); had != nil && len(had.stretches) > 0 {
		a.give(&a.pinned) // a memory counts once
	}
	m.publish(&p)
	return nil
}

// checkPins refuses bytes [off, off+n) of a memory at base that share bytes, or pages of
// the OS, with stretches.
func checkPins(stretches []span, base uintptr, off, n, page int64) error {
	first := func(b int64) int64 { return (int64(base) + b) / page }
	last := func(b int64) int64 { return (int64(base) + b - 1) / page }
	for _, s := range stretches {
		if off < s.end && s.off < off+n {
			return fault.New(fault.Exists, "pin host memory", "bytes [%d, %d) overlap [%d, %d), which are pinned", off, off+n, s.off, s.end)
		}
		if first(off) <= last(s.end) && first(s.off) <= last(off+n) {
			return fault.New(fault.Invalid, "pin host memory", "bytes [%d, %d) share a page of the OS with [%d, %d), which are pinned", off, off+n, s.off, s.end).
				Hint("cut where pages of the OS end, at multiples of %d bytes", page)
		}
	}
	return nil
}

// cutStretches divides bytes [off, off+n), which are more than 0, of a memory at base:
// where its pieces end, or without pieces at pages of the OS, and into no more than
// maxPieceBytes.
func cutStretches(pieces []Piece, base uintptr, off, n, page int64) []span {
	var cut []span
	for end := off + n; off < end; {
		s := span{off, end}
		for _, p := range pieces {
			if p.Off <= off && off < p.Off+p.Bytes {
				s.end = min(end, p.Off+p.Bytes)
			}
		}
		if s.end-s.off > maxPieceBytes {
			s.end = s.off + maxPieceBytes - (int64(base)+s.off)%page
		}
		cut = append(cut, s)
		off = s.end
	}
	return cut
}

// unpin gives back what accelerators have pinned of m, which is being freed, so that
// nothing can be pinned or copied meanwhile. With an error some of it is still pinned.
func (m *Memory) unpin() error {
	var left *pins
	var first error
	for p := m.pins.Swap(nil); p != nil; p = p.next {
		var kept []span
		for _, s := range p.stretches {
			if p.by.gone.Load() {
				break
			}
			if err := p.by.driver.Unregister(m.base + uintptr(s.off)); err != nil && !p.by.blame(err) {
				kept = append(kept, s)
				first = cmp.Or(first, error(fault.Wrap(fault.Device, "unpin "+size(s.end-s.off), err)))
			}
		}
		switch {
		case len(kept) > 0 && !p.by.gone.Load():
			left = &pins{by: p.by, stretches: kept, pageable: p.pageable, next: left}
		case len(p.stretches) > 0: // of a lost device the driver refuses everything; the pages are the OS's to find
			p.by.give(&p.by.pinned)
		}
	}
	m.pins.Store(left)
	if left == nil {
		return nil
	}
	return first
}

// AdmitPageable lets copies use host memory m that could not be pinned: they block the
// caller, and are slow. Kinds: fault.Invalid, fault.Closed.
func (a *Accelerator) AdmitPageable(m *Memory) error {
	if err := a.hostUse("admit pageable memory", m); err != nil {
		return err
	}
	defer m.unuse()
	m.pinning.Lock()
	defer m.pinning.Unlock()
	p := pins{by: a, pageable: true}
	if old := a.pinsOf(m); old != nil {
		p.stretches = old.stretches
	}
	m.publish(&p)
	return nil
}

// AllocHost returns zeroed host memory of h, populated and pinned, in pieces as
// [Host.AllocPieces] makes them. Free unpins it. Kinds: as [Host.AllocPieces] and
// [Accelerator.Pin].
func (a *Accelerator) AllocHost(h *Host, bytes, cut int64) (*Memory, error) {
	if err := a.usable(); err != nil {
		return nil, err
	}
	m, err := h.AllocPieces(bytes, cut)
	if err != nil {
		return nil, err
	}
	if err = m.Populate(0, bytes); err == nil {
		err = a.Pin(m, 0, bytes)
	}
	if err != nil {
		_ = m.Free() // nobody has seen it
		return nil, err
	}
	return m, nil
}

// ReachableMemory returns zeroed host memory of h that the copies of dev reach, in pieces
// as [Host.AllocPieces] makes them: pinned or, where dev refuses that, memory that it
// copies slowly. dev is an [Accelerator]. The error is that of its AllocHost, when neither
// can be had.
func ReachableMemory(dev interface {
	AllocHost(h *Host, bytes, cut int64) (*Memory, error)
	AdmitPageable(m *Memory) error
}, h *Host, bytes, cut int64,
) (*Memory, error) {
	m, err := dev.AllocHost(h, bytes, cut)
	if err == nil {
		return m, nil
	}
	m, allocErr := h.AllocPieces(bytes, cut)
	if allocErr != nil {
		return nil, err
	}
	if dev.AdmitPageable(m) != nil {
		return nil, errors.Join(err, m.Free())
	}
	return m, nil
}
