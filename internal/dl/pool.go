package dl

import "sync"

// Pool keeps blocks of one size for reuse, so that calls on hot paths map and unmap
// nothing. Its methods may be called from any goroutine.
type Pool struct {
	words int

	mu     sync.Mutex
	free   []*Block // guarded by mu
	closed bool     // guarded by mu
}

// NewPool returns an empty pool of blocks of that many words.
func NewPool(words int) *Pool { return &Pool{words: words} }

// Get returns a block that is nobody else's until Put. It holds what its last user left
// there; a new one is zeroed. Kind: fault.Memory.
func (p *Pool) Get() (*Block, error) {
	p.mu.Lock()
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		p.mu.Unlock()
		return b, nil
	}
	p.mu.Unlock()
	return NewBlock(p.words)
}

// Put gives b back. After Close it is freed.
func (p *Pool) Put(b *Block) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		b.Free()
		return
	}
	p.free = append(p.free, b)
}

// Close frees the blocks that nobody uses, and the others as they come back.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, b := range p.free {
		b.Free()
	}
	p.free = nil
}
