// What HIP has for other processes.
#include "hip.h"

EXPORT hipError_t hipIpcGetMemHandle(Handle *h, void *p)
{
	ENTER(BOUND);
	WANT(h);
	return RESULT(ipc_export(h, (uint64_t)p));
}

EXPORT hipError_t hipIpcOpenMemHandle(void **p, Handle h, unsigned flags)
{
	ENTER(BOUND);
	WANT(p);
	return RESULT(ipc_open(here, (uint64_t *)p, h, flags, false, BAD_POINTER));
}

EXPORT hipError_t hipIpcCloseMemHandle(void *p)
{
	ENTER(ENDING);
	return RESULT(ended(ipc_close(here, (uint64_t)p, INVALID_VALUE)));
}

EXPORT hipError_t hipIpcGetEventHandle(Handle *h, hipEvent_t e)
{
	ENTER(BOUND);
	WANT(h);
	return RESULT(ipc_export_event(h, e));
}

EXPORT hipError_t hipIpcOpenEventHandle(hipEvent_t *e, Handle h)
{
	ENTER(BOUND);
	WANT(e);
	return RESULT(ipc_open_event(here, e, h, INVALID_VALUE));
}

EXPORT hipError_t hipMemGetAllocationGranularity(size_t *out, const AllocationProp *p, int option)
{
	ENTER(ANYTIME);
	WANT(out);
	WANT(p);
	return RESULT(vmm_granularity(out, p, option));
}

EXPORT hipError_t hipMemCreate(hipHandle_t *out, size_t size, const AllocationProp *p, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	WANT(p);
	return RESULT(vmm_create(out, size, p, flags));
}

EXPORT hipError_t hipMemRelease(hipHandle_t h)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_release(h)));
}

EXPORT hipError_t hipMemExportToShareableHandle(void *out, hipHandle_t h, int type, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_export(out, h, type, flags));
}

EXPORT hipError_t hipMemImportFromShareableHandle(hipHandle_t *out, void *os, int type)
{
	ENTER(BOUND);
	WANT(out);
	if (FAKE_VERSION < FD_BY_VALUE) {
		WANT(os);
		if (!mapped((uint64_t)os, sizeof(int)))
			return RESULT(INVALID_VALUE);
		os = (void *)(intptr_t)*(int *)os;
	}
	return RESULT(vmm_import(out, os, type));
}

EXPORT hipError_t hipMemAddressReserve(void **out, size_t size, size_t align, void *addr, uint64_t flags)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_reserve((uint64_t *)out, size, align, (uint64_t)addr, flags));
}

EXPORT hipError_t hipMemAddressFree(void *p, size_t size)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_unreserve((uint64_t)p, size)));
}

EXPORT hipError_t hipMemMap(void *p, size_t size, size_t offset, hipHandle_t h, uint64_t flags)
{
	ENTER(BOUND);
	return RESULT(vmm_map((uint64_t)p, size, offset, h, flags));
}

EXPORT hipError_t hipMemUnmap(void *p, size_t size)
{
	ENTER(ENDING);
	return RESULT(ended(vmm_unmap((uint64_t)p, size)));
}

EXPORT hipError_t hipMemSetAccess(void *p, size_t size, const AccessDesc *d, size_t n)
{
	ENTER(BOUND);
	WANT(d);
	return RESULT(vmm_access((uint64_t)p, size, d, n));
}

EXPORT hipError_t hipMemRetainAllocationHandle(hipHandle_t *out, void *p)
{
	ENTER(BOUND);
	WANT(out);
	return RESULT(vmm_retain(out, (uint64_t)p));
}
