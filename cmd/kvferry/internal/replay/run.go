package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/prefix"
	"github.com/kvferry/kvferry/store"
)

// Run replays a trace as o says. Progress and nothing else goes to stderr.
//
// On an error the result holds what was found out until then, or is nil when
// the replay never began. Kinds: fault.Corrupt (a wrong byte), fault.Invalid,
// fault.NotFound, fault.Memory, fault.Device; or ctx's error.
func Run(ctx context.Context, o Options, stderr io.Writer) (r *Result, err error) {
	if o, err = o.Resolve(); err != nil {
		return nil, err
	}
	t, err := o.load(ctx)
	if err != nil {
		return nil, err
	}
	if o.Compare {
		if err := checkUses(t, o.PageSize, "--compare"); err != nil {
			return nil, err
		}
	}
	x, err := start(ctx, o, t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.pools.close()) }()
	bar := NewProgress(stderr, len(t.Requests))
	err = x.run(ctx, bar)
	bar.Close()
	x.finish()
	r = x.r
	if err == nil {
		err = r.Balance()
	}
	if err == nil {
		err = x.measure(ctx)
	}
	if err == nil {
		x.judge()
	}
	r.PeakRSSBytes = peakRSS()
	return r, err
}

// judge sets the run against other sizes and other policies.
func (x *replay) judge() {
	const cheap = 1 << 19 // whole pages: 45 MiB; a hint is not worth more
	if !x.o.Compare && (len(x.evicted) == 0 || wholePages(x.t, x.o.PageSize) > cheap) {
		return
	}
	u := newUses(x.t, x.o.PageSize)
	x.r.HostPagesSuggested = suggestHostPages(u, x.o, x.evicted)
	if x.o.Compare {
		pages := x.o.DevicePages + x.o.HostPages
		x.r.LRUHitRatio, x.r.OptimumHitRatio = u.ratio(u.lru(pages)), u.ratio(u.optimum(pages))
	}
}

// load opens the trace, or makes the built-in load. A pipe may keep it waiting, and
// cannot be woken: when ctx ends, what reads it is left behind.
func (o Options) load(ctx context.Context) (*Trace, error) {
	type loaded struct {
		t   *Trace
		err error
	}
	done := make(chan loaded, 1)
	go func() {
		if o.Trace == "" {
			done <- loaded{Generate(o.Seed, o.Requests), nil}
			return
		}
		t, err := Open(o.Trace, o.Requests)
		done <- loaded{t, err}
	}()
	select {
	case x := <-done:
		return x.t, x.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// replay is one run. It uses the manager as an engine would: one request at a
// time, matched, admitted, computed, committed, looked at and removed.
type replay struct {
	o     Options
	t     *Trace
	r     *Result
	pools *pools

	content *content // nil with Bookkeeping
	root    page.Key
	matches []time.Duration // each request's look-up
	reloads []time.Duration // of requests that hit the host: until its pages had arrived
	evicted []int32         // whole pages missed because they were evicted, by place in the trace
	whole   int             // whole pages looked up so far
	began   time.Time
	took    struct{ write, wait, verify, all time.Duration }
	bytes   struct{ written, verified int64 }
	wrong   int64
	keys    []page.Key  // of the request
	pages   []page.ID   // of its sequence
	refs    []store.Ref // of its sequence
}

// start makes the pools for a replay of t, and warms them up.
func start(ctx context.Context, o Options, t *Trace) (x *replay, err error) {
	x = &replay{
		t: t, r: NewResult(o, t), root: prefix.Fingerprint([]byte("kvferry replay")),
		matches: make([]time.Duration, 0, len(t.Requests)),
	}
	opened, err := o.open(ctx)
	if err != nil {
		return nil, err
	}
	x.r.named(opened)
	if o, err = o.size(t, x.r, opened.Accelerator); err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	x.o = o
	warm := time.Now()
	if x.pools, err = openPools(ctx, o, opened); err != nil {
		return nil, err
	}
	x.r.WarmupSeconds = new(time.Since(warm).Seconds())
	if !o.Bookkeeping {
		seen := x.pools.cache
		if x.pools.window != nil {
			seen = x.pools.window.cache
		}
		if x.content, err = newContent(seen, o.Seed); err != nil {
			return nil, errors.Join(err, x.pools.close())
		}
	}
	if pinned, pageable := x.pools.pinned(); pinned+pageable > 0 {
		x.r.PinnedBytes, x.r.PageableBytes = &pinned, &pageable
		if pageable > 0 {
			x.r.Warnings = append(x.r.Warnings, fmt.Sprintf("%s of the host pool could not be pinned: copies of it are slow (kvferry doctor says why)", figures.Size(pageable)))
		}
	}
	return x, nil
}

func (x *replay) run(ctx context.Context, bar *Progress) error {
	x.began = time.Now()
	defer func() { x.took.all = time.Since(x.began) }()
	for i := range x.t.Requests {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := x.request(ctx, i); err != nil {
			return fmt.Errorf("%s: %w", x.t.Where(i), err)
		}
		bar.Step()
	}
	return nil
}

func (x *replay) request(ctx context.Context, i int) error {
	req := &x.t.Requests[i]
	x.keys = AppendKeys(x.keys[:0], x.root, req, x.o.PageSize)
	seq, err := x.pools.manager.Ingest(kvferry.ID{Request: strconv.Itoa(i)}, kvferry.Prompt{Tokens: req.Input, Keys: x.keys})
	if err != nil {
		return err
	}
	asked := time.Now()
	match, err := seq.Match()
	if err != nil {
		return err
	}
	x.matches = append(x.matches, time.Since(asked))
	onHost := x.count(req, match)

	span := req.Input - match.Tokens
	asked = time.Now()
	adm, err := seq.Admit(ctx, span)
	if err == nil {
		err = adm.Wait(ctx)
	}
	waited := time.Since(asked)
	x.took.wait += waited
	if err != nil {
		return x.discarded(err, i)
	}
	if onHost {
		x.reloads = append(x.reloads, waited)
	}
	if x.content != nil {
		x.pages = seq.Pages(x.pages[:0])
		if err := x.prefill(req, match.Pages); err != nil {
			return err
		}
	} else {
		needed, _ := Pages(req.Input, x.o.PageSize)
		x.r.PagesWritten += int64(needed - match.Pages)
	}
	if err := seq.Commit(span); err != nil {
		return err
	}
	if x.content != nil && x.o.Verify != VerifyOff {
		if err := x.verify(seq, match, i); err != nil {
			return err
		}
	}
	return seq.Remove()
}

// count counts the answers to one look-up, and reports whether any page was on the host.
func (x *replay) count(req *Request, match kvferry.Matched) (onHost bool) {
	r := x.r
	needed, whole := Pages(req.Input, x.o.PageSize)
	r.PagesLookedUp += int64(needed)
	r.PagesWhole += int64(whole)
	r.AddMiss(fault.Partial, int64(needed-whole))
	for i, a := range match.Answers {
		switch a.Tier {
		case store.Device:
			r.PagesHitDevice++
		case store.Host:
			r.PagesHitHost++
			onHost = true
		default:
			r.AddMiss(a.Reason, 1)
			if a.Reason == fault.Evicted {
				x.evicted = append(x.evicted, int32(x.whole+i))
			}
		}
	}
	x.whole += whole
	return onHost
}

// prefill computes what was not matched: it writes the content of every page from
// the first missing one, a partial last page included.
func (x *replay) prefill(req *Request, matched int) error {
	began := time.Now()
	defer func() { x.took.write += time.Since(began) }()
	size, w := x.o.PageSize, x.pools.window
	for i := matched; i*size < req.Input; i++ {
		key := &x.root // a partial page has no key, and nobody asks for it again
		if i < len(x.keys) {
			key = &x.keys[i]
		}
		at := x.pages[i]
		if w != nil {
			var err error
			if at, err = w.place(at); err != nil {
				return err
			}
		}
		x.bytes.written += x.content.write(key, at, 0, min(size, req.Input-i*size))
		x.r.PagesWritten++
	}
	if w != nil {
		return w.flush()
	}
	return nil
}

// verify looks at the bytes of every page that was hit.
func (x *replay) verify(seq *kvferry.Sequence, match kvferry.Matched, i int) error {
	began := time.Now()
	defer func() { x.took.verify += time.Since(began) }()
	for k := range match.Pages {
		at := x.pages[k]
		if w := x.pools.window; w != nil {
			var err error
			if at, err = w.fetch(x.pages[:match.Pages], k); err != nil {
				return err
			}
		}
		n, wrong := x.content.verify(&x.keys[k], at, x.o.Verify == VerifySample)
		x.bytes.verified += n
		if wrong == nil {
			continue
		}
		x.wrong++
		x.refs = seq.Refs(x.refs[:0])
		tier, history := match.Answers[k].Tier, x.pools.manager.Store().History(x.refs[k])
		x.r.Error = &Failure{
			Kind: fault.Corrupt.Error(), Page: new(int64(x.pages[k])), Layer: new(int64(wrong.layer)), Offset: new(wrong.offset),
			Tier: tier.String(), History: history,
			Message: fmt.Sprintf("%s: page %d of the prompt holds a wrong byte: %#02x, not %#02x, at byte %d of plane %d of layer %d of device page %d; it was hit on the %s; %s",
				x.t.Where(i), k, wrong.got, wrong.want, wrong.offset, wrong.plane, wrong.layer, x.pages[k], tier, history),
		}
		return fault.New(fault.Corrupt, fmt.Sprintf("page %d of the prompt", k),
			"byte %d of plane %d of layer %d of device page %d is %#02x, must be %#02x; it was hit on the %s; %s",
			wrong.offset, wrong.plane, wrong.layer, x.pages[k], wrong.got, wrong.want, tier, history)
	}
	return nil
}

// discarded ends the run when the store itself found a wrong byte and gave it to
// nobody: nothing but a fault of this program or of the memory can make one here.
func (x *replay) discarded(err error, i int) error {
	if bad, ok := errors.AsType[*store.CorruptError](err); ok {
		x.wrong++
		x.r.Error = &Failure{
			Kind: fault.Corrupt.Error(), Tier: store.Host.String(), History: bad.History, Page: new(int64(bad.Index)),
			Message: fmt.Sprintf("%s: %v", x.t.Where(i), err),
		}
	}
	return err
}

// finish turns what was counted into the result.
func (x *replay) finish() {
	r, st := x.r, x.pools.manager.Store().Stats()
	r.PagesOffloaded, r.PagesReloaded, r.PagesEvictedHost = st.Demoted+st.Written, st.Promoted, st.EvictedHost
	r.GhostTableBytes = new(st.HistoryBytes)
	r.Policy = "lru, deepest page first"
	all := x.took.all.Seconds()
	r.Seconds = &all
	if r.PagesLookedUp > 0 {
		r.HitRatio = new(float64(r.Hits()) / float64(r.PagesLookedUp))
	}
	if all > 0 {
		r.LookupsPerS = new(float64(r.PagesLookedUp) / all)
	}
	r.MatchP50us, r.MatchP99us = percentiles(x.matches)
	if x.content == nil {
		r.BooksSeconds = &all
		return
	}
	r.ReloadP50us, r.ReloadP99us = percentiles(x.reloads)
	r.BytesWritten = &x.bytes.written
	if x.o.Verify != VerifyOff {
		r.BytesVerified, r.Mismatches = &x.bytes.verified, &x.wrong
		r.VerifySeconds = new(x.took.verify.Seconds())
	}
	r.BytesOffloaded, r.BytesReloaded = new(r.PagesOffloaded*r.PageBytes), new(st.Promoted*r.PageBytes)
	r.CheckBytes, r.CheckSeconds = new(st.SummedBytes), new(float64(st.SumNanos)/1e9)
	r.WriteSeconds = new(x.took.write.Seconds())
	moved, busy, known := x.pools.copied()
	spent := x.took.wait
	if known {
		r.CopySeconds, spent = new(busy.Seconds()), busy
	} else {
		r.WaitSeconds = new(x.took.wait.Seconds())
	}
	r.BooksSeconds = new(max(0, (x.took.all - x.took.write - x.took.verify - spent).Seconds()))
	if busy > 0 {
		r.CopyGBps = new(float64(moved) / busy.Seconds() / 1e9)
	}
}

// percentiles returns the median and the 99th percentile in microseconds, nil
// when nothing was timed.
func percentiles(d []time.Duration) (p50, p99 *float64) {
	if len(d) == 0 {
		return nil, nil
	}
	slices.Sort(d)
	at := func(q float64) *float64 { return new(float64(d[int(q*float64(len(d)-1))]) / 1e3) }
	return at(0.50), at(0.99)
}
