package copier_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

// driver is a device written in Go whose engines may lie.
type driver struct {
	*devicetest.Driver
	engines  []device.Engine
	missing  []device.MissingEngine
	unpinned bool // no memory can be pinned
}

func (d *driver) Engines() []device.Engine        { return d.engines }
func (d *driver) Missing() []device.MissingEngine { return d.missing }

func (d *driver) Register(addr uintptr, n int64) error {
	if d.unpinned {
		return fault.New(fault.Memory, "pin", "RLIMIT_MEMLOCK")
	}
	return d.Driver.Register(addr, n)
}

// lie changes what an engine is asked to copy.
type lie struct {
	rects func(d *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect)
	batch func(b *device.Batch)
}

// engine lies.
type engine struct {
	device.Engine
	d *devicetest.Driver
	lie
}

func (e *engine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	n, asked := len(rects), s
	if e.rects != nil {
		s, rects = e.rects(e.d, s, slices.Clone(rects))
	}
	if len(rects) > 0 {
		if queued, err := e.Engine.CopyRects(s, rects); err != nil {
			return queued, err
		}
	}
	if s != asked { // at once
		_, err := e.d.SyncStream(s)
		return n, errors.Join(err, e.d.CloseStream(s))
	}
	return n, nil
}

func (e *engine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	if e.batch != nil {
		b = &device.Batch{Dst: slices.Clone(b.Dst), Src: slices.Clone(b.Src), Bytes: slices.Clone(b.Bytes)}
		e.batch(b)
	}
	return e.Engine.CopyBatch(s, b, o)
}

// only changes the rects that are of interest.
func only(which func(r *device.Rect) bool, change func(r *device.Rect)) lie {
	return lie{rects: func(_ *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
		for i := range rects {
			if which(&rects[i]) {
				change(&rects[i])
			}
		}
		return s, rects
	}}
}

func isPitched(r *device.Rect) bool { return r.Rows > 1 }

// isRow reports a row of a page, as the test's pages have them.
func isRow(r *device.Rect) bool { return r.Rows == 1 && r.Width == 2048 }

// ignore is for what a liar does to the rules of the driver.
func ignore(t *testing.T, d *devicetest.Driver) {
	t.Helper()
	t.Cleanup(func() { d.TakeViolations(); d.TakeRaces() })
}

// liars are copiers that a polite test takes for good ones.
func liars() map[string]lie {
	return map[string]lie{
		"wrong pitch of the destination": only(isPitched, func(r *device.Rect) { r.DstPitch += 16 }),
		"wrong pitch of the source":      only(isPitched, func(r *device.Rect) { r.SrcPitch -= 16 * btoi(r.SrcPitch > r.Width) }),
		"the pitches swapped":            only(isPitched, func(r *device.Rect) { r.DstPitch, r.SrcPitch = r.SrcPitch, r.DstPitch }),
		"a row less":                     only(isPitched, func(r *device.Rect) { r.Rows-- }),
		"a byte too many":                only(isPitched, func(r *device.Rect) { r.Width++ }),
		"a byte too many of a row":       only(isRow, func(r *device.Rect) { r.Width++ }),
		"a byte too few":                 only(isPitched, func(r *device.Rect) { r.Width-- }),
		"a byte too far":                 only(isPitched, func(r *device.Rect) { r.Src++ }),
		"no last page of several": {rects: func(_ *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			if len(rects) > 1 {
				rects = rects[:len(rects)-1]
			}
			return s, rects
		}},
		"nothing at all": {rects: func(_ *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			return s, slices.DeleteFunc(rects, isPitchedValue)
		}},
		"a stream of its own, at once": {rects: func(d *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			if !isPitched(&rects[0]) {
				return s, rects
			}
			own, err := d.NewStream(device.NormalPriority)
			if err != nil {
				return s, rects
			}
			return own, rects
		}},
	}
}

func isPitchedValue(r device.Rect) bool { return isPitched(&r) }

func btoi(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// openDriver opens a device with engines of these names, of which some lie.
func openDriver(t *testing.T, o devicetest.Options, lies map[string]lie, names ...string) (*device.Accelerator, *driver) {
	t.Helper()
	for _, n := range names {
		o.Engines = append(o.Engines, devicetest.EngineOption{Name: n, Limits: device.EngineLimits{MaxPitch: 1<<31 - 1, Boxes: true, Batch: 8192, Library: "lib" + n, Version: "1"}})
	}
	d := &driver{Driver: devicetest.NewDriver(o)}
	for _, e := range d.Driver.Engines() {
		d.engines = append(d.engines, &engine{e, d.Driver, lies[e.Name()]})
	}
	a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closing(t, a.Close)
		d.Check(t)
	})
	return a, d
}

func TestSelect_TakesTheFirstThatPasses(t *testing.T) {
	for _, mode := range modes() {
		a, _ := openDriver(t, devicetest.Options{Mode: mode, Seed: 3}, nil, "libcudart", "else", "cuda")
		for order, want := range map[copier.Order][]string{
			copier.DriverFirst: {"cuda", "libcudart", "else", "portable"},
			copier.Seed:        {"libcudart", "cuda", "else", "portable"},
		} {
			s, err := copier.Select(t.Context(), a, copier.SelectOptions{Order: order})
			if err != nil {
				t.Fatal(err)
			}
			if got := append([]string{s.Copier.Name()}, s.Untried...); !slices.Equal(got, want) {
				t.Errorf("%v: order %v, want %v", mode, got, want)
			}
			if s.Device != a.Name() || len(s.Rejected) > 0 || s.BatchOps != copier.DefaultBatchOps || s.NoBatches != nil || s.Limits.MaxPitch != 1<<31-1 || s.Pageable != nil {
				t.Errorf("%v: %+v", mode, s)
			}
		}
	}
}

// TestSelect_FindsLiars is the negative control of the self-test: each lie alone must be
// seen, named, and the next copier taken.
func TestSelect_FindsLiars(t *testing.T) {
	for name, l := range liars() {
		t.Run(name, func(t *testing.T) {
			a, d := openDriver(t, devicetest.Options{Mode: devicetest.Lazy, Unordered: true}, map[string]lie{"cuda": l}, "libcudart", "cuda")
			ignore(t, d.Driver)
			s, err := copier.Select(t.Context(), a, copier.SelectOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if s.Copier.Name() != "libcudart" || len(s.Rejected) != 1 || s.Rejected[0].Name != "cuda" {
				t.Fatalf("chosen: %v", s)
			}
			if err := s.Rejected[0].Reason; !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "self-test") {
				t.Errorf("reason %v, want kind device, from the self-test", err)
			}
			if !strings.Contains(s.String(), "not cuda: ") {
				t.Errorf("%q does not say why", s)
			}
			t.Log(s.Rejected[0].Reason)
		})
	}
}

func TestSelect_BatchesJoinWhenTheyPass(t *testing.T) {
	for name, x := range map[string]struct {
		lie  func(b *device.Batch)
		o    copier.SelectOptions
		says string
	}{
		"a copy less":      {lie: func(b *device.Batch) { b.Dst, b.Src, b.Bytes = b.Dst[1:], b.Src[1:], b.Bytes[1:] }, says: "batch: self-test"},
		"a byte too many":  {lie: func(b *device.Batch) { b.Bytes[len(b.Bytes)-1]++ }, says: "batch: self-test"},
		"sources swapped":  {lie: func(b *device.Batch) { b.Src[0], b.Src[len(b.Src)-1] = b.Src[len(b.Src)-1], b.Src[0] }, says: "batch: self-test"},
		"turned off":       {o: copier.SelectOptions{NoBatches: true}, says: "turned off"},
		"cut":              {o: copier.SelectOptions{BatchOps: 100}},
		"nothing is wrong": {},
	} {
		t.Run(name, func(t *testing.T) {
			a, d := openDriver(t, devicetest.Options{Unordered: x.lie != nil}, map[string]lie{"cuda": {batch: x.lie}}, "cuda")
			if x.lie != nil {
				ignore(t, d.Driver)
			}
			s, err := copier.Select(t.Context(), a, x.o)
			if err != nil {
				t.Fatal(err)
			}
			if s.Copier.Name() != "cuda" || len(s.Rejected) != 0 {
				t.Fatalf("chosen: %v", s)
			}
			// Streams copy without batches that have not passed.
			m, err := a.Alloc(64)
			if err != nil {
				t.Fatal(err)
			}
			st, err := a.NewStream("ops")
			if err != nil {
				t.Fatal(err)
			}
			before := a.Calls().Batches
			err = st.Copy([]device.Op{{Dst: m, Src: m, SrcOff: 16, Bytes: 8}, {Dst: m, DstOff: 32, Src: m, SrcOff: 16, Bytes: 8}})
			if err = errors.Join(err, st.Sync(t.Context()), st.Close(), m.Free()); err != nil {
				t.Fatal(err)
			}
			if used := a.Calls().Batches > before; used != (x.says == "") {
				t.Errorf("a stream has used batches: %t", used)
			}
			if x.says == "" {
				if want := max(x.o.BatchOps, copier.DefaultBatchOps*int(btoi(x.o.BatchOps == 0))); s.NoBatches != nil || s.BatchOps != want {
					t.Errorf("batches of %d, %v: want %d", s.BatchOps, s.NoBatches, want)
				}
				return
			}
			if s.NoBatches == nil || s.BatchOps != 0 || !strings.Contains(s.NoBatches.Error(), x.says) {
				t.Errorf("batches of %d, %v: want none, because %s", s.BatchOps, s.NoBatches, x.says)
			}
		})
	}
}

func TestSelect_NamesWhatIsMissing(t *testing.T) {
	a, d := openDriver(t, devicetest.Options{}, nil, "libcudart")
	d.missing = []device.MissingEngine{{Name: "cuda", Err: fault.New(fault.Unsupported, "libcuda.so.1", "12.2 has no cuMemcpy2DAsync_v2").Hint("install a newer driver")}}
	var log strings.Builder
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if s.Copier.Name() != "libcudart" || len(s.Rejected) != 1 || !strings.Contains(s.Rejected[0].Reason.Error(), "no cuMemcpy2DAsync_v2") {
		t.Errorf("chosen: %v", s)
	}
	for _, want := range []string{"copier rejected", "copier=cuda", "copier chosen", "libcudart"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %q in the log:\n%s", want, log.String())
		}
	}
}

func TestSelect_ForceIsTheOnlyOneTried(t *testing.T) {
	a, d := openDriver(t, devicetest.Options{Unordered: true},
		map[string]lie{"else": only(isPitched, func(r *device.Rect) { r.Rows-- })}, "cuda", "libcudart", "else")
	ignore(t, d.Driver)
	d.missing = []device.MissingEngine{{Name: "libamdhip64", Err: fault.New(fault.NotFound, "libamdhip64.so.7", "no such library").Hint("install ROCm")}}
	for _, name := range []string{"cuda", "libcudart", "portable"} {
		s, err := copier.Select(t.Context(), a, copier.SelectOptions{Force: name})
		if err != nil || s.Copier.Name() != name || len(s.Rejected)+len(s.Untried) > 0 {
			t.Errorf("%s: got %v, error %v", name, s, err)
		}
	}
	for _, x := range []struct {
		name   string
		kind   fault.Kind
		says   []string
		remedy string
	}{
		{"libamdhip64", fault.NotFound, []string{"libamdhip64", "fake:0", "no such library"}, "install ROCm"},
		{"else", fault.Device, []string{"else", "fake:0", "self-test"}, "another may pass"},
		{"CUDA", fault.Unsupported, []string{"CUDA", "none of that name"}, "cuda, libcudart"},
	} {
		s, err := copier.Select(t.Context(), a, copier.SelectOptions{Force: x.name})
		if s != nil {
			t.Errorf("%s: chosen: %v", x.name, s)
		}
		faulttest.Refused(t, err, x.kind, x.says...)
		if !strings.Contains(fault.RemedyOf(err), x.remedy) {
			t.Errorf("%s: remedy %q, want %q", x.name, fault.RemedyOf(err), x.remedy)
		}
	}
}

func TestSelect_HostIsPortable(t *testing.T) {
	h := openHost(t)
	s, err := copier.Select(t.Context(), h, copier.SelectOptions{})
	if err != nil || s.Copier.Name() != "portable" || s.Device != "host" {
		t.Errorf("chosen %v, error %v", s, err)
	}
	_, err = copier.Select(t.Context(), h, copier.SelectOptions{Force: "cuda"})
	faulttest.Refused(t, err, fault.Unsupported, "copier cuda", "host is no accelerator")
	_, err = copier.Select(t.Context(), h, copier.SelectOptions{BatchOps: -1})
	faulttest.Refused(t, err, fault.Invalid, "-1")
}

func TestSelect_NoneIsAnErrorThatSaysWhyOfEach(t *testing.T) {
	worse := only(func(r *device.Rect) bool { return r.Width > 1 }, func(r *device.Rect) { r.Width-- })
	a, d := openDriver(t, devicetest.Options{Unordered: true}, map[string]lie{"cuda": worse, "libcudart": worse}, "cuda", "libcudart")
	ignore(t, d.Driver)
	_, err := copier.Select(t.Context(), a, copier.SelectOptions{})
	faulttest.Refused(t, err, fault.Device, "cuda: ", "libcudart: ", "portable: ")
	if fault.RemedyOf(err) == "" {
		t.Error("no remedy")
	}
}

func TestSelect_ALostDeviceEndsIt(t *testing.T) {
	a, d := openDriver(t, devicetest.Options{}, nil, "cuda", "libcudart")
	_ = d.Refuse("CopyRects", 5, device.Lost)
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{})
	if s != nil {
		t.Errorf("chosen: %v", s)
	}
	faulttest.Refused(t, err, fault.Device, "cuda")
}

// TestSelect_WithoutPinnedMemory is a machine where nothing can be locked.
func TestSelect_WithoutPinnedMemory(t *testing.T) {
	a, d := openDriver(t, devicetest.Options{Pageable: true}, nil, "cuda")
	d.unpinned = true
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s.Copier.Name() != "cuda" || s.Pageable == nil || !strings.Contains(s.String(), "not pinned") {
		t.Errorf("chosen: %v", s)
	}
}

func TestSelect_EndsWithItsContext(t *testing.T) {
	a, _ := openDriver(t, devicetest.Options{}, nil, "cuda")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := copier.Select(ctx, a, copier.SelectOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
}

func TestSelfTest_OfAnyCopier(t *testing.T) {
	a, _ := openDriver(t, devicetest.Options{Mode: devicetest.Random}, nil, "cuda")
	h := openHost(t)
	if err := copier.SelfTest(t.Context(), copier.NewPortable(), a, h); err != nil {
		t.Error(err)
	}
	// Made for another device: what a context of the wrong device is.
	b, _ := openDriver(t, devicetest.Options{Name: "fake:1"}, nil, "cuda")
	err := copier.SelfTest(t.Context(), copier.NewAccelerated(b, b.Engines()[0], copier.AcceleratedOptions{}), a, h)
	faulttest.Refused(t, err, fault.Invalid, "self-test", "fake:1")
}

func TestCalibrate(t *testing.T) {
	a, _ := openDriver(t, devicetest.Options{}, nil, "cuda")
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{Calibrate: &copier.CalibrateOptions{Bytes: 256 << 10, Budget: time.Hour}})
	if err != nil {
		t.Fatal(err)
	}
	// Rows of 4 KiB to 256 KiB fit, 64, 16, 4 and 1 of them: 10 cells a link.
	if n, of := s.Crossovers.Measured(); n != 3*10 || of != 60 || s.Uncalibrated != nil {
		t.Errorf("measured %d of %d, error %v, want 30:\n%s", n, of, s.Uncalibrated, s.Crossovers.String())
	}
	if !strings.Contains(s.String(), "30 of 60 crossovers measured") {
		t.Errorf("%q says nothing of what was measured", s)
	}
	// No time at all measures nothing.
	s, err = copier.Select(t.Context(), a, copier.SelectOptions{Calibrate: &copier.CalibrateOptions{Budget: 1}})
	if n, _ := s.Crossovers.Measured(); err != nil || n != 0 {
		t.Errorf("measured %d, error %v", n, err)
	}
}

func TestCalibrate_FailsWithoutPinnedMemory(t *testing.T) {
	a, d := openDriver(t, devicetest.Options{Pageable: true}, nil, "cuda")
	d.unpinned = true
	s, err := copier.Select(t.Context(), a, copier.SelectOptions{Calibrate: &copier.CalibrateOptions{}})
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := s.Crossovers.Measured(); n != 0 || s.Uncalibrated == nil || !strings.Contains(s.String(), "not measured") {
		t.Errorf("measured %d: %v", n, s)
	}
}

// TestCalibrate_EndsWithItsBudget has every call take a second.
func TestCalibrate_EndsWithItsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := openDriver(t, devicetest.Options{}, map[string]lie{"cuda": {rects: func(_ *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			<-time.After(time.Second)
			return s, rects
		}}}, "cuda")
		began := time.Now()
		ways, err := copier.Calibrate(t.Context(), a, a.Engines()[0], openHost(t),
			copier.AcceleratedOptions{NoBatches: true}, copier.CalibrateOptions{Budget: 3 * time.Second})
		// 512 rows are two calls: the second measurement begins in time, and is the last.
		if took := time.Since(began); err != nil || took != 4*time.Second {
			t.Errorf("it took %v, error %v; want 4s", took, err)
		}
		if n, _ := ways.Measured(); n != 0 {
			t.Errorf("%d cells were measured, of which none was finished", n)
		}
	})
}

// TestCalibrate_NamesADeviceThatStandsStill has all copies wait for ever.
func TestCalibrate_NamesADeviceThatStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var releases []func()
		a, d := openDriver(t, devicetest.Options{}, map[string]lie{"cuda": {rects: func(d *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			releases = append(releases, d.Hold(s))
			return s, rects
		}}}, "cuda")
		_, err := copier.Calibrate(t.Context(), a, a.Engines()[0], openHost(t),
			copier.AcceleratedOptions{NoBatches: true}, copier.CalibrateOptions{Budget: time.Second})
		for _, release := range releases {
			release()
		}
		synctest.Wait() // what was in use is given back
		faulttest.Refused(t, err, fault.Device, "calibration", "not done its copies within 11s")
		d.Check(t)
	})
}

// TestSelect_GivesUpOnADeviceThatStandsStill has all copies wait for ever.
func TestSelect_GivesUpOnADeviceThatStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var releases []func()
		a, d := openDriver(t, devicetest.Options{}, map[string]lie{"cuda": {rects: func(d *devicetest.Driver, s device.StreamHandle, rects []device.Rect) (device.StreamHandle, []device.Rect) {
			releases = append(releases, d.Hold(s))
			return s, rects
		}}}, "cuda")
		s, err := copier.Select(t.Context(), a, copier.SelectOptions{Force: "cuda"})
		if s != nil {
			t.Errorf("chosen: %v", s)
		}
		faulttest.Refused(t, err, fault.Device, "cuda", "not done its copies within 10s")
		if err := a.Close(); !errors.Is(err, fault.Busy) {
			t.Errorf("close: error %v, want kind busy: the copies may still run", err)
		}
		for _, release := range releases {
			release()
		}
		synctest.Wait() // what was in use is given back
		d.Check(t)
	})
}
