package hostpool

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// pinned wraps an accelerator and notes what is pinned.
type pinned struct {
	*device.Accelerator
	before func(off, n int64) error // asked first; nil: nothing

	mu        sync.Mutex
	stretches [][2]int64 // offset and bytes; guarded by mu
}

func (p *pinned) Pin(m *device.Memory, off, n int64) error {
	if p.before != nil {
		if err := p.before(off, n); err != nil {
			return err
		}
	}
	p.mu.Lock()
	p.stretches = append(p.stretches, [2]int64{off, n})
	p.mu.Unlock()
	return p.Accelerator.Pin(m, off, n)
}

// onAccelerator is a rig with an accelerator, whatever the flag says.
func onAccelerator(t *testing.T, g *kv.Geometry, err error) *rig {
	t.Helper()
	noError(t, err)
	r := &rig{TB: t}
	r.host, err = device.OpenHost(device.HostOptions{PieceBytes: 1 << 20})
	noError(t, err)
	t.Cleanup(func() { noError(t, r.host.Close()) })
	r.acc, r.fake = devicetest.OpenAccelerator(t, devicetest.Options{Mode: devicetest.Random, Seed: 1, Pageable: true})
	r.dev = r.acc
	r.cache, err = kv.NewCache(g, r.dev)
	noError(t, err)
	t.Cleanup(func() { noError(t, r.cache.Close()) })
	r.copies = r.stream("copies")
	return r
}

// TestPin_StretchesEndWherePagesEnd: all of the memory is pinned, in order, no stretch in
// two pieces, each from the end of one OS page to the end of another, and of a page of the
// pool where it can be.
func TestPin_StretchesEndWherePagesEnd(t *testing.T) {
	osPage := int64(os.Getpagesize())
	for _, c := range []struct {
		bytes int64 // of a page
		pages int
		grow  int64
	}{
		{64, 1000, 1}, {4096, 300, 1}, {4096, 300, 100_000}, {90, 9000, 70_000}, {5000, 700, 8192}, {3 << 20, 5, 1}, {1<<20 + 1, 3, 1}, {12288, 100, 1 << 30},
	} {
		t.Run(fmt.Sprintf("%d pages of %d by %d", c.pages, c.bytes, c.grow), func(t *testing.T) {
			g, err := kv.OpaqueSpec{Layers: 1, Blocks: 2, PageSize: 1, BlockBytes: c.bytes, BlockStride: c.bytes, RegionBytes: 2 * c.bytes}.Geometry()
			r := onAccelerator(t, g, err)
			by := &pinned{Accelerator: r.acc}
			p, err := Open(Options{Cache: r.cache, Pages: c.pages, Host: r.host, Device: by, GrowBytes: c.grow})
			noError(t, err)
			r.closeAtEnd(p)
			noError(t, wait(p.Grown()))
			var end int64
			for _, s := range by.stretches {
				if s[0] != end || s[1] <= 0 {
					t.Fatalf("bytes [%d, +%d) are pinned, the stretch before ends at %d", s[0], s[1], end)
				}
				end += s[1]
				if end == p.memory.Size() {
					continue
				}
				piece := slices.IndexFunc(p.memory.Pieces(), func(x device.Piece) bool { return x.Off < end && end <= x.Off+x.Bytes })
				if from := p.memory.Pieces()[piece].Off; s[0] < from {
					t.Errorf("[%d, %d) lies in two pieces: one begins at %d", s[0], end, from)
				}
				if end%osPage != 0 || end%g.PageBytes() != 0 && unit(g.PageBytes()) > 1 && p.memory.Pieces()[piece].Off+p.memory.Pieces()[piece].Bytes != end {
					t.Errorf("a stretch ends at %d", end)
				}
			}
			if all, pageable := p.Pinned(); end != p.memory.Size() || all != end || pageable != 0 {
				t.Errorf("%d bytes of %d are pinned, %d said, %d pageable", end, p.memory.Size(), all, pageable)
			}
		})
	}
}

func TestUnit_EndsWithAnOSPage(t *testing.T) {
	osPage := int64(os.Getpagesize())
	for _, c := range []struct {
		bytes int64
		want  int64
	}{
		{osPage, 1},
		{1, osPage},
		{osPage / 4, 4},
		{3 * osPage, 1},
		{osPage + 1, osPage},
		{osPage * 3 / 2, 2},
		{maxUnit/osPage + 1, 1},
		{maxUnit / osPage, max(1, osPage*osPage/maxUnit)},
		{maxUnit + 1, 1},
	} {
		if got := int64(unit(c.bytes)); got != c.want {
			t.Errorf("%d bytes: %d pages, want %d", c.bytes, got, c.want)
		}
	}
}

// refusing is a rig whose device pins the first bytes of every pool only.
func refusing(t *testing.T, pages, good int) (*rig, Options, *pinned, *strings.Builder) {
	t.Helper()
	g, err := kv.Config{Layout: kv.NHD, DType: kv.FP8, Layers: 2, Pages: 8, PageSize: 4, KVHeads: 1, HeadDim: 256}.LayerMajor()
	r := onAccelerator(t, g, err) // pages of 4 KiB
	by, log := &pinned{Accelerator: r.acc}, new(strings.Builder)
	by.before = func(off, _ int64) error {
		if off >= int64(good)*g.PageBytes() {
			return fault.New(fault.Memory, "pin", "the limit of locked memory is reached")
		}
		return nil
	}
	return r, Options{
		Cache: r.cache, Pages: pages, Host: r.host, Device: by, GrowBytes: 1, Logger: slog.New(slog.NewTextHandler(log, nil)),
		Copier: copier.NewAccelerated(r.acc, r.acc.Engines()[0], copier.AcceleratedOptions{}),
	}, by, log
}

// TestPin_RefusedGoesOnWithoutAndSaysSo: with pages of both kinds of memory, the bytes are
// right.
func TestPin_RefusedGoesOnWithoutAndSaysSo(t *testing.T) {
	r, o, _, log := refusing(t, 6, 2)
	p, err := Open(o)
	noError(t, err)
	r.closeAtEnd(p)
	noError(t, wait(p.Grown()))
	n := p.PageBytes()
	if all, pageable := p.Pinned(); all != 2*n || pageable != 4*n {
		t.Errorf("%d bytes are pinned, %d pageable", all, pageable)
	}
	if got := log.String(); strings.Count(got, "level=WARN") != 1 || !strings.Contains(got, fmt.Sprintf("pinned_bytes=%d", 2*n)) || !strings.Contains(got, "locked memory") {
		t.Errorf("log %q", got)
	}
	host := r.claim(p, 6)
	var pairs []page.Pair
	for i, id := range host {
		r.write(page.ID(i), uint64(100+i))
		pairs = append(pairs, page.Pair{Dst: id, Src: page.ID(i)})
	}
	in, a := device.NewTicket(), new(Arrival)
	_, err = p.CopyInSummed(r.copies, pairs, a, in)
	noError(t, err)
	noError(t, wait(in))
	sums, _ := p.AppendSums(nil, a)
	noError(t, p.Commit(host...))
	r.poison()
	for i, id := range host {
		r.wantHost(p, id, uint64(100+i))
		if sums[i] != p.Sum(id) {
			t.Errorf("the sum of page %d is of something else", id)
		}
	}
	out := device.NewTicket()
	for i := range pairs {
		pairs[i] = page.Pair{Dst: page.ID((i + 1) % 6), Src: host[i]}
	}
	_, err = p.CopyOut(r.copies, pairs, out)
	noError(t, err)
	noError(t, wait(out))
	for i := range host {
		r.wantDevice(page.ID((i+1)%6), uint64(100+i))
	}
}

// TestPin_MustPinEndsTheGrowth, with the pages until then.
func TestPin_MustPinEndsTheGrowth(t *testing.T) {
	r, o, _, log := refusing(t, 6, 2)
	o.MustPin = true
	p, err := Open(o)
	noError(t, err)
	r.closeAtEnd(p)
	faulttest.Refused(t, wait(p.Grown()), fault.Memory, "host pool", "locked memory")
	if p.NumFree() != 2 || !strings.Contains(log.String(), "stopped growing") {
		t.Errorf("%d pages, log %q", p.NumFree(), log.String())
	}
}

// TestPin_ALostDeviceEndsTheGrowth: there is nothing to go on for.
func TestPin_ALostDeviceEndsTheGrowth(t *testing.T) {
	r, o, by, _ := refusing(t, 6, 6)
	before := by.before
	by.before = func(off, n int64) error {
		if off == p3(o) {
			return &device.DriverError{Call: "pin", Name: "GONE", Class: device.Lost}
		}
		return before(off, n)
	}
	p, err := Open(o)
	noError(t, err)
	r.closeAtEnd(p)
	lost, ok := errors.AsType[*device.DriverError](wait(p.Grown()))
	if !ok || lost.Class != device.Lost || p.NumFree() != 3 {
		t.Errorf("%v, %d pages", lost, p.NumFree())
	}
}

func p3(o Options) int64 { return 3 * o.Cache.Geometry().PageBytes() }

// TestPin_ComesBeforeThePagesCanBeClaimed.
func TestPin_ComesBeforeThePagesCanBeClaimed(t *testing.T) {
	r, o, by, _ := refusing(t, 4, 4)
	var p *Pool
	opened := make(chan struct{})
	by.before = func(off, _ int64) error {
		<-opened
		if free := p.NumFree(); int64(free) != off/p.PageBytes() {
			t.Errorf("%d pages can be claimed while [%d, …) is being pinned", free, off)
		}
		return nil
	}
	p, err := Open(o)
	noError(t, err)
	r.closeAtEnd(p)
	close(opened)
	noError(t, wait(p.Grown()))
}

// TestClose_UnpinsOnceNothingIsCopied: a pool with a copy in flight stays open and pinned.
func TestClose_UnpinsOnceNothingIsCopied(t *testing.T) {
	r, o, _, _ := refusing(t, 4, 4)
	p, err := Open(o)
	noError(t, err)
	noError(t, wait(p.Grown()))
	id := r.claim(p, 1)[0]
	release := r.hold(r.copies)
	in := r.offload(p, id, 0)
	faulttest.Refused(t, p.Close(), fault.Busy)
	faulttest.Refused(t, r.acc.Close(), fault.Busy)
	release()
	noError(t, wait(in))
	noError(t, p.Close())
}

// TestPool_OnFakesOfVendors: a round trip through the vendors' own libraries.
func TestPool_OnFakesOfVendors(t *testing.T) {
	for _, vendor := range []fakedriver.Vendor{fakedriver.CUDA, fakedriver.HIP} {
		t.Run(vendor.String(), func(t *testing.T) {
			f := fakedriver.Load(t, fakedriver.Options{Vendor: vendor})
			var acc *device.Accelerator
			var err error
			if vendor == fakedriver.CUDA {
				acc, err = cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
			} else {
				acc, err = hip.Open("0", hip.Options{Library: f.Path()})
			}
			noError(t, err)
			t.Cleanup(func() { noError(t, acc.Close()) })
			host, err := device.OpenHost(device.HostOptions{})
			noError(t, err)
			t.Cleanup(func() { noError(t, host.Close()) })
			g, err := shape.LayerMajor()
			noError(t, err)
			cache, err := kv.NewCache(g, acc)
			noError(t, err)
			t.Cleanup(func() { noError(t, cache.Close()) })
			s, err := acc.NewStream("copies")
			noError(t, err)
			t.Cleanup(func() { noError(t, s.Close()) })
			p, err := Open(Options{
				Cache: cache, Pages: 4, Host: host, Device: acc, MustPin: true,
				Copier: copier.NewAccelerated(acc, acc.Engines()[0], copier.AcceleratedOptions{}),
			})
			noError(t, err)
			t.Cleanup(func() { noError(t, p.Close()) })
			noError(t, wait(p.Grown()))

			rows := kv.Rows{DType: kv.BF16, Data: contents(g, 7)[:64]} // a token's heads, twice
			noError(t, cache.WriteTokens(1, kv.Rows{DType: kv.BF16, Data: rows.Data[:32]}, kv.Rows{DType: kv.BF16, Data: rows.Data[32:]}, []page.ID{2}, []int32{3}))
			noError(t, p.Offload(s, ann, []page.ID{2, 3}, Offloaded{}))
			noError(t, p.Settle(t.Context(), ann))
			back := device.NewTicket()
			_, err = p.Reload(s, ann, []page.ID{0, 5}, back)
			noError(t, err)
			noError(t, wait(back))
			got, err := cache.ReadTokens(nil, 1, []page.ID{0}, []int32{3})
			if err != nil || !slices.Equal(got, rows.Data) {
				t.Errorf("the token holds %x, want %x: %v", got, rows.Data, err)
			}
		})
	}
}
