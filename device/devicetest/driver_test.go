package devicetest_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// bench is a driver without an accelerator, which would not break its rules.
type bench struct {
	*devicetest.Driver
	s      device.StreamHandle
	a, b   uintptr // device memory of 4096 bytes
	host   []byte  // two pages of the OS
	pinned uintptr
	boxes  device.Engine
	flat   device.Engine
}

func newBench(t *testing.T) *bench {
	t.Helper()
	x := &bench{Driver: devicetest.NewDriver(devicetest.Options{Engines: []devicetest.EngineOption{
		{Name: "boxes", Limits: device.EngineLimits{MaxPitch: 1000, Boxes: true, Batch: 4}},
		{Name: "flat", Limits: device.EngineLimits{MaxPitch: 1000}},
	}})}
	var err [4]error
	x.s, err[0] = x.NewStream(device.NormalPriority)
	x.a, err[1] = x.Alloc(4096)
	x.b, err[2] = x.Alloc(4096)
	x.host, err[3] = unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err := errors.Join(err[:]...); err != nil {
		t.Fatal(err)
	}
	x.pinned = device.WrapHost(x.host).Base()
	if err := x.Register(x.pinned, 4096); err != nil {
		t.Fatal(err)
	}
	x.boxes, x.flat = x.Engines()[0], x.Engines()[1]
	t.Cleanup(func() {
		if err := unix.Munmap(x.host); err != nil {
			t.Error(err)
		}
	})
	return x
}

func (x *bench) sync(s device.StreamHandle) error {
	_, err := x.SyncStream(s)
	return err
}

// close gives back what is left, and returns the violations of all that.
func (x *bench) close(t *testing.T) []string {
	t.Helper()
	for _, err := range []error{x.CloseStream(x.s), x.Free(x.a), x.Free(x.b), x.Unregister(x.pinned)} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := x.Close(); err != nil {
		t.Error(err)
	}
	return x.TakeViolations()
}

// Each rule is broken once: the call says so, and it is noted.
func TestDriver_NotesWhatIsAgainstTheRules(t *testing.T) {
	rect := func(x *bench, e device.Engine, change func(r *device.Rect)) error {
		r := device.Rect{Dst: x.a, Src: x.b, Width: 10, Rows: 3, Slices: 2, DstPitch: 20, SrcPitch: 30, DstSlice: 100, SrcSlice: 90}
		change(&r)
		_, err := e.CopyRects(x.s, []device.Rect{r})
		return err
	}
	batch := func(x *bench, o device.SourceOrder, words ...uintptr) error {
		b := &device.Batch{}
		for i := 0; i+2 < len(words); i += 3 {
			b.Dst, b.Src, b.Bytes = append(b.Dst, uint64(words[i])), append(b.Src, uint64(words[i+1])), append(b.Bytes, uint64(words[i+2]))
		}
		return x.boxes.CopyBatch(x.s, b, o)
	}
	for name, c := range map[string]struct {
		do   func(x *bench) error
		says string // "" when all is well
	}{
		"a box":                  {func(x *bench) error { return rect(x, x.boxes, func(*device.Rect) {}) }, ""},
		"a batch":                {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.b, 10, x.a+10, x.pinned, 10) }, ""},
		"a batch in any order":   {func(x *bench) error { return batch(x, device.AnyOrder, x.a, x.pinned, 10) }, ""},
		"no rects":               {func(x *bench) error { _, err := x.boxes.CopyRects(x.s, nil); return err }, "no rects"},
		"a row of nothing":       {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.Width = 0 }) }, "nothing to copy"},
		"a pitch below width":    {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.DstPitch = 9 }) }, "pitch"},
		"a pitch too large":      {func(x *bench) error { return rect(x, x.flat, func(r *device.Rect) { r.Slices, r.SrcPitch = 1, 1001 }) }, "pitch"},
		"boxes without boxes":    {func(x *bench) error { return rect(x, x.flat, func(*device.Rect) {}) }, "no boxes"},
		"a stride of no pitch":   {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.DstSlice = 101 }) }, "multiple"},
		"overlapping slices":     {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.SrcSlice = 60 }) }, "overlap"},
		"beyond the memory":      {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.Dst += 4000 }) }, "destination bytes"},
		"before the memory":      {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.Src-- }) }, "source bytes"},
		"an address of nobody":   {func(x *bench) error { return rect(x, x.boxes, func(r *device.Rect) { r.Src = 4096 }) }, "source bytes"},
		"unregistered memory":    {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.pinned+5000, 10) }, "source bytes"},
		"over the registered":    {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.pinned+4090, 10) }, "source bytes"},
		"source is destination":  {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.b, 10, x.b+100, x.a+5, 10) }, "read and written"},
		"one destination twice":  {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.b, 10, x.a+5, x.b+100, 10) }, "written twice"},
		"a batch of none":        {func(x *bench) error { return batch(x, device.StreamOrder) }, "want 1 to 4"},
		"too large a batch":      {func(x *bench) error { return batch(x, device.StreamOrder, make([]uintptr, 15)...) }, "want 1 to 4"},
		"a copy of nothing":      {func(x *bench) error { return batch(x, device.StreamOrder, x.a, x.b, 0) }, "of nothing"},
		"any order, from itself": {func(x *bench) error { return batch(x, device.AnyOrder, x.a, x.b, 10) }, "any order"},
		"a batch, legacy": {func(x *bench) error {
			return x.boxes.CopyBatch(device.LegacyStream, &device.Batch{Dst: []uint64{1}, Src: []uint64{1}, Bytes: []uint64{1}}, 0)
		}, "legacy"},
		"a stream of nobody":   {func(x *bench) error { return x.sync(12345) }, "no stream"},
		"a stream of a thread": {func(x *bench) error { return x.sync(device.PerThreadStream) }, "no stream"},
		"an event of nobody":   {func(x *bench) error { return x.Record(12345, x.s) }, "no event"},
		"alloc of nothing":     {func(x *bench) error { _, err := x.Alloc(0); return err }, "0 bytes"},
		"free of nothing":      {func(x *bench) error { return x.Free(x.a + 1) }, "not returned"},
		"free of host memory":  {func(x *bench) error { return x.Free(x.pinned) }, "not returned"},
		"unregister of device": {func(x *bench) error { return x.Unregister(x.a) }, "not returned"},
		"free under a copy": {func(x *bench) error {
			m, err := x.Alloc(100)
			if err != nil {
				return err
			}
			release := x.Hold(x.s)
			defer release()
			return errors.Join(batch(x, device.StreamOrder, m, x.b, 10), x.Free(m))
		}, "queued"},
		"unregister under a copy": {func(x *bench) error {
			release := x.Hold(x.s)
			defer release()
			err := errors.Join(x.Register(x.pinned+4096, 4096), batch(x, device.StreamOrder, x.a, x.pinned+4096, 10))
			return errors.Join(err, x.Unregister(x.pinned+4096))
		}, "queued"},
	} {
		t.Run(name, func(t *testing.T) {
			x := newBench(t)
			err := c.do(x)
			_ = x.sync(x.s) // its errors were told before
			got := x.TakeViolations()
			if (err != nil) != (c.says != "") && !strings.Contains(c.says, "written") {
				t.Errorf("error %v", err)
			}
			var e *device.DriverError
			if err != nil && (!errors.As(err, &e) || e.Code != 1) {
				t.Errorf("error %v is no driver's", err)
			}
			if all := strings.Join(got, "; "); c.says == "" && all != "" || !strings.Contains(all, c.says) {
				t.Errorf("violations %q, want %q", all, c.says)
			}
			if v := x.close(t); len(v) > 0 {
				t.Errorf("afterwards: %q", v)
			}
		})
	}
}

func TestDriver_NotesWhatIsLeftBehind(t *testing.T) {
	x := newBench(t)
	if err := x.Close(); err != nil {
		t.Error(err)
	}
	got := strings.Join(x.TakeViolations(), "; ")
	for _, want := range []string{"stream", "memory"} {
		if !strings.Contains(got, want) {
			t.Errorf("violations %q name no %s", got, want)
		}
	}
	if err := x.Close(); err == nil || !strings.Contains(strings.Join(x.TakeViolations(), ""), "closed before") {
		t.Errorf("second close: %v", err)
	}
	if _, err := x.Alloc(1); err == nil || len(x.TakeViolations()) != 1 {
		t.Errorf("alloc after close: %v", err)
	}
}

// Two users of one page of the OS know nothing of each other: that breaks no rule.
func TestDriver_RegistersNoPageTwice(t *testing.T) {
	x := newBench(t)
	var e *device.DriverError
	if err := x.Register(x.pinned+4090, 4096); !errors.Is(err, fault.Exists) || !errors.As(err, &e) {
		t.Errorf("a page twice: %v", err)
	}
	if v := x.close(t); len(v) > 0 {
		t.Error(v)
	}
}

// A lazy driver runs nothing for itself.
func TestDriver_LazyRunsWhatIsWaitedFor(t *testing.T) {
	d := devicetest.NewDriver(devicetest.Options{Mode: devicetest.Lazy})
	a, err1 := d.Alloc(8)
	b, err2 := d.Alloc(8)
	s, err3 := d.NewStream(device.NormalPriority)
	e, err4 := d.NewEvent()
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	d.Poke(b, []byte("12345678"))
	if _, err := d.Engines()[0].CopyRects(s, []device.Rect{{Dst: a, Src: b, Width: 8, Rows: 1, Slices: 1}}); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 8)
	look := func() string { d.Peek(a, got); return string(got) }
	if err := d.Record(e, s); err != nil {
		t.Fatal(err)
	}
	if done, err := d.EventDone(e); done || err != nil || look() != strings.Repeat("\x00", 8) {
		t.Errorf("it has run for nobody: done %v, error %v, %q", done, err, look())
	}
	if err := d.SyncEvent(e); err != nil || look() != "12345678" {
		t.Errorf("sync: %v, %q", err, look())
	}
	if done, err := d.EventDone(e); !done || err != nil {
		t.Errorf("after sync: done %v, error %v", done, err)
	}
	if err := errors.Join(d.CloseEvent(e), d.CloseStream(s), d.Free(a), d.Free(b), d.Close()); err != nil {
		t.Error(err)
	}
	if v := d.TakeViolations(); len(v) > 0 {
		t.Error(v)
	}
}

func TestWriteRead_ReachMemoryOfTheDevice(t *testing.T) {
	for mode := range devicetest.Mode(devicetest.Modes) {
		a, _ := devicetest.OpenAccelerator(t, devicetest.Options{Mode: mode})
		m, err := a.Alloc(1000)
		if err != nil {
			t.Fatal(err)
		}
		devicetest.Write(t, a, m, 10, []byte("hello"))
		if got := devicetest.Read(t, a, m, 8, 9); string(got) != "\x00\x00hello\x00\x00" {
			t.Errorf("%v: %q", mode, got)
		}
		if err := m.Free(); err != nil {
			t.Error(err)
		}
	}
}
