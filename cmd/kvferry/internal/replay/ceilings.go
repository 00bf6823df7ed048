package replay

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// The ceilings are measured after the run, in the pools' own memory: two more
// buffers would be other memory, and more of it. What the pools held is lost.
const (
	pieceBytes   = 64 << 20  // of ceiling C
	ceilingBytes = 512 << 20 // that one pass of a ceiling moves, at most
	passes       = 5
)

// measure finds the two ceilings of the copies and the shares that were reached.
//
// C is Go's copy of 64 MiB pieces between the two pools. R is a bare loop over
// the very rows that demotions and promotions of scattered pages are made of, in
// the proportion that the run had them. Both run on one thread, as the stream does.
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
	c := rate(ctx, largePieces(device.Bytes(), host.Bytes()))
	rows, err := x.rows(pool.Cache())
	if err != nil {
		return err
	}
	r := rate(ctx, rows)
	if err := ctx.Err(); err != nil {
		return err
	}
	x.r.CeilingCGBps, x.r.CeilingRGBps = &c, &r
	x.r.ShareOfC, x.r.ShareOfR = new(*x.r.CopyGBps/c), new(*x.r.CopyGBps/r)
	return nil
}

// row is one copy of a ceiling.
type row struct{ dst, src []byte }

func largePieces(a, b []byte) (rows []row) {
	n := min(pieceBytes, len(a), len(b))
	for moved := 0; moved+n <= ceilingBytes; moved += n {
		x, y := place(a, n, moved), place(b, n, moved)
		if (moved/n)%2 == 0 {
			x, y = y, x
		}
		rows = append(rows, row{dst: x, src: y})
	}
	return rows
}

// place is a piece of n bytes of b; pieces go round.
func place(b []byte, n, moved int) []byte {
	at := moved / n % (len(b) / n) * n
	return b[at : at+n]
}

// rows are those of randomly placed pages, demoted and promoted.
func (x *replay) rows(host *kv.Cache) ([]row, error) {
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
	var rows []row
	var boxes []kv.Box
	var ops []device.Op
	for i := range int(max(1, ceilingBytes/x.r.PageBytes)) {
		route, run := down, page.Run{Dst: page.ID(onHost[i%len(onHost)]), Src: page.ID(1 + onDevice[i%len(onDevice)]), N: 1}
		if int64(i)*x.r.PagesReloaded/moves != int64(i+1)*x.r.PagesReloaded/moves {
			route, run.Dst, run.Src = up, run.Src, run.Dst
		}
		if boxes, err = route.AppendBoxes(boxes[:0], run); err != nil {
			return nil, err
		}
		ops = route.AppendOps(ops[:0], boxes)
		for _, op := range ops {
			rows = append(rows, row{op.Dst.Bytes()[op.DstOff:][:op.Bytes], op.Src.Bytes()[op.SrcOff:][:op.Bytes]})
		}
	}
	return rows, nil
}

// rate copies the rows a few times and returns the best rate in GB/s: what runs
// beside a pass can only slow it, and a ceiling must not be too low.
func rate(ctx context.Context, rows []row) float64 {
	var bytes int64
	for _, r := range rows {
		bytes += int64(len(r.dst))
	}
	best := 0.0
	for range passes {
		if ctx.Err() != nil {
			return 0
		}
		began := time.Now()
		for _, r := range rows {
			copy(r.dst, r.src)
		}
		best = max(best, float64(bytes)/time.Since(began).Seconds()/1e9)
	}
	return best
}
