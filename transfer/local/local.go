// Package local has the engines that need nothing but this process: [Engine], for two
// caches in it, and [Only], for a cache that shares with nobody.
package local

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// Engine lets readers and publishers that were given the same Engine read from each
// other: it is the table in which they find each other, so that there is no global one.
// Pages are copied on the reader's streams, which must reach the owner's memory too.
type Engine struct {
	mu      sync.Mutex
	serial  uint64             // guarded by mu
	exports map[uint64]*export // guarded by mu; by serial number
}

// export is one owner's cache. Its lock is held for reading by whoever reads its epoch
// words, and for writing to withdraw it.
type export struct {
	transfer.Export
	mu   sync.RWMutex
	gone bool // guarded by mu
}

var _ transfer.Engine = (*Engine)(nil)

// New returns an engine with nobody in it.
func New() *Engine { return &Engine{exports: map[uint64]*export{}} }

// Name returns "local".
func (*Engine) Name() string { return "local" }

// Offer implements [transfer.Engine]. The offer is the number of the export.
func (e *Engine) Offer(x transfer.Export) (offer []byte, withdraw func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.serial++
	serial, ex := e.serial, &export{Export: x}
	e.exports[serial] = ex
	return binary.LittleEndian.AppendUint64(nil, serial), func() {
		e.mu.Lock()
		delete(e.exports, serial)
		e.mu.Unlock()
		ex.mu.Lock()
		ex.gone = true
		ex.mu.Unlock()
	}, nil
}

// Open implements [transfer.Engine].
func (e *Engine) Open(_ context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	if len(offer) != 8 {
		return nil, fault.New(fault.Invalid, "offer", "%d bytes, and a number has 8", len(offer))
	}
	e.mu.Lock()
	x := e.exports[binary.LittleEndian.Uint64(offer)]
	e.mu.Unlock()
	switch {
	case x == nil:
		return nil, errGone()
	case x.Owner != d.Owner:
		return nil, fault.New(fault.Invalid, "offer", "is of owner %v, and not of %v", x.Owner, d.Owner)
	case x.Cache.Geometry().Fingerprint() != d.Geometry.Fingerprint():
		return nil, fault.New(fault.Invalid, "descriptor", "has another geometry than its owner's cache")
	}
	route, err := kv.NewRoute(t.Cache, x.Cache)
	if err != nil {
		return nil, err
	}
	if route.Same() {
		return nil, fault.New(fault.Invalid, "descriptor", "its pages are the reader's own")
	}
	return &source{export: x, route: route, copier: t.Copier, joined: map[uint32]reading{}}, nil
}

// Close does nothing: what is in the engine leaves it when its publisher closes.
func (*Engine) Close() error { return nil }

func errGone() error {
	return fault.New(fault.NotFound, "owner", "has closed its publisher").Hint("ask it to publish again")
}

type source struct {
	export *export
	route  *kv.Route
	copier copier.Copier

	mu     sync.Mutex
	joined map[uint32]reading // guarded by mu; by word, which one publication has at a time
}

// reading is a publication that is read.
type reading struct {
	count uint64
	leave func(done bool)
}

// Epoch implements [transfer.Source]: the word is an atomic load away. Whoever waits for
// a copy's stream has seen all that the copy has.
func (s *source) Epoch(_ context.Context, word uint32) (uint64, error) {
	s.export.mu.RLock()
	defer s.export.mu.RUnlock()
	if s.export.gone {
		return 0, errGone()
	}
	return s.export.Words.LoadUint64(int64(word) * 8)
}

// Copy implements [transfer.Source]. What is enqueued can't be called back, so ctx is
// looked at before, and the stream is waited for whatever happens.
func (s *source) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.Join(s.enqueue(on, p), on.Sync(context.WithoutCancel(ctx)))
}

func (s *source) enqueue(on device.Stream, p *transfer.Plan) error {
	if _, err := s.copier.Copy(on, s.route, p.Pairs); err != nil {
		return err
	}
	for _, x := range p.Parts {
		if _, err := copier.CopyTokens(s.copier, on, s.route, x.Local, x.Remote, x.T0, x.T1); err != nil {
			return err
		}
	}
	return nil
}

// Join implements [transfer.Source].
func (s *source) Join(e transfer.Epoch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, again := s.joined[e.Word]
	if again && was.count >= e.Count {
		return nil
	}
	if leave := s.export.Join(e); leave != nil {
		if again {
			was.leave(false) // it has ended, or the word were not free
		}
		s.joined[e.Word] = reading{e.Count, leave}
	}
	return nil
}

// Leave implements [transfer.Source].
func (s *source) Leave(e transfer.Epoch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was, ok := s.joined[e.Word]; ok && was.count == e.Count {
		delete(s.joined, e.Word)
		was.leave(true)
	}
	return nil
}

// Close implements [transfer.Source].
func (s *source) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for word, was := range s.joined {
		delete(s.joined, word)
		was.leave(false)
	}
	return nil
}
