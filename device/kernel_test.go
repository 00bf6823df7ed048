package device

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// aligned returns n bytes, the first of them at a multiple of the longest
// alignment that kernels know.
func aligned(n int) []byte {
	b := make([]byte, n+lineBytes)
	return b[-uintptr(unsafe.Pointer(&b[0]))%lineBytes:][:n]
}

func fillRandom(seed uint64, b []byte) {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(b) // never fails
}

// stretch is one row: how many bytes, and how far both sides are past a line.
type stretch struct{ n, dst, src int }

// checkRows copies rows with k, each with guards of a line around it, and
// compares every byte of both memories with what Go's copy leaves.
func checkRows(t interface{ Fatalf(string, ...any) }, k *kernel, rows []stretch) {
	total := 0
	for _, r := range rows {
		total += (r.n+lineBytes-1)/lineBytes*lineBytes + 3*lineBytes
	}
	from, to := aligned(total), aligned(total)
	fillRandom(uint64(total), from)
	fillRandom(uint64(total)+1, to)
	wantFrom, want := bytes.Clone(from), bytes.Clone(to)
	src, dst := WrapHost(from), WrapHost(to)
	ops := make([]Op, len(rows))
	at := lineBytes
	for i, r := range rows {
		ops[i] = Op{Dst: dst, DstOff: int64(at + r.dst), Src: src, SrcOff: int64(at + r.src), Bytes: int64(r.n)}
		copy(want[at+r.dst:][:r.n], from[at+r.src:])
		at += (r.n+lineBytes-1)/lineBytes*lineBytes + 3*lineBytes
	}
	// No row is too short or too ragged.
	if len(ops) > 0 {
		newCrew(&limits{}, 1).copy(ops, 0, k)
	}
	if !bytes.Equal(from, wantFrom) {
		t.Fatalf("%s: the source has changed; rows %v", k.name, rows)
	}
	if !bytes.Equal(to, want) {
		i := 0
		for to[i] == want[i] {
			i++
		}
		t.Fatalf("%s: byte %d of %d is wrong; rows %v", k.name, i, total, rows)
	}
}

func eachKernel(t *testing.T, f func(t *testing.T, k *kernel)) {
	all := allKernels()
	if len(all) == 0 {
		t.Skip("this machine has no kernels")
	}
	for _, k := range all {
		t.Run(k.name, func(t *testing.T) { f(t, k) })
	}
}

func TestKernel_CopiesEverySmallSize(t *testing.T) {
	eachKernel(t, func(t *testing.T, k *kernel) {
		for n := range 601 {
			rows := make([]stretch, lineBytes)
			for i := range rows {
				rows[i] = stretch{n: n, dst: i, src: (i*5 + n) % lineBytes}
			}
			checkRows(t, k, rows)
		}
	})
}

func TestKernel_CopiesEveryAlignmentOfBothSides(t *testing.T) {
	eachKernel(t, func(t *testing.T, k *kernel) {
		for _, n := range []int{kernelStep + lineBytes, 511, 700} {
			rows := make([]stretch, 0, lineBytes*lineBytes)
			for dst := range lineBytes {
				for src := range lineBytes {
					rows = append(rows, stretch{n, dst, src})
				}
			}
			checkRows(t, k, rows)
		}
	})
}

func TestKernel_CopiesRowsOfDifferentSizes(t *testing.T) {
	eachKernel(t, func(t *testing.T, k *kernel) {
		rapid.Check(t, func(t *rapid.T) {
			size := rapid.OneOf(rapid.IntRange(0, 600), rapid.IntRange(0, 20_000), rapid.IntRange(laneBytes-200, laneBytes+200))
			rows := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) stretch {
				return stretch{size.Draw(t, "n"), rapid.IntRange(0, 63).Draw(t, "dst"), rapid.IntRange(0, 63).Draw(t, "src")}
			}), 1, 30).Draw(t, "rows")
			checkRows(t, k, rows)
		})
	})
}

func TestKernel_CopiesLargeRows(t *testing.T) {
	eachKernel(t, func(t *testing.T, k *kernel) {
		rnd := rand.New(rand.NewPCG(1, 2))
		for range 6 {
			checkRows(t, k, []stretch{
				{rnd.IntN(2 << 20), rnd.IntN(lineBytes), rnd.IntN(lineBytes)},
				{rnd.IntN(1 << 10), rnd.IntN(lineBytes), rnd.IntN(lineBytes)},
			})
		}
	})
}

// The checks above must see a kernel that is wrong at either end.
func TestKernel_NegativeControl_AWrongByteIsSeen(t *testing.T) {
	for what, at := range map[string]func(n uintptr) uintptr{
		"last byte":      func(n uintptr) uintptr { return n - 1 },
		"one too many":   func(n uintptr) uintptr { return n },
		"somewhere else": func(n uintptr) uintptr { return n / 2 },
	} {
		bad := &kernel{"bad", 2, 1, func(rows *[maxLanes]row, n uintptr) {
			for _, r := range rows[:2] {
				copy(unsafe.Slice((*byte)(r.dst), n), unsafe.Slice((*byte)(r.src), n))
				*(*byte)(unsafe.Add(r.dst, at(n))) ^= 1
			}
		}}
		var seen failures
		checkRows(&seen, bad, []stretch{{n: 512}, {n: 512}})
		if seen == 0 {
			t.Errorf("%s: not seen", what)
		}
	}
}

type failures int

func (f *failures) Fatalf(string, ...any) { *f++ }

func FuzzKernel(f *testing.F) {
	f.Add(uint64(1), 700, 9)
	f.Add(uint64(7), laneBytes+70, 17)
	f.Fuzz(func(t *testing.T, seed uint64, most, n int) {
		if most < 0 || most > 1<<18 || n < 0 || n > 64 {
			t.Skip()
		}
		rnd := rand.New(rand.NewPCG(seed, 0))
		rows := make([]stretch, n)
		for i := range rows {
			rows[i] = stretch{rnd.IntN(most + 1), rnd.IntN(lineBytes), rnd.IntN(lineBytes)}
		}
		for _, k := range allKernels() {
			checkRows(t, k, rows)
		}
	})
}

func TestLimits_StreamOnlyWhatTheCacheCannotHold(t *testing.T) {
	l := defaultLimits(32 << 20)
	c := choices{cached: &kernel{name: "cached"}, streamed: &kernel{name: "streamed"}}
	for _, test := range []struct {
		bytes, backlog int64
		want           string
	}{
		{1<<20 - 1, 1 << 40, "go"},
		{1 << 20, 1 << 20, "cached"},
		{16<<20 - 1, 16<<20 - 1, "cached"},
		{16 << 20, 16 << 20, "streamed"},
		{4 << 20, 16 << 20, "streamed"}, // four such jobs are in the queue
	} {
		k, got := l.kernel(c, test.bytes, test.backlog), "go"
		if k != nil {
			got = k.name
		}
		if got != test.want {
			t.Errorf("%d bytes in a backlog of %d: %s, want %s", test.bytes, test.backlog, got, test.want)
		}
	}
}

// Which rows a kernel is given is seen by what it is called for.
func TestLimits_LeaveRowsToGoThatItCopiesBetter(t *testing.T) {
	for name, test := range map[string]struct {
		stretch
		align int
		want  int // bytes that the kernel copies
	}{
		"short":                      {stretch{n: 255}, 1, 0},
		"not short":                  {stretch{n: 256}, 1, 256},
		"a whole row":                {stretch{n: 8192}, lineBytes, 8192},
		"ragged":                     {stretch{n: 8192, dst: 1}, lineBytes, 8064},
		"ragged, but that is no bar": {stretch{n: 8192, dst: 1}, 1, 8192},
		"too ragged":                 {stretch{n: 700, dst: 1}, lineBytes, 0},
		"long":                       {stretch{n: 3 << 20}, lineBytes, 3 << 20},
	} {
		copied := 0
		k := &kernel{"count", 1, test.align, func(rows *[maxLanes]row, n uintptr) {
			copied += int(n)
			if uintptr(rows[0].dst)%uintptr(test.align) != 0 {
				t.Errorf("%s: a destination at %p", name, rows[0].dst)
			}
		}}
		l := defaultLimits(0)
		b := aligned(test.n + test.dst)
		newCrew(&l, 1).copy([]Op{{
			Dst: WrapHost(b), DstOff: int64(test.dst), Src: WrapHost(make([]byte, test.n)), Bytes: int64(test.n),
		}}, 0, k)
		if copied != test.want {
			t.Errorf("%s: the kernel copies %d bytes, want %d", name, copied, test.want)
		}
	}
}

func TestKernels_SayHowTheyCopy(t *testing.T) {
	got := fmt.Sprint(Kernels{Cached: Choice{"go", 1}, Streamed: Choice{"fast", 1.756}, CacheBytes: 32 << 20})
	if want := "cached go (1.00 × Go's copy), streamed fast (1.76 × Go's copy), cache 32.0 MiB"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
