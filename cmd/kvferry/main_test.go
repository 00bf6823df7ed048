package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/transfer"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/needtest"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kvferry": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// The race detector sleeps for a second at the end of each process.
			env.Vars = append(env.Vars, "GORACE=atexit_sleep_ms=10")
			return runtimeDir(env)
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"await":  await,
			"break":  breakFile,
			"status": status,
		},
	})
}

// runtimeDir gives a script a directory for sockets, whose paths must be short.
func runtimeDir(env *testscript.Env) error {
	dir, err := os.MkdirTemp("", "kvferry-script-")
	if err != nil {
		return err
	}
	env.Vars = append(env.Vars, "XDG_RUNTIME_DIR="+dir)
	env.Defer(func() { _ = os.RemoveAll(dir) })
	return nil
}

// TestScripts_OnMooncake runs the command with the real library of Mooncake, in $MOONCAKE.
func TestScripts_OnMooncake(t *testing.T) {
	vendor := os.Getenv("KVFERRY_VENDOR")
	if vendor == "" {
		vendor = filepath.Join("..", "..", ".vendor")
	}
	files, err := os.ReadFile(filepath.Join(vendor, "mooncake", "libraries"))
	if err != nil {
		needtest.Missing(t, "Mooncake's library is missing: e2e/fetch fetches it: "+err.Error())
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/mooncake",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			env.Vars = append(env.Vars, "GORACE=atexit_sleep_ms=10", "MOONCAKE="+strings.Join(strings.Fields(string(files)), ","))
			return runtimeDir(env)
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){"await": await, "killchild": killChild, "status": status},
	})
}

// await waits until there is a file, which a command in the background makes, and, if a
// second one is named, until it is no copy of that. How long is only the test's patience.
func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: await file [old]")
	}
	name := ts.MkAbs(args[0])
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(time.Minute)
	for {
		text, err := os.ReadFile(name)
		if err == nil && (len(args) == 1 || string(text) != ts.ReadFile(args[1])) {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			ts.Fatalf("%s is not there, or what it was", name)
		}
	}
}

// killChild kills the processes that have Mooncake's library for this script.
func killChild(ts *testscript.TestScript, neg bool, args []string) {
	dirs, err := filepath.Glob("/proc/[0-9]*/cwd")
	ts.Check(err)
	killed := 0
	for _, dir := range dirs {
		at, err := os.Readlink(dir)
		line, err2 := os.ReadFile(filepath.Join(filepath.Dir(dir), "cmdline"))
		if err != nil || err2 != nil || at != ts.MkAbs(".") || !strings.HasSuffix(string(line), "\x00"+mooncake.Verb+"\x00") {
			continue // it has ended, or is something else
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		ts.Check(err)
		ts.Check(unix.Kill(pid, unix.SIGKILL))
		killed++
	}
	if neg || len(args) != 0 || killed == 0 {
		ts.Fatalf("usage: killchild, when there is one")
	}
}

// breakFile flips a bit in the middle of a file.
func breakFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: break file")
	}
	b := []byte(ts.ReadFile(args[0]))
	b[len(b)/2] ^= 4
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), b, 0o600))
}

// TestScripts_OnFakes runs the command on fake devices, whose libraries are $CUDA, $HIP
// and so on. The fakes fail the test for what was done wrong to them, and for what was
// left behind.
func TestScripts_OnFakes(t *testing.T) {
	if !dl.Enabled {
		t.Skip("built without devices")
	}
	libraries := map[string]string{}
	libraries["CUDA"], libraries["CUDART"] = fakedriver.Build(t, fakedriver.Options{})
	for name, o := range map[string]fakedriver.Options{
		"CUDA124": {Version: fakedriver.CUDA124}, "CUDA128": {Version: fakedriver.CUDA128},
		"HIP": {Vendor: fakedriver.HIP}, "HIP64": {Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}, "HIP72": {Vendor: fakedriver.HIP, Version: fakedriver.ROCm72},
	} {
		libraries[name], _ = fakedriver.Build(t, o)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/device",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			o := fakedriver.Options{Delay: -1}
			switch filepath.Base(env.WorkDir) {
			case "script-pageable":
				o.AllowPageable, o.Settings = true, map[string]string{"register_code": "801"} // as under confidential computing
			case "script-lost":
				o.AllowViolations, o.AllowLeaks = true, true // of a device that is lost nothing is given back
			}
			env.Vars = append(env.Vars, "GORACE=atexit_sleep_ms=10")
			env.Vars = append(env.Vars, fakedriver.Env(t, o)...)
			for name, path := range libraries {
				env.Vars = append(env.Vars, name+"="+path)
			}
			return runtimeDir(env)
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){"await": await, "status": status},
	})
}

// status runs a command and checks its exit status: status 2 kvferry replay x. Where it
// depends on the machine it is any.
func status(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status code command [args...]")
	}
	got := "0"
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		got = strings.TrimPrefix(err.Error(), "exit status ")
	}
	if got != args[0] && args[0] != "any" {
		ts.Fatalf("exit status %s, want %s", got, args[0])
	}
}

func TestExitStatus_FollowsTheKindOfTheError(t *testing.T) {
	want := map[fault.Kind]int{
		fault.Corrupt: 1, fault.Invalid: 2, fault.NotFound: 2, fault.Exists: 2, fault.Unsupported: 2,
		fault.Memory: 3, fault.Full: 3, fault.Device: 4, fault.Busy: 5, fault.Closed: 5,
	}
	for kind := fault.Invalid; kind <= fault.Closed; kind++ {
		for _, err := range []error{
			fault.New(kind, "page 3", "bad"),
			fmt.Errorf("replay: %w", fault.New(kind, "page 3", "bad")),
			errors.Join(fault.New(kind, "page 3", "bad"), errors.New("and more")),
		} {
			if got := exitStatus(err); got != want[kind] {
				t.Errorf("%v: %d, want %d", kind, got, want[kind])
			}
		}
	}
	for err, want := range map[error]int{nil: 0, errors.New("disk full"): 5, fmt.Errorf("request 3: %w", context.Canceled): 130} {
		if got := exitStatus(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
}

// What is another process's fault has a status of its own, whatever its kind; a wrong byte
// is said all the same.
func TestExitStatus_OfAnotherProcess(t *testing.T) {
	for kind := fault.Invalid; kind <= fault.Closed; kind++ {
		err := fmt.Errorf("acknowledgement: %w", &transfer.PeerError{Err: fault.New(kind, "owner", "gone").Hint("try again")})
		want := exitPeer
		if kind == fault.Corrupt {
			want = exitWrongByte
		}
		if got := exitStatus(err); got != want {
			t.Errorf("%v: %d, want %d", kind, got, want)
		}
		if hint := fault.RemedyOf(err); hint != "try again" {
			t.Errorf("%v: remedy %q", kind, hint)
		}
	}
	if got := exitStatus(&transfer.PeerError{Err: fault.Wrap(fault.Busy, "read", context.Canceled)}); got != exitInterrupt {
		t.Errorf("interrupted: %d", got)
	}
}

func TestReport_SaysOfAnInterruptionNoMore(t *testing.T) {
	stopped := fmt.Errorf("request 3: %w", context.Canceled)
	wrong := fault.New(fault.Corrupt, "page 3", "bad").Hint("look")
	for _, tc := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{stopped, "kvferry: error: interrupted\n"},
		{errors.Join(stopped, fault.New(fault.Device, "cuda:0", "gone").Hint("wait")), "kvferry: error: interrupted\n"},
		{wrong, "kvferry: error: page 3: bad\nkvferry: hint: look\n"},
		{fault.New(fault.NotFound, "a\x1b[31mb\r", "gone"), `kvferry: error: a\x1b[31mb\x0d: gone` + "\n"},
		{errors.Join(wrong, stopped), "kvferry: error: page 3: bad\nrequest 3: context canceled\nkvferry: hint: look\n"},
	} {
		var b bytes.Buffer
		if report(&b, tc.err); b.String() != tc.want {
			t.Errorf("%v: %q, want %q", tc.err, b.String(), tc.want)
		}
	}
}

func TestHelp_EveryExitStatusIsListed(t *testing.T) {
	long := newExitTopic().Long
	for _, code := range []int{exitOK, exitWrongByte, exitUsage, exitMemory, exitDevice, exitOther, exitPeer, exitInterrupt} {
		if !strings.Contains(long, fmt.Sprintf("\n  %-4d ", code)) {
			t.Errorf("%d is not listed", code)
		}
	}
}

func TestHelp_EveryVerbHasAnExampleThatItsFlagsAllow(t *testing.T) {
	withHelp := func() *cobra.Command {
		root := newRoot()
		root.InitDefaultHelpCmd() // as Execute does
		return root
	}
	root := withHelp()
	for _, cmd := range commandsOf(root) {
		if !cmd.Runnable() {
			continue // a help topic
		}
		if cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			// What follows two blanks is a remark.
			line, _, _ := strings.Cut(strings.TrimSpace(line), "  ")
			args := strings.Fields(line)
			if args[0] != "kvferry" {
				t.Errorf("%q does not run kvferry", line)
			}
			verb, rest, err := withHelp().Find(args[1:])
			if err != nil || verb.Name() == "kvferry" {
				t.Errorf("%q: no such verb (%v)", line, err)
				continue
			}
			if err := verb.ParseFlags(rest); err != nil {
				t.Errorf("%q: %v", line, err)
			}
		}
	}
}

func TestBind_EveryOptionHasOneNameEverywhere(t *testing.T) {
	for _, tc := range []struct{ flag, env string }{{"host-pages", "KVFERRY_HOST_PAGES"}, {"json", "KVFERRY_JSON"}} {
		if got := envName(tc.flag); got != tc.env {
			t.Errorf("%s: %s, want %s", tc.flag, got, tc.env)
		}
	}
	known := strings.Join(optionsOf(newRoot()), " ")
	const want = "allocations arrangement bookkeeping checks clock compare config copier cuda-library cudart-library deadline descriptor device device-pages dtype engine head-dim hip-library host-pages json key-file kv-heads " +
		"latent-dim layers layout lease listen model mooncake-library mooncake-listen once page-size pages publish repeat requests row-bytes runs seed size sweep threads tiers tls tokens trace verify"
	if known != want {
		t.Errorf("options are\n%s, want\n%s", known, want)
	}
}

func TestBind_FlagThenEnvironmentThenFile(t *testing.T) {
	file := t.TempDir() + "/kvferry.toml"
	writeFile(t, file, "page-size = 16\nhost-pages = 17\nseed = 18\nbookkeeping = true\n")
	root := newRoot()
	replay, _, err := root.Find([]string{"replay"})
	if err != nil {
		t.Fatal(err)
	}
	if err := replay.ParseFlags([]string{"--page-size", "64", "--tiers", "inclusive"}); err != nil {
		t.Fatal(err)
	}
	env := []string{"KVFERRY_CONFIG=" + file, "KVFERRY_PAGE_SIZE=32", "KVFERRY_HOST_PAGES=33", "KVFERRY_TRACE=", "HOME=/"}
	got := valuesAfterBind(t, replay, env)
	want := map[string]string{"page-size": "64", "host-pages": "33", "seed": "18", "bookkeeping": "true", "tiers": "inclusive", "trace": ""}
	for name, v := range want {
		if got[name] != v {
			t.Errorf("%s is %q, want %q", name, got[name], v)
		}
	}
}

func TestVersion_SaysWhatTheBuildKnows(t *testing.T) {
	full := versionOf(&debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
	}})
	full.Go, full.OS, full.Arch = "go1.26", "linux", "arm64"
	if got, want := full.String(), "kvferry v1.2.3, revision 0123456789ab and changes, 2026-01-02T03:04:05Z, go1.26 linux/arm64"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	none := versionOf(nil)
	none.Go, none.OS, none.Arch = "go1.26", "linux", "arm64"
	if got, want := none.String(), "kvferry devel, go1.26 linux/arm64"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var b bytes.Buffer
	if err := full.write(&b, true); err != nil || !strings.Contains(b.String(), `"revision": "0123456789abcdef"`) {
		t.Errorf("%s %v", b.String(), err)
	}
}

// valuesAfterBind returns the values of all flags as text.
func valuesAfterBind(t *testing.T, cmd *cobra.Command, env []string) map[string]string {
	t.Helper()
	if err := bind(cmd, env); err != nil {
		t.Fatal(err)
	}
	values := map[string]string{}
	cmd.Flags().VisitAll(func(f *pflag.Flag) { values[f.Name] = f.Value.String() })
	return values
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestColours_OnlyOnATerminalThatWantsThem(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		needtest.Missing(t, fmt.Sprintf("this machine has no pseudo-terminals: %v", err))
	}
	defer func() { _ = terminal.Close() }()
	file, err := os.Create(t.TempDir() + "/answer")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for _, tc := range []struct {
		w    io.Writer
		env  map[string]string
		want bool
	}{
		{terminal, nil, true},
		{terminal, map[string]string{"NO_COLOR": "", "TERM": "xterm"}, true},
		{terminal, map[string]string{"NO_COLOR": "1"}, false},
		{terminal, map[string]string{"TERM": "dumb"}, false},
		{file, nil, false},
		{&bytes.Buffer{}, nil, false},
	} {
		if got := colours(tc.w, func(name string) string { return tc.env[name] }); got != tc.want {
			t.Errorf("%T with %v: %v", tc.w, tc.env, got)
		}
	}
}
