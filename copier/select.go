package copier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// portableName is the name of the copier that needs no engine.
const portableName = "portable"

// Order is which copier is tried first.
type Order uint8

// The orders.
const (
	DriverFirst Order = iota // cuda, libcudart, libamdhip64, portable
	Seed                     // libcudart, cuda, libamdhip64, portable: as M* does
)

var orders = [...][]string{
	DriverFirst: {"cuda", "libcudart", "libamdhip64"},
	Seed:        {"libcudart", "cuda", "libamdhip64"},
}

// SelectOptions are the choices of [Select]. The zero value is a good one.
type SelectOptions struct {
	Order Order
	// Force names the one copier to use: it passes the self-test, or there is none.
	Force string
	// NoBatches keeps batches out of use.
	NoBatches bool
	// BatchOps is the most copies of one batch; 0 means DefaultBatchOps.
	BatchOps int
	// Calibrate measures the crossovers of the chosen copier, which takes a second.
	Calibrate *CalibrateOptions
	// Host is where the self-test gets host memory from. Nil means a device of its own.
	Host *device.Host
	// Logger gets what was chosen, and what was not and why. Nil is silent.
	Logger *slog.Logger
}

// Selection is the copier of a device, and how it came to be.
type Selection struct {
	Copier Copier
	Device string
	// Rejected are the copiers that would have been chosen before, in their order.
	Rejected []Rejected
	// Untried are those that would have come next.
	Untried []string
	// Limits are those of the copier's engine: none, for the portable one.
	Limits device.EngineLimits
	// BatchOps is the most copies of one batch, 0 when there are none: NoBatches says why.
	BatchOps  int
	NoBatches error
	// Crossovers say what is copied how; Uncalibrated why they are not measured, nil
	// when nobody asked.
	Crossovers   Crossovers
	Uncalibrated error
	// Pageable says why host memory could not be pinned for the self-test, nil if it was:
	// copies to and from the host will block, and be slow.
	Pageable error
}

// Rejected is a copier that was not chosen.
type Rejected struct {
	Name   string
	Reason error
}

// Select chooses the copier of dev: of an accelerator, the first that passes the
// self-test on it, [SelfTest]; the portable one of any other device. The batches of its
// engine are used if they pass a self-test of their own. The caller keeps the selection,
// and shows it. What the device remembers is whether the batches of its first engine have
// passed: streams copy without them otherwise ([device.Accelerator.UseBatches]).
//
// Kinds: fault.Invalid (options), fault.Unsupported (the forced copier is not there),
// fault.Device (it failed, as all did, or the device was lost), ctx's error.
func Select(ctx context.Context, dev device.Device, o SelectOptions) (*Selection, error) {
	if o.Order > Seed || o.BatchOps < 0 {
		return nil, fault.New(fault.Invalid, "choice of copiers", "order %d of %d, batches of %d", o.Order, len(orders), o.BatchOps)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	a, ok := dev.(*device.Accelerator)
	if !ok {
		if o.Force != "" && o.Force != portableName {
			return nil, fault.New(fault.Unsupported, "copier "+o.Force, "%s is no accelerator", dev.Name()).
				Hint("use the portable copier, or none by name")
		}
		return &Selection{Copier: NewPortable(), Device: dev.Name(), NoBatches: noEngine(), Crossovers: DefaultCrossovers()}, nil
	}
	if o.Host == nil {
		h, err := device.OpenHost(device.HostOptions{})
		if err != nil {
			return nil, err
		}
		o.Host = h // has nothing that must be closed but memory and streams
	}
	return (&chooser{on: a, o: o}).choose(ctx)
}

func noEngine() error { return fault.New(fault.Unsupported, "batches", "the portable copier has none") }

// chooser looks for the copier of one accelerator.
type chooser struct {
	on *device.Accelerator
	o  SelectOptions
}

// candidate is a copier that may be chosen: an engine, or why there is none; the
// portable one has neither.
type candidate struct {
	name    string
	engine  device.Engine
	missing error
}

// candidates are the copiers of the device, in the order in which they are tried.
func (c *chooser) candidates() []candidate {
	var all []candidate
	for _, e := range c.on.Engines() {
		all = append(all, candidate{name: e.Name(), engine: e})
	}
	if d, ok := c.on.Driver().(interface{ Missing() []device.MissingEngine }); ok {
		for _, m := range d.Missing() {
			all = append(all, candidate{name: m.Name, missing: m.Err})
		}
	}
	place := func(name string) int {
		if i := slices.Index(orders[c.o.Order], name); i >= 0 {
			return i
		}
		return len(orders[c.o.Order]) // as the driver has them
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return place(a.name) - place(b.name) })
	return append(all, candidate{name: portableName})
}

func (c *chooser) choose(ctx context.Context) (*Selection, error) {
	all := c.candidates()
	if c.o.Force != "" {
		i := slices.IndexFunc(all, func(x candidate) bool { return x.name == c.o.Force })
		if i < 0 {
			return nil, fault.New(fault.Unsupported, "copier "+c.o.Force, "%s has none of that name", c.on.Name()).
				Hint("it can have %s", strings.Join(names(all), ", "))
		}
		all = all[i : i+1]
	}
	var rejected []Rejected
	c.on.UseBatches(false) // until they have passed
	for i, x := range all {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		s, err := c.try(ctx, x)
		if err == nil {
			c.on.UseBatches(s.BatchOps > 0 && x.engine == c.on.Engines()[0])
			s.Rejected, s.Untried = rejected, names(all[i+1:])
			c.o.Logger.LogAttrs(ctx, slog.LevelInfo, "copier chosen", slog.String("device", s.Device), slog.Any("copier", s))
			return s, nil
		}
		c.o.Logger.LogAttrs(ctx, slog.LevelWarn, "copier rejected",
			slog.String("device", c.on.Name()), slog.String("copier", x.name), slog.Any("reason", err))
		rejected = append(rejected, Rejected{Name: x.name, Reason: err})
		if lost := c.on.Lost(); lost != nil {
			return nil, fmt.Errorf("copier %s: %w", x.name, errors.Join(err, lost))
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, c.none(rejected)
}

// none is the error of a device without a copier.
func (c *chooser) none(rejected []Rejected) error {
	if c.o.Force != "" {
		err := fault.Wrap(cmp.Or(fault.KindOf(rejected[0].Reason), fault.Device), "copier "+c.o.Force+" of "+c.on.Name(), rejected[0].Reason)
		if fault.RemedyOf(err) == "" {
			err = err.Hint("don't ask for it by name: another may pass its self-test")
		}
		return err
	}
	reasons := make([]error, len(rejected))
	for i, r := range rejected {
		reasons[i] = fmt.Errorf("%s: %w", r.Name, r.Reason)
	}
	return fault.Wrap(fault.Device, "copiers of "+c.on.Name(), errors.Join(reasons...)).
		Hint("run kvferry doctor: no way of copying gives the bytes that it should")
}

// try puts x to the test.
func (c *chooser) try(ctx context.Context, x candidate) (s *Selection, err error) {
	if x.missing != nil {
		return nil, x.missing
	}
	t, err := newTrial(c.on, c.o.Host)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	s = &Selection{Device: c.on.Name(), Crossovers: DefaultCrossovers(), Pageable: t.pageable}
	if x.engine == nil {
		s.Copier, s.NoBatches = NewPortable(), noEngine()
		return s, t.pass(ctx, s.Copier)
	}
	s.Limits = x.engine.Limits()
	for _, way := range [...]Way{InRectangles, OneByOne} {
		if way == InRectangles && s.Limits.MaxPitch == 0 {
			continue // has only the other
		}
		if err := t.passWay(ctx, x.engine, way, 0); err != nil {
			return nil, err
		}
	}
	chosen := AcceleratedOptions{BatchOps: c.o.BatchOps}
	if s.NoBatches = c.batches(ctx, t, x.engine); s.NoBatches != nil {
		if ctx.Err() != nil || c.on.Lost() != nil {
			return nil, s.NoBatches
		}
		chosen.NoBatches = true
		c.o.Logger.LogAttrs(ctx, slog.LevelInfo, "batches not used",
			slog.String("device", s.Device), slog.String("copier", x.name), slog.Any("reason", s.NoBatches))
	}
	if c.o.Calibrate != nil {
		measured, err := Calibrate(ctx, c.on, x.engine, c.o.Host, chosen, *c.o.Calibrate)
		switch {
		case ctx.Err() != nil || c.on.Lost() != nil:
			return nil, err
		case err != nil:
			s.Uncalibrated = err
		default:
			s.Crossovers = measured
		}
	}
	chosen.Crossovers = &s.Crossovers
	made := NewAccelerated(c.on, x.engine, chosen)
	s.Copier, s.BatchOps = made, made.most
	return s, nil
}

// batches says why the engine's batches must not be used, nil if they may.
func (c *chooser) batches(ctx context.Context, t *trial, e device.Engine) error {
	switch l := e.Limits(); {
	case c.o.NoBatches:
		return fault.New(fault.Unsupported, "batches", "turned off")
	case l.Batch == 0:
		return fault.New(fault.Unsupported, "batches", "%s", l.NoBatch)
	}
	for _, most := range [...]int{5, c.o.BatchOps} { // several batches a copy, and one
		if err := t.passWay(ctx, e, InBatches, most); err != nil {
			return err
		}
	}
	return nil
}

// passWay tests one way of an engine.
func (t *trial) passWay(ctx context.Context, e device.Engine, w Way, batchOps int) error {
	ways := every(w)
	err := t.pass(ctx, NewAccelerated(t.on, e, AcceleratedOptions{Crossovers: &ways, BatchOps: batchOps, NoBatches: w != InBatches}))
	if err != nil {
		return fmt.Errorf("%v: %w", w, err)
	}
	return nil
}

func names(all []candidate) []string {
	out := make([]string, len(all))
	for i, x := range all {
		out[i] = x.name
	}
	return out
}

// String says in a line what was chosen, and why not something else.
func (s *Selection) String() string {
	b := new(strings.Builder)
	b.WriteString(s.Copier.Name())
	if s.Limits.Library != "" {
		fmt.Fprintf(b, " (%s %s)", s.Limits.Library, s.Limits.Version)
	}
	if s.BatchOps > 0 {
		fmt.Fprintf(b, ", batches of up to %d", s.BatchOps)
	} else if s.NoBatches != nil {
		fmt.Fprintf(b, ", no batches: %s", strings.TrimPrefix(s.NoBatches.Error(), "batches: "))
	}
	if n, of := s.Crossovers.Measured(); n > 0 {
		fmt.Fprintf(b, ", %d of %d crossovers measured", n, of)
	}
	if s.Uncalibrated != nil {
		fmt.Fprintf(b, ", crossovers not measured: %v", s.Uncalibrated)
	}
	if s.Pageable != nil {
		fmt.Fprintf(b, ", host memory not pinned: %v", s.Pageable)
	}
	for _, r := range s.Rejected {
		fmt.Fprintf(b, "; not %s: %v", r.Name, r.Reason)
	}
	return b.String()
}

// LogValue is String for logs.
func (s *Selection) LogValue() slog.Value { return slog.StringValue(s.String()) }
