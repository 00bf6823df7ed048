package replay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
)

// spare is what the program needs beside its pools; pools get the rest of the
// memory at most.
const spare = 64 << 20

// bookBytes is what the books of a page take, bytes or not: entries, lists, owners.
const bookBytes = 512

// size returns o with the pages that the pools have, and refuses sizes that can't work
// before anything is made.
//
// a is the device of the device pages, nil when they are in host memory as well.
func (o Options) size(t *Trace, r *Result, a *device.Accelerator) (Options, error) {
	one, err := o.geometry(1)
	if err != nil {
		return o, err
	}
	r.PageBytes = one.PageBytes()
	_, largest := t.Largest(o.PageSize)
	auto := [2]bool{o.DevicePages == Auto, o.HostPages == Auto}
	o = o.withDefaultPages(largest)
	if err := CheckFits(t, o.PageSize, o.DevicePages); err != nil {
		return o, err
	}
	room, err := device.AvailableMemory()
	if err != nil {
		return o, err
	}
	if a != nil {
		if o, err = o.fitDevice(r, auto[0], largest, a); err != nil {
			return o, err
		}
		auto[0] = false
		room -= int64(o.DevicePages+1) * bookBytes
	}
	if o, err = o.fit(r, auto, largest, max(0, room-spare)/11*10/(r.PageBytes+bookBytes), a != nil); err != nil {
		return o, err
	}
	r.DevicePages, r.HostPages = int64(o.DevicePages), int64(o.HostPages)
	r.PoolBytes = int64(o.DevicePages+1+o.HostPages) * r.PageBytes
	return o, nil
}

// withDefaultPages settles what was left to Auto, whatever memory there is.
func (o Options) withDefaultPages(largest int) Options {
	if o.DevicePages == Auto {
		o.DevicePages = max(DefaultDevicePages, largest)
	}
	if o.HostPages == Auto {
		o.HostPages = DefaultHostPages
	}
	return o
}

// fitDevice makes the device pool smaller, if it may be chosen, until it fits into the
// memory of a, and says so. It may have much of it, but not all: whatever else uses the
// device needs some.
func (o Options) fitDevice(r *Result, auto bool, largest int, a *device.Accelerator) (Options, error) {
	if r.PageBytes == 0 {
		return o, nil
	}
	bytes := a.Attributes().Bytes
	room := bytes / 10 * 9 / r.PageBytes
	if int64(o.DevicePages)+1 <= room {
		return o, nil
	}
	if auto {
		o.DevicePages = max(largest, int(room/2)-1)
	}
	if int64(o.DevicePages)+1 > room {
		return o, fault.New(fault.Memory, "--device-pages", "%d pages (with the sink) of %s each: %s has %s, room for %d pages",
			o.DevicePages+1, figures.Size(r.PageBytes), a.Name(), figures.Size(bytes), room).
			Hint("use a smaller pool (--device-pages) or a smaller geometry")
	}
	r.Warnings = append(r.Warnings, fmt.Sprintf("the device pool is smaller than by default, to fit into the memory of %s: %d pages", a.Name(), o.DevicePages))
	return o, nil
}

// fit makes the pools that may be chosen smaller until all fit into room pages,
// and says so. The sink takes one. Pages on another device than the host (apart) take
// none of the room.
func (o Options) fit(r *Result, auto [2]bool, largest int, room int64, apart bool) (Options, error) {
	device := func() int64 {
		if apart {
			return 0
		}
		return int64(o.DevicePages) + 1
	}
	need := func() int64 { return device() + int64(o.HostPages) }
	if need() <= room {
		return o, nil
	}
	half := room / 2 // by default nobody wants to give a replay all of the memory
	switch {
	case auto[0] && auto[1]:
		o.DevicePages = int(max(int64(largest), min(int64(o.DevicePages), half*DefaultDevicePages/(DefaultDevicePages+DefaultHostPages))))
		o.HostPages = int(max(0, min(int64(o.HostPages), half-int64(o.DevicePages)-1)))
	case auto[0]:
		o.DevicePages = int(max(int64(largest), min(int64(o.DevicePages), half-int64(o.HostPages)-1)))
	case auto[1]:
		o.HostPages = int(max(0, min(int64(o.HostPages), half-device())))
	}
	if need() > room {
		return o, fault.New(fault.Memory, "pools", "%d device pages (with the sink) and %d host pages, each of %s and %d bytes of books: there is memory for %d pages",
			o.DevicePages+1, o.HostPages, figures.Size(r.PageBytes), bookBytes, room).
			Hint("use smaller pools (--device-pages, --host-pages), a smaller geometry, or --bookkeeping, whose pages have no bytes")
	}
	r.Warnings = append(r.Warnings, fmt.Sprintf("the pools are smaller than by default, to fit into memory: %d device and %d host pages", o.DevicePages, o.HostPages))
	return o, nil
}

// geometry is that of the device cache: one tensor, layer after layer.
func (o Options) geometry(pages int) (*kv.Geometry, error) {
	c := kv.Config{Pages: pages, PageSize: o.PageSize, Sink: pages > 1}
	if !o.Bookkeeping {
		c.Layers, c.KVHeads, c.HeadDim, c.LatentDim = o.Layers, o.KVHeads, o.HeadDim, o.LatentDim
		var err error
		if c.Layout, err = kv.ParseLayout(o.Layout); err != nil {
			return nil, err
		}
		if c.DType, err = kv.ParseDType(o.DType); err != nil {
			return nil, err
		}
	}
	return c.LayerMajor()
}

// pools are the memories of a replay and the manager over them.
type pools struct {
	opened  *accel.Opened
	cache   *kv.Cache
	window  *window // nil when the host can address the device's pages
	manager *kvferry.Manager
}

// open opens the device of a replay. One worker a stream: a share of a one-thread
// ceiling means something only then.
func (o Options) open(ctx context.Context) (*accel.Opened, error) {
	return accel.Open(ctx, o.Device, accel.Options{Libraries: o.Libraries, Copier: o.Copier, Workers: 1})
}

// openPools makes the pools and waits until they have their full size. It takes over
// what was opened, whatever it returns.
func openPools(ctx context.Context, o Options, opened *accel.Opened) (p *pools, err error) {
	p = &pools{opened: opened}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	g, err := o.geometry(o.DevicePages + 1)
	if err != nil {
		return p, err
	}
	if p.cache, err = kv.NewCache(g, opened.Device); err != nil {
		return p, err
	}
	checks, err := hostpool.ParseChecks(o.Checks)
	if err != nil {
		return p, err
	}
	p.manager, err = kvferry.Open(kvferry.Options{
		Cache: p.cache, Device: opened.Device, Host: opened.Host, Copier: opened.Copier, HostPages: o.HostPages,
		Inclusive: o.Tiers == Inclusive, WriteThrough: o.Tiers == WriteThrough, Checks: checks,
	})
	if err != nil {
		return p, err
	}
	// The host pool grows in the background meanwhile.
	for i := range g.Regions() {
		m, err := p.cache.Region(i)
		if err != nil {
			return p, err
		}
		const step = 64 << 20 // between two looks at ctx
		for off := int64(0); off < m.Size(); off += step {
			if err := errors.Join(ctx.Err(), m.Populate(off, min(step, m.Size()-off))); err != nil {
				return p, err
			}
		}
	}
	if opened.Accelerator != nil && g.PageBytes() > 0 {
		if p.window, err = openWindow(p); err != nil {
			return p, err
		}
	}
	return p, p.manager.Ready().Wait(ctx)
}

// copied says how many bytes the manager's stream has copied, and how long it was
// busy with them; known of the host's streams only.
func (p *pools) copied() (bytes int64, busy time.Duration, known bool) {
	if p.opened.Accelerator != nil {
		return 0, 0, false
	}
	if s := p.manager.Copies(); s != nil {
		bytes, busy = p.opened.Host.Copied(s)
	}
	return bytes, busy, true
}

// pinned says how many bytes of the host pool its device copies fast, and how many
// it does not: both 0 on the host.
func (p *pools) pinned() (pinned, pageable int64) {
	if pool := p.manager.Pool(); pool != nil {
		return pool.Pinned()
	}
	return 0, 0
}

func (p *pools) close() error {
	var errs []error
	if p.manager != nil {
		errs = append(errs, p.manager.Close(context.Background()))
	}
	if p.window != nil {
		errs = append(errs, p.window.close())
	}
	if p.cache != nil {
		errs = append(errs, p.cache.Close())
	}
	return errors.Join(append(errs, p.opened.Close())...)
}

// peakRSS is the most memory that the process has held, pools included; nil when
// the system does not say.
func peakRSS() *int64 {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" && f[2] == "kB" {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return new(n << 10)
			}
		}
	}
	return nil
}
