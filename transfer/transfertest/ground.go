package transfertest

import (
	"bytes"
	"context"
	"errors"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// ground is a cache whose bytes the suite reads and writes, wherever they lie.
type ground struct {
	cache   *kv.Cache
	regions []*device.Memory // of cache, where the side makes them
	dev     device.Device
	mirror  *kv.Cache // host memory of the same geometry, which dev reaches; nil when the host sees cache
	mirrors []*device.Memory
	stream  device.Stream
}

// newGround returns a cache of that geometry on side. On an error nothing is left.
func newGround(side Side, host *device.Host, g *kv.Geometry) (x *ground, err error) {
	x = &ground{dev: side.Device}
	defer func() {
		if err != nil {
			_ = x.close()
		}
	}()
	if x.dev == nil {
		x.dev = host
	}
	if side.Memory == nil {
		x.cache, err = kv.NewCache(g, x.dev)
	} else {
		for _, n := range g.Spec().RegionBytes {
			var m *device.Memory
			if m, err = side.Memory(n); err != nil {
				return nil, err
			}
			x.regions = append(x.regions, m)
		}
		x.cache, err = kv.WrapOn(g, x.regions, x.dev)
	}
	if err != nil || hostMemory(x.cache) {
		return x, err
	}
	dev, ok := x.dev.(interface {
		AllocHost(h *device.Host, bytes, cut int64) (*device.Memory, error)
		AdmitPageable(m *device.Memory) error
	})
	if !ok {
		return nil, errors.New("the device reaches no host memory")
	}
	for _, n := range g.Spec().RegionBytes {
		m, err := device.ReachableMemory(dev, host, n, 1)
		if err != nil {
			return nil, err
		}
		x.mirrors = append(x.mirrors, m)
	}
	if x.mirror, err = kv.Wrap(g, x.mirrors); err != nil {
		return nil, err
	}
	x.stream, err = x.dev.NewStream("suite")
	return x, err
}

func hostMemory(c *kv.Cache) bool {
	m, err := c.Region(0)
	return err == nil && m.Bytes() != nil
}

// fill is [Fill]. What the mirror doesn't have is overwritten with what it has.
func (x *ground) fill(seed uint64, pages []page.ID) error {
	if x.mirror == nil {
		return Fill(x.cache, seed, pages)
	}
	if err := Fill(x.mirror, seed, pages); err != nil {
		return err
	}
	return x.carry(func(region, mirror *device.Memory) device.Op {
		return device.Op{Dst: region, Src: mirror, Bytes: region.Size()}
	})
}

// bytes returns a copy of the regions' bytes.
func (x *ground) bytes() (regions [][]byte, err error) {
	from := x.cache
	if x.mirror != nil {
		from = x.mirror
		err = x.carry(func(region, mirror *device.Memory) device.Op {
			return device.Op{Dst: mirror, Src: region, Bytes: region.Size()}
		})
	}
	for i := range x.cache.Geometry().Regions() {
		m, regionErr := from.Region(i)
		if err = errors.Join(err, regionErr); err != nil {
			return nil, err
		}
		regions = append(regions, bytes.Clone(m.Bytes()))
	}
	return regions, err
}

func (x *ground) carry(op func(region, mirror *device.Memory) device.Op) error {
	var ops []device.Op
	for i, mirror := range x.mirrors {
		region, err := x.cache.Region(i)
		if err != nil {
			return err
		}
		ops = append(ops, op(region, mirror))
	}
	return errors.Join(x.stream.Copy(ops), x.stream.Sync(context.Background()))
}

func (x *ground) close() (err error) {
	if x.stream != nil {
		err = x.stream.Close()
	}
	for _, c := range []*kv.Cache{x.mirror, x.cache} {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	for _, m := range append(x.mirrors, x.regions...) {
		err = errors.Join(err, m.Free())
	}
	return err
}
