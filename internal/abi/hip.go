package abi

// What a runtime must be, and what it may lack, as hipRuntimeGetVersion counts: 10^7 ·
// major + 10^5 · minor + patch.
const (
	HIPShares     = 60000000 // memory is shared as it is since, see the traps of this package
	HIPFDByValue  = 70100000 // an imported descriptor is passed itself, not its address
	HIPBatch      = 70100000 // batches
	HIPAttributes = 71300000 // batches take attributes; before, some versions refuse them
)

// HIPBatchMost is the most copies of one batch: with more some versions fault.
const HIPBatchMost = 8192

// Flags and enumerators that have other numbers than CUDA's, or none there. All others
// that kvferry uses are the same.
const (
	HIPDeviceAsyncEngineCount  = 2
	HIPDeviceIntegrated        = 16
	HIPDeviceMaxPitch          = 58
	HIPDeviceUnifiedAddressing = 85
	HIPDeviceVMM               = 89
)

// HIP is the interface of libamdhip64.
func HIP() Table { return Table{hipLayouts, hipConstants, hipCalls[:], hipErrors} }

var hipLayouts = []Layout{
	{Name: "hipUUID", Bytes: UUIDBytes},
	{Name: "hipIpcMemHandle_t", Bytes: 64},
	{Name: "hipIpcEventHandle_t", Bytes: 64},
	{Name: "hipMemGenericAllocationHandle_t", Bytes: 8},
	{Name: "hipMemcpyAttributes", Since: HIPBatch, Bytes: MemcpyAttributesBytes, Fields: []Field{
		{"srcAccessOrder", MemcpyAttributesAccessOrder, 4},
		{"srcLocHint", 4, 8},
		{"dstLocHint", 12, 8},
		{"flags", 20, 4},
	}},
	{Name: "hipMemAllocationProp", Since: HIPShares, Bytes: AllocationPropBytes, Fields: []Field{
		{"type", AllocationPropType, 4},
		{"requestedHandleType", AllocationPropHandleTypes, 4},
		{"location.type", AllocationPropLocationType, 4},
		{"location.id", AllocationPropLocationID, 4},
		{"win32HandleMetaData", 16, 8},
		{"allocFlags", 24, 4},
	}},
	{Name: "hipMemAccessDesc", Bytes: AccessDescBytes, Fields: []Field{
		{"location.type", AccessDescLocationType, 4},
		{"location.id", AccessDescLocationID, 4},
		{"flags", AccessDescFlags, 4},
	}},
}

var hipConstants = []Constant{
	{"hipStreamNonBlocking", 0, CUStreamNonBlocking},
	{"hipEventBlockingSync", 0, CUEventBlockingSync},
	{"hipEventDisableTiming", 0, CUEventDisableTiming},
	{"hipEventInterprocess", 0, CUEventInterprocess},
	{"hipHostRegisterPortable", 0, CUHostRegisterPortable},
	{"hipMemcpyDefault", 0, CUDAMemcpyDefault},
	{"hipMemcpySrcAccessOrderStream", HIPBatch, CUAccessOrderStream},
	{"hipMemcpySrcAccessOrderAny", HIPBatch, CUAccessOrderAny},
	{"hipIpcMemLazyEnablePeerAccess", HIPShares, CUIpcLazyPeerAccess},
	{"hipMemAllocationTypePinned", 0, CUAllocationPinned},
	{"hipMemHandleTypePosixFileDescriptor", 0, CUHandlePosixFD},
	{"hipMemLocationTypeDevice", 0, CULocationDevice},
	{"hipMemAccessFlagsProtReadWrite", 0, CUAccessReadWrite},
	{"hipMemAllocationGranularityMinimum", 0, CUGranularityMinimum},
	{"hipErrorNotReady", 0, CUNotReady},
	{"hipErrorPeerAccessAlreadyEnabled", 0, CUPeerAlreadyEnabled},
	{"hipDeviceAttributeAsyncEngineCount", 0, HIPDeviceAsyncEngineCount},
	{"hipDeviceAttributeIntegrated", 0, HIPDeviceIntegrated},
	{"hipDeviceAttributeMaxPitch", 0, HIPDeviceMaxPitch},
	{"hipDeviceAttributeUnifiedAddressing", 0, HIPDeviceUnifiedAddressing},
	{"hipDeviceAttributeVirtualMemoryManagementSupported", HIPShares, HIPDeviceVMM},
}

// The calls of libamdhip64, as places in the table.
const (
	HipInit = iota
	HipRuntimeGetVersion
	HipGetErrorName
	HipGetLastError
	HipGetDeviceCount
	HipDeviceGet
	HipDeviceGetName
	HipDeviceGetUuid
	HipDeviceGetPCIBusId
	HipDeviceGetAttribute
	HipDeviceTotalMem
	HipSetDevice
	HipDeviceGetStreamPriorityRange
	HipMalloc
	HipFree
	HipMemsetAsync
	HipHostRegister
	HipHostUnregister
	HipStreamCreateWithPriority
	HipStreamDestroy
	HipStreamSynchronize
	HipStreamWaitEvent
	HipEventCreateWithFlags
	HipEventRecord
	HipEventQuery
	HipEventSynchronize
	HipEventDestroy
	HipMemcpyAsync
	HipMemcpy2DAsync
	HipMemcpyBatchAsync
	HipMemGetAddressRange
	HipIpcGetMemHandle
	HipIpcOpenMemHandle
	HipIpcCloseMemHandle
	HipIpcGetEventHandle
	HipIpcOpenEventHandle
	HipDeviceCanAccessPeer
	HipDeviceEnablePeerAccess
	HipMemGetAllocationGranularity
	HipMemCreate
	HipMemRelease
	HipMemExportToShareableHandle
	HipMemImportFromShareableHandle
	HipMemAddressReserve
	HipMemAddressFree
	HipMemMap
	HipMemUnmap
	HipMemSetAccess
)

var hipCalls = [...]Call{
	HipInit:                         {"hipInit", "", 0, "unsigned int", false},
	HipRuntimeGetVersion:            {"hipRuntimeGetVersion", "", 0, "int*", false},
	HipGetErrorName:                 {"hipGetErrorName", "", 0, "hipError_t", false},
	HipGetLastError:                 {"hipGetLastError", "", 0, "void", false},
	HipGetDeviceCount:               {"hipGetDeviceCount", "", 0, "int*", false},
	HipDeviceGet:                    {"hipDeviceGet", "", 0, "hipDevice_t*, int", false},
	HipDeviceGetName:                {"hipDeviceGetName", "", 0, "char*, int, hipDevice_t", false},
	HipDeviceGetUuid:                {"hipDeviceGetUuid", "", 0, "hipUUID*, hipDevice_t", true},
	HipDeviceGetPCIBusId:            {"hipDeviceGetPCIBusId", "", 0, "char*, int, int", false},
	HipDeviceGetAttribute:           {"hipDeviceGetAttribute", "", 0, "int*, hipDeviceAttribute_t, int", false},
	HipDeviceTotalMem:               {"hipDeviceTotalMem", "", 0, "size_t*, hipDevice_t", false},
	HipSetDevice:                    {"hipSetDevice", "", 0, "int", false},
	HipDeviceGetStreamPriorityRange: {"hipDeviceGetStreamPriorityRange", "", 0, "int*, int*", false},
	HipMalloc:                       {"hipMalloc", "", 0, "void**, size_t", false},
	HipFree:                         {"hipFree", "", 0, "void*", false},
	HipMemsetAsync:                  {"hipMemsetAsync", "", 0, "void*, int, size_t, hipStream_t", false},
	HipHostRegister:                 {"hipHostRegister", "", 0, "void*, size_t, unsigned int", false},
	HipHostUnregister:               {"hipHostUnregister", "", 0, "void*", false},
	HipStreamCreateWithPriority:     {"hipStreamCreateWithPriority", "", 0, "hipStream_t*, unsigned int, int", false},
	HipStreamDestroy:                {"hipStreamDestroy", "", 0, "hipStream_t", false},
	HipStreamSynchronize:            {"hipStreamSynchronize", "", 0, "hipStream_t", false},
	HipStreamWaitEvent:              {"hipStreamWaitEvent", "", 0, "hipStream_t, hipEvent_t, unsigned int", false},
	HipEventCreateWithFlags:         {"hipEventCreateWithFlags", "", 0, "hipEvent_t*, unsigned int", false},
	HipEventRecord:                  {"hipEventRecord", "", 0, "hipEvent_t, hipStream_t", false},
	HipEventQuery:                   {"hipEventQuery", "", 0, "hipEvent_t", false},
	HipEventSynchronize:             {"hipEventSynchronize", "", 0, "hipEvent_t", false},
	HipEventDestroy:                 {"hipEventDestroy", "", 0, "hipEvent_t", false},
	HipMemcpyAsync:                  {"hipMemcpyAsync", "", 0, "void*, const void*, size_t, hipMemcpyKind, hipStream_t", false},
	HipMemcpy2DAsync:                {"hipMemcpy2DAsync", "", 0, "void*, size_t, const void*, size_t, size_t, size_t, hipMemcpyKind, hipStream_t", false},
	HipMemcpyBatchAsync:             {"hipMemcpyBatchAsync", "", HIPBatch, "void**, void**, size_t*, size_t, hipMemcpyAttributes*, size_t*, size_t, size_t*, hipStream_t", true},
	HipMemGetAddressRange:           {"hipMemGetAddressRange", "", 0, "hipDeviceptr_t*, size_t*, hipDeviceptr_t", false},
	HipIpcGetMemHandle:              {"hipIpcGetMemHandle", "", 0, "hipIpcMemHandle_t*, void*", true},
	HipIpcOpenMemHandle:             {"hipIpcOpenMemHandle", "", 0, "void**, hipIpcMemHandle_t, unsigned int", true},
	HipIpcCloseMemHandle:            {"hipIpcCloseMemHandle", "", 0, "void*", true},
	HipIpcGetEventHandle:            {"hipIpcGetEventHandle", "", 0, "hipIpcEventHandle_t*, hipEvent_t", true},
	HipIpcOpenEventHandle:           {"hipIpcOpenEventHandle", "", 0, "hipEvent_t*, hipIpcEventHandle_t", true},
	HipDeviceCanAccessPeer:          {"hipDeviceCanAccessPeer", "", 0, "int*, int, int", true},
	HipDeviceEnablePeerAccess:       {"hipDeviceEnablePeerAccess", "", 0, "int, unsigned int", true},
	HipMemGetAllocationGranularity:  {"hipMemGetAllocationGranularity", "", 0, "size_t*, const hipMemAllocationProp*, hipMemAllocationGranularity_flags", true},
	HipMemCreate:                    {"hipMemCreate", "", 0, "hipMemGenericAllocationHandle_t*, size_t, const hipMemAllocationProp*, unsigned long long", true},
	HipMemRelease:                   {"hipMemRelease", "", 0, "hipMemGenericAllocationHandle_t", true},
	HipMemExportToShareableHandle:   {"hipMemExportToShareableHandle", "", 0, "void*, hipMemGenericAllocationHandle_t, hipMemAllocationHandleType, unsigned long long", true},
	HipMemImportFromShareableHandle: {"hipMemImportFromShareableHandle", "", 0, "hipMemGenericAllocationHandle_t*, void*, hipMemAllocationHandleType", true},
	HipMemAddressReserve:            {"hipMemAddressReserve", "", 0, "void**, size_t, size_t, void*, unsigned long long", true},
	HipMemAddressFree:               {"hipMemAddressFree", "", 0, "void*, size_t", true},
	HipMemMap:                       {"hipMemMap", "", 0, "void*, size_t, size_t, hipMemGenericAllocationHandle_t, unsigned long long", true},
	HipMemUnmap:                     {"hipMemUnmap", "", 0, "void*, size_t", true},
	HipMemSetAccess:                 {"hipMemSetAccess", "", 0, "void*, size_t, const hipMemAccessDesc*, size_t", true},
}
