package kv

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Cache is a geometry and the memory that it describes. All methods may be
// called from any goroutine. None looks at who owns a page (package page): two
// callers that touch the same page at once must order themselves, and so must a
// call of Close and any other call.
type Cache struct {
	g       *Geometry
	regions []*device.Memory
	name    string        // of the device
	dev     device.Device // nil when the regions are somebody else's, who has not said
	reaches bool          // dev is a pinner
	self    *Route        // pages of this cache onto pages of this cache
	closed  atomic.Bool
	bounce  bounce // of rows in memory that the host can't address

	mu    sync.Mutex
	owned []*device.Memory // guarded by mu; to be freed by Close
	stage *stage           // guarded by mu; made by the first cycle of CopyPages
}

// NewCache returns a cache with zeroed memory of dev, one allocation for each
// region. Kinds: those of [device.Device.Alloc].
func NewCache(g *Geometry, dev device.Device) (*Cache, error) {
	c := &Cache{g: g, dev: dev, name: dev.Name()}
	_, c.reaches = dev.(pinner)
	for i, n := range g.spec.RegionBytes {
		m, err := dev.Alloc(n)
		if err != nil {
			_ = c.Close() // the error that counts is err
			return nil, fmt.Errorf("region %d of %d: %w", i, len(g.spec.RegionBytes), err)
		}
		c.regions, c.owned = append(c.regions, m), append(c.owned, m)
	}
	return c.withRoute()
}

// Wrap returns a cache over memory that somebody else owns, and keeps valid as
// long as the cache is used: one Memory for each region, of one device, at least
// as large as the geometry says. Regions that share addresses are refused.
//
// What needs memory or a stream of the device itself is refused of such a cache
// (fault.Unsupported), unless the host can address its memory: the rows of tokens, and
// cycles of [Cache.CopyPages]. [WrapOn] takes the device.
//
// Kind: fault.Invalid.
func Wrap(g *Geometry, regions []*device.Memory) (*Cache, error) { return wrap(g, regions, nil) }

// WrapOn is [Wrap] over memory of dev, which outlives the cache: rows of tokens are
// written and read by its copies, and cycles of pages go through memory of its own.
// Close gives that back.
// Kind: fault.Invalid, also for memory of another device.
func WrapOn(g *Geometry, regions []*device.Memory, dev device.Device) (*Cache, error) {
	if dev == nil {
		return nil, fault.New(fault.Invalid, "device", "is missing").Hint("use Wrap for memory that the host can address")
	}
	for i, m := range regions {
		if m != nil && m.Device() != dev.Name() {
			return nil, fault.New(fault.Invalid, fmt.Sprintf("region %d", i), "is memory of %s, the device is %s", m.Device(), dev.Name())
		}
	}
	return wrap(g, regions, dev)
}

func wrap(g *Geometry, regions []*device.Memory, dev device.Device) (*Cache, error) {
	if len(regions) != len(g.spec.RegionBytes) {
		return nil, fault.New(fault.Invalid, "regions", "%d memories for %d regions", len(regions), len(g.spec.RegionBytes))
	}
	c := &Cache{g: g, regions: slices.Clone(regions), dev: dev}
	_, c.reaches = dev.(pinner)
	for i, m := range regions {
		if m == nil {
			return nil, fault.New(fault.Invalid, fmt.Sprintf("region %d", i), "has no memory")
		}
		if err := g.checkMemory(i, m); err != nil {
			return nil, err
		}
		if i == 0 {
			c.name = m.Device()
		}
		if m.Device() != c.name {
			return nil, fault.New(fault.Invalid, fmt.Sprintf("region %d", i), "is memory of %s, region 0 of %s", m.Device(), c.name)
		}
	}
	if err := c.checkApart(); err != nil {
		return nil, err
	}
	return c.withRoute()
}

// checkApart refuses regions that share addresses: their planes would overlap
// where the geometry, which knows offsets only, sees none.
func (c *Cache) checkApart() error {
	var order []int
	for i, n := range c.g.spec.RegionBytes {
		if n > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(c.regions[a].Base(), c.regions[b].Base()) })
	for i := 1; i < len(order); i++ {
		a, b := order[i-1], order[i]
		if gap := c.regions[b].Base() - c.regions[a].Base(); uint64(gap) < uint64(c.g.spec.RegionBytes[a]) {
			return fault.New(fault.Invalid, fmt.Sprintf("region %d", b), "begins at %#x, inside the %d bytes of region %d at %#x",
				c.regions[b].Base(), c.g.spec.RegionBytes[a], a, c.regions[a].Base()).
				Hint("describe memory that several layers share as one region")
		}
	}
	return nil
}

// checkMemory refuses memory that is smaller than the region.
func (g *Geometry) checkMemory(region int, m *device.Memory) error {
	if want := g.spec.RegionBytes[region]; m.Size() < want {
		return fault.New(fault.Invalid, fmt.Sprintf("region %d", region), "has %d bytes of memory, its geometry needs %d", m.Size(), want)
	}
	return nil
}

func (c *Cache) withRoute() (*Cache, error) {
	var err error
	if c.self, err = NewRoute(c, c); err != nil {
		return nil, err
	}
	return c, nil
}

// Close frees the memory that the cache owns and ends its use. Memory that work
// in flight still uses is fault.Busy, and freed by another Close; a Close with
// nothing left to free is fault.Closed.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Swap(true) && len(c.owned) == 0 {
		return c.errClosed()
	}
	errs := []error{c.bounce.close()}
	c.owned = slices.DeleteFunc(c.owned, func(m *device.Memory) bool {
		err := m.Free()
		errs = append(errs, err)
		return err == nil
	})
	return errors.Join(errs...)
}

func (c *Cache) errClosed() error { return fault.New(fault.Closed, "cache", "was closed") }

// Geometry returns the cache's geometry.
func (c *Cache) Geometry() *Geometry { return c.g }

// Layout returns the order of axes in a page.
func (c *Cache) Layout() Layout { return c.g.Layout() }

// DType returns the type of the elements.
func (c *Cache) DType() DType { return c.g.DType() }

// Device returns the name of the device whose memory it is, "" for a wrapped
// cache of no regions.
func (c *Cache) Device() string { return c.name }

// Layers returns the number of layers.
func (c *Cache) Layers() int { return c.g.Layers() }

// Pages returns the number of pages.
func (c *Cache) Pages() int { return c.g.Pages() }

// PageSize returns the tokens of a page.
func (c *Cache) PageSize() int { return c.g.PageSize() }

// Bytes returns the bytes of all regions together.
func (c *Cache) Bytes() int64 { return c.g.Bytes() }

// Base returns the address of region 0, 0 when there is none.
func (c *Cache) Base() uintptr {
	if len(c.regions) == 0 {
		return 0
	}
	return c.regions[0].Base()
}

// Region returns the memory of a region. Kind: fault.Invalid.
func (c *Cache) Region(region int) (*device.Memory, error) {
	if region < 0 || region >= len(c.regions) {
		return nil, outside("region", int64(region), 0, int64(len(c.regions)-1))
	}
	return c.regions[region], nil
}

// Chunks is [Geometry.Chunks] with the addresses of the cache's own regions.
func (c *Cache) Chunks(dst []Chunk, layer int, p page.ID, t0, t1 int) ([]Chunk, error) {
	return c.g.chunks(dst, func(r int) uintptr { return c.regions[r].Base() }, layer, p, t0, t1)
}

// ChunkView is [Geometry.ChunkView] over the cache's own memory.
func (c *Cache) ChunkView(layer int, p page.ID, t0, t1 int) (View, error) {
	return c.g.view(c.memory, layer, p, t0, t1)
}

// LayerView is [Geometry.LayerView] over the cache's own memory.
func (c *Cache) LayerView(layer int) (View, error) { return c.g.layerView(c.memory, layer) }

func (c *Cache) memory(region int) *device.Memory { return c.regions[region] }

// Page returns the bytes of page p, which lie in one stretch of host memory. It
// is what checksums and disks read of a packed host cache.
//
// Kinds: fault.Invalid (page out of range), fault.Unsupported (a page is not one
// stretch, or not in host memory), fault.Closed. A geometry of no layers has
// pages of 0 bytes.
func (c *Cache) Page(p page.ID) ([]byte, error) {
	g := c.g
	if err := g.checkPage(p); err != nil {
		return nil, err
	}
	if g.pageBytes == 0 {
		return nil, nil
	}
	if !g.single {
		return nil, fault.New(fault.Unsupported, "page", "%d is not one stretch of memory", p).Hint("use a packed geometry")
	}
	mem, err := c.host(g.region)
	if err != nil {
		return nil, err
	}
	off := g.start + int64(p)*g.stride
	return mem[off : off+g.pageBytes : off+g.pageBytes], nil
}

// Plane returns the bytes of page p in plane number plane of the layer at that
// position, in host memory. It is how scales of whole pages and states are
// written and read: as they are, at once, and ordered with nothing.
//
// Kinds: fault.Invalid (layer, plane or page out of range), fault.Unsupported
// (memory that the host can't address), fault.Closed.
func (c *Cache) Plane(layer, plane int, p page.ID) ([]byte, error) {
	l, err := c.g.layer(layer)
	if err != nil {
		return nil, err
	}
	if plane < 0 || plane >= len(l.Planes) {
		return nil, outside("plane", int64(plane), 0, int64(len(l.Planes)-1))
	}
	if err := c.g.checkPage(p); err != nil {
		return nil, err
	}
	pl := &l.Planes[plane]
	mem, err := c.host(pl.Region)
	if err != nil {
		return nil, err
	}
	off := pl.Offset + int64(p)*pl.PageStride
	return mem[off : off+pl.Bytes : off+pl.Bytes], nil
}

// host returns the bytes of a region in host memory.
func (c *Cache) host(region int) ([]byte, error) {
	if c.closed.Load() {
		return nil, c.errClosed()
	}
	mem := c.regions[region].Bytes()
	if mem == nil && c.g.spec.RegionBytes[region] > 0 {
		return nil, fault.New(fault.Unsupported, fmt.Sprintf("region %d", region), "is memory of %s, which the host can't address", c.name).
			Hint("copy the pages to a host cache first; rows of tokens can be reached through the cache's device (WrapOn)")
	}
	return mem, nil
}
