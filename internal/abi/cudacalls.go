package abi

// The calls of libcuda, as places in the table.
const (
	CuInit = iota
	CuDriverGetVersion
	CuGetErrorName
	CuDeviceGetCount
	CuDeviceGet
	CuDeviceGetName
	CuDeviceGetUuid
	CuDeviceGetPCIBusId
	CuDeviceGetAttribute
	CuDeviceTotalMem
	CuDevicePrimaryCtxRetain
	CuDevicePrimaryCtxRelease
	CuCtxSetCurrent
	CuCtxGetStreamPriorityRange
	CuMemAlloc
	CuMemFree
	CuMemsetD8Async
	CuMemHostRegister
	CuMemHostUnregister
	CuStreamCreateWithPriority
	CuStreamDestroy
	CuStreamSynchronize
	CuStreamWaitEvent
	CuEventCreate
	CuEventRecord
	CuEventQuery
	CuEventSynchronize
	CuEventDestroy
	CuMemcpyAsync
	CuMemcpy2DAsync
	CuMemcpy3DAsync
	CuMemcpyBatchAsync
	CuMemcpyBatchAsync8
	CuMemGetAddressRange
	CuPointerGetAttribute
	CuIpcGetMemHandle
	CuIpcOpenMemHandle
	CuIpcCloseMemHandle
	CuIpcGetEventHandle
	CuIpcOpenEventHandle
	CuDeviceCanAccessPeer
	CuCtxEnablePeerAccess
	CuMemGetAllocationGranularity
	CuMemCreate
	CuMemRelease
	CuMemExportToShareableHandle
	CuMemImportFromShareableHandle
	CuMemAddressReserve
	CuMemAddressFree
	CuMemMap
	CuMemUnmap
	CuMemSetAccess
)

// CuGetProcAddress finds the others, from CUDA 12.0.
func CuGetProcAddress() Call {
	return Call{"cuGetProcAddress", "cuGetProcAddress_v2", 12000, "const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*", true}
}

// Symbols with a suffix have forms without it whose addresses are of 32 bits.
var cudaCalls = [...]Call{
	CuInit:                         {"cuInit", "", 2000, "unsigned int", false},
	CuDriverGetVersion:             {"cuDriverGetVersion", "", 2020, "int*", false},
	CuGetErrorName:                 {"cuGetErrorName", "", 6000, "CUresult, const char**", false},
	CuDeviceGetCount:               {"cuDeviceGetCount", "", 2000, "int*", false},
	CuDeviceGet:                    {"cuDeviceGet", "", 2000, "CUdevice*, int", false},
	CuDeviceGetName:                {"cuDeviceGetName", "", 2000, "char*, int, CUdevice", false},
	CuDeviceGetUuid:                {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040, "CUuuid*, CUdevice", false},
	CuDeviceGetPCIBusId:            {"cuDeviceGetPCIBusId", "", 4010, "char*, int, CUdevice", false},
	CuDeviceGetAttribute:           {"cuDeviceGetAttribute", "", 2000, "int*, CUdevice_attribute, CUdevice", false},
	CuDeviceTotalMem:               {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020, "size_t*, CUdevice", false},
	CuDevicePrimaryCtxRetain:       {"cuDevicePrimaryCtxRetain", "", 7000, "CUcontext*, CUdevice", false},
	CuDevicePrimaryCtxRelease:      {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000, "CUdevice", false},
	CuCtxSetCurrent:                {"cuCtxSetCurrent", "", 4000, "CUcontext", false},
	CuCtxGetStreamPriorityRange:    {"cuCtxGetStreamPriorityRange", "", 5050, "int*, int*", false},
	CuMemAlloc:                     {"cuMemAlloc", "cuMemAlloc_v2", 3020, "CUdeviceptr*, size_t", false},
	CuMemFree:                      {"cuMemFree", "cuMemFree_v2", 3020, "CUdeviceptr", false},
	CuMemsetD8Async:                {"cuMemsetD8Async", "", 3020, "CUdeviceptr, unsigned char, size_t, CUstream", false},
	CuMemHostRegister:              {"cuMemHostRegister", "cuMemHostRegister_v2", 6050, "void*, size_t, unsigned int", false},
	CuMemHostUnregister:            {"cuMemHostUnregister", "", 4000, "void*", false},
	CuStreamCreateWithPriority:     {"cuStreamCreateWithPriority", "", 5050, "CUstream*, unsigned int, int", false},
	CuStreamDestroy:                {"cuStreamDestroy", "cuStreamDestroy_v2", 4000, "CUstream", false},
	CuStreamSynchronize:            {"cuStreamSynchronize", "", 2000, "CUstream", false},
	CuStreamWaitEvent:              {"cuStreamWaitEvent", "", 3020, "CUstream, CUevent, unsigned int", false},
	CuEventCreate:                  {"cuEventCreate", "", 2000, "CUevent*, unsigned int", false},
	CuEventRecord:                  {"cuEventRecord", "", 2000, "CUevent, CUstream", false},
	CuEventQuery:                   {"cuEventQuery", "", 2000, "CUevent", false},
	CuEventSynchronize:             {"cuEventSynchronize", "", 2000, "CUevent", false},
	CuEventDestroy:                 {"cuEventDestroy", "cuEventDestroy_v2", 4000, "CUevent", false},
	CuMemcpyAsync:                  {"cuMemcpyAsync", "", 4000, "CUdeviceptr, CUdeviceptr, size_t, CUstream", false},
	CuMemcpy2DAsync:                {"cuMemcpy2DAsync", "cuMemcpy2DAsync_v2", 3020, "const CUDA_MEMCPY2D*, CUstream", false},
	CuMemcpy3DAsync:                {"cuMemcpy3DAsync", "cuMemcpy3DAsync_v2", 3020, "const CUDA_MEMCPY3D*, CUstream", false},
	CuMemcpyBatchAsync:             {"cuMemcpyBatchAsync", "", CUDABatch, "CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream", true},
	CuMemcpyBatchAsync8:            {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", CUDABatch8, "CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream", true},
	CuMemGetAddressRange:           {"cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020, "CUdeviceptr*, size_t*, CUdeviceptr", false},
	CuPointerGetAttribute:          {"cuPointerGetAttribute", "", 4000, "void*, CUpointer_attribute, CUdeviceptr", false},
	CuIpcGetMemHandle:              {"cuIpcGetMemHandle", "", 4010, "CUipcMemHandle*, CUdeviceptr", true},
	CuIpcOpenMemHandle:             {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000, "CUdeviceptr*, CUipcMemHandle, unsigned int", true},
	CuIpcCloseMemHandle:            {"cuIpcCloseMemHandle", "", 4010, "CUdeviceptr", true},
	CuIpcGetEventHandle:            {"cuIpcGetEventHandle", "", 4010, "CUipcEventHandle*, CUevent", true},
	CuIpcOpenEventHandle:           {"cuIpcOpenEventHandle", "", 4010, "CUevent*, CUipcEventHandle", true},
	CuDeviceCanAccessPeer:          {"cuDeviceCanAccessPeer", "", 4000, "int*, CUdevice, CUdevice", true},
	CuCtxEnablePeerAccess:          {"cuCtxEnablePeerAccess", "", 4000, "CUcontext, unsigned int", true},
	CuMemGetAllocationGranularity:  {"cuMemGetAllocationGranularity", "", 10020, "size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags", true},
	CuMemCreate:                    {"cuMemCreate", "", 10020, "CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long", true},
	CuMemRelease:                   {"cuMemRelease", "", 10020, "CUmemGenericAllocationHandle", true},
	CuMemExportToShareableHandle:   {"cuMemExportToShareableHandle", "", 10020, "void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long", true},
	CuMemImportFromShareableHandle: {"cuMemImportFromShareableHandle", "", 10020, "CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType", true},
	CuMemAddressReserve:            {"cuMemAddressReserve", "", 10020, "CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long", true},
	CuMemAddressFree:               {"cuMemAddressFree", "", 10020, "CUdeviceptr, size_t", true},
	CuMemMap:                       {"cuMemMap", "", 10020, "CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long", true},
	CuMemUnmap:                     {"cuMemUnmap", "", 10020, "CUdeviceptr, size_t", true},
	CuMemSetAccess:                 {"cuMemSetAccess", "", 10020, "CUdeviceptr, size_t, const CUmemAccessDesc*, size_t", true},
}

// The calls of libcudart, as places in the table.
const (
	CudaRuntimeGetVersion = iota
	CudaGetErrorName
	CudaGetLastError
	CudaGetDevice
	CudaMemcpyAsync
	CudaMemcpy2DAsync
	CudaMemcpyBatchAsync
	CudaMemcpyBatchAsync8
)

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
