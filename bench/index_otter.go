package main

import "github.com/maypok86/otter/v2"

// otterCache is otter, whose policy is W-TinyLFU: it keeps other pages than least
// recent use does. What its own goroutines do is in the time.
func otterCache(t *trace, capacity int) (*rival, error) {
	return library("otter (W-TinyLFU)", t, func() (lru, func(), error) {
		c, err := otter.New(&otter.Options[key, struct{}]{MaximumSize: capacity})
		if err != nil {
			return nil, nil, err
		}
		return tiny{c}, func() { c.StopAllGoroutines() }, nil
	}), nil
}

type tiny struct{ c *otter.Cache[key, struct{}] }

func (o tiny) get(k key) bool { _, found := o.c.GetIfPresent(k); return found }
func (o tiny) put(k key)      { o.c.Set(k, struct{}{}) }
