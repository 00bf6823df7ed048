package transfer

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// windowBytes is about how much of the pages of an accelerator is written or looked at
// at once.
const windowBytes = 4 << 20

// pages is a cache whose pages are written, and looked at, as functions of a seed. Those
// of an accelerator pass through a window: packed pages in host memory that it reaches.
type pages struct {
	opened *accel.Opened
	cache  *kv.Cache
	*contents

	window   *kv.Cache // nil when the host can address the cache
	memory   *device.Memory
	stream   device.Stream
	down, up *kv.Route // to the cache, and back
	pairs    []page.Pair
}

// newPages makes a cache of that geometry on a device. The opened device stays its
// caller's, and is closed after the pages.
func newPages(g *kv.Geometry, seed uint64, opened *accel.Opened) (p *pages, err error) {
	p = &pages{opened: opened}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.cache, err = kv.NewCache(g, opened.Device); err != nil {
		return p, err
	}
	if opened.Accelerator == nil {
		p.contents = newContents(p.cache, seed)
		return p, nil
	}
	one := max(1, g.PageBytes())
	packed, err := g.Packed(int(max(1, min(windowBytes/one, int64(g.Pages())))))
	if err != nil {
		return p, err
	}
	if p.memory, err = device.ReachableMemory(opened.Accelerator, opened.Host, packed.Bytes(), one); err != nil {
		return p, err
	}
	if p.window, err = kv.Wrap(packed, []*device.Memory{p.memory}); err != nil {
		return p, err
	}
	p.contents = newContents(p.window, seed)
	if p.stream, err = opened.Device.NewStream("contents"); err != nil {
		return p, err
	}
	if p.down, err = kv.NewRoute(p.cache, p.window); err != nil {
		return p, err
	}
	p.up, err = kv.NewRoute(p.window, p.cache)
	return p, err
}

// close frees the cache. Nothing is in flight.
func (p *pages) close() error {
	var errs []error
	if p.stream != nil {
		_ = p.stream.Close() // whatever failed on it was said when it was waited for
	}
	if p.memory != nil {
		errs = append(errs, p.memory.Free())
	}
	if p.cache != nil {
		errs = append(errs, p.cache.Close())
	}
	return errors.Join(errs...)
}

// write calls f for each of ids, with the page of the contents' cache that it has to
// write.
func (p *pages) write(ctx context.Context, ids []page.ID, f func(at page.ID, i int) error) error {
	return p.touch(ctx, ids, true, f)
}

// look calls f for each of ids, with the page of the contents' cache that has its bytes.
func (p *pages) look(ctx context.Context, ids []page.ID, f func(at page.ID, i int) error) error {
	return p.touch(ctx, ids, false, f)
}

func (p *pages) touch(ctx context.Context, ids []page.ID, writes bool, f func(at page.ID, i int) error) error {
	group := len(ids)
	if p.window != nil {
		group = p.window.Pages()
	}
	for from := 0; from < len(ids); from += group {
		some := ids[from:min(from+group, len(ids))]
		if p.window != nil && !writes {
			if err := p.carry(p.up, some, false); err != nil {
				return err
			}
		}
		for k, at := range some {
			if p.window != nil {
				at = page.ID(k)
			}
			if err := errors.Join(ctx.Err(), f(at, from+k)); err != nil {
				return err
			}
		}
		if p.window != nil && writes {
			if err := p.carry(p.down, some, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// carry copies between the first pages of the window and ids, and waits.
func (p *pages) carry(r *kv.Route, ids []page.ID, down bool) error {
	p.pairs = p.pairs[:0]
	for k, id := range ids {
		pair := page.Pair{Dst: page.ID(k), Src: id}
		if down {
			pair.Dst, pair.Src = pair.Src, pair.Dst
		}
		p.pairs = append(p.pairs, pair)
	}
	_, err := p.opened.Copier.Copy(p.stream, r, p.pairs)
	if synced := p.stream.Sync(context.Background()); err == nil {
		err = synced
	}
	return err
}
