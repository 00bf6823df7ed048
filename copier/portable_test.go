package copier_test

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func openHost(t testing.TB) *device.Host {
	t.Helper()
	h, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closing(t, h.Close) })
	return h
}

// closing fails the test when what it closes says no.
func closing(t testing.TB, c func() error) {
	t.Helper()
	if err := c(); err != nil {
		t.Error(err)
	}
}

func TestPortable(t *testing.T) {
	copiertest.Run(t, func(t *testing.T) copiertest.Harness {
		h := openHost(t)
		return copiertest.Harness{Copier: copier.NewPortable(), Device: h, Hold: h.Hold, Fail: func(s device.Stream) error {
			down := errors.New("the link went down")
			h.Fail(s, down)
			return down
		}}
	})
}

// BenchmarkPortable_Demote16 copies 16 scattered Llama-3-8B-like pages (32 layers,
// 64 KiB rows) to the host a job, two jobs in flight.
func BenchmarkPortable_Demote16(b *testing.B) {
	h := openHost(b)
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 32, Pages: 64, PageSize: 16, KVHeads: 8, HeadDim: 128}
	g, err := c.LayerMajor()
	if err != nil {
		b.Fatal(err)
	}
	packed, err := g.Packed(64)
	if err != nil {
		b.Fatal(err)
	}
	src, err := kv.NewCache(g, h)
	if err != nil {
		b.Fatal(err)
	}
	defer closing(b, src.Close)
	dst, err := kv.NewCache(packed, h)
	if err != nil {
		b.Fatal(err)
	}
	defer closing(b, dst.Close)
	r, err := kv.NewRoute(dst, src)
	if err != nil {
		b.Fatal(err)
	}
	s, err := h.NewStream("copies")
	if err != nil {
		b.Fatal(err)
	}
	defer closing(b, s.Close)
	portable := copier.NewPortable()
	job := func(i int) []page.Pair {
		pairs := make([]page.Pair, 16)
		for k := range pairs {
			pairs[k] = page.Pair{Dst: page.ID((i*16 + k) % 64), Src: page.ID((i*16 + k*7) % 64)}
		}
		return pairs
	}
	jobs := [4][]page.Pair{job(0), job(1), job(2), job(3)}
	b.SetBytes(16 * r.PageBytes())
	b.ReportAllocs()
	var last *device.Ticket
	for i := 0; b.Loop(); i++ {
		if _, err := portable.Copy(s, r, jobs[i%4]); err != nil {
			b.Fatal(err)
		}
		ticket := device.NewTicket()
		if err := s.Signal(ticket); err != nil {
			b.Fatal(err)
		}
		if last != nil {
			if err := last.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		last = ticket
	}
	if err := last.Wait(b.Context()); err != nil {
		b.Fatal(err)
	}
}
