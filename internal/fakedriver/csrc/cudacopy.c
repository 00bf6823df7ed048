// The copies of the CUDA driver API.
#include "cuda.h"

EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	ENTER(BOUND);
	return RESULT(copy_linear(here, s, dst, src, n));
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, size_t n, CUstream s)
{
	ENTER(BOUND);
	pthread_mutex_lock(&lock);
	Memory *d = find_memory(dst), *f = find_memory(src);
	bool ok = (!d || d->context == dst_context) && (!f || f->context == src_context);
	pthread_mutex_unlock(&lock);
	if (!ok) {
		violation("the contexts are not those of the memories");
		return INVALID_CONTEXT;
	}
	Shape shape = {.dst = dst, .src = src, .width = n, .rows = 1, .slices = 1};
	return RESULT(copy_shape(here, s, &shape, true));
}

// End is one side of the structs of pitched copies.
typedef struct End {
	size_t x, y, z;
	uint32_t type;
	uint64_t host, device, array;
	size_t pitch, height;
} End;

// address finds where a side begins, and fills in the pitch and height that 0 stands for.
static int address(End *e, size_t width, size_t rows, size_t slices, uint64_t *at)
{
	uint64_t base = e->type == 1 ? e->host : e->device;
	uint64_t unused = e->type == 1 ? e->device : e->host;
	if (e->type != 1 && e->type != 2 && e->type != 4) {
		violation("memory type %u", e->type);
		return INVALID_VALUE;
	}
	if (unused || e->array) {
		violation("a field that memory type %u does not use is not 0", e->type);
		return INVALID_VALUE;
	}
	if (!e->pitch && rows == 1 && slices == 1 && !e->y && !e->z)
		e->pitch = e->x + width;
	if (!e->height && slices == 1 && !e->z)
		e->height = e->y + rows;
	if (e->pitch > MAX_PITCH || e->x > e->pitch || width > e->pitch - e->x) {
		violation("pitch %zu of rows of %zu bytes", e->pitch, width);
		return BAD_PITCH;
	}
	if (e->y > e->height || rows > e->height - e->y) {
		violation("slices of %zu rows, %zu of them copied", e->height, rows);
		return INVALID_VALUE;
	}
	*at = base + (e->z * e->height + e->y) * e->pitch + e->x;
	return OK;
}

// right_type reports whether an address is what the struct says of it.
static bool right_type(const End *e, uint64_t at)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(at);
	pthread_mutex_unlock(&lock);
	if (e->type == 4 || (e->type == 1) == is_host(m))
		return true;
	violation("memory type %u of address %#lx", e->type, at);
	return false;
}

static int copy_pitched(CUstream s, End *dst, End *src, size_t width, size_t rows, size_t slices)
{
	if (!width || !rows || !slices)
		return OK;
	Shape shape = {.width = width, .rows = rows, .slices = slices};
	int e = address(dst, width, rows, slices, &shape.dst);
	if (!e)
		e = address(src, width, rows, slices, &shape.src);
	if (e)
		return e;
	if (!right_type(dst, shape.dst) || !right_type(src, shape.src))
		return INVALID_VALUE;
	shape.dst_pitch = dst->pitch;
	shape.src_pitch = src->pitch;
	shape.dst_slice = dst->pitch * dst->height;
	shape.src_slice = src->pitch * src->height;
	return copy_shape(here, s, &shape, false);
}

typedef struct Memcpy2D {
	size_t src_x, src_y;
	uint32_t src_type;
	uint64_t src_host, src_device, src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	uint32_t dst_type;
	uint64_t dst_host, dst_device, dst_array;
	size_t dst_pitch;
	size_t width, height;
} Memcpy2D;
_Static_assert(sizeof(Memcpy2D) == 128, "CUDA_MEMCPY2D");

EXPORT CUresult cuMemcpy2DAsync_v2(const Memcpy2D *m, CUstream s)
{
	ENTER(BOUND);
	WANT(m);
	End dst = {m->dst_x, m->dst_y, 0, m->dst_type, m->dst_host, m->dst_device, m->dst_array, m->dst_pitch, 0};
	End src = {m->src_x, m->src_y, 0, m->src_type, m->src_host, m->src_device, m->src_array, m->src_pitch, 0};
	return RESULT(copy_pitched(s, &dst, &src, m->width, m->height, 1));
}

typedef struct Memcpy3D {
	size_t src_x, src_y, src_z, src_lod;
	uint32_t src_type;
	uint64_t src_host, src_device, src_array, src_reserved;
	size_t src_pitch, src_height;
	size_t dst_x, dst_y, dst_z, dst_lod;
	uint32_t dst_type;
	uint64_t dst_host, dst_device, dst_array, dst_reserved;
	size_t dst_pitch, dst_height;
	size_t width, height, depth;
} Memcpy3D;
_Static_assert(sizeof(Memcpy3D) == 200, "CUDA_MEMCPY3D");

EXPORT CUresult cuMemcpy3DAsync_v2(const Memcpy3D *m, CUstream s)
{
	ENTER(BOUND);
	WANT(m);
	if (m->src_lod || m->dst_lod || m->src_reserved || m->dst_reserved) {
		violation("LOD and reserved fields must be 0");
		return INVALID_VALUE;
	}
	End dst = {m->dst_x, m->dst_y, m->dst_z, m->dst_type, m->dst_host, m->dst_device, m->dst_array, m->dst_pitch, m->dst_height};
	End src = {m->src_x, m->src_y, m->src_z, m->src_type, m->src_host, m->src_device, m->src_array, m->src_pitch, m->src_height};
	return RESULT(copy_pitched(s, &dst, &src, m->width, m->height, m->depth));
}

#if FAKE_VERSION >= 12080
_Static_assert(sizeof(Attributes) == 24, "CUmemcpyAttributes");

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, Attributes *attrs,
				   size_t *index, size_t attributes, size_t *failed, CUstream s)
{
	ENTER(BOUND);
	WANT(failed);
	if (is_handle((uint64_t)failed)) {
		violation("a handle where failIdx belongs: this is the form of 9 arguments");
		return INVALID_VALUE;
	}
	*failed = SIZE_MAX;
	WANT(dsts);
	WANT(srcs);
	WANT(sizes);
	WANT(attrs);
	WANT(index);
	Batch b = {.dsts = dsts, .srcs = srcs, .sizes = sizes, .count = n, .attrs = attrs, .index = index, .attributes = attributes, .failed = failed};
	return RESULT(copy_batch(here, s, &b));
}
#endif

#if FAKE_VERSION >= 13000
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, Attributes *attrs,
				      size_t *index, size_t attributes, CUstream s)
{
	ENTER(BOUND);
	WANT(dsts);
	WANT(srcs);
	WANT(sizes);
	WANT(attrs);
	WANT(index);
	Batch b = {.dsts = dsts, .srcs = srcs, .sizes = sizes, .count = n, .attrs = attrs, .index = index, .attributes = attributes};
	return RESULT(copy_batch(here, s, &b));
}
#endif
