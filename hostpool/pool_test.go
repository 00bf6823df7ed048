package hostpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestOpen_RefusesWhatCannotBe(t *testing.T) {
	r := newShapeRig(t)
	for _, c := range []struct {
		name  string
		o     Options
		kind  fault.Kind
		words []string
	}{
		{"no cache", Options{Pages: 1, Host: r.host}, fault.Invalid, []string{"cache"}},
		{"no host", Options{Pages: 1, Cache: r.cache}, fault.Invalid, []string{"host device"}},
		{"no pages", Options{Cache: r.cache, Host: r.host}, fault.Invalid, []string{"0 pages", "1 to 2147483647"}},
		{"too many pages", Options{Cache: r.cache, Host: r.host, Pages: 1 << 31}, fault.Invalid, []string{"2147483648"}},
		{"negative growth", Options{Cache: r.cache, Host: r.host, Pages: 1, GrowBytes: -1}, fault.Invalid, []string{"-1"}},
		{"more than there is", Options{Cache: r.cache, Host: r.host, Pages: 1<<31 - 1}, fault.Memory, []string{"2147483647 pages"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Open(c.o)
			faulttest.Refused(t, err, c.kind, c.words...)
		})
	}
}

// TestPool_RoundTrip takes pages to the host and back onto other device pages, in
// every arrangement of the device cache.
func TestPool_RoundTrip(t *testing.T) {
	hnd, mla, odd := shape, shape, shape
	hnd.Layout = kv.HND
	mla.Layout, mla.KVHeads, mla.HeadDim, mla.LatentDim = kv.MLA, 0, 0, 24
	odd.DType, odd.PageSize, odd.KVHeads, odd.HeadDim, odd.Layers = kv.INT8, 3, 1, 5, 3 // pages of 90 bytes
	for _, c := range []struct {
		name    string
		arrange func() (*kv.Geometry, error)
	}{
		{"LayerMajor", shape.LayerMajor},
		{"PageMajor", shape.PageMajor},
		{"PerLayerKVFirst", shape.PerLayerKVFirst},
		{"PerLayerPageFirst", shape.PerLayerPageFirst},
		{"HND", hnd.LayerMajor},
		{"MLA", mla.PerLayerPageFirst},
		{"OddSizes", odd.LayerMajor},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, err := c.arrange()
			r := newRig(t, g, err)
			p := r.pool(4)
			if p.PageBytes() != g.PageBytes() || p.Pages() != 4 || p.NumFree() != 4 {
				t.Fatalf("%d pages of %d bytes, %d free; want 4 of %d", p.Pages(), p.PageBytes(), p.NumFree(), g.PageBytes())
			}
			for dev := range page.ID(4) {
				r.write(dev, 100+uint64(dev))
			}
			ids := r.claim(p, 3)
			out, a := device.NewTicket(), new(Arrival)
			_, err = p.CopyInSummed(r.copies, []page.Pair{{Dst: ids[0], Src: 2}, {Dst: ids[2], Src: 0}, {Dst: ids[1], Src: 3}}, a, out)
			noError(t, err)
			noError(t, wait(out))
			if len(a.digests) != 3 && r.acc == nil {
				t.Errorf("%d pages were summed as they were copied, want 3", len(a.digests))
			}
			if sums, took := p.AppendSums(nil, a); !slices.Equal(sums, []Sum{p.Sum(ids[0]), p.Sum(ids[2]), p.Sum(ids[1])}) || took <= 0 {
				t.Errorf("in %v, sums %x", took, sums)
			}
			noError(t, p.Commit(ids...))
			r.poison()
			for i, key := range []uint64{102, 103, 100} {
				r.wantHost(p, ids[i], key)
				want := xxh3.Hash128(contents(g, key))
				if got := p.Sum(ids[i]); got != (Sum{Hi: want.Hi, Lo: want.Lo}) {
					t.Errorf("page %d has sum %x, want %x", ids[i], got, want)
				}
			}
			back := device.NewTicket()
			_, err = p.CopyOut(r.copies, []page.Pair{{Dst: 5, Src: ids[0]}, {Dst: 1, Src: ids[1]}, {Dst: 0, Src: ids[2]}}, back)
			noError(t, err)
			noError(t, wait(back))
			r.wantDevice(5, 102)
			r.wantDevice(1, 103)
			r.wantDevice(0, 100)
			for _, other := range []page.ID{2, 3, 4} {
				if b := r.read(other); !bytes.Equal(b, bytes.Repeat([]byte{0xAB}, len(b))) {
					t.Errorf("device page %d was touched", other)
				}
			}
		})
	}
}

// plainCopier is a copier that can do no more than it must.
type plainCopier struct{ copier.Copier }

// TestArrival_OfACopierWithoutDigestsSumsWhatArrived, and so does one used again.
func TestArrival_OfACopierWithoutDigestsSumsWhatArrived(t *testing.T) {
	r := newShapeRig(t)
	a := new(Arrival)
	for _, c := range []copier.Copier{nil, plainCopier{copier.NewPortable()}, nil} {
		p, err := Open(r.options(Options{Pages: 3, Copier: c}))
		noError(t, err)
		r.closeAtEnd(p)
		noError(t, wait(p.Grown()))
		ids, out := r.claim(p, 2), device.NewTicket()
		_, err = p.CopyInSummed(r.copies, []page.Pair{{Dst: ids[1], Src: 0}, {Dst: ids[0], Src: 4}}, a, out)
		noError(t, err)
		noError(t, wait(out))
		if summed := len(a.digests) > 0; summed != (c == nil && r.acc == nil) {
			t.Errorf("copier %T: summed while copied: %v", c, summed)
		}
		if sums, _ := p.AppendSums(nil, a); !slices.Equal(sums, []Sum{p.Sum(ids[1]), p.Sum(ids[0])}) {
			t.Errorf("copier %T: sums %x", c, sums)
		}
	}
}

func TestArrival_OfARefusedCopyLeavesThePagesAlone(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(2)
	ids, out := r.claim(p, 1), device.NewTicket()
	_, err := p.CopyInSummed(r.copies, []page.Pair{{Dst: ids[0], Src: 77}}, new(Arrival), out)
	faulttest.Refused(t, err, fault.Invalid)
	faulttest.Refused(t, wait(out), fault.Invalid)
	noError(t, p.Abandon(ids...))
	_, err = p.CopyInSummed(r.copies, []page.Pair{{Dst: ids[0], Src: 0}}, new(Arrival), device.NewTicket())
	faulttest.Refused(t, err, fault.Invalid, "is free")
}

func TestSum_IsOfThePageAlone(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(3)
	before, sums := r.claim(p, 3), []Sum{}
	for i, id := range before {
		noError(t, wait(r.offload(p, id, page.ID(i))))
		sums = append(sums, p.Sum(id))
	}
	hostBytes(t, p, before[1])[17] ^= 1
	for i, id := range before {
		if changed := p.Sum(id) != sums[i]; changed != (i == 1) {
			t.Errorf("sum of page %d changed: %v", id, changed)
		}
	}
}

func TestPool_OfOnePage(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(1)
	id := r.keep(p, 3, 7)
	_, err := p.Claim(nil, 1)
	faulttest.Refused(t, err, fault.Full)
	noError(t, wait(r.reload(p, 0, id)))
	r.wantDevice(0, 7)
	noError(t, p.Release(id))
	if again := r.keep(p, 1, 8); again != id {
		t.Errorf("page %d in a pool of one", again)
	}
	r.wantHost(p, id, 8)
}

func TestPool_FullRefusesWithItsShortfallAndNothingMoves(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(4)
	mine := []page.ID{77}
	mine, err := p.Claim(mine, 2)
	noError(t, err)
	got, err := p.Claim(mine, 5)
	var full *page.FullError
	if !errors.As(err, &full) || full.Shortfall() != 3 || full.Free != 2 {
		t.Fatalf("got error %v, want a shortfall of 3", err)
	}
	faulttest.Refused(t, err, fault.Full, "host pool")
	if !slices.Equal(got, mine) || p.NumFree() != 2 {
		t.Errorf("the refused claim left %v of %v and %d free pages", got, mine, p.NumFree())
	}
}

// TestPool_WithoutBytes is the pool of bookkeeping runs: the states are those of
// any pool, the copies done at once, without a stream.
func TestPool_WithoutBytes(t *testing.T) {
	g, err := kv.Config{Pages: 6, PageSize: 4}.LayerMajor()
	r := newRig(t, g, err)
	p := r.pool(3)
	if done, err := p.Grown().Poll(); !done || err != nil || p.NumFree() != 3 {
		t.Fatalf("grown: %v (error %v), %d free pages", done, err, p.NumFree())
	}
	ids := r.claim(p, 2)
	out, back := device.NewTicket(), device.NewTicket()
	moved, err := p.CopyIn(nil, []page.Pair{{Dst: ids[0], Src: 1}}, out)
	noError(t, err)
	if done, err := out.Poll(); !done || err != nil || moved != (copier.Moved{Pages: 1}) {
		t.Fatalf("moved %+v, done %v, error %v", moved, done, err)
	}
	a := new(Arrival)
	_, err = p.CopyInSummed(nil, []page.Pair{{Dst: ids[0], Src: 1}}, a, device.NewTicket())
	noError(t, err)
	if sums, _ := p.AppendSums(nil, a); !slices.Equal(sums, []Sum{p.Sum(ids[0])}) {
		t.Errorf("sums %x", sums)
	}
	faulttest.Refused(t, p.Release(ids[0]), fault.Invalid)
	noError(t, p.Commit(ids[0]))
	_, err = p.CopyOut(nil, []page.Pair{{Dst: 1, Src: ids[1]}}, back)
	faulttest.Refused(t, err, fault.Invalid, "is claimed")
	if p.Sum(ids[0]) != p.Sum(ids[1]) {
		t.Error("pages without bytes differ")
	}
	noError(t, errors.Join(p.Abandon(ids[1]), p.Release(ids[0])))
}

func TestPool_GrowsInTheBackground(t *testing.T) {
	r := newShapeRig(t)
	const pages = 500
	p, err := Open(r.options(Options{Pages: pages, GrowBytes: 1}))
	noError(t, err)
	r.closeAtEnd(p)
	var ids []page.ID
	for range pages { // claims what exists, as it comes into being
		got, err := p.Claim(ids, 1)
		if err != nil {
			faulttest.Refused(t, err, fault.Full)
			if len(got) != len(ids) {
				t.Fatal("a refused claim gave pages")
			}
			continue
		}
		ids = got
	}
	noError(t, wait(p.Grown()))
	noError(t, p.Check())
	rest, err := p.Claim(ids, pages-len(ids))
	noError(t, err)
	slices.Sort(rest)
	for i, id := range rest {
		if int(id) != i {
			t.Fatalf("the pool's pages are %v", rest)
		}
	}
}

func TestClose_DuringGrowth(t *testing.T) {
	for range 20 {
		r := newShapeRig(t)
		p, err := Open(r.options(Options{Pages: 4096, GrowBytes: 1}))
		noError(t, err)
		ids, _ := p.Claim(nil, 1)
		noError(t, p.Close())
		switch done, err := p.Grown().Poll(); {
		case !done:
			t.Fatal("closed, and still growing")
		case err != nil:
			faulttest.Refused(t, err, fault.Closed, "of 4096 pages")
		}
		faulttest.Refused(t, p.Close(), fault.Closed)
		_, err = p.Claim(nil, 1)
		faulttest.Refused(t, err, fault.Closed)
		late := device.NewTicket()
		_, err = p.CopyIn(r.copies, []page.Pair{{Dst: 0, Src: 0}}, late)
		faulttest.Refused(t, err, fault.Closed)
		faulttest.Refused(t, wait(late), fault.Closed)
		if len(ids) > 0 {
			if b, err := p.Cache().Page(ids[0]); err == nil {
				t.Fatalf("a closed pool still shows %d bytes", len(b))
			}
		}
	}
}

func TestGrowth_ThatIsStoppedSaysHowFarItCame(t *testing.T) {
	r := newShapeRig(t)
	p, err := prepare(r.options(Options{Pages: 3}))
	noError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	p.grow(ctx, 1)
	faulttest.Refused(t, wait(p.Grown()), fault.Closed, "0 of 3 pages")
	noError(t, p.memory.Free())
}

func TestGrowth_ThatFailsIsToldAndLogged(t *testing.T) {
	r := newShapeRig(t)
	var log strings.Builder
	p, err := prepare(r.options(Options{Pages: 3, Logger: slog.New(slog.NewTextHandler(&log, nil))}))
	noError(t, err)
	noError(t, p.extend(0, 2))
	noError(t, p.memory.Free())
	p.grow(t.Context(), 1)
	_, err = p.Grown().Poll()
	faulttest.Refused(t, err, fault.Closed, "freed")
	if p.NumFree() != 2 || !strings.Contains(log.String(), "stopped growing") || !strings.Contains(log.String(), "asked=3") {
		t.Errorf("%d free pages, log %q", p.NumFree(), log.String())
	}
}

// half copies half of what it is asked for, and then fails; the stream is well.
type half struct{ copier.Copier }

func (h half) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	moved, err := h.Copier.Copy(s, r, pairs[:len(pairs)/2])
	return moved, errors.Join(err, fault.New(fault.Device, "copier", "ran out of ops"))
}

func TestOffload_ThatFailedHalfwayIsNeverASuccess(t *testing.T) {
	r := newShapeRig(t)
	p, err := Open(r.options(Options{Pages: 2, Copier: half{copier.NewPortable()}}))
	noError(t, err)
	r.closeAtEnd(p)
	noError(t, wait(p.Grown()))
	ids := r.claim(p, 2)
	release := r.hold(r.copies)
	ticket := device.NewTicket()
	_, err = p.CopyIn(r.copies, []page.Pair{{Dst: ids[0], Src: 0}, {Dst: ids[1], Src: 1}}, ticket)
	faulttest.Refused(t, err, fault.Device, "ran out of ops")
	// What was enqueued has not run: all pages of the call are still in use.
	faulttest.Refused(t, p.Abandon(ids[0]), fault.Busy)
	faulttest.Refused(t, p.Abandon(ids[1]), fault.Busy)
	faulttest.Refused(t, p.Close(), fault.Busy)
	release()
	faulttest.Refused(t, wait(ticket), fault.Device, "ran out of ops")
	faulttest.Refused(t, p.Commit(ids[0]), fault.Device, "ran out of ops")
	noError(t, p.Abandon(ids...))
}

func TestOffload_OnAClosedStream(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(1)
	id := r.claim(p, 1)[0]
	noError(t, r.copies.Close())
	ticket := device.NewTicket()
	_, err := p.CopyIn(r.copies, []page.Pair{{Dst: id, Src: 0}}, ticket)
	faulttest.Refused(t, err, fault.Closed)
	faulttest.Refused(t, wait(ticket), fault.Closed)
	faulttest.Refused(t, p.Commit(id), fault.Device)
	noError(t, p.Abandon(id))
}

// TestClose_WhileAFailedStreamStillNamesTheMemory: a failed stream completes the
// tickets of new work at once, with older work still in its queue.
func TestClose_WhileAFailedStreamStillNamesTheMemory(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(2)
	ids := r.claim(p, 2)
	r.breaks(r.copies)
	let := r.hold(r.copies) // until the ticket is in the queue: a stream known to have failed takes none
	copied := r.offload(p, ids[0], 0)
	let()
	faulttest.Refused(t, wait(copied), fault.Device)
	// Work of somebody else, with the pool's memory, that the pool knows nothing of.
	other := r.stream("other")
	release := r.hold(other)
	noError(t, other.Copy([]device.Op{{Dst: p.memory, Src: p.memory, SrcOff: p.PageBytes(), Bytes: p.PageBytes()}}))
	faulttest.Refused(t, p.Close(), fault.Busy)
	noError(t, p.Abandon(ids[0])) // it is open still
	release()
	noError(t, other.Sync(t.Context()))
}

// TestRelease_WaitsForTheCopy is the rule of the package comment, with a control:
// a pool that forgets its copies in flight gives their pages away too early, and
// the bytes are wrong.
func TestRelease_WaitsForTheCopy(t *testing.T) {
	for _, forget := range []bool{false, true} {
		name := "Waits"
		if forget {
			name = "NegativeControl_ForgettingGoesWrong"
		}
		t.Run("Reload"+name, func(t *testing.T) {
			r := newShapeRig(t)
			p := r.pool(1)
			id := r.keep(p, 0, 1)
			r.poison()
			release := r.hold(r.copies)
			ticket := r.reload(p, 5, id)
			if forget {
				p.last[id] = nil
				noError(t, p.Release(id))
			} else {
				faulttest.Refused(t, p.Release(id), fault.Busy)
				release()
				noError(t, wait(ticket))
				noError(t, p.Release(id))
			}
			// The next owner writes, by itself or through another stream.
			next := r.claim(p, 1)[0]
			copy(hostBytes(t, p, next), contents(r.cache.Geometry(), 2))
			release()
			noError(t, wait(ticket))
			if right := r.holds(r.read(5), 1); right == forget {
				t.Errorf("device bytes right: %v", right)
			}
		})
		t.Run("Offload"+name, func(t *testing.T) {
			r := newShapeRig(t)
			p := r.pool(1)
			r.write(0, 1)
			id := r.claim(p, 1)[0]
			release := r.hold(r.copies)
			ticket := r.offload(p, id, 0)
			if forget {
				p.last[id] = nil
			} else {
				faulttest.Refused(t, p.Commit(id), fault.Busy)
				release()
				noError(t, wait(ticket))
			}
			noError(t, p.Commit(id))
			if right := r.holds(hostBytes(t, p, id), 1); right == forget {
				t.Errorf("bytes right at commit: %v", right)
			}
			release()
			noError(t, wait(ticket))
		})
	}
}

// TestReload_OfOnePageOnTwoStreamsIsRefused: the ticket of the later copy would
// say nothing about the earlier one.
func TestReload_OfOnePageOnTwoStreamsIsRefused(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(1)
	id := r.keep(p, 0, 1)
	other := r.stream("other")
	release := r.hold(r.copies)
	first := r.reload(p, 4, id)
	second := device.NewTicket()
	_, err := p.CopyOut(other, []page.Pair{{Dst: 5, Src: id}}, second)
	faulttest.Refused(t, err, fault.Busy)
	faulttest.Refused(t, p.Release(id), fault.Busy)
	release()
	noError(t, wait(first))
	r.wantDevice(4, 1)
}

// TestPool_ManyGoroutines has each goroutine move its own two device pages through
// a pool that is too small for all, while it grows.
func TestPool_ManyGoroutines(t *testing.T) {
	const workers, rounds = 6, 60
	c := shape
	c.Pages = 2 * workers
	g, err := c.LayerMajor()
	r := newRig(t, g, err)
	p, err := Open(r.options(Options{Pages: workers, GrowBytes: 1}))
	noError(t, err)
	r.closeAtEnd(p)
	streams := []device.Stream{r.copies, r.stream("second")}
	var wg sync.WaitGroup
	for w := range page.ID(workers) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(w)))
			for done := 0; done < rounds; {
				s := streams[rng.IntN(2)]
				switch err := trip(r, p, s, w, rng.Uint64()); {
				case err == nil:
					done++
				case errors.Is(err, fault.Full): // it has not grown yet, or others have it
					runtime.Gosched()
				default:
					t.Errorf("worker %d, trip %d: %v", w, done, err)
					return
				}
			}
		})
	}
	wg.Wait()
	noError(t, wait(p.Grown()))
	noError(t, p.Check())
	if p.NumFree() != workers {
		t.Errorf("%d of %d pages are free after the last trip", p.NumFree(), workers)
	}
}

// trip moves a page of w down and up again, or abandons it half of the times.
func trip(r *rig, p *Pool, s device.Stream, w page.ID, key uint64) error {
	ids, err := p.Claim(nil, 2)
	if err != nil {
		return err
	}
	r.write(2*w, key)
	down, up := device.NewTicket(), device.NewTicket()
	if _, err := p.CopyIn(s, []page.Pair{{Dst: ids[0], Src: 2 * w}}, down); err != nil {
		return err
	}
	if err := p.Commit(ids[0]); err == nil { // the copy was quick
		if done, _ := down.Poll(); !done {
			return errors.New("committed with its copy in flight")
		}
	} else if !errors.Is(err, fault.Busy) {
		return err
	} else if err := errors.Join(wait(down), p.Commit(ids[0])); err != nil {
		return err
	}
	if key%2 == 0 {
		return errors.Join(p.Abandon(ids[1]), p.Release(ids[0]))
	}
	if _, err := p.CopyOut(s, []page.Pair{{Dst: 2*w + 1, Src: ids[0]}}, up); err != nil {
		return err
	}
	if err := errors.Join(p.Abandon(ids[1]), wait(up), p.Release(ids[0])); err != nil {
		return err
	}
	if !r.holds(r.read(2*w+1), key) {
		return fmt.Errorf("device page %d does not hold the bytes of key %d", 2*w+1, key)
	}
	return nil
}
