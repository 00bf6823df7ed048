package cudaipc

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
)

// handle names memory or an event to other processes.
type handle [handleBytes]byte

const handleBytes = 64

// piece is memory behind one descriptor.
type piece struct {
	fd    int
	bytes int64
}

// opened is memory of another process.
type opened struct {
	addr  uintptr
	bytes int64 // 0: the library does not say
	close func() error
}

// event is an event of another process.
type event struct {
	done  func() (bool, error)
	close func() error
}

// pollLeast and pollMost are how often an event is asked for, at first and later.
const (
	pollLeast = 20 * time.Microsecond
	pollMost  = time.Millisecond
)

// wait waits for the event's latest recording, until ctx ends. No stream waits for it:
// work of another process is over when that pleases.
func (e *event) wait(ctx context.Context) error {
	for pause := pollLeast; ; pause = min(2*pause, pollMost) {
		if done, err := e.done(); done || err != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sharing is what the drivers of both vendors do for other processes: see there.
type sharing interface {
	exportMemory(addr uintptr) (h handle, offset, bytes int64, err error)
	exportPieces(addr uintptr, bytes int64, most int) (pieces []piece, offset int64, err error)
	openMemory(h handle) (opened, error)
	openPieces(pieces []piece) (opened, error)
	openEvent(h handle) (event, error)
	allocShared(bytes int64) (addr uintptr, free func() error, err error)
}

// sharingOf returns the name of the engine for a device, and how it shares. Kind:
// fault.Unsupported.
func sharingOf(a *device.Accelerator) (string, sharing, error) {
	switch d := a.Driver().(type) {
	case *cuda.Driver:
		return "cudaipc", nvidia{d}, nil
	case *hip.Driver:
		return "hipipc", amd{d}, nil
	default:
		return "", nil, fault.New(fault.Unsupported, a.Name(), "its driver (%T) shares no memory with other processes", d)
	}
}

type nvidia struct{ *cuda.Driver }

func (d nvidia) exportMemory(addr uintptr) (handle, int64, int64, error) {
	e, err := d.ExportMemory(addr)
	return handle(e.Handle), e.Offset, e.Bytes, err
}

func (d nvidia) exportPieces(addr uintptr, bytes int64, most int) (pieces []piece, offset int64, err error) {
	all, offset, err := d.ExportPieces(addr, bytes, most)
	for _, p := range all {
		pieces = append(pieces, piece{p.FD, p.Bytes})
	}
	return pieces, offset, err
}

func (d nvidia) openMemory(h handle) (opened, error) {
	o, err := d.OpenMemory(cuda.Handle(h))
	if err != nil {
		return opened{}, err
	}
	return opened{o.Addr, o.Bytes, o.Close}, nil
}

func (d nvidia) allocShared(bytes int64) (addr uintptr, free func() error, err error) {
	s, err := d.AllocShared(bytes)
	if err != nil {
		return 0, nil, err
	}
	return s.Addr, s.Close, nil
}

func (d nvidia) openPieces(pieces []piece) (opened, error) {
	all := make([]cuda.Piece, len(pieces))
	for i, p := range pieces {
		all[i] = cuda.Piece{FD: p.fd, Bytes: p.bytes}
	}
	s, err := d.ImportPieces(all)
	if err != nil {
		return opened{}, err
	}
	return opened{s.Addr, s.Bytes, s.Close}, nil
}

func (d nvidia) openEvent(h handle) (event, error) {
	e, err := d.OpenEvent(cuda.Handle(h))
	if err != nil {
		return event{}, err
	}
	return event{func() (bool, error) { return d.EventDone(e.Event) }, e.Close}, nil
}

type amd struct{ *hip.Driver }

func (d amd) exportMemory(addr uintptr) (handle, int64, int64, error) {
	e, err := d.ExportMemory(addr)
	return handle(e.Handle), e.Offset, e.Bytes, err
}

func (d amd) exportPieces(addr uintptr, bytes int64, most int) (pieces []piece, offset int64, err error) {
	all, offset, err := d.ExportPieces(addr, bytes, most)
	for _, p := range all {
		pieces = append(pieces, piece{p.FD, p.Bytes})
	}
	return pieces, offset, err
}

func (d amd) openMemory(h handle) (opened, error) {
	o, err := d.OpenMemory(hip.Handle(h))
	if err != nil {
		return opened{}, err
	}
	return opened{o.Addr, o.Bytes, o.Close}, nil
}

func (d amd) allocShared(bytes int64) (addr uintptr, free func() error, err error) {
	s, err := d.AllocShared(bytes)
	if err != nil {
		return 0, nil, err
	}
	return s.Addr, s.Close, nil
}

func (d amd) openPieces(pieces []piece) (opened, error) {
	all := make([]hip.Piece, len(pieces))
	for i, p := range pieces {
		all[i] = hip.Piece{FD: p.fd, Bytes: p.bytes}
	}
	s, err := d.ImportPieces(all)
	if err != nil {
		return opened{}, err
	}
	return opened{s.Addr, s.Bytes, s.Close}, nil
}

func (d amd) openEvent(h handle) (event, error) {
	e, err := d.OpenEvent(hip.Handle(h))
	if err != nil {
		return event{}, err
	}
	return event{func() (bool, error) { return d.EventDone(e.Event) }, e.Close}, nil
}
