package transfer

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// way is one way to an owner: an engine that both sides have.
type way struct {
	engine Engine
	offer  []byte
}

// appendWays appends the ways to the owner of d, in its order of preference.
func (r *Reader) appendWays(ways []way, d *Descriptor) []way {
	for _, o := range d.Offers {
		for _, e := range r.o.Engines {
			if e.Name() == o.Engine {
				ways = append(ways, way{e, o.Data})
			}
		}
	}
	return ways
}

func (r *Reader) errNoEngine(d *Descriptor) error {
	var theirs, ours []string
	for _, o := range d.Offers {
		theirs = append(theirs, fmt.Sprintf("%q", o.Engine))
	}
	for _, e := range r.o.Engines {
		ours = append(ours, fmt.Sprintf("%q", e.Name()))
	}
	return fault.New(fault.Unsupported, "descriptor", "its owner is reached by [%s], and this side reads by [%s]",
		strings.Join(theirs, " "), strings.Join(ours, " ")).Hint("give both sides one engine")
}

// open returns the job's owner, by the way that is open already, or else by the first
// that can be opened: an owner offers what works on its own host first, and a reader on
// another one has to pass that over. The caller gives the peer to put afterwards, unless
// there is an error.
func (r *Reader) open(ctx context.Context, j *job) (*peer, error) {
	if i := r.openWay(j); i > 0 {
		j.ways[0], j.ways[i] = j.ways[i], j.ways[0]
	}
	var failed error
	for _, w := range j.ways {
		j.engine = w.engine.Name()
		p, err := r.openBy(ctx, j, w)
		if err == nil {
			return p, nil
		}
		if failed != nil {
			err = fault.Wrap(fault.KindOf(failed), "", fmt.Errorf("%w; by %s: %w", failed, j.engine, err))
		}
		if failed = err; ctx.Err() != nil {
			break
		}
	}
	return nil, failed
}

// openWay returns which of the job's ways is open, −1 for none.
func (r *Reader) openWay(j *job) int {
	if len(j.ways) < 2 {
		return -1
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, w := range j.ways {
		if p := r.peers[idOf(j.d, w)]; p != nil && p.isOpen() {
			return i
		}
	}
	return -1
}

// isOpen reports whether p was opened, and can be read from.
func (p *peer) isOpen() bool {
	select {
	case <-p.opened:
		return p.err == nil
	default:
		return false
	}
}

func idOf(d *Descriptor, w way) peerID {
	return peerID{owner: d.Owner, geometry: d.Geometry.Fingerprint(), engine: w.engine.Name(), offer: string(w.offer)}
}

// openBy is open by one way, which is opened once however many reads take it.
func (r *Reader) openBy(ctx context.Context, j *job, w way) (*peer, error) {
	id := idOf(j.d, w)
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
			p.source, p.err = w.engine.Open(ctx, r.target, j.d, w.offer)
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
