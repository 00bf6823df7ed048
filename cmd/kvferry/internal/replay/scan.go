package replay

import (
	"fmt"
	"math"
	"strconv"
)

// scanner reads one line of a trace. It accepts the subset of JSON that a
// request needs (an object of whole numbers and one list of whole numbers), and
// so can say more about what is wrong than a general reader.
type scanner struct {
	b   []byte
	i   int
	ids []int64 // hash_ids of the line, appended to
}

// badLine says what is wrong with a line.
type badLine struct{ field, detail, remedy string }

func (e *badLine) in(field string) *badLine {
	e.field = field
	return e
}

// The fields of a request, in the order in which missing ones are named.
const (
	fieldTime = iota
	fieldInput
	fieldOutput
	fieldIDs
	numFields
)

var fieldNames = [numFields]string{"timestamp", "input_length", "output_length", "hash_ids"}

func bad(format string, args ...any) *badLine {
	return &badLine{detail: fmt.Sprintf(format, args...), remedy: "a line is one request: " +
		`{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}`}
}

// request reads the whole line.
func (s *scanner) request() (Request, *badLine) {
	var req Request
	var seen [numFields]bool
	if s.space(); s.i == len(s.b) {
		return req, bad("blank line")
	}
	if !s.eat('{') {
		return req, bad("not a JSON object: it begins with %s", s.excerpt())
	}
	for first := true; ; first = false {
		s.space()
		if s.eat('}') {
			if !first {
				return req, bad("a comma before the end of the object")
			}
			break // an empty object: its fields are missing
		}
		f, err := s.name()
		if err != nil {
			return req, err
		}
		if seen[f] {
			return req, bad("the field is there twice").in(fieldNames[f])
		}
		seen[f] = true
		if s.space(); !s.eat(':') {
			return req, s.expected("a colon after the name").in(fieldNames[f])
		}
		s.space()
		if err := s.value(f, &req); err != nil {
			return req, err.in(fieldNames[f])
		}
		s.space()
		if s.eat('}') {
			break
		}
		if !s.eat(',') {
			return req, s.expected("a comma or the end of the object").in(fieldNames[f])
		}
	}
	if s.space(); s.i != len(s.b) {
		return req, bad("something follows the object: %s", s.excerpt())
	}
	for f, ok := range seen {
		if !ok {
			return req, bad("the field is missing").in(fieldNames[f])
		}
	}
	if want := (req.Input + IDTokens - 1) / IDTokens; len(s.ids) != want {
		e := bad("%d ids for %d prompt tokens, want %d", len(s.ids), req.Input, want).in(fieldNames[fieldIDs])
		e.remedy = fmt.Sprintf("a request has one id for each %d prompt tokens, and one for what is left", IDTokens)
		return req, e
	}
	return req, nil
}

// name reads the name of a field.
func (s *scanner) name() (int, *badLine) {
	if !s.eat('"') {
		return 0, s.expected("the name of a field")
	}
	start := s.i
	for s.i < len(s.b) && s.b[s.i] != '"' {
		s.i++
	}
	if s.i == len(s.b) {
		return 0, bad("the line ends inside a name")
	}
	name := s.b[start:s.i]
	s.i++
	for f, want := range fieldNames {
		if string(name) == want {
			return f, nil
		}
	}
	// Names written with escapes end here too: nobody writes them.
	return 0, bad("unknown field %s", quote(name))
}

// value reads the value of field f into req, or the ids.
func (s *scanner) value(f int, req *Request) *badLine {
	switch f {
	case fieldTime:
		v, err := s.integer(0, maxTime)
		req.Time = v
		return err
	case fieldInput:
		v, err := s.integer(1, MaxTokens)
		req.Input = int(v)
		return err
	case fieldOutput:
		v, err := s.integer(0, MaxTokens)
		req.Output = int(v)
		return err
	}
	if !s.eat('[') {
		return s.expected("a list of ids")
	}
	if s.space(); s.eat(']') {
		return nil
	}
	for {
		s.space()
		v, err := s.integer(0, math.MaxInt64)
		if err != nil {
			return err
		}
		if len(s.ids) == maxLineIDs {
			return bad("more than %d ids", maxLineIDs)
		}
		s.ids = append(s.ids, v)
		s.space()
		if s.eat(']') {
			return nil
		}
		if !s.eat(',') {
			return s.expected("a comma or the end of the list")
		}
	}
}

// integer reads a whole number with least ≤ v ≤ most.
func (s *scanner) integer(least, most int64) (int64, *badLine) {
	start, v, over := s.i, int64(0), false
	s.eat('-')
	digits := s.i
	for ; s.i < len(s.b) && s.b[s.i]-'0' <= 9; s.i++ {
		d := int64(s.b[s.i] - '0')
		if v > (math.MaxInt64-d)/10 {
			over = true
			continue
		}
		v = v*10 + d
	}
	n := s.i - digits
	if s.i < len(s.b) && n > 0 {
		switch s.b[s.i] {
		case '.', 'e', 'E':
			s.i = start
			return 0, bad("%s is not a whole number", s.excerpt())
		}
	}
	token := s.b[start:s.i]
	switch {
	case n == 0:
		s.i = start
		return 0, s.expected("a whole number")
	case n > 1 && s.b[digits] == '0':
		return 0, bad("%s begins with a zero", quote(token))
	case digits > start && (v > 0 || over), !over && v < least:
		return 0, bad("%s is too small, the least is %d", clip(token), least)
	case over || v > most:
		return 0, bad("%s is too large, the limit is %d", clip(token), most)
	}
	return v, nil
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

func (s *scanner) eat(c byte) bool {
	if s.i < len(s.b) && s.b[s.i] == c {
		s.i++
		return true
	}
	return false
}

// expected says that something else stands where what should be, or that the
// line was cut off there.
func (s *scanner) expected(what string) *badLine {
	if s.space(); s.i == len(s.b) {
		return bad("the line ends where %s should be", what)
	}
	return bad("%s where %s should be", s.excerpt(), what)
}

// excerpt returns the next token or so, quoted.
func (s *scanner) excerpt() string {
	end := s.i
	for end < len(s.b) && s.b[end] != '\n' && s.b[end] != '\r' {
		switch s.b[end] {
		case ' ', ',', ']', '}', ':':
			if end > s.i {
				return quote(s.b[s.i:end])
			}
		}
		end++
	}
	return quote(s.b[s.i:end])
}

const clipBytes = 32

// clip returns a token as it stands, cut to a length that fits a message.
func clip(b []byte) string {
	if len(b) > clipBytes {
		return string(b[:clipBytes]) + "…"
	}
	return string(b)
}

// quote is clip with what cannot be printed escaped.
func quote(b []byte) string {
	if len(b) > clipBytes {
		return strconv.Quote(string(b[:clipBytes])) + "…"
	}
	return strconv.Quote(string(b))
}
