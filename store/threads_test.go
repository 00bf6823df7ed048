package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

// TestStore_ManyGoroutines has engines share few pages and look at every byte. Two
// may compute the same page at once: one of them is its writer. Somebody else evicts
// meanwhile, and asks.
func TestStore_ManyGoroutines(t *testing.T) {
	for _, o := range []setup{
		{device: 14, host: 6, bytes: true, jobPages: 2},
		{device: 14, host: 20, bytes: true, inclusive: true},
		{device: 14, host: 3, bytes: true, compute: true, jobPages: 1},
		{device: 14, host: 20, bytes: true, through: true, jobPages: 3},
		{device: 14, host: 6},
	} {
		t.Run(fmt.Sprintf("host=%d,inclusive=%v,through=%v,compute=%v,bytes=%v", o.host, o.inclusive, o.through, o.compute, o.bytes), func(t *testing.T) {
			r := newRig(t, o)
			const engines, rounds = 4, 500
			var wg sync.WaitGroup
			var served, hits atomic.Int64
			for e := range uint64(engines) {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(11, e))
					for round := range rounds {
						n, err := r.serve(rng)
						switch {
						case err == nil:
							served.Add(1)
							hits.Add(int64(n))
						case !errors.Is(err, fault.Full): // full: the others have it all
							t.Errorf("engine %d, round %d: %v", e, round, err)
							return
						}
					}
				})
			}
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(12, 0))
				for i := range rounds {
					ctx := context.Background()
					if i%2 == 0 {
						ctx = ended()
					}
					_, err := r.store.Evict(ctx, 1+i%3)
					if errors.Is(err, fault.Full) || errors.Is(err, context.Canceled) {
						err = nil
					}
					path := randomPath(rng, 2, 4)
					r.store.Why(nil, r.keys(path), len(path))
					if err := errors.Join(err, r.store.Check()); err != nil {
						t.Error(err)
						return
					}
				}
			})
			wg.Wait()
			r.settled()
			noError(t, r.check(nil))
			if served.Load() == 0 || hits.Load() == 0 {
				t.Errorf("%d uses served with %d hits: the test is too hard", served.Load(), hits.Load())
			}
			r.evict(o.device - r.arena.NumFree())
			r.free(o.device)
			noError(t, r.check(nil))
		})
	}
}

// serve uses one path from beginning to end, and returns how many pages were hits.
func (r *rig) serve(rng *rand.Rand) (hits int, err error) {
	u, err := r.begin(randomPath(rng, 2, 4))
	if err != nil {
		return 0, err
	}
	defer r.end(u)
	if rng.IntN(8) == 0 { // gives up with pages on their way
		return u.hits, nil
	}
	if err := r.verify(u); err != nil {
		return 0, err
	}
	if err := r.commit(u); err != nil {
		return 0, err
	}
	return u.hits, r.verify(u)
}
