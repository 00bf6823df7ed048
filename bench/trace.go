package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"github.com/kvferry/kvferry/page"
)

type key = page.Key

// trace is the pages of requests, each request's from its first. Equal ids mean equal
// contents up to there.
type trace struct {
	name     string
	ids      [][]uint64
	requests [][]key
}

// openTrace reads a file of JSON lines that have hash_ids, as Mooncake's traces do.
func openTrace(path string) (*trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // was only read
	return readTrace(filepath.Base(path), f)
}

func readTrace(name string, r io.Reader) (*trace, error) {
	t := &trace{name: name}
	d := json.NewDecoder(bufio.NewReader(r))
	for {
		var line struct {
			IDs []uint64 `json:"hash_ids"`
		}
		err := d.Decode(&line)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: request %d: %w", name, len(t.ids)+1, err)
		}
		t.ids = append(t.ids, line.IDs)
	}
	if len(t.ids) == 0 {
		return nil, fmt.Errorf("%s: no requests", name)
	}
	t.hash()
	return t, nil
}

// makeTrace makes conversations that grow: a request is a conversation's next turn,
// which repeats what came before and adds a few pages. Some begin with one of a few
// long prompts that many share.
func makeTrace(requests int, seed uint64) *trace {
	const (
		shared    = 8   // prompts that many share
		open      = 600 // conversations at a time
		turnPages = 4   // added by a turn, on average
		mostPages = 200
	)
	rng := rand.New(rand.NewPCG(seed, 0))
	next := uint64(0)
	fresh := func(n int) (ids []uint64) {
		for range n {
			next++
			ids = append(ids, next)
		}
		return ids
	}
	var prompts [shared][]uint64
	for i := range prompts {
		prompts[i] = fresh(5 + rng.IntN(20))
	}
	begin := func() []uint64 {
		if rng.IntN(3) == 0 {
			return prompts[rng.IntN(shared)]
		}
		return fresh(1 + rng.IntN(30))
	}
	t := &trace{name: fmt.Sprintf("made conversations, seed %d", seed)}
	talks := make([][]uint64, open)
	for range requests {
		// The square makes some conversations livelier than others.
		i := rng.IntN(open) * rng.IntN(open) / open
		if len(talks[i]) == 0 || len(talks[i]) > mostPages || rng.IntN(6) == 0 {
			talks[i] = begin()
		}
		talks[i] = append(slices.Clip(talks[i]), fresh(1+rng.IntN(2*turnPages-1))...)
		t.ids = append(t.ids, talks[i])
	}
	t.hash()
	return t
}

// hash makes a 32-byte key of every id. Making keys is not a part of the contest.
func (t *trace) hash() {
	for _, ids := range t.ids {
		keys := make([]key, len(ids))
		for i, id := range ids {
			keys[i] = sha256.Sum256(binary.LittleEndian.AppendUint64(nil, id))
		}
		t.requests = append(t.requests, keys)
	}
}

// longest is the most pages of one request.
func (t *trace) longest() (n int) {
	for _, keys := range t.requests {
		n = max(n, len(keys))
	}
	return n
}
