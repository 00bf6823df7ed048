package transfer

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// AppendSums appends the sums of pages of c: the xxh3-128 of a page's planes, layer by
// layer in c's order, in each by kind. That is the order of [kv.Geometry.Packed], so the
// sums of a packed host pool are the same. Kinds: those of [kv.Cache.Plane]; sums comes
// back as it was.
func AppendSums(sums []Sum, c *kv.Cache, pages []page.ID) ([]Sum, error) {
	order, n := summing(c.Geometry(), c.Geometry()), len(sums)
	h := xxh3.New()
	for _, id := range pages {
		sum, err := order.sum(h, c, id)
		if err != nil {
			return sums[:n], err
		}
		sums = append(sums, sum)
	}
	return sums, nil
}

// planeAt is a plane of a cache: a layer by its position, and a plane of it.
type planeAt struct{ layer, plane int }

// sumOrder is the planes of a cache in the order in which a page is summed.
type sumOrder []planeAt

// summing returns the order in which the owner sums its pages, in the positions of a
// cache that is exchangeable with its own.
func summing(local, owner *kv.Geometry) (order sumOrder) {
	at := map[int]int{} // global id → position
	for i, l := range local.Spec().Layers {
		at[l.ID] = i
	}
	spec := local.Spec()
	for _, l := range owner.Spec().Layers {
		i := at[l.ID]
		from := len(order)
		for j := range spec.Layers[i].Planes {
			order = append(order, planeAt{i, j})
		}
		slices.SortStableFunc(order[from:], func(a, b planeAt) int {
			return cmp.Compare(spec.Layers[i].Planes[a.plane].Kind, spec.Layers[i].Planes[b.plane].Kind)
		})
	}
	return order
}

// sum uses h, whatever it holds.
func (o sumOrder) sum(h *xxh3.Hasher, c *kv.Cache, id page.ID) (Sum, error) {
	h.Reset()
	for _, at := range o {
		b, err := c.Plane(at.layer, at.plane, id)
		if err != nil {
			return Sum{}, err
		}
		_, _ = h.Write(b) // never fails
	}
	s := h.Sum128()
	return Sum{Hi: s.Hi, Lo: s.Lo}, nil
}

// checkSums compares the whole pages that p has brought with what d says of them, and
// returns how many, or gives up when ctx ends. Pages that the host can't address, and parts of pages, can't be
// checked.
func checkSums(ctx context.Context, c *kv.Cache, p *Plan, d *Descriptor) (int, error) {
	if len(d.Sums) == 0 || len(p.Pairs) == 0 || !hostCache(c) {
		return 0, nil
	}
	order, at := summing(c.Geometry(), d.Geometry), -1
	h := xxh3.New()
	for _, pair := range p.Pairs {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		at, _ = d.published(pair.Src, at)
		is, err := order.sum(h, c, pair.Dst)
		if err != nil {
			return 0, err
		}
		if is != d.Sums[at] {
			return 0, fault.New(fault.Corrupt, fmt.Sprintf("page %d", pair.Src), "arrived in page %d with the checksum %016x%016x, and its owner says %016x%016x",
				pair.Dst, is.Hi, is.Lo, d.Sums[at].Hi, d.Sums[at].Lo).Hint("read it again, or compute it")
		}
	}
	return len(p.Pairs), nil
}

// hostCache reports whether the host can address all of c.
func hostCache(c *kv.Cache) bool {
	for i := range c.Geometry().Regions() {
		if m, err := c.Region(i); err != nil || m.Bytes() == nil {
			return false
		}
	}
	return true
}
