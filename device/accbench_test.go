package device_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/device"
)

// nullDriver is a driver that takes no time, and does nothing: all work is over at once.
type nullDriver struct{ device.Driver }

type nullEngine struct{ batch int }

func (nullDriver) Name() string                  { return "null:0" }
func (nullDriver) Attributes() device.Attributes { return device.Attributes{} }

func (nullDriver) Alloc(int64) (uintptr, error)                                  { return 1 << 40, nil }
func (nullDriver) Free(uintptr) error                                            { return nil }
func (nullDriver) Register(uintptr, int64) error                                 { return nil }
func (nullDriver) Unregister(uintptr) error                                      { return nil }
func (nullDriver) NewStream(device.Priority) (device.StreamHandle, error)        { return 100, nil }
func (nullDriver) CloseStream(device.StreamHandle) error                         { return nil }
func (nullDriver) SyncStream(device.StreamHandle) (bool, error)                  { return true, nil }
func (nullDriver) NewEvent() (device.EventHandle, error)                         { return 200, nil }
func (nullDriver) CloseEvent(device.EventHandle) error                           { return nil }
func (nullDriver) Record(device.EventHandle, device.StreamHandle) error          { return nil }
func (nullDriver) Wait(device.StreamHandle, device.EventHandle) error            { return nil }
func (nullDriver) EventDone(device.EventHandle) (bool, error)                    { return true, nil }
func (nullDriver) SyncEvent(device.EventHandle) error                            { return nil }
func (nullDriver) Close() error                                                  { return nil }
func (nullDriver) Engines() []device.Engine                                      { return []device.Engine{nullEngine{8192}, nullEngine{0}} }
func (e nullEngine) Name() string                                                { return "null" }
func (nullEngine) CopyRects(_ device.StreamHandle, r []device.Rect) (int, error) { return len(r), nil }

func (e nullEngine) Limits() device.EngineLimits {
	return device.EngineLimits{MaxPitch: 1<<31 - 1, Boxes: true, Batch: e.batch}
}

func (nullEngine) CopyBatch(device.StreamHandle, *device.Batch, device.SourceOrder) error { return nil }

// What a job costs beyond the driver's own time: checks, uses, the engine's arguments,
// the mark, and its end by the reaper.
func BenchmarkAccelerator_Enqueue(b *testing.B) {
	a, err := device.OpenAccelerator(nullDriver{}, device.AcceleratorOptions{})
	must(b, err)
	host, err := device.OpenHost(device.HostOptions{})
	must(b, err)
	const bytes = 64 << 20
	dst, err := a.Alloc(bytes)
	must(b, err)
	src, err := a.AllocHost(host, bytes, 1)
	must(b, err)
	s, err := a.NewStream("s")
	must(b, err)
	other, err := a.NewStream("other")
	must(b, err)
	e, err := a.NewEvent()
	must(b, err)
	batched, rects := a.Engines()[0], a.Engines()[1]

	for _, n := range []int{1, 100, 100_000} {
		ops := make([]device.Op, n)
		boxes := make([]device.Box, n)
		step := int64(bytes / n)
		for i := range ops {
			off := int64(i*7919%n) * step
			ops[i] = device.Op{Dst: dst, Src: src, DstOff: off, SrcOff: off, Bytes: step - 1}
			boxes[i] = device.Box{
				Dst: dst, Src: src, DstOff: off, SrcOff: off, Width: 8, Rows: 4, Slices: 4,
				DstPitch: 32, SrcPitch: 16, DstSlice: 128, SrcSlice: 64,
			}
		}
		for name, enqueue := range map[string]func() error{
			"batch": func() error { return a.CopyBatch(s, batched, ops, device.AnyOrder, 0) },
			"rects": func() error { return a.CopyBatch(s, rects, ops, device.StreamOrder, 0) },
			"boxes": func() error { return a.CopyBoxes(s, rects, boxes) },
		} {
			b.Run(fmt.Sprint(name, "/ops=", n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					// As a queue does: after an event, with an event behind it.
					if other.Record(e) != nil || s.Wait(e) != nil || enqueue() != nil || s.Record(e) != nil {
						b.Fatal("the null driver fails")
					}
				}
				must(b, s.Sync(context.Background()))
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/copy")
			})
		}
	}
	must(b, s.Close())
	must(b, other.Close())
	must(b, src.Free())
	must(b, dst.Free())
	must(b, a.Close())
	must(b, host.Close())
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
