package copier_test

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// An engine that keeps its own books stores two pages in the background, and loads them
// again. On an accelerator, the host cache would lie over memory of AllocHost.
func ExampleQueue() {
	ctx := context.Background()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	geometry, err := kv.Config{
		Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 8, PageSize: 4, KVHeads: 1, HeadDim: 8,
	}.LayerMajor()
	if err != nil {
		panic(err)
	}
	packed, err := geometry.Packed(32) // 32 pages, all layers of each together
	if err != nil {
		panic(err)
	}
	near, err := kv.NewCache(geometry, host)
	if err != nil {
		panic(err)
	}
	defer near.Close()
	far, err := kv.NewCache(packed, host)
	if err != nil {
		panic(err)
	}
	defer far.Close()

	q, err := copier.OpenQueue(copier.QueueOptions{
		Device:       host,
		DeviceCaches: map[string]*kv.Cache{"kv": near},
		HostCaches:   map[string]*kv.Cache{"kv": far},
	})
	if err != nil {
		panic(err)
	}
	defer q.Shutdown(ctx)

	// Wait: the event that the engine has recorded behind the kernels that use the pages.
	written, err := host.NewEvent()
	if err != nil {
		panic(err)
	}
	err = q.Submit(copier.Store, copier.Job{Index: 7, Src: []page.ID{3, 4}, Dst: []page.ID{20, 21}, Wait: written})
	if err != nil {
		panic(err)
	}
	if err := q.Barrier(ctx); err != nil { // or ask Completed now and then
		panic(err)
	}
	for _, c := range q.Completed(copier.Store, nil) {
		fmt.Println("store", c.Index, c.Err)
	}

	back := device.NewTicket() // a ticket of its own, instead of Completed
	err = q.Submit(copier.Load, copier.Job{Src: []page.ID{20, 21}, Dst: []page.ID{3, 4}, Wait: written, Sealed: true, Done: back})
	if err != nil {
		panic(err)
	}
	fmt.Println("load", back.Wait(ctx))

	// Output:
	// store 7 <nil>
	// load <nil>
}
