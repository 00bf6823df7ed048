package kvferry

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// op is one operation of a metamorphic run, in words that mean the same whatever
// the page size and the sizes of the pools: lengths are tokens from the start of
// the sequence. It is legal in every configuration, or in none.
type op struct {
	verb   verb
	seq    int
	doc    int  // ingest: which text the prompt is the start of
	tokens int  // ingest, admit, commit: up to where; position: what
	keep   bool // reset: keep pages if that is possible
}

type verb string

const (
	doIngest   verb = "ingest"
	doMatch    verb = "match"
	doAdmit    verb = "admit"
	doCommit   verb = "commit"
	doExtend   verb = "extend"
	doOffload  verb = "offload"
	doReload   verb = "reload"
	doPosition verb = "position"
	doReset    verb = "reset"
	doRemove   verb = "remove"
	doVerify   verb = "verify"
)

var verbs = map[verb]bool{
	doIngest: true, doMatch: true, doAdmit: true, doCommit: true, doExtend: true, doReset: true, doRemove: true, doVerify: true,
	doOffload: true, doReload: true, doPosition: true,
}

// The size of what is played with.
const (
	maxSequences = 5
	maxTokens    = 32
	docs         = 40
)

func (o op) String() string {
	s := fmt.Sprintf("%s s%d", o.verb, o.seq)
	switch o.verb {
	case doIngest:
		s += fmt.Sprintf(" doc=%d tokens=%d", o.doc, o.tokens)
	case doAdmit, doCommit, doPosition:
		s += fmt.Sprintf(" tokens=%d", o.tokens)
	case doReset:
		if o.keep {
			s += " keep"
		} else {
			s += " free"
		}
	default: // that is all of it
	}
	return s
}

// parseOps reads ops, one a line. Empty lines and lines that start with # are
// passed over. What String does not write is refused.
func parseOps(text string) ([]op, error) {
	var ops []op
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		var o op
		for j, word := range strings.Fields(line) {
			name, value, _ := strings.Cut(word, "=")
			var err error
			switch {
			case j == 0:
				o.verb = verb(word)
			case j == 1:
				o.seq, err = strconv.Atoi(strings.TrimPrefix(word, "s"))
			case name == "doc":
				o.doc, err = strconv.Atoi(value)
			case name == "tokens":
				o.tokens, err = strconv.Atoi(value)
			case word == "keep":
				o.keep = true
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %q: %w", i+1, line, err)
			}
		}
		if !verbs[o.verb] || o.String() != line || o.seq < 0 || o.seq >= maxSequences || o.doc < 0 || o.doc >= docs || o.tokens < 0 || o.tokens > maxTokens {
			return nil, fmt.Errorf("line %d: %q is no operation", i+1, line)
		}
		ops = append(ops, o)
	}
	return ops, nil
}

// document is text number doc: each but the first begins like an earlier one.
func document(doc int) []uint32 {
	tokens := text(uint32(doc)+1, 0, maxTokens)
	if doc > 0 {
		shared := (doc * 7) % (maxTokens - 4)
		copy(tokens[:shared], document(doc / 3)[:shared])
	}
	return tokens
}

// spoken is what a sequence holds in one of its lives: the prompt is the same after a
// reset, what is decoded behind it is not.
func spoken(doc, prompt, life int) []uint32 {
	tokens := document(doc)
	if life > 0 {
		copy(tokens[prompt:], text(uint32(1000+life), 0, maxTokens)[prompt:])
	}
	return tokens
}

// modelSequence is what is known about a sequence in every configuration.
type modelSequence struct {
	live, matched     bool
	doc, prompt, life int
	admitted          int
	committed         int // at least this much is stored: more where more was matched
	offloaded         bool
	position          int
	held, pinned, old int // pages at most: its own, of others that its keys pin; kept from before a reset
}

// model follows ops without a manager.
type model struct{ seqs [maxSequences]modelSequence }

// legal reports whether o may be done now.
func (m *model) legal(o op) bool {
	s := &m.seqs[o.seq]
	switch o.verb {
	case doIngest:
		return !s.live
	case doMatch:
		return s.live && s.admitted == 0
	case doAdmit:
		return s.live && !s.offloaded && o.tokens >= max(s.admitted, s.prompt)
	case doCommit:
		return s.live && !s.offloaded && o.tokens >= s.committed && o.tokens <= s.admitted
	case doVerify:
		return s.live && !s.offloaded
	case doOffload:
		return s.live && s.committed > 0 && s.committed == s.admitted
	case doReload:
		return s.offloaded
	case doExtend, doPosition, doReset, doRemove:
		return s.live
	}
	return false
}

// do follows o. pageSize matters only for the pages that are held.
func (m *model) do(o op, pageSize int) {
	pages := func(tokens int) int { return (tokens + pageSize - 1) / pageSize }
	s := &m.seqs[o.seq]
	switch o.verb {
	case doIngest:
		*s = modelSequence{live: true, doc: o.doc, prompt: o.tokens}
	case doMatch:
		s.matched = true
		s.pinned = pages(s.prompt)
	case doAdmit:
		s.admitted, s.matched = o.tokens, false
		s.held = max(s.held, s.old+pages(o.tokens))
		s.pinned = max(s.pinned, pages(o.tokens))
	case doCommit:
		s.committed = o.tokens
	case doOffload:
		s.offloaded = true
	case doReload:
		s.offloaded = false
	case doPosition:
		s.position = o.tokens
	case doReset:
		*s = modelSequence{live: true, doc: s.doc, prompt: s.prompt, life: s.life + 1, held: s.held, old: s.held}
		if !o.keep {
			s.held, s.old = 0, 0
		}
	case doRemove:
		*s = modelSequence{}
	default: // changes nothing that is modelled
	}
}

// devicePages is how many device pages ops need at most, at one time.
func devicePages(ops []op, pageSize int) int {
	var m model
	peak := 1
	for _, o := range ops {
		m.do(o, pageSize)
		held := 0
		for _, s := range m.seqs {
			held += s.held + s.pinned
		}
		peak = max(peak, held)
	}
	return peak
}

// generate makes n legal operations. Most sequences live as an engine would have
// them live; the rest is what an engine could do as well.
func generate(rng *rand.Rand, n int) []op {
	var m model
	ops := make([]op, 0, n)
	for len(ops) < n {
		o := op{seq: rng.IntN(maxSequences)}
		s := &m.seqs[o.seq]
		usual := rng.IntN(4) > 0
		switch {
		case !s.live:
			o.verb, o.doc, o.tokens = doIngest, rng.IntN(docs), rng.IntN(maxTokens-4)
		case usual && s.offloaded:
			o.verb = doReload
		case usual && s.committed > 0 && s.committed == s.admitted && rng.IntN(5) == 0:
			o.verb = doOffload
		case usual && s.admitted == 0 && !s.matched:
			o.verb = doMatch
		case usual && s.committed >= s.prompt && s.admitted > 0 && rng.IntN(3) == 0:
			o.verb = doRemove
		case usual && s.committed == s.admitted:
			o.verb, o.tokens = doAdmit, min(max(s.prompt, s.admitted)+rng.IntN(4), maxTokens)
		case usual && s.committed < s.admitted:
			o.verb, o.tokens = doCommit, s.committed+1+rng.IntN(s.admitted-s.committed)
		default:
			o.verb = []verb{doMatch, doAdmit, doCommit, doExtend, doExtend, doReset, doRemove, doVerify, doVerify, doOffload, doPosition}[rng.IntN(11)]
			o.keep = o.verb == doReset && rng.IntN(2) == 0
			switch o.verb {
			case doAdmit:
				o.tokens = min(max(s.prompt, s.admitted)+rng.IntN(4), maxTokens)
			case doCommit:
				o.tokens = s.committed + rng.IntN(s.admitted-s.committed+1)
			case doPosition:
				o.tokens = rng.IntN(maxTokens)
			default: // has no tokens
			}
		}
		if m.legal(o) {
			m.do(o, 1)
			ops = append(ops, o)
		}
	}
	return ops
}

func TestOps_PrintAndParse(t *testing.T) {
	ops := generate(rand.New(rand.NewPCG(3, 3)), 500)
	var text strings.Builder
	for _, o := range ops {
		fmt.Fprintln(&text, o)
	}
	again := must(parseOps("# a comment\n\n" + text.String()))(t)
	if fmt.Sprint(again) != fmt.Sprint(ops) {
		t.Fatal("what was printed is not what was parsed")
	}
	seen := map[verb]int{}
	for _, o := range ops {
		seen[o.verb]++
	}
	equal(t, "verbs", len(seen), len(verbs))
	for _, bad := range []string{
		"admit", "admit s1", "jump s1", "admit s1 tokens=x", "admit s9 tokens=1", "reset s1", "reset s1 keep free", "match s1 doc=1",
		"commit s1 tokens=33", "ingest s1 doc=40 tokens=1", "match s-1",
	} {
		if ops, err := parseOps(bad); err == nil {
			t.Errorf("%q is parsed as %v", bad, ops)
		}
	}
}
