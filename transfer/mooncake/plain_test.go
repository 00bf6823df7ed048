package mooncake

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
)

func TestEnviron_ForcesAndClears(t *testing.T) {
	o, err := withDefaults(Options{Libraries: []string{"x"}, Listen: "192.0.2.7", Stall: 3400 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	got := environ([]string{"HOME=/h", "MC_FORCE_TCP=0", "MC_USE_TENT=1", "MC_TCP_PROTO=1", "MC_GID_INDEX=3", "MC_TCP_SLICE_SIZE=5", "MC_USE_IPV6=1"}, &o, false)
	want := []string{
		"HOME=/h", "MC_GID_INDEX=3", "MC_FORCE_TCP=1", "MC_LOG_LEVEL=WARNING", "MC_TCP_BIND_ADDRESS=192.0.2.7",
		"MC_TCP_ENABLE_CONNECTION_POOL=1", "MC_TCP_LANES_PER_PEER=8", "MC_TCP_PROGRESS_TIMEOUT_SEC=3", "MC_TCP_SLICE_SIZE=1048576", "MC_TCP_STATUS_TIMEOUT_SEC=3",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	o.Protocol = protocolRDMA
	if got := environ([]string{"MC_FORCE_TCP=1", "MC_LOG_LEVEL=INFO"}, &o, true); slices.Contains(got, "MC_FORCE_TCP=1") || !slices.Contains(got, "MC_LOG_LEVEL=INFO") || !slices.Contains(got, "MC_USE_IPV6=1") {
		t.Errorf("with rdma, IPv6 and a log level of the site's: %v", got)
	}
}

// A scheme that reaches the library can end the process.
func TestCheckMetadata(t *testing.T) {
	for s, good := range map[string]bool{
		"P2PHANDSHAKE": true, "http://host:8080/metadata": true, "https://[fd00::1]/m": true,
		"": false, "p2phandshake": false, "etcd://127.0.0.1:2379": false, "redis://h": false, "127.0.0.1:2379": false,
		"http://": false, "file:///x": false, "http://a b": false, "http://a\n": false, "http://" + strings.Repeat("a", maxMetadata): false,
	} {
		if err := checkMetadata(s); good != (err == nil) || !good && !errors.Is(err, fault.Invalid) {
			t.Errorf("%.40q: error %v", s, err)
		}
	}
}

func TestCheckSegment(t *testing.T) {
	for s, good := range map[string]bool{
		"127.0.0.1:15000": true, "[::1]:15000": true, "node-3.example:1": true, "[fe80::1%eth0]:5": true,
		"": false, "127.0.0.1": false, "127.0.0.1:0": false, "127.0.0.1:65536": false, "127.0.0.1:": false, ":15000": false,
		"a b:1": false, "a/b:1": false, "-a:1": false, "a\x00:1": false, strings.Repeat("a", 300) + ":1": false, "a:+1": false,
		"[fe80::1%a\nb]:5": false, "[fe80::1%a\x00]:5": false, "[fe80::1%]:5": false,
	} {
		if err := checkSegment(s, peerToPeer); good != (err == nil) || !good && !errors.Is(err, fault.Invalid) {
			t.Errorf("%.40q: error %v", s, err)
		}
	}
	for s, good := range map[string]bool{"kvferry-12ab": true, "prefill.0": true, "a/../b": false, "": false, "a?key=b": false, "a%2fb": false} {
		if err := checkSegment(s, "http://m"); good != (err == nil) {
			t.Errorf("by a server, %.40q: error %v", s, err)
		}
	}
}

func TestWithPort(t *testing.T) {
	for _, x := range []struct{ name, told, want string }{
		{"127.0.0.1:12345", "127.0.0.1:15001", "127.0.0.1:15001"},
		{"[fd00::2]:12345", "fd00::2:16039", "[fd00::2]:16039"},
		{"127.0.0.1:12345", "10.0.0.1:1", "127.0.0.1:1"},
		{"127.0.0.1:12345", "nothing", ""},
		{"127.0.0.1:12345", "host:", ""},
		{"127.0.0.1:12345", "host:0", ""},
		{"127.0.0.1:12345", "host:70000", ""},
	} {
		got, err := withPort(x.name, x.told)
		if got != x.want || (err == nil) != (x.want != "") {
			t.Errorf("%q told %q: %q, error %v", x.name, x.told, got, err)
		}
	}
}

func TestNew_RefusesOptions(t *testing.T) {
	files := []string{"lib.so"}
	for name, o := range map[string]Options{
		"no library":       {},
		"an empty library": {Libraries: []string{"a", ""}},
		"all addresses":    {Libraries: files, Listen: "0.0.0.0"},
		"all, of IPv4":     {Libraries: files, Listen: "::ffff:0.0.0.0"},
		"a group":          {Libraries: files, Listen: "224.0.0.1"},
		"a long library":   {Libraries: []string{strings.Repeat("a", maxText)}},
		"long libraries":   {Libraries: slices.Repeat([]string{strings.Repeat("a", 1<<10)}, 33)},
		"a name":           {Libraries: files, Listen: "localhost"},
		"a port":           {Libraries: files, Listen: "127.0.0.1:80"},
		"etcd":             {Libraries: files, Metadata: "etcd://a"},
		"stall":            {Libraries: files, Stall: time.Millisecond},
		"patience":         {Libraries: files, Patience: -1},
		"stuck":            {Libraries: files, MaxStuck: -1},
		"ascend":           {Libraries: files, Protocol: "ascend"},
	} {
		if _, err := New(o); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}

// Requests, taken apart, are the rows: none is lost, none is longer than a slice, and
// rows that follow each other on both sides are one.
func TestAppendRow_MergesAndCuts(t *testing.T) {
	seeds := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var requests []request
		var want [][2]uint64 // bytes, by both addresses
		local, remote, most := uint64(0), uint64(1<<40), 0
		for range 1 + seeds.IntN(5) {
			if seeds.IntN(2) == 0 {
				local += uint64(seeds.IntN(2) * 64)
				remote += uint64(seeds.IntN(2) * 64)
				most++
			}
			width := uint64(1+seeds.IntN(48)) << 15
			requests = appendRow(requests, 1, local, remote, width)
			for i := uint64(0); i < width; i += 1 << 15 {
				want = append(want, [2]uint64{local + i, remote + i})
			}
			local, remote, most = local+width, remote+width, most+int(width/sliceBytes)+1
		}
		var got [][2]uint64
		for i, q := range requests {
			if q.bytes == 0 || q.bytes > sliceBytes {
				t.Fatalf("a request of %d bytes", q.bytes)
			}
			if i > 0 && requests[i-1].bytes < sliceBytes && requests[i-1].local+uint64(requests[i-1].bytes) == q.local &&
				requests[i-1].remote+uint64(requests[i-1].bytes) == q.remote {
				t.Fatalf("%v and %v are one", requests[i-1], q)
			}
			for j := uint64(0); j < uint64(q.bytes); j += 1 << 15 {
				got = append(got, [2]uint64{q.local + j, q.remote + j})
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
	}
	if got := appendRow(appendRow(nil, 1, 0, 0, 8), 2, 8, 8, 8); len(got) != 2 {
		t.Errorf("two regions are one request: %v", got)
	}
}

func TestStarts_WaitLongerAndLonger(t *testing.T) {
	var s starts
	now := time.Now()
	dead := fault.New(fault.Device, "child", "died").Hint("look")
	s.failed("a", dead, now)
	if err := s.wait("a", now); err != nil {
		t.Errorf("after the first: %v", err)
	}
	for _, ms := range []int{100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000} {
		s.failed("a", dead, now)
		want := time.Duration(ms) * time.Millisecond
		early := s.wait("a", now.Add(want-1))
		if !errors.Is(early, fault.Device) || !errors.Is(early, error(dead)) || !strings.Contains(fault.RemedyOf(early), "look; or wait") {
			t.Errorf("before %v: error %v, remedy %q", want, early, fault.RemedyOf(early))
		}
		if err := s.wait("a", now.Add(want)); err != nil {
			t.Errorf("after %v: %v", want, err)
		}
	}
	for _, other := range []string{"", "b"} {
		if err := s.wait(other, now); err != nil {
			t.Errorf("%q waits for another: %v", other, err)
		}
	}
	s.over(nil, "a", true)
	if err := s.wait("a", now); err != nil {
		t.Errorf("after one that worked: %v", err)
	}
	for i := range 3 * maxFailures { // names come from outside
		s.failed("", dead, now)
		s.failed(strconv.Itoa(i), dead, now.Add(time.Duration(i)))
	}
	if len(s.of) > maxFailures || s.of[""] == nil || s.of[strconv.Itoa(3*maxFailures-1)] == nil {
		t.Errorf("%d owners are remembered", len(s.of))
	}
}

// A turn that nobody ends is waited for no longer than is said.
func TestTurn_IsWaitedForInVain(*testing.T) {
	defer turn(turnLimit)()
	turn(time.Millisecond)()
}

// What is sent to another address of the host does not arrive.
func TestFence(t *testing.T) {
	listen := func() (net.Listener, string) {
		var c net.ListenConfig
		c.SetMultipathTCP(false)                     // as C programs
		l, err := c.Listen(t.Context(), "tcp", ":0") // all addresses, of both families
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return l, port
	}
	// What is dropped has no answer: it is waited for as long as nobody minds.
	dial := func(host, port string, comes bool) (net.Conn, error) {
		limit := 100 * time.Millisecond
		if comes {
			limit = 30 * time.Second
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
	}
	hosts := []string{"127.0.0.1", "127.0.0.2", "::1"}
	for _, fenced := range []string{"none", "127.0.0.1", "127.0.0.2", "::1", ""} {
		_, port := listen()
		if fenced != "none" {
			addr, _ := netip.ParseAddr(fenced) // the zero address of ""
			if err := fence(addr); err != nil {
				t.Fatal(err)
			}
		}
		for _, host := range hosts {
			want := fenced == "none" || fenced == host
			c, err := dial(host, port, want)
			if err == nil {
				_ = c.Close()
			}
			if want != (err == nil) {
				t.Errorf("fenced to %q, reached at %s: error %v", fenced, host, err)
			}
		}
	}

	// A connection that was there before is cut off.
	l, port := listen()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
		}
	}()
	c, err := dial("127.0.0.1", port, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	s := <-accepted
	defer func() { _ = s.Close() }()
	if err := fence(netip.MustParseAddr("127.0.0.2")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := s.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes came through", n)
	}
}
