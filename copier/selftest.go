package copier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// patience is how long a self-test may take: a copier that makes it wait has failed.
const patience = 10 * time.Second

// grace is how long what was late is waited for, to give back what it uses.
const grace = time.Second

// SelfTest copies pages and tokens by c between memory of a and host memory of h, and
// compares every byte that may have changed, and every one that must not have: a round
// trip between pools of different sizes, several layers, runs and scattered pages, both
// forms of a host pool, and the order of events. It says which byte is wrong, or what
// refused. It takes some milliseconds and 10 MiB, on streams of its own.
//
// Kinds: fault.Device (bytes are wrong, or it is not done after 10 s), those of c and of
// a, ctx's error.
func SelfTest(ctx context.Context, c Copier, a *device.Accelerator, h *device.Host) (err error) {
	t, err := newTrial(a, h)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	return t.pass(ctx, c)
}

// trial is what self-tests copy between.
type trial struct {
	on                 *device.Accelerator
	cache, pool, wide  *kv.Cache      // of the device; of the host, page-major and layer-major
	stage, first, last *device.Memory // of the host, as large as cache
	ballast            [2]*device.Memory
	memories           []*device.Memory
	streams            []device.Stream
	pageable           error // why host memory is not pinned
	late               bool  // work may still be running, and for ever
}

const ballastBytes = 2 << 20

// newTrial makes caches of different sizes, so that no stride is that of the other side.
func newTrial(a *device.Accelerator, h *device.Host) (t *trial, err error) {
	t = &trial{on: a}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("self-test: %w", err), t.close())
		}
	}()
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 12, PageSize: 8, KVHeads: 2, HeadDim: 32}
	g, err := c.LayerMajor()
	if err != nil {
		return t, err
	}
	packed, err := g.Packed(20)
	if err != nil {
		return t, err
	}
	wide, err := g.PackedLayerMajor(17)
	if err != nil {
		return t, err
	}
	onDevice := a.Alloc
	onHost := func(n int64) (*device.Memory, error) { return t.allocHost(h, n) }
	for _, x := range []struct {
		cache **kv.Cache
		g     *kv.Geometry
		alloc func(int64) (*device.Memory, error)
	}{{&t.cache, g, onDevice}, {&t.pool, packed, onHost}, {&t.wide, wide, onHost}} {
		m, err := t.keep(x.alloc(x.g.Bytes()))
		if err != nil {
			return t, err
		}
		if *x.cache, err = kv.Wrap(x.g, []*device.Memory{m}); err != nil {
			return t, err
		}
	}
	for _, x := range []struct {
		m     **device.Memory
		bytes int64
		alloc func(int64) (*device.Memory, error)
	}{
		{&t.stage, g.Bytes(), onHost},
		{&t.first, g.Bytes(), onHost},
		{&t.last, g.Bytes(), onHost},
		{&t.ballast[0], ballastBytes, onDevice},
		{&t.ballast[1], ballastBytes, onHost},
	} {
		if *x.m, err = t.keep(x.alloc(x.bytes)); err != nil {
			return t, err
		}
	}
	return t, nil
}

func (t *trial) keep(m *device.Memory, err error) (*device.Memory, error) {
	if err == nil {
		t.memories = append(t.memories, m)
	}
	return m, err
}

// allocHost returns pinned host memory, or what there is where nothing can be pinned.
func (t *trial) allocHost(h *device.Host, n int64) (*device.Memory, error) {
	if t.pageable == nil {
		m, err := t.on.AllocHost(h, n, n)
		if err == nil || t.on.Lost() != nil {
			return m, err
		}
		t.pageable = err
	}
	m, err := h.Alloc(n)
	if err != nil {
		return nil, err
	}
	if err := t.on.AdmitPageable(m); err != nil {
		return nil, errors.Join(t.pageable, err, m.Free())
	}
	return m, nil
}

// rest closes the streams of a pass, which waits for their work.
func (t *trial) rest() {
	for _, s := range t.streams {
		_ = s.Close() // its failure was told by Sync
	}
	t.streams = nil
}

// close gives everything back: once the device is done with it, if it was late.
func (t *trial) close() error {
	if !t.late {
		return t.giveBack()
	}
	done := make(chan error, 1)
	go func() { done <- t.giveBack() }() // ends with the device's work
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return nil
	}
}

func (t *trial) giveBack() error {
	t.rest()
	var errs []error
	for _, m := range t.memories {
		errs = append(errs, m.Free())
	}
	t.memories = nil
	return errors.Join(errs...)
}

// pass runs the whole test of c, within the patience that there is.
func (t *trial) pass(ctx context.Context, c Copier) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience,
		fault.New(fault.Device, "self-test", "the device has not done its copies within %v", patience))
	defer cancel()
	r := &round{trial: t, c: c, ctx: ctx}
	defer func() {
		if !t.late {
			t.rest()
		}
	}()
	for _, s := range []*device.Stream{&r.s, &r.other} {
		stream, err := t.on.NewStream("self-test")
		if err != nil {
			return fmt.Errorf("self-test: %w", err)
		}
		*s, t.streams = stream, append(t.streams, stream)
	}
	for _, step := range []struct {
		name string
		run  func() error
	}{
		{"round trip through a page-major pool", func() error { return r.trip(t.pool, c.Copy) }},
		{"round trip through a layer-major pool", func() error { return r.trip(t.wide, c.Copy) }},
		{"sealed pages", r.sealed},
		{"tokens", r.tokens},
		{"order of events", r.ordered},
	} {
		if err := step.run(); err != nil {
			if t.late = ctx.Err() != nil; t.late && errors.Is(err, ctx.Err()) {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("self-test, %s: %w", step.name, err)
		}
	}
	return nil
}

// round is one self-test of one copier.
type round struct {
	*trial
	c        Copier
	ctx      context.Context //nolint:containedctx // lives no longer than the call that it was given to
	s, other device.Stream
}

// The pairs of a round trip: a run, pages that are adjacent on one side only, pages that
// are not at all, the first and the last page of either side; and pages of each side
// that nothing touches.
var (
	intoDevice = [...]page.Pair{{Dst: 4, Src: 9}, {Dst: 3, Src: 8}, {Dst: 5, Src: 10}, {Dst: 0, Src: 16}, {Dst: 1, Src: 2}, {Dst: 11, Src: 0}, {Dst: 9, Src: 5}}
	outOf      = [...]page.Pair{{Dst: 16, Src: 11}, {Dst: 2, Src: 0}, {Dst: 3, Src: 1}, {Dst: 4, Src: 2}, {Dst: 8, Src: 9}, {Dst: 0, Src: 7}, {Dst: 1, Src: 5}}
)

type pageCopy func(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error)

// trip copies pages of pool into the cache, and others out of it.
func (r *round) trip(pool *kv.Cache, do pageCopy) error {
	in, out, err := r.routes(pool)
	if err != nil {
		return err
	}
	host, err := hostBytes(pool)
	if err != nil {
		return err
	}
	want, err := r.fill('d')
	if err != nil {
		return err
	}
	pattern(host, 'h')
	before := bytes.Clone(host)
	if err := r.copyPages(in, intoDevice[:], do); err != nil {
		return err
	}
	for _, p := range intoDevice {
		placePage(want, r.cache, p.Dst, host, pool, p.Src, 0, r.cache.PageSize())
	}
	if err := r.compare(want); err != nil {
		return err
	}
	if err := same("the pool that was read", host, before); err != nil {
		return err
	}
	if err := r.copyPages(out, outOf[:], do); err != nil {
		return err
	}
	for _, p := range outOf {
		placePage(before, pool, p.Dst, want, r.cache, p.Src, 0, r.cache.PageSize())
	}
	if err := same("the pool", host, before); err != nil {
		return err
	}
	return r.compare(want)
}

// copyPages copies pairs and waits for them.
func (r *round) copyPages(route *kv.Route, pairs []page.Pair, do pageCopy) error {
	m, err := do(r.s, route, append([]page.Pair(nil), pairs...))
	if err = errors.Join(err, r.s.Sync(r.ctx)); err != nil {
		return err
	}
	if want := int64(len(pairs)) * route.PageBytes(); m.Bytes != want || m.Pages != len(pairs) {
		return fault.New(fault.Device, "copy", "reports %d pages and %d bytes, want %d and %d", m.Pages, m.Bytes, len(pairs), want)
	}
	return nil
}

// sealed copies sealed pages, where c makes a difference.
func (r *round) sealed() error {
	c, ok := r.c.(interface {
		CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (Moved, error)
	})
	if !ok {
		return nil
	}
	return r.trip(r.pool, c.CopySealed)
}

// tokens copies parts of pages, in both directions.
func (r *round) tokens() error {
	want, err := r.fill('t')
	if err != nil {
		return err
	}
	host, err := hostBytes(r.pool)
	if err != nil {
		return err
	}
	pattern(host, 'p')
	in, out, err := r.routes(r.pool)
	if err != nil {
		return err
	}
	wantHost := bytes.Clone(host)
	_, err = CopyTokens(r.c, r.s, in, 7, 18, 1, 4)
	if err = errors.Join(err, r.s.Sync(r.ctx)); err != nil {
		return err
	}
	placePage(want, r.cache, 7, host, r.pool, 18, 1, 4)
	if err := r.compare(want); err != nil {
		return err
	}
	_, err = CopyTokens(r.c, r.s, out, 3, 6, 5, 8)
	if err = errors.Join(err, r.s.Sync(r.ctx)); err != nil {
		return err
	}
	placePage(wantHost, r.pool, 3, want, r.cache, 6, 5, 8)
	return same("the pool", host, wantHost)
}

// ordered copies on one stream between what another one does, the engine's in its place:
// behind a write that the copy must see and a read that must not see the copy, and before
// a read that must.
func (r *round) ordered() error {
	old, err := r.fill('o')
	if err != nil {
		return err
	}
	host, err := hostBytes(r.pool)
	if err != nil {
		return err
	}
	in, out, err := r.routes(r.pool)
	if err != nil {
		return err
	}
	region, err := r.cache.Region(0)
	if err != nil {
		return err
	}
	before, behind := device.Event(nil), device.Event(nil)
	pattern(host, 'q')
	wantHost := bytes.Clone(host)
	want := make([]byte, len(old))
	pattern(want, 'n')
	copy(r.stage.Bytes(), want)
	move := func(s device.Stream, dst, src *device.Memory) func() error {
		return func() error { return s.Copy([]device.Op{{Dst: dst, Src: src, Bytes: min(dst.Size(), src.Size())}}) }
	}
	pages := func(route *kv.Route, pairs []page.Pair) func() error {
		return func() error {
			_, err := r.c.Copy(r.s, route, append([]page.Pair(nil), pairs...))
			return err
		}
	}
	busy := move(r.other, r.ballast[1], r.ballast[0])
	for _, step := range []func() error{
		func() (err error) { before, err = r.on.NewEvent(); return err },
		func() (err error) { behind, err = r.on.NewEvent(); return err },
		busy, busy, busy, busy,
		move(r.other, r.first, region),
		move(r.other, region, r.stage),
		func() error { return r.other.Record(before) },
		func() error { return r.s.Wait(before) },
		pages(out, outOf[:]),
		pages(in, intoDevice[:]),
		func() error { return r.s.Record(behind) },
		func() error { return r.other.Wait(behind) },
		move(r.other, r.last, region),
	} {
		if err = step(); err != nil {
			break
		}
	}
	if err = errors.Join(err, r.other.Sync(r.ctx), r.s.Sync(r.ctx)); err != nil {
		return err
	}
	for _, p := range outOf {
		placePage(wantHost, r.pool, p.Dst, want, r.cache, p.Src, 0, r.cache.PageSize())
	}
	for _, p := range intoDevice {
		placePage(want, r.cache, p.Dst, wantHost, r.pool, p.Src, 0, r.cache.PageSize())
	}
	return errors.Join(
		same("what was read before the copies", r.first.Bytes(), old),
		same("the pool", host, wantHost),
		same("what was read behind the copies", r.last.Bytes(), want))
}

// routes are those between the cache and pool.
func (r *round) routes(pool *kv.Cache) (in, out *kv.Route, err error) {
	if in, err = kv.NewRoute(r.cache, pool); err != nil {
		return nil, nil, err
	}
	out, err = kv.NewRoute(pool, r.cache)
	return in, out, err
}

// fill gives the cache the bytes of tag, and returns them.
func (r *round) fill(tag byte) ([]byte, error) {
	region, err := r.cache.Region(0)
	if err != nil {
		return nil, err
	}
	pattern(r.stage.Bytes(), tag)
	err = r.s.Copy([]device.Op{{Dst: region, Src: r.stage, Bytes: region.Size()}})
	return bytes.Clone(r.stage.Bytes()), errors.Join(err, r.s.Sync(r.ctx))
}

// compare compares every byte of the cache.
func (r *round) compare(want []byte) error {
	region, err := r.cache.Region(0)
	if err != nil {
		return err
	}
	clear(r.stage.Bytes())
	err = r.s.Copy([]device.Op{{Dst: r.stage, Src: region, Bytes: region.Size()}})
	if err = errors.Join(err, r.s.Sync(r.ctx)); err != nil {
		return err
	}
	return same("the cache of the device", r.stage.Bytes(), want)
}

func hostBytes(c *kv.Cache) ([]byte, error) {
	m, err := c.Region(0)
	if err != nil {
		return nil, err
	}
	return m.Bytes(), nil
}

// pattern fills b with bytes that tell tag and place.
func pattern(b []byte, tag byte) {
	for i := range b {
		x := (uint64(i/8) + uint64(tag)<<32 + 1) * 0x9e3779b97f4a7c15
		b[i] = byte(x >> (8 * (i % 8)))
	}
}

// placePage does what a copy of tokens [t0, t1) of a page must do, to the bytes of the
// caches, by nothing but the places of their planes.
func placePage(to []byte, dst *kv.Cache, dstPage page.ID, from []byte, src *kv.Cache, srcPage page.ID, t0, t1 int) {
	d, s := dst.Geometry().Spec(), src.Geometry().Spec()
	for l := range d.Layers {
		for i, dp := range d.Layers[l].Planes {
			sp := s.Layers[l].Planes[i]
			n := int64(t1-t0) * dp.TokenStride
			copy(to[dp.Offset+int64(dstPage)*dp.PageStride+int64(t0)*dp.TokenStride:][:n],
				from[sp.Offset+int64(srcPage)*sp.PageStride+int64(t0)*sp.TokenStride:][:n])
		}
	}
}

// same names the first byte that is not what it must be.
func same(what string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if got[i] != want[i] {
			return fault.New(fault.Device, what, "byte %d of %d is %#02x, want %#02x", i, len(want), got[i], want[i])
		}
	}
	return fault.New(fault.Device, what, "%d bytes, want %d", len(got), len(want))
}
