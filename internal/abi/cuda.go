package abi

// What a driver must be, and what it may lack, as cuDriverGetVersion counts: 1000 · major
// + 10 · minor.
const (
	CUDALeast   = 11040 // the first that names devices of MIG by their own UUID
	CUDABatch   = 12080 // batches, in the form of nine words
	CUDABatch8  = 13000 // batches, in the form of eight words
	CUDAUnknown = 14000 // the first runtime whose form of batches is not known
)

// Flags and enumerators.
const (
	CUStreamNonBlocking = 1

	CUEventBlockingSync  = 1
	CUEventDisableTiming = 2
	CUEventInterprocess  = 4

	CUHostRegisterPortable = 1

	CUMemoryTypeUnified = 4
	CUPointerTypeDevice = 2

	CUAccessOrderStream = 1
	CUAccessOrderAny    = 3

	CUIpcLazyPeerAccess = 1

	CUAllocationPinned   = 1
	CUHandlePosixFD      = 1
	CULocationDevice     = 1
	CUAccessReadWrite    = 3
	CUGranularityMinimum = 0

	CUProcAddressOK = 0

	CUDAMemcpyDefault = 4 // a copy's direction follows from its addresses
)

// Codes that are answers, not failures.
const (
	CUNotReady           = 600
	CUPeerAlreadyEnabled = 704
	CUAlreadyRegistered  = 712
)

// Attributes of devices.
const (
	CUDeviceMaxPitch          = 11
	CUDeviceIntegrated        = 18
	CUDeviceAsyncEngineCount  = 40
	CUDeviceUnifiedAddressing = 41
	CUDeviceVMM               = 102
	CUDevicePosixFD           = 103
)

// Attributes of pointers.
const (
	CUPointerMemoryType    = 2
	CUPointerBufferID      = 7
	CUPointerDeviceOrdinal = 9
	CUPointerIpcCapable    = 10
	CUPointerRangeStart    = 11
	CUPointerRangeSize     = 12
)

// Sizes and offsets in bytes.
const (
	UUIDBytes = 16

	Memcpy2DBytes         = 128
	Memcpy2DSrcMemoryType = 16
	Memcpy2DSrcDevice     = 32
	Memcpy2DSrcPitch      = 48
	Memcpy2DDstMemoryType = 72
	Memcpy2DDstDevice     = 88
	Memcpy2DDstPitch      = 104
	Memcpy2DWidth         = 112
	Memcpy2DHeight        = 120

	Memcpy3DBytes         = 200
	Memcpy3DSrcMemoryType = 32
	Memcpy3DSrcDevice     = 48
	Memcpy3DSrcPitch      = 72
	Memcpy3DSrcHeight     = 80
	Memcpy3DDstMemoryType = 120
	Memcpy3DDstDevice     = 136
	Memcpy3DDstPitch      = 160
	Memcpy3DDstHeight     = 168
	Memcpy3DWidth         = 176
	Memcpy3DHeight        = 184
	Memcpy3DDepth         = 192

	MemcpyAttributesBytes       = 24
	MemcpyAttributesAccessOrder = 0

	AllocationPropBytes        = 32
	AllocationPropType         = 0
	AllocationPropHandleTypes  = 4
	AllocationPropLocationType = 8
	AllocationPropLocationID   = 12

	AccessDescBytes        = 12
	AccessDescLocationType = 0
	AccessDescLocationID   = 4
	AccessDescFlags        = 8
)

// CUDA is the interface of libcuda, and CUDART that of libcudart.
func CUDA() Table { return Table{cudaLayouts, cudaConstants, cudaCalls[:], cudaErrors} }

// CUDART is the interface of libcudart. Its structs are those of libcuda.
func CUDART() Table { return Table{cudartLayouts, cudartConstants, cudartCalls[:], nil} }

var cudaLayouts = []Layout{
	{Name: "CUuuid", Bytes: UUIDBytes},
	{Name: "CUipcMemHandle", Bytes: 64},
	{Name: "CUipcEventHandle", Bytes: 64},
	{Name: "CUmemGenericAllocationHandle", Bytes: 8},
	{Name: "CUDA_MEMCPY2D", Bytes: Memcpy2DBytes, Fields: []Field{
		{"srcXInBytes", 0, 8},
		{"srcY", 8, 8},
		{"srcMemoryType", Memcpy2DSrcMemoryType, 4},
		{"srcHost", 24, 8},
		{"srcDevice", Memcpy2DSrcDevice, 8},
		{"srcArray", 40, 8},
		{"srcPitch", Memcpy2DSrcPitch, 8},
		{"dstXInBytes", 56, 8},
		{"dstY", 64, 8},
		{"dstMemoryType", Memcpy2DDstMemoryType, 4},
		{"dstHost", 80, 8},
		{"dstDevice", Memcpy2DDstDevice, 8},
		{"dstArray", 96, 8},
		{"dstPitch", Memcpy2DDstPitch, 8},
		{"WidthInBytes", Memcpy2DWidth, 8},
		{"Height", Memcpy2DHeight, 8},
	}},
	{Name: "CUDA_MEMCPY3D", Bytes: Memcpy3DBytes, Fields: []Field{
		{"srcXInBytes", 0, 8},
		{"srcY", 8, 8},
		{"srcZ", 16, 8},
		{"srcLOD", 24, 8},
		{"srcMemoryType", Memcpy3DSrcMemoryType, 4},
		{"srcHost", 40, 8},
		{"srcDevice", Memcpy3DSrcDevice, 8},
		{"srcArray", 56, 8},
		{"srcPitch", Memcpy3DSrcPitch, 8},
		{"srcHeight", Memcpy3DSrcHeight, 8},
		{"dstXInBytes", 88, 8},
		{"dstY", 96, 8},
		{"dstZ", 104, 8},
		{"dstLOD", 112, 8},
		{"dstMemoryType", Memcpy3DDstMemoryType, 4},
		{"dstHost", 128, 8},
		{"dstDevice", Memcpy3DDstDevice, 8},
		{"dstArray", 144, 8},
		{"dstPitch", Memcpy3DDstPitch, 8},
		{"dstHeight", Memcpy3DDstHeight, 8},
		{"WidthInBytes", Memcpy3DWidth, 8},
		{"Height", Memcpy3DHeight, 8},
		{"Depth", Memcpy3DDepth, 8},
	}},
	{Name: "CUmemcpyAttributes", Since: CUDABatch, Bytes: MemcpyAttributesBytes, Fields: []Field{
		{"srcAccessOrder", MemcpyAttributesAccessOrder, 4},
		{"srcLocHint", 4, 8},
		{"dstLocHint", 12, 8},
		{"flags", 20, 4},
	}},
	{Name: "CUmemAllocationProp", Bytes: AllocationPropBytes, Fields: []Field{
		{"type", AllocationPropType, 4},
		{"requestedHandleTypes", AllocationPropHandleTypes, 4},
		{"location.type", AllocationPropLocationType, 4},
		{"location.id", AllocationPropLocationID, 4},
		{"win32HandleMetaData", 16, 8},
		{"allocFlags", 24, 8},
	}},
	{Name: "CUmemAccessDesc", Bytes: AccessDescBytes, Fields: []Field{
		{"location.type", AccessDescLocationType, 4},
		{"location.id", AccessDescLocationID, 4},
		{"flags", AccessDescFlags, 4},
	}},
}

var cudaConstants = []Constant{
	{"CU_STREAM_NON_BLOCKING", 0, CUStreamNonBlocking},
	{"CU_EVENT_BLOCKING_SYNC", 0, CUEventBlockingSync},
	{"CU_EVENT_DISABLE_TIMING", 0, CUEventDisableTiming},
	{"CU_EVENT_INTERPROCESS", 0, CUEventInterprocess},
	{"CU_MEMHOSTREGISTER_PORTABLE", 0, CUHostRegisterPortable},
	{"CU_MEMORYTYPE_UNIFIED", 0, CUMemoryTypeUnified},
	{"CU_MEMORYTYPE_DEVICE", 0, CUPointerTypeDevice},
	{"CU_MEMCPY_SRC_ACCESS_ORDER_STREAM", CUDABatch, CUAccessOrderStream},
	{"CU_MEMCPY_SRC_ACCESS_ORDER_ANY", CUDABatch, CUAccessOrderAny},
	{"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", 0, CUIpcLazyPeerAccess},
	{"CU_MEM_ALLOCATION_TYPE_PINNED", 0, CUAllocationPinned},
	{"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", 0, CUHandlePosixFD},
	{"CU_MEM_LOCATION_TYPE_DEVICE", 0, CULocationDevice},
	{"CU_MEM_ACCESS_FLAGS_PROT_READWRITE", 0, CUAccessReadWrite},
	{"CU_MEM_ALLOC_GRANULARITY_MINIMUM", 0, CUGranularityMinimum},
	{"CU_GET_PROC_ADDRESS_SUCCESS", 0, CUProcAddressOK},
	{"CU_DEVICE_ATTRIBUTE_MAX_PITCH", 0, CUDeviceMaxPitch},
	{"CU_DEVICE_ATTRIBUTE_INTEGRATED", 0, CUDeviceIntegrated},
	{"CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT", 0, CUDeviceAsyncEngineCount},
	{"CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING", 0, CUDeviceUnifiedAddressing},
	{"CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 0, CUDeviceVMM},
	{"CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", 0, CUDevicePosixFD},
	{"CU_POINTER_ATTRIBUTE_MEMORY_TYPE", 0, CUPointerMemoryType},
	{"CU_POINTER_ATTRIBUTE_BUFFER_ID", 0, CUPointerBufferID},
	{"CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", 0, CUPointerDeviceOrdinal},
	{"CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", 0, CUPointerIpcCapable},
	{"CU_POINTER_ATTRIBUTE_RANGE_START_ADDR", 0, CUPointerRangeStart},
	{"CU_POINTER_ATTRIBUTE_RANGE_SIZE", 0, CUPointerRangeSize},
}

var cudartLayouts = []Layout{
	{Name: "struct cudaMemcpyAttributes", Since: CUDABatch, Bytes: MemcpyAttributesBytes, Fields: []Field{
		{"srcAccessOrder", MemcpyAttributesAccessOrder, 4},
		{"srcLocHint", 4, 8},
		{"dstLocHint", 12, 8},
		{"flags", 20, 4},
	}},
}

var cudartConstants = []Constant{
	{"cudaMemcpyDefault", 0, CUDAMemcpyDefault},
	{"cudaMemcpySrcAccessOrderStream", CUDABatch, CUAccessOrderStream},
	{"cudaMemcpySrcAccessOrderAny", CUDABatch, CUAccessOrderAny},
	{"cudaErrorInsufficientDriver", 0, 35},
	{"cudaErrorMemoryAllocation", 0, 2},
	{"cudaErrorNoDevice", 0, 100},
	{"cudaErrorIllegalAddress", 0, 700},
	{"cudaErrorNotSupported", 0, 801},
}
