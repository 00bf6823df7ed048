package hostipc

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

const (
	name = "hostipc"

	// greeting is how long a reader may take to receive what it is handed.
	greeting = 10 * time.Second

	defaultPinBytes = 4 << 30

	offerVersion = 1
	maxOffer     = 64
)

// Options are the choices of an engine. The zero value is a good one.
type Options struct {
	// Dir is where the sockets lie; "" means kvferry in $XDG_RUNTIME_DIR, or kvferry-<uid>
	// among the temporary files. Both sides have the same.
	Dir string
	// AllowUIDs are users that are trusted besides this process's own.
	AllowUIDs []int
	// MaxConns bounds the readers that are connected to one cache: at most 16,384; 0 means 256.
	MaxConns int
	// Populate has Open find all of an owner's memory at once, so that no read stops for
	// a page fault. It takes about 0.1 s for each GiB, and gives memory to parts of the
	// cache that were never used.
	Populate bool
	// PinBytes is the largest mapping that is pinned for a reader whose pages are memory
	// of a device; pages of a larger one pass through host memory. 0 means 4 GiB, and less
	// than 0 pins nothing.
	PinBytes int64

	unmappable bool // by tests: no memory is shared, all of it is read from the process
}

// Engine shares host memory between processes.
type Engine struct{ o Options }

var _ transfer.Engine = (*Engine)(nil)

// New returns the engine. Kind: fault.Invalid.
func New(o Options) (*Engine, error) {
	if o.MaxConns < 0 {
		return nil, fault.New(fault.Invalid, "MaxConns", "%d is negative", o.MaxConns)
	}
	if o.PinBytes == 0 {
		o.PinBytes = defaultPinBytes
	}
	return &Engine{o}, nil
}

// Name returns "hostipc".
func (*Engine) Name() string { return name }

// Close does nothing: what was opened closes with its reader, what is offered with its
// publisher.
func (*Engine) Close() error { return nil }

// Offer implements [transfer.Engine]. The offer is the name of a socket. Kinds:
// fault.Unsupported (memory of a device; too many pieces), fault.Invalid and fault.NotFound
// (a directory that is no good for sockets), fault.Device (what the kernel refuses).
func (e *Engine) Offer(x transfer.Export) (offer []byte, withdraw func(), err error) {
	g, from, err := e.describe(x)
	if err != nil {
		return nil, nil, err
	}
	files, err := readOnly(from)
	if err != nil {
		return nil, nil, err
	}
	payload := g.form()
	l, err := handoff.Listen(handoff.ListenOptions{
		Dir: e.o.Dir, Prefix: name, AllowUIDs: e.o.AllowUIDs, MaxConns: e.o.MaxConns,
		Serve: func(ctx context.Context, c *handoff.Conn) {
			hello, cancel := context.WithTimeout(ctx, greeting)
			defer cancel()
			if err := c.SendHello(hello, payload, files); err != nil {
				return
			}
			_ = c.ServeReader(ctx, func(word uint32, count uint64) func(bool) { // however it ends
				return x.Join(transfer.Epoch{Word: word, Count: count})
			})
		},
	})
	if err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return formOffer(l.Name()), func() {
		_ = l.Close() // a socket that stays is swept by the next who listens
		closeAll(files)
	}, nil
}

// describe returns what readers are told of a cache, and the descriptors of its pieces.
func (e *Engine) describe(x transfer.Export) (g *grant, files []int, err error) {
	g = &grant{owner: x.Owner, geometry: x.Cache.Geometry().Fingerprint()}
	if g.words, files = extentOf(x.Words, x.Words.Size(), nil); len(g.words.pieces) == 0 {
		return nil, nil, fault.New(fault.Unsupported, "epoch words", "are not in memory that can be shared").
			Hint("give the publisher memory of device.Host for them")
	}
	for i, need := range x.Cache.Geometry().Spec().RegionBytes {
		m, err := x.Cache.Region(i)
		switch {
		case err != nil:
			return nil, nil, err
		case m.Bytes() == nil:
			return nil, nil, fault.New(fault.Unsupported, fmt.Sprintf("region %d of the cache", i), "is memory of %s, and %s shares host memory", m.Device(), name).
				Hint("publish pages that were offloaded to a host pool, or use cudaipc or hipipc on one device")
		}
		var extent extent
		if extent, files = extentOf(m, need, files); need > 0 && (len(extent.pieces) == 0 || e.o.unmappable) {
			g.byProcess = true
		}
		g.regions = append(g.regions, extent)
	}
	if g.byProcess { // also what could be mapped: one means for one cache
		files = files[:len(g.words.pieces)]
		for i := range g.regions {
			g.regions[i].pieces = nil
		}
	}
	if len(files) > maxPieces {
		return nil, nil, fault.New(fault.Unsupported, "cache", "lies in %d pieces, and %d can be handed over", len(files), maxPieces).
			Hint("make it of larger pieces: device.HostOptions.PieceBytes")
	}
	return g, files, nil
}

// readOnly opens the files behind descriptors for readers.
func readOnly(from []int) (files []int, err error) {
	for _, fd := range from {
		ro, err := handoff.ReadOnly(fd)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, ro)
	}
	return files, nil
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // nothing was written to it
	}
}

// formOffer returns the encoding of an offer, which is the name of a socket.
func formOffer(socket string) []byte { return append([]byte{offerVersion}, socket...) }

// parseOffer is the inverse of formOffer, for bytes from anybody. Whether it is a name
// is seen by who connects. Kinds: fault.Invalid, fault.Unsupported (another version).
func parseOffer(b []byte) (socket string, err error) {
	switch {
	case len(b) < 2 || len(b) > maxOffer:
		return "", fault.New(fault.Invalid, "offer", "%d bytes are not in 2 … %d", len(b), maxOffer)
	case b[0] != offerVersion:
		return "", fault.New(fault.Unsupported, "offer", "version %d, and this build knows %d", b[0], offerVersion).
			Hint("run the same version of kvferry on both sides")
	case !strings.HasPrefix(string(b[1:]), name+"-"):
		return "", fault.New(fault.Invalid, "offer", "%q is no name of a socket", b[1:])
	}
	return string(b[1:]), nil
}

// Open implements [transfer.Engine].
//
// Kinds: fault.Invalid (an offer or a grant that is none, or another owner's or cache's;
// memory that can be resized; this cache's own), fault.NotFound (the owner has gone),
// fault.Busy (it doesn't answer until ctx ends), fault.Full (it has too many readers),
// fault.Unsupported (its memory can be read neither by mapping nor by process_vm_readv),
// fault.Memory.
func (e *Engine) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	socket, err := parseOffer(offer)
	if err != nil {
		return nil, err
	}
	conn, hello, err := handoff.Dial(ctx, socket, handoff.DialOptions{Dir: e.o.Dir, AllowUIDs: e.o.AllowUIDs, MaxFiles: maxPieces})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fault.Wrap(fault.Busy, "owner: has not answered in time", err).Hint("see whether its process is stopped")
	case err != nil:
		return nil, err
	}
	defer hello.Close()
	s := &source{conn: conn, uses: 1} // nothing is unmapped before it is open
	opened, err := e.open(ctx, s, t, d, hello)
	s.done()
	if err != nil {
		_ = s.Close() // the error that counts is err; nothing was enqueued
		return nil, err
	}
	return opened, nil
}

// open fills in a source that has a connection. On an error the caller closes it.
func (e *Engine) open(ctx context.Context, s *source, t transfer.Target, d *transfer.Descriptor, hello *handoff.Hello) (transfer.Source, error) {
	g, err := parseGrant(hello.Payload)
	if err != nil {
		return nil, err
	}
	if err := g.check(d, len(hello.Files)); err != nil {
		return nil, err
	}
	if err := s.refuseOwn(g, t.Cache); err != nil {
		return nil, err
	}
	words := len(g.words.pieces)
	if s.words, err = mapExtent(&g.words, hello.Files[:words], g.words.bytes); err != nil {
		return nil, err
	}
	if g.byProcess {
		if err := s.readFrom(g, d.Geometry); err != nil {
			return nil, err
		}
		s.watch.Go(s.await)
		return transfer.Staged(t, func(host transfer.Target) (transfer.Source, error) { return s.into(host) })
	}
	if err := s.mapAll(g, d.Geometry, hello.Files[words:]); err != nil {
		return nil, err
	}
	if e.o.Populate {
		if err := s.populate(ctx); err != nil {
			return nil, err
		}
	}
	s.watch.Go(s.await)
	if onHost(t.Cache) || s.pin(t.Device, e.o.PinBytes) {
		return s.into(t)
	}
	if t.Host == nil && s.admit(t.Device) {
		return s.into(t)
	}
	return transfer.Staged(t, func(host transfer.Target) (transfer.Source, error) { return s.into(host) })
}

// onHost reports whether the host can address all of c.
func onHost(c *kv.Cache) bool {
	for i := range c.Geometry().Regions() {
		if m, err := c.Region(i); err != nil || m.Bytes() == nil {
			return false
		}
	}
	return true
}

// refuseOwn refuses a cache whose regions are the reader's. Kind: fault.Invalid.
func (s *source) refuseOwn(g *grant, local *kv.Cache) error {
	if s.conn.Peer().PID != os.Getpid() || !onHost(local) {
		return nil
	}
	for i := range local.Geometry().Regions() {
		m, err := local.Region(i)
		if err != nil {
			return err
		}
		for _, x := range g.regions {
			if a := uint64(m.Base()); a < x.base+uint64(x.bytes) && x.base < a+uint64(m.Size()) {
				return fault.New(fault.Invalid, "descriptor", "its pages are the reader's own")
			}
		}
	}
	return nil
}

// errGone is what reads of an owner end with that is there no more.
func errGone(pid int) error {
	return fault.New(fault.NotFound, fmt.Sprintf("owner, process %d", pid), "has ended, or closed its publisher").
		Hint("ask it to publish again")
}
