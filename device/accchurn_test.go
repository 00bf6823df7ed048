package device_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
)

// Streams come and go while many goroutines record, wait for and drop events and take
// tickets: each ticket is done when all streams are closed, and so can the device be.
func TestAccelerator_StreamsThatComeAndGo(t *testing.T) {
	for round := range 15 {
		d := devicetest.NewDriver(devicetest.Options{Mode: devicetest.Mode(round % 3), Seed: uint64(round), Unordered: true})
		a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
		must(t, err)
		host, err := device.OpenHost(device.HostOptions{})
		must(t, err)
		pages := make([]*device.Memory, 6)
		for i := range pages {
			pages[i], err = a.Alloc(256)
			must(t, err)
		}
		const lanes = 3
		var mu sync.Mutex
		streams := make([]device.Stream, lanes)
		for i := range streams {
			streams[i], err = a.NewStream("s")
			must(t, err)
		}
		get := func(i int) device.Stream {
			mu.Lock()
			defer mu.Unlock()
			return streams[i]
		}
		events := make([]device.Event, 3)
		for i := range events {
			events[i], err = a.NewEvent()
			must(t, err)
		}
		var all sync.WaitGroup
		var tickets sync.Map
		for g := range 6 {
			all.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(round), uint64(g)))
				for range 150 {
					i := rng.IntN(lanes)
					s, e := get(i), events[rng.IntN(3)]
					var err error
					switch rng.IntN(10) {
					case 0, 1, 2:
						err = s.Copy(op(pages[rng.IntN(3)], pages[3+rng.IntN(3)]))
					case 3:
						err = s.Record(e)
					case 4:
						err = s.Wait(e)
					case 5:
						e.Done()
						ctx, cancel := context.WithCancel(context.Background())
						go cancel()
						if err = e.Sync(ctx); errors.Is(err, context.Canceled) {
							err = nil
						}
					case 6, 7:
						ticket := device.NewTicket()
						if rng.IntN(2) == 0 {
							ticket.Done()
						}
						if err = s.Signal(ticket); err == nil {
							tickets.Store(ticket, true)
						}
					case 8:
						if rng.IntN(4) == 0 {
							n, err := a.NewStream("n")
							must(t, err)
							mu.Lock()
							old := streams[i]
							streams[i] = n
							mu.Unlock()
							if rng.IntN(2) == 0 {
								all.Go(func() { _ = old.Sync(context.Background()) })
							}
							if err := old.Close(); err != nil {
								t.Error(err)
							}
						}
						if err := a.Close(); !errors.Is(err, fault.Busy) {
							t.Error(err)
						}
					case 9:
						if rng.IntN(10) == 0 {
							runtime.GC()
						}
						local, made := a.NewEvent()
						must(t, made)
						if err = s.Record(local); err == nil && rng.IntN(2) == 0 {
							err = get(rng.IntN(lanes)).Wait(local)
						}
					}
					if err != nil && !errors.Is(err, fault.Closed) {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		for _, s := range streams {
			must(t, s.Close())
		}
		tickets.Range(func(k, _ any) bool {
			if done, err := k.(*device.Ticket).Poll(); !done || err != nil {
				t.Error("ticket", done, err)
			}
			return true
		})
		for _, e := range events {
			if !e.Done() {
				t.Error("event")
			}
		}
		for _, p := range pages {
			must(t, p.Free())
		}
		must(t, errors.Join(a.Close(), host.Close()))
		d.Check(t)
	}
}
