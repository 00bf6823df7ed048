package device

import (
	"fmt"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

// use makes d an empty digest by a; nil is the way of machines without one.
func (d *Digest) use(a accumulator) {
	d.Reset()
	if d.accumulate = a; a == nil {
		d.slow = xxh3.New()
	}
}

func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	fillRandom(seed, b)
	return b
}

func wantDigest(t rapid.TB, d *Digest, b []byte) {
	t.Helper()
	want := xxh3.Hash128(b)
	if hi, lo := d.Sum128(); hi != want.Hi || lo != want.Lo {
		t.Fatalf("digest of %d bytes is %x %x, want %x %x", len(b), hi, lo, want.Hi, want.Lo)
	}
}

func TestDigest_OfPiecesIsThatOfTheWhole(t *testing.T) {
	all := random(9, 1<<16)
	for name, a := range accumulators() {
		t.Run(name, rapid.MakeCheck(func(t *rapid.T) {
			b := all[rapid.IntRange(0, 63).Draw(t, "from"):]
			b = b[:rapid.OneOf(rapid.IntRange(0, 4096), rapid.IntRange(0, len(b))).Draw(t, "bytes")]
			var d Digest
			d.use(a)
			for rest := b; len(rest) > 0; {
				n := min(len(rest), rapid.OneOf(rapid.IntRange(0, 200), rapid.SampledFrom([]int{1023, 1024, 1025, 2048, 1 << 14})).Draw(t, "piece"))
				if got, err := d.Write(rest[:n]); got != n || err != nil {
					t.Fatal(got, err)
				}
				rest = rest[n:]
			}
			wantDigest(t, &d, b)
			wantDigest(t, &d, b) // looking at it changes nothing
			_, _ = d.Write(all[:100])
			wantDigest(t, &d, append(slices.Clip(b), all[:100]...))
		}))
	}
}

func TestDigest_OfEveryLengthInOnePiece(t *testing.T) {
	all := random(5, 2*blockBytes+2*stripeBytes)
	for name, a := range accumulators() {
		t.Run(name, func(t *testing.T) {
			for n := range all {
				var d Digest
				d.use(a)
				_, _ = d.Write(all[:n])
				wantDigest(t, &d, all[:n])
			}
		})
	}
}

func TestDigest_ResetForgets(t *testing.T) {
	var d Digest
	wantDigest(t, &d, nil)
	_, _ = d.Write(random(1, 5000))
	d.Reset()
	wantDigest(t, &d, nil)
	_, _ = d.Write(random(2, 3000))
	wantDigest(t, &d, random(2, 3000))
	if d.Took() != 0 {
		t.Error("a digest that no stream was given took time")
	}
}

func BenchmarkDigest(b *testing.B) {
	for name, a := range accumulators() {
		for _, piece := range []int{1 << 10, 8 << 10, 64 << 10} {
			b.Run(fmt.Sprint(name, "/", piece), func(b *testing.B) {
				p := random(1, piece)
				b.SetBytes(1 << 20)
				var d Digest
				d.use(a)
				for range b.N {
					for range 1 << 20 / piece {
						_, _ = d.Write(p)
					}
				}
			})
		}
	}
}
