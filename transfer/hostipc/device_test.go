//go:build !nogpu

package hostipc

import (
	"os"
	"testing"
	"time"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// Readers whose pages are memory of a device: what they read is pinned, or passes through
// host memory.
func TestSuite_IntoADevice(t *testing.T) {
	for _, x := range []struct {
		name, kind string
		pin        int64
	}{{"pinned", mapped, 0}, {"pinned pieces", pieces, 0}, {"staged", mapped, -1}, {"from a process", wrapped, 0}} {
		t.Run(x.name, func(t *testing.T) {
			nothingLeft(t)
			fake := fakedriver.Load(t, fakedriver.Options{Version: fakedriver.CUDA130, Delay: 1})
			h := harness(t, x.kind)
			h.Reader = func() (transfertest.Side, error) {
				a, err := cuda.Open("0", cuda.Options{Library: fake.Path(), Runtime: fake.Runtime()})
				if err != nil {
					return transfertest.Side{}, err
				}
				e, err := New(Options{Dir: os.Getenv(dirVariable), PinBytes: x.pin})
				return transfertest.Side{
					Engine: e, Device: a, Copier: copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{}), Close: a.Close,
				}, err
			}
			transfertest.Run(t, h)
		})
	}
}

// Without a way through host memory, or a device that reaches it, a device copies slowly
// from the mapping, or the owner is refused.
func TestOpen_IntoADeviceWithoutHostMemory(t *testing.T) {
	nothingLeft(t)
	fake := fakedriver.Load(t, fakedriver.Options{Version: fakedriver.CUDA130, AllowPageable: true})
	a := must(cuda.Open("0", cuda.Options{Library: fake.Path(), Runtime: fake.Runtime()}))(t)
	t.Cleanup(func() { noError(t, a.Close()) })
	x := newExported(t)
	cache := must(kv.NewCache(must(small.LayerMajor())(t), a))(t)
	t.Cleanup(func() { noError(t, cache.Close()) })
	x.target = transfer.Target{Cache: cache, Device: a, Copier: copier.NewPortable()}
	publisher := must(transfer.NewPublisher(transfer.PublisherOptions{
		Cache: x.Cache, Host: openHost(t), Engines: []transfer.Engine{x.engine},
	}))(t)
	t.Cleanup(func() { noError(t, publisher.Close()) })
	d := must(publisher.Publish(transfer.Lease{Pages: []page.ID{1, 2}, TTL: time.Minute}))(t)

	e := must(New(Options{Dir: x.dir, PinBytes: -1}))(t)
	r := must(transfer.NewReader(transfer.Options{Cache: cache, Device: a, Engines: []transfer.Engine{e}, AcceptUnleased: true}))(t)
	noError(t, r.Retrieve(t.Context(), 0, 7, []page.ID{3, 4}, []page.ID{2, 1}, d))
	noError(t, r.Close())

	// What is small enough is pinned, and larger ones pass through host memory.
	x.target.Host = openHost(t)
	for pin, direct := range map[int64]bool{0: true, x.Cache.Bytes(): true, x.Cache.Bytes() - 1: false, -1: false} {
		s := must(must(New(Options{Dir: x.dir, PinBytes: pin}))(t).Open(t.Context(), x.target, d, d.Offers[0].Data))(t)
		if _, is := s.(*source); is != direct {
			t.Errorf("at most %d bytes pinned: %T", pin, s)
		}
		noError(t, s.Close())
	}

	x.target.Device, x.target.Host = deaf{a}, nil
	_, err := e.Open(t.Context(), x.target, d, d.Offers[0].Data)
	wantKind(t, err, fault.Unsupported, "which this engine can't write")
}

// deaf is a device that reaches no host memory.
type deaf struct{ device.Device }
