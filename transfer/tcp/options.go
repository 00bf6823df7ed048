package tcp

import (
	"log/slog"
	"net"
	"runtime"
	"slices"
	"time"

	"github.com/kvferry/kvferry/fault"
)

const (
	// MinKeyBytes is the least length of a key.
	MinKeyBytes = 32
	maxKeyBytes = 1024

	defaultStreams   = 4
	maxStreams       = 64
	defaultMaxConns  = 1024
	maxMaxConns      = 1 << 16
	defaultHandshake = 5 * time.Second
	defaultStall     = 30 * time.Second

	// maxWaiting is how many connections there may be at a time that have not opened an
	// owner yet: any of them may be a stranger's.
	maxWaiting = 64
)

// Options are the choices of an engine.
type Options struct {
	// Key is the secret that both sides share: at least MinKeyBytes random bytes, as
	// NewKeyFile makes them and ReadKeyFile returns them. Required.
	Key []byte

	// Listen is where this side lets others read: "127.0.0.1:0", "[fd00::7]:7000",
	// "node7.example:7000". Port 0 is one that is free. Addresses that stand for all
	// of the host's are refused. Empty: this side lets nobody read.
	Listen string
	// Advertise is the address by which readers come, where that isn't the listener's:
	// behind a proxy, or a translation of addresses.
	Advertise string

	// TLS has all connections encrypted, and checked against change on their way. Both
	// sides must have it, or neither. It costs half of the rate, or more: see the benchmark.
	TLS bool

	// Streams is how many connections one large read is spread over, at most 64. 0
	// means as many as there are processors, and at most 4: each keeps one busy on
	// either side.
	Streams int
	// Unchecked has this side read without the sums of segments. TCP's own checksum
	// misses one broken packet in 65,536, and what breaks outside of packets.
	Unchecked bool

	// MaxConns is how many connections readers may hold to this side, at most 65,536.
	// 0 means 1,024. Beside them there are 64 that may be strangers'.
	MaxConns int
	// Handshake is how long it may take to connect, to prove the key and to open an
	// owner; 0 means 5 s.
	Handshake time.Duration
	// Stall is how long one segment may take to be sent to a reader that doesn't take
	// it, before its connection is closed; 0 means 30 s.
	Stall time.Duration

	// Logger is told about readers that were refused, at most once a second. Nil: nobody.
	Logger *slog.Logger
}

// check fills in what was left out.
func (o *Options) check() error {
	switch {
	case len(o.Key) == 0:
		return fault.New(fault.Invalid, "key", "there is none").Hint("make one with tcp.NewKeyFile, and give it to both sides")
	case len(o.Key) < MinKeyBytes || len(o.Key) > maxKeyBytes:
		return fault.New(fault.Invalid, "key", "%d bytes: want %d to %d", len(o.Key), MinKeyBytes, maxKeyBytes).
			Hint("make one with tcp.NewKeyFile")
	case o.Listen == "" && o.Advertise != "":
		return fault.New(fault.Invalid, "Advertise", "%q, and this side doesn't listen", o.Advertise).Hint("set Listen")
	}
	for _, f := range []struct {
		name     string
		is, most int
	}{{"Streams", o.Streams, maxStreams}, {"MaxConns", o.MaxConns, maxMaxConns}} {
		if f.is < 0 || f.is > f.most {
			return fault.New(fault.Invalid, f.name, "%d is not in 0 … %d", f.is, f.most)
		}
	}
	for _, f := range []struct {
		name string
		is   time.Duration
	}{{"Handshake", o.Handshake}, {"Stall", o.Stall}} {
		if f.is < 0 {
			return fault.New(fault.Invalid, f.name, "%v is negative", f.is)
		}
	}
	if o.Advertise != "" {
		if err := checkPeer(o.Advertise); err != nil {
			return fault.Wrap(fault.Invalid, "Advertise", err)
		}
	}
	o.Key = slices.Clone(o.Key)
	if o.Streams == 0 {
		o.Streams = min(defaultStreams, runtime.GOMAXPROCS(0))
	}
	if o.MaxConns == 0 {
		o.MaxConns = defaultMaxConns
	}
	if o.Handshake == 0 {
		o.Handshake = defaultHandshake
	}
	if o.Stall == 0 {
		o.Stall = defaultStall
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// keepAlive finds hosts that have gone without a word: within about half a minute.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 4}
}
