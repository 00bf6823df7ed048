package replay

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// windowBytes is about how much of the device's pages is written or looked at at once.
const windowBytes = 4 << 20

// window is pinned host memory for pages of a device that the host can't address: what
// replay writes passes through it on the way down, and what it compares on the way up.
// Pages of the window are packed, which changes nothing inside a plane.
type window struct {
	copier   copier.Copier
	memory   *device.Memory
	cache    *kv.Cache // over memory
	stream   device.Stream
	down, up *kv.Route // to the device, and back
	pairs    []page.Pair
	filled   int
}

func openWindow(p *pools) (w *window, err error) {
	w = &window{copier: p.opened.Copier}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	one := p.cache.Geometry().PageBytes()
	g, err := p.cache.Geometry().Packed(int(max(1, windowBytes/one)))
	if err != nil {
		return w, err
	}
	if w.memory, err = device.ReachableMemory(p.opened.Accelerator, p.opened.Host, g.Bytes(), one); err != nil {
		return w, err
	}
	if w.cache, err = kv.Wrap(g, []*device.Memory{w.memory}); err != nil {
		return w, err
	}
	if w.stream, err = p.opened.Device.NewStream("engine"); err != nil {
		return w, err
	}
	if w.down, err = kv.NewRoute(p.cache, w.cache); err != nil {
		return w, err
	}
	w.up, err = kv.NewRoute(w.cache, p.cache)
	return w, err
}

func (w *window) close() error {
	var errs []error
	if w.stream != nil {
		_ = w.stream.Close() // whatever failed on it was said when it was waited for
	}
	if w.memory != nil {
		errs = append(errs, w.memory.Free())
	}
	return errors.Join(errs...)
}

// place returns the window's page for what is to be written into page id of the device,
// after it has made room.
func (w *window) place(id page.ID) (page.ID, error) {
	if w.filled == w.cache.Pages() {
		if err := w.flush(); err != nil {
			return 0, err
		}
	}
	at := page.ID(w.filled)
	w.filled++
	w.pairs = append(w.pairs, page.Pair{Dst: id, Src: at})
	return at, nil
}

// flush copies to the device what was written, and waits.
func (w *window) flush() error {
	err := w.carry(w.down)
	w.filled = 0
	return err
}

// fetch returns the window's page with what page i of pages holds. Pages are asked for
// one after the other, from the first on.
func (w *window) fetch(pages []page.ID, i int) (page.ID, error) {
	at := i % w.cache.Pages()
	if at > 0 {
		return page.ID(at), nil
	}
	for k, id := range pages[i:min(i+w.cache.Pages(), len(pages))] {
		w.pairs = append(w.pairs, page.Pair{Dst: page.ID(k), Src: id})
	}
	return 0, w.carry(w.up)
}

func (w *window) carry(r *kv.Route) error {
	_, err := w.copier.Copy(w.stream, r, w.pairs)
	w.pairs = w.pairs[:0]
	if synced := w.stream.Sync(context.Background()); err == nil {
		err = synced
	}
	return err
}
