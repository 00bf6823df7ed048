package bench

import (
	"context"
	"errors"
	"runtime"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
)

// sums measures the checksum alone, beside the copy of as many bytes in rows of 64
// KiB: it says what checks must cost at least. On one thread a copy with checks can
// keep sum / (sum + copy) of its rate, however the two are arranged; the sum of bytes
// that are in the cache already is the best that an arrangement could have.
func (b *copyBench) sums(ctx context.Context) (out Section, err error) {
	out = Section{Title: "xxh3-128 alone: what checks must cost", Unit: "GB/s"}
	stream, err := b.host.NewStream("sums")
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	const row = 64 << 10
	ops := b.scatter(row)
	cold := ceiling.AppendOps(nil, ops)
	bytes := ceiling.Bytes(cold)
	var sum uint64
	sumOf := func(at func(i int) []byte) contestant {
		return contestant{run: func() error {
			for i := range cold {
				sum ^= xxh3.Hash128(at(i)).Lo
			}
			return nil
		}}
	}
	seconds, err := b.o.interleave(ctx, []contestant{
		sumOf(func(i int) []byte { return cold[i].Src }),
		sumOf(func(int) []byte { return cold[0].Src }),
		{run: func() error { return errors.Join(stream.Copy(ops), stream.Sync(ctx)) }},
	})
	if err != nil {
		return out, err
	}
	copied := each(seconds[0][2], gbps(bytes))
	for i, name := range []string{"cold", "in cache"} {
		rate := each(seconds[0][i], gbps(bytes))
		l := newLine(name, statOf(rate), map[string]any{"row_bytes": row, "cold": i == 0})
		l.Bytes = &bytes
		l.against("copy", rate, copied)
		// With the copy's rate as the whole, what both together can reach of it.
		most := make([]float64, len(rate))
		for k := range rate {
			most[k] = rate[k] / (rate[k] + copied[k])
		}
		whole := each(most, func(float64) float64 { return 1 })
		l.against("copy unchecked, at most", most, whole)
		out.Lines = append(out.Lines, l)
	}
	runtime.KeepAlive(sum) // or nobody would have to take the sums
	return out, nil
}
