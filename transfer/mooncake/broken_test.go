package mooncake_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

// brokenVariable has a child do something else than its parent wants: its value says what.
const brokenVariable = "KVFERRY_MOONCAKE_BROKEN"

// misbehave is a child that is none.
func misbehave(how string) error {
	c, err := net.FileConn(os.NewFile(3, "parent"))
	if err != nil {
		return err
	}
	conn := c.(*net.UnixConn)
	defer runtime.KeepAlive(conn) // or it would be closed
	packet := make([]byte, 1<<17)
	if _, err := conn.Read(packet); err != nil { // the call that starts it
		return err
	}
	send := func(b []byte, fds ...int) {
		_, _, err := conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
		if err != nil {
			fmt.Fprintln(os.Stderr, "can't send:", err)
		}
	}
	frame := func(kind byte, call uint64, body string) []byte {
		return append(binary.LittleEndian.AppendUint64([]byte{'K', 'V', 'M', 'C', 1, kind, 0, 0}, call), body...)
	}
	const good, bad = 8, 9
	call := binary.LittleEndian.Uint64(packet[8:])
	switch how {
	case "garbage":
		send([]byte(strings.Repeat("garbage ", 10)))
	case "huge":
		send(frame(good, call, strings.Repeat("x", 100_000)))
	case "a byte":
		send([]byte{0})
	case "short":
		send(frame(good, call, "")[:15])
	case "another version":
		b := frame(good, call, "")
		b[4] = 2
		send(b)
	case "a call":
		send(frame(1, call, ""))
	case "no name":
		send(frame(good, call, "\xff"))
	case "a bad answer":
		send(frame(bad, call, "\x63\x00\x00\x00\x00\x00\x00"))
	case "closes its socket":
		_ = unix.Close(3)
		_ = conn.Close()
	case "leaves its socket to another":
		other := exec.CommandContext(context.Background(), "sleep", "100")
		f, err := conn.File()
		if err != nil {
			return err
		}
		other.ExtraFiles, other.Stderr = []*os.File{f}, os.Stderr
		if err := other.Start(); err != nil {
			return err
		}
		os.Exit(3) //nolint:forbidigo // as a program that doesn't know the verb
	case "talks":
		for range 2000 {
			fmt.Fprint(os.Stderr, strings.Repeat("noise without an end ", 100))
		}
		os.Exit(4) //nolint:forbidigo // as above
	case "answers what nobody asked":
		for i := range uint64(100) {
			send(frame(good, call+1+i, "x"), 1, 2)
		}
	}
	if how == "answers what nobody asked" {
		os.Exit(5) //nolint:forbidigo // as above
	}
	select {} // it lives on
}

// fds returns how many descriptors this process has.
func fds(tb testing.TB) int {
	tb.Helper()
	return len(must(filepath.Glob("/proc/self/fd/*"))(tb))
}

// A child that is broken costs a named failure, and leaves nothing: no process, no
// descriptor, and nobody waits for it.
func TestChild_IsBroken(t *testing.T) {
	leavesNothing(t)
	before := 0
	for how, want := range map[string]string{
		"garbage":                      "killed: it sent what is no frame",
		"huge":                         "killed: it sent what is no frame",
		"a byte":                       "killed: it sent what is no frame",
		"short":                        "killed: it sent what is no frame",
		"another version":              "version 2, and this build knows 1",
		"a call":                       "killed: it sent",
		"no name":                      "that are none of its name",
		"a bad answer":                 "killed: it sent what is no frame",
		"closes its socket":            "signal: killed",
		"leaves its socket to another": "exit status 3",
		"talks":                        "exit status 4; it said last:\n",
		"answers what nobody asked":    "exit status 5",
	} {
		t.Setenv(brokenVariable, how)
		_, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{"x.so"}})
		if fault.KindOf(err) == 0 || !strings.Contains(err.Error(), want) || len(err.Error()) > 10_000 {
			t.Errorf("%s: error %.500v, want one with a kind and %q", how, err, want)
		}
		if n := fds(t); before == 0 {
			before = n
		} else if n > before {
			t.Errorf("%s: %d descriptors more", how, n-before)
		}
	}
}

// somewhere is a descriptor and an offer that nobody has made.
func somewhere(tb testing.TB) (*transfer.Descriptor, []byte) {
	tb.Helper()
	g := must(big.PageMajor())(tb)
	d := &transfer.Descriptor{Owner: transfer.NewOwnerID(), Geometry: g}
	o := &mooncake.Offer{Owner: d.Owner, Fingerprint: g.Fingerprint(), Segment: "127.0.0.1:1", Header: 4096, Words: mooncake.Stretch{Base: 8192, Bytes: 64}}
	for i, n := range g.Spec().RegionBytes {
		o.Regions = append(o.Regions, mooncake.Stretch{Base: uint64(i+1) << 36, Bytes: n})
	}
	return d, must(o.AppendBinary(nil))(tb)
}

// Whoever opens an owner goes when its own time is over, whatever others of its engine
// wait for: a library that takes its time, for offers or in this process.
func TestOpen_EndsWithItsContextWhateverOthersStart(t *testing.T) {
	leavesNothing(t)
	for _, inside := range []bool{false, true} {
		go1 := filepath.Join(t.TempDir(), "go")
		file := compile(t, fmt.Sprintf(`#include <unistd.h>
__attribute__((constructor)) static void f(void) { while (access("%s", F_OK)) usleep(1000); }`, go1))
		b := newBench(t, mooncake.Options{})
		e := must(mooncake.New(mooncake.Options{Libraries: []string{file}, InProcess: inside, Listen: "127.0.0.1"}))(t)
		var offers sync.WaitGroup
		offers.Go(func() {
			if _, _, err := e.Offer(transfer.Export{Cache: b.cache}); !errors.Is(err, fault.Unsupported) {
				t.Errorf("offer: error %v, want kind unsupported: it is no library of Mooncake's", err)
			}
		})
		if !inside {
			waitFor(t, "a child", func() bool { return len(children(t, os.Getpid())) == 1 })
		}
		d, offer := somewhere(t)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		returned := make(chan error, 1)
		go func() {
			_, err := e.Open(ctx, transfer.Target{Cache: b.cache}, d, offer)
			returned <- err
		}()
		hang := time.AfterFunc(patience/3, func() { _ = os.WriteFile(go1, nil, 0o600) })
		err := <-returned
		if !hang.Stop() {
			t.Errorf("in process %t: it waited for the library", inside)
		}
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, fault.Busy) {
			t.Errorf("in process %t: error %v, want kind busy, deadline exceeded", inside, err)
		}
		noError(t, os.WriteFile(go1, nil, 0o600))
		offers.Wait()
		noError(t, e.Close())
	}
}

// The kernel takes a child for orphaned when the thread ends that started it. Threads of
// Go end with goroutines that stay locked to them.
func TestChild_OutlivesThreads(t *testing.T) {
	leavesNothing(t)
	libraries := need(t)
	b := newBench(t, mooncake.Options{})
	words := must(b.cache.Region(0))(t)
	engines := make([]*mooncake.Engine, 8)
	offer := func(e *mooncake.Engine) {
		_, withdraw, err := e.Offer(transfer.Export{Cache: b.cache, Words: words})
		if err != nil {
			t.Error(err)
			return
		}
		withdraw()
	}
	var starts sync.WaitGroup
	for i := range engines { // from several threads
		engines[i] = must(mooncake.New(mooncake.Options{Libraries: libraries, Listen: "127.0.0.1"}))(t)
		defer func() { noError(t, engines[i].Close()) }()
		starts.Go(func() { offer(engines[i]) })
	}
	starts.Wait()
	before := children(t, os.Getpid())
	var locked, over sync.WaitGroup
	end := make(chan struct{})
	for range 64 { // more than there are
		locked.Add(1)
		over.Go(func() {
			runtime.LockOSThread()
			locked.Done()
			<-end
		})
	}
	locked.Wait()
	close(end)
	over.Wait()
	for _, e := range engines {
		offer(e)
	}
	after := children(t, os.Getpid())
	slices.Sort(before)
	slices.Sort(after)
	if len(before) != len(engines) || !slices.Equal(before, after) {
		t.Errorf("children were %v, and are %v", before, after)
	}
}

// An executable may be replaced while it runs: its children are what it is.
func TestChild_OfAnExecutableThatIsGone(t *testing.T) {
	leavesNothing(t)
	o := startOwner(t, "removed")
	newBench(t, mooncake.Options{}).readsAgain(o.d)
}

// The library ends its process when somebody else takes a port that it had found free.
func TestCheck_TriesAgainWhenAPortWasTaken(t *testing.T) {
	leavesNothing(t)
	for name, x := range map[string]struct{ once, want string }{
		"once":   {"O_EXCL", "can't be made"}, // what this library says the second time
		"always": {"0", "bind: Address already in use"},
	} {
		been := filepath.Join(t.TempDir(), "been")
		file := compile(t, mark+functions+fmt.Sprintf(`#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
F(installTransport)
void *createTransferEngine(void) {
	if (open("%s", O_CREAT | %s, 0600) < 0) return 0;
	fputs("what():  bind: Address already in use\n", stderr);
	abort();
}`, been, x.once))
		_, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{file}})
		if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: error %v, want kind device and %q", name, err, x.want)
		}
	}
}

// Nobody is quicker than an engine of kvferry's but other programs. Without turns this
// library ends its process.
func TestEngines_LookForPortsInTurns(t *testing.T) {
	leavesNothing(t)
	file := compile(t, mark+functions+fmt.Sprintf(`#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
static const char *busy = "%s";
void *createTransferEngine(void) {
	if (open(busy, O_CREAT | O_EXCL, 0600) < 0) abort();
	usleep(20000);
	return (void *)busy;
}
void *installTransport(void) { unlink(busy); return 0; }`, filepath.Join(t.TempDir(), "busy")))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			_, err := mooncake.Check(t.Context(), mooncake.Options{Libraries: []string{file}})
			if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "transport tcp can't be installed") {
				t.Errorf("error %v, want what this library says when it is alone", err)
			}
		})
	}
	all.Wait()
}

func TestOffer_ListensAtAnAddressOfThisHostOnly(t *testing.T) {
	leavesNothing(t)
	b := newBench(t, mooncake.Options{})
	e := must(mooncake.New(mooncake.Options{Libraries: need(t), Listen: "192.0.2.7"}))(t) // nobody's: RFC 5737
	defer func() { noError(t, e.Close()) }()
	if _, _, err := e.Offer(transfer.Export{Cache: b.cache}); !errors.Is(err, fault.Invalid) || fault.RemedyOf(err) == "" {
		t.Errorf("error %v, want kind invalid and a remedy", err)
	}
}
