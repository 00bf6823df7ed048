package tcp

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// Engine is either side, or both: it reads from owners, and lets readers read if it was
// given an address to listen on.
type Engine struct {
	o         Options
	mode      byte
	secrets   *secrets // nil without TLS
	listener  net.Listener
	advertise string
	flows     sync.Pool // of *flow
	stats     counters
	ctx       context.Context //nolint:containedctx // ends when the engine is closed
	cancel    context.CancelFunc
	running   sync.WaitGroup // the goroutines of the listener and its connections

	mu       sync.Mutex
	closed   bool                         // guarded by mu
	exports  map[transfer.OwnerID]*export // guarded by mu
	visitors map[net.Conn]struct{}        // guarded by mu; connections of readers
	lobby    lobby                        // guarded by mu; of these, who may be strangers
	readers  int                          // guarded by mu; of these, who are readers
	warned   time.Time                    // guarded by mu; when Logger was last told
	unsaid   int                          // guarded by mu; refusals since
}

var _ transfer.Engine = (*Engine)(nil)

// Stats count what an engine has done so far.
type Stats struct {
	Readers       int    // connections of readers, now, and of who may become one
	Accepted      uint64 // of readers that have proved the key
	Refused       uint64 // connections that ended in their handshake, or for which there was no room
	Sent, Arrived uint64 // bytes of pages
}

type counters struct{ accepted, refused, sent, arrived atomic.Uint64 }

// New returns an engine, which listens if it is to. Kinds: fault.Invalid (options),
// fault.Busy (an address that is in use), fault.Device (one that can't be listened on).
func New(o Options) (*Engine, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	e := &Engine{
		o: o, mode: modePlain, flows: sync.Pool{New: func() any { return new(flow) }},
		exports: map[transfer.OwnerID]*export{}, visitors: map[net.Conn]struct{}{},
	}
	if o.TLS {
		var err error
		if e.secrets, err = newSecrets(); err != nil {
			return nil, err
		}
		e.mode = modeTLS
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if o.Listen == "" {
		return e, nil
	}
	if err := e.listen(); err != nil {
		e.cancel()
		return nil, err
	}
	e.running.Go(e.accept)
	return e, nil
}

func (e *Engine) listen() error {
	host, err := checkListen(e.o.Listen)
	if err != nil {
		return fault.Wrap(fault.Invalid, "Listen", err)
	}
	config := net.ListenConfig{KeepAliveConfig: keepAlive()}
	l, err := config.Listen(e.ctx, "tcp", e.o.Listen)
	if err != nil {
		return fault.Wrap(ioKind(err), "Listen", err)
	}
	if err := checkConnected(e.o.Listen, l.Addr()); err != nil { // a name may stand for anything
		_ = l.Close()
		return fault.Wrap(fault.Invalid, "Listen", err)
	}
	e.listener, e.advertise = l, e.o.Advertise
	if e.advertise == "" {
		e.advertise = net.JoinHostPort(host, strconv.Itoa(l.Addr().(*net.TCPAddr).Port)) //nolint:errcheck // checkConnected has looked
	}
	return nil
}

// Name returns "tcp".
func (*Engine) Name() string { return "tcp" }

// Addr returns the address by which readers come, "" when this side lets nobody read.
func (e *Engine) Addr() string { return e.advertise }

// Stats returns what the engine has done so far.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	n := len(e.visitors)
	e.mu.Unlock()
	return Stats{
		Readers: n, Accepted: e.stats.accepted.Load(), Refused: e.stats.refused.Load(),
		Sent: e.stats.sent.Load(), Arrived: e.stats.arrived.Load(),
	}
}

// Offer implements [transfer.Engine]. Kinds: fault.Unsupported (this side doesn't listen;
// memory that the host can't address), fault.Exists (an owner of that id), fault.Closed.
func (e *Engine) Offer(x transfer.Export) (offer []byte, withdraw func(), err error) {
	if e.listener == nil {
		return nil, nil, fault.New(fault.Unsupported, "", "this side doesn't listen, and lets nobody read").Hint("set Options.Listen")
	}
	f, err := newForm(x.Cache)
	if err != nil {
		return nil, nil, err
	}
	ex := &export{Export: x, form: f, print: x.Cache.Geometry().Fingerprint(), users: map[*visitor]struct{}{}}
	ex.idle.L = &ex.mu
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return nil, nil, fault.New(fault.Closed, "engine tcp", "closed before")
	case e.exports[x.Owner] != nil:
		return nil, nil, fault.New(fault.Exists, "owner "+x.Owner.String(), "offers by this engine already")
	}
	e.exports[x.Owner] = ex
	return newOffer(e.advertise, e.o.TLS), func() {
		e.mu.Lock()
		if e.exports[x.Owner] == ex {
			delete(e.exports, x.Owner)
		}
		e.mu.Unlock()
		ex.withdraw()
	}, nil
}

// Open implements [transfer.Engine]. Kinds: fault.Invalid, fault.Unsupported (the other
// side has TLS and this one has not, or the reverse; another version), fault.NotFound
// (nobody is there, or has offered this), fault.Busy (ctx, or the handshake's time, ended
// first), fault.Full (it has all the readers that it lets in), fault.Device (the
// connection broke).
func (e *Engine) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	address, tls, err := decodeOffer(offer)
	switch {
	case err != nil:
		return nil, err
	case tls != e.o.TLS:
		return nil, fault.Wrap(fault.Unsupported, "owner at "+address, errMode(tls))
	}
	return transfer.Staged(t, func(t transfer.Target) (transfer.Source, error) { return e.open(ctx, t, d, address) })
}

// Close ends the engine: it lets nobody read any more. Calling it again does nothing.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	e.cancel()
	if e.listener != nil {
		_ = e.listener.Close() // again and again does no harm
	}
	for c := range e.visitors {
		_ = c.Close() // ends its goroutine
	}
	e.mu.Unlock()
	e.running.Wait()
	return nil
}

// accept takes connections of readers until the engine is closed.
func (e *Engine) accept() {
	for {
		c, err := e.listener.Accept()
		if err != nil {
			select {
			case <-e.ctx.Done():
				return
			case <-time.After(50 * time.Millisecond): // too many files are open, say
				continue
			}
		}
		if err := e.enter(c); err != nil {
			e.refuse(c, err)
			_ = c.Close()
			continue
		}
		e.running.Go(func() {
			v := &visitor{e: e, tcp: c}
			err := v.admit()
			if err == nil {
				e.stats.accepted.Add(1)
				err = v.serve()
			}
			v.leave()
			if turned := e.exit(v); turned != nil {
				err = turned
			}
			if !v.admitted { // else it is of consequence to its reader only
				e.refuse(c, err)
			}
		})
	}
}

// enter counts a connection in. Where there are too many that may be strangers', one of
// them makes room.
func (e *Engine) enter(c net.Conn) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fault.New(fault.Closed, "engine tcp", "closed before")
	}
	e.visitors[c] = struct{}{}
	if out := e.lobby.add(c); out != nil {
		_ = out.Close() // ends its goroutine
	}
	return nil
}

// admit makes v one of the readers. Kind: fault.Full.
func (e *Engine) admit(v *visitor) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.readers >= e.o.MaxConns {
		return fault.New(fault.Full, "connections", "all %d are in use", e.o.MaxConns).Hint("allow more: Options.MaxConns")
	}
	if !e.lobby.remove(v.tcp) {
		return errTurnedOut()
	}
	e.readers++
	v.admitted = true
	return nil
}

// exit ends the connection, and says so if it had to make room for another one.
func (e *Engine) exit(v *visitor) error {
	_ = v.tcp.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.visitors, v.tcp)
	switch {
	case v.admitted:
		e.readers--
	case !e.lobby.remove(v.tcp):
		return errTurnedOut()
	}
	return nil
}

// refuse counts a connection that was refused, and tells the logger unless it was told
// only just: whoever connects doesn't write our logs full.
func (e *Engine) refuse(c net.Conn, err error) {
	e.stats.refused.Add(1)
	e.mu.Lock()
	now := time.Now()
	told := now.Sub(e.warned) < time.Second || e.closed
	unsaid := e.unsaid
	if told {
		e.unsaid++
	} else {
		e.warned, e.unsaid = now, 0
	}
	e.mu.Unlock()
	if !told {
		e.o.Logger.Warn("a reader was refused",
			slog.String("peer", c.RemoteAddr().String()), slog.Any("error", err), slog.Int("others", unsaid))
	}
}

// speak makes c what both sides speak over, and proves the key. deadline is the caller's.
func (e *Engine) speak(ctx context.Context, c net.Conn, role byte) (net.Conn, error) {
	side := proveReader
	if role == rOwner {
		side = proveOwner
	}
	if e.secrets == nil {
		return c, side(c, e.o.Key, modePlain, nil)
	}
	t := tls.Client(c, e.secrets.reader)
	if role == rOwner {
		t = tls.Server(c, e.secrets.owner)
	}
	binding, err := secure(ctx, t)
	if err != nil {
		return nil, err
	}
	return t, side(t, e.o.Key, modeTLS, binding)
}
