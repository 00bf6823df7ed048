package local_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/local"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// staging is an engine that writes host memory only.
type staging struct{ transfer.Engine }

func (e staging) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	return transfer.Staged(t, func(t transfer.Target) (transfer.Source, error) { return e.Engine.Open(ctx, t, d, offer) })
}

// A stage brings pages into the memory of a device, in each order in which one can run.
func TestStaged_PassesTheSuite(t *testing.T) {
	for _, mode := range []devicetest.Mode{devicetest.Eager, devicetest.Lazy, devicetest.Random} {
		t.Run(mode.String(), func(t *testing.T) {
			e := staging{local.New()}
			transfertest.Run(t, transfertest.Harness{
				Owner: func() (transfertest.Side, error) { return transfertest.Side{Engine: e}, nil },
				Reader: func() (transfertest.Side, error) {
					d := devicetest.NewDriver(devicetest.Options{Mode: mode, Seed: 1})
					a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
					if err != nil {
						return transfertest.Side{}, err
					}
					return transfertest.Side{Engine: e, Device: a, Copier: copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{}), Close: func() error {
						defer d.Check(t)
						return a.Close()
					}}, nil
				},
			})
		})
	}
}

// More pages than a stage holds pass through its halves in turn.
func TestStaged_UsesItsHalvesInTurn(t *testing.T) {
	const n = 9 // pages of 8 MiB, of which a half holds two
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: n, PageSize: 16, KVHeads: 8, HeadDim: 8192}
	g, err := c.LayerMajor()
	noError(t, err)
	host, err := device.OpenHost(device.HostOptions{})
	noError(t, err)
	defer func() { noError(t, host.Close()) }()
	far, err := kv.NewCache(g, host)
	noError(t, err)
	defer func() { noError(t, far.Close()) }()
	a, _ := devicetest.OpenAccelerator(t, devicetest.Options{Mode: devicetest.Lazy})
	near, err := kv.NewCache(g, a)
	noError(t, err)
	defer func() { noError(t, near.Close()) }()

	var pages []page.ID
	for id := range page.ID(n) {
		pages = append(pages, id)
		b, err := far.Plane(1, 1, id)
		noError(t, err)
		b[0], b[len(b)-1] = byte(id+1), byte(id+100)
	}
	e := staging{local.New()}
	arena, err := page.NewArena(page.ArenaOptions{Pages: n})
	noError(t, err)
	_, err = arena.Acquire(nil, n)
	noError(t, err)
	noError(t, arena.Seal(pages))
	p, err := transfer.NewPublisher(transfer.PublisherOptions{Cache: far, Host: host, Holder: transfer.HoldArena(arena), Engines: []transfer.Engine{e}})
	noError(t, err)
	defer func() { noError(t, p.Close()) }()
	d, err := p.Publish(transfer.Lease{Pages: pages, TTL: time.Minute})
	noError(t, err)

	without, err := transfer.NewReader(transfer.Options{Cache: near, Device: a, Engines: []transfer.Engine{e}})
	noError(t, err)
	if err := without.Retrieve(t.Context(), 0, 16, pages, pages, d); !errors.Is(err, fault.Unsupported) {
		t.Errorf("without host memory: %v, want kind unsupported", err)
	}
	noError(t, without.Close())

	r, err := transfer.NewReader(transfer.Options{Cache: near, Device: a, Host: host, Engines: []transfer.Engine{e}})
	noError(t, err)
	defer func() { noError(t, r.Close()) }()
	noError(t, r.Retrieve(t.Context(), 3, 16*n-1, pages, pages, d))
	mem, err := near.Region(0)
	noError(t, err)
	chunks, err := near.Chunks(nil, 1, 5, 0, 16)
	noError(t, err)
	last := chunks[len(chunks)-1]
	if got := devicetest.Read(t, a, mem, last.Off+last.Bytes-1, 1); got[0] != 105 {
		t.Errorf("the last byte of page 5 is %d", got[0])
	}
}
