package hostipc_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/hostipc"
)

// side is what either process opens: a cache of int8 in host memory, and an engine.
type side struct {
	host   *device.Host
	cache  *kv.Cache
	engine *hostipc.Engine
}

func open(dir string, pages int) (s side, err error) {
	if s.host, err = device.OpenHost(device.HostOptions{}); err != nil {
		return s, err
	}
	shape := kv.Config{Layout: kv.NHD, DType: kv.INT8, Layers: 2, Pages: pages, PageSize: 16, KVHeads: 1, HeadDim: 4}
	g, err := shape.LayerMajor()
	if err != nil {
		return s, errors.Join(err, s.close())
	}
	if s.cache, err = kv.NewCache(g, s.host); err != nil {
		return s, errors.Join(err, s.close())
	}
	if s.engine, err = hostipc.New(hostipc.Options{Dir: dir}); err != nil {
		return s, errors.Join(err, s.close())
	}
	return s, nil
}

// close closes in the reverse order. Publishers and readers are closed before.
func (s *side) close() (err error) {
	if s.engine != nil {
		err = s.engine.Close()
	}
	if s.cache != nil {
		err = errors.Join(err, s.cache.Close())
	}
	return errors.Join(err, s.host.Close())
}

// own publishes a sequence of 20 tokens, in pages 7 and 2, until stop is closed.
func own(dir string, descriptors chan<- []byte, stop <-chan struct{}) (err error) {
	s, err := open(dir, 9)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	arena, err := page.NewArena(page.ArenaOptions{Pages: 9})
	if err != nil {
		return err
	}
	if _, err := arena.Acquire(nil, 9); err != nil {
		return err
	}
	pages := []page.ID{7, 2}
	last := kv.Rows{DType: kv.INT8, Data: []byte("last")}
	if err := s.cache.WriteTokens(1, last, last, pages[1:], []int32{3}); err != nil { // token 19
		return err
	}
	if err := arena.Seal(pages); err != nil { // nobody writes them any more
		return err
	}
	sums, err := transfer.AppendSums(nil, s.cache, pages)
	if err != nil {
		return err
	}
	publisher, err := transfer.NewPublisher(transfer.PublisherOptions{
		Cache: s.cache, Host: s.host, Holder: transfer.HoldArena(arena), Engines: []transfer.Engine{s.engine},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, publisher.Close()) }()
	d, err := publisher.Publish(transfer.Lease{Pages: pages, Sums: sums, TTL: time.Minute})
	if err != nil {
		return err
	}
	b, err := d.AppendBinary(nil)
	descriptors <- b
	<-stop
	return err
}

// read reads the sequence into pages 0 and 3 of another cache.
func read(ctx context.Context, dir string, descriptor []byte) (token19 []byte, err error) {
	s, err := open(dir, 4)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	reader, err := transfer.NewReader(transfer.Options{Cache: s.cache, Device: s.host, Engines: []transfer.Engine{s.engine}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	d, err := transfer.Decode(descriptor)
	if err != nil {
		return nil, err
	}
	pages := []page.ID{0, 3}
	if err := reader.Retrieve(ctx, 0, 20, pages, d.Pages, d); errors.Is(err, fault.NotFound) {
		return nil, fmt.Errorf("compute it: %w", err) // the pages, or their owner, are gone
	} else if err != nil {
		return nil, err
	}
	if err := reader.Ack(ctx, d); err != nil {
		return nil, err
	}
	return s.cache.ReadTokens(nil, 1, pages[1:], []int32{3})
}

// An owner and a reader, which are processes elsewhere. The descriptor may go from one to
// the other in any way.
func Example() {
	dir, err := os.MkdirTemp("", "example") // "" is the user's own, for both sides
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	descriptors, stop, owner := make(chan []byte), make(chan struct{}), make(chan error)
	go func() { owner <- own(dir, descriptors, stop) }()

	token, err := read(context.Background(), dir, <-descriptors)
	fmt.Printf("%s, %v\n", token, err)
	close(stop)
	fmt.Println(<-owner)
	// Output:
	// lastlast, <nil>
	// <nil>
}
