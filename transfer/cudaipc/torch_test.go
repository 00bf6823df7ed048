//go:build !nogpu

package cudaipc

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/kv"
)

// expandable is a handle of an expandable segment, as torch writes it.
func expandable(version byte, pid int32, pieces []piece) []byte {
	le := binary.LittleEndian
	b := []byte{version, torchExpandable}
	b = le.AppendUint32(b, uint32(pid))
	b = le.AppendUint32(b, 0)
	b = le.AppendUint64(b, uint64(pieces[0].bytes))
	b = le.AppendUint64(b, uint64(len(pieces)))
	for _, p := range pieces {
		b = le.AppendUint32(b, uint32(p.fd))
	}
	return b
}

// shared returns the tensor of an owner.
func (p *owner) shared() Tensor {
	p.Helper()
	return *must(ParseTensor([]byte(p.ask("tensor"))))(p)
}

func (p *owner) pidfd() int {
	p.Helper()
	fd := must(unix.PidfdOpen(p.cmd.Process.Pid, 0))(p)
	p.Cleanup(func() { closeAll([]int{fd}) })
	return fd
}

// wantTensor opens a tensor and reads all of it.
func (r *reader) wantTensor(t Tensor, pidfd int) {
	r.Helper()
	g := must(shape.LayerMajor())(r)
	o := must(OpenTensors(r.Context(), r.acc, g, []Tensor{t}, pidfd))(r)
	own := must(r.acc.Alloc(g.Bytes()))(r)
	m := must(o.Cache.Region(0))(r)
	noError(r, r.stream.Copy([]device.Op{{Dst: own, Src: m, Bytes: g.Bytes()}}))
	if err := o.Close(); err != nil { // work in flight uses it: nothing is closed under a copy
		if !errors.Is(err, fault.Busy) {
			r.Errorf("close in the middle of a copy: %v", err)
		}
		if r.memories() == 0 {
			r.Error("memory was closed under a copy")
		}
	}
	noError(r, r.stream.Sync(r.Context()))
	noError(r, o.Close())
	if got := r.fake.Peek(own.Base(), int(g.Bytes())); !bytes.Equal(got, contents(g.Bytes())) {
		r.Error("other bytes")
	}
	noError(r, own.Free())
	if n := r.memories(); n != 0 {
		r.Errorf("%d memories stay open", n)
	}
}

// TestTensor_Handles opens tensors by handles of every form.
func TestTensor_Handles(t *testing.T) {
	for _, o := range []fakedriver.Options{{Version: fakedriver.CUDA124}, {Vendor: fakedriver.HIP, Version: fakedriver.ROCm64}} {
		r := newGround(t, config{o, plainMemory}).reader(t)
		p := r.start(t, orders{})
		x := p.shared()
		raw := x.Handle
		r.wantTensor(x, -1)
		for _, version := range []byte{1, 2, 3, 200} {
			x.Handle = append([]byte{version, torchPlain}, raw...)
			r.wantTensor(x, -1)
		}
	}
	for _, kind := range []string{mappedMemory, twoPieces} {
		r := newGround(t, config{fakedriver.Options{Version: fakedriver.CUDA130}, kind}).reader(t)
		p := r.start(t, orders{})
		x, pidfd := p.shared(), p.pidfd()
		r.wantTensor(x, pidfd)
		x.Handle[0] = 1
		r.wantTensor(x, pidfd)
	}
}

// TestTensor_Event has an event that is to be waited for.
func TestTensor_Event(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	p := r.start(t, orders{Event: true})
	x := p.shared()
	x.EventSync, x.Event = true, must(p.eventHandle())(t)
	p.ask("hold")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	g := must(shape.LayerMajor())(t)
	if _, err := OpenTensors(ctx, r.acc, g, []Tensor{x}, -1); !errors.Is(err, fault.Busy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a tensor that is being written: %v", err)
	}
	p.ask("release")
	r.wantTensor(x, -1)
	if n := r.fake.Counts().Events; n > 2 { // the accelerator's own
		t.Errorf("%d events stay", n)
	}
}

func (p *owner) eventHandle() (h []byte, err error) {
	err = json.Unmarshal([]byte(p.ask("event")), &h)
	return h, err
}

// TestTensor_Refused changes what is said of a good tensor.
func TestTensor_Refused(t *testing.T) {
	r := newGround(t, config{fakedriver.Options{Version: fakedriver.CUDA130}, plainMemory}).reader(t)
	p := r.start(t, orders{})
	good := p.shared()
	m := r.start(t, orders{Kind: mappedMemory})
	pieces, pidfd, other := m.shared(), m.pidfd(), p.pidfd()
	g := must(shape.LayerMajor())(t)
	with := func(change func(x *Tensor)) Tensor {
		x := good
		x.Handle, x.Size, x.Stride = slices.Clone(x.Handle), slices.Clone(x.Size), slices.Clone(x.Stride)
		change(&x)
		return x
	}
	le := binary.LittleEndian
	segments := func(change func(b []byte) []byte) Tensor {
		return with(func(x *Tensor) { x.Handle, x.StorageOffset = change(slices.Clone(pieces.Handle)), pieces.StorageOffset })
	}
	for name, x := range map[string]struct {
		kind  fault.Kind
		t     Tensor
		pidfd int
	}{
		"no handle":             {fault.Invalid, with(func(x *Tensor) { x.Handle = nil }), -1},
		"half a handle":         {fault.Invalid, with(func(x *Tensor) { x.Handle = append([]byte{1, 'c'}, x.Handle[:60]...) }), -1},
		"a garbled handle":      {fault.Device, with(func(x *Tensor) { x.Handle[9] ^= 1 }), -1},
		"another type":          {fault.Unsupported, with(func(x *Tensor) { x.Handle = append([]byte{1, 'x'}, x.Handle...) }), -1},
		"storage past its end":  {fault.Invalid, with(func(x *Tensor) { x.StorageBytes += 4096 }), -1},
		"storage far out":       {fault.Invalid, with(func(x *Tensor) { x.StorageOffset = 1 << 47 }), -1},
		"storage before":        {fault.Invalid, with(func(x *Tensor) { x.StorageOffset = -1 }), -1},
		"storage of no bytes":   {fault.Invalid, with(func(x *Tensor) { x.StorageBytes = 0 }), -1},
		"storage too small":     {fault.Invalid, with(func(x *Tensor) { x.StorageBytes-- }), -1},
		"huge storage":          {fault.Invalid, with(func(x *Tensor) { x.StorageBytes = 1<<63 - 1 }), -1},
		"an offset":             {fault.Invalid, with(func(x *Tensor) { x.Offset = 1 }), -1},
		"an offset before":      {fault.Invalid, with(func(x *Tensor) { x.Offset = -1 }), -1},
		"a huge offset":         {fault.Invalid, with(func(x *Tensor) { x.Offset = 1 << 62 }), -1},
		"another dtype":         {fault.Invalid, with(func(x *Tensor) { x.DType = "torch.float16" }), -1},
		"a smaller dtype":       {fault.Invalid, with(func(x *Tensor) { x.DType = "torch.uint8" }), -1},
		"an unknown dtype":      {fault.Unsupported, with(func(x *Tensor) { x.DType = "torch.complex64" }), -1},
		"fewer pages":           {fault.Invalid, with(func(x *Tensor) { x.Size[1] = 11 }), -1},
		"fewer layers":          {fault.Invalid, with(func(x *Tensor) { x.Size[0] = 1 }), -1},
		"heads before tokens":   {fault.Invalid, with(func(x *Tensor) { x.Size[3], x.Size[4], x.Stride[3], x.Stride[4] = 2, 8, 256, 32 }), -1},
		"pages before layers":   {fault.Invalid, with(func(x *Tensor) { x.Size[0], x.Size[1], x.Stride[0], x.Stride[1] = 12, 2, 2048, 1024 }), -1},
		"overlapping elements":  {fault.Invalid, with(func(x *Tensor) { x.Stride[3] = 32 }), -1},
		"one element for all":   {fault.Invalid, with(func(x *Tensor) { x.Stride[5] = 0 }), -1},
		"a negative stride":     {fault.Invalid, with(func(x *Tensor) { x.Stride[0] = -x.Stride[0] }), -1},
		"a negative size":       {fault.Invalid, with(func(x *Tensor) { x.Size[0] = -2 }), -1},
		"a huge stride":         {fault.Invalid, with(func(x *Tensor) { x.Stride[0] = 1 << 62 }), -1},
		"a huge size":           {fault.Invalid, with(func(x *Tensor) { x.Size[0] = 1 << 62 }), -1},
		"fewer strides":         {fault.Invalid, with(func(x *Tensor) { x.Stride = x.Stride[1:] }), -1},
		"no dimensions":         {fault.Invalid, with(func(x *Tensor) { x.Size, x.Stride = nil, nil }), -1},
		"many dimensions":       {fault.Invalid, with(func(x *Tensor) { x.Size, x.Stride = make([]int64, 17), make([]int64, 17) }), -1},
		"another device":        {fault.Unsupported, with(func(x *Tensor) { x.UUID = "GPU-1" }), -1},
		"no device":             {fault.Unsupported, with(func(x *Tensor) { x.UUID = "" }), -1},
		"half an event":         {fault.Invalid, with(func(x *Tensor) { x.EventSync, x.Event = true, make([]byte, 63) }), -1},
		"an event of nothing":   {fault.Device, with(func(x *Tensor) { x.EventSync, x.Event = true, make([]byte, 64) }), -1},
		"segments of nobody":    {fault.Unsupported, segments(func(b []byte) []byte { return b }), -1},
		"segments of another":   {fault.Invalid, segments(func(b []byte) []byte { le.PutUint32(b[26:], 0); return b }), other},
		"no pidfd":              {fault.Invalid, segments(func(b []byte) []byte { return b }), 0},
		"version 3 of segments": {fault.Unsupported, segments(func(b []byte) []byte { b[0] = 3; return b }), pidfd},
		"half a header":         {fault.Invalid, segments(func(b []byte) []byte { return b[:20] }), pidfd},
		"half a descriptor":     {fault.Invalid, segments(func(b []byte) []byte { return b[:len(b)-2] }), pidfd},
		"no segments":           {fault.Invalid, segments(func(b []byte) []byte { le.PutUint64(b[18:], 0); return b[:26] }), pidfd},
		"many segments":         {fault.Invalid, segments(func(b []byte) []byte { le.PutUint64(b[18:], 1<<60); return b }), pidfd},
		"huge segments":         {fault.Invalid, segments(func(b []byte) []byte { le.PutUint64(b[10:], 1<<63); return b }), pidfd},
		"odd segments":          {fault.Invalid, segments(func(b []byte) []byte { le.PutUint64(b[10:], 12345); return b }), pidfd},
		"fabric segments":       {fault.Unsupported, segments(func(b []byte) []byte { return append(b[:26], make([]byte, 64)...) }), pidfd},
		"no such descriptor":    {fault.Invalid, segments(func(b []byte) []byte { le.PutUint32(b[26:], 9999); return b }), pidfd},
		"another descriptor":    {fault.Device, segments(func(b []byte) []byte { le.PutUint32(b[26:], 0); return b }), pidfd},
	} {
		before := descriptors(t)
		if _, err := OpenTensors(t.Context(), r.acc, g, []Tensor{x.t}, x.pidfd); !errors.Is(err, x.kind) {
			t.Errorf("%s: error %v, want kind %s", name, err, x.kind.Error())
		}
		if n := r.memories(); n != 0 {
			t.Errorf("%s: %d memories stay open", name, n)
		}
		if n := descriptors(t); n != before {
			t.Errorf("%s: %d descriptors are open, and were %d", name, n, before)
		}
	}
	r.fake.Forgive() // the fake has noted garbled handles
	if _, err := OpenTensors(t.Context(), r.acc, g, nil, -1); !errors.Is(err, fault.Invalid) {
		t.Errorf("no tensors: %v", err)
	}
	r.wantTensor(good, -1)
	r.wantTensor(pieces, pidfd)

	m.kill()
	if _, err := OpenTensors(t.Context(), r.acc, g, []Tensor{pieces}, pidfd); !errors.Is(err, fault.NotFound) {
		t.Errorf("segments of a dead process: %v", err)
	}
	p.kill()
	if _, err := OpenTensors(t.Context(), r.acc, g, []Tensor{good}, -1); !errors.Is(err, fault.Device) {
		t.Errorf("memory of a dead process: %v", err)
	}
	r.fake.Forgive()
}

// TestTensor_Shapes holds tensors of engines against geometries that are theirs, and
// against others.
func TestTensor_Shapes(t *testing.T) {
	const pages, size, heads, dim = 12, 8, 2, 32
	nhd := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: pages, PageSize: size, KVHeads: heads, HeadDim: dim}
	hnd, mla, fp4, joined, padded := nhd, nhd, nhd, nhd, nhd
	hnd.Layout = kv.HND
	mla.Layout, mla.KVHeads, mla.HeadDim, mla.LatentDim = kv.MLA, 0, 0, 576
	fp4.DType, joined.Join, padded.PageAlign = kv.FP4, kv.JoinRows, 4096
	state := kv.Config{Layers: 1, Pages: pages, PageSize: size, StateBytes: 96}
	type tensor struct {
		dtype        string
		size, stride []int64
	}
	dense := func(dtype string, size ...int64) tensor {
		stride, n := make([]int64, len(size)), int64(1)
		for i := len(size) - 1; i >= 0; i-- {
			stride[i], n = n, n*size[i]
		}
		return tensor{dtype, size, stride}
	}
	const bf16 = "torch.bfloat16"
	for name, x := range map[string]struct {
		geometry func() (*kv.Geometry, error)
		good     []tensor
		bad      []tensor
	}{
		"NHD": {
			nhd.PageMajor,
			[]tensor{
				dense(bf16, pages, 2, size, heads, dim),
				dense(bf16, 1, pages, 2, size, heads, 1, dim),
				dense(bf16, pages+1, 2, size, heads, dim),                                  // a page that nobody knows of
				dense(bf16, pages*2*size*heads*dim),                                        // bytes
				dense("torch.bfloat16", pages*2*1024),                                      // more of them
				{bf16, []int64{2, pages, size, heads, dim}, []int64{512, 1024, 64, 32, 1}}, // permuted
			},
			[]tensor{
				dense(bf16, 2, pages, size, heads, dim),
				dense(bf16, pages, 2, heads, size, dim),
				dense(bf16, pages, size, heads, 2, dim),
				dense(bf16, pages, 2, size, 2*heads, dim/2),
				dense(bf16, pages, 2, size*2, heads, dim/2),
				dense(bf16, pages-1, 2, size, heads, dim),
				dense("torch.uint8", pages, 2, size, heads, 2*dim),
			},
		},
		"slots": { // K and V of a layer in tensors of their own, by token
			func() (*kv.Geometry, error) {
				g, err := nhd.PageMajor()
				if err != nil {
					return nil, err
				}
				s := g.Spec()
				k, v := s.Layers[0].Planes[0], s.Layers[0].Planes[1]
				k.PageStride, v.PageStride, v.Offset, v.Region = k.Bytes, v.Bytes, 0, 1
				s.Layers[0].Planes, s.RegionBytes = []kv.Plane{k, v}, []int64{pages * k.Bytes, pages * v.Bytes}
				return kv.NewGeometry(s)
			},
			[]tensor{dense(bf16, pages*size, heads, dim), dense(bf16, (pages+1)*size, heads, dim)},
			[]tensor{dense(bf16, pages*size, 2*heads, dim), dense(bf16, heads, pages*size, dim), dense(bf16, (pages-1)*size, heads, dim)},
		},
		"HND": {
			hnd.PerLayerKVFirst,
			[]tensor{dense(bf16, 2, pages, heads, size, dim)},
			[]tensor{dense(bf16, 2, pages, size, heads, dim), dense(bf16, pages, 2, heads, size, dim)},
		},
		"MLA": {
			mla.PageMajor,
			[]tensor{dense(bf16, pages, size, 576), dense(bf16, pages*size, 1, 576)},
			[]tensor{dense(bf16, pages, size, 577), dense(bf16, pages, size*2, 288)},
		},
		"FP4": {
			fp4.PageMajor,
			[]tensor{dense("torch.uint8", pages, 2, size, heads, dim/2), dense("torch.float4_e2m1fn_x2", pages, 2, size, heads, dim/2)},
			[]tensor{dense("torch.uint8", pages, 2, size, heads, dim), dense("torch.int8", pages, 2, size, heads, dim/2)},
		},
		"joined": {
			joined.PageMajor,
			[]tensor{dense(bf16, pages, size, heads, 2, dim)},
			[]tensor{dense(bf16, pages, size, 2, heads, dim*2), dense(bf16, pages, 2, size, heads, dim)},
		},
		"padded": {
			padded.PageMajor,
			[]tensor{{bf16, []int64{pages, 2, size, heads, dim}, []int64{2048, 512, 64, 32, 1}}},
			[]tensor{dense(bf16, pages, 2, size, heads, dim)},
		},
		"states": {
			state.PageMajor,
			[]tensor{dense("torch.float32", pages, 4, 6), dense("torch.uint8", pages, 96), dense(bf16, pages, 2, 24)},
			[]tensor{dense("torch.float32", pages, 4, 7), dense("torch.float32", pages/2, 4, 12)},
		},
	} {
		g := must(x.geometry())(t)
		try := func(x tensor) error {
			item := torchTypes()[x.dtype].bytes
			y := &Tensor{DType: x.dtype, Size: x.size, Stride: x.stride, Offset: 3, StorageBytes: 1 << 20}
			data, err := y.check(g, 0)
			if err == nil && data != 3*item {
				t.Errorf("%s, %+v: begins at byte %d", name, x, data)
			}
			return err
		}
		for _, x := range x.good {
			noErrorOf(t, name, x, try(x))
		}
		for _, x := range x.bad {
			if err := try(x); !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %+v is accepted: %v", name, x, err)
			}
		}
	}
}

func noErrorOf(t *testing.T, name string, x any, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s, %+v: %v", name, x, err)
	}
}

func TestParseTensor(t *testing.T) {
	for _, bad := range []string{
		"", "{", "[]", "{}{}", `{"nothing": 1}`, `{"size": [1.5]}`, `{"offset": 1e30}`, `{"handle": "?"}`, `{"device": "0"}`,
		`{"dtype": "` + strings.Repeat("x", MaxTensorBytes) + `"}`,
	} {
		if _, err := ParseTensor([]byte(bad)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%.40q: %v", bad, err)
		}
	}
	const text = `{"device": 3, "handle": "AAEC", "storage_bytes": 5, "storage_offset": 6, "ref_counter": "eA==", "ref_counter_slot": 7,
		"event": null, "event_sync": false, "size": [1, 2], "stride": [2, 1], "offset": 0, "dtype": "torch.int8", "requires_grad": true,
		"uuid": "3f", "pci": ""}`
	x := must(ParseTensor([]byte(text)))(t)
	if x.Device != 3 || !bytes.Equal(x.Handle, []byte{0, 1, 2}) || x.StorageOffset != 6 || !x.RequiresGrad || x.UUID != "3f" {
		t.Errorf("%+v", x)
	}
}

func FuzzTensor(f *testing.F) {
	good := must(json.Marshal(&Tensor{
		Handle: expandable(2, 1, []piece{{3, 2 << 20}, {4, 2 << 20}}), StorageBytes: 1 << 20, DType: "torch.bfloat16",
		Size: []int64{2, 12, 2, 8, 2, 32}, Stride: []int64{12 * 1024, 1024, 512, 64, 32, 1},
	}))(f)
	f.Add(good)
	f.Add([]byte(`{"handle": "AmM=", "size": [1], "stride": [1], "dtype": "torch.uint8", "storage_bytes": 1}`))
	g := must(shape.LayerMajor())(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := ParseTensor(b)
		if err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("error %v has no kind", err)
			}
			return
		}
		data, err := x.check(g, 0)
		switch {
		case err == nil && (data < 0 || data > x.StorageBytes-g.Bytes()):
			t.Errorf("%d bytes from byte %d of %d", g.Bytes(), data, x.StorageBytes)
		case err != nil && fault.KindOf(err) == 0:
			t.Errorf("error %v has no kind", err)
		}
		if h, err := parseTorchHandle(x.Handle); err == nil && h.fds != nil && (len(h.fds) > maxPieces || h.each < 1) {
			t.Errorf("%d segments of %d bytes", len(h.fds), h.each)
		}
	})
}

// TestPIDReuse_OfAPidfd has a pidfd whose process has ended, whatever has its number now.
func TestPIDReuse_OfAPidfd(t *testing.T) {
	r := newGround(t, configs()[0]).reader(t)
	p := r.start(t, orders{})
	pidfd, pid := p.pidfd(), int32(p.cmd.Process.Pid)
	noError(t, checkPID(pidfd, pid))
	if err := checkPID(pidfd, int32(os.Getpid())); !errors.Is(err, fault.Invalid) {
		t.Errorf("another process: %v", err)
	}
	p.kill()
	for _, n := range []int32{pid, int32(os.Getpid()), -1} {
		if err := checkPID(pidfd, n); !errors.Is(err, fault.NotFound) {
			t.Errorf("process %d, and the pidfd's has ended: %v", n, err)
		}
	}
	if err := checkPID(-1, pid); !errors.Is(err, fault.Invalid) {
		t.Errorf("no pidfd: %v", err)
	}
}
