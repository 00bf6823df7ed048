package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
)

func TestExplain_SaysWhoseFaultItIs(t *testing.T) {
	gone := fault.New(fault.NotFound, "owner", "has closed").Hint("ask it to publish again")
	key := fault.New(fault.Invalid, "key", "differs").Hint("give both sides the same key file")
	refused := fault.Wrap(fault.NotFound, "owner", unix.ECONNREFUSED).Hint("see")
	socket := fault.Wrap(fault.NotFound, "socket", unix.ENOENT).Hint("its owner has closed")
	library := fault.New(fault.NotFound, "", "lib.so: cannot open")
	for name, tc := range map[string]struct {
		opened string
		failed []failedOpen
		lease  time.Duration
		err    error
		peer   bool
		kind   fault.Kind
		remedy string // how it begins
	}{
		"a lease that is over":       {err: gone, lease: -time.Hour, peer: true, kind: fault.NotFound, remedy: copyAgain},
		"an end while it is read":    {opened: engines.TCP, err: gone, peer: true, kind: fault.NotFound, remedy: "is kvferry transfer serve still running? If it is, " + copyAgain},
		"an owner that has gone":     {failed: []failedOpen{{engines.TCP, gone}}, err: gone, peer: true, kind: fault.NotFound, remedy: stillRunning},
		"gone between two passes":    {opened: engines.TCP, failed: []failedOpen{{engines.TCP, refused}}, err: refused, peer: true, kind: fault.NotFound, remedy: "is kvferry transfer serve still running, and"},
		"a wrong key":                {failed: []failedOpen{{engines.TCP, key}}, err: key, kind: fault.Invalid, remedy: "give both sides"},
		"a wrong key, another host":  {failed: []failedOpen{{engines.HostIPC, socket}, {engines.TCP, key}}, err: fault.Wrap(fault.NotFound, "", fmt.Errorf("%w; by tcp: %w", socket, key)), kind: fault.Invalid, remedy: "give both sides"},
		"the same, in another order": {failed: []failedOpen{{engines.TCP, key}, {engines.HostIPC, socket}}, err: key, kind: fault.Invalid, remedy: "give both sides"},
		"another directory":          {failed: []failedOpen{{engines.HostIPC, socket}}, err: socket, peer: true, kind: fault.NotFound, remedy: "its owner has closed (XDG_RUNTIME_DIR)"},
		"too many readers":           {failed: []failedOpen{{engines.TCP, fault.New(fault.Full, "owner", "full")}}, err: fault.New(fault.Full, "owner", "full"), peer: true, kind: fault.Full, remedy: "try again"},
		"no way to it":               {err: fault.New(fault.Device, "owner", "unreachable").Hint("see"), peer: true, kind: fault.Device, remedy: "see"},
		"too slow":                   {opened: engines.TCP, err: fault.Wrap(fault.Busy, "read", context.DeadlineExceeded).Hint("more: Options.Deadline"), peer: true, kind: fault.Busy, remedy: "the owner, or what is between, is slower than --deadline 30s"},
		"too slow, after another":    {failed: []failedOpen{{engines.HostIPC, socket}}, err: fault.Wrap(fault.Busy, "read", context.DeadlineExceeded), peer: true, kind: fault.Busy, remedy: "the owner, or what is between, is slower"},
		"no answer":                  {err: fault.New(fault.Busy, "handshake", "not over"), peer: true, kind: fault.Busy, remedy: "the owner, or what is between, doesn't answer"},
		"closed":                     {err: fault.New(fault.Closed, "owner", "closed"), peer: true, kind: fault.Closed},
		"no memory":                  {err: fault.New(fault.Memory, "map", "none").Hint("ulimit"), kind: fault.Memory, remedy: "ulimit"},
		"wrong bytes":                {opened: engines.TCP, err: fault.New(fault.Corrupt, "page 1", "sum").Hint("again"), kind: fault.Corrupt, remedy: "again"},
		"a library that is no good":  {failed: []failedOpen{{engines.Mooncake, library}}, err: library, kind: fault.NotFound, remedy: "give --mooncake-library"},
		"an interruption":            {err: fault.Wrap(fault.Busy, "read", context.Canceled), kind: fault.Busy},
	} {
		x, err := accel.Open(t.Context(), "", accel.Options{})
		if err != nil {
			t.Fatal(err)
		}
		set, err := engines.Open(t.Context(), engines.Options{Names: []string{engines.HostIPC, engines.Mooncake}, Mooncake: []string{"lib.so"}}, engines.Reader, x)
		if err != nil {
			t.Fatal(err)
		}
		r := &readRun{o: DefaultRead(), d: descriptor(t, nil), engines: set, opened: x}
		if tc.lease != 0 {
			r.d.Expires = time.Now().Add(tc.lease)
		}
		if tc.opened != "" {
			r.opens.add(tc.opened, nil)
		}
		for _, f := range tc.failed {
			r.opens.add(f.engine, f.err)
		}
		got := r.explain(tc.err)
		_, peer := errors.AsType[*PeerError](got)
		hint := fault.RemedyOf(got)
		if peer != tc.peer || fault.KindOf(got) != tc.kind || !strings.HasPrefix(hint, tc.remedy) || (hint == "") != (tc.remedy == "") {
			t.Errorf("%s: another's %v, kind %v, remedy %q", name, peer, fault.KindOf(got), hint)
		}
		if !strings.Contains(got.Error(), tc.err.Error()) {
			t.Errorf("%s: %q is lost in %q", name, tc.err, got)
		}
		if err := errors.Join(set.Close(), x.Close()); err != nil {
			t.Error(err)
		}
	}
}

func TestExplainSeed_OnlyWhereTheTwoDiffer(t *testing.T) {
	bad := fault.New(fault.Corrupt, "page 1", "wrong").Hint("report it")
	five, seven := uint64(5), uint64(7)
	r := &readRun{d: descriptor(t, nil)} // of seed 5
	for _, tc := range []struct {
		seed *uint64
		want string
	}{{nil, "report it"}, {&five, "report it"}, {&seven, "--seed says 7, the descriptor says 5: leave --seed out"}} {
		r.o.Seed = tc.seed
		err := r.explainSeed(bad)
		if got := fault.RemedyOf(err); got != tc.want || fault.KindOf(err) != fault.Corrupt {
			t.Errorf("%v: %q", err, got)
		}
	}
	if err := r.explainSeed(nil); err != nil {
		t.Error(err)
	}
}

func TestRead_TellsOfEveryFailure(t *testing.T) {
	file := filepath.Join(t.TempDir(), "d")
	if err := os.WriteFile(file, encoded(t, descriptor(t, nil)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*ReadOptions){
		"a bad option":          func(o *ReadOptions) { o.Repeat = 0 },
		"no descriptor":         func(o *ReadOptions) { o.Descriptor = file + "2" },
		"a bad range":           func(o *ReadOptions) { o.Tokens = "9:8" },
		"no such device":        func(o *ReadOptions) { o.Device = "abacus:1" },
		"no such engine":        func(o *ReadOptions) { o.Engines.Names = []string{"pigeon"} },
		"an owner that is none": func(*ReadOptions) {},
	} {
		o := DefaultRead()
		o.Descriptor = file
		change(&o)
		x, err := Read(t.Context(), o, nil, io.Discard)
		if err == nil || x == nil || x.Error == nil || x.Error.Message != err.Error() || x.Error.Hint != fault.RemedyOf(err) || x.Error.Kind != fault.KindOf(err).Error() {
			t.Errorf("%s: %v, %+v", name, err, x)
			continue
		}
		var b bytes.Buffer
		if err := x.WriteJSON(&b); err != nil || !strings.Contains(b.String(), `"error": {`) {
			t.Errorf("%s: %v\n%s", name, err, &b)
		}
	}
}

func TestUnreadable_NamesTheRights(t *testing.T) {
	file := filepath.Join(t.TempDir(), "d")
	if err := os.WriteFile(file, nil, 0o640); err != nil {
		t.Fatal(err)
	}
	denied := &fs.PathError{Op: "open", Path: file, Err: unix.EACCES}
	err := unreadable(file, denied)
	for _, want := range []string{"has the rights 0640", fmt.Sprintf("belongs to user %d", os.Geteuid()), file} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %q", want, err)
		}
	}
	for _, err := range []error{err, unreadable(file+"2", denied)} {
		if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.RemedyOf(err), "let this user read it") {
			t.Errorf("%v, remedy %q", err, fault.RemedyOf(err))
		}
	}
	if err := unreadable(file, fs.ErrNotExist); !errors.Is(err, fault.NotFound) {
		t.Error(err)
	}
}

func TestRefusals_AreTakenFromALogger(t *testing.T) {
	c := make(refusals, 1)
	logger := slog.New(c)
	logger.Info("of no interest")
	for range 2 { // the second one is lost
		logger.With(slog.Int("a", 1)).WithGroup("g").Warn("a reader was refused", slog.String("peer", "1.2.3.4:5"), slog.Any("error", io.EOF), slog.Int("others", 3))
	}
	r := <-c
	if len(c) != 0 || r.engine != engines.TCP || r.peer != "1.2.3.4:5" || !errors.Is(r.err, io.EOF) || r.others != 3 {
		t.Errorf("%+v", r)
	}
	var b bytes.Buffer
	l := &Log{W: &b}
	l.Refused(r)
	l.Refused(refusal{engine: "tcp", peer: "p", err: errors.New("a\x1b[31m\nb")})
	text := b.String()
	for _, want := range []string{
		"  tcp: a reader at 1.2.3.4:5 was refused: it ended the connection (and 3 others before it)\n", "  tcp: a reader at p was refused: a [31m b\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
}

func TestStarted_SaysWhatAnotherHostNeeds(t *testing.T) {
	for _, tc := range []struct {
		far   []string
		flags []string
		want  string
	}{
		{nil, nil, ""},
		{[]string{engines.TCP}, []string{"--key-file key"}, "On another host, with a copy of the descriptor (good for 1m0s at most: --lease) and of the key:\n  kvferry transfer read --descriptor d --key-file key\n"},
		{[]string{engines.Mooncake}, []string{"--mooncake-library l.so"}, "On another host, with a copy of the descriptor (good for 1m0s at most: --lease) and Mooncake's library:\n  kvferry transfer read --descriptor d --mooncake-library l.so\n"},
	} {
		var b bytes.Buffer
		l := &Log{W: &b}
		l.Started(Started{LeaseSeconds: 60, Descriptor: "/run/d", far: tc.far, farFlags: tc.flags})
		if text := b.String(); !strings.Contains(text, tc.want) || strings.Contains(text, "another host,") != (tc.want != "") {
			t.Errorf("%q: %s", tc.far, text)
		}
	}
}
