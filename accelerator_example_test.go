package kvferry_test

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/kv"
)

// A manager over the memory of a GPU. Nothing is linked for it: libcuda is opened when
// the program runs. The engine's stream, given by its handle, is ordered with the
// copies, and neither side waits for the other on the processor.
func ExampleOptions_accelerator() {
	ctx := context.Background()
	gpu, err := cuda.Open("0", cuda.Options{}) // or the beginning of a UUID
	if err != nil {
		panic(err)
	}
	defer gpu.Close()
	chosen, err := copier.Select(ctx, gpu, copier.SelectOptions{})
	if err != nil {
		panic(err)
	}
	fmt.Println(chosen) // which copier, and why not another

	geometry, err := kv.Config{
		Layout: kv.NHD, DType: kv.BF16, Layers: 32, Pages: 4096, PageSize: 16, KVHeads: 8, HeadDim: 128,
	}.LayerMajor()
	if err != nil {
		panic(err)
	}
	cache, err := kv.NewCache(geometry, gpu) // or kv.WrapOn, over the engine's own tensors
	if err != nil {
		panic(err)
	}
	defer cache.Close()
	compute, err := gpu.NewStream("compute") // or gpu.WrapStream, over the engine's own
	if err != nil {
		panic(err)
	}
	defer compute.Close()
	m, err := kvferry.Open(kvferry.Options{
		Cache: cache, Device: gpu, Copier: chosen.Copier, Compute: compute, HostPages: 16384,
	})
	if err != nil {
		panic(err)
	}
	defer m.Close(ctx)
}
