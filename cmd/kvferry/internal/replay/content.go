package replay

import (
	"encoding/binary"
	"math/bits"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// content is what replay writes into pages and expects to find there. The bytes of
// a page are a function of its key, and inside it of layer, plane and token:
// nothing has to be remembered, and a byte that belongs to another page, or was
// left behind by one, does not pass.
//
// The 8-byte words of one plane of one page count up from a seed (a mix of key,
// layer and plane) by an odd step; word i of a plane holds its logical bytes 8i to
// 8i+7, token by token, head by head, whatever the layout makes of them.
type content struct {
	planes   []planeBytes
	pageSize int
	seed     uint64 // of the lines that a sample looks at
}

// planeBytes is one plane of the device cache, addressed.
type planeBytes struct {
	layer, plane int // positions
	mem          []byte
	offset       int64 // of page 0
	pageStride   int64
	bytes        int64 // of one page
	token        int64 // logical bytes of one token
	heads        int   // rows of a token, when the plane is not token after token
	headStride   int64
	tokenStride  int64
}

const step = 0x9e3779b97f4a7c15 // odd, so that words repeat only after 2^64

func newContent(c *kv.Cache, seed uint64) (*content, error) {
	g := c.Geometry()
	x := &content{pageSize: g.PageSize(), seed: seed}
	for l := range g.Layers() {
		layer, err := g.Layer(l)
		if err != nil {
			return nil, err
		}
		for i, p := range layer.Planes {
			region, err := c.Region(p.Region)
			if err != nil {
				return nil, err
			}
			mem := region.Bytes()
			if mem == nil {
				return nil, fault.New(fault.Unsupported, "replay", "the pages of %s cannot be written by the host", c.Device())
			}
			b := planeBytes{
				layer: l, plane: i, mem: mem, offset: p.Offset, pageStride: p.PageStride, bytes: p.Bytes,
				token: p.Bytes / int64(x.pageSize), heads: 1, tokenStride: p.TokenStride, headStride: p.HeadStride,
			}
			if p.TokenStride != b.token { // HND: head after head
				b.heads = layer.Heads
			}
			x.planes = append(x.planes, b)
		}
	}
	return x, nil
}

func seedOf(key *page.Key, layer, plane int) uint64 {
	h := binary.LittleEndian.Uint64(key[:]) ^ bits.RotateLeft64(binary.LittleEndian.Uint64(key[8:]), 31)
	hi, lo := bits.Mul64(h^uint64(layer*4+plane+1)*step, 0xd6e8feb86659fd93)
	return hi ^ lo
}

// rows calls f for every contiguous stretch of tokens t0 to t1 of page id, with
// its logical offset in the plane.
func (p *planeBytes) rows(id page.ID, t0, t1 int, f func(b []byte, logical int64) bool) {
	base := p.offset + int64(id)*p.pageStride
	if p.heads == 1 {
		from, to := int64(t0)*p.token, int64(t1)*p.token
		f(p.mem[base+from:base+to], from)
		return
	}
	row := p.token / int64(p.heads)
	for t := t0; t < t1; t++ {
		for h := range p.heads {
			at := base + int64(h)*p.headStride + int64(t)*p.tokenStride
			if !f(p.mem[at:at+row], int64(t)*p.token+int64(h)*row) {
				return
			}
		}
	}
}

// write fills tokens t0 to t1 of page id with the content of key. It returns the
// bytes written.
func (c *content) write(key *page.Key, id page.ID, t0, t1 int) int64 {
	var n int64
	for i := range c.planes {
		p := &c.planes[i]
		seed := seedOf(key, p.layer, p.plane)
		p.rows(id, t0, t1, func(b []byte, logical int64) bool {
			fill(b, seed, logical)
			n += int64(len(b))
			return true
		})
	}
	return n
}

// wrongByte says where a page does not hold what was written into it.
type wrongByte struct {
	layer, plane int
	offset       int64 // in the plane's page
	got, want    byte
}

// verify compares the whole page id with the content of key. It returns the
// bytes it looked at, and the first wrong one.
func (c *content) verify(key *page.Key, id page.ID, sample bool) (int64, *wrongByte) {
	var n int64
	for i := range c.planes {
		p := &c.planes[i]
		seed := seedOf(key, p.layer, p.plane)
		var wrong *wrongByte
		look := func(b []byte, logical int64) bool {
			n += int64(len(b))
			if at := differs(b, seed, logical); at >= 0 {
				wrong = &wrongByte{p.layer, p.plane, logical + int64(at), b[at], byteOf(seed, logical+int64(at))}
			}
			return wrong == nil
		}
		if sample && p.heads == 1 && p.bytes > 3*line {
			base := p.offset + int64(id)*p.pageStride
			middle := int64((seed^c.seed)%uint64(p.bytes/line)) * line
			for _, at := range [...]int64{0, middle, p.bytes - line} {
				if !look(p.mem[base+at:base+at+line], at) {
					break
				}
			}
		} else {
			p.rows(id, 0, c.pageSize, look)
		}
		if wrong != nil {
			return n, wrong
		}
	}
	return n, nil
}

const line = 64 // bytes that a sample looks at in one place

func wordOf(seed uint64, logical int64) uint64 { return seed + uint64(logical>>3)*step }

func byteOf(seed uint64, logical int64) byte {
	return byte(wordOf(seed, logical) >> (8 * (logical & 7)))
}

func fill(b []byte, seed uint64, logical int64) {
	if logical&7 == 0 {
		w := wordOf(seed, logical)
		for ; len(b) >= 32; b = b[32:] {
			binary.LittleEndian.PutUint64(b[0:8], w)
			binary.LittleEndian.PutUint64(b[8:16], w+step)
			binary.LittleEndian.PutUint64(b[16:24], w+2*step&(1<<64-1))
			binary.LittleEndian.PutUint64(b[24:32], w+3*step&(1<<64-1))
			w += 4 * step & (1<<64 - 1)
			logical += 32
		}
	}
	for i := range b {
		b[i] = byteOf(seed, logical+int64(i))
	}
}

// differs returns the place of the first wrong byte, or -1.
func differs(b []byte, seed uint64, logical int64) int {
	done := 0
	if logical&7 == 0 {
		w := wordOf(seed, logical)
		for ; len(b)-done >= 32; done += 32 {
			c := b[done : done+32]
			d := binary.LittleEndian.Uint64(c[0:8]) ^ w
			d |= binary.LittleEndian.Uint64(c[8:16]) ^ (w + step)
			d |= binary.LittleEndian.Uint64(c[16:24]) ^ (w + 2*step&(1<<64-1))
			d |= binary.LittleEndian.Uint64(c[24:32]) ^ (w + 3*step&(1<<64-1))
			if d != 0 {
				break
			}
			w += 4 * step & (1<<64 - 1)
		}
	}
	for i := done; i < len(b); i++ {
		if b[i] != byteOf(seed, logical+int64(i)) {
			return i
		}
	}
	return -1
}
