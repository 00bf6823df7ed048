//go:build !nogpu

package cudaipc

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// descriptors counts those that this process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	return len(must(os.ReadDir("/proc/self/fd"))(t))
}

// TestOpen_HostileGrants has an owner that says what isn't so. Each is refused, and
// nothing of it stays.
func TestOpen_HostileGrants(t *testing.T) {
	c := config{fakedriver.Options{Version: fakedriver.CUDA130}, mappedMemory}
	g := newGround(t, c)
	r := g.reader(t)
	r.engine.pid = 0 // the hostile owner is in this very process
	host := must(device.OpenHost(device.HostOptions{}))(t)
	t.Cleanup(func() { noError(t, host.Close()) })
	words := must(host.Alloc(4096))(t)
	t.Cleanup(func() { noError(t, words.Free()) })
	far := must(shape.LayerMajor())(t)
	addr, free, err := c.memory(r.acc, far.Bytes())
	noError(t, err)
	t.Cleanup(func() { noError(t, free()) })
	pieces, offset, err := r.engine.driver.exportPieces(addr, far.Bytes(), 1)
	noError(t, err)
	wordsFD := must(wordsFile(words))(t)
	t.Cleanup(func() { closeAll([]int{pieces[0].fd, wordsFD}) })
	unsealed := must(unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC))(t)
	t.Cleanup(func() { closeAll([]int{unsealed}) })
	noError(t, unix.Ftruncate(unsealed, 4096))

	d := &transfer.Descriptor{Owner: transfer.NewOwnerID(), Geometry: far, Offers: []transfer.Offer{{}}}
	hello := make(chan handoff.Hello, 1) // of the next connection
	l := must(handoff.Listen(handoff.ListenOptions{Dir: g.dir, Prefix: "cudaipc", Serve: func(ctx context.Context, c *handoff.Conn) {
		if h := <-hello; c.SendHello(ctx, h.Payload, h.Files) == nil {
			_, _ = c.Receive(ctx) // until the reader has left
		}
	}}))(t)
	t.Cleanup(func() { noError(t, l.Close()) })
	d.Offers[0].Data = []byte(l.Name())
	honest := func() *grant {
		return &grant{
			owner: d.Owner, geometry: far.Fingerprint(), wordBytes: 4096, device: idOf(r.acc),
			allocs:  []alloc{{pieces: []int64{pieces[0].bytes}, bytes: pieces[0].bytes}},
			regions: []region{{0, offset}},
		}
	}
	less := *foreignAlloc(r, g.start(t, orders{Kind: plainMemory}).publish())
	end := less.bytes - 512
	less.bytes = maxBytes
	good := []int{wordsFD, pieces[0].fd}
	before, memories := descriptors(t), r.memories()
	for name, x := range map[string]struct {
		kind   fault.Kind
		change func(g *grant)
		bytes  func(b []byte) []byte
		files  []int
	}{
		"owner":               {fault.Invalid, func(g *grant) { g.owner[0]++ }, nil, good},
		"geometry":            {fault.Invalid, func(g *grant) { g.geometry[0]++ }, nil, good},
		"a region too many":   {fault.Invalid, func(g *grant) { g.regions = append(g.regions, region{0, 0}) }, nil, good},
		"no regions":          {fault.Invalid, func(g *grant) { g.regions = nil }, nil, good},
		"a region nowhere":    {fault.Invalid, func(g *grant) { g.regions[0] = region{alloc: noAllocation} }, nil, good},
		"a region elsewhere":  {fault.Invalid, func(g *grant) { g.regions[0].alloc = 1 }, nil, good},
		"a region outside":    {fault.Invalid, func(g *grant) { g.regions[0].offset = g.allocs[0].bytes - 1 }, nil, good},
		"a region behind":     {fault.Invalid, func(g *grant) { g.regions[0].offset = g.allocs[0].bytes + 1 }, nil, good},
		"no piece":            {fault.Invalid, func(g *grant) { g.allocs[0].pieces = []int64{} }, nil, good},
		"an odd piece":        {fault.Invalid, func(g *grant) { g.allocs[0].pieces[0]++ }, nil, good},
		"a larger piece":      {fault.Device, func(g *grant) { g.allocs[0].pieces[0] *= 2 }, nil, good},
		"a huge piece":        {fault.Memory, func(g *grant) { g.allocs[0].pieces[0] = maxBytes }, nil, good},
		"words":               {fault.Invalid, func(g *grant) { g.wordBytes = 8192 }, nil, good},
		"no words":            {fault.Invalid, func(g *grant) { g.wordBytes = 0 }, nil, good},
		"half a word":         {fault.Invalid, func(g *grant) { g.wordBytes = 12 }, nil, good},
		"too many words":      {fault.Invalid, func(g *grant) { g.wordBytes = maxWordBytes + 8 }, nil, good},
		"another device":      {fault.Unsupported, func(g *grant) { g.device.uuid = "GPU-0" }, nil, good},
		"no device":           {fault.Unsupported, func(g *grant) { g.device = deviceID{} }, nil, good},
		"another PCI address": {fault.Unsupported, func(g *grant) { g.device = deviceID{pci: "0000:ff:00.0"} }, nil, good},
		"a handle of nothing": {fault.Device, func(g *grant) { g.allocs[0].pieces = nil }, nil, good[:1]},
		"a handle of less":    {fault.Invalid, func(g *grant) { g.allocs[0], g.regions[0].offset = less, end }, nil, good[:1]},
		"an event of nothing": {fault.Device, func(g *grant) { g.event = new(handle) }, nil, good},
		"no descriptors":      {fault.Invalid, nil, nil, nil},
		"one descriptor":      {fault.Invalid, nil, nil, good[:1]},
		"three descriptors":   {fault.Invalid, nil, nil, append(slices.Clone(good), wordsFD)},
		"words for memory":    {fault.Device, nil, nil, []int{wordsFD, wordsFD}},
		"memory for words":    {fault.Invalid, nil, nil, []int{pieces[0].fd, pieces[0].fd}},
		"words that shrink":   {fault.Invalid, nil, nil, []int{unsealed, pieces[0].fd}},
		"another version":     {fault.Unsupported, nil, func(b []byte) []byte { b[0]++; return b }, good},
		"unknown flags":       {fault.Invalid, nil, func(b []byte) []byte { b[2] |= 2; return b }, good},
		"trailing bytes":      {fault.Invalid, nil, func(b []byte) []byte { return append(b, 0) }, good},
		"half":                {fault.Invalid, nil, func(b []byte) []byte { return b[:len(b)/2] }, good},
		"nothing":             {fault.Invalid, nil, func([]byte) []byte { return nil }, good},
	} {
		h := honest()
		if x.change != nil {
			x.change(h)
		}
		payload := h.encode()
		if x.bytes != nil {
			payload = x.bytes(payload)
		}
		hello <- handoff.Hello{Payload: payload, Files: x.files}
		if _, err := r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data); !errors.Is(err, x.kind) {
			t.Errorf("%s: error %v, want kind %s", name, err, x.kind.Error())
		}
		if n := r.memories(); n != memories {
			t.Errorf("%s: %d memories are open, of %d before", name, n, memories)
		}
	}
	r.fake.Forgive() // the fake has noted what the library was asked for
	for _, offer := range []string{"", "cudaipc", "../../etc/passwd", "cudaipc-" + string(make([]byte, 32)), l.Name() + "/.."} {
		if _, err := r.engine.Open(t.Context(), r.target, d, []byte(offer)); !errors.Is(err, fault.Invalid) {
			t.Errorf("offer %q: %v", offer, err)
		}
	}

	hello <- handoff.Hello{Payload: honest().encode(), Files: good}
	s := must(r.engine.Open(t.Context(), r.target, d, d.Offers[0].Data))(t)
	noError(t, s.Copy(t.Context(), r.stream, plan()))
	noError(t, s.Close())
	r.until("the listener has closed its connections", func() bool { return descriptors(t) <= before })
}

// foreignAlloc returns what the owner of d grants for its first allocation.
func foreignAlloc(r *reader, d *transfer.Descriptor) *alloc {
	r.Helper()
	conn, hello, err := handoff.Dial(r.Context(), string(d.Offers[0].Data), handoff.DialOptions{Dir: r.dir})
	noError(r, err)
	defer hello.Close()
	noError(r, conn.Close())
	return &must(parseGrant(hello.Payload))(r).allocs[0]
}

// TestServe_HostileReaders has readers that say what none says. The owner and its other
// readers are unharmed.
func TestServe_HostileReaders(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	p := r.start(t, orders{})
	d := p.publish()
	s := r.open(d)
	noError(t, s.Join(d.Epoch))
	for _, frames := range [][]handoff.Frame{
		{{Kind: 0}},
		{{Kind: 255, Word: 1<<32 - 1, Count: 1<<64 - 1}},
		{{Kind: recalled}},
		{{Kind: handoff.Leave, Word: d.Epoch.Word, Count: d.Epoch.Count}, {Kind: handoff.Join, Word: 1<<32 - 1}, {Kind: handoff.Join, Count: 1<<64 - 1}, {Kind: 9}},
		{{Kind: handoff.Join, Word: d.Epoch.Word, Count: d.Epoch.Count + 1}, {Kind: handoff.Leave, Word: d.Epoch.Word, Count: d.Epoch.Count + 1}, {Kind: 9}},
	} {
		c, hello, err := handoff.Dial(t.Context(), string(d.Offers[0].Data), handoff.DialOptions{Dir: r.dir})
		noError(t, err)
		hello.Close()
		for _, f := range frames {
			if err := c.Send(f); err != nil && !errors.Is(err, fault.Closed) {
				t.Error(err)
			}
		}
		if _, err := c.Receive(t.Context()); !errors.Is(err, fault.Closed) {
			t.Errorf("%v: the owner says %v, and has not closed the connection", frames, err)
		}
		noError(t, c.Close())
	}
	noError(t, s.Copy(t.Context(), r.stream, plan()))
	if n, err := s.Epoch(t.Context(), d.Epoch.Word); n != d.Epoch.Count || err != nil {
		t.Errorf("the epoch is %d, %v, and not %d", n, err, d.Epoch.Count)
	}
	for _, word := range []uint32{1 << 20, 1 << 31, 1<<32 - 1} {
		if _, err := s.Epoch(t.Context(), word); !errors.Is(err, fault.Invalid) {
			t.Errorf("word %d: %v", word, err)
		}
	}
}

func FuzzGrant(f *testing.F) {
	g := &grant{
		wordBytes: 4096, device: deviceID{"GPU-00000000-0000", "0000:17:00.0"}, event: &handle{1, 2, 3},
		allocs:  []alloc{{handle: handle{5}, bytes: 1 << 20}, {pieces: []int64{2 << 20, 4 << 20}, bytes: 6 << 20}},
		regions: []region{{0, 512}, {alloc: noAllocation}, {1, 3 << 20}},
	}
	f.Add(g.encode())
	f.Add((&grant{wordBytes: 8}).encode())
	d := &transfer.Descriptor{Geometry: must(kv.Config{Layout: kv.NHD, DType: kv.FP8, Layers: 1, Pages: 2, PageSize: 1, KVHeads: 1, HeadDim: 1}.LayerMajor())(f)}
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := parseGrant(b)
		if err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("error %v has no kind", err)
			}
			return
		}
		if again := g.encode(); !slices.Equal(again, b) {
			t.Errorf("%x is written as %x", b, again)
		}
		_ = g.check(d, g.files())
		for i := range g.regions {
			if g.holds(i, 1) == nil && g.allocs[g.regions[i].alloc].bytes <= g.regions[i].offset {
				t.Errorf("region %d holds a byte at %d of %d", i, g.regions[i].offset, g.allocs[g.regions[i].alloc].bytes)
			}
		}
	})
}
