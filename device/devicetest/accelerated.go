package devicetest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// acceleratorCases are about what only a device.Accelerator has. Other devices skip
// them.
func acceleratorCases() []testCase {
	cases := append([]testCase(nil), acceleratedCases...)
	for i, c := range cases {
		cases[i].run = func(r *rig) {
			if _, ok := r.Device.(*device.Accelerator); !ok {
				r.Skip("this device is no accelerator")
			}
			c.run(r)
		}
	}
	return cases
}

func (r *rig) accelerator() *device.Accelerator { return r.Device.(*device.Accelerator) } //nolint:errcheck // looked at by acceleratorCases

// unpinned returns host memory that no device can reach yet.
func (r *rig) unpinned(bytes int64) *device.Memory {
	r.Helper()
	h, err := device.OpenHost(device.HostOptions{})
	r.must(err)
	m, err := h.Alloc(bytes)
	r.must(err)
	r.memories = append(r.memories, m)
	r.hosts = append(r.hosts, h)
	return m
}

var acceleratedCases = []testCase{
	{"Boxes_MoveExactlyTheirRows", func(r *rig) {
		for _, e := range r.accelerator().Engines() {
			for seed := range uint64(20) {
				rng := rand.New(rand.NewPCG(seed, 1))
				r.copyBoxes(fmt.Sprintf("%s, seed %d", e.Name(), seed), e, rng, rng.IntN(2) == 0, rng.IntN(2) == 0)
			}
		}
	}},
	{"Boxes_LargerThanAPitchMayBe", func(r *rig) {
		// Rows at every layer of a cache whose layers are far apart: 5000 is no
		// multiple of anything, 1 MiB is.
		for _, e := range r.accelerator().Engines() {
			for _, stride := range []int64{5000, 5003, 64 << 10, 1 << 20} {
				const rows, width = 5, 700
				src, dst, s := r.page(rows*stride, 's'), r.hostPage(rows*width, 'd'), r.stream("s")
				r.must(r.accelerator().CopyBoxes(s, e, []device.Box{{
					Dst: dst, Src: src, Width: width, Rows: rows, Slices: 1, DstPitch: width, SrcPitch: stride,
				}}))
				r.sync(s)
				for i := range int64(rows) {
					r.want(fmt.Sprintf("%s, stride %d", e.Name(), stride), dst, i*width, contents('s', i*stride, width))
				}
			}
		}
	}},
	{"Boxes_AreCheckedBeforeAnyIsEnqueued", func(r *rig) {
		a := r.accelerator()
		src, dst, s, e := r.page(1000, 's'), r.page(1000, 'd'), r.stream("s"), a.Engines()[0]
		gone := r.alloc(1000)
		r.must(gone.Free())
		good := device.Box{Dst: dst, Src: src, Width: 10, Rows: 4, Slices: 5, DstPitch: 20, SrcPitch: 10, DstSlice: 100, SrcSlice: 50}
		const most = 1<<63 - 1
		for _, c := range []struct {
			kind fault.Kind
			bad  func(b *device.Box)
		}{
			{fault.Invalid, func(b *device.Box) { b.Dst = nil }},
			{fault.Invalid, func(b *device.Box) { b.Src = nil }},
			{fault.Invalid, func(b *device.Box) { b.Width = -1 }},
			{fault.Invalid, func(b *device.Box) { b.Rows = -1 }},
			{fault.Invalid, func(b *device.Box) { b.Slices = -1 }},
			{fault.Invalid, func(b *device.Box) { b.DstPitch = 9 }},
			{fault.Invalid, func(b *device.Box) { b.SrcPitch = -10 }},
			{fault.Invalid, func(b *device.Box) { b.SrcSlice = 9 }},
			{fault.Invalid, func(b *device.Box) { b.DstSlice = 300 }},
			{fault.Invalid, func(b *device.Box) { b.DstOff = 531 }},
			{fault.Invalid, func(b *device.Box) { b.SrcOff = 761 }},
			{fault.Invalid, func(b *device.Box) { b.SrcOff = -1 }},
			{fault.Invalid, func(b *device.Box) { b.Rows = 1 << 40 }},
			{fault.Invalid, func(b *device.Box) { b.DstPitch = most }},
			{fault.Invalid, func(b *device.Box) { b.Width, b.DstPitch, b.SrcPitch = most, most, most }},
			{fault.Invalid, func(b *device.Box) { b.Rows, b.DstOff = 0, 1001 }},
			{fault.Closed, func(b *device.Box) { b.Dst = gone }},
			{fault.Closed, func(b *device.Box) { b.Src = gone }},
		} {
			b := good
			c.bad(&b)
			r.wantKind(fmt.Sprintf("box %+v", b), a.CopyBoxes(s, e, []device.Box{good, b}), c.kind)
		}
		r.sync(s)
		r.want("destination", dst, 0, contents('d', 0, 1000))
		for _, nothing := range [][]device.Box{nil, {{Dst: dst, Src: src, DstOff: 1000}}, {{Dst: dst, Src: src, Rows: 3, Width: 2}}} {
			r.must(a.CopyBoxes(s, e, nothing))
		}
		// The least that fits: nothing has been taken away.
		good.DstOff, good.SrcOff = 530, 760
		r.must(a.CopyBoxes(s, e, []device.Box{good}))
		r.sync(s)
		r.want("last row", dst, 990, contents('s', 760+4*50+30, 10))
	}},
	{"Batches_OfEverySize", func(r *rig) {
		const row = 16
		const most = 20_000
		a := r.accelerator()
		src, dst, s := r.hostPage(most*row, 's'), r.alloc(most*row), r.stream("s")
		from, before := contents('s', 0, most*row), contents('d', 0, most*row)
		for _, e := range a.Engines() {
			for i, n := range []int64{0, 1, 2, 8191, 8192, 8193, most} {
				order := device.SourceOrder(i % 2)
				r.write(dst, before)
				ops := make([]device.Op, n)
				want := bytes.Clone(before)
				for i := range ops {
					off := int64(i) * 7919 % n * row
					ops[i] = device.Op{Dst: dst, Src: src, DstOff: off, SrcOff: int64(i) * row, Bytes: row - 3}
					copy(want[off:], from[i*row:][:row-3])
				}
				before := a.Calls()
				r.must(a.CopyBatch(s, e, ops, order, 0))
				after := a.Calls()
				r.sync(s)
				r.want(fmt.Sprintf("%s, %d copies, order %v", e.Name(), n, order), dst, 0, want)
				if limit := int64(e.Limits().Batch); limit > 0 {
					batches := uint64((n + limit - 1) / limit)
					if got := after.Batches - before.Batches; got != batches {
						r.Errorf("%s: %d copies in %d batches, want %d", e.Name(), n, got, batches)
					}
				} else if got := after.Linear - before.Linear; got != uint64(n) {
					r.Errorf("%s: %d copies, want %d", e.Name(), got, n)
				}
			}
		}
	}},
	{"Batches_OfTheSizeAskedFor", func(r *rig) {
		const n, row = 100, 8
		a := r.accelerator()
		for _, e := range a.Engines() {
			if e.Limits().Batch == 0 {
				continue
			}
			src, dst, s := r.page(n*row, 's'), r.alloc(n*row), r.stream("s")
			ops := make([]device.Op, n)
			for i := range ops {
				ops[i] = device.Op{Dst: dst, Src: src, DstOff: int64(i) * row, SrcOff: int64(i) * row, Bytes: row}
			}
			before := a.Calls().Batches
			r.must(a.CopyBatch(s, e, ops, device.StreamOrder, 30))
			if got := a.Calls().Batches - before; got != 4 {
				r.Errorf("%d copies, 30 at once: %d batches", n, got)
			}
			r.sync(s)
			r.want("destination", dst, 0, contents('s', 0, n*row))
			r.wantKind("a negative size", a.CopyBatch(s, e, ops, device.StreamOrder, -1), fault.Invalid)
			r.wantKind("an order that is none", a.CopyBatch(s, e, ops, 7, 0), fault.Invalid)
		}
	}},
	{"AnyOrder_IsForPinnedHostMemoryOnly", func(r *rig) {
		a := r.accelerator()
		s, e := r.stream("s"), a.Engines()[0]
		dev, host, out := r.page(64, 'd'), r.hostPage(64, 'h'), r.page(64, 'o')
		r.wantKind("device memory", a.CopyBatch(s, e, []device.Op{whole(out, host), whole(out, dev)}, device.AnyOrder, 0), fault.Invalid)
		pageable := r.unpinned(64)
		r.must(a.AdmitPageable(pageable))
		r.wantKind("pageable memory", a.CopyBatch(s, e, []device.Op{whole(out, pageable)}, device.AnyOrder, 0), fault.Invalid)
		r.sync(s)
		r.want("destination", out, 0, contents('o', 0, 64))
	}},
	{"Streams_AndEnginesOfOthersAreRefused", func(r *rig) {
		a := r.accelerator()
		h, err := device.OpenHost(device.HostOptions{})
		r.must(err)
		foreign, err := h.NewStream("foreign")
		r.must(err)
		dst, src := r.alloc(64), r.page(64, 's')
		box := []device.Box{{Dst: dst, Src: src, Width: 64, Rows: 1, Slices: 1}}
		ops := []device.Op{whole(dst, src)}
		for _, s := range []device.Stream{nil, foreign} {
			r.wantKind(fmt.Sprintf("boxes on %T", s), a.CopyBoxes(s, a.Engines()[0], box), fault.Invalid)
			r.wantKind(fmt.Sprintf("batch on %T", s), a.CopyBatch(s, a.Engines()[0], ops, device.StreamOrder, 0), fault.Invalid)
			if a.On(s) {
				r.Errorf("%T is taken for a stream of the device", s)
			}
		}
		own := r.stream("own")
		if !a.On(own) {
			r.Error("its own stream is not one of the device")
		}
		r.wantKind("no engine", a.CopyBoxes(own, nil, box), fault.Invalid)
		r.wantKind("no engine", a.CopyBatch(own, nil, ops, device.StreamOrder, 0), fault.Invalid)
		e, err := h.NewEvent()
		r.must(err)
		r.wantKind("wait for an event of the host", own.Wait(e), fault.Invalid)
		r.wantKind("record of an event of the host", own.Record(e), fault.Invalid)
		r.must(foreign.Close())
		r.must(h.Close())
	}},
	{"Pin_MemoryThatIsNotPinnedIsRefused", func(r *rig) {
		a, s := r.accelerator(), r.stream("s")
		const page = 64 << 10
		m, dev := r.unpinned(3*page), r.page(3*page, 'd')
		r.wantKind("copy to it", s.Copy([]device.Op{whole(m, dev)}), fault.Unsupported)
		r.wantKind("copy from it", s.Copy([]device.Op{whole(dev, m)}), fault.Unsupported)
		r.must(a.Pin(m, page, page))
		r.copy(s, device.Op{Dst: m, Src: dev, DstOff: page, Bytes: page})
		for _, off := range []int64{page - 1, page + 1} {
			err := s.Copy([]device.Op{{Dst: m, Src: dev, DstOff: off, Bytes: page}})
			r.wantKind("copy that leaves what is pinned", err, fault.Unsupported)
			if fault.RemedyOf(err) == "" {
				r.Error("no remedy is named")
			}
		}
		// Of a box, it is the rows that count.
		box := device.Box{Dst: m, Src: dev, DstOff: page, Width: 8, Rows: 2, Slices: 1, DstPitch: page, SrcPitch: page}
		r.wantKind("box with a row outside", a.CopyBoxes(s, a.Engines()[0], []device.Box{box}), fault.Unsupported)
		r.must(a.Pin(m, 0, page))
		box.DstOff = 0
		r.must(a.CopyBoxes(s, a.Engines()[0], []device.Box{box}))
		r.sync(s)
		r.want("row", m, page, contents('d', page, 8))
	}},
	{"Pin_ChecksWhatItIsGiven", func(r *rig) {
		a := r.accelerator()
		const page = 64 << 10
		m, dev := r.unpinned(4*page), r.alloc(4*page)
		r.wantKind("no memory", a.Pin(nil, 0, 1), fault.Invalid)
		r.wantKind("device memory", a.Pin(dev, 0, page), fault.Invalid)
		for _, c := range [][2]int64{{-1, 1}, {0, -1}, {0, 4*page + 1}, {4 * page, 1}, {1 << 62, 1 << 62}} {
			r.wantKind(fmt.Sprint("range ", c), a.Pin(m, c[0], c[1]), fault.Invalid)
		}
		r.must(a.Pin(m, 0, 0))
		r.must(a.Pin(m, page, page))
		for _, c := range [][2]int64{{page, page}, {0, 4 * page}, {page + 1, 1}, {0, page + 1}, {2*page - 1, 1}} {
			r.wantKind(fmt.Sprint("again ", c), a.Pin(m, c[0], c[1]), fault.Exists)
		}
		r.must(a.Pin(m, 3*page, page/2+1))
		r.wantKind("a shared page of the OS", a.Pin(m, 3*page+page/2+1, 10), fault.Invalid)
		r.must(a.Pin(m, 3*page+page/2+int64(os.Getpagesize()), 10))
		r.must(m.Free())
		r.wantKind("freed memory", a.Pin(m, 0, page), fault.Closed)
		r.wantKind("freed memory", a.AdmitPageable(m), fault.Closed)
	}},
	{"Pin_CopiesCrossStretches", func(r *rig) {
		const page, pages = 64 << 10, 6
		a, s := r.accelerator(), r.stream("s")
		src, dst := r.unpinned(pages*page), r.unpinned(pages*page)
		for _, i := range []int64{3, 0, 5, 1, 4, 2} { // in any order
			r.must(a.Pin(src, i*page, page))
		}
		r.must(a.Pin(dst, 0, 2*page))
		r.must(a.Pin(dst, 2*page, 4*page))
		r.write(src, contents('s', 0, pages*page))
		dev := r.alloc(pages * page)
		for _, e := range a.Engines() {
			for _, off := range []int64{0, 1, page - 1, page + 5} {
				n := pages*page - off
				what := fmt.Sprintf("%s, offset %d", e.Name(), off)
				r.write(dst, contents('d', 0, pages*page))
				r.must(a.CopyBatch(s, e, []device.Op{{Dst: dev, Src: src, SrcOff: off, Bytes: n}}, device.AnyOrder, 0))
				r.copy(s, device.Op{Dst: dst, Src: dev, DstOff: off, Bytes: n})
				r.sync(s)
				r.want(what+", batch", dst, 0, append(contents('d', 0, off), contents('s', off, n)...))

				// Rows of a third of a stretch, packed on one side.
				const width, pitch = 20_000, page / 3
				rows := (n - width) / pitch
				packed := r.alloc(rows * width)
				b := device.Box{Dst: packed, Src: src, SrcOff: off, Width: width, Rows: int(rows), Slices: 1, DstPitch: width, SrcPitch: pitch}
				back := device.Box{Dst: dst, Src: packed, DstOff: off, Width: width, Rows: int(rows), Slices: 1, DstPitch: pitch, SrcPitch: width}
				r.write(dst, contents('d', 0, pages*page))
				r.must(a.CopyBoxes(s, e, []device.Box{b}))
				r.must(a.CopyBoxes(s, e, []device.Box{back}))
				r.sync(s)
				want := contents('d', 0, pages*page)
				for j := range rows {
					copy(want[off+j*pitch:], contents('s', off+j*pitch, width))
				}
				r.want(what+", boxes", dst, 0, want)
			}
		}
	}},
	{"Pin_FreeUnpins", func(r *rig) {
		a, s := r.accelerator(), r.stream("s")
		const size = 256 << 10
		b := r.unpinned(size)
		dev := r.page(size, 'd')
		for i := range 3 { // the driver refuses what is pinned already
			m := device.WrapHost(b.Bytes())
			r.must(a.Pin(m, 0, size/2))
			r.must(a.Pin(m, size/2, size/2))
			release := func() {}
			if r.Hold != nil {
				release = r.hold(s)
			}
			r.copy(s, whole(m, dev))
			if r.Hold != nil {
				r.wantKind("free of pinned memory under a copy", m.Free(), fault.Busy)
			}
			release()
			r.sync(s)
			r.want(fmt.Sprint("round ", i), b, 0, contents('d', 0, size))
			if i == 0 {
				r.wantKind("close with pinned memory", r.Device.Close(), fault.Busy)
			}
			r.must(m.Free())
		}
	}},
	{"AllocHost_GivesPinnedMemoryInPieces", func(r *rig) {
		a := r.accelerator()
		h, err := device.OpenHost(device.HostOptions{PieceBytes: 1 << 20})
		r.must(err)
		for _, n := range []int64{0, 1, 5000, 1 << 20, 5<<20 + 17} {
			m, err := a.AllocHost(h, n, 1000)
			r.must(err)
			if m.Size() != n || n > 1<<20 && len(m.Pieces()) < 2 {
				r.Errorf("%d bytes: got %d in %d pieces", n, m.Size(), len(m.Pieces()))
			}
			dev, s := r.page(n, 'd'), r.stream("s")
			r.copy(s, whole(m, dev))
			r.sync(s)
			r.want(fmt.Sprint(n, " bytes"), m, 0, contents('d', 0, n))
			r.must(m.Free())
		}
		_, err = a.AllocHost(h, -1, 1)
		r.wantKind("negative size", err, fault.Invalid)
		_, err = a.AllocHost(h, 1<<60, 1)
		r.wantKind("more than there is", err, fault.Memory)
		r.must(h.Close())
	}},
	{"Wrap_IsMemoryOfSomebodyElse", func(r *rig) {
		a, s := r.accelerator(), r.stream("s")
		theirs, src := r.page(3000, 't'), r.page(1000, 's')
		m, err := a.Wrap(theirs.Base()+1000, 1000)
		r.must(err)
		r.copy(s, whole(m, src))
		r.sync(s)
		r.must(m.Free())
		r.wantKind("copy after it was given back", s.Copy([]device.Op{whole(m, src)}), fault.Closed)
		r.want("their memory", theirs, 0, append(append(contents('t', 0, 1000), contents('s', 0, 1000)...), contents('t', 2000, 1000)...))
		for _, c := range []struct {
			base  uintptr
			bytes int64
		}{{0, 1}, {1000, -1}, {^uintptr(0), 100}} {
			_, err := a.Wrap(c.base, c.bytes)
			r.wantKind(fmt.Sprintf("%+v", c), err, fault.Invalid)
		}
	}},
	{"WrapStream_OfTheDefaultStream", func(r *rig) {
		a := r.accelerator()
		const n, row = 100, 64
		src := r.page(n*row, 's')
		for _, h := range []device.StreamHandle{device.DefaultStream, device.LegacyStream} {
			s, err := a.WrapStream("legacy", h)
			r.must(err)
			for _, e := range a.Engines() {
				dst := r.alloc(n * row)
				ops := make([]device.Op, n)
				for i := range ops {
					off := int64(i) * row
					ops[i] = device.Op{Dst: dst, Src: src, DstOff: off, SrcOff: off, Bytes: row}
				}
				before := a.Calls().Batches
				r.must(a.CopyBatch(s, e, ops, device.StreamOrder, 0))
				other, out := r.stream("other"), r.alloc(n*row)
				r.must(other.Wait(r.record(s)))
				r.copy(other, whole(out, dst))
				r.must(r.outcome(r.signal(other)))
				r.want("destination", out, 0, contents('s', 0, n*row))
				if a.Calls().Batches != before {
					r.Error("the legacy stream was given a batch")
				}
			}
			r.must(s.Close())
			r.wantKind("copy after close", s.Copy(nil), fault.Closed)
		}
		_, err := a.WrapStream("per thread", device.PerThreadStream)
		r.wantKind("the stream of a thread", err, fault.Unsupported)
	}},
	{"WrapStream_ClosingLeavesTheHandle", func(r *rig) {
		a := r.accelerator()
		theirs := r.stream("theirs")
		h, ok := a.Handle(theirs)
		if !ok {
			r.Fatal("its own stream has no handle")
		}
		ours, err := a.WrapStream("ours", h)
		r.must(err)
		src, mid, dst := r.page(64, 's'), r.alloc(64), r.alloc(64)
		r.copy(ours, whole(mid, src))
		r.copy(theirs, whole(dst, mid)) // one queue: in order
		r.must(ours.Close())
		r.want("when it is closed", mid, 0, contents('s', 0, 64))
		r.sync(theirs)
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Priorities_AllWork", func(r *rig) {
		a := r.accelerator()
		for _, p := range []device.Priority{device.NormalPriority, device.LowPriority, device.HighPriority} {
			s, err := a.NewStreamOf("s", p)
			r.must(err)
			src, dst := r.page(64, 's'), r.alloc(64)
			r.copy(s, whole(dst, src))
			r.must(s.Close())
			r.want("destination", dst, 0, contents('s', 0, 64))
		}
	}},
}

// boxRoom is the most bytes from the first to the last of a random box.
const boxRoom = 64 << 10

// copyBoxes copies a few random boxes through e, and compares every byte of the
// destination with what the same rows would leave.
func (r *rig) copyBoxes(what string, e device.Engine, rng *rand.Rand, fromHost, toHost bool) {
	r.Helper()
	const size = 4 * boxRoom
	memory := func(host bool, who byte) *device.Memory {
		if host {
			return r.hostPage(size, who)
		}
		return r.page(size, who)
	}
	src, dst, s := memory(fromHost, 's'), memory(toHost, 'd'), r.stream("s")
	from, want := contents('s', 0, size), contents('d', 0, size)
	var boxes []device.Box
	for i := range int64(4) {
		b := device.Box{
			Dst: dst, Src: src, DstOff: i * boxRoom, SrcOff: i * boxRoom,
			Width: 1 + rng.Int64N(150), Rows: 1 + rng.IntN(12), Slices: 1 + rng.IntN(12),
		}
		b.DstPitch, b.DstSlice = strides(rng, &b)
		b.SrcPitch, b.SrcSlice = strides(rng, &b)
		for k := range int64(b.Slices) {
			for j := range int64(b.Rows) {
				copy(want[b.DstOff+k*b.DstSlice+j*b.DstPitch:], from[b.SrcOff+k*b.SrcSlice+j*b.SrcPitch:][:b.Width])
			}
		}
		boxes = append(boxes, b)
	}
	r.must(r.accelerator().CopyBoxes(s, e, boxes))
	r.sync(s)
	if got := r.read(dst, 0, size); !bytes.Equal(got, want) {
		r.Errorf("%s: byte %d is wrong: %+v", what, firstDiff(got, want), boxes)
	}
	r.must(s.Close())
	r.must(src.Free())
	r.must(dst.Free())
}

// strides draws strides by which the rows of b share no byte: one dimension lies inside
// the other.
func strides(rng *rand.Rand, b *device.Box) (pitch, slice int64) {
	inner, outer := int64(b.Rows), int64(b.Slices)
	turned := rng.IntN(3) == 0
	if turned {
		inner, outer = outer, inner
	}
	a := b.Width
	if rng.IntN(2) == 0 {
		a += rng.Int64N(100)
	}
	c := a * inner
	switch rng.IntN(3) {
	case 0:
		c += a * rng.Int64N(4)
	case 1:
		c += rng.Int64N(100)
	}
	// The rows of the outer dimension are now and then far apart.
	if far := (boxRoom - 1) / outer; rng.IntN(3) == 0 && far > c {
		c = far
	}
	if turned {
		return c, a
	}
	return a, c
}
