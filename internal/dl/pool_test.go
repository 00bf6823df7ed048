package dl

import (
	"sync"
	"testing"
)

func TestPool_GivesABlockToOneAtATime(t *testing.T) {
	p := NewPool(8)
	defer p.Close()
	var all sync.WaitGroup
	for i := range uint64(8) {
		all.Go(func() {
			for range 1000 {
				b, err := p.Get()
				if err != nil {
					t.Error(err)
					return
				}
				for j := range b.Words {
					b.Words[j] = i
				}
				for j := range b.Words {
					if b.Words[j] != i {
						t.Errorf("word %d of a block of %d was written by %d", j, i, b.Words[j])
					}
				}
				p.Put(b)
			}
		})
	}
	all.Wait()
}

func TestPool_AllocatesNothingOnceItIsWarm(t *testing.T) {
	p := NewPool(8)
	defer p.Close()
	if n := testing.AllocsPerRun(100, func() {
		b, _ := p.Get()
		p.Put(b)
	}); n != 0 {
		t.Errorf("%v allocations to take a block and give it back", n)
	}
}

func TestPool_FreesWhatComesBackAfterClose(t *testing.T) {
	p := NewPool(8)
	a, _ := p.Get()
	b, _ := p.Get()
	p.Put(a)
	p.Close()
	p.Put(b)
	if len(p.free) != 0 {
		t.Errorf("a closed pool keeps %d blocks", len(p.free))
	}
}
