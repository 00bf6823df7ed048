// What the CUDA driver API has for other processes, and the look-up of symbols by version.
#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

EXPORT CUresult cuIpcGetMemHandle(Handle *h, CUdeviceptr p)
{
	ENTER(BOUND);
	WANT(h);
	return RESULT(ipc_export(h, p));
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, Handle h, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	return RESULT(ipc_open(here, p, h, flags, true, INVALID_VALUE));
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	ENTER(ENDING);
	return RESULT(ended(ipc_close(here, p, INVALID_VALUE)));
}

EXPORT CUresult cuIpcGetEventHandle(Handle *h, CUevent e)
{
	ENTER(BOUND);
	WANT(h);
	return RESULT(ipc_export_event(h, e));
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *e, Handle h)
{
	ENTER(BOUND);
	WANT(e);
	return RESULT(ipc_open_event(here, e, h, INVALID_VALUE));
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const AllocationProp *p, int option)
{
	ENTER(INITIALIZED);
	WANT(out);
	WANT(p);
	return RESULT(vmm_granularity(out, p, option));
}

EXPORT CUresult cuMemCreate(CUhandle *out, size_t size, const AllocationProp *p, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	WANT(p);
	return RESULT(vmm_create(out, size, p, flags));
}

EXPORT CUresult cuMemRelease(CUhandle h)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_release(h)));
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUhandle h, int type, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_export(out, h, type, flags));
}

EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *out, void *os, int type)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_import(out, os, type));
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr addr, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_reserve(out, size, align, addr, flags));
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t size)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_unreserve(p, size)));
}

EXPORT CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUhandle h, uint64_t flags)
{
	ENTER(BOUND);
	return RESULT(vmm_map(p, size, offset, h, flags));
}

EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t size)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_unmap(p, size)));
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const AccessDesc *d, size_t n)
{
	ENTER(BOUND);
	WANT(d);
	return RESULT(vmm_access(p, size, d, n));
}

EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *out, void *p)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_retain(out, (uint64_t)p));
}

// Symbols whose name is not what is asked for, by the version that brought them.
static const struct {
	const char *name, *symbol;
	int version;
} renamed[] = {
	{"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
	{"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020},
	{"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
	{"cuMemAlloc", "cuMemAlloc_v2", 3020},
	{"cuMemFree", "cuMemFree_v2", 3020},
	{"cuMemHostRegister", "cuMemHostRegister_v2", 6050},
	{"cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020},
	{"cuMemcpy2DAsync", "cuMemcpy2DAsync_v2", 3020},
	{"cuMemcpy3DAsync", "cuMemcpy3DAsync_v2", 3020},
	{"cuStreamDestroy", "cuStreamDestroy_v2", 4000},
	{"cuEventDestroy", "cuEventDestroy_v2", 4000},
	{"cuStreamWriteValue32", "cuStreamWriteValue32_v2", 11070},
	{"cuStreamWaitValue32", "cuStreamWaitValue32_v2", 11070},
	{"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000},
	{"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
	{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080},
	{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000},
};

// exported finds an exported function of this library.
static void *exported(const char *symbol)
{
	static void *self;
	Dl_info me;
	if (!self && dladdr((void *)exported, &me))
		self = dlopen(me.dli_fname, RTLD_NOW | RTLD_NOLOAD);
	return self ? dlsym(self, symbol) : NULL;
}

enum { FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT };

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status)
{
	ENTER(ANYTIME);
	WANT(name);
	WANT(fn);
	if (flags > 2)
		return INVALID_VALUE;
	*fn = NULL;
	int found = SYMBOL_NOT_FOUND;
	if (flags == 2) {
		violation("%s of the per-thread stream", name);
	} else {
		bool other = false;
		for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++) {
			if (strcmp(renamed[i].name, name))
				continue;
			other = true;
			void *p = exported(renamed[i].symbol);
			if (p && renamed[i].version <= version)
				*fn = p;
			else if (p)
				found = VERSION_NOT_SUFFICIENT;
		}
		size_t n = strlen(name);
		bool suffixed = n > 3 && !strncmp(name + n - 3, "_v", 2);
		if (!other && !suffixed && !strncmp(name, "cu", 2))
			*fn = exported(name);
	}
	if (*fn)
		found = FOUND;
	if (status)
		*status = found;
	return OK;
}
