package doctor

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
)

func TestScattered_CoversTheRoomOnceOnBothSides(t *testing.T) {
	d, s := device.WrapHost(make([]byte, 64)), device.WrapHost(make([]byte, 64))
	for _, room := range []int64{1, 2, 4, 8, 16, 32} {
		for n := int64(1); n <= room; n *= 2 {
			const off = 16
			ops := scattered(flow{dst: d, src: s}, off, room, n)
			var dst, src [64]int
			for i, op := range ops {
				for b := range op.Bytes {
					dst[op.DstOff+b]++
					src[op.SrcOff+b]++
				}
				if i > 0 && room/n >= 8 && (op.SrcOff == ops[i-1].SrcOff+n || op.DstOff == ops[i-1].DstOff+n) {
					t.Errorf("room %d, copies of %d: copy %d follows its neighbour", room, n, i)
				}
				if op.Dst != d || op.Src != s || op.Bytes != n {
					t.Fatalf("room %d, copies of %d: %+v", room, n, op)
				}
			}
			for at := range int64(64) {
				want := 0
				if at >= off && at < off+room {
					want = 1
				}
				if dst[at] != want || src[at] != want {
					t.Fatalf("room %d, copies of %d: byte %d is written %d times and read %d times", room, n, at, dst[at], src[at])
				}
			}
		}
	}
}

// openPools returns a host device with two pools.
func openPools(t *testing.T) (h *device.Host, a, b *device.Memory) {
	t.Helper()
	h, err := device.OpenHost(device.HostOptions{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	a, b, err = twoPools(func() (*device.Memory, error) { return h.Alloc(8 << 20) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		free(a, b)
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h, a, b
}

func TestMeasure_GivesEverySizeOfEveryWay(t *testing.T) {
	h, a, b := openPools(t)
	ways, end, err := between(h, a, b, [3]string{"there", "back", "both"})
	if err != nil {
		t.Fatal(err)
	}
	ways[2].whole = 1e-9 // given: everything is far above it
	all, err := measure(t.Context(), ways, time.Nanosecond)
	if err := errors.Join(err, end()); err != nil {
		t.Fatal(err)
	}
	i := 0
	for _, name := range []string{"there", "back", "both"} {
		whole := all[i+len(copySizes())].GBs
		for _, n := range append(copySizes(), 0) {
			r := all[i]
			if n == 0 {
				n = min(wholeBytes, 8<<20)
				if name == "both" {
					n /= 2
				}
			}
			share := r.GBs / whole
			if name == "both" {
				share = r.GBs / 1e-9
			}
			if r.Way != name || r.Bytes != n || r.GBs <= 0 || r.OfWhole != share {
				t.Errorf("rate %d is %+v, want %d bytes %s", i, r, n, name)
			}
			i++
		}
	}
	if len(all) != i {
		t.Errorf("%d rates, want %d", len(all), i)
	}
}

func TestMeasure_EndsWithItsContextAndWithAFailedStream(t *testing.T) {
	h, a, b := openPools(t)
	ways, end, err := between(h, a, b, [3]string{"there", "back", "both"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := measure(ctx, ways, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	broken := errors.New("broken link")
	h.Fail(ways[1].flows[0].stream, broken)
	if _, err := measure(t.Context(), ways, time.Nanosecond); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if err := end(); !errors.Is(err, broken) {
		t.Errorf("closing: %v", err)
	}
}
