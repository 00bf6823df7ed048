package handoff

import (
	"context"
	"errors"
	"sync"

	"github.com/kvferry/kvferry/fault"
)

// ServeReader receives what a reader says of publications, until the connection ends or
// says something else; it returns why. join is called when the reader begins with one,
// and its leave once: done says that the reader has what it wants, otherwise it has gone.
// leave is nil when there is no such publication. A word has one publication at a time,
// so a reader holds no more of them than there are.
func (c *Conn) ServeReader(ctx context.Context, join func(word uint32, count uint64) (leave func(done bool))) error {
	type reading struct {
		count uint64
		leave func(done bool)
	}
	joined := map[uint32]reading{}
	defer func() {
		for _, r := range joined {
			r.leave(false)
		}
	}()
	for {
		f, err := c.Receive(ctx)
		if err != nil {
			return err
		}
		was, again := joined[f.Word]
		switch f.Kind {
		case Join:
			if again && was.count >= f.Count {
				continue
			}
			if leave := join(f.Word, f.Count); leave != nil {
				if again {
					was.leave(false) // it has ended, or the word were not free
				}
				joined[f.Word] = reading{f.Count, leave}
			}
		case Leave:
			if again && was.count == f.Count {
				delete(joined, f.Word)
				was.leave(true)
			}
		default:
			return fault.New(fault.Invalid, "frame", "kind %d is none of a reader's", f.Kind)
		}
	}
}

// Joins are the publications that this side reads, as the listener was told. The zero
// value is none. All methods may be called from any goroutine.
type Joins struct {
	mu     sync.Mutex
	counts map[uint32]uint64 // guarded by mu; by word
}

// Join tells the listener that this side reads a publication, unless it knows, or doesn't
// read what it is sent. Kind: fault.Closed.
func (j *Joins) Join(c *Conn, word uint32, count uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if was, ok := j.counts[word]; ok && was >= count {
		return nil // of an older one the word itself says that it has ended
	}
	if err := c.Send(Frame{Join, word, count}); err != nil {
		return unlessBusy(err)
	}
	if j.counts == nil {
		j.counts = map[uint32]uint64{}
	}
	j.counts[word] = count
	return nil
}

// Leave tells the listener that this side has what it wants of a publication that it
// reads. Kind: fault.Closed.
func (j *Joins) Leave(c *Conn, word uint32, count uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if was, ok := j.counts[word]; !ok || was != count {
		return nil
	}
	delete(j.counts, word)
	return unlessBusy(c.Send(Frame{Leave, word, count}))
}

func unlessBusy(err error) error {
	if errors.Is(err, fault.Busy) {
		return nil
	}
	return err
}
