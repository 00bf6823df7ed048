package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/local"
)

// readMiB is what one read moves, where the pools are as large. Of reads that are no
// slower than a copy in memory a run takes so many: one alone is over too soon to be timed
// beside what else the machine does.
const (
	readMiB   = 64
	memoryRun = 4
)

// TransferMiB is how large the pools are by default: enough that no cache holds them.
const TransferMiB = 128

// variant is a way to read that is measured: an engine, and how it is set up.
type variant struct {
	name   string // of its section
	engine engines.Options
}

// The names of variants that others are held against.
const (
	tlsVariant       = "tcp with TLS"
	childVariant     = "mooncake in a child process"
	inProcessVariant = "mooncake in this process"
)

// Transfer measures how fast pages of another process are read, by every engine that
// works here, beside the ceilings C and R and a raw TCP stream.
//
// Kinds: fault.Invalid, fault.Unsupported (an engine that was asked for and does not work
// here), fault.Memory, fault.Corrupt; or ctx's error.
func Transfer(ctx context.Context, o Options) (*Report, error) {
	if o.Clock == CPU {
		return nil, fault.New(fault.Invalid, "--clock", "%s counts the time of one process, and a transfer has two", CPU).Hint("use --clock %s", Wall)
	}
	o.Clock = Wall
	o, err := o.check()
	if err != nil {
		return nil, err
	}
	r := newReport("transfer", o)
	r.legend = fmt.Sprintf("C: Go's copy of %s pieces in the same kind of memory.\n", size(min(ceiling.PieceBytes, o.readBytes()))) +
		"R: the better of two bare loops over the same rows in one process, by Go's copy and by the device's, with the same checks.\n" +
		"With one thread, local and hostipc are timed by the CPU time of this process, as are C and R beside them; the others by the wall.\n" +
		"raw: a TCP stream of as many bytes with a checksum a MiB, which knows no pages.\n" +
		"A read is checked by its epoch, by a checksum a segment where it comes by TCP, and with page sums by a checksum a page too."
	err = o.measured(r, func() error {
		keys, err := makeKey()
		if err != nil {
			return err
		}
		owner, err := startOwner(ctx, o)
		if err == nil {
			b := &transferBench{o: o, r: r, owner: owner}
			err = errors.Join(b.all(ctx, keys.path), owner.close())
		}
		return errors.Join(err, keys.close())
	})
	r.leaveUnjudged(o)
	return r, err
}

// leaveUnjudged has no goal met or missed by fewer runs, or smaller pools, than it takes.
func (r *Report) leaveUnjudged(o Options) {
	switch {
	case o.Runs < defaultRuns:
		r.Unjudged = fmt.Sprintf("that takes %d runs, and these are %d", defaultRuns, o.Runs)
	case o.MiB < TransferMiB:
		r.Unjudged = fmt.Sprintf("that takes pools of %d MiB, and these have %d", TransferMiB, o.MiB)
	default:
		return
	}
	for _, s := range r.Sections {
		for _, l := range s.Lines {
			for i := range l.Goals {
				l.Goals[i].Met = nil
			}
		}
	}
}

func (o Options) readBytes() int64 { return min(readMiB, int64(o.MiB)) << 20 }

// transferBench measures reads from one owner.
type transferBench struct {
	o        Options
	r        *Report
	owner    *ownerProcess
	variants []variant
	sections map[string]*Section
}

// all measures all that there is.
func (b *transferBench) all(ctx context.Context, key string) error {
	if err := b.choose(key); err != nil {
		return err
	}
	b.sections = map[string]*Section{}
	for _, s := range b.shapes() {
		if err := b.measure(ctx, s); err != nil {
			return fmt.Errorf("pages of %s: %w", size(s.PageBytes), err)
		}
	}
	for _, name := range b.names() {
		if s := b.sections[name]; s != nil {
			b.r.Sections = append(b.r.Sections, *s)
		}
	}
	for _, f := range []func(context.Context) (Section, error){b.setUp, b.planning} {
		section, err := f(ctx)
		if err != nil {
			return err
		}
		if len(section.Lines) > 0 {
			b.r.Sections = append(b.r.Sections, section)
		}
	}
	b.r.Settings = append(b.r.Settings,
		Setting{"pools", fmt.Sprintf("%d MiB on each side, the owner in another process", b.o.MiB)},
		Setting{"reads", fmt.Sprintf("about %s each; pages of one row, any order, or runs of %d", size(b.o.readBytes()), transferRun)},
	)
	return nil
}

// inProcess is the section of the engine for two caches in one process.
const inProcess = "local"

// names are the sections of engines, in their order.
func (b *transferBench) names() []string {
	names := []string{inProcess}
	for _, v := range b.variants {
		names = append(names, v.name)
	}
	return names
}

// choose lists the variants that were asked for, or that need nothing that is missing.
func (b *transferBench) choose(key string) error {
	tcp := engines.Options{Names: []string{engines.TCP}, KeyFile: key}
	secure := tcp
	secure.TLS = true
	mooncake := engines.Options{Names: []string{engines.Mooncake}, Mooncake: b.o.Engines.Mooncake, MooncakeListen: b.o.Engines.MooncakeListen}
	inside := mooncake
	inside.InProcess = true
	all := []variant{{engines.HostIPC, engines.Options{Names: []string{engines.HostIPC}}}, {engines.TCP, tcp}, {tlsVariant, secure}}
	if len(b.o.Engines.Mooncake) > 0 {
		all = append(all, variant{childVariant, mooncake}, variant{inProcessVariant, inside})
	}
	for _, name := range b.o.Engines.Names {
		if !slices.ContainsFunc(all, func(v variant) bool { return v.engine.Names[0] == name }) {
			if name == engines.Mooncake {
				return fault.New(fault.Invalid, "--engine "+name, "its library is not given").Hint("give --mooncake-library")
			}
			return fault.New(fault.Invalid, "--engine", "no such choice: %q", name).
				Hint("there are %s, %s, %s", engines.HostIPC, engines.TCP, engines.Mooncake)
		}
	}
	for _, v := range all {
		if len(b.o.Engines.Names) == 0 || slices.Contains(b.o.Engines.Names, v.engine.Names[0]) {
			b.variants = append(b.variants, v)
		}
	}
	return nil
}

// shapes are what is measured: page sizes of which the pools hold a few, in any order and
// in runs.
func (b *transferBench) shapes() (all []transferShape) {
	pool := int64(b.o.MiB) << 20
	for _, bytes := range []int64{4 << 10, 64 << 10, 512 << 10, 4 << 20} {
		n := int(pool / bytes)
		if n < 2 {
			continue
		}
		reads := int(max(1, min(pool/b.o.readBytes(), 64, int64(n))))
		run := max(1, min(transferRun, n/reads))
		for _, run := range slices.Compact([]int{1, run}) {
			all = append(all, transferShape{PageBytes: bytes, Pages: n / run * run, Run: run, Reads: reads, Seed: b.o.Seed})
		}
	}
	return all
}

// transferSide is this process's side of one shape: what is read into, and a source in the
// same process that holds the same bytes.
type transferSide struct {
	shape         transferShape
	opened        *accel.Opened
	cache, source *kv.Cache
	stream        device.Stream
	route         *kv.Route
	local, remote [][]page.ID
	parts         []*transferReader
	raw           *rawReader
}

// transferReader is a variant that is read by.
type transferReader struct {
	name          string
	set           *engines.Set // nil when the engine is in the side's own process
	engine        transfer.Engine
	publisher     *transfer.Publisher
	reader        *transfer.Reader
	plain, summed *transfer.Descriptor
}

func (x *transferSide) close() error {
	var errs []error
	if x.raw != nil {
		errs = append(errs, x.raw.close())
	}
	for _, p := range x.parts {
		errs = append(errs, p.reader.Close())
		if p.publisher != nil {
			errs = append(errs, p.publisher.Close())
		}
		if p.set != nil {
			errs = append(errs, p.set.Close())
		}
	}
	if x.stream != nil {
		errs = append(errs, x.stream.Close())
	}
	for _, c := range []*kv.Cache{x.cache, x.source} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if x.opened != nil {
		errs = append(errs, x.opened.Close())
	}
	return errors.Join(errs...)
}

// open asks the owner for a shape, and opens this side. Variants that don't work are left
// out, with a warning, unless they were asked for.
func (b *transferBench) open(ctx context.Context, s transferShape) (x *transferSide, err error) {
	x = &transferSide{shape: s}
	defer func() {
		if err != nil {
			err, x = errors.Join(err, x.close()), nil
		}
	}()
	g, err := s.geometry()
	if err != nil {
		return x, err
	}
	q := ownerRequest{transferShape: s}
	for _, v := range b.variants {
		q.Engines = append(q.Engines, ownerEngines{v.name, v.engine})
	}
	if x.opened, err = accel.Open(ctx, "", accel.Options{Workers: b.o.Threads}); err != nil {
		return x, err
	}
	if x.cache, err = touchedOn(x.opened.Host, g, s.Seed+1); err != nil {
		return x, err
	}
	if x.source, err = touchedOn(x.opened.Host, g, s.Seed); err != nil { // what the owner has
		return x, err
	}
	// The owner's pages come last, as the source does: memory of either side of what is
	// written is not equally fast.
	a, err := b.owner.ask(ctx, q)
	if err != nil {
		return x, err
	}
	if x.stream, err = x.opened.Device.NewStream("rows"); err != nil {
		return x, err
	}
	if x.route, err = kv.NewRoute(x.cache, x.source); err != nil {
		return x, err
	}
	x.local, x.remote = s.orders()
	if err := x.addLocal(); err != nil {
		return x, err
	}
	for i, v := range b.variants {
		if err := b.add(ctx, x, v, a.Published[i]); err != nil {
			return x, err
		}
	}
	x.raw, err = dialRaw(ctx, a.Raw, x.cache, s)
	return x, err
}

// addLocal adds the engine for two caches in one process.
func (x *transferSide) addLocal() (err error) {
	e := local.New()
	p := &transferReader{name: inProcess, engine: e}
	p.publisher, err = transfer.NewPublisher(transfer.PublisherOptions{Cache: x.source, Host: x.opened.Host, Engines: []transfer.Engine{e}, Holder: nobody{}})
	if err != nil {
		return err
	}
	if p.reader, err = x.newReader(e); err != nil {
		return errors.Join(err, p.publisher.Close())
	}
	x.parts = append(x.parts, p)
	ids := make([]page.ID, x.shape.Pages)
	for i := range ids {
		ids[i] = page.ID(i)
	}
	sums, err := transfer.AppendSums(nil, x.source, ids)
	if err != nil {
		return err
	}
	if p.plain, err = p.publisher.Publish(transfer.Lease{Pages: ids, TTL: leaseFor}); err != nil {
		return err
	}
	p.summed, err = p.publisher.Publish(transfer.Lease{Pages: ids, Sums: sums, TTL: leaseFor})
	return err
}

// nobody holds pages of a cache that nobody frees.
type nobody struct{}

func (nobody) Hold([]page.ID) error    { return nil }
func (nobody) Release([]page.ID) error { return nil }

func (x *transferSide) newReader(e transfer.Engine) (*transfer.Reader, error) {
	return transfer.NewReader(transfer.Options{
		Cache: x.cache, Device: x.opened.Device, Copier: x.opened.Copier, Host: x.opened.Host, Engines: []transfer.Engine{e},
	})
}

// add adds a variant that the owner has published by.
func (b *transferBench) add(ctx context.Context, x *transferSide, v variant, from ownerPublished) (err error) {
	left := func(err error) error {
		if len(b.o.Engines.Names) > 0 && ctx.Err() == nil {
			return fault.Wrap(fault.Unsupported, v.name, err)
		}
		b.warn(fmt.Sprintf("%s was not measured: %v", v.name, err))
		return ctx.Err()
	}
	if from.Error != "" {
		return left(errors.New(from.Error))
	}
	p := &transferReader{name: v.name}
	if p.set, err = engines.Open(ctx, v.engine, engines.Reader, x.opened); err != nil {
		return left(err)
	}
	p.engine = p.set.Engines[0]
	if p.plain, err = transfer.Decode(from.Plain); err == nil {
		p.summed, err = transfer.Decode(from.Summed)
	}
	if err == nil {
		p.reader, err = x.newReader(p.engine)
	}
	if err != nil {
		return errors.Join(err, p.set.Close())
	}
	if err := p.read(ctx, x, 0, p.plain); err != nil { // whether it works at all
		if err := errors.Join(p.reader.Close(), p.set.Close()); err != nil {
			return err
		}
		return left(err)
	}
	x.parts = append(x.parts, p)
	return nil
}

func (b *transferBench) warn(text string) {
	if !slices.Contains(b.r.Warnings, text) {
		b.r.Warnings = append(b.r.Warnings, text)
	}
}

// read reads one of the reads of a shape.
func (p *transferReader) read(ctx context.Context, x *transferSide, i int, d *transfer.Descriptor) error {
	err := p.reader.Retrieve(ctx, 0, len(x.local[i])*transferTokens, x.local[i], x.remote[i], d)
	if err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	return nil
}

// turns makes a contestant of so many calls of f, which is given the reads one after the
// other. What the last call of the first turn has brought is compared with the source.
func (x *transferSide) turns(n int, compare bool, f func(i int) error) contestant {
	next := 0
	return contestant{
		run: func() error {
			for range n {
				if err := f(next % len(x.local)); err != nil {
					return err
				}
				next++
			}
			return nil
		},
		after: func() error {
			if !compare || next > n {
				return nil
			}
			return x.compare((next - 1) % len(x.local))
		},
	}
}

// compare compares the pages of a read with the source. Kind: fault.Corrupt.
func (x *transferSide) compare(i int) error {
	for k, id := range x.local[i] {
		got, err := x.cache.Page(id)
		if err != nil {
			return err
		}
		want, err := x.source.Page(x.remote[i][k])
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fault.New(fault.Corrupt, fmt.Sprintf("page %d", x.remote[i][k]), "arrived with other bytes than it has").
				Hint("report it: a read that says it went well brought wrong bytes")
		}
	}
	return nil
}

// measure measures one shape by all variants, in turns: what copies from memory, by the
// time of this process if it has one thread, and what comes by sockets.
func (b *transferBench) measure(ctx context.Context, s transferShape) (err error) {
	x, err := b.open(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.close()) }()
	var memory, socket []*transferReader
	for _, p := range x.parts {
		if p.name == inProcess || p.name == engines.HostIPC {
			memory = append(memory, p)
		} else {
			socket = append(socket, p)
		}
	}
	own := b.o
	if own.Threads == 1 {
		own.Clock = CPU // other load counts little
	}
	if err := b.group(ctx, own, x, memory, memoryRun, nil); err != nil || len(socket) == 0 {
		return err
	}
	return b.group(ctx, b.o, x, socket, 1, x.raw)
}

// group measures some variants beside the ceilings, in runs of so many reads. raw is nil
// when they have nothing to do with it.
func (b *transferBench) group(ctx context.Context, o Options, x *transferSide, parts []*transferReader, reads int, raw *rawReader) error {
	loops, err := x.loops(ctx, o)
	if err != nil {
		return err
	}
	var contestants []contestant
	for _, f := range loops {
		contestants = append(contestants, x.turns(reads, true, f))
	}
	piece := x.pieces()
	contestants = append(contestants, x.turns(reads, false, func(i int) error { ceiling.Copy(piece[i%len(piece)]); return nil }))
	for _, p := range parts {
		for _, d := range []*transfer.Descriptor{p.plain, p.summed} {
			contestants = append(contestants, x.turns(reads, true, func(i int) error { return p.read(ctx, x, i, d) }))
		}
	}
	if raw != nil {
		contestants = append(contestants, x.turns(reads, false, raw.read))
	}
	seconds, err := o.interleave(ctx, contestants)
	if err != nil {
		return err
	}
	t := seconds[0]
	for i := range t {
		t[i] = each(t[i], func(s float64) float64 { return s / float64(reads) })
	}
	m := &transferTimes{
		clock: o.Clock, shape: x.shape, bytes: int64(len(x.local[0])) * x.shape.PageBytes, r: better(t[0], t[1]), summed: better(t[2], t[3]),
		c: t[4], pieceBytes: ceiling.Bytes(piece[0]), raw: t[len(t)-1], ours: map[string][2][]float64{},
	}
	for i, p := range parts {
		m.ours[p.name] = [2][]float64{t[5+2*i], t[6+2*i]}
	}
	for _, p := range parts {
		if b.sections[p.name] == nil {
			b.sections[p.name] = &Section{Title: sectionTitle(p.name), Unit: "GB/s"}
		}
		b.sections[p.name].Lines = append(b.sections[p.name].Lines, m.lines(p.name)...)
	}
	return nil
}

// better is the one of two loops that is faster in the median. Its runs are then those of
// one loop: the better of two in each run would be lucky twice.
func better(a, b []float64) []float64 {
	if statOf(b).Median < statOf(a).Median {
		return b
	}
	return a
}

// loops are the bare loops over the rows of a read: by Go's copy and by the device's
// without checks, and then with a checksum of each page, which Go's takes while the page
// is in the processor's cache.
func (x *transferSide) loops(ctx context.Context, o Options) ([]func(i int) error, error) {
	var rows [][]ceiling.Row
	var ops [][]device.Op
	for i := range x.local {
		var pairs []page.Pair
		for k := range x.local[i] {
			pairs = append(pairs, page.Pair{Dst: x.local[i][k], Src: x.remote[i][k]})
		}
		list, err := ceiling.AppendPageOps(nil, x.route, pairs...)
		if err != nil {
			return nil, err
		}
		rows, ops = append(rows, ceiling.AppendOps(nil, list)), append(ops, list)
	}
	sums := new(atomic.Uint64) // or nobody would have to take them
	sum := func(rows []ceiling.Row) {
		var all uint64
		for _, r := range rows {
			all += xxh3.Hash128(r.Dst).Lo
		}
		sums.Add(all)
	}
	byDevice := func(i int) error { return errors.Join(x.stream.Copy(ops[i]), x.stream.Sync(ctx)) }
	return []func(int) error{
		func(i int) error {
			o.split(len(rows[i]), func(from, to int) { ceiling.Copy(rows[i][from:to]) })
			return nil
		},
		byDevice,
		func(i int) error {
			o.split(len(rows[i]), func(from, to int) {
				for k := from; k < to; k++ {
					ceiling.Copy(rows[i][k : k+1])
					sum(rows[i][k : k+1])
				}
			})
			return nil
		},
		func(i int) error {
			err := byDevice(i)
			o.split(len(rows[i]), func(from, to int) { sum(rows[i][from:to]) })
			return err
		},
	}, nil
}

// pieces are what C copies, in turns: from the source, which nothing may change.
func (x *transferSide) pieces() (all [][]ceiling.Row) {
	dst, errD := x.cache.Region(0)
	src, errS := x.source.Region(0)
	if errD != nil || errS != nil {
		return nil // never: both were made with one region
	}
	n := min(ceiling.PieceBytes, dst.Size()/int64(x.shape.Reads))
	for off := int64(0); off+n <= dst.Size(); off += n {
		all = append(all, []ceiling.Row{{Dst: dst.Bytes()[off : off+n], Src: src.Bytes()[off : off+n]}})
	}
	return all
}
