package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
)

// remedied checks that a finding has that remedy, or a part of it.
func remedied(t *testing.T, found map[string]Finding, name, remedy string) {
	t.Helper()
	if f := found[name]; !strings.Contains(f.Remedy, remedy) {
		t.Errorf("%s: %s\nremedy %q, want %q", name, f.Text, f.Remedy, remedy)
	}
}

// slowEngine takes a second for copies of much, or for ever for all.
type slowEngine struct {
	device.Engine
	hangs func(s device.StreamHandle)
}

func (e *slowEngine) CopyRects(s device.StreamHandle, rects []device.Rect) (int, error) {
	e.slow(s, rects[0].Width)
	return e.Engine.CopyRects(s, rects)
}

func (e *slowEngine) CopyBatch(s device.StreamHandle, b *device.Batch, o device.SourceOrder) error {
	e.slow(s, int64(len(b.Bytes))*int64(b.Bytes[0]))
	return e.Engine.CopyBatch(s, b, o)
}

func (e *slowEngine) slow(s device.StreamHandle, bytes int64) {
	switch {
	case e.hangs != nil:
		e.hangs(s)
	case bytes >= 8<<20:
		<-time.After(time.Second)
	}
}

type slowDriver struct {
	*devicetest.Driver
	engine device.Engine
}

func (d *slowDriver) Engines() []device.Engine { return []device.Engine{d.engine} }

// A device that is slow, or that hangs, is one of several: all are looked at, and nothing
// of them is a bug.
func TestSections_GiveEveryDeviceItsPartOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := device.OpenHost(device.HostOptions{Workers: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = h.Close() }()
		var releases []func()
		var opened []*device.Accelerator
		v := maker{
			name: "slow", ready: true,
			list: func() (int, error) { return 4, nil },
			open: func(i int) (*device.Accelerator, error) {
				d := devicetest.NewDriver(devicetest.Options{Name: fmt.Sprintf("slow:%d", i)})
				e := &slowEngine{Engine: d.Engines()[0]}
				if i == 1 {
					e.hangs = func(s device.StreamHandle) { releases = append(releases, d.Hold(s)) }
				}
				a, err := device.OpenAccelerator(&slowDriver{d, e}, device.AcceleratorOptions{})
				opened = append(opened, a)
				return a, err
			},
		}
		o := quick()
		o.PoolBytes = 8 << 20
		sections := answer(t.Context(), v, answerLimit, func(ctx context.Context) []Section { return v.sections(ctx, ThisMachine(), h, o) })
		for _, release := range releases {
			release()
		}
		synctest.Wait()
		for _, a := range opened {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		}
		found := map[string]Finding{}
		for _, s := range sections {
			for _, f := range s.Findings {
				found[s.Title+" "+f.Name] = f
			}
		}
		for i := range 4 {
			on := fmt.Sprintf("slow:%d ", i)
			want(t, found, on+"device", Green)
			if i == 1 {
				want(t, found, on+"copier", Red, "its self-test was not done in the time")
				remedied(t, found, on+"copier", "dmesg")
				continue
			}
			want(t, found, on+"copier", Green)
			want(t, found, on+"copies", Yellow, "not done in the time")
			remedied(t, found, on+"copies", "kvferry bench copy")
		}
	})
}

func TestRun_SaysThatADeviceIsLost(t *testing.T) {
	const illegalAddress = 700
	for call, x := range map[string]struct {
		nth     int // the self-test and the calibration have those before
		finding string
	}{
		"cuMemHostRegister_v2": {8, "cuda:0 pinning"},
		"cuMemAlloc_v2":        {5, "cuda:0 memory"},
		"cuEventQuery":         {9, "cuda:0 copier"},
	} {
		t.Run(call, func(t *testing.T) {
			f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, Devices: 1, AllowLeaks: true, AllowViolations: true})
			f.FailCall(call, x.nth, illegalAddress)
			o := quick()
			o.CUDA = f.Path()
			_, found := look(t, o)
			want(t, found, x.finding, Red, "ILLEGAL_ADDRESS")
			remedied(t, found, x.finding, "dmesg")
		})
	}
}

func TestRun_KnowsWhatHelps(t *testing.T) {
	for name, x := range map[string]struct {
		options func(*testing.T, *Options)
		finding string
		remedy  string
	}{
		"a library that is named and not there": {
			func(_ *testing.T, o *Options) { o.CUDA = "libcuda-of-mine.so" },
			"cuda library", "leave --cuda-library out",
		},
		"a library that is named and another": {
			func(_ *testing.T, o *Options) { o.HIP = "libc.so.6" },
			"hip library", "leave --hip-library out",
		},
		"a driver that is named and has no device": {
			func(t *testing.T, o *Options) {
				t.Helper()
				o.CUDA = fakedriver.Load(t, fakedriver.Options{Devices: -1}).Path()
			},
			"cuda library", "CUDA_VISIBLE_DEVICES",
		},
		"a device that is full": {
			func(t *testing.T, o *Options) {
				t.Helper()
				o.CUDA = fakedriver.Load(t, fakedriver.Options{Devices: 1, Settings: map[string]string{"memory": "1000000"}}).Path()
			},
			"cuda:0 copier", freeDevice,
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := quick()
			x.options(t, &o)
			_, found := look(t, o)
			remedied(t, found, x.finding, x.remedy)
		})
	}
}

// A runtime whose driver is another than the device's.
func TestRun_KnowsThatARuntimeIsOfAnotherDriver(t *testing.T) {
	other := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager})
	f := fakedriver.Load(t, fakedriver.Options{Mode: fakedriver.Eager, AllowViolations: true})
	o := quick()
	o.CUDA, o.CUDART = f.Path(), other.Runtime()
	_, found := look(t, o)
	want(t, found, "cuda:1 libcudart", Red, "cuda:1 for device 0")
	remedied(t, found, "cuda:1 libcudart", "finds this very driver")
}

func TestNoPin(t *testing.T) {
	driver := func(kind fault.Kind, class device.Class) error {
		return fault.Wrap(kind, "pin", &device.DriverError{Call: "cuMemHostRegister_v2", Name: "CUDA_ERROR", Class: class}).Hint("raise ulimit -l")
	}
	free, limited := "Max locked memory  unlimited  unlimited  bytes\n", "Max locked memory  8388608  8388608  bytes\n"
	for name, x := range map[string]struct {
		limits string
		err    error
		remedy string
	}{
		"a limit on locking":    {limited, driver(fault.Memory, device.Retry), "see locking above"},
		"no limit and no room":  {free, driver(fault.Memory, device.Retry), freeMemory},
		"not for want of room":  {free, driver(fault.Unsupported, device.Failed), "confidential computing"},
		"nothing to pin":        {free, fault.New(fault.Memory, "host memory", "2 asked for, 1 left"), freeMemory},
		"files may not be long": {free, fault.Wrap(fault.Memory, "host memory", unix.EFBIG), "ulimit -f"},
	} {
		t.Run(name, func(t *testing.T) {
			m := &Machine{Root: fstest.MapFS{"proc/self/limits": {Data: []byte(x.limits)}}, Lock: func(int) error { return nil }}
			f := m.noPin(x.err)
			if f.Level != Yellow || strings.Contains(f.Remedy, "locking") != (x.limits == limited) {
				t.Errorf("%+v", f)
			}
			remedied(t, map[string]Finding{"pinning": f}, "pinning", x.remedy)
		})
	}
}

func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.00 ms", 5120 * time.Microsecond: "5.12 ms", 202 * time.Millisecond: "0.20 s", 1619 * time.Millisecond: "1.6 s", 100 * time.Second: "100 s",
	} {
		if got := seconds(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestNoPool(t *testing.T) {
	for name, x := range map[string]struct {
		err    error
		level  Level
		remedy string
	}{
		"little memory": {fault.New(fault.Memory, "host memory", "2 asked for, 1 left").Hint("ask for at most 1"), Yellow, freeMemory},
		"open files":    {fault.Wrap(fault.Memory, "pool", unix.EMFILE), Red, "ulimit -n"},
		"open files of whoever asks how much memory there is": {&fs.PathError{Op: "open", Path: "/proc/meminfo", Err: unix.EMFILE}, Red, "ulimit -n"},
		"size of files": {fault.Wrap(fault.Memory, "pool", unix.EFBIG), Red, "ulimit -f"},
		"address space": {fault.Wrap(fault.Memory, "pool", unix.ENOMEM).Hint("raise ulimit -v"), Red, "ulimit -v"},
	} {
		t.Run(name, func(t *testing.T) {
			f := noPool(x.err)
			if f.Level != x.level {
				t.Errorf("level %v, want %v", f.Level, x.level)
			}
			remedied(t, map[string]Finding{"pool": f}, "pool", x.remedy)
		})
	}
}

func TestWriteText_LeavesTheTerminalAlone(t *testing.T) {
	r := Report{Sections: []Section{{Title: "cuda", Findings: []Finding{red("library", "look at /\x1b[2J/x", "/tmp/\x1b[2J\u009b\a: \nno library")}}}}
	var b strings.Builder
	if err := r.WriteText(&b, false); err != nil {
		t.Fatal(err)
	}
	if s := b.String(); strings.ContainsAny(s, "\x1b\a\u009b") || !strings.Contains(s, `/tmp/\x1b[2J\x9b\x07: ; no library`) {
		t.Errorf("%q", s)
	}
	if s := r.Err().Error(); strings.ContainsAny(s, "\x1b\n") {
		t.Errorf("%q", s)
	}
}
