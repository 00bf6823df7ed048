package local_test

import (
	"context"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/local"
)

// One cache of a process reads 20 tokens from another, which has more pages.
func Example() {
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	shape := kv.Config{Layout: kv.NHD, DType: kv.INT8, Layers: 2, Pages: 4, PageSize: 16, KVHeads: 1, HeadDim: 4}
	newCache := func(pages int) *kv.Cache {
		shape.Pages = pages
		g, err := shape.LayerMajor()
		if err != nil {
			panic(err)
		}
		c, err := kv.NewCache(g, host)
		if err != nil {
			panic(err)
		}
		return c
	}
	near, far := newCache(4), newCache(9)
	defer near.Close()
	defer far.Close()
	engine := local.New() // one for both sides

	// The owner has its sequence in pages 7 and 2, and promises to keep them for a minute.
	arena, err := page.NewArena(page.ArenaOptions{Pages: 9})
	if err != nil {
		panic(err)
	}
	if _, err := arena.Acquire(nil, 9); err != nil {
		panic(err)
	}
	remote := []page.ID{7, 2}
	last := kv.Rows{DType: kv.INT8, Data: []byte("last")}
	if err := far.WriteTokens(1, last, last, []page.ID{2}, []int32{3}); err != nil { // token 19
		panic(err)
	}
	if err := arena.Seal(remote); err != nil {
		panic(err)
	}
	publisher, err := transfer.NewPublisher(transfer.PublisherOptions{
		Cache: far, Holder: transfer.HoldArena(arena), Host: host, Engines: []transfer.Engine{engine},
	})
	if err != nil {
		panic(err)
	}
	defer publisher.Close()
	published, err := publisher.Publish(transfer.Lease{Pages: remote, TTL: time.Minute})
	if err != nil {
		panic(err)
	}
	wire, err := published.AppendBinary(nil) // bytes for any channel
	if err != nil {
		panic(err)
	}

	// The reader has pages 0 and 3 for it.
	reader, err := transfer.NewReader(transfer.Options{Cache: near, Device: host, Engines: []transfer.Engine{engine}})
	if err != nil {
		panic(err)
	}
	defer reader.Close()
	d, err := transfer.Decode(wire)
	if err != nil {
		panic(err)
	}
	here := []page.ID{0, 3}
	if err := reader.StartRetrieve(context.Background(), 0, 20, here, remote, d).Wait(context.Background()); err != nil {
		panic(err)
	}
	if err := publisher.Ack(d.Owner, d.Epoch); err != nil {
		panic(err)
	}
	rows, err := near.ReadTokens(nil, 1, []page.ID{3}, []int32{3})
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n", rows)

	// What the owner no longer promises is not read.
	fmt.Println(reader.Retrieve(context.Background(), 0, 20, here, remote, d) == nil)
	// Output:
	// lastlast
	// false
}
