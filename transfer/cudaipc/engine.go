package cudaipc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/transfer"
)

const (
	defaultLinger = time.Second

	// greeting is how long a reader may take to receive what it is handed.
	greeting = 10 * time.Second
)

// recalled is the frame by which an owner asks for its memory back: whoever has it open
// closes it, and then the connection.
const recalled handoff.Kind = 16

// Options are the choices of an engine. The zero value is a good one.
type Options struct {
	// Dir is where the sockets lie; "" means kvferry in $XDG_RUNTIME_DIR, or kvferry-<uid>
	// among the temporary files. Both sides have the same.
	Dir string
	// AllowUIDs are users that are trusted besides this process's own.
	AllowUIDs []int
	// MaxConns bounds the readers that are connected to one cache: at most 16,384; 0 means 256.
	MaxConns int
	// Event is the handle, of 64 bytes, of an event between processes that the owner
	// records behind the work that writes pages, before it publishes them. Nil means that
	// such work is over by then.
	Event []byte
	// Linger is how long a withdrawal waits for readers that have the memory open; 0
	// means 1 s.
	Linger time.Duration
}

// Engine is CUDA IPC or HIP IPC on one device.
type Engine struct {
	name   string
	device *device.Accelerator
	driver sharing
	o      Options
	pid    int // of this process, whose own memory is not opened

	mu   sync.Mutex
	held map[handle][]*source // guarded by mu; who has a handle open
}

var _ transfer.Engine = (*Engine)(nil)

// New returns the engine of a device, which is the caller's to close, after it. Kinds:
// fault.Invalid (options), fault.Unsupported (a driver that shares nothing).
func New(a *device.Accelerator, o Options) (*Engine, error) {
	switch {
	case a == nil:
		return nil, fault.New(fault.Invalid, "cudaipc", "no device")
	case o.Event != nil && len(o.Event) != handleBytes:
		return nil, fault.New(fault.Invalid, "Event", "%d bytes, and a handle has %d", len(o.Event), handleBytes)
	case o.Linger < 0:
		return nil, fault.New(fault.Invalid, "Linger", "%v is negative", o.Linger)
	}
	o.Linger = cmp.Or(o.Linger, defaultLinger)
	name, driver, err := sharingOf(a)
	if err != nil {
		return nil, err
	}
	return &Engine{name: name, device: a, driver: driver, o: o, pid: os.Getpid(), held: map[handle][]*source{}}, nil
}

// Name returns "cudaipc" or "hipipc".
func (e *Engine) Name() string { return e.name }

// Close does nothing: what was opened closes with its reader, what is offered with its
// publisher.
func (*Engine) Close() error { return nil }

// export is one owner's cache.
type export struct {
	transfer.Export
	payload []byte
	files   []int

	mu      sync.Mutex
	conns   map[*handoff.Conn]struct{} // guarded by mu; whose readers may have the memory open
	closing bool                       // guarded by mu
	empty   chan struct{}              // closed when closing and conns is empty
}

// Offer implements [transfer.Engine]. Kinds: fault.Unsupported (memory of another device,
// or such as can't be shared), and those of [handoff.Listen].
func (e *Engine) Offer(x transfer.Export) (offer []byte, withdraw func(), err error) {
	if x.Cache.Device() != e.device.Name() {
		return nil, nil, fault.New(fault.Unsupported, "cache", "in memory of %s, and this engine shares that of %s", x.Cache.Device(), e.device.Name()).
			Hint("let others read it by another engine, such as hostipc")
	}
	ex := &export{Export: x, conns: map[*handoff.Conn]struct{}{}, empty: make(chan struct{})}
	defer func() {
		if err != nil {
			closeAll(ex.files)
		}
	}()
	g := &grant{owner: x.Owner, geometry: x.Cache.Geometry().Fingerprint(), wordBytes: x.Words.Size(), device: idOf(e.device)}
	if e.o.Event != nil {
		h := handle(e.o.Event)
		g.event = &h
	}
	words, err := wordsFile(x.Words)
	if err != nil {
		return nil, nil, err
	}
	ex.files = append(ex.files, words)
	if err := e.grantRegions(g, ex); err != nil {
		return nil, nil, err
	}
	ex.payload = g.encode()
	l, err := handoff.Listen(handoff.ListenOptions{
		Dir: e.o.Dir, Prefix: e.name, AllowUIDs: e.o.AllowUIDs, MaxConns: e.o.MaxConns, Serve: ex.serve,
	})
	if err != nil {
		return nil, nil, err
	}
	return []byte(l.Name()), func() {
		ex.recall(e.o.Linger)
		_ = l.Close() // a socket that stays is swept by the next who listens
		closeAll(ex.files)
	}, nil
}

// wordsFile returns a descriptor, for reading only, of the file of the epoch words.
func wordsFile(words *device.Memory) (int, error) {
	p := words.Pieces()
	if len(p) != 1 || p[0].FileOff != 0 || words.Size() > maxWordBytes {
		return -1, fault.New(fault.Unsupported, "epoch words", "%d bytes in %d files, and at most %d in one can be shared", words.Size(), len(p), maxWordBytes).
			Hint("give the publisher memory of device.Host for them, in pieces as large as they are")
	}
	return handoff.ReadOnly(p[0].FD)
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // nothing was written to it
	}
}

// grantRegions fills in where the regions of a cache lie. Regions in one allocation are
// opened together.
func (e *Engine) grantRegions(g *grant, ex *export) error {
	for i, need := range ex.Cache.Geometry().Spec().RegionBytes {
		m, err := ex.Cache.Region(i)
		if err != nil {
			return err
		}
		if need == 0 {
			g.regions = append(g.regions, region{alloc: noAllocation})
			continue
		}
		a, offset, files, err := e.exportAt(m.Base(), need)
		ex.files = append(ex.files, files...)
		if err != nil {
			return fault.Wrap(fault.Unsupported, fmt.Sprintf("region %d of the cache, %d bytes of %s", i, need, e.device.Name()), err).
				Hint("allocate it by cudaMalloc or hipMalloc, or as memory that can be exported as a file descriptor")
		}
		at := slices.IndexFunc(g.allocs, func(b alloc) bool { return a.pieces == nil && b.pieces == nil && a.handle == b.handle })
		if at < 0 {
			at = len(g.allocs)
			g.allocs = append(g.allocs, a)
		}
		g.regions = append(g.regions, region{uint32(at), offset})
		if g.files()-1 > maxPieces {
			return fault.New(fault.Unsupported, "cache", "its memory lies in more than %d pieces", maxPieces).Hint("have it allocated in larger pieces")
		}
	}
	return nil
}

// exportAt returns what opens the memory at addr, how far behind the beginning of that it
// is, and the descriptors that go with it. Memory that is mapped piece by piece is known
// by what the library says of it; all else has a handle.
func (e *Engine) exportAt(addr uintptr, bytes int64) (a alloc, offset int64, files []int, err error) {
	pieces, offset, noPieces := e.driver.exportPieces(addr, bytes, maxPieces)
	if noPieces == nil {
		for _, p := range pieces {
			a.pieces, files = append(a.pieces, p.bytes), append(files, p.fd)
			a.bytes += p.bytes
		}
		return a, offset, files, nil
	}
	h, offset, have, err := e.driver.exportMemory(addr)
	switch {
	case err != nil:
		return a, 0, nil, errors.Join(err, noPieces)
	case offset < 0 || have-offset < bytes:
		return a, 0, nil, fault.New(fault.Device, "allocation", "of %d bytes, and %d from byte %d on are the cache's", have, bytes, offset)
	}
	return alloc{handle: h, bytes: have}, offset, nil, nil
}

// serve has the connection of one reader.
func (ex *export) serve(ctx context.Context, c *handoff.Conn) {
	if !ex.enter(c) {
		return
	}
	defer ex.leave(c)
	hello, cancel := context.WithTimeout(ctx, greeting)
	defer cancel()
	if err := c.SendHello(hello, ex.payload, ex.files); err != nil {
		return
	}
	ex.greeted(c)
	_ = c.ServeReader(ctx, func(word uint32, count uint64) func(bool) { // however it ends
		return ex.Join(transfer.Epoch{Word: word, Count: count})
	})
}

func (ex *export) enter(c *handoff.Conn) bool {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	if !ex.closing {
		ex.conns[c] = struct{}{}
	}
	return !ex.closing
}

// greeted tells a reader that was in the middle of its hello what recall has told all
// others: only now it can have the memory open, and be told.
func (ex *export) greeted(c *handoff.Conn) {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	if ex.closing {
		_ = c.Send(handoff.Frame{Kind: recalled})
	}
}

func (ex *export) leave(c *handoff.Conn) {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	delete(ex.conns, c)
	if ex.closing && len(ex.conns) == 0 {
		close(ex.empty)
	}
}

// recall asks all readers to close the memory, and waits until they have, or linger is
// over.
func (ex *export) recall(linger time.Duration) {
	ex.mu.Lock()
	ex.closing = true
	for c := range ex.conns {
		_ = c.Send(handoff.Frame{Kind: recalled}) // one that doesn't listen is waited for as well
	}
	if len(ex.conns) == 0 {
		close(ex.empty)
	}
	ex.mu.Unlock()
	patience := time.NewTimer(linger)
	defer patience.Stop()
	select {
	case <-ex.empty:
	case <-patience.C:
	}
}
