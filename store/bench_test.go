package store

import (
	"context"
	"testing"

	"github.com/kvferry/kvferry/page"
)

// pathPages is the length of the paths below: a long prompt, in pages of 512 tokens.
const pathPages = 24

// benchRig is a store of pages without bytes, filled with paths that share nothing.
func benchRig(b *testing.B, device, host, paths int) (*rig, [][]page.Key) {
	b.Helper()
	r := newRig(b, setup{device: device, host: host})
	keys := make([][]page.Key, paths)
	for p := range keys {
		for i := range pathPages {
			keys[p] = append(keys[p], testKey(p*pathPages+i))
		}
	}
	return r, keys
}

func (r *rig) putKeys(keys []page.Key, refs []Ref, pages []page.ID) ([]Ref, []page.ID) {
	pages, err := r.arena.Acquire(pages[:0], len(keys))
	noError(r, err)
	refs, err = r.store.Reserve(refs[:0], keys)
	noError(r, err)
	noError(r, r.store.Commit(refs, pages))
	_, err = r.arena.Release(pages)
	noError(r, err)
	r.store.Unpin(refs)
	return refs, pages
}

// BenchmarkMatch is a look-up of a whole stored prefix, and its end.
func BenchmarkMatch(b *testing.B) {
	r, keys := benchRig(b, 24_000, 0, 1000)
	var refs []Ref
	var pages []page.ID
	for _, k := range keys {
		refs, pages = r.putKeys(k, refs, pages)
	}
	var m Match
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		k := keys[i*7%len(keys)]
		if err := r.store.Match(k, len(k), &m); err != nil || len(m.Refs) != len(k) {
			b.Fatal(len(m.Refs), err)
		}
		r.store.Unpin(m.Refs)
	}
}

// BenchmarkPut is Reserve, Commit and Unpin of a path, with the eviction of another
// to make room: dropped, or demoted to a host that gives up as many.
func BenchmarkPut(b *testing.B) {
	for _, c := range []struct {
		name string
		host int
	}{{"drop", 0}, {"demote", 4800}} {
		b.Run(c.name, func(b *testing.B) {
			r, keys := benchRig(b, 2400, c.host, 1000)
			var refs []Ref
			var pages []page.ID
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if free := r.arena.NumFree(); free < pathPages {
					if _, err := r.store.Evict(context.Background(), pathPages-free); err != nil {
						b.Fatal(err)
					}
				}
				refs, pages = r.putKeys(keys[i%len(keys)], refs, pages)
			}
		})
	}
}

// BenchmarkEvict is the demotion of a path, and its way back.
func BenchmarkEvict(b *testing.B) {
	r, keys := benchRig(b, pathPages, pathPages, 1)
	r.putKeys(keys[0], nil, nil)
	var m Match
	var l Loaded
	var fresh []page.ID
	b.ReportAllocs()
	for b.Loop() {
		if n, err := r.store.Evict(context.Background(), pathPages); n != pathPages || err != nil {
			b.Fatal(n, err)
		}
		noError(b, r.store.Match(keys[0], pathPages, &m))
		var err error
		fresh, err = r.arena.Acquire(fresh[:0], pathPages)
		noError(b, err)
		noError(b, r.store.Load(m.Refs, fresh, &l))
		_, err = r.arena.Release(fresh)
		noError(b, err)
		r.store.Unpin(m.Refs)
	}
}
