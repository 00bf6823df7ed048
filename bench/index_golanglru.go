package main

import (
	lrucache "github.com/hashicorp/golang-lru/v2"
	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// golangSimpleLRU is golang-lru without its lock.
func golangSimpleLRU(t *trace, capacity int) (*rival, error) {
	return library("golang-lru, no lock", t, func() (lru, func(), error) {
		c, err := simplelru.NewLRU[key, struct{}](capacity, nil)
		return simple{c}, func() {}, err
	}), nil
}

type simple struct{ c *simplelru.LRU[key, struct{}] }

func (s simple) get(k key) bool { _, found := s.c.Get(k); return found }
func (s simple) put(k key)      { s.c.Add(k, struct{}{}) }

// golangLRU is golang-lru's cache for several goroutines.
func golangLRU(t *trace, capacity int) (*rival, error) {
	return library("golang-lru", t, func() (lru, func(), error) {
		c, err := lrucache.New[key, struct{}](capacity)
		return locked{c}, func() {}, err
	}), nil
}

type locked struct {
	c *lrucache.Cache[key, struct{}]
}

func (l locked) get(k key) bool { _, found := l.c.Get(k); return found }
func (l locked) put(k key)      { l.c.Add(k, struct{}{}) }
