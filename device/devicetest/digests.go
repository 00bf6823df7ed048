package devicetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// digestCases are about copies with digests. Devices that give none refuse them.
var digestCases = []testCase{
	{"Digest_IsOfTheBytesReadInTheOrderOfTheOps", func(r *rig) {
		// Small jobs and large ones, rows that are alike and rows that are not.
		for seed, c := range []struct{ rows, row, vary int }{
			{1, 0, 0},
			{1, 1, 0},
			{1, 3 << 20, 0},
			{5, 300, 0},
			{64, 64 << 10, 0},
			{512, 16 << 10, 0},
			{300, 18 << 10, 0},
			{200, 0, 40_000},
			{700, 100, 300},
			{3, 1 << 20, 1 << 20},
			{90, 64<<10 - 128, 3},
			{8, 700 << 10, 1 << 10},
		} {
			rng := rand.New(rand.NewPCG(uint64(seed), 1))
			sizes, total := make([]int64, c.rows), int64(0)
			for i := range sizes {
				sizes[i] = int64(c.row)
				if c.vary > 0 {
					sizes[i] += rng.Int64N(int64(c.vary))
				}
				total += sizes[i] + 1
			}
			from := contents(byte(seed), 0, total)
			src, dst, s := r.alloc(total), r.alloc(total), r.stream("s")
			r.write(src, from)
			want := make([]byte, total)

			// Rows are read from the last to the first, a byte apart. A digest has the
			// rows of up to ten, and one row in a dozen has none.
			var digests []*device.Digest
			var summed [][]byte
			ops, off, srcOff := make([]device.Op, 0, c.rows), int64(0), total
			for i, n := range sizes {
				srcOff -= n + 1
				op := device.Op{Dst: dst, DstOff: off, Src: src, SrcOff: srcOff, Bytes: n}
				if i == 0 || rng.IntN(10) == 0 {
					digests, summed = append(digests, new(device.Digest)), append(summed, nil)
				}
				if rng.IntN(12) > 0 {
					k := len(digests) - 1
					op.Digest, summed[k] = digests[k], append(summed[k], from[srcOff:][:n]...)
				} else {
					digests, summed = append(digests, new(device.Digest)), append(summed, nil)
				}
				copy(want[off:], from[srcOff:][:n])
				ops, off = append(ops, op), off+n+1
			}
			half := rng.IntN(len(ops) + 1) // a digest may go on in the next call
			r.copyDigests(s, ops[:half])
			r.copyDigests(s, ops[half:])
			r.sync(s)
			what := fmt.Sprintf("%d rows of %d to %d bytes", c.rows, c.row, c.row+c.vary)
			for i, d := range digests {
				r.wantDigest(fmt.Sprint(what, ", digest ", i), d, summed[i])
			}
			got := r.read(dst, 0, total)
			for i, op := range ops {
				if j := firstDiff(got[op.DstOff:][:op.Bytes], want[op.DstOff:][:op.Bytes]); j >= 0 {
					r.Fatalf("%s: byte %d of row %d is wrong", what, j, i)
				}
			}
		}
	}},
	{"Digest_IsTakenWhenTheCopyRuns", func(r *rig) {
		src, dst, s := r.page(5000, 'a'), r.alloc(5000), r.stream("s")
		release := r.hold(s)
		d := new(device.Digest)
		op := whole(dst, src)
		op.Digest = d
		r.copyDigests(s, []device.Op{op})
		r.settle()
		r.wantDigest("held", d, nil)
		r.write(src, contents('b', 0, 5000))
		release()
		r.sync(s)
		r.wantDigest("run", d, contents('b', 0, 5000))
		r.want("destination", dst, 0, contents('b', 0, 5000))
	}},
	{"Digest_OfAFailedCopyIsTheCallersAgain", func(r *rig) {
		src, dst, s := r.page(5000, 'a'), r.alloc(5000), r.stream("s")
		d := new(device.Digest)
		op := whole(dst, src)
		op.Digest = d
		r.copyDigests(s, []device.Op{op})
		r.sync(s)
		release := r.hold(s) // a stream that has failed takes no ticket
		r.sabotage(s)
		r.copy(s, op)
		failed := r.signal(s)
		release()
		r.broken("failed copy", r.outcome(failed))
		d.Reset()
		_, _ = d.Write(contents('c', 0, 700))
		_ = s.Sync(context.Background())
		r.wantDigest("reset", d, contents('c', 0, 700))
	}},
}

// copyDigests is copy for ops with digests. It skips the case on devices that have
// none.
func (r *rig) copyDigests(s device.Stream, ops []device.Op) {
	r.Helper()
	err := s.Copy(ops)
	if errors.Is(err, fault.Unsupported) {
		r.Skip("this device gives no digests: ", err)
	}
	r.must(err)
}

func (r *rig) wantDigest(what string, d *device.Digest, of []byte) {
	r.Helper()
	want := xxh3.Hash128(of)
	if hi, lo := d.Sum128(); hi != want.Hi || lo != want.Lo {
		r.Errorf("%s: digest %x %x, want that of %d bytes, %x %x", what, hi, lo, len(of), want.Hi, want.Lo)
	}
}
