package replay

import (
	"context"
	"errors"
	"math/rand/v2"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/device"
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
// R has the rows of demotions and promotions of scattered pages, in the proportion
// that the run had them: it is the better of a bare loop of Go's copy and of a bare
// stream that is given all of them at once. All of it runs on one thread, as the
// copies of the run did.
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
	ops, err := x.ops(pool.Cache())
	if err != nil {
		return err
	}
	r := ceiling.Rate(ctx, ceiling.AppendOps(nil, ops), passes)
	streamed, err := x.streamRate(ctx, ops)
	if err != nil {
		return err
	}
	r = max(r, streamed)
	x.r.CeilingCGBps, x.r.CeilingRGBps = &c, &r
	x.r.ShareOfC, x.r.ShareOfR = new(*x.r.CopyGBps/c), new(*x.r.CopyGBps/r)
	return nil
}

// streamRate gives ops to an idle stream a few times and returns the best rate in GB/s.
func (x *replay) streamRate(ctx context.Context, ops []device.Op) (best float64, err error) {
	s, err := x.pools.opened.Host.NewStream("ceiling")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for range passes {
		bytes, busy := x.pools.opened.Host.Copied(s)
		if err := errors.Join(s.Copy(ops), s.Sync(ctx)); err != nil {
			return 0, err
		}
		bytesNow, busyNow := x.pools.opened.Host.Copied(s)
		best = max(best, float64(bytesNow-bytes)/(busyNow-busy).Seconds()/1e9)
	}
	return best, nil
}

// ops are those of randomly placed pages, demoted and promoted. No page is in two of
// them: the ops of one call may run in any order.
func (x *replay) ops(host *kv.Cache) (ops []device.Op, err error) {
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
	pages := min(int64(len(onDevice)), int64(len(onHost)), max(1, ceilingBytes/x.r.PageBytes))
	for i := int64(0); i < pages && len(ops) < ceiling.MaxRows; i++ {
		route, pair := down, page.Pair{Dst: page.ID(onHost[i]), Src: page.ID(1 + onDevice[i])}
		if i*x.r.PagesReloaded/moves != (i+1)*x.r.PagesReloaded/moves {
			route, pair.Dst, pair.Src = up, pair.Src, pair.Dst
		}
		if ops, err = ceiling.AppendPageOps(ops, route, pair); err != nil {
			return nil, err
		}
	}
	return ops, nil
}
