package hostipc

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

const benchBytes = 128 << 20 // of each cache: far above a last-level cache's share

// benchConfig has pages of a size, which is a multiple of 4 KiB.
func benchConfig(pageBytes int) kv.Config {
	return kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: benchBytes / pageBytes, PageSize: 8, KVHeads: pageBytes / 4096, HeadDim: 128}
}

// BenchmarkCopy copies all pages of another process's cache, in random order, and the same
// pages of a cache of this process that lies in the same kind of memory, in turns. It says
// how fast both are, and the median, least and greatest share that the one reaches of the
// other.
func BenchmarkCopy(b *testing.B) {
	for _, kind := range []string{mapped, wrapped} {
		for _, pageBytes := range []int{4 << 10, 64 << 10, 512 << 10, 4 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind, pageBytes>>10), func(b *testing.B) { benchCopy(b, kind, pageBytes) })
		}
	}
}

func benchCopy(b *testing.B, kind string, pageBytes int) {
	b.Helper()
	dir, config := directory(b), benchConfig(pageBytes)
	o := start(b, childSpec{kind, dir, config})
	g := must(config.PageMajor())(b)
	target := targetOf(b, g)
	near := targetOf(b, g).Cache
	var all []page.ID
	for id := range page.ID(g.Pages()) {
		all = append(all, id)
	}
	for _, c := range []*kv.Cache{near, target.Cache} { // so that all memory is there
		noError(b, transfertest.Fill(c, childSeed, all))
	}
	e := must(New(Options{Dir: dir, Populate: true}))(b)
	s := must(e.Open(b.Context(), target, o.d, o.offer()))(b)
	defer func() { noError(b, s.Close()) }()
	route := must(kv.NewRoute(target.Cache, near))(b)
	stream := must(target.Device.NewStream("reads"))(b)
	defer func() { noError(b, stream.Close()) }()

	remote := slices.Clone(all)
	random := rand.New(rand.NewPCG(1, 1))
	random.Shuffle(len(remote), func(i, j int) { remote[i], remote[j] = remote[j], remote[i] })
	plan := &transfer.Plan{}
	size := config.PageSize
	there := func() time.Duration {
		noError(b, plan.Set(0, size*len(all), all, remote, size))
		began := time.Now()
		noError(b, s.Copy(b.Context(), stream, plan))
		return time.Since(began)
	}
	here := func() time.Duration {
		noError(b, plan.Set(0, size*len(all), all, remote, size))
		began := time.Now()
		copyHere(b, target.Copier, stream, route, plan)
		return time.Since(began)
	}
	there()
	here()
	var shares, rates, own []float64
	rate := func(d time.Duration) float64 { return float64(g.Bytes()) / d.Seconds() / 1e9 }
	for turn := 0; b.Loop(); turn++ {
		var t, h time.Duration
		if turn%2 == 0 {
			t, h = there(), here()
		} else {
			h, t = here(), there()
		}
		shares, rates, own = append(shares, float64(h)/float64(t)), append(rates, rate(t)), append(own, rate(h))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(rates), "GB/s")
	b.ReportMetric(median(own), "GB/s-own")
	b.ReportMetric(median(shares), "share")
	b.ReportMetric(shares[0], "share-min") // median has sorted them
	b.ReportMetric(shares[len(shares)-1], "share-max")
}

func copyHere(b *testing.B, c copier.Copier, stream device.Stream, r *kv.Route, p *transfer.Plan) {
	b.Helper()
	if _, err := c.Copy(stream, r, p.Pairs); err != nil {
		b.Fatal(err)
	}
	noError(b, stream.Sync(b.Context()))
}

// median sorts x.
func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// BenchmarkOpen opens an owner in another process and closes it; the second time all of
// its memory is mapped page by page as well, which is said for one GiB.
func BenchmarkOpen(b *testing.B) {
	for _, kind := range []string{mapped, wrapped} {
		dir := directory(b)
		o := start(b, childSpec{kind, dir, benchConfig(64 << 10)})
		target := targetOf(b, must(benchConfig(64<<10).PageMajor())(b))
		for _, populate := range []bool{false, true} {
			if populate && kind == wrapped {
				continue
			}
			e := must(New(Options{Dir: dir, Populate: populate}))(b)
			b.Run(fmt.Sprintf("%s/populate=%t", kind, populate), func(b *testing.B) {
				var took []float64
				for b.Loop() {
					began := time.Now()
					s := must(e.Open(b.Context(), target, o.d, o.offer()))(b)
					took = append(took, float64(time.Since(began))/1e6)
					noError(b, s.Close())
				}
				b.ReportMetric(0, "ns/op")
				if m := median(took); populate {
					b.ReportMetric(m*(1<<30)/benchBytes, "ms/GiB")
				} else {
					b.ReportMetric(m, "ms")
				}
				b.ReportMetric(took[len(took)-1], "ms-max")
			})
		}
	}
}
