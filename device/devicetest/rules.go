package devicetest

import (
	"fmt"
	"strconv"
	"strings"
)

// Rule is one thing that goes wrong: what, and at which calls.
type Rule struct {
	What What
	When When
}

// What goes wrong. Each is counted by itself: call n of "fail copy" is the n-th copy.
type What string

// What can go wrong, and where.
const (
	FailAlloc  What = "fail alloc"     // of device memory
	FailCopy   What = "fail copy"      // a stream refuses ops
	FailRecord What = "fail record"    // a stream refuses to record an event
	FailWait   What = "fail wait"      // a stream refuses to wait for an event
	FailSignal What = "fail signal"    // a stream refuses a ticket
	FailStream What = "fail stream"    // a copy fails when its turn comes, and its stream with it
	FailPages  What = "fail pages"     // a copier refuses
	HalfPages  What = "half pages"     // a copier enqueues half of its pages, and refuses then
	FlipByte   What = "flip host byte" // a bit of a host page at rest is turned
)

var whats = []What{FailAlloc, FailCopy, FailRecord, FailWait, FailSignal, FailStream, FailPages, HalfPages, FlipByte}

// When says at which calls: a function of the number of the call, from 1, alone.
//
//	(every N)        each N-th
//	(at N)           the N-th
//	(from N)         the N-th and all behind it
//	(chance 1/N S)   one of N, by seed S
//	(and W...)  (or W...)  (not W)
type When struct {
	op   string
	n    uint64
	seed uint64
	of   []When
}

func (w When) holds(call uint64) bool {
	switch w.op {
	case "every":
		return call%w.n == 0
	case "at":
		return call == w.n
	case "from":
		return call >= w.n
	case "chance":
		return mix(call^mix(w.seed))%w.n == 0
	case "not":
		return !w.of[0].holds(call)
	}
	for _, x := range w.of {
		if x.holds(call) == (w.op == "or") {
			return w.op == "or"
		}
	}
	return w.op == "and"
}

func (w When) String() string {
	switch w.op {
	case "every", "at", "from":
		return fmt.Sprintf("(%s %d)", w.op, w.n)
	case "chance":
		return fmt.Sprintf("(chance 1/%d %d)", w.n, w.seed)
	}
	words := []string{w.op}
	for _, x := range w.of {
		words = append(words, x.String())
	}
	return "(" + strings.Join(words, " ") + ")"
}

func (r Rule) String() string { return fmt.Sprintf("(%s %v)", r.What, r.When) }

// ParseRules reads rules as Rule.String writes them, one behind the other:
//
//	(fail copy (every 50)) (flip host byte (chance 1/100 7))
//
// Without a When, a rule holds for every call.
func ParseRules(text string) (rules []Rule, err error) {
	p := &parser{strings.Fields(strings.NewReplacer("(", " ( ", ")", " ) ").Replace(text))}
	for len(p.words) > 0 {
		r, err := p.rule()
		if err != nil {
			return nil, fmt.Errorf("rule %d of %q: %w", len(rules)+1, text, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

type parser struct{ words []string }

func (p *parser) next() string {
	if len(p.words) == 0 {
		return "the end"
	}
	w := p.words[0]
	p.words = p.words[1:]
	return w
}

func (p *parser) want(word string) error {
	if got := p.next(); got != word {
		return fmt.Errorf("want %q, got %q", word, got)
	}
	return nil
}

func (p *parser) at(word string) bool { return len(p.words) > 0 && p.words[0] == word }

func (p *parser) rule() (r Rule, err error) {
	if err := p.want("("); err != nil {
		return r, err
	}
	var words []string
	for len(p.words) > 0 && !p.at("(") && !p.at(")") {
		words = append(words, p.next())
	}
	r.What, r.When = What(strings.Join(words, " ")), When{op: "every", n: 1}
	known := false
	for _, w := range whats {
		known = known || w == r.What
	}
	if !known {
		return r, fmt.Errorf("%q does not go wrong: want one of %q", r.What, whats)
	}
	if p.at("(") {
		if r.When, err = p.when(); err != nil {
			return r, err
		}
	}
	return r, p.want(")")
}

func (p *parser) when() (w When, err error) {
	if err := p.want("("); err != nil {
		return w, err
	}
	w.op = p.next()
	switch w.op {
	case "every", "at", "from":
		w.n, err = p.number("")
	case "chance":
		if w.n, err = p.number("1/"); err == nil && !p.at(")") {
			w.seed, err = strconv.ParseUint(p.next(), 10, 64)
		}
	case "and", "or", "not":
		for err == nil && p.at("(") {
			var x When
			x, err = p.when()
			w.of = append(w.of, x)
		}
		if err == nil && (len(w.of) == 0 || w.op == "not" && len(w.of) > 1) {
			err = fmt.Errorf("%q of %d", w.op, len(w.of))
		}
	default:
		err = fmt.Errorf("%q: want every, at, from, chance, and, or, not", w.op)
	}
	if err != nil {
		return w, err
	}
	return w, p.want(")")
}

// number reads a number from 1, behind prefix.
func (p *parser) number(prefix string) (uint64, error) {
	word := p.next()
	digits, ok := strings.CutPrefix(word, prefix)
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || !ok || n == 0 {
		return 0, fmt.Errorf("%q: want %sN, N at least 1", word, prefix)
	}
	return n, nil
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
