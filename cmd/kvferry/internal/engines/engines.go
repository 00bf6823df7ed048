// Package engines makes the engines of package transfer that a verb is to use, by the
// names that the user gives them. It is the one table of them that the command has.
//
// Nobody has to name an engine: those are taken that the other flags allow. An engine that
// opens a port of the network is only taken when a flag of its own was given.
package engines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// The names of the engines, as descriptors have them.
const (
	HostIPC  = "hostipc"
	TCP      = "tcp"
	Mooncake = "mooncake"
	CUDAIPC  = "cudaipc"
	HIPIPC   = "hipipc"
)

// Side is what a process is to others.
type Side uint8

// The sides. An owner lets others read, and a reader reads.
const (
	Owner Side = iota
	Reader
)

// Options are the choices of the user. The zero value takes the engines that need none.
type Options struct {
	Names []string // in the owner's order of preference; none = all that the others allow

	KeyFile string // of TCP
	Listen  string // where an owner's TCP listens; "" = any port of 127.0.0.1
	TLS     bool

	Mooncake       []string // files of its library, those that it needs first
	MooncakeListen string   // the address of this host that it uses; "" = 127.0.0.1
	InProcess      bool     // Mooncake in this process, and not in a child

	// Logger is told of readers that TCP refused: see tcp.Options. Nil: nobody.
	Logger *slog.Logger `json:"-"`
}

// entry is one engine.
type entry struct {
	name string
	// missing says what o lacks for the engine, and what to do about it; both are ""
	// when it can be had.
	missing func(o *Options, side Side, x *accel.Opened) (what, remedy string)
	open    func(ctx context.Context, o *Options, side Side, x *accel.Opened) (transfer.Engine, error)
}

// table are the engines that there are, those first that are to be preferred.
func table() []entry {
	return []entry{
		deviceIPC(CUDAIPC, accel.CUDA),
		deviceIPC(HIPIPC, accel.HIP),
		{HostIPC, onHost, openHostIPC},
		{Mooncake, noMooncake, openMooncake},
		{TCP, noTCP, openTCP},
	}
}

// Names returns the names of all engines.
func Names() (names []string) {
	for _, e := range table() {
		names = append(names, e.name)
	}
	return names
}

// Set are the engines of one side.
type Set struct {
	Engines  []transfer.Engine // in the order of preference
	Warnings []string          // what their user should know
	o        Options
}

// Open makes the engines for pages on x. Kinds: fault.Invalid (a name, a flag that goes
// with none), fault.Unsupported (an engine that can't be had), and the engines'.
func Open(ctx context.Context, o Options, side Side, x *accel.Opened) (_ *Set, err error) {
	chosen, err := choose(&o, side, x)
	if err != nil {
		return nil, err
	}
	s := &Set{o: o}
	for _, e := range chosen {
		made, err := e.open(ctx, &o, side, x)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("engine %s: %w", e.name, err), s.Close())
		}
		s.Engines = append(s.Engines, made)
		if e.name == Mooncake {
			s.Warnings = append(s.Warnings, mooncakeWarning)
		}
	}
	return s, nil
}

// choose returns the engines that o names, or allows.
func choose(o *Options, side Side, x *accel.Opened) (chosen []entry, err error) {
	all := table()
	if len(o.Names) == 0 {
		var why []string
		for _, e := range all {
			if what, _ := e.missing(o, side, x); what != "" {
				why = append(why, e.name+": "+what)
				continue
			}
			chosen = append(chosen, e)
		}
		if err := o.check(chosen); err != nil || len(chosen) > 0 {
			return chosen, err
		}
		return nil, fault.New(fault.Unsupported, "engines", "there is none for pages on %s (%s)", x.Device.Name(), strings.Join(why, "; ")).
			Hint("kvferry doctor says what is in the way")
	}
	for i, name := range o.Names {
		at := slices.IndexFunc(all, func(e entry) bool { return e.name == name })
		if at < 0 {
			return nil, fault.New(fault.Invalid, "--engine", "no such choice: %q", name).Hint("there are %s", strings.Join(Names(), ", "))
		}
		if slices.Contains(o.Names[:i], name) {
			return nil, fault.New(fault.Invalid, "--engine", "%s is named twice", name).Hint("name it once")
		}
		if what, remedy := all[at].missing(o, side, x); what != "" {
			return nil, fault.New(fault.Invalid, "--engine "+name, "%s", what).Hint("%s", remedy)
		}
		chosen = append(chosen, all[at])
	}
	return chosen, o.check(chosen)
}

// check refuses flags of engines that are not used: they would have no effect.
func (o *Options) check(chosen []entry) error {
	for _, f := range []struct {
		flag, engine string
		given        bool
	}{
		{"--listen", TCP, o.Listen != ""},
		{"--tls", TCP, o.TLS},
		{"--key-file", TCP, o.KeyFile != ""},
		{"--mooncake-listen", Mooncake, o.MooncakeListen != ""},
		{"--mooncake-library", Mooncake, len(o.Mooncake) > 0},
	} {
		if !f.given || slices.ContainsFunc(chosen, func(e entry) bool { return e.name == f.engine }) {
			continue
		}
		err := fault.New(fault.Invalid, f.flag, "has no effect without %s", f.engine)
		if len(o.Names) > 0 {
			return err.Hint("add %s to --engine, or drop %s", f.engine, f.flag)
		}
		if f.engine == TCP {
			return err.Hint("TCP needs a key: kvferry transfer key FILE makes one, for --key-file on both sides")
		}
		return err.Hint("give --mooncake-library as well")
	}
	return nil
}

// Close closes the engines, after all that uses them.
func (s *Set) Close() error {
	var errs []error
	for _, e := range s.Engines {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// Names returns the names of the engines.
func (s *Set) Names() []string {
	names := []string{}
	for _, e := range s.Engines {
		names = append(names, e.Name())
	}
	return names
}

// Reached says of each engine where readers find it.
func (s *Set) Reached() []string {
	all := []string{}
	for _, e := range s.Engines {
		switch e.Name() {
		case TCP:
			all = append(all, s.reachedTCP(e))
		case Mooncake:
			all = append(all, Mooncake+" on "+s.o.mooncakeListen()+" (open to all who reach it)")
		default:
			all = append(all, e.Name()+" (this host)")
		}
	}
	return all
}

// Far returns the names of the engines by which readers on other hosts can read.
func (s *Set) Far() (names []string) {
	for _, e := range s.Engines {
		if e.Name() == TCP && !loopback(s.o.Listen) || e.Name() == Mooncake && !loopback(s.o.MooncakeListen) {
			names = append(names, e.Name())
		}
	}
	return names
}

// ReadFlags are the flags that a reader has to give for these engines of the set.
func (s *Set) ReadFlags(names []string, file func(string) string) (flags []string) {
	for _, name := range names {
		switch name {
		case TCP:
			flags = append(flags, "--key-file "+file(s.o.KeyFile))
			if s.o.TLS {
				flags = append(flags, "--tls")
			}
		case Mooncake:
			flags = append(flags, "--mooncake-library "+file(strings.Join(s.o.Mooncake, ",")))
		}
	}
	return flags
}

// Missing says what a reader lacks for the engines of an owner.
func (s *Set) Missing(offered []string) string {
	var out []string
	for _, e := range table() {
		if !slices.Contains(offered, e.name) {
			continue
		}
		if _, remedy := e.missing(&s.o, Reader, nil); remedy != "" {
			out = append(out, remedy)
		} else if len(s.o.Names) > 0 && !slices.Contains(s.o.Names, e.name) {
			out = append(out, "add "+e.name+" to --engine, or leave that out")
		}
	}
	if len(out) == 0 {
		return "use one engine on both sides: --engine"
	}
	return strings.Join(out, "; or ")
}
