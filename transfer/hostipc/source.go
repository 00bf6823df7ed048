package hostipc

import (
	"context"
	"errors"
	"sync"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// source is an owner's cache, opened in this process.
//
// Its memory is unmapped by who comes last of: the reads that run, and what ends them,
// which is Close, or the end of the connection.
type source struct {
	conn    *handoff.Conn
	watch   sync.WaitGroup
	joins   handoff.Joins
	words   mapping
	regions []mapping
	cache   *kv.Cache // the owner's, as it is reached from here

	route   *kv.Route
	copier  copier.Copier
	process *process // nil when the cache is mapped

	mu    sync.Mutex
	uses  int   // guarded by mu
	over  bool  // guarded by mu; no use begins any more
	freed bool  // guarded by mu
	err   error // guarded by mu; of what could not be given back
}

var _ transfer.Source = (*source)(nil)

// mapAll maps the owner's regions.
func (s *source) mapAll(g *grant, far *kv.Geometry, files []int) error {
	var regions []*device.Memory
	for i, need := range far.Spec().RegionBytes {
		x := &g.regions[i]
		m, err := mapExtent(x, files[:len(x.pieces)], need)
		if err != nil {
			return err
		}
		files = files[len(x.pieces):]
		s.regions = append(s.regions, m)
		regions = append(regions, m.mem)
	}
	var err error
	s.cache, err = kv.Wrap(far, regions)
	return err
}

func (s *source) populate(ctx context.Context) error {
	for i := range s.regions {
		if err := s.regions[i].populate(ctx); err != nil {
			return err
		}
	}
	return nil
}

// pin makes all regions ready for copies by a device, if they are at most that many
// bytes, and it can.
func (s *source) pin(dev device.Device, most int64) bool {
	d, ok := dev.(interface {
		Pin(m *device.Memory, off, n int64) error
	})
	if !ok {
		return false
	}
	for i := range s.regions {
		if most -= int64(len(s.regions[i].bytes)); most < 0 {
			return false
		}
	}
	for i := range s.regions {
		m := s.regions[i].mem
		if err := d.Pin(m, 0, m.Size()); err != nil {
			return false // what was pinned is unpinned with the mapping, and harms nobody
		}
	}
	return true
}

// admit lets a device copy slowly from all regions, if it can.
func (s *source) admit(dev device.Device) bool {
	d, ok := dev.(interface {
		AdmitPageable(m *device.Memory) error
	})
	if !ok {
		return false
	}
	for i := range s.regions {
		if err := d.AdmitPageable(s.regions[i].mem); err != nil {
			return false
		}
	}
	return true
}

// into makes s a source for reads into a target. Kinds: those of [kv.NewRoute].
func (s *source) into(t transfer.Target) (transfer.Source, error) {
	var err error
	s.copier = t.Copier
	s.route, err = kv.NewRoute(t.Cache, s.cache)
	return s, err
}

// await ends the source when the connection ends: the owner withdraws it so, and its
// death does. It has nothing to say.
func (s *source) await() {
	_, _ = s.conn.Receive(context.Background()) // until Close, at the latest
	s.end()
}

// begin keeps the memory where it is until done. It reports false when it is gone, or
// about to go.
func (s *source) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.over {
		s.uses++
	}
	return !s.over
}

func (s *source) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.uses--
	s.free()
}

// end lets no use begin any more.
func (s *source) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	s.free()
}

// free gives the memory back when nothing uses it and nothing will. The caller holds mu.
func (s *source) free() {
	if !s.over || s.uses > 0 || s.freed {
		return
	}
	s.freed = true
	for i := range s.regions {
		s.err = errors.Join(s.err, s.regions[i].free())
	}
	s.err = errors.Join(s.err, s.words.free())
}

// Epoch implements [transfer.Source]. The word is an atomic load away, behind all that a
// copy has read, for its end was waited for. Then the kernel is asked for the owner: its
// memory may well outlive it, but nobody keeps the promise.
func (s *source) Epoch(_ context.Context, word uint32) (uint64, error) {
	if !s.begin() {
		return 0, s.errGone()
	}
	defer s.done()
	count, err := s.words.mem.LoadUint64(int64(word) * 8)
	if err == nil && !s.conn.Alive() {
		s.end()
		return 0, s.errGone()
	}
	return count, err
}

func (s *source) errGone() error { return errGone(s.conn.Peer().PID) }

// Copy implements [transfer.Source]. What is enqueued can't be called back, so ctx is
// looked at before, and the stream is waited for whatever happens. What is read from the
// owner's process can be given up at any time.
func (s *source) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !s.begin() {
		return s.errGone()
	}
	defer s.done()
	if s.process != nil {
		return s.process.copy(ctx, s.route, p)
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
func (s *source) Join(e transfer.Epoch) error { return s.told(s.joins.Join(s.conn, e.Word, e.Count)) }

// Leave implements [transfer.Source].
func (s *source) Leave(e transfer.Epoch) error { return s.told(s.joins.Leave(s.conn, e.Word, e.Count)) }

func (s *source) told(err error) error {
	if errors.Is(err, fault.Closed) {
		return s.errGone()
	}
	return err
}

// Close implements [transfer.Source].
func (s *source) Close() error {
	s.end()
	_ = s.conn.Close() // the other side sees it whatever it says
	s.watch.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.err
	s.err = nil
	return err
}
