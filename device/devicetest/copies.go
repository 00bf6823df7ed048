package devicetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

var memoryCases = []testCase{
	{"Alloc_GivesZeroedMemoryThatSaysWhatItIs", func(r *rig) {
		for _, n := range []int64{0, 1, 4095, 4096, 4097, 3<<20 + 17} {
			m := r.alloc(n)
			if m.Size() != n || m.Device() != r.Device.Name() {
				r.Errorf("alloc of %d: %d bytes of device %q, want %d of %q", n, m.Size(), m.Device(), n, r.Device.Name())
			}
			if n > 0 && m.Base() == 0 {
				r.Errorf("alloc of %d: base 0", n)
			}
			r.want(fmt.Sprintf("alloc of %d", n), m, 0, make([]byte, n))
		}
	}},
	{"Alloc_GivesNobodyElsesMemory", func(r *rig) {
		a, b := r.page(10_000, 'a'), r.page(10_000, 'b')
		if a.Base() < b.Base()+10_000 && b.Base() < a.Base()+10_000 {
			r.Errorf("memories at %#x and %#x overlap", a.Base(), b.Base())
		}
		r.want("first", a, 0, contents('a', 0, 10_000))
		r.want("second", b, 0, contents('b', 0, 10_000))
	}},
	{"Alloc_RefusesWhatCannotBe", func(r *rig) {
		_, err := r.Device.Alloc(-1)
		r.wantKind("−1 bytes", err, fault.Invalid)
		for _, n := range []int64{1 << 60, 1<<63 - 1} {
			_, err = r.Device.Alloc(n)
			r.wantKind(fmt.Sprint(n, " bytes"), err, fault.Memory)
		}
	}},
	{"Free_TwiceIsRefused", func(r *rig) {
		m := r.alloc(4096)
		r.must(m.Free())
		r.wantKind("second free", m.Free(), fault.Closed)
	}},
	{"Free_UnderACopyIsRefused", func(r *rig) {
		src, mid, dst := r.page(64, 's'), r.alloc(64), r.alloc(64)
		a, b := r.stream("a"), r.stream("b")
		release := r.hold(a)
		r.copy(a, whole(mid, src))
		e := r.record(a)
		r.must(b.Wait(e))
		r.copy(b, whole(dst, mid))
		t := r.signal(b)
		for _, m := range []*device.Memory{src, mid, dst} {
			r.wantKind("free under a copy", m.Free(), fault.Busy)
		}
		release()
		r.must(r.outcome(t))
		// What comes before the ticket is over, on any stream.
		if !e.Done() {
			r.Error("the event before the ticket is not done")
		}
		r.want("destination", dst, 0, contents('s', 0, 64))
		for _, m := range []*device.Memory{src, mid, dst} {
			r.must(m.Free())
		}
	}},
	{"Free_MemoryIsNotCopiedAnyMore", func(r *rig) {
		gone, here, s := r.alloc(64), r.page(64, 'a'), r.stream("s")
		other := r.page(64, 'b')
		r.must(gone.Free())
		r.wantKind("to freed memory", s.Copy([]device.Op{whole(here, other), whole(gone, here)}), fault.Closed)
		r.wantKind("from freed memory", s.Copy([]device.Op{whole(here, other), whole(here, gone)}), fault.Closed)
		r.sync(s)
		r.want("memory of the op before", here, 0, contents('a', 0, 64))
	}},
}

var copyCases = []testCase{
	{"Copy_MovesExactlyTheBytesAsked", func(r *rig) {
		const size = 1<<20 + 5000
		from, before := contents('s', 0, size), contents('d', 0, size)
		src, s := r.alloc(size), r.stream("s")
		r.write(src, from)
		for _, c := range []struct{ dstOff, srcOff, n int64 }{
			{0, 0, size},
			{0, 0, 1},
			{size - 1, size - 1, 1},
			{1, 0, size - 1},
			{0, 1, size - 1},
			{4095, 4097, 8191},
			{13, 13, 1 << 20},
			{7, 9, 1<<20 + 1},
			{0, 0, 0},
			{size, size, 0},
		} {
			dst := r.alloc(size)
			r.write(dst, before)
			r.copy(s, device.Op{Dst: dst, Src: src, DstOff: c.dstOff, SrcOff: c.srcOff, Bytes: c.n})
			r.sync(s)
			want := bytes.Clone(before)
			copy(want[c.dstOff:], from[c.srcOff:][:c.n])
			r.want(fmt.Sprintf("copy of %+v", c), dst, 0, want)
			r.must(dst.Free())
		}
		r.want("source", src, 0, from)
	}},
	{"Copy_RunsEveryOpOfACall", func(r *rig) {
		const chunk, n = 96, 1000
		src, dst, s := r.page(n*chunk, 's'), r.alloc(n*chunk), r.stream("s")
		ops := make([]device.Op, n)
		want := make([]byte, 0, n*chunk)
		for i := range ops {
			from := int64(i*7%n) * chunk
			ops[i] = device.Op{Dst: dst, Src: src, DstOff: int64(i) * chunk, SrcOff: from, Bytes: chunk}
			want = append(want, contents('s', from, chunk)...)
		}
		r.copy(s, ops...)
		r.sync(s)
		r.want("scattered chunks", dst, 0, want)
	}},
	{"Copy_OfNothingIsLegal", func(r *rig) {
		s, none := r.stream("s"), r.alloc(0)
		r.copy(s)
		r.copy(s, whole(none, r.alloc(0)))
		r.must(r.outcome(r.signal(s)))
	}},
	{"Copy_WithinOneMemory", func(r *rig) {
		m, s := r.page(1000, 'a'), r.stream("s")
		r.copy(s, device.Op{Dst: m, Src: m, DstOff: 500, SrcOff: 0, Bytes: 500})
		r.sync(s)
		r.want("copied half", m, 500, contents('a', 0, 500))
	}},
	{"Copy_ChecksEveryOpBeforeItEnqueuesAny", func(r *rig) {
		src, dst, s := r.page(100, 's'), r.page(100, 'd'), r.stream("s")
		const most = 1<<63 - 1
		for _, bad := range []device.Op{
			{Dst: nil, Src: src, Bytes: 1},
			{Dst: dst, Src: nil, Bytes: 1},
			{Dst: dst, Src: src, Bytes: -1},
			{Dst: dst, Src: src, Bytes: 101},
			{Dst: dst, Src: src, DstOff: 1, Bytes: 100},
			{Dst: dst, Src: src, SrcOff: 1, Bytes: 100},
			{Dst: dst, Src: src, DstOff: -1, Bytes: 1},
			{Dst: dst, Src: src, SrcOff: -1, Bytes: 1},
			{Dst: dst, Src: src, DstOff: 101, Bytes: 0},
			{Dst: dst, Src: src, DstOff: most, Bytes: most},
			{Dst: dst, Src: src, SrcOff: most, Bytes: 1},
			{Dst: dst, Src: src, Bytes: most},
		} {
			r.wantKind(fmt.Sprintf("op %+v", bad), s.Copy([]device.Op{whole(dst, src), bad}), fault.Invalid)
		}
		r.sync(s)
		r.want("destination of the op before", dst, 0, contents('d', 0, 100))
		r.copy(s, whole(dst, src)) // the stream itself is well
		r.sync(s)
		r.want("destination of a later call", dst, 0, contents('s', 0, 100))
	}},
	{"Copy_KeepsNoHoldOfTheSlice", func(r *rig) {
		src, dst, s := r.page(100, 's'), r.alloc(100), r.stream("s")
		release := r.hold(s)
		ops := []device.Op{whole(dst, src)}
		r.must(s.Copy(ops))
		ops[0] = device.Op{}
		release()
		r.sync(s)
		r.want("destination", dst, 0, contents('s', 0, 100))
	}},
	{"Copy_NeverWaitsForTheDevice", func(r *rig) {
		src, dst, s := r.page(64, 's'), r.alloc(64), r.stream("s")
		release := r.hold(s)
		enqueued := make(chan error, 1)
		go func() {
			var errs []error
			e, err := r.Device.NewEvent()
			errs = append(errs, err)
			for range 10_000 {
				errs = append(errs, s.Copy([]device.Op{whole(dst, src)}), s.Record(e), s.Wait(e), s.Signal(device.NewTicket()))
			}
			enqueued <- errors.Join(errs...)
		}()
		select {
		case err := <-enqueued:
			r.must(err)
		case <-time.After(patience):
			release()
			r.Fatal("calls on a held stream do not return")
		}
		release()
		r.sync(s)
		r.want("destination", dst, 0, contents('s', 0, 64))
	}},
	{"Copy_CallsFromManyGoroutinesAreEachEnqueuedWhole", func(r *rig) {
		// Every caller writes its own contents to the same places, in one call.
		// Whichever call is last, all places must be of one caller.
		const callers, calls, places, size = 8, 50, 16, 64
		s, dst := r.stream("s"), r.alloc(places*size)
		var src [callers]*device.Memory
		for i := range src {
			src[i] = r.page(size, byte('a'+i))
		}
		var all sync.WaitGroup
		errs := make([]error, callers)
		for i := range callers {
			all.Go(func() {
				ops := make([]device.Op, places)
				for p := range ops {
					ops[p] = device.Op{Dst: dst, Src: src[i], DstOff: int64(p * size), Bytes: size}
				}
				for range calls {
					t := device.NewTicket()
					errs[i] = errors.Join(errs[i], s.Copy(ops), s.Signal(t), t.Wait(context.Background()))
				}
			})
		}
		all.Wait()
		r.must(errors.Join(errs[:]...))
		got := r.read(dst, 0, places*size)
		if !bytes.Equal(got, bytes.Repeat(got[:size], places)) {
			r.Error("the places hold bytes of more than one call")
		}
		last := -1
		for i := range callers {
			if bytes.Equal(got[:size], contents(byte('a'+i), 0, size)) {
				last = i
			}
		}
		if last < 0 {
			r.Error("the places hold bytes of no call")
		}
	}},
}
