package device_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// isRefusal checks that err is want, a driver's error, as one of the device.
func isRefusal(tb testing.TB, what string, err error, want *device.DriverError) {
	tb.Helper()
	var e *device.DriverError
	if !errors.Is(err, fault.Device) || !errors.As(err, &e) || e != want {
		tb.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func scattered(dst, src *device.Memory, n int) []device.Op {
	ops := make([]device.Op, n)
	for i := range ops {
		ops[i] = device.Op{Dst: dst, Src: src, DstOff: int64(i) * 64, SrcOff: int64(i) * 64, Bytes: 32}
	}
	return ops
}

// A copy that the driver refuses may have been queued in part. What it uses stays in use
// until the stream has come past it, and the stream is well.
func TestAccelerator_KeepsMemoryOfACopyThatWasRefusedHalfway(t *testing.T) {
	for _, call := range []string{"CopyRects", "CopyBatch"} {
		for _, class := range []device.Class{device.Failed, device.Retry} {
			t.Run(fmt.Sprint(call, "/", class), func(t *testing.T) {
				o := devicetest.Options{}
				if call == "CopyRects" {
					o.Engines = []devicetest.EngineOption{{Name: "linear"}}
				}
				l := newLab(t, o)
				s, dst, src := l.stream("s"), l.page(64*1000), l.page(64*1000)
				release := l.d.Hold(l.handle(s))
				skip := map[string]int{"CopyRects": 500, "CopyBatch": 0}[call]
				want := l.d.Refuse(call, skip, class)
				isRefusal(t, "copy", s.Copy(scattered(dst, src, 1000)), want)
				for _, m := range []*device.Memory{dst, src} {
					if err := m.Free(); !errors.Is(err, fault.Busy) {
						t.Errorf("free under half a copy: %v", err)
					}
				}
				release()
				until(t, "the memory is given back", func() bool { return dst.Free() == nil })
				must(t, s.Copy(scattered(src, l.page(64*1000), 10)))
				must(t, s.Sync(context.Background()))
			})
		}
	}
}

// Without an event behind a copy, its memory is given back when the stream has drained.
func TestAccelerator_GivesMemoryBackWhenNoEventCanBeRecorded(t *testing.T) {
	for _, call := range []string{"NewEvent", "Record"} {
		t.Run(call, func(t *testing.T) {
			l := newLab(t, devicetest.Options{})
			s, other, dst, src := l.stream("s"), l.stream("other"), l.page(64), l.page(64)
			e := l.event()
			release := l.d.Hold(l.handle(s))
			_ = l.d.Refuse(call, 0, device.Retry)
			must(t, s.Copy(op(dst, src))) // it is queued, whatever comes behind it
			if err := dst.Free(); !errors.Is(err, fault.Busy) {
				t.Errorf("free under a copy: %v", err)
			}
			ticket := device.NewTicket()
			want := l.d.Refuse(call, 0, device.Retry)
			isRefusal(t, "signal", s.Signal(ticket), want)
			want = l.d.Refuse(call, 0, device.Retry)
			isRefusal(t, "record", s.Record(e), want)
			if done, _ := ticket.Poll(); done || !e.Done() {
				t.Error("refused calls have done something")
			}
			must(t, s.Record(e))
			must(t, other.Wait(e))
			must(t, s.Signal(ticket))
			release()
			must(t, ticket.Wait(context.Background()))
			must(t, dst.Free())
			must(t, s.Sync(context.Background()))
		})
	}
}

func TestAccelerator_WaitThatIsRefusedIsNoWait(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	a, b, e := l.stream("a"), l.stream("b"), l.event()
	release := l.d.Hold(l.handle(a))
	must(t, a.Copy(op(l.page(64), l.page(64))))
	must(t, a.Record(e))
	want := l.d.Refuse("Wait", 0, device.Failed)
	isRefusal(t, "wait", b.Wait(e), want)
	must(t, b.Sync(context.Background())) // it waits for nothing
	must(t, b.Wait(e))
	release()
	must(t, b.Sync(context.Background()))
}

// When the driver can't say how work stands, the stream has failed, and what it uses is
// given back when it has drained.
func TestAccelerator_FailsAStreamThatTheDriverKnowsNothingOf(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	l.broken = true
	s, other, dst, src := l.stream("s"), l.stream("other"), l.page(64), l.page(64)
	release := l.d.Hold(l.handle(s))
	must(t, s.Copy(op(dst, src)))
	ticket := device.NewTicket()
	must(t, s.Signal(ticket))
	want := l.d.Refuse("EventDone", 0, device.Failed)
	must(t, other.Copy(op(l.page(64), l.page(64)))) // has the reaper ask
	until(t, "the stream has failed", func() bool { return s.Copy(nil) != nil })
	isRefusal(t, "copy", s.Copy(nil), want)
	if done, _ := ticket.Poll(); done || !errors.Is(dst.Free(), fault.Busy) {
		t.Error("the ticket is done, or the memory free, while the copy is to come")
	}
	release()
	isRefusal(t, "ticket", ticket.Wait(context.Background()), want)
	must(t, dst.Free())
	isRefusal(t, "sync", s.Sync(context.Background()), want)
	isRefusal(t, "close", s.Close(), want)
	must(t, other.Sync(context.Background()))
}

// Whatever call finds that the device is lost: everything fails with that error, nothing
// hangs, and all can be closed.
func TestAccelerator_LostInAnyCall(t *testing.T) {
	for _, mode := range []devicetest.Mode{devicetest.Eager, devicetest.Lazy, devicetest.Random} {
		for _, call := range []string{"Alloc", "Free", "Register", "Unregister", "NewStream", "CloseStream", "NewEvent", "Record", "Wait", "CopyRects", "CopyBatch", "EventDone", "SyncEvent", "lose"} {
			t.Run(fmt.Sprint(mode, "/", call), func(t *testing.T) {
				l := newLab(t, devicetest.Options{Mode: mode, Seed: 7, Unordered: true})
				l.broken = true
				a, b, dst, src, e := l.stream("a"), l.stream("b"), l.page(6400), l.page(6400), l.event()
				host := l.hostPage(4096)
				var want *device.DriverError
				release := l.d.Hold(l.handle(a))
				if call == "lose" {
					want = l.d.Lose()
				} else {
					want = l.d.Refuse(call, 0, device.Lost)
				}
				var tickets []*device.Ticket
				for i := range 10 {
					_ = a.Copy(scattered(dst, src, 100))
					_ = a.Copy(op(host, dst))
					ticket := device.NewTicket()
					if a.Signal(ticket) == nil {
						tickets = append(tickets, ticket)
					}
					if i == 5 {
						release()
					}
					_, _ = a.Record(e), b.Wait(e)
					if m, err := l.Alloc(64); err == nil {
						if b.Copy(op(m, dst)) == nil && i > 5 {
							_ = b.Sync(context.Background())
						}
						l.pages = append(l.pages, m)
						_ = m.Free()
					}
					if s, err := l.NewStream("more"); err == nil {
						_ = s.Close()
					}
					if m, err := l.AllocHost(l.host, 64, 1); err == nil {
						_ = m.Free()
					}
				}
				if l.Lost() == nil && call == "SyncEvent" { // which is only called when all else is quiet
					want = l.d.Lose()
					_ = a.Copy(op(host, dst))
				}
				isRefusal(t, "lost", l.Lost(), want)
				for _, ticket := range tickets {
					if err := ticket.Wait(context.Background()); err != nil {
						isRefusal(t, "ticket", err, want)
					}
				}
				for _, s := range []device.Stream{a, b} {
					isRefusal(t, "sync", s.Sync(context.Background()), want)
					isRefusal(t, "copy", s.Copy(nil), want)
					isRefusal(t, "signal", s.Signal(device.NewTicket()), want)
					isRefusal(t, "close", s.Close(), want)
				}
				_, err := l.Alloc(1)
				isRefusal(t, "alloc", err, want)
				_, err = l.AllocHost(l.host, 1, 1)
				isRefusal(t, "pinned memory", err, want)
				if !e.Done() {
					t.Error("an event of a lost device is not done")
				}
			})
		}
	}
}

func TestAccelerator_PinThatFailsChangesNothing(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	page := int64(os.Getpagesize())
	host, err := device.OpenHost(device.HostOptions{PieceBytes: page})
	must(t, err)
	m, err := host.Alloc(4 * page)
	must(t, err)
	want := l.d.Refuse("Register", 2, device.Failed)
	err = l.Pin(m, 0, 4*page)
	isRefusal(t, "pin", err, want)
	if fault.RemedyOf(err) == "" {
		t.Error("no remedy is named")
	}
	must(t, l.Pin(m, 0, 4*page)) // nothing is left pinned
	must(t, m.Free())
	must(t, host.Close())

	want = l.d.Refuse("Register", 0, device.Failed)
	_, err = l.AllocHost(l.host, 100, 1)
	isRefusal(t, "pinned memory", err, want)
}

func TestAccelerator_PageableMemoryIsAdmittedAndCounted(t *testing.T) {
	for mode := range devicetest.Mode(devicetest.Modes) {
		l := newLab(t, devicetest.Options{Mode: mode, Pageable: true})
		const page = 64 << 10
		m, err := l.host.Alloc(3 * page)
		must(t, err)
		l.pages = append(l.pages, m)
		dev, s := l.page(3*page), l.stream("s")
		must(t, l.AdmitPageable(m))
		must(t, l.Pin(m, page, page))
		for i := range m.Bytes() {
			m.Bytes()[i] = byte(i * 7 / 3)
		}
		must(t, s.Copy(op(dev, m)))
		must(t, l.CopyBoxes(s, l.Engines()[0], []device.Box{{
			Dst: dev, Src: m, Width: 100, Rows: 30, Slices: 1, DstPitch: 5000, SrcPitch: 5000,
		}}))
		must(t, s.Sync(context.Background()))
		got := devicetest.Read(t, l.Accelerator, dev, 0, 3*page)
		if string(got) != string(m.Bytes()) {
			t.Errorf("%v: the bytes are not those of the host", mode)
		}
		// The op in three parts, of which two are pageable; rows 0–13 and 27–29 of the
		// box are, by halves.
		if n := l.Calls().Pageable; n < 4 || n != uint64(l.d.PageableCopies()) {
			t.Errorf("%v: %d pageable copies counted, %d made", mode, n, l.d.PageableCopies())
		}
	}
}

func TestAccelerator_CloseIsRefusedInUse(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	m := l.hostPage(100)
	if err := l.Close(); !errors.Is(err, fault.Busy) {
		t.Errorf("close with pinned memory: %v", err)
	}
	must(t, m.Free())
	must(t, l.Close())
	must(t, l.Close())
	for what, call := range map[string]func() error{
		"wrap":        func() error { _, err := l.Wrap(100, 1); return err },
		"wrap stream": func() error { _, err := l.WrapStream("s", device.LegacyStream); return err },
		"pin":         func() error { return l.Pin(device.WrapHost(make([]byte, 10)), 0, 10) },
		"admit":       func() error { return l.AdmitPageable(device.WrapHost(make([]byte, 10))) },
		"alloc host":  func() error { _, err := l.AllocHost(l.host, 10, 1); return err },
	} {
		if err := call(); !errors.Is(err, fault.Closed) {
			t.Errorf("%s after close: %v", what, err)
		}
	}
}

func TestOpenAccelerator_RefusesDriversThatCannotCopy(t *testing.T) {
	_, err := device.OpenAccelerator(nil, device.AcceleratorOptions{})
	if !errors.Is(err, fault.Invalid) {
		t.Errorf("no driver: %v", err)
	}
	d := devicetest.NewDriver(devicetest.Options{Engines: []devicetest.EngineOption{}})
	if _, err := device.OpenAccelerator(d, device.AcceleratorOptions{}); !errors.Is(err, fault.Invalid) {
		t.Errorf("no engine: %v", err)
	}
	must(t, d.Close())
}

// Streams and memory of another device are refused, although both are accelerators.
func TestAccelerator_RefusesWhatBelongsToAnother(t *testing.T) {
	l, m := newLab(t, devicetest.Options{}), newLab(t, devicetest.Options{Name: "fake:1"})
	s, dst, src, theirs := m.stream("theirs"), l.page(64), l.page(64), m.page(64)
	for what, err := range map[string]error{
		"boxes":  l.CopyBoxes(s, l.Engines()[0], nil),
		"batch":  l.CopyBatch(s, l.Engines()[0], op(dst, src), device.StreamOrder, 0),
		"engine": l.CopyBoxes(l.stream("ours"), m.Engines()[0], nil),
	} {
		if !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if l.On(s) || !m.On(s) {
		t.Error("a stream is taken for one of another device")
	}
	for _, ops := range [][]device.Op{op(dst, theirs), op(theirs, src)} {
		if err := l.stream("s").Copy(ops); !errors.Is(err, fault.Unsupported) {
			t.Errorf("memory of another device: %v", err)
		}
	}
	// Pinned by one is not pinned by the other.
	host := m.hostPage(64)
	if err := l.stream("s").Copy(op(dst, host)); !errors.Is(err, fault.Unsupported) {
		t.Errorf("memory that another has pinned: %v", err)
	}
}

// The reaper sleeps when there is nothing to wait for, and leaves the wait for one
// stream to a helper.
func TestAccelerator_SleepsWhenIdle(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	s, dst, src := l.stream("s"), l.page(64), l.page(64)
	asleep := func(blocking bool) func() bool {
		return func() bool {
			parked, by := device.Parked(l.Accelerator)
			return parked && by == blocking
		}
	}
	until(t, "an idle device sleeps", asleep(false))
	release := l.d.Hold(l.handle(s))
	must(t, s.Copy(op(dst, src)))
	until(t, "the wait for one stream blocks", asleep(true))
	other := l.stream("other")
	must(t, other.Copy(op(l.page(64), src))) // which wakes it
	must(t, other.Sync(context.Background()))
	release()
	must(t, s.Sync(context.Background()))
	until(t, "an idle device sleeps again", asleep(false))
}

// Many goroutines, streams, events and tickets, with a failure or without: every ticket
// is completed, memory is given back, and nothing races.
func TestAccelerator_UsedFromManyGoroutines(t *testing.T) {
	for mode := range devicetest.Mode(devicetest.Modes) {
		for _, how := range []string{"well", "stream fails", "device lost"} {
			t.Run(fmt.Sprint(mode, "/", how), func(t *testing.T) {
				l := newLab(t, devicetest.Options{Mode: mode, Seed: 3, Unordered: true})
				l.broken = how != "well"
				const lanes, jobs = 4, 60
				var streams []device.Stream
				var pages []*device.Memory
				host := l.hostPage(1 << 16)
				for i := range lanes {
					streams = append(streams, l.stream(fmt.Sprint(i)))
					pages = append(pages, l.page(1<<16))
				}
				e := l.event()
				var all sync.WaitGroup
				for i := range lanes {
					all.Go(func() {
						rng := rand.New(rand.NewPCG(uint64(i), 1))
						for j := range jobs {
							s, page := streams[rng.IntN(lanes)], pages[i]
							_ = s.Wait(e)
							var err error
							switch rng.IntN(3) {
							case 0:
								err = s.Copy(scattered(page, host, 1+rng.IntN(200)))
							case 1:
								err = l.CopyBatch(s, l.Engines()[rng.IntN(2)], scattered(host, page, 1+rng.IntN(200)), device.StreamOrder, 50)
							case 2:
								err = l.CopyBoxes(s, l.Engines()[rng.IntN(2)], []device.Box{{
									Dst: page, Src: host, Width: 16, Rows: 8, Slices: 8, DstPitch: 16, SrcPitch: 32, DstSlice: 300, SrcSlice: 1000,
								}})
							}
							_ = s.Record(e)
							ticket := device.NewTicket()
							if err == nil && s.Signal(ticket) == nil && rng.IntN(2) == 0 {
								err = ticket.Wait(context.Background())
							}
							if err != nil && !errors.Is(err, fault.Device) {
								t.Error(err)
							}
							if i == 0 && j == jobs/2 {
								switch how {
								case "stream fails":
									_ = l.d.FailCopy(l.handle(streams[1]), device.Failed)
								case "device lost":
									_ = l.d.Lose()
								}
							}
							if rng.IntN(8) == 0 {
								_ = s.Sync(context.Background())
							}
							runtime.Gosched()
						}
					})
				}
				all.Wait()
				for _, s := range streams {
					if err := s.Close(); how == "well" && err != nil {
						t.Error(err)
					}
				}
				for _, m := range append(pages, host) {
					must(t, m.Free())
				}
			})
		}
	}
}

// A stream that is held for long delays nobody who enqueues on it.
func TestAccelerator_EnqueueingOnAHeldStreamDoesNotWait(t *testing.T) {
	l := newLab(t, devicetest.Options{})
	s, dst, src := l.stream("s"), l.page(64*100), l.page(64*100)
	release := l.d.Hold(l.handle(s))
	over := make(chan error, 1)
	go func() {
		var errs []error
		for range 500 {
			errs = append(errs,
				s.Copy(scattered(dst, src, 100)),
				l.CopyBatch(s, l.Engines()[0], scattered(dst, src, 100), device.StreamOrder, 0),
				l.CopyBoxes(s, l.Engines()[1], []device.Box{{Dst: dst, Src: src, Width: 8, Rows: 9, Slices: 1, DstPitch: 16, SrcPitch: 32}}),
				s.Signal(device.NewTicket()))
		}
		over <- errors.Join(errs...)
	}()
	select {
	case err := <-over:
		must(t, err)
	case <-time.After(30 * time.Second):
		t.Error("calls on a held stream do not return")
	}
	release()
	must(t, s.Sync(context.Background()))
}
