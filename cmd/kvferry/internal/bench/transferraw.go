package bench

import (
	"context"
	"io"
	"net"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// The raw stream is what Go's TCP allows: one connection, on which as many bytes as a read
// has are sent as they lie in memory, in segments, each with its checksum behind it, and
// received the same way. It knows no pages, and so has no small pieces. Of each read the
// reader says the number, in one byte.
const segmentBytes = 1 << 20

// segmentsOf returns the memory of a cache in segments, read by read.
func segmentsOf(c *kv.Cache, s transferShape) (reads [][][]byte, err error) {
	m, err := c.Region(0)
	if err != nil {
		return nil, err
	}
	b := m.Bytes()
	local, _ := s.orders()
	for _, ids := range local {
		var segments [][]byte
		for n := int64(len(ids)) * s.PageBytes; n > 0; {
			k := min(n, segmentBytes)
			segments = append(segments, b[:k:k])
			b, n = b[k:], n-k
		}
		reads = append(reads, segments)
	}
	return reads, nil
}

type rawServer struct {
	listener net.Listener
	over     chan struct{}
}

// serveRaw serves one connection after the other.
func serveRaw(ctx context.Context, c *kv.Cache, s transferShape) (*rawServer, error) {
	reads, err := segmentsOf(c, s)
	if err != nil {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fault.Wrap(fault.Unsupported, "raw stream", err)
	}
	r := &rawServer{listener: l, over: make(chan struct{})}
	go func() {
		defer close(r.over)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // it fails what waits
			serveRawConn(conn, reads)
			stop()
			_ = conn.Close() // whatever happened on it, the reader sees it
		}
	}()
	return r, nil
}

// close waits for the connection that is served, which its reader has closed.
func (r *rawServer) close() error {
	err := r.listener.Close()
	<-r.over
	return err
}

func serveRawConn(conn net.Conn, reads [][][]byte) {
	var which [1]byte
	for {
		if _, err := io.ReadFull(conn, which[:]); err != nil || int(which[0]) >= len(reads) {
			return
		}
		for _, b := range reads[which[0]] {
			sum := xxh3.Hash128(b).Bytes()
			buffers := net.Buffers{b, sum[:]}
			if _, err := buffers.WriteTo(conn); err != nil {
				return
			}
		}
	}
}

// rawReader is the other end.
type rawReader struct {
	conn  net.Conn
	reads [][][]byte
}

func dialRaw(ctx context.Context, address string, c *kv.Cache, s transferShape) (*rawReader, error) {
	r := &rawReader{}
	var err error
	if r.reads, err = segmentsOf(c, s); err != nil {
		return nil, err
	}
	if r.conn, err = new(net.Dialer).DialContext(ctx, "tcp", address); err != nil {
		return nil, fault.Wrap(fault.Unsupported, "raw stream", err)
	}
	return r, nil
}

// read reads one read. The sum is taken of what is in the processor's cache.
func (r *rawReader) read(i int) error {
	if _, err := r.conn.Write([]byte{byte(i)}); err != nil {
		return err
	}
	for _, b := range r.reads[i] {
		var sum [16]byte
		if _, err := io.ReadFull(r.conn, b); err != nil {
			return err
		}
		if _, err := io.ReadFull(r.conn, sum[:]); err != nil {
			return err
		}
		if is := xxh3.Hash128(b).Bytes(); is != sum {
			return fault.New(fault.Corrupt, "raw stream", "a segment arrived with the checksum %x, and was sent with %x", is, sum).
				Hint("suspect this machine's memory, and report it if it happens again")
		}
	}
	return nil
}

func (r *rawReader) close() error { return r.conn.Close() }
