package cudaipc

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// maxDims is the most dimensions of a tensor.
const maxDims = 16

// torchType is what a tensor's dtype is here: its bytes, and the elements of caches that
// it can hold. Those that torch has no type for, or that engines keep as bytes, are in
// tensors of uint8.
type torchType struct {
	bytes int64
	holds []kv.DType
}

func torchTypes() map[string]torchType {
	fp8 := torchType{1, []kv.DType{kv.FP8}}
	return map[string]torchType{
		"torch.bfloat16":         {2, []kv.DType{kv.BF16}},
		"torch.float16":          {2, []kv.DType{kv.FP16}},
		"torch.float32":          {4, []kv.DType{kv.FP32}},
		"torch.float8_e4m3fn":    fp8,
		"torch.float8_e4m3fnuz":  fp8,
		"torch.float8_e5m2":      fp8,
		"torch.float8_e5m2fnuz":  fp8,
		"torch.float4_e2m1fn_x2": {1, []kv.DType{kv.FP4}},
		"torch.int8":             {1, []kv.DType{kv.INT8}},
		"torch.uint8":            {1, []kv.DType{kv.FP8, kv.INT8, kv.INT4, kv.FP4}},
	}
}

// axis is n steps of stride bytes.
type axis struct {
	what      string
	n, stride int64
}

func (a axis) String() string { return fmt.Sprintf("%d %s, %d bytes apart", a.n, a.what, a.stride) }

// check refuses a tensor that is not what the geometry says of a region, and returns how
// far in its storage it begins, in bytes. Kinds: fault.Invalid, fault.Unsupported (a dtype
// that is not known).
func (t *Tensor) check(g *kv.Geometry, region int) (data int64, err error) {
	spec := g.Spec()
	kind, ok := torchTypes()[t.DType]
	if !ok {
		return 0, fault.New(fault.Unsupported, "dtype", "%.40q is not known", t.DType)
	}
	dims, end, err := t.axes(kind.bytes)
	if err != nil {
		return 0, err
	}
	offset, ok := mul(t.Offset, kind.bytes)
	if !ok || t.Offset < 0 || t.StorageBytes < 0 || t.StorageBytes > maxBytes || t.StorageOffset < 0 || t.StorageOffset > maxBytes ||
		offset > t.StorageBytes || end > t.StorageBytes-offset {
		return 0, fault.New(fault.Invalid, "storage", "%d bytes, and the tensor has %d from element %d on", t.StorageBytes, end, t.Offset)
	}
	if need := spec.RegionBytes[region]; need > t.StorageBytes-offset {
		return 0, fault.New(fault.Invalid, "storage", "%d bytes from the tensor on, and the geometry needs %d", t.StorageBytes-offset, need)
	}
	for i := range spec.Layers {
		l := &spec.Layers[i]
		for j := range l.Planes {
			p := &l.Planes[j]
			if p.Region != region {
				continue
			}
			if err := checkPlane(&spec, l, p, kind, dims, end); err != nil {
				return 0, fault.Wrap(fault.Invalid, fmt.Sprintf("layer %d, %v", l.ID, p.Kind), err)
			}
		}
	}
	return offset, nil
}

// axes returns the dimensions of more than one element as axes in bytes, longest strides
// first, and the bytes from the first element to the end of the last.
func (t *Tensor) axes(item int64) (dims []axis, end int64, err error) {
	if len(t.Size) != len(t.Stride) || len(t.Size) == 0 || len(t.Size) > maxDims {
		return nil, 0, fault.New(fault.Invalid, "tensor", "%d sizes and %d strides of 1 … %d dimensions", len(t.Size), len(t.Stride), maxDims)
	}
	for i, n := range t.Size {
		stride, ok := mul(t.Stride[i], item)
		if n < 1 || t.Stride[i] < 0 || !ok {
			return nil, 0, fault.New(fault.Invalid, "tensor", "dimension %d has size %d and stride %d", i, n, t.Stride[i])
		}
		if n > 1 {
			dims = append(dims, axis{fmt.Sprintf("steps of dimension %d", i), n, stride})
		}
	}
	slices.SortFunc(dims, func(a, b axis) int { return cmp.Compare(b.stride, a.stride) })
	end = item
	for _, d := range slices.Backward(dims) {
		if d.stride < end {
			return nil, 0, fault.New(fault.Invalid, "tensor", "its elements overlap: %v, and %d bytes lie between", d, end)
		}
		span, ok := mul(d.n-1, d.stride)
		if !ok || span > math.MaxInt64-end {
			return nil, 0, fault.New(fault.Invalid, "tensor", "%v are more than 63 bits can count", d)
		}
		end += span
	}
	return dims, end, nil
}

func mul(a, b int64) (int64, bool) {
	if a < 0 || b < 0 {
		return 0, false
	}
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return int64(lo), hi == 0 && lo <= math.MaxInt64
}

// checkPlane refuses a plane whose axes are not dimensions of the tensor, or that ends
// behind it.
func checkPlane(s *kv.Spec, l *kv.Layer, p *kv.Plane, kind torchType, dims []axis, end int64) error {
	rows := p.Kind == kv.K || p.Kind == kv.V || p.Kind == kv.KV || p.Kind == kv.Latent
	if rows && !slices.Contains(kind.holds, s.DType) {
		return fault.New(fault.Invalid, "dtype", "the tensor's holds %v, and the geometry's is %v", kind.holds, s.DType)
	}
	// Planes lie inside their regions, so this is in range.
	if last := p.Offset + int64(s.Pages-1)*p.PageStride + p.Bytes; last > end {
		return fault.New(fault.Invalid, "tensor", "%d bytes, and the plane ends at %d", end, last)
	}
	if len(dims) <= 1 && (len(dims) == 0 || dims[0].stride == kind.bytes) {
		return nil // a stretch of bytes
	}
	need := []axis{{"pages", int64(s.Pages), p.PageStride}}
	if p.TokenStride > 0 {
		need = append(need, axis{"tokens", int64(s.PageSize), p.TokenStride})
	}
	if p.HeadStride > 0 {
		need = append(need, axis{"heads", int64(l.Heads), p.HeadStride})
	}
	if p.KVStride > 0 {
		need = append(need, axis{"of K and V", 2, p.KVStride})
	}
	if rows {
		row := s.DType.Bytes(int64(l.Dim))
		if row%kind.bytes != 0 {
			return fault.New(fault.Invalid, "dtype", "rows of %d bytes, of elements of %d", row, kind.bytes)
		}
		need = append(need, axis{"elements", row / kind.bytes, kind.bytes})
	}
	need = slices.DeleteFunc(need, func(a axis) bool { return a.n <= 1 })
	for _, d := range dims {
		need = cover(need, d)
	}
	if len(need) > 0 {
		return fault.New(fault.Invalid, "tensor", "has no dimension that is its %v", need[0]).
			Hint("describe the cache as the engine has made it: layout, page size, heads, and the order of axes")
	}
	return nil
}

// cover takes the axes out of need that dimension d is: one of as many steps, or several,
// each of the steps of the one before, as slots are pages of tokens. Of the outermost, if
// that is pages, a tensor may have more.
func cover(need []axis, d axis) []axis {
	rest := slices.Clone(need)
	n, stride := d.n, d.stride
	for {
		i := slices.IndexFunc(rest, func(a axis) bool { return a.stride == stride && (n%a.n == 0 || a.what == "pages" && a.n <= n) })
		if i < 0 {
			return need
		}
		a := rest[i]
		rest = slices.Delete(rest, i, i+1)
		if n == a.n || a.what == "pages" {
			return rest
		}
		n, stride = n/a.n, stride*a.n
	}
}
