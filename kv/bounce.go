package kv

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Rows in memory that the host can't address pass through pinned host memory, in parts
// of at most so many bytes and copies. A row that is larger makes room for itself.
const (
	bounceBytes = 1 << 20
	bounceOps   = 8192
)

// pinner is a device whose memory the host can't address, and whose copies reach the
// host memory that it gives: a [device.Accelerator].
type pinner interface {
	AllocHost(h *device.Host, bytes, cut int64) (*device.Memory, error)
	AdmitPageable(m *device.Memory) error
}

// bounce is the pinned host memory of a cache, the stream that carries rows to and
// from it, and the scratch space of one call. All of it is made by the first call that
// needs it, and given back by Close.
//
// Lock order: Cache.mu, then mu.
type bounce struct {
	mu     sync.Mutex
	host   *device.Host   // guarded by mu, like all below
	mem    *device.Memory // pinned
	stream device.Stream

	order []int32 // rows of the part, by slot; of one slot in the order given
	place []int32 // by row: the place of its slot in the buffer
	first []int32 // by place: a row of that slot
	ops   []device.Op
}

// lockBounce locks the cache's bounce buffer, with room for one row of halves. The caller
// unlocks it, unless there is an error.
func (c *Cache) lockBounce(halves []half) (b *bounce, err error) {
	b = &c.bounce
	b.mu.Lock()
	defer func() {
		if err != nil {
			c.bounce.mu.Unlock()
		}
	}()
	if c.closed.Load() {
		return nil, c.errClosed()
	}
	if b.host == nil {
		if b.host, err = device.OpenHost(device.HostOptions{}); err != nil {
			return nil, err
		}
	}
	one, _ := rowOf(halves)
	if b.mem != nil && b.mem.Size() < one {
		if err := b.mem.Free(); err != nil {
			return nil, err
		}
		b.mem = nil
	}
	if b.mem == nil {
		dev, ok := c.dev.(pinner)
		if !ok { // as fill has seen
			return nil, fault.New(fault.Unsupported, "cache", "%s gives no host memory that its copies reach", c.name)
		}
		if b.mem, err = device.ReachableMemory(dev, b.host, max(one, bounceBytes), 1); err != nil {
			return nil, err
		}
	}
	if b.stream == nil {
		if b.stream, err = c.dev.NewStream("rows"); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// close gives everything back. Nothing runs on the stream: every call has waited.
func (b *bounce) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stream != nil {
		_ = b.stream.Close() // whatever failed on it was said by the call that it failed for
		b.stream = nil
	}
	if b.mem != nil {
		if err := b.mem.Free(); err != nil {
			return err
		}
		b.mem = nil
	}
	if b.host != nil {
		if err := b.host.Close(); err != nil {
			return err
		}
		b.host = nil
	}
	return nil
}

// rowOf returns the bytes of the rows of one slot, and in how many copies they go.
func rowOf(halves []half) (bytes int64, ops int) {
	for i := range halves {
		bytes += halves[i].bytes * int64(halves[i].blocks)
		ops += halves[i].blocks
	}
	return bytes, ops
}

// most returns how many slots fit into one part.
func (b *bounce) most(halves []half) int {
	bytes, ops := rowOf(halves)
	return int(max(1, min(b.mem.Size()/bytes, int64(bounceOps/ops))))
}

// settle gives every row its place in the buffer: one for each slot, in the order in
// which slots lie in the cache, so that neighbours go in one copy.
func (b *bounce) settle(pages []page.ID, slots []int32) {
	b.order, b.place, b.first = b.order[:0], slices.Grow(b.place[:0], len(pages))[:len(pages)], b.first[:0]
	for i := range pages {
		b.order = append(b.order, int32(i))
	}
	slices.SortFunc(b.order, func(i, j int32) int {
		return cmp.Or(cmp.Compare(pages[i], pages[j]), cmp.Compare(slots[i], slots[j]))
	})
	for k, i := range b.order {
		if k == 0 || pages[b.order[k-1]] != pages[i] || slots[b.order[k-1]] != slots[i] {
			b.first = append(b.first, i)
		}
		b.place[i] = int32(len(b.first) - 1)
	}
}

// off returns where a block of the row in a place of half number i lies in the buffer:
// half after half, in each block after block, in each place after place.
func (b *bounce) off(halves []half, i, block int, place int32) int64 {
	var off int64
	for k := range i {
		off += halves[k].bytes * int64(halves[k].blocks) * int64(len(b.first))
	}
	return off + (int64(block)*int64(len(b.first))+int64(place))*halves[i].bytes
}

// at returns the bytes of a block of row t in the buffer.
func (b *bounce) at(halves []half, i, block, t int) []byte {
	return b.mem.Bytes()[b.off(halves, i, block, b.place[t]):][:halves[i].bytes]
}

// carry copies the rows of the part into the cache, or out of it, and waits until they
// are there.
func (b *bounce) carry(halves []half, pages []page.ID, slots []int32, into bool) error {
	b.ops = b.ops[:0]
	for i := range halves {
		h := &halves[i]
		for block := range h.blocks {
			off := b.off(halves, i, block, 0)
			for _, t := range b.first {
				b.push(h.far, h.offset(pages[t], slots[t], block), off, h.bytes)
				off += h.bytes
			}
		}
	}
	if !into {
		for i := range b.ops {
			op := &b.ops[i]
			op.Dst, op.DstOff, op.Src, op.SrcOff = op.Src, op.SrcOff, op.Dst, op.DstOff
		}
	}
	err := b.stream.Copy(b.ops)
	if err == nil {
		err = b.stream.Sync(context.Background())
	}
	clear(b.ops) // of the memories that they name
	if err != nil {
		// A stream that failed stays failed, and one that refused half may be copying:
		// the next call gets another, once this one is idle.
		_ = b.stream.Close()
		b.stream = nil
	}
	return err
}

// push adds the copy of bytes at from in the buffer to off in m, or makes the copy
// before it longer.
func (b *bounce) push(m *device.Memory, off, from, bytes int64) {
	if n := len(b.ops); n > 0 {
		if last := &b.ops[n-1]; last.Dst == m && last.DstOff+last.Bytes == off && last.SrcOff+last.Bytes == from {
			last.Bytes += bytes
			return
		}
	}
	b.ops = append(b.ops, device.Op{Dst: m, DstOff: off, Src: b.mem, SrcOff: from, Bytes: bytes})
}

// writeFar writes the rows of slots into memory that the host can't address: give puts
// each block of row t into the bytes that it is handed.
func (c *Cache) writeFar(halves []half, pages []page.ID, slots []int32, give func(to []byte, half, block, t int)) error {
	if len(pages) == 0 {
		return nil
	}
	b, err := c.lockBounce(halves)
	if err != nil {
		return err
	}
	defer b.mu.Unlock()
	step := b.most(halves)
	for from := 0; from < len(pages); from += step {
		to := min(from+step, len(pages))
		b.settle(pages[from:to], slots[from:to])
		for t := range to - from { // in their order: the last of a slot wins
			for i := range halves {
				for block := range halves[i].blocks {
					give(b.at(halves, i, block, t), i, block, from+t)
				}
			}
		}
		if err := b.carry(halves, pages[from:to], slots[from:to], true); err != nil {
			return err
		}
	}
	return nil
}

// readFar appends to dst the rows of slots in memory that the host can't address. After
// an error dst is as it was.
func (c *Cache) readFar(dst []byte, halves []half, pages []page.ID, slots []int32) ([]byte, error) {
	if len(pages) == 0 {
		return dst, nil
	}
	b, err := c.lockBounce(halves)
	if err != nil {
		return dst, err
	}
	defer b.mu.Unlock()
	before, step := len(dst), b.most(halves)
	for from := 0; from < len(pages); from += step {
		to := min(from+step, len(pages))
		b.settle(pages[from:to], slots[from:to])
		if err := b.carry(halves, pages[from:to], slots[from:to], false); err != nil {
			return dst[:before], err
		}
		for t := range to - from {
			for i := range halves {
				for block := range halves[i].blocks {
					dst = append(dst, b.at(halves, i, block, t)...)
				}
			}
		}
	}
	return dst, nil
}
