package transfer

import (
	"context"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
)

// Engine reaches the memory of other owners in one way, and lets others reach an
// owner's in the same way. Both sides have an engine of one name. All methods may be
// called from any goroutine. Whoever makes an engine closes it, after every [Publisher]
// and [Reader] that has it.
type Engine interface {
	// Name says which engine this is: "local", "hostipc". It is what descriptors have:
	// 1 to MaxNameBytes bytes, and never another engine's.
	Name() string

	// Offer makes the memory of e reachable until withdraw is called, and returns what
	// a peer's engine needs to find it: at most MaxOfferBytes. An engine that lets
	// nobody read returns a nil withdraw, and is not mentioned in descriptors; nor is one
	// that can't reach this memory, which is a kind of fault.Unsupported. Peers may
	// read while e is offered; which bytes they may believe is the epoch's business.
	// When withdraw has returned, nothing of this process reads e's words any more.
	Offer(e Export) (offer []byte, withdraw func(), err error)

	// Open opens the owner of d for reads into t. offer is what the peer's engine
	// offered: hostile bytes until it has been checked. Every local address and every
	// length come from t; what the peer says is the far end of a read, inside what the
	// transport itself lets be read. It returns when ctx ends at the latest. A kind of
	// fault.NotFound says that nothing is there any more.
	Open(ctx context.Context, t Target, d *Descriptor, offer []byte) (Source, error)

	// Close ends the engine. Calling it again does nothing.
	Close() error
}

// Source is the cache of one owner, opened for reads into one target. All methods but
// Close may be called from any goroutine, and at the same time.
type Source interface {
	// Epoch reads the owner's epoch word of that number, in the way in which Copy reads
	// pages: never by asking a process that may be stopped. What Copy read before must
	// have been read before the word is, and what it reads after, after. It returns
	// when ctx ends at the latest.
	Epoch(ctx context.Context, word uint32) (uint64, error)

	// Copy reads what p lists, and may enqueue its copies on s, a stream of the target's
	// device that is nobody else's meanwhile. It returns when the copy is over: from
	// then on nothing writes the local pages, whatever is returned. When ctx ends it
	// gives up as soon as it can do that. On an error the local pages that p lists hold
	// undefined bytes; all others, and tokens of theirs that p doesn't list, are never
	// touched. p is read, its pairs may be put into another order, and it isn't kept.
	Copy(ctx context.Context, s device.Stream, p *Plan) error

	// Join tells the owner that this source reads publication e, until Leave says that
	// its reader has what it wants of it, or Close that the reader has gone. They send
	// what can be sent at once, and never wait for an owner that may be stopped: what an
	// owner doesn't hear, the lease's expiry does. Joining again changes nothing. An
	// engine with no channel to the owner does nothing in Join, and refuses Leave with a
	// kind of fault.Unsupported.
	Join(e Epoch) error
	Leave(e Epoch) error

	// Close ends the use of the owner's memory. No other call is running.
	Close() error
}

// Export is what an owner offers.
type Export struct {
	Owner OwnerID
	Cache *kv.Cache
	Words *device.Memory // the epoch words: word i is the 8 bytes at 8·i

	// Join is called when a reader begins to use publication e, by an engine that sees
	// its readers come and go. leave is called once: done says that the reader has
	// acknowledged, otherwise it has gone. It is nil when there is no such publication.
	Join func(e Epoch) (leave func(done bool))

	// Lost is called when nobody can read by this offer any more, and why: a process that
	// served it is gone. The publisher withdraws it, leaves it out of descriptors, and has
	// the engine offer again until that works. Calling it again does nothing. It is nil
	// where nobody wants to know.
	Lost func(why error)
}

// Target is where a reader's pages are.
type Target struct {
	Cache  *kv.Cache
	Device device.Device // whose streams copy
	Copier copier.Copier
	Host   *device.Host // memory that pages can pass through on their way; nil when there is none
}
