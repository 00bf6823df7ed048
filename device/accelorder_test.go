package device_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// lab is an accelerator over the driver of tests, and pages on it and on the host.
type lab struct {
	*device.Accelerator
	d       *devicetest.Driver
	host    *device.Host
	streams []device.Stream
	pages   []*device.Memory
	broken  bool // streams may fail
	tb      testing.TB
}

func newLab(tb testing.TB, o devicetest.Options) *lab {
	tb.Helper()
	host, err := device.OpenHost(device.HostOptions{})
	must(tb, err)
	l := &lab{host: host, tb: tb}
	tb.Cleanup(func() { must(tb, host.Close()) })
	l.Accelerator, l.d = devicetest.OpenAccelerator(tb, o)
	tb.Cleanup(func() {
		for _, s := range l.streams {
			if err := s.Close(); err != nil && !l.broken {
				tb.Error(err)
			}
		}
		for _, m := range l.pages {
			if err := m.Free(); err != nil && !errors.Is(err, fault.Closed) {
				tb.Error(err)
			}
		}
	})
	return l
}

func (l *lab) page(n int64) *device.Memory {
	l.tb.Helper()
	m, err := l.Alloc(n)
	must(l.tb, err)
	l.pages = append(l.pages, m)
	return m
}

func (l *lab) hostPage(n int64) *device.Memory {
	l.tb.Helper()
	m, err := l.AllocHost(l.host, n, 1)
	must(l.tb, err)
	l.pages = append(l.pages, m)
	return m
}

func (l *lab) stream(name string) device.Stream {
	l.tb.Helper()
	s, err := l.NewStream(name)
	must(l.tb, err)
	l.streams = append(l.streams, s)
	return s
}

func (l *lab) event() device.Event {
	l.tb.Helper()
	e, err := l.NewEvent()
	must(l.tb, err)
	return e
}

func (l *lab) handle(s device.Stream) device.StreamHandle {
	l.tb.Helper()
	h, ok := l.Handle(s)
	if !ok {
		l.tb.Fatal("no stream of the device")
	}
	return h
}

func op(dst, src *device.Memory) []device.Op {
	return []device.Op{{Dst: dst, Src: src, Bytes: min(dst.Size(), src.Size())}}
}

// until waits for what must come about.
func until(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); runtime.Gosched() {
		if time.Now().After(end) {
			tb.Fatalf("it is not so that %s", what)
		}
	}
}

// What orders two accesses, and what does not. The first copy has run when the second is
// enqueued: only the check can tell that nobody had made sure.
func TestRaces_AreFoundWhateverTheTiming(t *testing.T) {
	const size = 4096
	type world struct {
		*lab
		a, b           device.Stream
		page, in, out  *device.Memory
		host           *device.Memory
		ticket         *device.Ticket
		event, another device.Event
	}
	reads := func(w *world) []device.Op { return op(w.out, w.page) }
	writes := func(w *world) []device.Op { return op(w.page, w.in) }
	accesses := map[string]struct {
		first, second func(*world) []device.Op
		race          bool
	}{
		"read after write":  {writes, reads, true},
		"write after read":  {reads, writes, true},
		"write after write": {writes, writes, true},
		"read after read":   {reads, func(w *world) []device.Op { return op(w.host, w.page) }, false},
	}
	orders := map[string]struct {
		by func(w *world) error
		ok bool
	}{
		"nothing":                     {func(*world) error { return nil }, false},
		"an event never recorded":     {func(w *world) error { return w.b.Wait(w.another) }, false},
		"an event":                    {func(w *world) error { return w.b.Wait(w.event) }, true},
		"the event, seen to be done":  {func(w *world) error { until(w.tb, "the event is done", w.event.Done); return nil }, true},
		"sync of the event":           {func(w *world) error { return w.event.Sync(context.Background()) }, true},
		"sync of the stream":          {func(w *world) error { return w.a.Sync(context.Background()) }, true},
		"sync of the wrong stream":    {func(w *world) error { return w.b.Sync(context.Background()) }, false},
		"the ticket":                  {func(w *world) error { return w.ticket.Wait(context.Background()) }, true},
		"the ticket's channel":        {func(w *world) error { <-w.ticket.Done(); return nil }, true},
		"a channel asked for earlier": {func(w *world) error { return w.ticket.Wait(context.Background()) }, true},
		"close":                       {func(w *world) error { return w.a.Close() }, true},
		"a third stream": {func(w *world) error {
			c := w.stream("c")
			if err := c.Wait(w.event); err != nil {
				return err
			}
			if err := c.Record(w.another); err != nil {
				return err
			}
			return w.b.Wait(w.another)
		}, true},
	}
	for what, access := range accesses {
		for how, order := range orders {
			t.Run(what+"/"+how, func(t *testing.T) {
				l := newLab(t, devicetest.Options{})
				w := &world{
					lab: l, a: l.stream("a"), b: l.stream("b"), page: l.page(size), in: l.page(size), out: l.page(size),
					host: l.hostPage(size), ticket: device.NewTicket(), event: l.event(), another: l.event(),
				}
				l.d.Poke(w.page.Base(), bytes.Repeat([]byte{1}, size))
				l.d.Poke(w.in.Base(), bytes.Repeat([]byte{2}, size))
				ops := access.first(w)
				if how == "a channel asked for earlier" {
					w.ticket.Done()
				}
				must(t, w.a.Copy(ops))
				must(t, w.a.Record(w.event))
				must(t, w.a.Signal(w.ticket))
				until(t, "the first copy has run", func() bool {
					b := make([]byte, size)
					l.d.Peek(ops[0].Dst.Base(), b)
					return bytes.Count(b, b[:1]) == size && (b[0] == 1 || b[0] == 2) && b[0] != 0xDE
				})
				must(t, order.by(w))
				must(t, w.b.Copy(access.second(w)))
				must(t, w.b.Sync(context.Background()))
				got := l.d.TakeRaces()
				if want := access.race && !order.ok; (len(got) > 0) != want {
					t.Errorf("races %q, want any: %v", got, want)
				}
			})
		}
	}
}

func TestRaces_OfTheHost(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	const size = 8192
	page, host, s := l.page(size), l.hostPage(size), l.stream("s")
	check := func(what string, want bool) {
		t.Helper()
		if got := l.d.TakeRaces(); (len(got) > 0) != want {
			t.Errorf("%s: races %q, want any: %v", what, got, want)
		}
	}
	l.d.HostWrite(host, 0, size)
	must(t, s.Copy([]device.Op{{Dst: page, Src: host, Bytes: size / 2}}))
	check("a copy of what the host has written", false)
	l.d.HostRead(host, 0, size)
	check("a read beside a read", false)
	l.d.HostWrite(host, size/2, size/2)
	check("a write of bytes that no copy reads", false)
	l.d.HostWrite(host, 100, 8)
	check("a write under a copy", true)
	must(t, s.Sync(context.Background()))
	l.d.HostWrite(host, 0, size)
	check("a write after the copy", false)
	must(t, s.Copy(op(host, page)))
	l.d.HostRead(host, 0, 1)
	check("a read before the copy is known to have run", true)
	must(t, s.Sync(context.Background()))
	l.d.HostRead(host, 0, size)
	check("a read after it", false)
	l.d.HostRead(host, 5, 0)
	l.d.HostRead(page, 0, size)
	check("a read of what nobody writes", false)
}

// A batch in any order may read its sources before what was queued ahead of it.
func TestRaces_OfSourcesReadInAnyOrder(t *testing.T) {
	for _, order := range []device.SourceOrder{device.StreamOrder, device.AnyOrder} {
		t.Run(order.String(), func(t *testing.T) {
			l := newLab(t, devicetest.Options{})
			page, host, out, s := l.page(4096), l.hostPage(4096), l.page(4096), l.stream("s")
			must(t, s.Copy(op(host, page)))
			must(t, l.CopyBatch(s, l.Engines()[0], op(out, host), order, 0))
			if got := l.d.TakeRaces(); (len(got) > 0) != (order == device.AnyOrder) {
				t.Errorf("races %q", got)
			}
			must(t, s.Sync(context.Background()))
			must(t, l.CopyBatch(s, l.Engines()[0], op(out, host), order, 0))
			if got := l.d.TakeRaces(); len(got) > 0 {
				t.Errorf("races %q, after the writer was waited for", got)
			}
			must(t, s.Copy(op(host, page))) // behind the batch: in order
			if got := l.d.TakeRaces(); len(got) > 0 {
				t.Errorf("races %q with what is queued behind", got)
			}
		})
	}
}

// Rows of one stream may lie between those of another.
func TestRaces_NeedSharedBytes(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	const n = 1 << 16
	a, b, src, dst := l.stream("a"), l.stream("b"), l.page(n), l.page(n)
	box := device.Box{Dst: dst, Src: src, Width: 64, Rows: 100, Slices: 1, DstPitch: 128, SrcPitch: 128}
	must(t, l.CopyBoxes(a, l.Engines()[0], []device.Box{box}))
	box.DstOff = 64
	must(t, l.CopyBoxes(b, l.Engines()[0], []device.Box{box}))
	if got := l.d.TakeRaces(); len(got) > 0 {
		t.Errorf("races %q between rows that share no byte", got)
	}
	box.DstOff = 63
	must(t, l.CopyBoxes(b, l.Engines()[0], []device.Box{box}))
	if got := fmt.Sprint(l.d.TakeRaces()); !strings.Contains(got, "writes bytes") {
		t.Errorf("races %s, of rows that share one", got)
	}
}
