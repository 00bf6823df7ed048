package mooncake_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/needtest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

func TestCheck_TellsTheReleaseAndTheName(t *testing.T) {
	leavesNothing(t)
	for _, inside := range []bool{false, true} {
		r, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: need(t), InProcess: inside})
		if err != nil || r.Release != "0.3.13 or later" || !strings.HasPrefix(r.Name, "127.0.0.1:") {
			t.Errorf("in process %t: %+v, error %v", inside, r, err)
		}
	}
}

// compile makes a library of C.
func compile(tb testing.TB, source string) string {
	tb.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		needtest.Missing(tb, "no C compiler: install gcc and libc6-dev, or set CC")
	}
	dir := tb.TempDir()
	in, out := filepath.Join(dir, "lib.c"), filepath.Join(dir, "lib.so")
	noError(tb, os.WriteFile(in, []byte(source), 0o666))
	if said, err := exec.CommandContext(tb.Context(), cc, "-fPIC", "-shared", "-o", out, in).CombinedOutput(); err != nil {
		tb.Fatalf("%v\n%s", err, said)
	}
	return out
}

// The functions that a library must have, for those that stand in for it.
const functions = `
#define F(name) void *name(void) { return 0; }
F(destroyTransferEngine) F(getLocalIpAndPort) F(uninstallTransport) F(openSegment) F(openSegmentNoCache)
F(closeSegment) F(removeLocalSegment) F(syncSegmentCache) F(registerLocalMemory) F(unregisterLocalMemory)
F(registerLocalMemoryBatch) F(unregisterLocalMemoryBatch) F(allocateBatchID) F(submitTransfer) F(getTransferStatus)
F(freeBatchID) F(showLinks)
`

const mark = `const char *mark(void) { return "MC_TCP_PROGRESS_TIMEOUT_SEC"; }` + "\n"

func TestCheck_SaysWhatIsInTheWay(t *testing.T) {
	leavesNothing(t)
	for _, x := range []struct {
		name, source, file string
		kind               fault.Kind
		want               string
	}{
		{name: "missing", file: "/nowhere/libtransfer_engine.so", kind: fault.NotFound, want: "/nowhere/libtransfer_engine.so"},
		{name: "something else", file: "libm.so.6", kind: fault.Unsupported, want: "libm.so.6: is not Mooncake's transfer engine: it has no function createTransferEngine"},
		{name: "an old release", source: functions + "F(createTransferEngine) F(installTransport)", kind: fault.Unsupported, want: "is of release 0.3.12, and 0.3.13 is needed"},
		{name: "no engine", source: mark + functions + "F(createTransferEngine) F(installTransport)", kind: fault.Device, want: "can't be made"},
		{
			name:   "no transport",
			source: mark + functions + "void *createTransferEngine(void) { return (void *)8; } F(installTransport)",
			kind:   fault.Device, want: "transport tcp can't be installed",
		},
		{
			name:   "dies when it is opened",
			source: "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { fprintf(stderr, \"first\\nthat was my last word\\n\"); _Exit(7); }",
			kind:   fault.Device, want: "exit status 7; it said last:\nfirst\nthat was my last word",
		},
		{
			name:   "crashes when it is used",
			source: mark + functions + "#include <stdlib.h>\n#include <unistd.h>\nvoid *createTransferEngine(void) { write(2, \"cannot go on\\n\", 13); kill(getpid(), 9); return 0; } F(installTransport)\nint kill(int, int);",
			kind:   fault.Device, want: "signal: killed; it said last:\ncannot go on",
		},
		{
			name:   "aborts",
			source: mark + functions + "#include <stdlib.h>\nvoid *createTransferEngine(void) { abort(); } F(installTransport)",
			kind:   fault.Device, want: "SIGABRT",
		},
	} {
		t.Run(x.name, func(t *testing.T) {
			file := x.file
			if x.source != "" {
				file = compile(t, x.source)
			}
			_, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{file}})
			if !errors.Is(err, x.kind) || !strings.Contains(err.Error(), x.want) {
				t.Errorf("error %v, want kind %s and %q", err, x.kind.Error(), x.want)
			}
		})
	}
}

func TestCheck_SaysThatTheExecutableIsNone(t *testing.T) {
	leavesNothing(t)
	for exe, want := range map[string]fault.Kind{"/nowhere/kvferry": fault.NotFound, "/bin/true": fault.Device, "/bin/cat": fault.Device} {
		_, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{"x.so"}, Executable: exe})
		if !errors.Is(err, want) || fault.RemedyOf(err) == "" {
			t.Errorf("%s: error %v, want kind %s and a remedy", exe, err, want.Error())
		}
	}
}

// A program that doesn't know the verb does what it always does: it must not start itself
// again and again.
func TestCheck_StartsNoChildOfAChild(t *testing.T) {
	t.Setenv("KVFERRY_MOONCAKE_CHILD", "1")
	if _, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{"x.so"}}); !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
		t.Errorf("error %v, want kind unsupported and a remedy", err)
	}
}

// A library that never answers is left at the end of the context, with its process.
func TestCheck_EndsWithItsContext(t *testing.T) {
	leavesNothing(t)
	file := compile(t, "#include <unistd.h>\n__attribute__((constructor)) static void f(void) { for (;;) pause(); }")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := mooncake.Check(ctx, mooncake.Options{Libraries: []string{file}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want deadline exceeded", err)
	}
}

// warnings collects what is logged.
type warnings struct {
	slog.Handler
	texts *[]string
}

func (w warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (w warnings) Handle(_ context.Context, r slog.Record) error {
	*w.texts = append(*w.texts, r.Message)
	return nil
}

func TestOffer_OnlyWhenAskedAndWithAWarning(t *testing.T) {
	leavesNothing(t)
	libraries := need(t)
	host := must(device.OpenHost(device.HostOptions{}))(t)
	defer func() { noError(t, host.Close()) }()
	c := big
	c.Pages = 2
	g := must(c.PageMajor())(t)
	cache := must(kv.NewCache(g, host))(t)
	defer func() { noError(t, cache.Close()) }()
	wrapped := must(kv.Wrap(g, []*device.Memory{device.WrapHost(make([]byte, g.Bytes()))}))(t)
	words := must(host.Alloc(4096))(t)
	defer func() { noError(t, words.Free()) }()
	for _, inside := range []bool{false, true} {
		var said []string
		o := mooncake.Options{Libraries: libraries, InProcess: inside, Log: slog.New(warnings{texts: &said})}
		quiet := must(mooncake.New(o))(t)
		if offer, withdraw, err := quiet.Offer(transfer.Export{Cache: cache, Words: words}); offer != nil || withdraw != nil || err != nil || len(said) > 0 {
			t.Errorf("without Listen it offers %d bytes, error %v, and says %q", len(offer), err, said)
		}
		o.Listen = "127.0.0.1"
		e := must(mooncake.New(o))(t)
		offer, withdraw, err := e.Offer(transfer.Export{Cache: cache, Words: words})
		noError(t, err)
		if len(offer) == 0 || len(said) != 1 || !strings.Contains(said[0], "whoever reaches these ports") {
			t.Errorf("it offers %d bytes, and says %q", len(offer), said)
		}
		withdraw()
		if _, _, err := e.Offer(transfer.Export{Cache: wrapped, Words: words}); !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
			t.Errorf("memory that can't be shared: error %v, want kind unsupported and a remedy", err)
		}
		noError(t, errors.Join(quiet.Close(), e.Close(), e.Close()))
		if _, _, err := e.Offer(transfer.Export{Cache: cache, Words: words}); !errors.Is(err, fault.Closed) {
			t.Errorf("closed: error %v, want kind closed", err)
		}
	}
}

// Children that die again and again are started less often, and nobody waits for it.
func TestOpen_BacksOff(t *testing.T) {
	leavesNothing(t)
	e := must(mooncake.New(mooncake.Options{Libraries: []string{"/nowhere/lib.so"}, Listen: "127.0.0.1"}))(t)
	defer func() { noError(t, e.Close()) }()
	var errs []string
	for range 3 {
		_, _, err := e.Offer(transfer.Export{})
		if !errors.Is(err, fault.NotFound) {
			t.Errorf("error %v, want kind not found", err)
		}
		errs = append(errs, fmt.Sprint(err))
	}
	if errs[0] != errs[1] || !strings.HasPrefix(errs[2], "mooncake: not started again so soon: ") {
		t.Errorf("errors %q", errs)
	}
}
