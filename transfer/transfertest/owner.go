package transfertest

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// Owner is the side that is read. [Served] is one in this process; one in another
// process answers the same calls over a pipe.
type Owner interface {
	// Publish publishes pages, with their sums if asked for, and returns the encoded
	// descriptor.
	Publish(pages []page.ID, sums bool, ttl time.Duration) ([]byte, error)
	// End ends a publication.
	End(e transfer.Epoch) error
	// Leased returns how many publications there are.
	Leased() (int, error)
	// Drop gives up the owner's own hold of pages.
	Drop(pages []page.ID) error
	// Reuse takes all free pages for something new: it fills them by seed, and holds them.
	Reuse(seed uint64) ([]page.ID, error)
	// Free returns how many pages nobody holds.
	Free() (int, error)
	// Stop closes the publisher.
	Stop() error
	// Close ends the owner.
	Close() error
}

// Served is an owner: a cache, its arena and its publisher.
type Served struct {
	side      Side
	host      *device.Host
	ground    *ground
	arena     *page.Arena
	publisher *transfer.Publisher
}

var _ Owner = (*Served)(nil)

// graceful is how long a publication stays when its reader has gone.
const graceful = 20 * time.Millisecond

// Serve returns an owner on that side, which it closes: all pages of its cache are held
// by it, sealed, and filled by seed. On an error nothing is left.
func Serve(side Side, g *kv.Geometry, seed uint64) (s *Served, err error) {
	s = &Served{side: side}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if s.host, err = device.OpenHost(device.HostOptions{}); err != nil {
		return nil, err
	}
	if s.ground, err = newGround(side, s.host, g); err != nil {
		return nil, err
	}
	if s.arena, err = page.NewArena(page.ArenaOptions{Pages: g.Pages(), Sink: g.Sink()}); err != nil {
		return nil, err
	}
	if _, err = s.Reuse(seed); err != nil {
		return nil, err
	}
	s.publisher, err = transfer.NewPublisher(transfer.PublisherOptions{
		Cache: s.ground.cache, Holder: transfer.HoldArena(s.arena), Host: s.host, Engines: []transfer.Engine{side.Engine},
		Entity: "transfertest", Grace: graceful,
	})
	return s, err
}

// Publish implements [Owner].
func (s *Served) Publish(pages []page.ID, sums bool, ttl time.Duration) ([]byte, error) {
	var of []transfer.Sum
	if sums && s.ground.mirror == nil { // else the host doesn't see the bytes
		var err error
		if of, err = transfer.AppendSums(nil, s.ground.cache, pages); err != nil {
			return nil, err
		}
	}
	d, err := s.publisher.Publish(transfer.Lease{Pages: pages, Sums: of, TTL: ttl})
	if err != nil {
		return nil, err
	}
	return d.AppendBinary(nil)
}

// End implements [Owner].
func (s *Served) End(e transfer.Epoch) error { return s.publisher.End(e) }

// Leased implements [Owner].
func (s *Served) Leased() (int, error) { return s.publisher.Leased(), nil }

// Drop implements [Owner].
func (s *Served) Drop(pages []page.ID) error {
	_, err := s.arena.Release(pages)
	return err
}

// Reuse implements [Owner].
func (s *Served) Reuse(seed uint64) ([]page.ID, error) {
	pages, err := s.arena.Acquire(nil, s.arena.NumFree())
	if err != nil {
		return nil, err
	}
	if err := s.ground.fill(seed, pages); err != nil {
		return nil, err
	}
	return pages, s.arena.Seal(pages)
}

// Free implements [Owner].
func (s *Served) Free() (int, error) { return s.arena.NumFree(), nil }

// Stop implements [Owner].
func (s *Served) Stop() error { return s.publisher.Close() }

// Close implements [Owner].
func (s *Served) Close() (err error) {
	if s.publisher != nil {
		err = s.publisher.Close()
	}
	err = errors.Join(err, s.side.Engine.Close())
	if s.ground != nil {
		err = errors.Join(err, s.ground.close())
	}
	if s.host != nil {
		err = errors.Join(err, s.host.Close())
	}
	if s.side.Close != nil {
		err = errors.Join(err, s.side.Close())
	}
	return err
}

// Fill writes the contents of pages of a cache in host memory. They are a function of
// seed, global layer, plane, page and place in the plane: nothing to remember, and a
// foreign byte is seen.
func Fill(c *kv.Cache, seed uint64, pages []page.ID) error {
	for i, l := range c.Geometry().Spec().Layers {
		for j := range l.Planes {
			for _, id := range pages {
				b, err := c.Plane(i, j, id)
				if err != nil {
					return err
				}
				x := mix(mix(mix(seed)^uint64(l.ID)<<8^uint64(j)) ^ uint64(id))
				for n := uint64(0); len(b) > 0; n++ {
					var word [8]byte
					binary.LittleEndian.PutUint64(word[:], mix(x+n))
					b = b[copy(b, word[:]):]
				}
			}
		}
	}
	return nil
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// allPages returns the pages of a geometry that hold tokens.
func allPages(g *kv.Geometry) (ids []page.ID) {
	for id := range page.ID(g.Pages()) {
		if !g.Sink() || id != page.Sink {
			ids = append(ids, id)
		}
	}
	return slices.Clip(ids)
}
