package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
	"golang.org/x/sys/unix"
)

var shape = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 24, PageSize: 16, KVHeads: 2, HeadDim: 64}

// modes are where our library runs.
func modes(t *testing.T, test func(t *testing.T, o mooncake.Options)) {
	for name, o := range map[string]mooncake.Options{"child": {}, "in process": {InProcess: true, Stall: time.Second}} {
		t.Run(name, func(t *testing.T) {
			o.Libraries = libraries(t)
			test(t, o)
		})
	}
}

func ids(n int) (pages []page.ID) {
	for i := range n {
		pages = append(pages, page.ID(i))
	}
	return pages
}

// TestPython_ReadsOurPages, and can't write them.
func TestPython_ReadsOurPages(t *testing.T) {
	modes(t, func(t *testing.T, o mooncake.Options) {
		p := startPython(t)
		o.Listen = "127.0.0.1"
		e := must(mooncake.New(o))(t)
		defer func() { noError(t, e.Close()) }()
		g := must(shape.PerLayerPageFirst())(t)
		s := must(transfertest.Serve(transfertest.Side{Engine: e}, g, 5))(t)
		defer func() { noError(t, s.Close()) }()
		d := must(transfer.Decode(must(s.Publish(ids(shape.Pages), false, time.Minute))(t)))(t)
		at := must(mooncake.ParseOffer(d.Offers[0].Data))(t)

		host := must(device.OpenHost(device.HostOptions{}))(t)
		defer func() { noError(t, host.Close()) }()
		image := must(kv.NewCache(g, host))(t)
		defer func() { noError(t, image.Close()) }()
		noError(t, transfertest.Fill(image, 5, ids(shape.Pages)))
		same := func(when string) {
			t.Helper()
			for i, r := range at.Regions {
				want := must(image.Region(i))(t).Bytes()
				var got struct {
					RC  int
					Hex string
				}
				p.do(&got, "read", "peer", at.Segment, "at", r.Base, "n", r.Bytes)
				if b := must(hex.DecodeString(got.Hex))(t); got.RC != 0 || !bytes.Equal(b, want) {
					t.Errorf("%s: region %d: code %d, and the bytes are the same: %t", when, i, got.RC, bytes.Equal(b, want))
				}
			}
		}
		same("at first")
		for _, base := range []uint64{at.Regions[1].Base, at.Words.Base, at.Header} {
			var rc int
			p.do(&rc, "write", "peer", at.Segment, "at", base, "hex", "0102030405060708")
			if rc == 0 {
				t.Errorf("a peer has written to %#x", base)
			}
		}
		same("after it was written to")
		noError(t, s.Stop())
		var got struct{ RC int }
		p.do(&got, "read", "peer", at.Segment, "at", at.Regions[0].Base, "n", 64)
		if got.RC == 0 {
			t.Error("what was withdrawn can be read")
		}
	})
}

// foreign is an owner of another make: it has memory, words and a header.
type foreign struct {
	*python
	d             *transfer.Descriptor
	words, header uint64
	regions       []uint64
}

func newForeign(t *testing.T) *foreign {
	t.Helper()
	f := &foreign{python: startPython(t)}
	g := must(shape.PerLayerPageFirst())(t)
	owner := transfer.NewOwnerID()
	f.words, f.header = f.alloc(4096, 0), f.alloc(4096, 0)
	f.set(f.words, 8, binary.NativeEndian.AppendUint64(nil, 77))
	f.set(f.header, 0, mooncake.AppendHeader(nil, owner))
	o := &mooncake.Offer{
		Owner: owner, Fingerprint: g.Fingerprint(), Segment: f.name, Header: f.header,
		Words: mooncake.Stretch{Base: f.words, Bytes: 4096},
	}
	for i, n := range g.Spec().RegionBytes {
		f.regions = append(f.regions, f.alloc(n, uint64(100+i)))
		o.Regions = append(o.Regions, mooncake.Stretch{Base: f.regions[i], Bytes: n})
	}
	f.d = &transfer.Descriptor{
		Owner: owner, Epoch: transfer.Epoch{Word: 1, Count: 77}, Leases: true, Geometry: g, Pages: ids(shape.Pages),
		Offers: []transfer.Offer{{Engine: mooncake.Name, Data: must(o.AppendBinary(nil))(t)}},
	}
	f.d = must(transfer.Decode(must(f.d.AppendBinary(nil))(t)))(t)
	return f
}

// reader reads from owners into a cache of another form.
type reader struct {
	*transfer.Reader
	testing.TB
	cache, image *kv.Cache // image has what a foreign owner holds, in its form
}

func newReader(t *testing.T, o mooncake.Options) *reader {
	t.Helper()
	r := &reader{TB: t}
	host := must(device.OpenHost(device.HostOptions{}))(t)
	c := shape
	c.Pages = 31
	r.cache = must(kv.NewCache(must(c.LayerMajor())(t), host))(t)
	r.image = must(kv.NewCache(must(shape.PerLayerPageFirst())(t), host))(t)
	for i := range r.image.Geometry().Regions() {
		m := must(r.image.Region(i))(t)
		copy(m.Bytes(), contents(uint64(100+i), m.Size()))
	}
	e := must(mooncake.New(o))(t)
	r.Reader = must(transfer.NewReader(transfer.Options{Cache: r.cache, Device: host, Engines: []transfer.Engine{e}, Deadline: patience}))(t)
	t.Cleanup(func() {
		noError(t, errors.Join(r.Close(), e.Close(), r.image.Close(), r.cache.Close(), host.Close()))
	})
	return r
}

// compare compares pages [0, n) of the owner, read onto pages 5 and up.
func (r *reader) compare(n int) {
	r.Helper()
	for layer := range shape.Layers {
		for i := range n {
			got := must(r.cache.Plane(layer, 0, page.ID(5+i)))(r)
			want := must(r.image.Plane(layer, 0, page.ID(i)))(r)
			if !bytes.Equal(got, want) {
				r.Errorf("layer %d: K of page %d has other bytes", layer, i)
			}
			got, want = must(r.cache.Plane(layer, 1, page.ID(5+i)))(r), must(r.image.Plane(layer, 1, page.ID(i)))(r)
			if !bytes.Equal(got, want) {
				r.Errorf("layer %d: V of page %d has other bytes", layer, i)
			}
		}
	}
}

func (r *reader) read(ctx context.Context, f *foreign, n int) error {
	local := ids(5 + n)[5:]
	return r.Retrieve(ctx, 0, n*shape.PageSize, local, ids(n), f.d)
}

func TestWe_ReadPythonsPages(t *testing.T) {
	modes(t, func(t *testing.T, o mooncake.Options) {
		f, r := newForeign(t), newReader(t, o)
		noError(t, r.read(t.Context(), f, shape.Pages))
		r.compare(shape.Pages)

		f.set(f.words, 8, binary.NativeEndian.AppendUint64(nil, 78))
		if err := r.read(t.Context(), f, 2); !errors.Is(err, fault.NotFound) {
			t.Errorf("its word has moved: error %v, want kind not found", err)
		}
		f.set(f.words, 8, binary.NativeEndian.AppendUint64(nil, 77))
		f.set(f.header, 0, mooncake.AppendHeader(nil, transfer.NewOwnerID()))
		if err := r.read(t.Context(), f, 2); !errors.Is(err, fault.NotFound) {
			t.Errorf("somebody else is there: error %v, want kind not found", err)
		}
		f.set(f.header, 0, mooncake.AppendHeader(nil, f.d.Owner))
		noError(t, r.read(t.Context(), f, 2))
	})
}

func TestWe_WritePythonsPages(t *testing.T) {
	p := startPython(t)
	base := p.alloc(1<<20, 3)
	startWriter(t, order{Libraries: libraries(t), Peer: p.name, At: base + 4096, Seed: 9, Bytes: 300_000})
	var got string
	p.do(&got, "get", "base", base, "off", 0, "n", 1<<20)
	want := contents(3, 1<<20)
	copy(want[4096:], contents(9, 300_000))
	if !bytes.Equal(must(hex.DecodeString(got))(t), want) {
		t.Error("other bytes were written")
	}
}

func TestWe_ReadFromAPythonThatStopsAndDies(t *testing.T) {
	modes(t, func(t *testing.T, o mooncake.Options) {
		f, r := newForeign(t), newReader(t, o)
		noError(t, r.read(t.Context(), f, 1))
		noError(t, f.cmd.Process.Signal(unix.SIGSTOP))
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err := r.read(ctx, f, shape.Pages)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stopped: error %v, want deadline exceeded", err)
		}
		if u, ok := errors.AsType[*transfer.UnfinishedError](err); ok {
			_ = u.Ticket.Wait(t.Context()) // its pages are free from now on
		}
		noError(t, f.cmd.Process.Signal(unix.SIGCONT))
		noError(t, r.read(t.Context(), f, shape.Pages))
		r.compare(shape.Pages)
		noError(t, f.cmd.Process.Signal(unix.SIGKILL))
		if err := r.read(t.Context(), f, 2); fault.KindOf(err) == 0 {
			t.Errorf("killed: error %v, want one with a kind", err)
		}
	})
}
