package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/evict"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// TestStore_Transcript runs the calls of testdata/store, twice: over pages without
// bytes and over pages with. It compares what they answer and the state of the store
// after each: the lists of both tiers, oldest first, then the entries in no list, with
// their pins, and the free pages. An entry is written as its path, a letter for each
// page; @d, @h and @dh say in which tiers it is.
func TestStore_Transcript(t *testing.T) {
	for _, bytes := range []bool{false, true} {
		t.Run(fmt.Sprintf("bytes=%v", bytes), func(t *testing.T) {
			datadriven.Walk(t, "testdata/store", func(t *testing.T, path string) {
				x := &transcript{bytes: bytes, held: map[string]*holding{}}
				datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
					answer := x.run(t, d)
					x.rig.settled()
					noError(t, x.rig.check(x.owned()))
					return answer + "\n" + x.rig.picture() + "\n"
				})
				for _, h := range x.held {
					x.rig.end(&h.use)
				}
			})
		})
	}
}

type transcript struct {
	bytes bool
	rig   *rig
	held  map[string]*holding // by name
}

// holding is what a command left in use.
type holding struct {
	use
	reserved []Ref
}

func (x *transcript) owned() map[page.ID]int {
	owned := map[page.ID]int{}
	for _, h := range x.held {
		for _, id := range h.pages {
			owned[id]++
		}
	}
	return owned
}

// list reads a list, oldest first.
func list(l *evict.LRU) []int32 {
	slots := l.AppendOldest(nil, l.Len())
	for _, s := range slots {
		l.Insert(s)
	}
	return slots
}

func (r *rig) picture() string {
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	name := func(i int) string { return r.names[s.index.keys[i]] }
	var b strings.Builder
	listed := map[int32]bool{}
	for _, tier := range []struct {
		name string
		list *evict.LRU
	}{{"device", &s.device}, {"host", &s.host}} {
		fmt.Fprintf(&b, "%s [", tier.name)
		for i, slot := range list(tier.list) {
			listed[slot] = true
			if i > 0 {
				b.WriteByte(' ')
			}
			b.WriteString(name(int(slot)))
		}
		b.WriteString("] ")
	}
	var other []string
	for i := range s.entries {
		e := &s.entries[i]
		switch {
		case e.state == reserved:
			other = append(other, name(i)+" reserved")
		case e.state == dropped:
			other = append(other, fmt.Sprintf("%s*%d dropped", name(i), e.pins))
		case e.state == kept && !listed[int32(i)]:
			tiers := ""
			if e.part.device != page.None {
				tiers += "d"
			}
			if e.part.host != page.None {
				tiers += "h"
			}
			other = append(other, fmt.Sprintf("%s@%s*%d", name(i), tiers, e.pins))
		}
	}
	slices.Sort(other)
	for _, o := range other {
		b.WriteString(o + " ")
	}
	fmt.Fprintf(&b, "| free %d", r.arena.NumFree())
	if r.pool != nil {
		fmt.Fprintf(&b, "+%d", r.pool.NumFree())
	}
	return b.String()
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

func words(answers []Answer) string {
	var all []string
	for _, a := range answers {
		all = append(all, a.word())
	}
	return strings.Join(all, ", ")
}

func (x *transcript) run(t *testing.T, d *datadriven.TestData) string {
	r := x.rig
	path, as := "", ""
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		path, as = d.CmdArgs[0].Key, d.CmdArgs[0].Key
	}
	d.MaybeScanArgs(t, "as", &as)
	n, limit := 0, len(path)
	d.MaybeScanArgs(t, "n", &n)
	d.MaybeScanArgs(t, "limit", &limit)
	h := x.held[as]
	switch d.Cmd {
	case "open":
		o := setup{bytes: x.bytes, inclusive: d.HasArg("inclusive"), through: d.HasArg("through")}
		d.ScanArgs(t, "device", &o.device)
		d.MaybeScanArgs(t, "host", &o.host)
		d.MaybeScanArgs(t, "history", &o.history)
		d.MaybeScanArgs(t, "jobpages", &o.jobPages)
		x.rig = newRig(t, o)
		return "ok"

	// The engine's commands: match, load, compute and commit a whole path; and end.
	case "put":
		u, err := r.begin(path)
		if err != nil {
			return outcome(err)
		}
		answer := words(u.answers)
		if err := r.commit(u); err != nil {
			r.end(u)
			return answer + "; " + outcome(err)
		}
		noError(t, r.verify(u))
		x.held[as] = &holding{use: *u}
		return answer
	case "end":
		delete(x.held, as)
		r.end(&h.use)
		return "ok"
	case "fill": // puts and ends each word
		for p := range strings.FieldsSeq(d.Input) {
			r.fill(p)
		}
		return "ok"

	// The store's calls.
	case "match":
		var m Match
		if err := r.store.Match(r.keys(path), limit, &m); err != nil {
			return outcome(err)
		}
		x.held[as] = &holding{use: use{path: path, keys: r.keys(path), refs: m.Refs}}
		return fmt.Sprintf("%d pinned: %s", len(m.Refs), words(m.Answers))
	case "why":
		return words(r.store.Why(nil, r.keys(path), limit))
	case "unpin":
		r.store.Unpin(h.refs)
		h.refs = nil
		return "ok"
	case "load": // n fresh pages, or as many as are missing
		if !d.HasArg("n") {
			n = r.store.Missing(h.refs)
		}
		fresh, err := r.arena.Acquire(nil, n)
		noError(t, err)
		var l Loaded
		err = r.store.Load(h.refs, fresh, &l)
		_, releaseErr := r.arena.Release(fresh[l.Used:])
		noError(t, releaseErr)
		h.pages = append(h.pages, l.Pages...)
		if err != nil {
			return outcome(err)
		}
		h.tickets = l.Tickets
		noError(t, r.verify(&h.use))
		return fmt.Sprintf("%d loaded, %d fresh", len(l.Pages), l.Used)
	case "reserve":
		refs, err := r.store.Reserve(nil, r.keys(path)[n:])
		if err != nil {
			return fmt.Sprintf("%s; %d refs", outcome(err), len(refs))
		}
		x.held[as] = &holding{reserved: refs, use: use{path: path, keys: r.keys(path)[n:]}}
		var states []string
		r.store.mu.Lock()
		for _, ref := range refs {
			switch {
			case ref == NoRef:
				states = append(states, "somebody else's")
			case r.store.entries[ref].state == reserved:
				states = append(states, "reserved")
			default:
				states = append(states, "pinned")
			}
		}
		r.store.mu.Unlock()
		return strings.Join(states, ", ")
	case "commit":
		pages, err := r.acquire(len(h.reserved))
		noError(t, err)
		for i, id := range pages {
			r.write(id, h.keys[i])
		}
		h.pages = append(h.pages, pages...)
		if err := r.store.Commit(h.reserved, pages); err != nil {
			return outcome(err)
		}
		h.refs, h.reserved = h.reserved, nil
		return "ok"
	case "abandon":
		r.store.Abandon(h.reserved)
		h.reserved = nil
		return "ok"
	case "evict":
		freed, err := r.store.Evict(context.Background(), n)
		if err != nil && !errors.Is(err, fault.Full) {
			t.Fatal(err)
		}
		return fmt.Sprintf("%d freed; %s", freed, outcome(err))
	case "stats":
		s := r.store.Stats()
		return fmt.Sprintf("committed %d, refused %d, demoted %d, promoted %d, host evicted %d, dropped cold %d; %d entries, %d on the device, %d on the host",
			s.Committed, s.Refused, s.Demoted, s.Promoted, s.EvictedHost, s.DroppedCold, s.Entries, s.DevicePages, s.HostPages)
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return ""
}
