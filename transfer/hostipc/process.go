package hostipc

import (
	"context"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

const (
	maxVectors = 1024    // the kernel's limit for one call (IOV_MAX)
	callBytes  = 4 << 20 // of one call, between looks at the context
)

// process is the memory of another process. It is the one at the other end of the
// connection, whose number can't be another's while it is alive.
type process struct {
	conn    *handoff.Conn
	bases   []uint64 // of the owner's regions
	batches sync.Pool
}

// batch is what one call reads.
type batch struct {
	boxes  []kv.Box
	local  []unix.Iovec
	remote []unix.RemoteIovec
	bytes  int
}

// readFrom has a source read the owner's regions from its process, and finds out whether
// it may: the first and the last byte of each must be there. Kinds: as [process.read].
func (s *source) readFrom(g *grant, far *kv.Geometry) error {
	if s.conn.Peer().PID == 0 {
		return fault.New(fault.Unsupported, "owner", "is in a PID namespace that this process does not see, and its memory can't be mapped").
			Hint("run both sides in one PID namespace, or keep the owner's cache in memory that can be shared (device.Host)")
	}
	p := &process{conn: s.conn, batches: sync.Pool{New: func() any { return new(batch) }}}
	b := &batch{}
	var trial [2]byte
	var regions []*device.Memory
	for i, need := range far.Spec().RegionBytes {
		base := g.regions[i].base
		if base > math.MaxUint64-uint64(need) || uint64(uintptr(base)) != base {
			return fault.New(fault.Invalid, "grant", "region %d has %d bytes at %#x", i, need, base)
		}
		p.bases = append(p.bases, base)
		regions = append(regions, device.NewMemory(device.MemoryOptions{Device: "another process", Base: uintptr(base), Size: need}))
		if need == 0 {
			continue
		}
		b.add(trial[:1], base)
		b.add(trial[1:], base+uint64(need)-1)
		if err := p.read(b); err != nil {
			return err
		}
	}
	s.process = p
	var err error
	s.cache, err = kv.Wrap(far, regions)
	return err
}

// copy reads what a plan lists, straight into the pages.
func (p *process) copy(ctx context.Context, r *kv.Route, plan *transfer.Plan) error {
	b := p.batches.Get().(*batch) //nolint:errcheck // of this pool
	defer func() {
		b.clear()
		p.batches.Put(b)
	}()
	var err error
	if b.boxes, err = plan.AppendBoxes(b.boxes[:0], r); err != nil {
		return err
	}
	for i := range b.boxes {
		x := &b.boxes[i]
		to, err := r.Dst().Region(x.DstRegion)
		if err != nil {
			return err
		}
		base := p.bases[x.SrcRegion]
		for slice := range int64(x.Slices) {
			for row := range int64(x.Rows) {
				local := to.Bytes()[x.DstOff+slice*x.DstSlice+row*x.DstPitch:][:x.Width]
				remote := base + uint64(x.SrcOff+slice*x.SrcSlice+row*x.SrcPitch)
				for len(local) > 0 {
					n := min(len(local), callBytes-b.bytes)
					b.add(local[:n], remote)
					local, remote = local[n:], remote+uint64(n)
					if len(b.local) < maxVectors && b.bytes < callBytes {
						continue
					}
					if err := p.read(b); err != nil {
						return err
					}
					if err := ctx.Err(); err != nil {
						return err
					}
				}
			}
		}
	}
	return p.read(b)
}

func (b *batch) add(local []byte, remote uint64) {
	v := unix.Iovec{Base: &local[0]}
	v.SetLen(len(local))
	b.local = append(b.local, v)
	b.remote = append(b.remote, unix.RemoteIovec{Base: uintptr(remote), Len: len(local)})
	b.bytes += len(local)
}

// clear empties the batch. No address stays in it: what lay there may be unmapped, and be
// somebody else's later.
func (b *batch) clear() {
	clear(b.local)
	b.local, b.remote, b.bytes = b.local[:0], b.remote[:0], 0
}

// read reads the batch, and empties it. The process is alive before and after, so it is
// the same one.
//
// Kinds: fault.NotFound (it has ended, or has no memory there any more), fault.Unsupported
// (this system doesn't let one process read another), fault.Memory.
func (p *process) read(b *batch) error {
	defer b.clear()
	if len(b.local) == 0 {
		return nil
	}
	pid := p.conn.Peer().PID
	if !p.conn.Alive() {
		return errGone(pid)
	}
	for local, remote := b.local, b.remote; len(local) > 0; {
		n, err := unix.ProcessVMReadv(pid, local, remote, 0)
		if err == unix.EINTR {
			continue
		}
		read := complete(remote, n)
		if err != nil || read == 0 {
			return p.failure(pid, err)
		}
		local, remote = local[read:], remote[read:]
	}
	if !p.conn.Alive() {
		return errGone(pid)
	}
	return nil
}

// complete returns how many vectors n bytes fill. A call ends early where it finds no
// memory; what it has of the next vector is read once more, with the reason why there is
// no more of it.
func complete(remote []unix.RemoteIovec, n int) (vectors int) {
	for vectors < len(remote) && n >= remote[vectors].Len {
		n -= remote[vectors].Len
		vectors++
	}
	return vectors
}

// failure says what it means that a process can't be read.
func (p *process) failure(pid int, err error) error {
	what := fmt.Sprintf("memory of process %d", pid)
	switch {
	case err == unix.ESRCH || !p.conn.Alive():
		return errGone(pid)
	case err == unix.EFAULT || err == nil:
		return fault.New(fault.NotFound, what, "is not where its owner has said").Hint("ask the owner to publish again")
	case err == unix.EPERM || err == unix.EACCES || err == unix.ENOSYS:
		return fault.Wrap(fault.Unsupported, what+": process_vm_readv", err).Hint("%s", remedy(ptraceScope()))
	case err == unix.ENOMEM:
		return fault.Wrap(fault.Memory, what, err)
	default:
		return fault.Wrap(fault.Device, what+": process_vm_readv", err)
	}
}
