// The CUDA runtime, as libcudart.so.12 and .13 export it, over a fake driver. Each thread
// has a device and a last error. It uses the thread's context of the driver when there is
// one; where there is none, the real library would make that of the thread's device, and
// of device 0 where nobody has set any, so here that is refused.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "names.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 13000
#endif

#define EXPORT __attribute__((visibility("default")))

enum {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorInitializationError = 3,
	cudaErrorInvalidPitchValue = 12,
	cudaErrorInvalidMemcpyDirection = 21,
	cudaErrorInsufficientDriver = 35,
	cudaErrorCallRequiresNewerDriver = 36,
	cudaErrorNoDevice = 100,
	cudaErrorInvalidDevice = 101,
	cudaErrorDeviceUninitialized = 201,
	cudaErrorNotReady = 600,
};

typedef int cudaError_t;
typedef uint64_t cudaStream_t;
typedef void *CUcontext;

// Driver is the functions of the driver that this library uses.
static struct {
	int (*cuInit)(unsigned);
	int (*cuDriverGetVersion)(int *);
	int (*cuDeviceGetCount)(int *);
	int (*cuCtxGetCurrent)(CUcontext *);
	int (*cuCtxSetCurrent)(CUcontext);
	int (*cuCtxGetDevice)(int *);
	int (*cuMemcpyAsync)(uint64_t, uint64_t, size_t, cudaStream_t);
	int (*cuMemcpy2DAsync_v2)(const void *, cudaStream_t);
	int (*cuMemcpyBatchAsync)(void *, void *, void *, size_t, void *, void *, size_t, size_t *, cudaStream_t);
	int (*cuMemcpyBatchAsync_v2)(void *, void *, void *, size_t, void *, void *, size_t, cudaStream_t);
	int (*cuMemHostRegister_v2)(void *, size_t, unsigned);
	int (*cuMemHostUnregister)(void *);
	int (*cuStreamSynchronize)(cudaStream_t);
	int (*fakeEnter)(const char *);
	void (*fakeViolate)(const char *, const char *);
	void (*fakePending)(int);
	int (*fakeKind)(uint64_t);
	CUcontext (*fakeRetain)(int);
} driver;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;
static int driver_version;

static __thread int device; // of the thread
static __thread cudaError_t last_error;

static const Name names[] = {CUDART_NAMES(NAME)};

static void load(const char *path)
{
	void *h = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!h)
		return;
#define FIND(f) *(void **)&driver.f = dlsym(h, #f)
	FIND(cuInit);
	FIND(cuDriverGetVersion);
	FIND(cuDeviceGetCount);
	FIND(cuCtxGetCurrent);
	FIND(cuCtxSetCurrent);
	FIND(cuCtxGetDevice);
	FIND(cuMemcpyAsync);
	FIND(cuMemcpy2DAsync_v2);
	FIND(cuMemcpyBatchAsync);
	FIND(cuMemcpyBatchAsync_v2);
	FIND(cuMemHostRegister_v2);
	FIND(cuMemHostUnregister);
	FIND(cuStreamSynchronize);
	FIND(fakeEnter);
	FIND(fakeViolate);
	FIND(fakePending);
	FIND(fakeKind);
	FIND(fakeRetain);
	loaded = driver.cuInit && driver.fakeEnter && !driver.cuDriverGetVersion(&driver_version);
}

// find_driver loads the driver that the environment names, or that lies beside this file.
static bool find_driver(void)
{
	pthread_mutex_lock(&loading);
	if (!loaded)
		load(getenv("FAKECUDA_DRIVER"));
	Dl_info me;
	const char *slash = NULL;
	if (!loaded && dladdr((void *)find_driver, &me) && me.dli_fname)
		slash = strrchr(me.dli_fname, '/');
	static const char *const beside[] = {"libfakecuda.so", "libcuda.so.1"};
	for (int i = 0; slash && i < 2 && !loaded; i++) {
		char path[4096];
		snprintf(path, sizeof path, "%.*s%s", (int)(slash + 1 - me.dli_fname), me.dli_fname, beside[i]);
		load(path);
	}
	bool ok = loaded;
	pthread_mutex_unlock(&loading);
	return ok;
}

// fakeBindDriver loads a driver, before anything else is called.
EXPORT int fakeBindDriver(const char *path)
{
	pthread_mutex_lock(&loading);
	if (!loaded)
		load(path);
	bool ok = loaded;
	pthread_mutex_unlock(&loading);
	return ok ? cudaSuccess : cudaErrorInsufficientDriver;
}

// result is what a call returns, which the thread remembers when it is an error.
static cudaError_t result(cudaError_t e)
{
	if (e == cudaSuccess || e == cudaErrorNotReady)
		return e;
	if (!last_error && driver.fakePending)
		driver.fakePending(1);
	last_error = e;
	return e;
}

static void violate(const char *site, const char *text) { driver.fakeViolate(site, text); }

// begin is the start of every call that needs a driver.
static cudaError_t begin(const char *site)
{
	if (!find_driver() || driver_version / 1000 < FAKE_VERSION / 1000)
		return cudaErrorInsufficientDriver;
	int e = driver.fakeEnter(site);
	return e ? e : driver.cuInit(0);
}

// begin_bound is begin for what needs a context.
static cudaError_t begin_bound(const char *site)
{
	cudaError_t e = begin(site);
	CUcontext c = NULL;
	if (!e)
		e = driver.cuCtxGetCurrent(&c);
	if (!e && !c) {
		violate(site, "this thread has no context: the real library would make one");
		e = cudaErrorDeviceUninitialized;
	}
	return e;
}

#define BEGIN(how)                               \
	do {                                     \
		cudaError_t e_ = how(__func__);  \
		if (e_)                          \
			return result(e_);       \
	} while (0)

EXPORT const char *cudaGetErrorName(cudaError_t code)
{
	const char *s = name_of(names, sizeof names / sizeof names[0], code);
	return s ? s : "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t code) { return cudaGetErrorName(code); }

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

// cudaGetLastError forgets the error of the thread, but not that of a device that has
// failed: the next call returns it again.
EXPORT cudaError_t cudaGetLastError(void)
{
	cudaError_t e = last_error;
	if (e && driver.fakePending)
		driver.fakePending(-1);
	last_error = cudaSuccess;
	return e;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
	if (!version)
		return result(cudaErrorInvalidValue);
	*version = FAKE_VERSION;
	return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
	if (!version)
		return result(cudaErrorInvalidValue);
	*version = find_driver() ? driver_version : 0;
	return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int *n)
{
	if (!n)
		return result(cudaErrorInvalidValue);
	*n = 0;
	BEGIN(begin);
	return result(driver.cuDeviceGetCount(n));
}

EXPORT cudaError_t cudaSetDevice(int d)
{
	BEGIN(begin);
	CUcontext c = driver.fakeRetain(d);
	if (!c)
		return result(cudaErrorInvalidDevice);
	device = d;
	return result(driver.cuCtxSetCurrent(c));
}

EXPORT cudaError_t cudaGetDevice(int *d)
{
	if (!d)
		return result(cudaErrorInvalidValue);
	BEGIN(begin);
	CUcontext c = NULL;
	driver.cuCtxGetCurrent(&c);
	*d = device;
	return result(c ? driver.cuCtxGetDevice(d) : cudaSuccess);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
	BEGIN(begin_bound);
	return result(driver.cuStreamSynchronize(s));
}

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

// right_kind wants the kind of a copy to be what the addresses say.
static cudaError_t right_kind(const char *site, int kind, const void *dst, const void *src)
{
	if (kind == BY_ADDRESS)
		return cudaSuccess;
	if (kind < HOST_TO_HOST || kind > BY_ADDRESS)
		return cudaErrorInvalidMemcpyDirection;
	bool from_host = driver.fakeKind((uint64_t)src) != 2, to_host = driver.fakeKind((uint64_t)dst) != 2;
	if (from_host == (kind == HOST_TO_HOST || kind == HOST_TO_DEVICE) && to_host == (kind == HOST_TO_HOST || kind == DEVICE_TO_HOST))
		return cudaSuccess;
	violate(site, "the kind of a copy is not what its addresses are");
	return cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, int kind, cudaStream_t s)
{
	BEGIN(begin_bound);
	cudaError_t e = right_kind(__func__, kind, dst, src);
	return result(e ? e : driver.cuMemcpyAsync((uint64_t)dst, (uint64_t)src, n, s));
}

// Memcpy2D is CUDA_MEMCPY2D, both sides by their address.
typedef struct Memcpy2D {
	size_t src_x, src_y;
	uint32_t src_type;
	const void *src_host, *src, *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	uint32_t dst_type;
	void *dst_host, *dst, *dst_array;
	size_t dst_pitch;
	size_t width, height;
} Memcpy2D;
_Static_assert(sizeof(Memcpy2D) == 128, "CUDA_MEMCPY2D");

EXPORT cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind, cudaStream_t s)
{
	BEGIN(begin_bound);
	if (width > dst_pitch || width > src_pitch || dst_pitch > 0x7fffffff || src_pitch > 0x7fffffff) {
		violate(__func__, "pitch less than the width, or too large");
		return result(cudaErrorInvalidPitchValue);
	}
	cudaError_t e = right_kind(__func__, kind, dst, src);
	if (e)
		return result(e);
	Memcpy2D m = {.src_type = 4, .src = src, .src_pitch = src_pitch, .dst_type = 4, .dst = dst, .dst_pitch = dst_pitch, .width = width, .height = height};
	return result(driver.cuMemcpy2DAsync_v2(&m, s));
}

#if FAKE_VERSION >= 13000
EXPORT cudaError_t cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t n, void *attrs, size_t *index, size_t attributes, cudaStream_t s)
{
	BEGIN(begin_bound);
	if (!driver.cuMemcpyBatchAsync_v2)
		return result(cudaErrorCallRequiresNewerDriver);
	return result(driver.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, n, attrs, index, attributes, s));
}
#elif FAKE_VERSION >= 12080
EXPORT cudaError_t cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t n, void *attrs, size_t *index, size_t attributes, size_t *failed, cudaStream_t s)
{
	BEGIN(begin_bound);
	if (!driver.cuMemcpyBatchAsync)
		return result(cudaErrorCallRequiresNewerDriver);
	return result(driver.cuMemcpyBatchAsync(dsts, srcs, sizes, n, attrs, index, attributes, failed, s));
}
#endif

EXPORT cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags)
{
	BEGIN(begin_bound);
	return result(driver.cuMemHostRegister_v2(p, n, flags));
}

EXPORT cudaError_t cudaHostUnregister(void *p)
{
	BEGIN(begin_bound);
	return result(driver.cuMemHostUnregister(p));
}
