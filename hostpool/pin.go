package hostpool

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// pinner is a device whose copies reach host memory that it was told of, and no other: a
// [device.Accelerator]. Pinned memory is copied as fast as the link allows, and the
// copies block nobody; other memory is copied in turns by the driver, while the caller
// waits.
type pinner interface {
	Pin(m *device.Memory, off, n int64) error
	AdmitPageable(m *device.Memory) error
}

// pins is what is pinned of a pool's memory. Only the growth changes it.
type pins struct {
	by    pinner // nil: the device copies to and from any memory
	must  bool   // what can't be pinned is not used
	gave  bool   // by has refused, and copies without
	until int64  // from the start of the memory: pinned, or not and used all the same

	pinned, pageable atomic.Int64 // bytes up to until
}

// maxUnit is the most bytes by which the pool grows at least, for the sake of ends that
// suit the OS as well: see unit.
const maxUnit = 1 << 30

// unit is the least number of pages that end where a page of the OS ends, too. Pinned
// stretches are made of it: two of them can't share a page of the OS, and no page of the
// pool lies in two, which would make two copies of one. It gives way for pages so large
// and odd that it would be more than maxUnit.
func unit(pageBytes int64) int {
	n := int64(os.Getpagesize())
	for rest := pageBytes; n > 1 && rest%2 == 0; rest /= 2 {
		n /= 2
	}
	if n > maxUnit/pageBytes {
		return 1
	}
	return int(n)
}

// step is how many pages the pool grows by at a time, for about that many bytes.
func (p *Pool) step(bytes int64) int {
	n := max(1, int(bytes/p.PageBytes()))
	if p.pins.by == nil {
		return n
	}
	u := unit(p.PageBytes())
	return (n + u - 1) / u * u
}

// pin pins the memory up to end, which was populated, and on to the end of the OS's page,
// stretch after stretch and none in two pieces. When the device refuses, the pool goes on
// with memory that is not pinned, unless it must not.
func (p *Pool) pin(end int64) error {
	if p.pins.by == nil {
		return nil
	}
	page := int64(os.Getpagesize())
	end = min(p.memory.Size(), (end+page-1)/page*page)
	for _, piece := range p.memory.Pieces() {
		from, to := max(p.pins.until, piece.Off), min(end, piece.Off+piece.Bytes)
		if from >= to {
			continue
		}
		if err := p.pinStretch(from, to-from); err != nil {
			return err
		}
		p.pins.until = to
	}
	return nil
}

func (p *Pool) pinStretch(off, n int64) error {
	if p.pins.gave {
		p.pins.pageable.Add(n)
		return nil
	}
	err := p.pins.by.Pin(p.memory, off, n)
	if err == nil {
		p.pins.pinned.Add(n)
		return nil
	}
	if lost, ok := errors.AsType[*device.DriverError](err); p.pins.must || ok && lost.Class == device.Lost {
		return err
	}
	if admitErr := p.pins.by.AdmitPageable(p.memory); admitErr != nil {
		return errors.Join(err, admitErr)
	}
	p.log.LogAttrs(context.Background(), slog.LevelWarn, "host pool is not pinned: its copies block, and are slow",
		slog.Int64("pinned_bytes", off), slog.Int64("bytes", p.memory.Size()), slog.Any("error", err))
	p.pins.gave = true
	p.pins.pageable.Add(n)
	return nil
}

// sealer is a copier that may read sealed pages before the stream has come to the copy,
// which lets a device begin at once: copier.Accelerated.
type sealer interface {
	CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error)
}

// copyPages enqueues the copy of pairs along r. Kept pages have been sealed since their
// copy was done, so whoever reads them needs to wait for nothing; where they are pinned,
// the device is told.
func (p *Pool) copyPages(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	if c, ok := p.copier.(sealer); ok && r == p.reload && p.pins.by != nil && p.pins.pageable.Load() == 0 {
		return c.CopySealed(s, r, pairs)
	}
	return p.copier.Copy(s, r, pairs)
}

// Pinned returns how many bytes of the pool's memory were pinned for its device so far,
// and how many are used without, since the device refused (see Options.MustPin). Both are
// 0 with a device that copies to and from any memory, such as the host.
func (p *Pool) Pinned() (pinned, pageable int64) { return p.pins.pinned.Load(), p.pins.pageable.Load() }
