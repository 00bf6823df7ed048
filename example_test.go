package kvferry_test

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
)

// openCache makes a small cache in the memory of host: 8 pages of 4 tokens.
func openCache(host *device.Host) (*kv.Cache, error) {
	g, err := kv.Config{
		Layout: kv.NHD, DType: kv.FP16, Layers: 2, Pages: 8, PageSize: 4, KVHeads: 2, HeadDim: 8,
	}.LayerMajor()
	if err != nil {
		return nil, err
	}
	return kv.NewCache(g, host)
}

// The life of two sequences: the second finds what the first has computed. The
// engine's own part, computing K and V, is left out.
func Example() {
	ctx := context.Background()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	cache, err := openCache(host)
	if err != nil {
		panic(err)
	}
	defer cache.Close()
	m, err := kvferry.Open(kvferry.Options{Cache: cache, Device: host, HostPages: 16})
	if err != nil {
		panic(err)
	}
	defer m.Close(ctx)

	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	prompt := kvferry.Prompt{Tokens: len(tokens), Keys: prefix.AppendChain(nil, page.Key{}, tokens, cache.PageSize())}
	for _, request := range []string{"first", "second"} {
		seq, err := m.Ingest(kvferry.ID{Request: request}, prompt)
		if err != nil {
			panic(err)
		}
		match, err := seq.Match()
		if err != nil {
			panic(err)
		}
		adm, err := seq.Admit(ctx, prompt.Tokens-match.Tokens)
		if err != nil {
			panic(err)
		}
		if err := adm.Wait(ctx); err != nil { // the matched pages are on the device now
			panic(err)
		}
		// Here the engine computes tokens adm.Stored to adm.Tokens into seq.Pages.
		if err := seq.Commit(adm.Tokens - adm.Stored); err != nil {
			panic(err)
		}
		fmt.Printf("%s: %d tokens were there, %d computed, in pages %v\n", request, adm.Stored, adm.Tokens-adm.Stored, seq.Pages(nil))
		if err := seq.Remove(); err != nil { // whole pages stay, by key
			panic(err)
		}
	}
	fmt.Println(m.NumFree(), "pages are free")
	// Output:
	// first: 0 tokens were there, 10 computed, in pages [0 1 2]
	// second: 8 tokens were there, 2 computed, in pages [0 1 2]
	// 6 pages are free
}

// Keys come from package prefix: one for each whole page, chained from a root that
// covers everything outside the prompt that decides the bytes.
func ExampleManager_Ingest() {
	ctx := context.Background()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	cache, err := openCache(host)
	if err != nil {
		panic(err)
	}
	defer cache.Close()
	m, err := kvferry.Open(kvferry.Options{Cache: cache})
	if err != nil {
		panic(err)
	}
	defer m.Close(ctx)

	root := prefix.Namespace{
		Tenant: "alice", Model: "tiny", DType: "fp16", PageSize: cache.PageSize(), Layers: cache.Layers(), Layout: "NHD",
		HashScheme: prefix.SchemeTokens,
	}.Root()
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	keys := prefix.AppendChain(nil, root, tokens, cache.PageSize())

	seq, err := m.Ingest(kvferry.ID{Request: "chat-17"}, kvferry.Prompt{Tokens: len(tokens), Keys: keys})
	if err != nil {
		panic(err)
	}
	match, err := seq.Match()
	if err != nil {
		panic(err)
	}
	fmt.Println(seq.ID(), "has", len(keys), "pages with a key")
	for i, answer := range match.Answers {
		fmt.Printf("page %d: %v\n", i, answer.Reason)
	}
	// Output:
	// sequence "chat-17" has 2 pages with a key
	// page 0: never stored
	// page 1: never stored
}

// A sequence that must wait gives its device pages to others, and comes back with the
// same bytes. What an engine keeps beside the bytes (here a position) comes back too.
func ExampleSequence_Offload() {
	ctx := context.Background()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		panic(err)
	}
	defer host.Close()
	cache, err := openCache(host)
	if err != nil {
		panic(err)
	}
	defer cache.Close()
	m, err := kvferry.Open(kvferry.Options{Cache: cache, Device: host, HostPages: 16})
	if err != nil {
		panic(err)
	}
	defer m.Close(ctx)
	if err := m.Ready().Wait(ctx); err != nil { // before, the host pool may still be too small
		panic(err)
	}

	seq, err := m.Ingest(kvferry.ID{Request: "chat-17"}, kvferry.Prompt{Tokens: 10})
	if err != nil {
		panic(err)
	}
	if _, err := seq.Admit(ctx, 10); err != nil {
		panic(err)
	}
	// Here the engine computes the tokens.
	if err := seq.Commit(10); err != nil {
		panic(err)
	}
	if err := seq.SetPosition(10, 0); err != nil {
		panic(err)
	}

	freed, err := seq.Offload(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println(freed, "pages freed,", m.NumFree(), "are free")

	back, err := seq.Reload(ctx)
	if err != nil {
		panic(err)
	}
	if err := back.Wait(ctx); err != nil { // the pages are on the device now
		panic(err)
	}
	fmt.Println(back.StoredLen, "tokens at position", back.Position, "in", len(back.Pages), "pages")
	// Output:
	// 3 pages freed, 8 are free
	// 10 tokens at position 10 in 3 pages
}
