package replay

import (
	"context"
	"math/rand/v2"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// The ceilings are measured after the run, in the pools' own memory: two more
// buffers would be other memory, and more of it. What the pools held is lost.
const (
	ceilingBytes = 512 << 20 // that one pass of a ceiling moves, at most
	passes       = 5
)

// measure finds the two ceilings of the copies and the shares that were reached.
//
// R has the rows of demotions and promotions of scattered pages, in the
// proportion that the run had them. Both run on one thread, as the stream does.
func (x *replay) measure(ctx context.Context) error {
	pool := x.pools.manager.Pool()
	if x.content == nil || pool == nil || x.r.CopyGBps == nil {
		return nil
	}
	device, err := x.pools.cache.Region(0)
	if err != nil {
		return err
	}
	host, err := pool.Cache().Region(0)
	if err != nil {
		return err
	}
	c := ceiling.Rate(ctx, ceiling.Pieces(device.Bytes(), host.Bytes(), ceilingBytes), passes)
	rows, err := x.rows(pool.Cache())
	if err != nil {
		return err
	}
	r := ceiling.Rate(ctx, rows, passes)
	if err := ctx.Err(); err != nil {
		return err
	}
	x.r.CeilingCGBps, x.r.CeilingRGBps = &c, &r
	x.r.ShareOfC, x.r.ShareOfR = new(*x.r.CopyGBps/c), new(*x.r.CopyGBps/r)
	return nil
}

// rows are those of randomly placed pages, demoted and promoted.
func (x *replay) rows(host *kv.Cache) (rows []ceiling.Row, err error) {
	down, err := kv.NewRoute(host, x.pools.cache)
	if err != nil {
		return nil, err
	}
	up, err := kv.NewRoute(x.pools.cache, host)
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(x.o.Seed, 0))
	onDevice, onHost := rng.Perm(x.pools.cache.Pages()-1), rng.Perm(host.Pages()) // without the sink
	moves := max(1, x.r.PagesOffloaded+x.r.PagesReloaded)
	for i := range int(max(1, ceilingBytes/x.r.PageBytes)) {
		route, pair := down, page.Pair{Dst: page.ID(onHost[i%len(onHost)]), Src: page.ID(1 + onDevice[i%len(onDevice)])}
		if int64(i)*x.r.PagesReloaded/moves != int64(i+1)*x.r.PagesReloaded/moves {
			route, pair.Dst, pair.Src = up, pair.Src, pair.Dst
		}
		if rows, err = ceiling.AppendPages(rows, route, pair); err != nil {
			return nil, err
		}
	}
	return rows, nil
}
