package local_test

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/local"
)

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// opened closes v when the test ends.
func opened[T io.Closer](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		t.Cleanup(func() { noError(t, v.Close()) })
		return v
	}
}

func newCache(t testing.TB) (*device.Host, *kv.Cache) {
	t.Helper()
	host := opened(device.OpenHost(device.HostOptions{}))(t)
	g, err := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: 4, PageSize: 4, KVHeads: 1, HeadDim: 4}.LayerMajor()
	noError(t, err)
	return host, opened(kv.NewCache(g, host))(t)
}

// A cache that shares with nobody has no descriptor, reads nothing, and refuses the rest.
func TestOnly(t *testing.T) {
	host, cache := newCache(t)
	only := []transfer.Engine{local.Only{}}
	publisher := opened(transfer.NewPublisher(transfer.PublisherOptions{Cache: cache, Host: host, Engines: only}))(t)
	r := opened(transfer.NewReader(transfer.Options{Cache: cache, Device: host, Engines: only, Publisher: publisher}))(t)

	if d, err := r.Descriptor(); !errors.Is(err, fault.Unsupported) {
		t.Errorf("a descriptor: %v, error %v, want kind unsupported", d, err)
	}
	if _, err := publisher.Publish(transfer.Lease{Pages: []page.ID{1}, TTL: time.Minute}); !errors.Is(err, fault.Unsupported) {
		t.Errorf("published: error %v, want kind unsupported", err)
	}
	noError(t, r.Retrieve(t.Context(), 3, 3, nil, nil, nil))
	for _, offer := range []string{"local-only", "local"} { // also from somebody who claims to be of its kind
		d := &transfer.Descriptor{
			Owner: transfer.NewOwnerID(), Geometry: cache.Geometry(), Leases: true,
			Pages: []page.ID{1}, Offers: []transfer.Offer{{Engine: offer}},
		}
		if err := r.Retrieve(t.Context(), 0, 3, []page.ID{2}, []page.ID{1}, d); !errors.Is(err, fault.Unsupported) {
			t.Errorf("a read by %s: error %v, want kind unsupported", offer, err)
		}
	}
	noError(t, local.Only{}.Close())
}

// Pages that would be read onto themselves are refused, also in another wrapping.
func TestEngine_RefusesTheReadersOwnMemory(t *testing.T) {
	host, cache := newCache(t)
	region, err := cache.Region(0)
	noError(t, err)
	again, err := kv.Wrap(cache.Geometry(), []*device.Memory{region})
	noError(t, err)
	engines := []transfer.Engine{local.New()}
	p := opened(transfer.NewPublisher(transfer.PublisherOptions{Cache: cache, Host: host, Engines: engines}))(t)
	d, err := p.Publish(transfer.Lease{Pages: []page.ID{1}, TTL: time.Minute})
	noError(t, err)
	r := opened(transfer.NewReader(transfer.Options{Cache: again, Device: host, Engines: engines, AcceptUnleased: true}))(t)
	if err := r.Retrieve(t.Context(), 0, 3, []page.ID{2}, []page.ID{1}, d); !errors.Is(err, fault.Invalid) {
		t.Errorf("error %v, want kind invalid", err)
	}
}
