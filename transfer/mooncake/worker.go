package mooncake

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
)

// worker has the library: this process, or a child. All methods may be called from any
// goroutine, close after all others.
type worker interface {
	// named returns what peers know it by, and the release of the library.
	named() (name, release string)
	// add makes memory known by a number of the caller's choice: to peers, who may read
	// it, or as a destination of reads. It returns where the worker sees it.
	add(ctx context.Context, number uint32, m *device.Memory, remote bool) (base uint64, err error)
	// remove ends that. When it has returned, peers find nothing there any more.
	remove(ctx context.Context, number uint32) error
	// open finds an owner.
	open(ctx context.Context, name string) (uint32, error)
	// read runs requests, and returns when nothing of them is in flight. It gives up when
	// ctx ends, as soon as it can.
	read(ctx context.Context, segment uint32, requests []request) error
	// words fills answer with words. It returns when ctx ends at the latest.
	words(ctx context.Context, segment uint32, at []word, answer []byte) error
	// close ends it, and waits for what is in flight.
	close()
}

func appendWord(b []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(b, n) }

// inside is the worker in this process.
type inside struct {
	core  *core
	calls sync.WaitGroup // that are running, or were left alone
}

var _ worker = (*inside)(nil)

// newInside makes a worker in this process, whose environment it changes.
func newInside(o *Options) (*inside, error) {
	if err := setEnviron(o); err != nil {
		return nil, fault.Wrap(fault.Invalid, "environment", err)
	}
	c := o.config(o.Listen != "")
	c.batch = batchInside
	core, err := newCore(c)
	if err != nil {
		return nil, err
	}
	return &inside{core: core}, nil
}

func (w *inside) named() (name, release string) { return w.core.name, w.core.lib.version }

func (w *inside) add(_ context.Context, number uint32, m *device.Memory, remote bool) (uint64, error) {
	// Peers see a mapping of their own: it can't be written, and can be emptied.
	r := &region{base: m.Base(), bytes: m.Size()}
	if remote {
		pieces, fds, err := piecesOf(m, false)
		if err != nil {
			return 0, err
		}
		r, err = mapRegion(m.Size(), pieces, fds, false)
		closeAll(fds)
		if err != nil {
			return 0, err
		}
	}
	if err := w.core.add(number, r, remote); err != nil {
		r.unmap()
		return 0, err
	}
	return uint64(r.base), nil
}

func (w *inside) remove(_ context.Context, number uint32) error { return w.core.remove(number) }

func (w *inside) open(ctx context.Context, name string) (uint32, error) {
	found := make(chan uint32, 1)
	err := w.alone(ctx, func() error {
		number, err := w.core.open(name)
		found <- number
		return err
	})
	if err != nil {
		return 0, err
	}
	return <-found, nil
}

// alone runs f, and leaves it alone when ctx ends.
func (w *inside) alone(ctx context.Context, f func() error) error {
	over := make(chan error, 1)
	w.calls.Go(func() { over <- f() })
	select {
	case err := <-over:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *inside) read(ctx context.Context, segment uint32, requests []request) error {
	w.calls.Add(1)
	defer w.calls.Done()
	err := w.core.read(ctx.Done(), segment, requests)
	if late := ctx.Err(); late != nil && err != nil {
		return fault.Wrap(fault.Busy, "", errors.Join(late, err))
	}
	return err
}

func (w *inside) words(ctx context.Context, segment uint32, at []word, answer []byte) error {
	own := make([]byte, len(answer)) // what is left alone writes nothing of the caller's
	err := w.alone(ctx, func() error { return w.core.words(ctx.Done(), segment, at, own) })
	if err == nil {
		copy(answer, own)
	}
	return err
}

func (w *inside) close() {
	w.calls.Wait()
	w.core.close()
}

// piecesOf returns the memfds of m, opened again: for reading only, or for both. The
// caller closes them. Kind: fault.Unsupported.
func piecesOf(m *device.Memory, write bool) (pieces []piece, fds []int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
			fds = nil
		}
	}()
	of := m.Pieces()
	switch {
	case m.Size() == 0 || len(of) > 0 && len(of) <= maxPieces:
	case len(of) > maxPieces:
		return nil, nil, fault.New(fault.Unsupported, "memory", "of %d pieces, and %d can be handed over", len(of), maxPieces).
			Hint("make the pieces larger: device.HostOptions.PieceBytes")
	default:
		return nil, nil, fault.New(fault.Unsupported, "memory", "%d bytes of %s that no other process can map", m.Size(), m.Device()).
			Hint("have the host device make the cache's memory, or copy its pages to such a cache first")
	}
	for _, p := range of {
		var fd int
		if write {
			fd, err = unix.FcntlInt(uintptr(p.FD), unix.F_DUPFD_CLOEXEC, 0)
		} else {
			fd, err = handoff.ReadOnly(p.FD)
		}
		if err != nil {
			return nil, fds, fault.Wrap(fault.Unsupported, fmt.Sprintf("memory, its piece at %d", p.Off), err)
		}
		fds = append(fds, fd)
		pieces = append(pieces, piece{off: p.Off, fileOff: p.FileOff, bytes: p.Bytes})
	}
	return pieces, fds, nil
}
