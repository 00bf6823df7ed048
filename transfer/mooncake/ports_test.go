package mooncake_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// ports returns the TCP ports that a process listens on.
func ports(tb testing.TB, pid int) (found []int) {
	tb.Helper()
	inodes := map[string]int{}
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		for line := range strings.Lines(string(must(os.ReadFile(name))(tb))) {
			f := strings.Fields(line) // number, local, remote, state, …, inode
			if len(f) < 10 || f[3] != "0A" {
				continue
			}
			_, port, _ := strings.Cut(f[1], ":")
			inodes["socket:["+f[9]+"]"] = int(must(strconv.ParseUint(port, 16, 16))(tb))
		}
	}
	for _, fd := range must(filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)))(tb) {
		if to, err := os.Readlink(fd); err == nil && inodes[to] != 0 {
			found = append(found, inodes[to])
		}
	}
	return found
}

// reached says whether a connection is accepted at that address. One that should not be
// is not waited for.
func reached(host string, port int, want bool) bool {
	limit := 100 * time.Millisecond
	if want {
		limit = patience
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

// An owner is reached at the address that was named, and a reader nowhere, whatever the
// library listens on.
func TestChild_IsReachedWhereItWasNamed(t *testing.T) {
	leavesNothing(t)
	o := startOwner(t, "child") // at 127.0.0.1
	b := newBench(t, mooncake.Options{})
	b.readsAgain(o.d)
	owners, readers := ports(t, child(t, o.cmd.Process.Pid)), ports(t, child(t, os.Getpid()))
	if len(owners) < 2 || len(readers) < 2 {
		t.Fatalf("the owner listens on %v, the reader on %v: the library has two ports", owners, readers)
	}
	for _, host := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		for _, port := range owners {
			if want := host == "127.0.0.1"; reached(host, port, want) != want {
				t.Errorf("the owner is reached at %s port %d: %t, want %t", host, port, !want, want)
			}
		}
		for _, port := range readers {
			if reached(host, port, false) {
				t.Errorf("the reader is reached at %s port %d", host, port)
			}
		}
	}
}

// metadata is an HTTP server of Mooncake's metadata: keys and values.
func metadata(t *testing.T) (url string) {
	t.Helper()
	var mu sync.Mutex
	values := map[string][]byte{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		key := r.URL.Query().Get("key")
		switch r.Method {
		case http.MethodGet:
			v, ok := values[key]
			if !ok {
				w.WriteHeader(http.StatusNotFound)
			}
			_, _ = w.Write(v)
		case http.MethodPut:
			values[key], _ = io.ReadAll(r.Body)
		case http.MethodDelete:
			delete(values, key)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL + "/metadata"
}

func TestEngine_FindsOwnersByAServer(t *testing.T) {
	leavesNothing(t)
	need(t)
	for _, inside := range []bool{false, true} {
		o := mooncake.Options{Metadata: metadata(t), InProcess: inside}
		owners := must(side(o))(t)
		c := big
		c.Pages = 8
		served := must(transfertest.Serve(owners, must(c.PageMajor())(t), bigSeed))(t)
		d := must(transfer.Decode(must(served.Publish(ids(0, c.Pages), true, time.Minute))(t)))(t)
		if at := must(mooncake.ParseOffer(d.Offers[0].Data))(t); !strings.HasPrefix(at.Segment, "kvferry-") {
			t.Errorf("the owner is called %q", at.Segment)
		}
		b := newBench(t, o)
		b.readsAgain(d)
		noError(t, errors.Join(served.Close(), owners.Engine.Close()))
	}
}

// An owner is read at any address of its host, of either family.
func TestEngine_ListensWhereItIsTold(t *testing.T) {
	leavesNothing(t)
	libraries := need(t)
	c := big
	c.Pages = 8
	b := newBench(t, mooncake.Options{})
	for _, listen := range []string{"127.0.0.2", "::1"} {
		e := must(mooncake.New(mooncake.Options{Libraries: libraries, Listen: listen}))(t)
		served := must(transfertest.Serve(transfertest.Side{Engine: e}, must(c.PageMajor())(t), bigSeed))(t)
		d := must(transfer.Decode(must(served.Publish(ids(0, c.Pages), true, time.Minute))(t)))(t)
		b.readsAgain(d)
		noError(t, errors.Join(served.Close(), e.Close()))
	}
}

// A read costs this process some allocations for every frame of requests, and none for a page.
func TestChild_AllocatesNothingForAPage(t *testing.T) {
	if raced {
		t.Skip("sync.Pool forgets with the race detector")
	}
	leavesNothing(t)
	o := startOwner(t, "child")
	b := newBench(t, mooncake.Options{})
	var counts []float64
	for _, n := range []int{2, 120} { // of 8 requests each
		counts = append(counts, testing.AllocsPerRun(5, func() {
			noError(t, b.reader.Retrieve(context.Background(), 0, n*big.PageSize, ids(0, n), ids(0, n), o.d))
		}))
	}
	if slices.Max(counts) > slices.Min(counts)+10 {
		t.Errorf("%v allocations for 2 and 120 pages", counts)
	}
}
