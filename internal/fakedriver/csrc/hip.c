// HIP, as libamdhip64.so exports it: of version FAKE_VERSION, which counts as
// hipRuntimeGetVersion does. There are no contexts: each thread has a device, which is
// device 0 until it sets one, so that nothing tells who forgot to; here he is told.
#include "hip.h"
#include "names.h"

#include <stdio.h>
#include <string.h>

const char vendor_name[4] = "HIP";
const bool handles_keep_offsets = true;

static __thread Binding bound;
static __thread hipError_t last_error;

static const Name names[] = {HIP_NAMES(NAME)};

// result is what a call returns, which the thread remembers when it is an error.
hipError_t result(int e)
{
	if (e && e != NOT_READY)
		last_error = e;
	return e;
}

// Nothing has to be called first.
__attribute__((constructor)) static void always_initialized(void) { initialized = true; }

int vendor_context(Context **c, bool *stale)
{
	if (!options.devices)
		return NO_DEVICE;
	*c = bound.context;
	if (!*c) {
		violation("this thread has set no device: the real library would use device 0");
		return INVALID_CONTEXT;
	}
	*stale = binding_stale(&bound);
	return OK;
}

EXPORT const char *hipGetErrorName(hipError_t code)
{
	const char *s = name_of(names, sizeof names / sizeof names[0], code);
	return s ? s : "hipErrorUnknown";
}

EXPORT const char *hipGetErrorString(hipError_t code) { return hipGetErrorName(code); }

EXPORT hipError_t hipGetLastError(void)
{
	int e = last_error;
	last_error = OK;
	return e;
}

EXPORT hipError_t hipPeekAtLastError(void) { return last_error; }

// ---- the library and its devices

EXPORT hipError_t hipInit(unsigned flags)
{
	ENTER(ANYTIME);
	if (flags)
		return RESULT(INVALID_VALUE);
	return RESULT(options.devices ? OK : NO_DEVICE);
}

static hipError_t version(int *v)
{
	WANT(v);
	*v = FAKE_VERSION;
	return OK;
}

EXPORT hipError_t hipRuntimeGetVersion(int *v)
{
	ENTER(ANYTIME);
	return version(v);
}

EXPORT hipError_t hipDriverGetVersion(int *v)
{
	ENTER(ANYTIME);
	return version(v);
}

EXPORT hipError_t hipGetDeviceCount(int *n)
{
	ENTER(ANYTIME);
	WANT(n);
	*n = options.devices;
	return RESULT(*n ? OK : NO_DEVICE);
}

EXPORT hipError_t hipDeviceGet(int *d, int ordinal)
{
	ENTER(ANYTIME);
	WANT(d);
	WANT_DEVICE(ordinal);
	*d = ordinal;
	return OK;
}

EXPORT hipError_t hipSetDevice(int d)
{
	ENTER(ANYTIME);
	WANT_DEVICE(d);
	bind_thread(&bound, &contexts[d]);
	return OK;
}

EXPORT hipError_t hipGetDevice(int *d)
{
	ENTER(ANYTIME);
	WANT(d);
	*d = bound.context ? bound.context->device : 0;
	return OK;
}

EXPORT hipError_t hipDeviceGetName(char *name, int len, int d)
{
	ENTER(ANYTIME);
	WANT(name);
	WANT_DEVICE(d);
	if (len < 1)
		return RESULT(INVALID_VALUE);
	snprintf(name, (size_t)len, "Fake HIP GPU %d", options.physical[d]);
	return OK;
}

EXPORT hipError_t hipDeviceGetUuid(unsigned char *uuid, int d)
{
	ENTER(ANYTIME);
	WANT(uuid);
	WANT_DEVICE(d);
	device_uuid(d, uuid);
	return OK;
}

EXPORT hipError_t hipDeviceGetPCIBusId(char *id, int len, int d)
{
	ENTER(ANYTIME);
	WANT(id);
	WANT_DEVICE(d);
	if (len < 13)
		return RESULT(INVALID_VALUE);
	snprintf(id, (size_t)len, "0000:%02x:00.0", 0x05 + 0x20 * options.physical[d]);
	return OK;
}

EXPORT hipError_t hipDeviceTotalMem(size_t *bytes, int d)
{
	ENTER(ANYTIME);
	WANT(bytes);
	WANT_DEVICE(d);
	*bytes = (size_t)options.memory;
	return OK;
}

EXPORT hipError_t hipDeviceGetAttribute(int *value, int attribute, int d)
{
	ENTER(ANYTIME);
	WANT(value);
	WANT_DEVICE(d);
	if (attribute_override(attribute, value))
		return OK;
	static const struct { int attribute, value; } known[] = {
		{2, 2},           // copy engines
		{3, 1},           // can map host memory
		{4, 1},           // registered memory by its host address
		{16, 0},          // integrated
		{23, 9}, {61, 4}, // compute capability
		{58, MAX_PITCH},  // of pitched copies
		{65, 0},          // pageable memory access
		{66, 0},          // pageable memory by the host's page tables
		{68, 0}, {69, 0}, // PCI device and domain
		{78, 1},          // stream priorities
		{85, 1},          // unified addressing
		{89, 1},          // virtual memory management
		{90, 1},          // host memory can be registered
		{10013, 1},       // streams can wait for words
	};
	*value = 0;
	if (attribute == 67) // PCI bus
		*value = 0x05 + 0x20 * options.physical[d];
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
		if (known[i].attribute == attribute)
			*value = known[i].value;
	return RESULT(attribute >= 0 && attribute < 20000 ? OK : INVALID_VALUE);
}

EXPORT hipError_t hipDeviceCanAccessPeer(int *can, int d, int peer)
{
	ENTER(ANYTIME);
	WANT(can);
	WANT_DEVICE(d);
	WANT_DEVICE(peer);
	*can = d != peer;
	return OK;
}

EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
	ENTER(BOUND);
	WANT_DEVICE(peer);
	if (flags || peer == here->device)
		return RESULT(INVALID_VALUE);
	uint32_t bit = 1u << peer;
	if (here->peers & bit)
		return RESULT(PEER_ALREADY_ENABLED);
	here->peers |= bit;
	return OK;
}

EXPORT hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest)
{
	ENTER(BOUND);
	if (least)
		*least = 1;
	if (greatest)
		*greatest = -1;
	return OK;
}

EXPORT hipError_t hipDeviceSynchronize(void)
{
	ENTER(BOUND);
	pthread_mutex_lock(&lock);
	wait_idle(here);
	int e = here->failed;
	pthread_mutex_unlock(&lock);
	return RESULT(e);
}

// ---- memory

EXPORT hipError_t hipMalloc(void **p, size_t n)
{
	ENTER(BOUND);
	WANT(p);
	return RESULT(allocate(here, (uint64_t *)p, n));
}

EXPORT hipError_t hipFree(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(p ? free_device(here, (uint64_t)p) : OK));
}

EXPORT hipError_t hipMemsetAsync(void *p, int byte, size_t n, hipStream_t s)
{
	ENTER(BOUND);
	return RESULT(fill_async(here, s, (uint64_t)p, byte, n));
}

EXPORT hipError_t hipHostMalloc(void **p, size_t n, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	if (flags & ~0xf0000007u)
		return RESULT(INVALID_VALUE);
	return RESULT(allocate_host(here, (uint64_t *)p, n));
}

EXPORT hipError_t hipHostFree(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(p ? free_host((uint64_t)p) : OK));
}

EXPORT hipError_t hipHostRegister(void *p, size_t n, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	if (flags & ~15u)
		return RESULT(INVALID_VALUE);
	return RESULT(register_host(here, (uint64_t)p, n));
}

EXPORT hipError_t hipHostUnregister(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(unregister_host((uint64_t)p)));
}

EXPORT hipError_t hipMemGetAddressRange(void **base, size_t *n, void *p)
{
	ENTER(BOUND);
	return RESULT(address_range((uint64_t)p, (uint64_t *)base, n, NOT_FOUND));
}

EXPORT hipError_t hipPointerGetAttribute(void *out, int attribute, void *p)
{
	ENTER(BOUND);
	WANT(out);
	int e = OK;
	pthread_mutex_lock(&lock);
	Memory *m = find_memory((uint64_t)p);
	if (!m) {
		e = INVALID_VALUE;
	} else {
		switch (attribute) {
		case 2: *(uint32_t *)out = is_host(m) ? 1 : 2; break;
		case 7: *(uint64_t *)out = m->id; break;
		case 9: *(int *)out = m->context->device; break;
		case 11: *(uint64_t *)out = m->base; break;
		case 12: *(size_t *)out = m->size; break;
		default: e = NOT_SUPPORTED;
		}
	}
	pthread_mutex_unlock(&lock);
	return RESULT(e);
}

// ---- streams and events

EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t *s, unsigned flags, int priority)
{
	ENTER(BOUND);
	WANT(s);
	return RESULT(stream_create(here, s, flags, priority < -1 ? -1 : priority > 1 ? 1 : priority));
}

EXPORT hipError_t hipStreamGetPriority(hipStream_t s, int *priority)
{
	ENTER(BOUND);
	WANT(priority);
	return RESULT(stream_priority(here, s, priority));
}

EXPORT hipError_t hipStreamDestroy(hipStream_t s)
{
	ENTER(ENDING);
	return RESULT(ended(stream_destroy(here, s)));
}

EXPORT hipError_t hipStreamSynchronize(hipStream_t s)
{
	ENTER(BOUND);
	return RESULT(stream_synchronize(here, s));
}

EXPORT hipError_t hipStreamQuery(hipStream_t s)
{
	ENTER(BOUND);
	return RESULT(stream_query(here, s));
}

EXPORT hipError_t hipStreamWaitEvent(hipStream_t s, hipEvent_t e, unsigned flags)
{
	ENTER(BOUND);
	return RESULT(stream_wait_event(here, s, e, flags));
}

EXPORT hipError_t hipLaunchHostFunc(hipStream_t s, void (*f)(void *), void *arg)
{
	ENTER(BOUND);
	if (!f)
		return RESULT(INVALID_VALUE);
	return RESULT(stream_function(here, s, f, arg));
}

EXPORT hipError_t hipStreamWriteValue32(hipStream_t s, void *p, uint32_t value, unsigned flags)
{
	ENTER(BOUND);
	return RESULT(stream_write32(here, s, (uint64_t)p, value, flags));
}

EXPORT hipError_t hipStreamWaitValue32(hipStream_t s, void *p, uint32_t value, unsigned flags, uint32_t mask)
{
	ENTER(BOUND);
	if (mask != UINT32_MAX)
		return RESULT(NOT_SUPPORTED);
	return RESULT(stream_await32(here, s, (uint64_t)p, value, flags));
}

EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t *e, unsigned flags)
{
	ENTER(BOUND);
	WANT(e);
	return RESULT(event_create(here, e, flags & ~0xe0000000u)); // how caches are flushed is nothing here
}

EXPORT hipError_t hipEventDestroy(hipEvent_t e)
{
	ENTER(ENDING);
	return RESULT(ended(event_destroy(e)));
}

EXPORT hipError_t hipEventRecord(hipEvent_t e, hipStream_t s)
{
	ENTER(BOUND);
	return RESULT(event_record(here, e, s));
}

EXPORT hipError_t hipEventQuery(hipEvent_t e)
{
	ENTER(BOUND);
	return RESULT(event_query(e));
}

EXPORT hipError_t hipEventSynchronize(hipEvent_t e)
{
	ENTER(BOUND);
	return RESULT(event_synchronize(e));
}

EXPORT hipError_t hipEventElapsedTime(float *ms, hipEvent_t from, hipEvent_t to)
{
	ENTER(BOUND);
	WANT(ms);
	return RESULT(event_elapsed(ms, from, to));
}

// ---- copies

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS, NO_KERNEL = 1024 };

// right_kind wants the kind of a copy to be what the addresses say.
static int right_kind(int kind, const void *dst, const void *src)
{
	if (kind == BY_ADDRESS)
		return OK;
	if ((kind < HOST_TO_HOST || kind > DEVICE_TO_DEVICE) && kind != NO_KERNEL) {
		violation("kind %d of a copy", kind);
		return BAD_DIRECTION;
	}
	pthread_mutex_lock(&lock);
	bool from_host = is_host(find_memory((uint64_t)src)), to_host = is_host(find_memory((uint64_t)dst));
	pthread_mutex_unlock(&lock);
	if (from_host == (kind == HOST_TO_HOST || kind == HOST_TO_DEVICE) && to_host == (kind == HOST_TO_HOST || kind == DEVICE_TO_HOST))
		return OK;
	violation("kind %d of a copy from %p to %p", kind, src, dst);
	return INVALID_VALUE;
}

EXPORT hipError_t hipMemcpyAsync(void *dst, const void *src, size_t n, int kind, hipStream_t s)
{
	ENTER(BOUND);
	int e = right_kind(kind, dst, src);
	return RESULT(e ? e : copy_linear(here, s, (uint64_t)dst, (uint64_t)src, n));
}

EXPORT hipError_t hipMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device, size_t n, hipStream_t s)
{
	ENTER(BOUND);
	WANT_DEVICE(dst_device);
	WANT_DEVICE(src_device);
	Shape shape = {.dst = (uint64_t)dst, .src = (uint64_t)src, .width = n, .rows = 1, .slices = 1};
	return RESULT(copy_shape(here, s, &shape, true));
}

EXPORT hipError_t hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind, hipStream_t s)
{
	ENTER(BOUND);
	if (!width || !height)
		return OK;
	if (width > dst_pitch || width > src_pitch) {
		violation("pitches %zu and %zu of rows of %zu bytes", dst_pitch, src_pitch, width);
		return RESULT(BAD_PITCH);
	}
	if (dst_pitch > MAX_PITCH || src_pitch > MAX_PITCH) {
		violation("pitches %zu and %zu", dst_pitch, src_pitch);
		return RESULT(INVALID_VALUE);
	}
	int e = right_kind(kind, dst, src);
	Shape shape = {.dst = (uint64_t)dst, .src = (uint64_t)src, .width = width, .rows = height, .slices = 1, .dst_pitch = dst_pitch, .src_pitch = src_pitch};
	return RESULT(e ? e : copy_shape(here, s, &shape, false));
}

#if FAKE_VERSION >= 70100000
// run_batch fails on the way, as the real one does: what comes before a bad copy runs.
static int run_batch(hipStream_t s, Batch *b)
{
	if (b->attributes && FAKE_VERSION < HAS_ATTRIBUTES) {
		violation("a batch with attributes, which came later");
		return NOT_SUPPORTED;
	}
	if (!b->attributes && b->attrs) {
		violation("a batch with no attributes, and an address of some");
		return INVALID_VALUE;
	}
	b->no_attributes = !b->attributes;
	b->partial = true;
	if (b->count > MOST_COPIES) {
		violation("a batch of %zu copies, which the device does not survive", b->count);
		pthread_mutex_lock(&lock);
		fail(here, ILLEGAL_ADDRESS);
		pthread_mutex_unlock(&lock);
		return OK;
	}
	return copy_batch(here, s, b);
}

EXPORT hipError_t hipMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t n, Attributes *attrs, size_t *index,
				      size_t attributes, size_t *failed, hipStream_t s)
{
	ENTER(BOUND);
	WANT(dsts);
	WANT(srcs);
	WANT(sizes);
	WANT(failed);
	if (is_handle((uint64_t)failed)) {
		violation("a handle where failIdx belongs: there are 9 arguments");
		return RESULT(INVALID_VALUE);
	}
	*failed = SIZE_MAX;
	if (attributes) {
		WANT(attrs);
		WANT(index);
	}
	Batch b = {.dsts = (uint64_t *)dsts, .srcs = (uint64_t *)srcs, .sizes = sizes, .count = n,
		   .attrs = attrs, .index = index, .attributes = attributes, .failed = failed};
	return RESULT(run_batch(s, &b));
}
#endif
