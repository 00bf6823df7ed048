package mooncake_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/transfer/mooncake"
)

// BenchmarkRead reads 128 MiB from an owner in another process, by a child and in this
// process in turn, and says how they compare. Rows are 32 KiB.
func BenchmarkRead(b *testing.B) {
	o := startOwner(b, "child")
	through := []struct {
		name   string
		reader *bench
		took   []time.Duration
	}{
		{name: "child", reader: newBench(b, mooncake.Options{})},
		{name: "inside", reader: newBench(b, mooncake.Options{InProcess: true})},
	}
	read := func(r *bench) time.Duration {
		began := time.Now()
		noError(b, r.reader.Retrieve(b.Context(), 0, big.Pages*big.PageSize, ids(0, big.Pages), ids(0, big.Pages), o.d))
		return time.Since(began)
	}
	for _, x := range through { // populates memory and opens connections
		read(x.reader)
	}
	bytes := float64(through[0].reader.cache.Bytes())
	var ratios []float64
	for i := 0; b.Loop(); i++ {
		var took [2]time.Duration
		for j := range through { // who is first changes
			k := (i + j) % 2
			took[k] = read(through[k].reader)
			through[k].took = append(through[k].took, took[k])
		}
		ratios = append(ratios, took[1].Seconds()/took[0].Seconds())
	}
	for _, x := range through {
		slices.Sort(x.took)
		b.ReportMetric(bytes/x.took[len(x.took)/2].Seconds()/1e9, "GB/s-"+x.name)
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "child/inside")
	b.ReportMetric(0, "ns/op") // of both together, which says nothing
	b.Logf("child/inside: %s over %d pairs", spread(ratios), len(ratios))
}

// spread is the least, the median and the most of sorted numbers.
func spread(x []float64) string {
	return fmt.Sprintf("%.2f … %.2f … %.2f", x[0], x[len(x)/2], x[len(x)-1])
}
