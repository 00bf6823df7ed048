package bench

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// open makes a shuttle over small pools.
func open(t *testing.T, arrangement string) *shuttle {
	t.Helper()
	o := Options{Runs: 1, Threads: 1, MiB: 12, Model: "qwen2.5-0.5b"} // 64 pages
	shapes, err := o.shapes()
	if err != nil {
		t.Fatal(err)
	}
	g, err := shapes[0].geometry(o, arrangement)
	if err != nil {
		t.Fatal(err)
	}
	host, err := o.openHost()
	if err != nil {
		t.Fatal(err)
	}
	s, err := openShuttle(context.Background(), onHost(host), g)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range []func() error{s.clear, s.close, host.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// contents returns the bytes of the pages that move, in their order.
func contents(t *testing.T, s *shuttle) []byte {
	t.Helper()
	var all []byte
	for _, id := range s.onDevice {
		rows, err := ceiling.AppendPages(nil, s.down, page.Pair{Dst: 0, Src: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			all = append(all, r.Src...)
		}
	}
	return all
}

func TestShuttle_BringsBackTheBytesThatItTookDown(t *testing.T) {
	ctx := context.Background()
	for _, arrangement := range []string{LayerMajor, PageMajor, KVFirst} {
		for _, churned := range []bool{false, true} {
			s := open(t, arrangement)
			s.checks = true
			if err := s.settle(rand.New(rand.NewPCG(1, 1)), churned); err != nil {
				t.Fatal(err)
			}
			want := contents(t, s)
			for trip := range 2 {
				if err := s.demote(ctx); err != nil {
					t.Fatal(err)
				}
				if n := s.alloc.NumFree(); !churned && n != s.cache.Pages() {
					t.Errorf("%s: %d pages are free after all were demoted, want %d", arrangement, n, s.cache.Pages())
				}
				for i := range s.cache.Geometry().Regions() { // nothing may be left to find
					m, err := s.cache.Region(i)
					if err != nil {
						t.Fatal(err)
					}
					clear(m.Bytes())
				}
				if err := s.promote(ctx); err != nil {
					t.Fatal(err)
				}
				if got := contents(t, s); !bytes.Equal(got, want) {
					t.Errorf("%s, churned %t, trip %d: other bytes came back", arrangement, churned, trip)
				}
			}
		}
	}
}

func TestShuttle_AFreshPoolMovesInFewRunsAndAChurnedOneInMany(t *testing.T) {
	s := open(t, LayerMajor)
	runs := func(churned bool) int {
		if err := s.settle(rand.New(rand.NewPCG(1, 1)), churned); err != nil {
			t.Fatal(err)
		}
		if err := s.demote(context.Background()); err != nil {
			t.Fatal(err)
		}
		got, err := page.AppendRuns(nil, slices.Clone(s.moved))
		if err != nil {
			t.Fatal(err)
		}
		return len(got)
	}
	if n := runs(false); n != 1 {
		t.Errorf("a fresh pool moved in %d runs", n)
	}
	if n := runs(true); n < 8 {
		t.Errorf("a churned pool of 64 pages moved in %d runs", n)
	}
}

func TestShuttle_AFlippedByteOnTheHostIsSeen(t *testing.T) {
	s := open(t, LayerMajor)
	s.checks = true
	if err := s.settle(rand.New(rand.NewPCG(1, 1)), false); err != nil {
		t.Fatal(err)
	}
	if err := s.demote(context.Background()); err != nil {
		t.Fatal(err)
	}
	b, err := s.pool.Cache().Page(s.onHost[5])
	if err != nil {
		t.Fatal(err)
	}
	b[77]++
	err = s.promote(context.Background())
	if fault.KindOf(err) != fault.Corrupt {
		t.Errorf("got %v", err)
	}
	b[77]--
	s.checks = false
	// The failed pass has moved a part; the pools are still sound.
	if err := s.pool.Check(); err != nil {
		t.Error(err)
	}
}

// The bare loop must do all of the work that ours does, and no more.
func TestBare_CopiesTheSameBytesAsOurs(t *testing.T) {
	ctx := context.Background()
	for _, arrangement := range []string{LayerMajor, PageMajor, KVFirst} {
		s := open(t, arrangement)
		if err := s.settle(rand.New(rand.NewPCG(2, 1)), true); err != nil {
			t.Fatal(err)
		}
		if err := s.demote(ctx); err != nil {
			t.Fatal(err)
		}
		for _, checks := range []bool{false, true} {
			s.checks = checks
			for name, threads := range map[string]int{"go 1": 1, "go 2": 2, "device": 1} {
				b := &bare{o: Options{Threads: threads}, s: s, route: s.down, sumSrc: true}
				if err := b.follow(); err != nil {
					t.Fatal(err)
				}
				if n := ceiling.Bytes(b.rows); n != s.bytes() {
					t.Errorf("%s: the rows have %d bytes, ours moved %d", arrangement, n, s.bytes())
				}
				host, err := s.pool.Cache().Region(0)
				if err != nil {
					t.Fatal(err)
				}
				want := bytes.Clone(host.Bytes())
				for _, p := range s.moved {
					b, err := s.pool.Cache().Page(p.Dst)
					if err != nil {
						t.Fatal(err)
					}
					clear(b)
				}
				err = b.byGo()
				if name == "device" {
					for _, p := range s.moved { // not what byGo left
						page, err := s.pool.Cache().Page(p.Dst)
						if err != nil {
							t.Fatal(err)
						}
						clear(page)
					}
					err = b.byDevice(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(host.Bytes(), want) {
					t.Errorf("%s, checks %t, by %s: the bare loop leaves other bytes", arrangement, checks, name)
				}
			}
		}
	}
}
