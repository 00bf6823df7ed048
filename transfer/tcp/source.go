package tcp

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

const (
	// leastStream is what a connection more must have to move to be worth its while.
	leastStream = 2 << 20
	// maxIdle is how many connections a source keeps that nobody uses.
	maxIdle = 4 * maxStreams
)

// source is an owner's cache, opened for reads into one of this side. Connections for
// words and pages are made when there is none that is idle. One more is for what is
// joined: as long as it lives, so does the reader.
type source struct {
	e       *Engine
	address string
	owner   transfer.OwnerID
	print   kv.Fingerprint
	form    *form // of this side

	mu      sync.Mutex
	idle    []*link // guarded by mu
	control *link   // used under mu, after open
}

// open is Open of an engine that agrees with the offer.
func (e *Engine) open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, address string) (transfer.Source, error) {
	if err := kv.Exchangeable(t.Cache.Geometry(), d.Geometry); err != nil {
		return nil, err
	}
	f, err := newForm(t.Cache)
	if err != nil {
		return nil, err
	}
	s := &source{e: e, address: address, owner: d.Owner, print: d.Geometry.Fingerprint(), form: f}
	s.control, err = s.dial(ctx, true)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// use calls f with a connection, which is another one's afterwards if f had no error.
func (s *source) use(ctx context.Context, f func(l *link) error) error {
	if err := ctx.Err(); err != nil {
		return s.failed(ctx, err)
	}
	l := s.take()
	if l == nil {
		var err error
		if l, err = s.dial(ctx, false); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, l.interrupt)
	err := f(l)
	if !stop() {
		l.close()
		if err == nil {
			return nil // it was there before ctx ended
		}
		return s.failed(ctx, err)
	}
	if err != nil {
		l.close()
		return s.failed(ctx, err)
	}
	s.give(l)
	return nil
}

// take returns an idle connection, nil when there is none.
func (s *source) take() *link {
	for {
		s.mu.Lock()
		n := len(s.idle)
		if n == 0 {
			s.mu.Unlock()
			return nil
		}
		l := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.mu.Unlock()
		if !l.ended() {
			return l
		}
		l.close()
	}
}

func (s *source) give(l *link) {
	s.mu.Lock()
	kept := len(s.idle) < maxIdle
	if kept {
		s.idle = append(s.idle, l)
	}
	s.mu.Unlock()
	if !kept {
		l.close()
	}
}

// Epoch implements [transfer.Source]. The owner loads the word when it is asked, which is
// after the last byte of a copy that is over, and before the first of one to come.
func (s *source) Epoch(ctx context.Context, word uint32) (count uint64, err error) {
	err = s.use(ctx, func(l *link) error {
		l.ask = appendWord(l.ask[:0], word)
		r, err := l.call(l.ask, sayValue)
		if count = r.a; err == nil && r.b != uint64(word) {
			return fault.New(fault.Corrupt, "epoch word", "%d was asked for, and this is %d", word, r.b).Hint("%s", lookAtNetwork)
		}
		return err
	})
	return count, err
}

// Copy implements [transfer.Source]. Nothing writes pages but the goroutines that it
// waits for, each in a system call that doesn't wait.
func (s *source) Copy(ctx context.Context, _ device.Stream, p *transfer.Plan) error {
	if err := ctx.Err(); err != nil {
		return s.failed(ctx, err)
	}
	total, err := s.bytes(p)
	if err != nil || total == 0 {
		return err
	}
	streams := min(int64(s.e.o.Streams), max(total/leastStream, 1))
	if streams == 1 {
		return s.stream(ctx, p, 0, total)
	}
	each := (total/streams + segmentBytes) / segmentBytes * segmentBytes
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var others sync.WaitGroup
	var mu sync.Mutex
	var failures []error
	run := func(from, to int64) {
		if err := s.stream(ctx, p, from, to); err != nil {
			mu.Lock()
			failures = append(failures, err)
			mu.Unlock()
			cancel() // the others have nothing to read for
		}
	}
	for from := each; from < total; from += each {
		others.Go(func() { run(from, min(from+each, total)) })
	}
	run(0, each)
	others.Wait()
	if len(failures) > 0 {
		return failures[0] // those behind it were cancelled by it
	}
	return nil
}

// bytes returns what p moves. Kind: fault.Invalid (a plan that is no read's).
func (s *source) bytes(p *transfer.Plan) (total int64, err error) {
	if len(p.Pairs) > maxRuns || len(p.Parts) > maxParts {
		return 0, fault.New(fault.Invalid, "plan", "%d pages, and parts of %d", len(p.Pairs), len(p.Parts))
	}
	total = int64(len(p.Pairs)) * s.form.pageBytes // of pages of this side, each once
	for _, x := range p.Parts {
		total += int64(x.T1-x.T0) * s.form.tokenBytes
	}
	return total, nil
}

// stream reads bytes [from, to) of what p lists.
func (s *source) stream(ctx context.Context, p *transfer.Plan, from, to int64) error {
	fl := s.e.flow()
	defer s.e.flows.Put(fl)
	fl.order.sums = !s.e.o.Unchecked
	s.form.share(p, from, to, &fl.order, &fl.local)
	if err := s.form.check(&fl.local); err != nil {
		return err
	}
	return s.use(ctx, func(l *link) error {
		fl.ask = fl.order.append(fl.ask[:0])
		if _, err := l.conn.Write(fl.ask); err != nil {
			return err
		}
		return l.receive(fl, s.form)
	})
}

// share fills in the pages of p, on either side, that bytes [from, to) of it are in.
func (f *form) share(p *transfer.Plan, from, to int64, remote, local *order) {
	remote.runs, local.runs, remote.parts, local.parts = remote.runs[:0], local.runs[:0], remote.parts[:0], local.parts[:0]
	all, before := int64(len(p.Pairs)), int64(0)
	if all > 0 {
		first := min(from/f.pageBytes, all)
		for _, x := range p.Pairs[first:min((to-1)/f.pageBytes+1, all)] {
			remote.runs = appendPage(remote.runs, x.Src)
			local.runs = appendPage(local.runs, x.Dst)
		}
		before = first * f.pageBytes
	}
	at := all * f.pageBytes
	for _, x := range p.Parts {
		end := at + int64(x.T1-x.T0)*f.tokenBytes
		switch {
		case end <= from:
			before = end
		case at < to:
			remote.parts = append(remote.parts, part{x.Remote, int32(x.T0), int32(x.T1)})
			local.parts = append(local.parts, part{x.Local, int32(x.T0), int32(x.T1)})
		}
		at = end
	}
	remote.from, remote.to = from-before, to-before
	local.from, local.to = remote.from, remote.to
}

// appendPage appends a page to runs of pages.
func appendPage(runs []run, id page.ID) []run {
	if n := len(runs); n > 0 && runs[n-1].first+page.ID(runs[n-1].n) == id {
		runs[n-1].n++
		return runs
	}
	return append(runs, run{id, 1})
}

// errSum names the pages that a segment is of.
func errSum(fl *flow, local *form, at, n int64, is, want [2]uint64) error {
	first, last := local.page(&fl.order, at), local.page(&fl.order, at+n-1)
	object := fmt.Sprintf("page %d", first)
	if first != last {
		object = fmt.Sprintf("one of the pages from %d to %d in their order", first, last)
	}
	return fault.New(fault.Corrupt, object, "arrived in page %d or behind it with the checksum %016x%016x of a segment of %d bytes, and its owner has sent %016x%016x",
		local.page(&fl.local, at), is[0], is[1], n, want[0], want[1]).
		Hint("%s", lookAtNetwork)
}

// Join implements [transfer.Source].
func (s *source) Join(e transfer.Epoch) error { return s.tell(askJoin, e) }

// Leave implements [transfer.Source].
func (s *source) Leave(e transfer.Epoch) error { return s.tell(askLeave, e) }

func (s *source) tell(kind byte, e transfer.Epoch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.control
	if l.ended() {
		return fault.New(fault.NotFound, "owner at "+s.address, "has closed the connection").Hint("read again: it is opened anew")
	}
	l.ask = appendEpoch(l.ask[:0], kind, e)
	if _, err := l.conn.Write(l.ask); err != nil {
		l.close() // what was sent of it is no request
		return s.failed(context.Background(), err)
	}
	return nil
}

// Close implements [transfer.Source]. What was told before arrives before the end does.
func (s *source) Close() error {
	s.control.close()
	for _, l := range s.idle {
		l.close()
	}
	s.idle = nil
	return nil
}
