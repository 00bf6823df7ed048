package transfer

import (
	"context"
	"errors"
	"sync"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// maxIdlePeers is how many owners stay open that nobody reads from at the moment.
const maxIdlePeers = 32

// peerID is what an opened source depends on. An owner that offers other bytes is
// another peer: nothing that was opened for one descriptor serves a different one.
type peerID struct {
	owner    OwnerID
	geometry kv.Fingerprint
	engine   string
	offer    string
}

// peer is an owner, opened or being opened. It is closed when nobody uses it and it has
// left the table: because it failed, to make room, or with the reader.
type peer struct {
	id     peerID
	opened chan struct{} // closed when source or err is set
	source Source
	err    error
	late   bool // err may be due to the end of its opener's ctx

	acks  sync.Mutex        // held while something is acknowledged
	acked map[uint32]uint64 // guarded by acks; the last publication of a word that was

	uses   int    // guarded by Reader.mu
	listed bool   // guarded by Reader.mu; is in Reader.peers
	last   uint64 // guarded by Reader.mu; Reader.turn of the last use
}

// open returns the source of the job's owner, opened once however many read from it.
// The caller gives it to put afterwards, unless there is an error.
func (r *Reader) open(ctx context.Context, j *job) (*peer, error) {
	id := peerID{owner: j.d.Owner, geometry: j.d.Geometry.Fingerprint(), engine: j.engine.Name(), offer: string(j.offer)}
	for {
		r.mu.Lock()
		p := r.peers[id]
		opener := p == nil
		if opener {
			p = &peer{id: id, opened: make(chan struct{}), listed: true}
			r.peers[id] = p
		}
		p.uses++
		r.mu.Unlock()
		if opener {
			p.source, p.err = j.engine.Open(ctx, r.target, j.d, j.offer)
			if p.err != nil {
				otherwise := fault.Device
				// An engine can see that the time is over before ctx does.
				if p.late = ctx.Err() != nil || errors.Is(p.err, context.DeadlineExceeded); p.late {
					otherwise = fault.Busy
				}
				p.err = fault.Wrap(kindOr(p.err, otherwise), "open", p.err)
			}
			close(p.opened)
		}
		select {
		case <-p.opened:
		case <-ctx.Done():
			r.put(p, opener && p.err != nil) // else the next one would be told why this one failed
			return nil, ctx.Err()
		}
		if p.err == nil {
			return p, nil
		}
		r.put(p, true)
		if opener || !p.late { // else another read was given up, and this one opens
			return nil, p.err
		}
	}
}

// put ends one use of p. A peer that failed is not used again.
func (r *Reader) put(p *peer, failed bool) {
	r.mu.Lock()
	p.uses--
	r.turn++
	p.last = r.turn
	if failed {
		r.unlist(p)
	}
	var over []*peer
	if p.uses == 0 && !p.listed {
		over = append(over, p)
	}
	if old := r.oldestIdle(); old != nil {
		r.unlist(old)
		over = append(over, old)
	}
	r.mu.Unlock()
	for _, p := range over {
		_ = p.close() // of no consequence to the read, which is over
	}
}

// unlist takes p out of the table. The caller holds mu.
func (r *Reader) unlist(p *peer) {
	if p.listed {
		delete(r.peers, p.id)
		p.listed = false
	}
}

// oldestIdle returns the peer that makes room, nil when there is enough. The caller
// holds mu.
func (r *Reader) oldestIdle() (old *peer) {
	if len(r.peers) <= maxIdlePeers {
		return nil
	}
	for _, p := range r.peers {
		if p.uses == 0 && (old == nil || p.last < old.last) {
			old = p
		}
	}
	return old
}

// closePeers closes them all, once no read is left.
func (r *Reader) closePeers() (err error) {
	for _, p := range r.peers {
		r.unlist(p)
		err = errors.Join(err, p.close())
	}
	return err
}

func (p *peer) close() error {
	if p.source == nil {
		return nil
	}
	return p.source.Close()
}
