package mooncake

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// The header of an offer lies in memory of the owner's, and is read by the same means as
// everything else. It says who is there: what listens at an address can be another one by
// now. Its numbers are in the order of the owner's machine; a state is read whole.
//
//	"kvferry\x00"  owner [16]  state u64
const (
	headerMagic = "kvferry\x00"
	headerState = 24
	// HeaderBytes is the size of the header.
	HeaderBytes = 32

	lookLimit = 100 * time.Millisecond // what fails later fails again

	stateOffered   = 1
	stateWithdrawn = 2 // or any other
)

// AppendHeader appends the header of an offer that can be read.
func AppendHeader(b []byte, owner transfer.OwnerID) []byte {
	b = append(append(b, headerMagic...), owner[:]...)
	return binary.NativeEndian.AppendUint64(b, stateOffered)
}

// source is the cache of one owner, reached by a worker.
type source struct {
	engine  *Engine
	worker  worker
	owner   transfer.OwnerID
	at      *Offer
	segment uint32
	remote  *kv.Cache
	route   *kv.Route
	numbers []uint32 // of the target's regions at the worker; by region
	added   []uint32 // of those that have bytes
	jobs    sync.Pool
	worked  atomic.Bool // something was read
}

var _ transfer.Source = (*source)(nil)

// job is what a copy needs.
type job struct {
	boxes    []kv.Box
	requests []request
}

// newSource opens the owner of an offer that was checked. After an error the source is
// good for Close. Kinds: those of the worker, and of header.
func newSource(ctx context.Context, e *Engine, w worker, t transfer.Target, d *transfer.Descriptor, o *Offer) (s *source, err error) {
	s = &source{engine: e, worker: w, owner: d.Owner, at: o, jobs: sync.Pool{New: func() any { return new(job) }}}
	spec := d.Geometry.Spec()
	var regions []*device.Memory
	for i, r := range o.Regions {
		// A device of its own: its addresses are another process's.
		regions = append(regions, device.NewMemory(device.MemoryOptions{
			Device: "mooncake " + d.Owner.String(), Base: uintptr(r.Base), Size: spec.RegionBytes[i],
		}))
	}
	if s.remote, err = kv.Wrap(d.Geometry, regions); err != nil {
		return s, err
	}
	if s.route, err = kv.NewRoute(t.Cache, s.remote); err != nil {
		return s, err
	}
	for i := range t.Cache.Geometry().Regions() {
		m, err := t.Cache.Region(i)
		if err != nil {
			return s, err
		}
		number := e.number()
		if m.Size() > 0 {
			if _, err := w.add(ctx, number, m, false); err != nil {
				return s, err
			}
			s.added = append(s.added, number)
		}
		s.numbers = append(s.numbers, number)
	}
	if s.segment, err = w.open(ctx, o.Segment); err != nil {
		return s, err
	}
	return s, s.header(ctx)
}

// Epoch implements [transfer.Source]: the word and the header are read as pages are.
func (s *source) Epoch(ctx context.Context, number uint32) (uint64, error) {
	off := int64(number) * 8
	if off > s.at.Words.Bytes-8 {
		return 0, fault.New(fault.Invalid, "epoch word", "%d of %d", number, s.at.Words.Bytes/8)
	}
	var got [8 + HeaderBytes]byte
	err := s.worker.words(ctx, s.segment, []word{
		{remote: s.at.Words.Base + uint64(off), bytes: 8},
		{remote: s.at.Header, bytes: HeaderBytes},
	}, got[:])
	if err != nil {
		return 0, s.explain(ctx, err)
	}
	s.worked.Store(true)
	return binary.NativeEndian.Uint64(got[:]), s.checkHeader(got[8:])
}

// header reads the header. Kinds: fault.NotFound (the owner has gone), and the worker's.
func (s *source) header(ctx context.Context) error {
	var got [HeaderBytes]byte
	if err := s.worker.words(ctx, s.segment, []word{{remote: s.at.Header, bytes: HeaderBytes}}, got[:]); err != nil {
		return err
	}
	return s.checkHeader(got[:])
}

func (s *source) checkHeader(b []byte) error {
	who := fmt.Sprintf("owner %v at %s", s.owner, s.at.Segment)
	switch {
	case string(b[:len(headerMagic)]) != headerMagic || !bytes.Equal(b[len(headerMagic):headerState], s.owner[:]):
		return fault.New(fault.NotFound, who, "has gone: somebody else is there").Hint("ask it to publish again")
	case binary.NativeEndian.Uint64(b[headerState:]) != stateOffered:
		return fault.New(fault.NotFound, who, "has closed its publisher").Hint("ask it to publish again")
	}
	return nil
}

// explain says what it means that a read failed: the library has one word for all. A
// connection that was lost with the read can fail the next look at once, too: then it is
// looked at again.
func (s *source) explain(ctx context.Context, err error) error {
	for attempt := range tries {
		if ctx.Err() != nil || !errors.Is(err, fault.Device) {
			return err
		}
		began := time.Now()
		gone := s.header(ctx)
		if errors.Is(gone, fault.NotFound) {
			return gone
		}
		if !errors.Is(gone, fault.Device) || time.Since(began) > lookLimit {
			return err
		}
		nap(retryPause << (2 * attempt))
	}
	return err
}

// Copy implements [transfer.Source].
func (s *source) Copy(ctx context.Context, _ device.Stream, p *transfer.Plan) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	j := s.jobs.Get().(*job) //nolint:errcheck // made by newSource and put back here
	defer s.jobs.Put(j)
	var err error
	if j.boxes, err = p.AppendBoxes(j.boxes[:0], s.route); err != nil {
		return err
	}
	if j.requests, err = s.appendRequests(j.requests[:0], j.boxes); err != nil {
		return err
	}
	if err := s.worker.read(ctx, s.segment, j.requests); err != nil {
		return s.explain(ctx, err)
	}
	s.worked.Store(true)
	return nil
}

// appendRequests appends the rows of boxes: those that follow each other on both sides
// as one, and none longer than a slice.
func (s *source) appendRequests(requests []request, boxes []kv.Box) ([]request, error) {
	for i := range boxes {
		b := &boxes[i]
		if b.DstRegion >= len(s.numbers) || b.SrcRegion >= len(s.at.Regions) {
			return requests, fault.New(fault.Invalid, "read", "region %d to region %d", b.SrcRegion, b.DstRegion) // never: a route's
		}
		region, remote := s.numbers[b.DstRegion], s.at.Regions[b.SrcRegion].Base
		for slice := range int64(b.Slices) {
			for row := range int64(b.Rows) {
				local := uint64(b.DstOff + slice*b.DstSlice + row*b.DstPitch)
				from := remote + uint64(b.SrcOff+slice*b.SrcSlice+row*b.SrcPitch)
				requests = appendRow(requests, region, local, from, uint64(b.Width))
			}
		}
	}
	return requests, nil
}

func appendRow(requests []request, region uint32, local, remote, width uint64) []request {
	if n := len(requests); n > 0 {
		q := &requests[n-1]
		if q.region == region && q.local+uint64(q.bytes) == local && q.remote+uint64(q.bytes) == remote {
			more := min(width, sliceBytes-uint64(q.bytes))
			q.bytes += uint32(more)
			local, remote, width = local+more, remote+more, width-more
		}
	}
	for width > 0 {
		n := min(width, sliceBytes)
		requests = append(requests, request{region: region, bytes: uint32(n), local: local, remote: remote})
		local, remote, width = local+n, remote+n, width-n
	}
	return requests
}

// Join implements [transfer.Source]: an owner is never told who reads.
func (*source) Join(transfer.Epoch) error { return nil }

// Leave implements [transfer.Source].
func (*source) Leave(transfer.Epoch) error {
	return fault.New(fault.Unsupported, "engine "+Name, "has no channel to the owner").
		Hint("acknowledge on the channel that descriptors come by")
}

// Close implements [transfer.Source]. A child is this source's alone.
func (s *source) Close() (err error) {
	if s.remote != nil {
		err = s.remote.Close()
	}
	if c, ok := s.worker.(*child); ok {
		s.engine.starts.over(c, s.at.Segment, s.worked.Load())
		c.close()
		return err
	}
	for _, number := range s.added {
		err = errors.Join(err, s.worker.remove(context.Background(), number))
	}
	return err
}
