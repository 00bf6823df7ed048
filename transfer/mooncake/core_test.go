package mooncake

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/needtest"
)

// What a request to the strict library does: see testdata/strict.c.
const (
	good uint64 = iota << 32
	failsOnce
	fails
	timesOutFirst
	neverEnds
	refused
	_
	letsGo
)

// strictLibrary makes the library.
func strictLibrary(t *testing.T) (file string) {
	t.Helper()
	if !dl.Enabled {
		t.Skip("built without libraries")
	}
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		needtest.Missing(t, "no C compiler: install gcc and libc6-dev, or set CC")
	}
	file = filepath.Join(t.TempDir(), "libstrict.so") // a new one each time: libraries stay open
	if said, err := exec.CommandContext(t.Context(), cc, "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", file, "testdata/strict.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	return file
}

// strict is a core over the strict library, with one region.
type strict struct {
	*core
	testing.TB
	bytes []byte
	owner uint32
}

func newStrict(t *testing.T) *strict {
	t.Helper()
	file := strictLibrary(t)
	c, err := newCore(config{libraries: []string{file}, metadata: peerToPeer, name: "127.0.0.1:1", protocol: protocolTCP, maxStuck: 2, batch: batchMost})
	if err != nil {
		t.Fatal(err)
	}
	m := pieced(t, 4<<20)
	s := &strict{core: c, TB: t, bytes: m.Bytes()}
	if err := c.add(1, &region{base: m.Base(), bytes: m.Size()}, false); err != nil {
		t.Fatal(err)
	}
	if s.owner, err = c.open("127.0.0.1:15001"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close) // which the library refuses when a batch is left
	return s
}

// requests are n of that kind, of so many bytes each, one behind the other.
func requests(does uint64, n, bytes int) (all []request) {
	for i := range n {
		all = append(all, request{region: 1, bytes: uint32(bytes), local: uint64(i * bytes), remote: does + uint64(i*bytes) + 3})
	}
	return all
}

func (s *strict) check(n int) {
	s.Helper()
	for i, b := range s.bytes[:n] {
		if b != byte(i+3) {
			s.Fatalf("byte %d is %d", i, b)
		}
	}
}

func TestCore_ReadsInBatches(t *testing.T) {
	s := newStrict(t)
	var readers sync.WaitGroup
	for range 8 {
		readers.Go(func() {
			if err := s.read(nil, s.owner, requests(good, 1000, 64)); err != nil {
				t.Error(err)
			}
		})
	}
	readers.Wait()
	s.check(64_000)
}

func TestCore_WaitsForWhatTimedOut(t *testing.T) {
	s := newStrict(t)
	if err := s.read(nil, s.owner, requests(timesOutFirst, 300, 64)); err != nil {
		t.Error(err)
	}
	s.check(300 * 64)
}

func TestCore_TriesSmallRequestsAgain(t *testing.T) {
	s := newStrict(t)
	mixed := requests(good, 10, 64)
	for i := range 5 {
		mixed[2*i].remote += failsOnce
	}
	if err := s.read(nil, s.owner, mixed); err != nil {
		t.Errorf("some fail once: %v", err)
	}
	s.check(640)
	for name, x := range map[string][]request{
		"all fail":          requests(fails, 10, 64),
		"some fail always":  append(requests(good, 10, 64), requests(fails, 1, 64)...),
		"large ones":        append(requests(good, 1, smallBytes+1), requests(failsOnce+1, 1, smallBytes+1)...),
		"refused":           requests(refused, 5, 64),
		"refused half-way":  append(requests(good, 5, 64), requests(refused, 5, 64)...),
		"outside of region": {{region: 1, bytes: 64, local: 4<<20 - 63, remote: 1}},
		"far outside":       {{region: 1, bytes: 64, local: 1<<64 - 1, remote: 1}},
		"no such region":    {{region: 2, bytes: 64, remote: 1}},
		"nothing":           {{region: 1, remote: 1}},
		"too much":          {{region: 1, bytes: sliceBytes + 1, remote: 1}},
	} {
		err := s.read(nil, s.owner, x)
		if !errors.Is(err, fault.Device) && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind device or invalid", name, err)
		}
	}
	if err := s.read(nil, 7, requests(good, 1, 64)); !errors.Is(err, fault.NotFound) {
		t.Errorf("no such owner: error %v, want kind not found", err)
	}
}

// A read that was given up is not over before the library has done with it, and keeps
// others from an owner of which too many are.
func TestCore_GivenUpIsNotOver(t *testing.T) {
	s := newStrict(t)
	stop := make(chan struct{})
	outcomes := make(chan error, 2)
	for range 2 {
		go func() { outcomes <- s.read(stop, s.owner, requests(neverEnds, 500, 64)) }()
	}
	owner := s.segments[0]
	wait := func(what string, done func() bool) {
		t.Helper()
		for limit := time.Now().Add(30 * time.Second); !done(); nap(time.Millisecond) {
			if time.Now().After(limit) {
				t.Fatal("waited in vain for ", what)
			}
		}
	}
	wait("their batches", func() bool { return len(owner.slots) == 2*batchesRead })
	close(stop)
	wait("them to count as stuck", func() bool { return owner.refuse(2) != nil })
	select {
	case err := <-outcomes:
		t.Fatalf("a read is over, error %v, and its requests are not", err)
	default:
	}
	if err := s.read(nil, s.owner, requests(good, 1, 64)); !errors.Is(err, fault.Busy) {
		t.Errorf("one more: error %v, want kind busy", err)
	}
	if _, err := s.open("127.0.0.1:15001"); !errors.Is(err, fault.Busy) {
		t.Errorf("opened again: error %v, want kind busy", err)
	}
	// What never ends ends when anybody reads that.
	if err := s.run(nil, owner, requests(letsGo, 1, 64), nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-outcomes; !errors.Is(err, fault.Busy) {
			t.Errorf("error %v, want kind busy", err)
		}
	}
	if err := s.read(nil, s.owner, requests(good, 1, 64)); err != nil {
		t.Errorf("when they are over: %v", err)
	}
}

func TestCore_Words(t *testing.T) {
	s := newStrict(t)
	var got [12]byte
	if err := s.words(nil, s.owner, []word{{remote: 0x10, bytes: 8}, {remote: 0x40, bytes: 4}}, got[:]); err != nil {
		t.Fatal(err)
	}
	want := []byte{0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x40, 0x41, 0x42, 0x43}
	if !slices.Equal(got[:], want) {
		t.Errorf("%x, want %x", got, want)
	}
	if err := s.words(nil, s.owner, []word{{remote: fails, bytes: 8}}, got[:8]); !errors.Is(err, fault.Device) {
		t.Errorf("error %v, want kind device", err)
	}
	if err := s.words(nil, s.owner, []word{{remote: 1, bytes: 8}}, got[:9]); !errors.Is(err, fault.Invalid) {
		t.Errorf("too much room: error %v, want kind invalid", err)
	}
}

func TestCore_Regions(t *testing.T) {
	s := newStrict(t)
	if err := s.add(1, &region{}, false); !errors.Is(err, fault.Exists) {
		t.Errorf("a number twice: error %v, want kind exists", err)
	}
	if err := s.remove(9); !errors.Is(err, fault.NotFound) {
		t.Errorf("no such region: error %v, want kind not found", err)
	}
	if err := s.remove(1); err != nil { // what is not registered is not unregistered
		t.Error(err)
	}
	if err := s.read(nil, s.owner, requests(good, 1, 64)); !errors.Is(err, fault.Invalid) {
		t.Errorf("a region that was removed: error %v, want kind invalid", err)
	}
}

// silentChild is a child that reads nothing and says nothing, until theirs, its end of the
// socket, is closed.
func silentChild(t *testing.T, patience time.Duration) (c *child, theirs []int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours := os.NewFile(uintptr(fds[0]), "child")
	conn, err := net.FileConn(ours)
	if err := errors.Join(err, ours.Close()); err != nil {
		t.Fatal(err)
	}
	c = &child{
		cmd: exec.CommandContext(t.Context(), "sleep", "100"), conn: conn.(*net.UnixConn), patience: patience,
		said: &tail{}, out: make(chan struct{}, 1), calls: map[uint64]chan *frame{}, gone: make(chan struct{}),
	}
	started := make(chan error)
	go c.live(started)
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	return c, fds[1:]
}

// A child that has gone says itself how: that it can't be told anything is no reason.
func TestChild_SaysHowItEndedToWhoCallsIt(t *testing.T) {
	for range 10 {
		c, theirs := silentChild(t, time.Second)
		closeAll(theirs)
		err := c.remove(t.Context(), 1)
		if !strings.Contains(err.Error(), "signal: killed") || !c.crashed {
			t.Errorf("error %v, crashed %t: want how it ended", err, c.crashed)
		}
	}
}

// A child that takes no frames doesn't keep who calls it beyond the end of its context.
func TestChild_CallsEndWithTheirContextWhenNothingIsTaken(t *testing.T) {
	c, theirs := silentChild(t, time.Hour)
	var callers sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 1000 { // more than the socket holds
		callers.Go(func() {
			if _, err := c.call(ctx, &frame{kind: openCall, text: strings.Repeat("x", maxText)}, nil); !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want canceled", err)
			}
		})
	}
	for full := time.Now().Add(30 * time.Second); len(c.out) == 0; nap(time.Millisecond) {
		if time.Now().After(full) {
			t.Fatal("the socket takes everything")
		}
	}
	cancel()
	callers.Wait()
	closeAll(theirs)
	c.end("")
}

// Who looks at a word of an owner that stands still, and gives up, leaves nothing behind
// that would end the child in the end.
func TestChild_WordsThatAreGivenUp(t *testing.T) {
	o, err := withDefaults(Options{Libraries: []string{strictLibrary(t)}, MaxStuck: 3})
	if err != nil {
		t.Fatal(err)
	}
	c, err := startChild(t.Context(), &o, purpose{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	owner, err := c.open(t.Context(), "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		var callers sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		var got [100][8]byte
		for i := range got {
			callers.Go(func() {
				err := c.words(ctx, owner, []word{{remote: neverEnds, bytes: 8}}, got[i][:])
				if !errors.Is(err, context.Canceled) && !errors.Is(err, fault.Busy) {
					t.Errorf("error %v, want canceled or kind busy", err)
				}
			})
		}
		// An answer to this one says that the child has seen those before it.
		if _, err := c.open(t.Context(), "127.0.0.1:15002"); err != nil && !errors.Is(err, fault.Busy) {
			t.Error(err)
		}
		cancel()
		callers.Wait()
	}
	for limit := time.Now().Add(30 * time.Second); ; nap(time.Millisecond) {
		var got [8]byte
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		err := c.words(ctx, owner, []word{{remote: neverEnds, bytes: 8}}, got[:])
		cancel()
		if errors.Is(err, fault.Busy) {
			break
		}
		if !errors.Is(err, context.DeadlineExceeded) || time.Now().After(limit) {
			t.Fatalf("error %v, want kind busy", err)
		}
	}
}
