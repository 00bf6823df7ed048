package kv_test

import (
	"fmt"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Rows of tokens go where pages and slots say, and are read from there. K and V are
// given as bytes; here each has two heads of four 8-bit elements.
func ExampleCache_WriteTokens() {
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	geometry, err := kv.Config{
		Layout: kv.HND, DType: kv.INT8, Layers: 2, Pages: 4, PageSize: 16, KVHeads: 2, HeadDim: 4,
	}.LayerMajor()
	if err != nil {
		panic(err)
	}
	cache, err := kv.NewCache(geometry, host)
	if err != nil {
		panic(err)
	}
	defer cache.Close()

	// Two tokens of layer 1: the last slot of page 3, and the first of page 0.
	pages, slots := []page.ID{3, 0}, []int32{15, 0}
	k := kv.Rows{DType: kv.INT8, Data: []byte("K0h0K0h1K1h0K1h1")}
	v := kv.Rows{DType: kv.INT8, Data: []byte("V0h0V0h1V1h0V1h1")}
	if err := cache.WriteTokens(1, k, v, pages, slots); err != nil {
		panic(err)
	}
	rows, err := cache.ReadTokens(nil, 1, pages, slots)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n", rows)

	// Where slot 15 of page 3 lies: with HND one stretch for each head of K and of V.
	chunks, err := cache.Chunks(nil, 1, 3, 15, 16)
	if err != nil {
		panic(err)
	}
	for _, c := range chunks {
		fmt.Println(c.Addr-cache.Base(), c.Bytes)
	}
	// Output:
	// K0h0K0h1V0h0V0h1K1h0K1h1V1h0V1h1
	// 1852 4
	// 1916 4
	// 1980 4
	// 2044 4
}
