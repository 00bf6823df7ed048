// Package replay replays a trace of chat requests through the manager, the
// store and the pools that serve an engine, and checks the bytes that come back.
//
// The package has three parts that know nothing of each other: where requests
// come from ([Open], [Decode], [Generate]), what they mean in pages ([Pages],
// [AppendKeys]) and what is said at the end ([Result]). [Run] joins them; [RunSweep]
// answers for pools of any size without replaying.
//
// A trace names the tokens of a prompt by ids, one for each [IDTokens] tokens:
// equal ids mean equal tokens, up to and including the block that the id names.
// The tokens themselves are not in a trace, so a page's key is chained over the
// ids (see [AppendKeys]) and its bytes are a function of that key.
//
// Memory: the ids of all requests lie in a few large slabs, which requests
// share by sub-slices; nothing of a trace may be written after it was decoded.
// The file itself is never held: a line is at most [MaxLine] bytes.
package replay

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvferry/kvferry/fault"
)

// Limits of a trace. They exist so that a damaged or hostile file is refused
// before it costs memory.
const (
	IDTokens    = 512     // prompt tokens that one id names
	MaxTokens   = 1 << 24 // of one prompt, and of one output
	MaxLine     = 1 << 20 // bytes of a line: 32,768 ids of 19 digits fit
	MaxRequests = 1 << 22 // of a trace
	maxIDs      = 1 << 27 // of a trace, all requests together: 1 GiB

	maxTime    = 1 << 53 // milliseconds; exact in every JSON reader
	maxLineIDs = MaxTokens / IDTokens
	slabIDs    = 1 << 16
)

// Request is one line of a trace.
type Request struct {
	Time   int64   // milliseconds since the trace began; does not pace a replay
	Input  int     // prompt tokens, 1 ≤ Input ≤ MaxTokens
	Output int     // tokens that were generated, 0 ≤ Output ≤ MaxTokens
	IDs    []int64 // one for each IDTokens prompt tokens, the last may name fewer; read-only
}

// Trace is a list of requests in the order in which they are replayed. It is
// immutable once made, and may be read from any goroutine.
type Trace struct {
	Name     string // for people: the file's base name, or "built-in chat load"
	SHA256   string // of the whole file, in hex; "" when the trace was generated
	Requests []Request
	Tokens   int64    // prompt tokens of all requests
	Warnings []string // what was odd but legal, each with its line
}

// Where names request i for people: the file and line that it came from.
func (t *Trace) Where(i int) string {
	if t.Name == generatedName {
		return fmt.Sprintf("request %d of the %s", i+1, t.Name)
	}
	// Blank lines are refused, so that every line is a request.
	return fmt.Sprintf("%s:%d", t.Name, i+1)
}

// Largest returns the request that needs the most pages of pageSize tokens and
// how many those are, a partial last page included.
func (t *Trace) Largest(pageSize int) (index, pages int) {
	for i := range t.Requests {
		if n, _ := Pages(t.Requests[i].Input, pageSize); n > pages {
			index, pages = i, n
		}
	}
	return index, pages
}

// Open decodes the trace in the file at path. See [Decode].
// Kinds: fault.NotFound, and those of Decode.
func Open(path string, limit int) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		kind := fault.Invalid
		if errors.Is(err, fs.ErrNotExist) {
			kind = fault.NotFound
		}
		// The path is already in the error that os made.
		return nil, fault.Wrap(kind, "trace", err).
			Hint("give a file of JSON lines, or leave --trace out to replay the built-in chat load")
	}
	defer func() { _ = f.Close() }() // was only read
	return Decode(filepath.Base(path), f, limit)
}

// Decode reads JSON lines from r: objects with exactly the fields timestamp,
// input_length, output_length and hash_ids. name stands for the file in errors.
//
// It is strict: an unknown, missing, repeated, negative, fractional or huge
// field, a blank line, a line over MaxLine bytes or a trace without requests is
// fault.Invalid and names file, line and field. Nothing is skipped. A time that
// goes back is legal and warned of once. The newline of the last line may be
// missing.
//
// With limit > 0 only the first limit lines are decoded; the rest is read for
// the digest alone, unseen by the checks above.
func Decode(name string, r io.Reader, limit int) (*Trace, error) {
	digest := sha256.New()
	lines := bufio.NewReaderSize(io.TeeReader(r, digest), MaxLine)
	d := decoder{trace: &Trace{Name: name}}
	for limit <= 0 || len(d.trace.Requests) < limit {
		line, err := lines.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return nil, fault.New(fault.Invalid, d.at(), "line is longer than %d bytes", MaxLine).
				Hint("a trace has one request a line")
		case err != nil && !errors.Is(err, io.EOF):
			return nil, fault.Wrap(fault.Invalid, d.at(), err)
		case err != nil && len(line) == 0:
			return d.finish(hex.EncodeToString(digest.Sum(nil)))
		}
		if err := d.line(line); err != nil {
			return nil, err
		}
	}
	if _, err := io.Copy(io.Discard, lines); err != nil {
		return nil, fault.Wrap(fault.Invalid, name, err)
	}
	return d.finish(hex.EncodeToString(digest.Sum(nil)))
}

// decoder collects the requests of one trace.
type decoder struct {
	trace     *Trace
	ids       idSlab
	total     int     // ids so far
	scratch   []int64 // ids of the line being read, reused
	wentBack  int     // lines whose time is before that of the line above
	firstBack string  // the warning of the first of them
}

// at names the line being read.
func (d *decoder) at() string { return d.trace.Where(len(d.trace.Requests)) }

// line decodes one line and appends its request.
func (d *decoder) line(b []byte) error {
	if len(d.trace.Requests) == MaxRequests {
		return fault.New(fault.Invalid, d.at(), "more than %d requests", MaxRequests).
			Hint("replay a part of it: --requests %d", MaxRequests)
	}
	s := scanner{b: b, ids: d.scratch[:0]}
	req, bad := s.request()
	d.scratch = s.ids
	if bad != nil {
		object := d.at()
		if bad.field != "" {
			object += ": " + bad.field
		}
		return fault.New(fault.Invalid, object, "%s", bad.detail).Hint("%s", bad.remedy)
	}
	if d.total += len(s.ids); d.total > maxIDs {
		return fault.New(fault.Invalid, d.at()+": hash_ids", "more than %d ids in one trace", maxIDs).
			Hint("replay a part of it: --requests %d", len(d.trace.Requests))
	}
	req.IDs = d.ids.copyOf(s.ids)
	if n := len(d.trace.Requests); n > 0 && req.Time < d.trace.Requests[n-1].Time {
		if d.wentBack++; d.wentBack == 1 {
			d.firstBack = fmt.Sprintf("%s: timestamp goes back from %d to %d", d.at(), d.trace.Requests[n-1].Time, req.Time)
		}
	}
	d.trace.Requests = append(d.trace.Requests, req)
	d.trace.Tokens += int64(req.Input)
	return nil
}

func (d *decoder) finish(digest string) (*Trace, error) {
	t := d.trace
	if len(t.Requests) == 0 {
		return nil, fault.New(fault.Invalid, t.Name, "the trace has no requests").
			Hint(`each line is one, like {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}`)
	}
	t.SHA256 = digest
	if w := d.firstBack; w != "" {
		if d.wentBack > 1 {
			w += fmt.Sprintf(" (and on %d more lines)", d.wentBack-1)
		}
		t.Warnings = append(t.Warnings, w+"; requests are replayed in file order")
	}
	return t, nil
}

// idSlab hands out sub-slices of a few large slices, so that the ids of a trace
// are a handful of objects for the collector and are never moved.
type idSlab struct{ free []int64 }

func (s *idSlab) copyOf(ids []int64) []int64 {
	if len(ids) > len(s.free) {
		s.free = make([]int64, max(slabIDs, len(ids)))
	}
	n := copy(s.free, ids)
	out := s.free[:n:n]
	s.free = s.free[n:]
	return out
}
