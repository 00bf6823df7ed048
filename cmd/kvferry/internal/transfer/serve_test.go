package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

// served is a serve that runs in this process, reached by TCP.
type served struct {
	file, key string
	cancel    context.CancelFunc
	log       bytes.Buffer
	lines     chan string // of it, but for those that nobody takes
	over      chan error
}

// startServe serves until its context ends, and returns when the descriptor is there.
func startServe(t *testing.T, change func(*ServeOptions)) *served {
	t.Helper()
	dir := t.TempDir()
	s := &served{file: filepath.Join(dir, "d"), key: filepath.Join(dir, "key"), over: make(chan error, 1), lines: make(chan string, 64)}
	if err := engines.NewKeyFile(s.key); err != nil {
		t.Fatal(err)
	}
	o := DefaultServe()
	o.Pages, o.Layers, o.Descriptor = 6, 2, s.file
	o.Engines = engines.Options{Names: []string{engines.TCP}, KeyFile: s.key}
	if change != nil {
		change(&o)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	log := &Log{W: io.MultiWriter(&s.log, told{s.lines}), JSON: true}
	go func() { s.over <- Serve(ctx, o, io.Discard, io.Discard, log) }()
	select {
	case <-s.lines:
	case err := <-s.over:
		t.Fatalf("serve has ended: %v", err)
	}
	return s
}

// told tells what is written.
type told struct{ to chan<- string }

func (f told) Write(b []byte) (int, error) {
	select {
	case f.to <- string(b):
	default:
	}
	return len(b), nil
}

// events are what it has said, once it is over.
func (s *served) events(t *testing.T) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(s.log.String()) {
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, e)
	}
	return all
}

func (s *served) read() ReadOptions {
	o := DefaultRead()
	o.Descriptor, o.Engines = s.file, engines.Options{Names: []string{engines.TCP}, KeyFile: s.key}
	return o
}

func TestServe_EndsWithItsFirstReader(t *testing.T) {
	s := startServe(t, func(o *ServeOptions) { o.Once, o.Seed, o.Publish = true, 42, 5 })
	defer s.cancel()
	o := s.read()
	o.Repeat = 3
	r, err := Read(t.Context(), o, nil, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-s.over; err != nil {
		t.Error(err)
	}
	if r.Pages != 5 || *r.Seed != 42 || r.Passes != 3 || r.Compared != 3*5*r.PageBytes || r.SumsChecked != 15 || !r.Acknowledged || r.Error != nil {
		t.Errorf("%+v", r)
	}
	all := s.events(t)
	if last := all[len(all)-1]; last["event"] != "ended" || last["acknowledged"] != 1.0 {
		t.Errorf("events %v", all)
	}
}

// TestServe_PublishesAnewBeforeALeaseEnds waits for what the second half of a lease
// brings, and reads by it.
func TestServe_PublishesAnewBeforeALeaseEnds(t *testing.T) {
	s := startServe(t, func(o *ServeOptions) { o.Lease = time.Second })
	r := &readRun{o: s.read()}
	if err := r.o.check(); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.d, err = readDescriptor(t.Context(), s.file, nil); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}()
	if err := r.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	was := r.d
	if err := r.pass(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for r.d == was {
		if err := r.renew(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(r.pass(t.Context(), nil), r.acknowledge(t.Context())); err != nil {
		t.Fatal(err)
	}
	if !r.d.Expires.After(was.Expires) || len(r.before) != 1 || !r.acknowledged {
		t.Errorf("%v after %v, %d before", r.d.Expires, was.Expires, len(r.before))
	}
	s.cancel()
	if err := <-s.over; err != nil { // an end that was asked for is none that failed
		t.Error(err)
	}
	if _, err := os.Stat(s.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its descriptor is still there: %v", err)
	}
}

func TestRead_SaysWhatToDoWithADescriptorThatIsNoGood(t *testing.T) {
	for name, x := range map[string]struct {
		change       func(*transfer.Descriptor)
		kind         fault.Kind
		text, remedy string
	}{
		"a lease that is over": {
			func(d *transfer.Descriptor) { d.Expires = time.Unix(1, 0) }, fault.NotFound, "expired", "copy the descriptor again, or give serve a longer --lease",
		},
		"another's": {
			func(d *transfer.Descriptor) { d.Entity = "an engine" }, fault.Invalid, `"an engine"`, "--verify off",
		},
		"no pages": {
			func(d *transfer.Descriptor) { d.Pages, d.Expires = nil, time.Time{} }, fault.Invalid, "no pages", "kvferry transfer serve",
		},
		"no lease": {
			func(d *transfer.Descriptor) { d.Leases = false }, fault.Unsupported, "promise", "",
		},
		"an engine that is not here": {
			func(d *transfer.Descriptor) { d.Offers[0].Engine = engines.TCP }, fault.Unsupported, `"tcp"`, "kvferry transfer key",
		},
		"an offer that is none": {nil, fault.Unsupported, "by hostipc: ", ""},
	} {
		file := filepath.Join(t.TempDir(), "d")
		if err := os.WriteFile(file, encoded(t, descriptor(t, x.change)), 0o600); err != nil {
			t.Fatal(err)
		}
		o := DefaultRead()
		o.Descriptor = file
		_, err := Read(t.Context(), o, nil, io.Discard)
		if !errors.Is(err, x.kind) || !strings.Contains(err.Error(), x.text) || !strings.Contains(fault.RemedyOf(err), x.remedy) {
			t.Errorf("%s: %v, remedy %q", name, err, fault.RemedyOf(err))
		}
	}
}

// A serve whose folder goes ends, and says so.
func TestServe_EndsWhenItCannotPublishAnew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := startServe(t, func(o *ServeOptions) { o.Lease, o.Descriptor = time.Second, filepath.Join(dir, "d") })
	defer s.cancel()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := <-s.over; !errors.Is(err, fault.Busy) || !strings.Contains(err.Error(), dir) || !strings.Contains(fault.RemedyOf(err), "see whether its folder") {
		t.Errorf("%v, remedy %q", err, fault.RemedyOf(err))
	}
}

// Who has another key is told of, with the time, and doesn't end what is served.
func TestServe_TellsOfReadersThatWereRefused(t *testing.T) {
	s := startServe(t, nil)
	defer s.cancel()
	o := s.read()
	o.Engines.KeyFile += "2"
	if err := engines.NewKeyFile(o.Engines.KeyFile); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(t.Context(), o, nil, io.Discard); !errors.Is(err, fault.Invalid) {
		t.Errorf("a wrong key: %v", err)
	}
	for line := range s.lines { // its owner hears of it a little later
		if strings.Contains(line, "refused") {
			break
		}
	}
	if _, err := Read(t.Context(), s.read(), nil, io.Discard); err != nil {
		t.Error(err)
	}
	s.cancel()
	if err := <-s.over; err != nil {
		t.Error(err)
	}
	var refused []map[string]any
	for _, e := range s.events(t) {
		text, _ := e["time"].(string)
		if at, err := time.Parse(time.RFC3339, text); err != nil || time.Since(at) > time.Hour {
			t.Errorf("event %v: %v", e, err)
		}
		if e["event"] == "refused" {
			refused = append(refused, e)
		}
	}
	if len(refused) != 1 || refused[0]["engine"] != engines.TCP || refused[0]["others"] != 0.0 || !strings.HasPrefix(refused[0]["peer"].(string), "127.0.0.1:") ||
		refused[0]["error"].(map[string]any)["kind"] != "invalid" {
		t.Errorf("refused: %v", refused)
	}
}

func TestServe_EndsWhileItFills(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	o := DefaultServe()
	o.Pages, o.Descriptor, o.Engines.Names = 64, filepath.Join(t.TempDir(), "d"), []string{engines.HostIPC}
	cancel()
	if err := Serve(ctx, o, io.Discard, io.Discard, &Log{W: io.Discard}); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Dir(o.Descriptor)); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestTokens_AreARangeOfWhatIsPublished(t *testing.T) {
	for text, want := range map[string][2]int{"": {0, 40}, "0:40": {0, 40}, "3:4": {3, 4}} {
		o := ReadOptions{Tokens: text}
		if from, to, err := o.tokens(40); err != nil || from != want[0] || to != want[1] {
			t.Errorf("%q: [%d, %d), %v", text, from, to, err)
		}
	}
	for _, text := range []string{"3", ":", "a:b", "3:3", "4:3", "-1:3", "0:41", "1:2:3", "0x1:2"} {
		o := ReadOptions{Tokens: text}
		if _, _, err := o.tokens(40); !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestShellWord(t *testing.T) {
	for word, want := range map[string]string{
		"/run/user/0/kvferry/transfer.kvfd": "/run/user/0/kvferry/transfer.kvfd", "a b": "'a b'", "it's": `'it'\''s'`, "": "''", "$(x)": "'$(x)'",
	} {
		if got := shellWord(word); got != want {
			t.Errorf("%q: %s, want %s", word, got, want)
		}
	}
}

// An owner's first choice that leads nowhere is passed over, and the answer names the one
// that was taken.
func TestRead_NamesTheEngineThatWasUsed(t *testing.T) {
	s := startServe(t, nil)
	defer func() {
		s.cancel()
		if err := <-s.over; err != nil {
			t.Error(err)
		}
	}()
	o := s.read()
	o.Engines.Names = []string{engines.HostIPC, engines.TCP}
	d, err := readDescriptor(t.Context(), s.file, nil)
	if err != nil {
		t.Fatal(err)
	}
	d.Offers = append([]transfer.Offer{{Engine: engines.HostIPC, Data: []byte("nowhere")}}, d.Offers...)
	b, err := d.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	o.Descriptor = filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(o.Descriptor, b, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Read(t.Context(), o, nil, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if r.Engine != engines.TCP {
		t.Errorf("by %s", r.Engine)
	}
}
