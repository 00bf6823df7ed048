package tcp

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// Report is what [Check] found.
type Report struct {
	RoundTrip time.Duration // of a request over loopback, in this process
	// The most that the kernel has under way on one connection, 0 where it doesn't say.
	// On a long way the rate of a connection is at most this a round trip.
	ReceiveBuffer, SendBuffer int64
}

// Check has one side of this process read from the other, as a first use would: what
// doctor asks. Kinds: those of [New] and [Engine.Open].
func Check(ctx context.Context, o Options) (r Report, err error) {
	if len(o.Key) == 0 {
		o.Key = make([]byte, MinKeyBytes)
		_, _ = rand.Read(o.Key) // never fails
	}
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	e, err := New(o)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	g, err := kv.NewGeometry(kv.Spec{Pages: 1, PageSize: 1}) // no bytes
	if err != nil {
		return r, err
	}
	cache, err := kv.NewCache(g, host)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, cache.Close()) }()
	p, err := transfer.NewPublisher(transfer.PublisherOptions{Cache: cache, Host: host, Engines: []transfer.Engine{e}, Publications: 1})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	d, err := p.Descriptor()
	if err != nil {
		return r, err
	}
	s, err := e.Open(ctx, transfer.Target{Cache: cache, Device: host, Host: host}, d, d.Offers[0].Data)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for range 2 { // the first time it connects
		start := time.Now()
		if _, err := s.Epoch(ctx, 0); err != nil {
			return r, err
		}
		r.RoundTrip = time.Since(start)
	}
	r.ReceiveBuffer, r.SendBuffer = most("/proc/sys/net/ipv4/tcp_rmem"), most("/proc/sys/net/ipv4/tcp_wmem")
	return r, nil
}

// most returns the last of the numbers in a file: least, default and most bytes.
func most(file string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) != 3 {
		return 0
	}
	n, err := strconv.ParseInt(fields[2], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
