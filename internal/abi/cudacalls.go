package abi

// CuGetProcAddress finds the others, from CUDA 12.0.
func CuGetProcAddress() Call {
	return Call{"cuGetProcAddress", "cuGetProcAddress_v2", 12000, "const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*", true}
}

// Symbols with a suffix have forms without it whose addresses are of 32 bits.
var cudaCalls = [...]Call{
	Init:            {"cuInit", "", 2000, "unsigned int", false},
	Version:         {"cuDriverGetVersion", "", 2020, "int*", false},
	DeviceCount:     {"cuDeviceGetCount", "", 2000, "int*", false},
	DeviceGet:       {"cuDeviceGet", "", 2000, "CUdevice*, int", false},
	DeviceName:      {"cuDeviceGetName", "", 2000, "char*, int, CUdevice", false},
	DeviceUUID:      {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040, "CUuuid*, CUdevice", false},
	DevicePCI:       {"cuDeviceGetPCIBusId", "", 4010, "char*, int, CUdevice", false},
	DeviceAttribute: {"cuDeviceGetAttribute", "", 2000, "int*, CUdevice_attribute, CUdevice", false},
	DeviceBytes:     {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020, "size_t*, CUdevice", false},
	Bind:            {"cuCtxSetCurrent", "", 4000, "CUcontext", false},
	PriorityRange:   {"cuCtxGetStreamPriorityRange", "", 5050, "int*, int*", false},
	Alloc:           {"cuMemAlloc", "cuMemAlloc_v2", 3020, "CUdeviceptr*, size_t", false},
	Free:            {"cuMemFree", "cuMemFree_v2", 3020, "CUdeviceptr", false},
	Fill:            {"cuMemsetD8Async", "", 3020, "CUdeviceptr, unsigned char, size_t, CUstream", false},
	Register:        {"cuMemHostRegister", "cuMemHostRegister_v2", 6050, "void*, size_t, unsigned int", false},
	Unregister:      {"cuMemHostUnregister", "", 4000, "void*", false},
	StreamCreate:    {"cuStreamCreateWithPriority", "", 5050, "CUstream*, unsigned int, int", false},
	StreamDestroy:   {"cuStreamDestroy", "cuStreamDestroy_v2", 4000, "CUstream", false},
	StreamSync:      {"cuStreamSynchronize", "", 2000, "CUstream", false},
	StreamWait:      {"cuStreamWaitEvent", "", 3020, "CUstream, CUevent, unsigned int", false},
	EventCreate:     {"cuEventCreate", "", 2000, "CUevent*, unsigned int", false},
	EventRecord:     {"cuEventRecord", "", 2000, "CUevent, CUstream", false},
	EventQuery:      {"cuEventQuery", "", 2000, "CUevent", false},
	EventSync:       {"cuEventSynchronize", "", 2000, "CUevent", false},
	EventDestroy:    {"cuEventDestroy", "cuEventDestroy_v2", 4000, "CUevent", false},
	AddressRange:    {"cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020, "CUdeviceptr*, size_t*, CUdeviceptr", false},
	IpcExport:       {"cuIpcGetMemHandle", "", 4010, "CUipcMemHandle*, CUdeviceptr", true},
	IpcOpen:         {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000, "CUdeviceptr*, CUipcMemHandle, unsigned int", true},
	IpcClose:        {"cuIpcCloseMemHandle", "", 4010, "CUdeviceptr", true},
	IpcExportEvent:  {"cuIpcGetEventHandle", "", 4010, "CUipcEventHandle*, CUevent", true},
	IpcOpenEvent:    {"cuIpcOpenEventHandle", "", 4010, "CUevent*, CUipcEventHandle", true},
	CanAccessPeer:   {"cuDeviceCanAccessPeer", "", 4000, "int*, CUdevice, CUdevice", true},
	EnablePeer:      {"cuCtxEnablePeerAccess", "", 4000, "CUcontext, unsigned int", true},
	MemGranularity:  {"cuMemGetAllocationGranularity", "", 10020, "size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags", true},
	MemCreate:       {"cuMemCreate", "", 10020, "CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long", true},
	MemRelease:      {"cuMemRelease", "", 10020, "CUmemGenericAllocationHandle", true},
	MemExport:       {"cuMemExportToShareableHandle", "", 10020, "void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long", true},
	MemImport:       {"cuMemImportFromShareableHandle", "", 10020, "CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType", true},
	MemReserve:      {"cuMemAddressReserve", "", 10020, "CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long", true},
	MemUnreserve:    {"cuMemAddressFree", "", 10020, "CUdeviceptr, size_t", true},
	MemMap:          {"cuMemMap", "", 10020, "CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long", true},
	MemUnmap:        {"cuMemUnmap", "", 10020, "CUdeviceptr, size_t", true},
	MemSetAccess:    {"cuMemSetAccess", "", 10020, "CUdeviceptr, size_t, const CUmemAccessDesc*, size_t", true},
	MemRetain:       {"cuMemRetainAllocationHandle", "", 11000, "CUmemGenericAllocationHandle*, void*", true},

	CuGetErrorName:            {"cuGetErrorName", "", 6000, "CUresult, const char**", false},
	CuDevicePrimaryCtxRetain:  {"cuDevicePrimaryCtxRetain", "", 7000, "CUcontext*, CUdevice", false},
	CuDevicePrimaryCtxRelease: {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000, "CUdevice", false},
	CuMemcpyAsync:             {"cuMemcpyAsync", "", 4000, "CUdeviceptr, CUdeviceptr, size_t, CUstream", false},
	CuMemcpy2DAsync:           {"cuMemcpy2DAsync", "cuMemcpy2DAsync_v2", 3020, "const CUDA_MEMCPY2D*, CUstream", false},
	CuMemcpy3DAsync:           {"cuMemcpy3DAsync", "cuMemcpy3DAsync_v2", 3020, "const CUDA_MEMCPY3D*, CUstream", false},
	CuMemcpyBatchAsync:        {"cuMemcpyBatchAsync", "", CUDABatch, "CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream", true},
	CuMemcpyBatchAsync8:       {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", CUDABatch8, "CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream", true},
	CuPointerGetAttribute:     {"cuPointerGetAttribute", "", 4000, "void*, CUpointer_attribute, CUdeviceptr", false},
}

var cudartCalls = [...]Call{
	CudaRuntimeGetVersion: {"cudaRuntimeGetVersion", "", 0, "int*", false},
	CudaGetErrorName:      {"cudaGetErrorName", "", 0, "cudaError_t", false},
	CudaGetLastError:      {"cudaGetLastError", "", 0, "void", false},
	CudaGetDevice:         {"cudaGetDevice", "", 0, "int*", false},
	CudaMemcpyAsync:       {"cudaMemcpyAsync", "", 0, "void*, const void*, size_t, enum cudaMemcpyKind, cudaStream_t", false},
	CudaMemcpy2DAsync:     {"cudaMemcpy2DAsync", "", 0, "void*, size_t, const void*, size_t, size_t, size_t, enum cudaMemcpyKind, cudaStream_t", false},
	// One name for both forms: the version says which.
	CudaMemcpyBatchAsync:  {"cudaMemcpyBatchAsync", "", CUDABatch, "void**, void**, size_t*, size_t, struct cudaMemcpyAttributes*, size_t*, size_t, size_t*, cudaStream_t", true},
	CudaMemcpyBatchAsync8: {"cudaMemcpyBatchAsync", "", CUDABatch8, "void*const*, const void*const*, const size_t*, size_t, struct cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t", true},
}
