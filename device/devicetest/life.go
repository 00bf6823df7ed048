package devicetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvferry/kvferry/device"
)

// Life is a short life of an accelerator, from its first memory to its close, in which
// everything is done that calls a driver. Whatever call of the driver fails, once, it
// ends, and these hold: each ticket that was taken is completed; bytes are there when
// every call and ticket says so; host memory can be freed.
//
// It returns the errors of calls, which may be, and apart from them what must not be.
func Life(a *device.Accelerator, host *device.Host) (refused, wrong []error) {
	l := &life{a: a, host: host}
	l.live()
	return l.refused, l.wrong
}

type life struct {
	a              *device.Accelerator
	host           *device.Host
	refused, wrong []error
}

// try notes an error of a call, and reports whether there was none.
func (l *life) try(what string, err error) bool {
	if err != nil {
		l.refused = append(l.refused, fmt.Errorf("%s: %w", what, err))
	}
	return err == nil
}

func (l *life) must(what string, err error) {
	if err != nil {
		l.wrong = append(l.wrong, fmt.Errorf("%s: %w", what, err))
	}
}

const lifeBytes = 64 << 10

func (l *life) live() {
	var tickets []*device.Ticket
	var memories []*device.Memory
	var streams []device.Stream
	for _, name := range []string{"a", "b"} {
		s, err := l.a.NewStream(name)
		if l.try("stream", err) {
			streams = append(streams, s)
		}
	}
	if s, err := l.a.WrapStream("legacy", device.LegacyStream); l.try("wrapped stream", err) {
		streams = append(streams, s)
	}
	alloc := func(what string, m *device.Memory, err error) *device.Memory {
		if l.try(what, err) {
			memories = append(memories, m)
		}
		return m
	}
	var dev [2]*device.Memory
	for i := range dev {
		m, err := l.a.Alloc(lifeBytes)
		dev[i] = alloc("alloc", m, err)
	}
	in, err := l.a.AllocHost(l.host, lifeBytes, 1<<14)
	in = alloc("host memory", in, err)
	out, err := l.a.AllocHost(l.host, lifeBytes, 1<<14)
	out = alloc("host memory", out, err)
	want := make([]byte, lifeBytes)
	for i := range want {
		want[i] = byte(i>>8)*7 ^ byte(i)
	}
	if in != nil {
		copy(in.Bytes(), want)
	}

	// In by batches, across by boxes, out by linear copies, on all streams in turn.
	e, err := l.a.NewEvent()
	if !l.try("event", err) {
		e = nil
	}
	good := e != nil && len(streams) == 3 && dev[0] != nil && dev[1] != nil && in != nil && out != nil
	step := func(i int, copies func(s device.Stream) error) {
		s := streams[i%len(streams)]
		ok := l.try("wait", s.Wait(e))
		// Without the event before it, it must not run.
		ok = ok && l.try("copy", copies(s))
		ticket := device.NewTicket()
		if l.try("signal", s.Signal(ticket)) {
			tickets = append(tickets, ticket)
		} else {
			ok = false
		}
		good = l.try("record", s.Record(e)) && ok && good
	}
	if e != nil && len(streams) > 0 {
		for _, engine := range l.a.Engines() {
			step(0, func(s device.Stream) error {
				return l.a.CopyBatch(s, engine, chopped(dev[0], in, 100), device.StreamOrder, 7)
			})
			step(1, func(s device.Stream) error {
				return l.a.CopyBoxes(s, engine, []device.Box{
					{Dst: dev[1], Src: dev[0], Width: 64, Rows: 16, Slices: 32, DstPitch: 64, SrcPitch: 128, DstSlice: 1024, SrcSlice: 2048},
					{Dst: dev[1], DstOff: 32 << 10, Src: dev[0], SrcOff: 64, Width: 64, Rows: 512, Slices: 1, DstPitch: 64, SrcPitch: 128},
				})
			})
			step(2, func(s device.Stream) error { return s.Copy(chopped(out, dev[1], 5000)) })
		}
	}
	for _, ticket := range tickets {
		good = l.try("ticket", ticket.Wait(context.Background())) && good
	}
	if len(streams) > 0 {
		l.try("sync", streams[len(streams)-1].Sync(context.Background()))
	}
	if e != nil {
		l.must("event", e.Sync(context.Background()))
	}
	if good {
		got := make([]byte, lifeBytes)
		for i := range got {
			half, row, at := i>>15, i>>6&511, i&63
			got[row<<7|half<<6|at] = out.Bytes()[i]
		}
		if !bytes.Equal(got, want) {
			l.wrong = append(l.wrong, errors.New("all is said to be well, and the bytes are wrong"))
		}
	}
	for _, s := range streams {
		l.try("close of a stream", s.Close())
		l.try("close of a stream, again", s.Close())
	}
	for _, m := range memories {
		if err := m.Free(); !l.try("free", err) && m.Bytes() != nil {
			l.must("free of memory that stayed pinned", m.Free())
		}
	}
	l.try("close", l.a.Close())
	for i, ticket := range tickets {
		if ticket.Complete(os.ErrDeadlineExceeded) {
			l.wrong = append(l.wrong, fmt.Errorf("ticket %d was never completed", i))
		}
	}
}

// chopped are ops of up to n bytes for all of two memories.
func chopped(dst, src *device.Memory, n int64) (ops []device.Op) {
	for off := int64(0); off < lifeBytes; off += n {
		ops = append(ops, device.Op{Dst: dst, Src: src, DstOff: off, SrcOff: off, Bytes: min(n, lifeBytes-off)})
	}
	return ops
}
