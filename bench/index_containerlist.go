package main

import "container/list"

// containerList is what most Go code does: container/list and a map, Python's
// OrderedDict in Go.
func containerList(t *trace, capacity int) (*rival, error) {
	return library("container/list and a map", t, func() (lru, func(), error) {
		return &listLRU{capacity: capacity, order: list.New(), index: map[key]*list.Element{}}, func() {}, nil
	}), nil
}

// listLRU has the most recently used key in front.
type listLRU struct {
	capacity int
	order    *list.List
	index    map[key]*list.Element
}

func (c *listLRU) get(k key) bool {
	e, found := c.index[k]
	if found {
		c.order.MoveToFront(e)
	}
	return found
}

func (c *listLRU) put(k key) {
	if c.get(k) {
		return
	}
	if len(c.index) >= c.capacity {
		last := c.order.Back()
		delete(c.index, last.Value.(key)) //nolint:errcheck // put pushes nothing else
		c.order.Remove(last)
	}
	c.index[k] = c.order.PushFront(k)
}
