package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// setUp measures what a peer costs before its first page: to open it, and, beyond what the
// same read costs once it is known, the first read of everything, which finds out where
// the peer's memory lies.
func (b *transferBench) setUp(ctx context.Context) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("set-up of one peer with %d MiB", b.o.MiB), Unit: "ms"}
	if len(b.variants) == 0 {
		return out, nil
	}
	pool := int64(b.o.MiB) << 20
	s := transferShape{PageBytes: min(512<<10, pool/2), Run: 1, Reads: 1, Seed: b.o.Seed}
	s.Pages = int(pool / s.PageBytes)
	x, err := b.open(ctx, s)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	times := make([]setUpTimes, len(x.parts))
	for run := range warmUps + b.o.Runs {
		for k := range x.parts {
			i := (run + k) % len(x.parts)
			if x.parts[i].name == inProcess {
				continue
			}
			if err := b.setUpOnce(ctx, x, x.parts[i], &times[i], run >= warmUps); err != nil {
				return out, fmt.Errorf("%s: %w", x.parts[i].name, err)
			}
		}
	}
	for i, p := range x.parts {
		if p.name == inProcess {
			continue
		}
		l := newLine(p.name+"  open", statOf(times[i].open), map[string]any{"engine": p.name, "what": "open", "bytes": pool})
		if p.name == engines.HostIPC {
			l.atMost("", 2)
		}
		first := newLine(p.name+"  first read, beyond the second", statOf(times[i].populate), map[string]any{"engine": p.name, "what": "populate", "bytes": pool})
		out.Lines = append(out.Lines, l, first)
	}
	return out, nil
}

// setUpTimes are milliseconds, run by run.
type setUpTimes struct{ open, populate []float64 }

// setUpOnce opens the owner as a reader does, and reads twice.
func (b *transferBench) setUpOnce(ctx context.Context, x *transferSide, p *transferReader, t *setUpTimes, counted bool) (err error) {
	now := b.o.clock()
	var plan transfer.Plan
	if err := plan.Set(0, len(x.local[0])*transferTokens, x.local[0], x.remote[0], transferTokens); err != nil {
		return err
	}
	target := transfer.Target{Cache: x.cache, Device: x.opened.Device, Copier: x.opened.Copier, Host: x.opened.Host}
	began := now()
	source, err := p.engine.Open(ctx, target, p.plain, p.plain.Offers[0].Data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	if _, err := source.Epoch(ctx, p.plain.Epoch.Word); err != nil {
		return err
	}
	opened := now()
	var took [2]float64
	for i := range took {
		from := now()
		if err := source.Copy(ctx, x.stream, &plan); err != nil {
			return err
		}
		took[i] = (now() - from).Seconds()
	}
	if counted {
		t.open = append(t.open, (opened-began).Seconds()*1e3)
		t.populate = append(t.populate, max(0, took[0]-took[1])*1e3)
	}
	return nil
}

// What planning is measured with.
const (
	planPages  = 10_000
	planLayers = 80
	planRow    = 16 // bytes: how large pages are is nothing to a plan
)

// planning measures how long it takes to make the boxes of a large read, from lists of
// pages. It needs no owner: the caches are this process's own.
func (b *transferBench) planning(context.Context) (out Section, err error) {
	out = Section{Title: fmt.Sprintf("planning a read of %s pages of %d layers", figure(planPages), planLayers), Unit: "ms"}
	host, err := b.o.openHost()
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	for _, far := range []string{LayerMajor, PageMajor} {
		for _, run := range []int{1, transferRun} {
			l, err := b.plan(host, far, run)
			if err != nil {
				return out, err
			}
			out.Lines = append(out.Lines, l)
		}
	}
	return out, nil
}

// plan measures one arrangement of the owner's pages; the reader's are layer-major.
func (b *transferBench) plan(host *device.Host, far string, run int) (l Line, err error) {
	c := kv.Config{Layout: kv.MLA, DType: kv.FP8, Layers: planLayers, LatentDim: planRow, PageSize: 1, Pages: planPages}
	near, err := c.LayerMajor()
	if err != nil {
		return l, err
	}
	theirs := near
	if far == PageMajor {
		if theirs, err = c.PageMajor(); err != nil {
			return l, err
		}
	}
	dst, err := kv.NewCache(near, host)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	src, err := kv.NewCache(theirs, host)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	route, err := kv.NewRoute(dst, src)
	if err != nil {
		return l, err
	}
	shape := transferShape{PageBytes: planRow * planLayers, Pages: planPages, Run: run, Reads: 1, Seed: b.o.Seed}
	local, remote := shape.orders()
	var plan transfer.Plan
	var boxes []kv.Box
	seconds, err := b.o.interleave(context.Background(), []contestant{{run: func() error {
		err := plan.Set(0, len(local[0]), local[0], remote[0], 1)
		if err == nil {
			boxes, err = plan.AppendBoxes(boxes[:0], route)
		}
		return err
	}}})
	if err != nil {
		return l, err
	}
	order := "any order"
	if run > 1 {
		order = fmt.Sprintf("runs of %d", run)
	}
	l = newLine(fmt.Sprintf("owner %s, %s", far, order), statOf(each(seconds[0][0], func(s float64) float64 { return s * 1e3 })), map[string]any{
		"pages": planPages, "layers": planLayers, "arrangement": far, "run": run, "boxes": len(boxes),
	})
	l.atMost("", 1)
	return l, nil
}
