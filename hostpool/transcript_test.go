package hostpool

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// TestPool_Transcript runs the calls of testdata/pool and compares what they
// answer and the state of all pages after each: '-' is missing, '.' free, 'c'
// claimed, 'k' kept, 'C' and 'K' the same with a copy in flight. The stream is held
// but while "run" waits for it.
func TestPool_Transcript(t *testing.T) {
	datadriven.Walk(t, "testdata/pool", func(t *testing.T, path string) {
		r := newShapeRig(t)
		x := &transcript{rig: r}
		x.release = r.hold(r.copies)
		defer func() {
			x.release()
			if !x.closed {
				_ = r.copies.Close()
				noError(t, x.pool.Close())
			}
		}()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			answer := x.run(t, d)
			if x.acc != nil && x.cable != "" {
				answer = strings.ReplaceAll(answer, "stream: "+x.cable, "cable pulled")
			}
			if x.pool == nil || x.closed {
				return answer + "\n"
			}
			noError(t, x.pool.Check())
			return fmt.Sprintf("%s\n%s\n", answer, x.pool.picture())
		})
	})
}

type transcript struct {
	*rig
	pool    *Pool
	closed  bool
	release func()
	tickets []*device.Ticket
}

// picture draws the state of every page.
func (p *Pool) picture() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	for id := range p.state {
		mark := ".ck"[p.state[id] : p.state[id]+1]
		if p.last[id] != nil {
			if done, _ := p.last[id].Poll(); !done {
				mark = strings.ToUpper(mark)
			}
		}
		if id >= p.arena.Pages() {
			mark = "-"
		}
		b.WriteString(mark)
	}
	return fmt.Sprintf("%s | %d free", b.String(), p.arena.NumFree())
}

func outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case fault.RemedyOf(err) != "":
		return fmt.Sprintf("%v: %v; %s", fault.KindOf(err), err, fault.RemedyOf(err))
	}
	return fmt.Sprintf("%v: %v", fault.KindOf(err), err)
}

// ids reads "1 2 3", pairs reads "device>host" or "host>device".
func (x *transcript) ids(t *testing.T, d *datadriven.TestData) (ids []page.ID) {
	for f := range strings.FieldsSeq(d.Input) {
		var id page.ID
		if _, err := fmt.Sscan(f, &id); err != nil {
			d.Fatalf(t, "%v", err)
		}
		ids = append(ids, id)
	}
	return ids
}

func (x *transcript) pairs(t *testing.T, d *datadriven.TestData) (pairs []page.Pair) {
	for f := range strings.FieldsSeq(d.Input) {
		var p page.Pair
		if _, err := fmt.Sscanf(f, "%d>%d", &p.Src, &p.Dst); err != nil {
			d.Fatalf(t, "%v", err)
		}
		pairs = append(pairs, p)
	}
	return pairs
}

func (x *transcript) run(t *testing.T, d *datadriven.TestData) string {
	n, name := 0, Name{}
	d.MaybeScanArgs(t, "n", &n)
	d.MaybeScanArgs(t, "of", &name.Request)
	d.MaybeScanArgs(t, "label", &name.Label)
	switch d.Cmd {
	case "suspend": // the ids are device pages
		return outcome(x.pool.Offload(x.copies, name, x.ids(t, d), Offloaded{StoredLen: n}))
	case "settle": // without waiting
		return outcome(x.pool.Settle(abandoned(), name))
	case "resume":
		ticket := device.NewTicket()
		o, err := x.pool.Reload(x.copies, name, x.ids(t, d), ticket)
		if err != nil {
			return outcome(err)
		}
		x.tickets = append(x.tickets, ticket)
		return fmt.Sprintf("ok, %d tokens of host pages %v", o.StoredLen, o.Pages)
	case "discard":
		return outcome(x.pool.Discard(name))
	case "remove":
		return outcome(x.pool.Remove(name.Request))
	case "labels":
		return fmt.Sprintf("%q", x.pool.Labels(name.Request))
	case "flip": // a bit of host page n
		hostBytes(t, x.pool, page.ID(n))[3] ^= 1
		return "ok"
	case "prepare": // a pool that does not grow by itself
		p, err := prepare(x.options(Options{Pages: n}))
		if err == nil {
			p.stop = func() { p.grown.Complete(nil) }
			x.pool = p
		}
		return outcome(err)
	case "extend":
		return outcome(x.pool.extend(x.pool.arena.Pages(), n))
	case "claim":
		ids, err := x.pool.Claim(nil, n)
		var full *page.FullError
		switch {
		case errors.As(err, &full):
			return fmt.Sprintf("%s; %d missing, got %v", outcome(err), full.Shortfall(), ids)
		case err != nil:
			return fmt.Sprintf("%s; got %v", outcome(err), ids)
		}
		return fmt.Sprint("got ", ids)
	case "offload", "reload":
		move := x.pool.CopyIn
		if d.Cmd == "reload" {
			move = x.pool.CopyOut
		}
		ticket := device.NewTicket()
		moved, err := move(x.copies, x.pairs(t, d), ticket)
		// An accelerator completes the ticket of no work at once.
		if done, ticketErr := ticket.Poll(); done && (x.acc == nil || err != nil || moved.Pages > 0) {
			return fmt.Sprintf("%s; ticket done, %s", outcome(err), outcome(ticketErr))
		}
		x.tickets = append(x.tickets, ticket)
		if err != nil {
			return outcome(err)
		}
		return fmt.Sprintf("ok, %d pages in %d runs, %d bytes", moved.Pages, moved.Runs, moved.Bytes)
	case "fail": // the next copy
		x.breaks(x.copies)
		return "ok"
	case "run": // everything enqueued
		x.release()
		noError(t, x.pool.Wait(t.Context()))
		var b strings.Builder
		for i, ticket := range x.tickets {
			fmt.Fprintf(&b, "ticket %d: %s\n", i, outcome(wait(ticket)))
		}
		x.tickets, x.release = nil, x.hold(x.copies)
		return strings.TrimSpace(b.String())
	case "commit":
		return outcome(x.pool.Commit(x.ids(t, d)...))
	case "abandon":
		return outcome(x.pool.Abandon(x.ids(t, d)...))
	case "release":
		return outcome(x.pool.Release(x.ids(t, d)...))
	case "close":
		err := x.pool.Close()
		x.closed = x.closed || err == nil
		return outcome(err)
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return ""
}
