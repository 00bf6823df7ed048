package hostipc

import (
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

var small = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 6, PageSize: 4, KVHeads: 1, HeadDim: 8}

// smallExport is a cache and its words.
func smallExport(t testing.TB) transfer.Export {
	t.Helper()
	host := openHost(t)
	words := must(host.Alloc(64))(t)
	t.Cleanup(func() { noError(t, words.Free()) })
	cache := must(kv.NewCache(must(small.PageMajor())(t), host))(t)
	t.Cleanup(func() { noError(t, cache.Close()) })
	return transfer.Export{Owner: transfer.NewOwnerID(), Cache: cache, Words: words, Join: func(transfer.Epoch) func(bool) { return nil }}
}

func openHost(t testing.TB) *device.Host {
	t.Helper()
	host := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, host.Close()) })
	return host
}

func smallTarget(t testing.TB) transfer.Target {
	t.Helper()
	return targetOf(t, must(small.LayerMajor())(t))
}

// targetOf is a cache of that geometry in host memory.
func targetOf(t testing.TB, g *kv.Geometry) transfer.Target {
	t.Helper()
	host := openHost(t)
	cache := must(kv.NewCache(g, host))(t)
	t.Cleanup(func() { noError(t, cache.Close()) })
	return transfer.Target{Cache: cache, Device: host, Copier: copier.NewPortable(), Host: host}
}
