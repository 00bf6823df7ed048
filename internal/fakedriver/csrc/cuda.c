// The CUDA driver API, as libcuda.so.1 exports it: of version FAKE_VERSION, without what
// came later.
#include "cuda.h"
#include "names.h"

#include <stdio.h>
#include <string.h>

const char vendor_name[4] = "CUDA";
const bool handles_keep_offsets = false;

static __thread Binding bound;

int vendor_context(Context **c, bool *stale)
{
	*c = bound.context;
	if (!*c) {
		violation("this thread has no current context");
		return INVALID_CONTEXT;
	}
	if (!(*c)->retained && !(*c)->runtime) {
		violation("the context of device %d was released", (*c)->device);
		return INVALID_CONTEXT;
	}
	*stale = binding_stale(&bound);
	return OK;
}

static bool is_device(CUdevice d) { return d >= 0 && d < options.devices; }

#define WANT_DEVICE(d)                             \
	do {                                       \
		if (!is_device(d))                 \
			return RESULT(INVALID_DEVICE); \
	} while (0)

static const Name names[] = {CUDA_NAMES(NAME)};

static CUresult name_error(int code, const char **out)
{
	*out = name_of(names, sizeof names / sizeof names[0], code);
	return *out ? OK : INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
	ENTER(ANYTIME);
	WANT(name);
	return name_error(code, name);
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
	ENTER(ANYTIME);
	WANT(text);
	return name_error(code, text);
}

// ---- the library and its devices

EXPORT CUresult cuInit(unsigned flags)
{
	ENTER(ANYTIME);
	if (flags)
		return INVALID_VALUE;
	if (!options.devices)
		return NO_DEVICE;
	initialized = true;
	return OK;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
	ENTER(ANYTIME);
	WANT(version);
	*version = FAKE_VERSION;
	return OK;
}

EXPORT CUresult cuDeviceGetCount(int *n)
{
	ENTER(INITIALIZED);
	WANT(n);
	*n = options.devices;
	return OK;
}

EXPORT CUresult cuDeviceGet(CUdevice *d, int ordinal)
{
	ENTER(INITIALIZED);
	WANT(d);
	WANT_DEVICE(ordinal);
	*d = ordinal;
	return OK;
}

EXPORT CUresult cuDeviceGetName(char *name, int len, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(name);
	WANT_DEVICE(d);
	if (len < 1)
		return INVALID_VALUE;
	snprintf(name, (size_t)len, "Fake CUDA GPU %d", options.physical[d]);
	return OK;
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(uuid);
	WANT_DEVICE(d);
	device_uuid(d, uuid);
	return OK;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(id);
	WANT_DEVICE(d);
	if (len < 13)
		return INVALID_VALUE;
	snprintf(id, (size_t)len, "0000:%02x:00.0", 0x17 + 0x10 * options.physical[d]);
	return OK;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(bytes);
	WANT_DEVICE(d);
	*bytes = (size_t)options.memory;
	return OK;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(value);
	WANT_DEVICE(d);
	if (attribute_override(attribute, value))
		return OK;
	static const struct { int attribute, value; } known[] = {
		{11, MAX_PITCH}, // of pitched copies
		{18, 0},         // integrated
		{19, 1},         // can map host memory
		{34, 0},         // PCI device
		{40, 3},         // copy engines
		{41, 1},         // unified addressing
		{50, 0},         // PCI domain
		{75, 9}, {76, 0}, // compute capability
		{78, 1},         // stream priorities
		{88, 0},         // pageable memory access
		{91, 1},         // registered memory by its host address
		{99, 1},         // host memory can be registered
		{100, 0},        // pageable memory by the host's page tables
		{102, 1},        // virtual memory management
		{103, 1},        // and its export as a descriptor
		{116, 0},        // RDMA
		{122, 1},        // 64-bit memory operations of streams
		{124, 0},        // DMA-BUF
		{125, 1},        // events between processes
		{128, 0},        // fabric handles
		{130, 0}, {131, -1}, {134, -1}, // NUMA
	};
	*value = 0;
	if (attribute == 33) // PCI bus
		*value = 0x17 + 0x10 * options.physical[d];
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
		if (known[i].attribute == attribute)
			*value = known[i].value;
	return attribute > 0 && attribute < 200 ? OK : INVALID_VALUE;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice d, CUdevice peer)
{
	ENTER(INITIALIZED);
	WANT(can);
	WANT_DEVICE(d);
	WANT_DEVICE(peer);
	*can = d != peer;
	return OK;
}

// ---- contexts

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
	ENTER(INITIALIZED);
	WANT(c);
	WANT_DEVICE(d);
	pthread_mutex_lock(&lock);
	contexts[d].retained++;
	count(LIVE_CONTEXTS, 1);
	*c = &contexts[d];
	pthread_mutex_unlock(&lock);
	return OK;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d)
{
	ENTER(INITIALIZED);
	WANT_DEVICE(d);
	int e = OK;
	pthread_mutex_lock(&lock);
	Context *c = &contexts[d];
	if (!c->retained) {
		violation("device %d is released more often than it was retained", d);
		e = INVALID_CONTEXT;
	} else {
		count(LIVE_CONTEXTS, -1);
		if (--c->retained == 0 && !c->runtime)
			end_context(c);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext c)
{
	ENTER(INITIALIZED);
	if (c && (c < contexts || c >= contexts + MAX_DEVICES || (!c->retained && !c->runtime))) {
		violation("%p is not a context", (void *)c);
		return INVALID_CONTEXT;
	}
	bind_thread(&bound, c);
	return OK;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *c)
{
	ENTER(INITIALIZED);
	WANT(c);
	*c = bound.context;
	return OK;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *d)
{
	ENTER(BOUND);
	WANT(d);
	*d = here->device;
	return OK;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	ENTER(BOUND);
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return OK;
}

EXPORT CUresult cuCtxSynchronize(void)
{
	ENTER(BOUND);
	pthread_mutex_lock(&lock);
	wait_idle(here);
	int e = here->failed;
	pthread_mutex_unlock(&lock);
	return e;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
	ENTER(BOUND);
	if (flags)
		return INVALID_VALUE;
	if (peer < contexts || peer >= contexts + options.devices || peer == here)
		return INVALID_CONTEXT;
	uint32_t bit = 1u << peer->device;
	if (here->peers & bit)
		return PEER_ALREADY_ENABLED;
	here->peers |= bit;
	return OK;
}

// ---- memory

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
	ENTER(BOUND);
	WANT(p);
	return RESULT(allocate(here, p, n));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr p)
{
	ENTER(ENDING);
	return RESULT(ended(free_device(here, p)));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char byte, size_t n, CUstream s)
{
	ENTER(BOUND);
	return RESULT(fill_async(here, s, p, byte, n));
}

EXPORT CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	if (flags & ~7u)
		return INVALID_VALUE;
	return RESULT(allocate_host(here, (uint64_t *)p, n));
}

EXPORT CUresult cuMemFreeHost(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(free_host((uint64_t)p)));
}

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	if (flags & ~15u)
		return INVALID_VALUE;
	return RESULT(register_host(here, (uint64_t)p, n));
}

EXPORT CUresult cuMemHostUnregister(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(unregister_host((uint64_t)p)));
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p)
{
	ENTER(BOUND);
	return RESULT(address_range(p, base, n, NOT_FOUND));
}

EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr p)
{
	ENTER(BOUND);
	WANT(out);
	int e = OK;
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(p);
	if (!m) {
		e = INVALID_VALUE;
	} else {
		switch (attribute) {
		case 1: *(CUcontext *)out = m->context; break;
		case 2: *(uint32_t *)out = is_host(m) ? 1 : 2; break;
		case 7: *(uint64_t *)out = m->id; break;
		case 9: *(int *)out = m->context->device; break;
		case 10: *(bool *)out = m->kind == DEVICE; break;
		case 11: *(uint64_t *)out = m->base; break;
		case 12: *(size_t *)out = m->size; break;
		case 14: *(uint64_t *)out = m->kind == RESERVED; break;
		default: e = INVALID_VALUE;
		}
	}
	pthread_mutex_unlock(&lock);
	return e;
}

// ---- streams and events

EXPORT CUresult cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority)
{
	ENTER(BOUND);
	WANT(s);
	return RESULT(stream_create(here, s, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority));
}

EXPORT CUresult cuStreamCreate(CUstream *s, unsigned flags)
{
	ENTER(BOUND);
	WANT(s);
	return RESULT(stream_create(here, s, flags, 0));
}

EXPORT CUresult cuStreamGetPriority(CUstream s, int *priority)
{
	ENTER(BOUND);
	WANT(priority);
	return RESULT(stream_priority(here, s, priority));
}

EXPORT CUresult cuStreamDestroy_v2(CUstream s)
{
	ENTER(ENDING);
	return RESULT(ended(stream_destroy(here, s)));
}

EXPORT CUresult cuStreamSynchronize(CUstream s)
{
	ENTER(BOUND);
	return RESULT(stream_synchronize(here, s));
}

EXPORT CUresult cuStreamQuery(CUstream s)
{
	ENTER(BOUND);
	return RESULT(stream_query(here, s));
}

EXPORT CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags)
{
	ENTER(BOUND);
	return RESULT(stream_wait_event(here, s, e, flags));
}

EXPORT CUresult cuLaunchHostFunc(CUstream s, void (*f)(void *), void *arg)
{
	ENTER(BOUND);
	if (!f)
		return INVALID_VALUE;
	return RESULT(stream_function(here, s, f, arg));
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)
{
	ENTER(BOUND);
	return RESULT(stream_write32(here, s, p, value, flags));
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)
{
	ENTER(BOUND);
	return RESULT(stream_await32(here, s, p, value, flags));
}

EXPORT CUresult cuEventCreate(CUevent *e, unsigned flags)
{
	ENTER(BOUND);
	WANT(e);
	return RESULT(event_create(here, e, flags));
}

EXPORT CUresult cuEventDestroy_v2(CUevent e)
{
	ENTER(ENDING);
	return RESULT(ended(event_destroy(e)));
}

EXPORT CUresult cuEventRecord(CUevent e, CUstream s)
{
	ENTER(BOUND);
	return RESULT(event_record(here, e, s));
}

EXPORT CUresult cuEventQuery(CUevent e)
{
	ENTER(BOUND);
	return RESULT(event_query(e));
}

EXPORT CUresult cuEventSynchronize(CUevent e)
{
	ENTER(BOUND);
	return RESULT(event_synchronize(e));
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
	ENTER(BOUND);
	WANT(ms);
	return RESULT(event_elapsed(ms, from, to));
}
