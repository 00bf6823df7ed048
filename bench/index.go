package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// lru is a cache library as the contest of look-ups needs it.
type lru interface {
	get(key) bool // and counts as a use
	put(key)
}

// lookups is the contest of serving a trace's requests out of capacity pages: each
// request's pages are looked up until the first that is missing, and the others are
// put.
func lookups(ctx context.Context, p *python, t *trace, capacity int) (*contest, error) {
	looked := 0
	for _, keys := range t.requests {
		looked += len(keys)
	}
	c := &contest{
		title: fmt.Sprintf("look-ups and puts, %s, %d requests, %d pages, capacity %d", t.name, len(t.requests), looked, capacity),
		unit:  "ns a page", rate: nanos(looked),
	}
	for _, open := range []func(*trace, int) (*rival, error){
		kvferryStore, containerList, golangSimpleLRU, golangLRU, otterCache,
	} {
		r, err := open(t, capacity)
		if err != nil {
			return c, err
		}
		c.rivals = append(c.rivals, r)
	}
	file := filepath.Join(p.folder, "paths.jsonl")
	if err := t.write(file); err != nil {
		return c, err
	}
	r, err := p.start(ctx, "OrderedDict", "ordered_dict.py", map[string]any{"paths": file, "capacity": capacity})
	if err != nil {
		return c, err
	}
	c.rivals = append(c.rivals, r)
	return c, nil
}

// library makes a rival of a cache library. Each run begins with an empty cache,
// whose making is not timed.
func library(name string, t *trace, open func() (lru, func(), error)) *rival {
	hits, looked := 0, 0
	return &rival{
		name: name,
		note: func() string { return hitNote(hits, looked) },
		run: func(context.Context) (float64, error) {
			cache, stop, err := open()
			if err != nil {
				return 0, err
			}
			defer stop()
			return timed(func() error {
				hits, looked = serve(cache, t)
				return nil
			})
		},
	}
}

func serve(cache lru, t *trace) (hits, looked int) {
	for _, keys := range t.requests {
		looked += len(keys)
		at := 0
		for at < len(keys) && cache.get(keys[at]) {
			at++
		}
		hits += at
		for _, k := range keys[at:] {
			cache.put(k)
		}
	}
	return hits, looked
}

func hitNote(hits, looked int) string { return fmt.Sprintf("hit %.4f", float64(hits)/float64(looked)) }

// write writes the ids of each request as a line of JSON.
func (t *trace) write(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	e := json.NewEncoder(f)
	for _, ids := range t.ids {
		if err := e.Encode(ids); err != nil {
			_ = f.Close()
			return err
		}
	}
	return f.Close()
}
