package engines

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/hostipc"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// anyPort is where an owner's TCP listens when nothing is said: nobody on another host
// reaches it.
const anyPort = "127.0.0.1:0"

const keyRemedy = "kvferry transfer key FILE makes a key; give it to both sides with --key-file FILE"

// onHost says what an owner lacks whose engine shares host memory.
func onHost(_ *Options, side Side, x *accel.Opened) (what, remedy string) {
	if side == Owner && x != nil && x.Accelerator != nil {
		return "its pages are in memory of " + x.Device.Name(), "leave --device out, or choose another engine"
	}
	return "", ""
}

func openHostIPC(context.Context, *Options, Side, *accel.Opened) (transfer.Engine, error) {
	e, err := hostipc.New(hostipc.Options{})
	if err != nil {
		return nil, fault.Wrap(kindOf(err), "", err).Hint("set XDG_RUNTIME_DIR to a folder of your own, or choose other engines with --engine")
	}
	return e, nil
}

func noTCP(o *Options, side Side, x *accel.Opened) (what, remedy string) {
	if what, remedy = onHost(o, side, x); what != "" {
		return what, remedy
	}
	if o.KeyFile == "" {
		return "it needs a key that both sides have", keyRemedy
	}
	return "", ""
}

func openTCP(_ context.Context, o *Options, side Side, _ *accel.Opened) (transfer.Engine, error) {
	key, err := tcp.ReadKeyFile(o.KeyFile)
	if err != nil {
		return nil, withRemedy("--key-file", err, keyRemedy)
	}
	t := tcp.Options{Key: key, TLS: o.TLS, Logger: o.Logger}
	if side == Owner {
		t.Listen = o.Listen
		if t.Listen == "" {
			t.Listen = anyPort
		}
	}
	e, err := tcp.New(t)
	if err != nil {
		return nil, withRemedy("--listen "+o.Listen, err, "name an address of this host that is free, like 127.0.0.1:7700; port 0 is any")
	}
	return e, nil
}

// withRemedy says which flag err is about, and what to do unless err knows better.
func withRemedy(flag string, err error, remedy string) error {
	if hint := remedyOf(err); hint != "" {
		remedy = hint
	}
	return fault.Wrap(kindOf(err), strings.TrimSpace(flag), err).Hint("%s", remedy)
}

// remedyOf is the remedy that err knows. "" is one in words of programs: the name of a
// function or of an option helps nobody here.
func remedyOf(err error) string {
	hint := fault.RemedyOf(err)
	if strings.Contains(hint, "tcp.") || strings.Contains(hint, "Options.") {
		return ""
	}
	return hint
}

func kindOf(err error) fault.Kind {
	if kind := fault.KindOf(err); kind != 0 {
		return kind
	}
	return fault.Invalid
}

// reachedTCP says where TCP listens, and how it is protected.
func (s *Set) reachedTCP(e transfer.Engine) string {
	text := TCP
	if t, ok := e.(*tcp.Engine); ok {
		text += " on " + t.Addr()
	}
	if s.o.TLS {
		return text + " (key, TLS 1.3)"
	}
	return text + " (key, not encrypted)"
}

// NewKeyFile makes a key that both sides of TCP share. Kinds: fault.Exists,
// fault.NotFound, fault.Invalid.
func NewKeyFile(path string) error {
	err := tcp.NewKeyFile(path)
	if err == nil {
		return nil
	}
	remedy := "name a file in a folder that you can write to"
	if fault.KindOf(err) == fault.Exists {
		remedy = "use the key that is there, or name another file: a key is never overwritten"
	}
	return fault.Wrap(kindOf(err), "", err).Hint("%s", remedy)
}

const libraryRemedy = "give --mooncake-library the files of Mooncake's library that can be opened here, those that it needs first; kvferry doctor --mooncake-library says what is in the way"

const mooncakeWarning = "whoever reaches Mooncake's ports can read what is served: it asks nobody who they are"

func noMooncake(o *Options, side Side, x *accel.Opened) (what, remedy string) {
	if what, remedy = onHost(o, side, x); what != "" {
		return what, remedy
	}
	if len(o.Mooncake) == 0 {
		return "its library was not named", "give --mooncake-library FILE, Mooncake's libtransfer_engine.so, behind what it needs"
	}
	return "", ""
}

func openMooncake(_ context.Context, o *Options, side Side, _ *accel.Opened) (transfer.Engine, error) {
	for _, file := range o.Mooncake {
		if _, err := os.Stat(file); err != nil && strings.Contains(file, "/") { // others the dynamic linker looks for
			return nil, fault.Wrap(fault.NotFound, "--mooncake-library", err).Hint("%s", libraryRemedy)
		}
	}
	m := mooncake.Options{Libraries: o.Mooncake, InProcess: o.InProcess}
	if side == Owner {
		m.Listen = o.mooncakeListen()
	}
	e, err := mooncake.New(m)
	if err != nil {
		return nil, withRemedy("", err, "kvferry doctor --mooncake-library says what is in the way")
	}
	return e, nil
}

// mooncakeListen is where an owner's Mooncake listens.
func (o *Options) mooncakeListen() string {
	if o.MooncakeListen == "" {
		return "127.0.0.1"
	}
	return o.MooncakeListen
}

// deviceIPC is the engine for memory of one vendor's devices.
func deviceIPC(name, vendor string) entry {
	return entry{
		name: name,
		missing: func(_ *Options, _ Side, x *accel.Opened) (what, remedy string) {
			if x == nil || x.Accelerator == nil || !strings.HasPrefix(x.Device.Name(), vendor) {
				return "its pages are on no device of " + vendor, "give --device " + vendor + ":0 to both sides"
			}
			return "", ""
		},
		open: func(_ context.Context, _ *Options, _ Side, x *accel.Opened) (transfer.Engine, error) {
			return cudaipc.New(x.Accelerator, cudaipc.Options{})
		},
	}
}

// loopback reports whether an address is one of this host alone.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	a, err := netip.ParseAddr(host)
	return host == "" || host == "localhost" || err == nil && a.IsLoopback()
}
