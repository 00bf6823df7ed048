package main

import (
	"context"
	"encoding/binary"
	"errors"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/hostpool"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Copies of ours go in jobs of so many pages, so many of them in flight.
const (
	jobPages = 16
	inFlight = 2
)

// ferry moves pages from a device pool, layer after layer, into a host pool.
type ferry struct {
	host   *device.Host
	cache  *kv.Cache
	pool   *hostpool.Pool
	stream device.Stream
	moves  moves
	checks bool // take the sum of every page that has arrived
	kept   []page.ID
	sums   []hostpool.Sum
}

// openFerry makes the pools and waits until all of their memory is there.
func openFerry(ctx context.Context, s shape, m moves, checks bool) (f *ferry, err error) {
	f = &ferry{moves: m, checks: checks}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	// One byte an element and one token a page: any row is a latent.
	g, err := kv.Config{Layout: kv.MLA, DType: kv.FP8, Layers: s.layers, LatentDim: s.row, PageSize: 1, Pages: s.pages}.LayerMajor()
	if err != nil {
		return f, err
	}
	if f.host, err = device.OpenHost(device.HostOptions{Workers: 1}); err != nil {
		return f, err
	}
	if f.cache, err = kv.NewCache(g, f.host); err != nil {
		return f, err
	}
	if f.pool, err = hostpool.Open(hostpool.Options{Cache: f.cache, Pages: s.pages, Host: f.host}); err != nil {
		return f, err
	}
	if f.stream, err = f.host.NewStream("copies"); err != nil {
		return f, err
	}
	mem, err := f.cache.Region(0)
	if err != nil {
		return f, err
	}
	if err := mem.Populate(0, mem.Size()); err != nil {
		return f, err
	}
	for b := mem.Bytes(); len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, uint64(len(b))*0x9e3779b97f4a7c15)
	}
	return f, f.pool.Grown().Wait(ctx)
}

// run moves every page once. Which host page takes which device page is settled
// beforehand, as it is for the rivals; claiming and committing are part of the work.
func (f *ferry) run(ctx context.Context) (float64, error) {
	if err := f.pool.Release(f.kept...); err != nil {
		return 0, err
	}
	f.kept = f.kept[:0]
	return timed(func() (err error) {
		if f.kept, err = f.pool.Claim(f.kept, len(f.moves.Dst)); err != nil {
			return err
		}
		var jobs [inFlight]struct {
			pairs   []page.Pair
			arrival hostpool.Arrival
			ticket  *device.Ticket
		}
		n := (len(f.moves.Dst) + jobPages - 1) / jobPages
		for k := range n + inFlight {
			j := &jobs[k%inFlight]
			if k >= inFlight {
				if err := j.ticket.Wait(ctx); err != nil {
					return err
				}
				if err := f.arrived(j.pairs, &j.arrival); err != nil {
					return err
				}
			}
			if k < n {
				j.pairs, j.ticket = f.moves.appendPairs(j.pairs[:0], k*jobPages, jobPages), device.NewTicket()
				if err := f.send(j.pairs, &j.arrival, j.ticket); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (f *ferry) send(pairs []page.Pair, a *hostpool.Arrival, t *device.Ticket) (err error) {
	if f.checks {
		_, err = f.pool.CopyInSummed(f.stream, pairs, a, t)
	} else {
		_, err = f.pool.CopyIn(f.stream, pairs, t)
	}
	return err
}

func (f *ferry) arrived(pairs []page.Pair, a *hostpool.Arrival) error {
	if f.checks {
		f.sums, _ = f.pool.AppendSums(f.sums[:0], a)
	}
	for _, p := range pairs {
		if err := f.pool.Commit(p.Dst); err != nil {
			return err
		}
	}
	return nil
}

func (f *ferry) close() error {
	var errs []error
	if f.stream != nil {
		errs = append(errs, f.stream.Close())
	}
	if f.pool != nil {
		errs = append(errs, f.pool.Close())
	}
	if f.cache != nil {
		errs = append(errs, f.cache.Close())
	}
	if f.host != nil {
		errs = append(errs, f.host.Close())
	}
	return errors.Join(errs...)
}
