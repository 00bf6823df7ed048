package devicetest

import (
	"fmt"

	"github.com/kvferry/kvferry/device"
)

// hostCases are about copies between host memory and the device's own.
var hostCases = []testCase{
	{"Host_CopiesToTheDeviceAndBack", func(r *rig) {
		// More than a piece of host memory, so that ops cross from one to the next.
		const size = 3<<20 + 4096 + 5
		from, s := r.hostPage(size, 'h'), r.stream("s")
		dev, back := r.alloc(size), r.hostAlloc(size)
		r.copy(s, whole(dev, from))
		r.copy(s, whole(back, dev))
		r.sync(s)
		r.want("device", dev, 0, contents('h', 0, size))
		r.want("back on the host", back, 0, contents('h', 0, size))
	}},
	{"Host_CopiesScatteredRowsBothWays", func(r *rig) {
		const row, rows, stride = 777, 500, 5000
		s := r.stream("s")
		host, dev := r.hostPage(rows*stride, 'h'), r.page(rows*stride, 'd')
		in, out := make([]device.Op, rows), make([]device.Op, rows)
		back := r.hostPage(rows*stride, 'b')
		for i := range int64(rows) {
			in[i] = device.Op{Dst: dev, Src: host, DstOff: (rows - 1 - i) * stride, SrcOff: i * stride, Bytes: row}
			out[i] = device.Op{Dst: back, Src: dev, DstOff: i * stride, SrcOff: (rows - 1 - i) * stride, Bytes: row}
		}
		r.copy(s, in...)
		r.copy(s, out...)
		r.sync(s)
		want := contents('b', 0, rows*stride)
		for i := range int64(rows) {
			copy(want[i*stride:], contents('h', i*stride, row))
		}
		r.want("back on the host", back, 0, want)
	}},
	{"Host_CopiesWithinTheHost", func(r *rig) {
		src, dst, s := r.hostPage(2<<20+7, 's'), r.hostAlloc(2<<20+7), r.stream("s")
		r.copy(s, whole(dst, src))
		r.sync(s)
		r.want("destination", dst, 0, contents('s', 0, src.Size()))
	}},
	{"Host_CopiesOfEveryAlignment", func(r *rig) {
		const size = 4 << 10
		src, s := r.hostPage(size, 's'), r.stream("s")
		for _, off := range []int64{0, 1, 3, 8, 63, 64, 511} {
			dev, back := r.alloc(size), r.hostPage(size, 'b')
			n := size - off
			r.copy(s, device.Op{Dst: dev, Src: src, DstOff: off, SrcOff: 0, Bytes: n})
			r.copy(s, device.Op{Dst: back, Src: dev, DstOff: 0, SrcOff: off, Bytes: n})
			r.sync(s)
			want := append(contents('s', 0, n), contents('b', n, off)...)
			r.want(fmt.Sprint("offset ", off), back, 0, want)
		}
	}},
}
