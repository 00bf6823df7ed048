package doctor

import (
	"context"
	"errors"
	"time"

	"github.com/kvferry/kvferry/device"
)

// Rate is how fast copies of one size go one way.
type Rate struct {
	Way     string  `json:"way"`      // "host to device"
	Bytes   int64   `json:"bytes"`    // of one copy
	GBs     float64 `json:"gb_per_s"` // 10^9 bytes a second
	OfWhole float64 `json:"of_whole"` // as a share of what the way carries
}

const (
	// wholeBytes is one copy that shows what a link carries.
	wholeBytes = 64 << 20
	// roundLimit is how long one size is measured one way, at most.
	roundLimit = 60 * time.Millisecond
)

// copySizes are the sizes of copies whose rates are shown.
func copySizes() []int64 { return []int64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20} }

// flow is a stream of copies from one memory to another, as large.
type flow struct {
	stream   device.Stream
	dst, src *device.Memory
}

// way is flows that run at once, in parts of their memories that they have to themselves.
type way struct {
	name  string
	flows []flow
	whole float64 // GB/s that it carries; 0: what copies of 64 MiB reach
}

// measure measures every way of d, one size for as long as limit. Memories are a power
// of 2 of bytes, and 4 MiB for each flow at least. Beside an error it returns the ways that
// were measured.
func measure(ctx context.Context, ways []way, limit time.Duration) (all []Rate, err error) {
	for _, w := range ways {
		room := w.flows[0].src.Size() / int64(len(w.flows))
		whole := w.whole
		var own []Rate
		for _, n := range append([]int64{min(wholeBytes, room)}, copySizes()...) {
			ops := make([][]device.Op, len(w.flows))
			for i, f := range w.flows {
				ops[i] = scattered(f, int64(i)*room, room, n)
			}
			rate, err := fastest(ctx, w.flows, ops, limit)
			if err != nil {
				return all, err
			}
			if whole == 0 {
				whole = rate
			}
			own = append(own, Rate{Way: w.name, Bytes: n, GBs: rate, OfWhole: rate / whole})
		}
		all = append(all, append(own[1:], own[0])...) // by size
	}
	return all, nil
}

// between returns the ways between memories a and b of d: there, back, and both at once.
// They end with close.
func between(d device.Device, a, b *device.Memory, names [3]string) (ways []way, end func() error, err error) {
	there, err := d.NewStream("doctor-there")
	if err != nil {
		return nil, nil, err
	}
	back, err := d.NewStream("doctor-back")
	if err != nil {
		return nil, nil, errors.Join(err, there.Close())
	}
	out, in := flow{there, b, a}, flow{back, a, b}
	ways = []way{{names[0], []flow{out}, 0}, {names[1], []flow{in}, 0}, {names[2], []flow{out, in}, 0}}
	return ways, func() error { return errors.Join(there.Close(), back.Close()) }, nil
}

// scattered returns copies of n bytes that cover room bytes from off on, in an order in
// which no two that are neighbours follow each other.
func scattered(f flow, off, room, n int64) []device.Op {
	count := room / n
	step := count/2 - 1 // odd, and so prime to count, which is a power of 2
	ops := make([]device.Op, count)
	for i := range count {
		from := max(step, 1) * i % count
		ops[i] = device.Op{
			Dst: f.dst, DstOff: off + (from+count/4)%count*n,
			Src: f.src, SrcOff: off + from*n,
			Bytes: n,
		}
	}
	return ops
}

// fastest copies ops over flows, round after round until limit, and returns the best
// rate in GB/s: what else the machine does can only slow a round.
func fastest(ctx context.Context, flows []flow, ops [][]device.Op, limit time.Duration) (best float64, err error) {
	var bytes int64
	for _, list := range ops {
		for i := range list {
			bytes += list[i].Bytes
		}
	}
	began := time.Now()
	for round := 0; round < 2 || time.Since(began) < limit; round++ {
		start := time.Now()
		tickets := make([]*device.Ticket, len(flows))
		for i, f := range flows {
			tickets[i] = device.NewTicket()
			if err := f.stream.Copy(ops[i]); err != nil {
				return 0, err
			}
			if err := f.stream.Signal(tickets[i]); err != nil {
				return 0, err
			}
		}
		for _, t := range tickets {
			if err := t.Wait(ctx); err != nil {
				return 0, err
			}
		}
		if round > 0 { // the first warms up
			best = max(best, float64(bytes)/float64(time.Since(start).Nanoseconds()))
		}
	}
	return best, nil
}
