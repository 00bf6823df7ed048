package main

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/store"
)

// kvferryStore is the whole store over pages without bytes: beside the list of least
// recent use it pins, allocates, counts owners and can tell why a page is missing.
func kvferryStore(t *trace, capacity int) (*rival, error) {
	hits, looked := 0, 0
	return &rival{
		name: "kvferry's store",
		note: func() string { return hitNote(hits, looked) },
		run: func(ctx context.Context) (seconds float64, err error) {
			s, err := openStore(capacity)
			if err != nil {
				return 0, err
			}
			defer func() { err = errors.Join(err, s.close()) }()
			hits, looked = 0, 0
			return timed(func() error {
				for _, keys := range t.requests {
					n, err := s.serve(ctx, keys)
					if err != nil {
						return err
					}
					hits, looked = hits+n, looked+len(keys)
				}
				return nil
			})
		},
	}, nil
}

type books struct {
	host  *device.Host
	cache *kv.Cache
	arena *page.Arena
	store *store.Store
	match store.Match
	refs  []store.Ref
	pages []page.ID
}

func openStore(pages int) (b *books, err error) {
	b = &books{}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	g, err := kv.Config{Pages: pages, PageSize: 1}.LayerMajor()
	if err != nil {
		return b, err
	}
	if b.host, err = device.OpenHost(device.HostOptions{}); err != nil {
		return b, err
	}
	if b.cache, err = kv.NewCache(g, b.host); err != nil {
		return b, err
	}
	if b.arena, err = page.NewArena(page.ArenaOptions{Pages: pages}); err != nil {
		return b, err
	}
	b.store, err = store.Open(store.Options{Cache: b.cache, Arena: b.arena})
	return b, err
}

// serve matches keys and puts what is missing. All pages of the request count as
// used, the deepest as the oldest of them.
func (b *books) serve(ctx context.Context, keys []page.Key) (hits int, err error) {
	if err := b.store.Match(keys, len(keys), &b.match); err != nil {
		return 0, err
	}
	hits = len(b.match.Refs)
	missing := keys[hits:]
	b.pages, err = b.arena.Acquire(b.pages[:0], len(missing))
	if full, ok := errors.AsType[*page.FullError](err); ok {
		if _, err := b.store.Evict(ctx, full.Shortfall()); err != nil {
			return hits, err
		}
		b.pages, err = b.arena.Acquire(b.pages[:0], len(missing))
	}
	if err != nil {
		return hits, err
	}
	b.refs = append(b.refs[:0], b.match.Refs...)
	if b.refs, err = b.store.Reserve(b.refs, missing); err != nil {
		return hits, err
	}
	if err := b.store.Commit(b.refs[hits:], b.pages); err != nil {
		return hits, err
	}
	b.store.Unpin(b.refs)
	_, err = b.arena.Release(b.pages)
	return hits, err
}

func (b *books) close() error {
	var errs []error
	if b.store != nil {
		errs = append(errs, b.store.Close(context.Background()))
	}
	if b.cache != nil {
		errs = append(errs, b.cache.Close())
	}
	if b.host != nil {
		errs = append(errs, b.host.Close())
	}
	return errors.Join(errs...)
}
