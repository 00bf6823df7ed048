package page

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// drained checks that the whole pool is free and can be taken page by page.
func drained(t *testing.T, a *Allocator) {
	t.Helper()
	noError(t, a.free.check())
	got, err := a.Alloc(nil, a.Pages())
	if err != nil {
		t.Fatalf("pages were lost: %v", err)
	}
	slices.Sort(got)
	wantIDs(t, got, ids(0, a.Pages()))
}

func bothOrders(t *testing.T, pages int, f func(t *testing.T, a *Allocator)) {
	for _, order := range []Order{Runs, FIFO} {
		t.Run(order.String(), func(t *testing.T) {
			f(t, newAllocator(t, AllocatorOptions{Pages: pages, Order: order}))
		})
	}
}

func TestAllocator_SixteenThreadsConservePages(t *testing.T) {
	bothOrders(t, 64, func(t *testing.T, a *Allocator) {
		var wg sync.WaitGroup
		for thread := range 16 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(1, uint64(thread)))
				var buf []ID
				for range 200 {
					var ok bool
					if buf, ok = a.TryAlloc(buf[:0], rng.IntN(9)); ok {
						if err := a.Free(buf); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		drained(t, a)
	})
}

func TestAllocator_ThreadsThatExactlyFillThePoolGetDisjointPages(t *testing.T) {
	bothOrders(t, 64, func(t *testing.T, a *Allocator) {
		const threads = 4
		for range 50 {
			start := make(chan struct{})
			got := make([][]ID, threads)
			var wg sync.WaitGroup
			for i := range threads {
				wg.Go(func() {
					<-start
					var err error
					if got[i], err = a.Alloc(nil, 64/threads); err != nil {
						t.Error(err)
					}
				})
			}
			close(start)
			wg.Wait()
			all := slices.Concat(got...)
			slices.Sort(all)
			wantIDs(t, all, ids(0, 64))
			if _, ok := a.TryAlloc(nil, 1); ok {
				t.Fatal("a full pool handed out a page")
			}
			for _, g := range got {
				noError(t, a.Free(g))
			}
		}
		drained(t, a)
	})
}

func TestAllocator_ProducersAndConsumersLoseNothing(t *testing.T) {
	bothOrders(t, 32, func(t *testing.T, a *Allocator) {
		work := make(chan []ID, 4)
		var producers, consumers sync.WaitGroup
		for thread := range 4 {
			producers.Go(func() {
				rng := rand.New(rand.NewPCG(2, uint64(thread)))
				for range 200 {
					if got, ok := a.TryAlloc(nil, 1+rng.IntN(5)); ok {
						work <- got
					}
				}
			})
			consumers.Go(func() {
				for got := range work {
					slices.Reverse(got)
					if err := a.Free(got); err != nil {
						t.Error(err)
					}
				}
			})
		}
		producers.Wait()
		close(work)
		consumers.Wait()
		drained(t, a)
	})
}

// Eight threads add pages to sequences of their own, reset some and remove
// others, while the pool is too small for all of them.
func TestAllocator_AllocationRacesReset(t *testing.T) {
	bothOrders(t, 48, func(t *testing.T, a *Allocator) {
		var wg sync.WaitGroup
		for thread := range 8 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(3, uint64(thread)))
				var seq []ID
				for range 300 {
					before := len(seq)
					var ok bool
					if seq, ok = a.TryAlloc(seq, 1+rng.IntN(6)); !ok && len(seq) != before {
						t.Error("a refused call took pages")
					}
					if !ok || rng.IntN(3) == 0 {
						if err := a.Free(seq); err != nil {
							t.Error(err)
						}
						seq = seq[:0]
					}
				}
				if err := a.Free(seq); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		drained(t, a)
	})
}

// What is seen from outside while pages come and go is never out of range.
func TestAllocator_CountsStayInRangeWhilePagesMove(t *testing.T) {
	bothOrders(t, 16, func(t *testing.T, a *Allocator) {
		stop := make(chan struct{})
		var watch, work sync.WaitGroup
		watch.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if n := a.NumFree(); n < 0 || n > 16 {
					t.Errorf("%d of 16 pages are free", n)
				}
				if n := a.LargestRun(); n < 0 || n > 16 {
					t.Errorf("a run of %d of 16 pages", n)
				}
			}
		})
		for range 4 {
			work.Go(func() {
				for range 500 {
					if got, ok := a.TryAlloc(nil, 3); ok {
						_ = a.Free(got)
					}
				}
			})
		}
		work.Wait()
		close(stop)
		watch.Wait()
		drained(t, a)
	})
}

func TestArena_ThreadsThatShareSealedPagesConserveThem(t *testing.T) {
	a := newArena(t, ArenaOptions{Pages: 65, Sink: true})
	var wg sync.WaitGroup
	for thread := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(4, uint64(thread)))
			for range 100 {
				got, ok := a.TryAcquire(nil, 1+rng.IntN(8))
				if !ok {
					continue
				}
				if err := a.Seal(got); err != nil {
					t.Error(err)
				}
				var readers sync.WaitGroup
				for range 2 {
					if err := a.Retain(got); err != nil {
						t.Error(err)
					}
					readers.Go(func() {
						if _, err := a.Release(got); err != nil {
							t.Error(err)
						}
					})
				}
				if _, err := a.Release(got); err != nil {
					t.Error(err)
				}
				readers.Wait()
			}
		})
	}
	wg.Wait()
	noError(t, a.Check(func(ID) int { return 0 }))
	if a.NumFree() != 64 || a.LargestRun() != 64 {
		t.Errorf("%d free, largest run %d", a.NumFree(), a.LargestRun())
	}
}
