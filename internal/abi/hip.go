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

var hipCalls = [...]Call{
	Init:            {"hipInit", "", 0, "unsigned int", false},
	Version:         {"hipRuntimeGetVersion", "", 0, "int*", false},
	DeviceCount:     {"hipGetDeviceCount", "", 0, "int*", false},
	DeviceGet:       {"hipDeviceGet", "", 0, "hipDevice_t*, int", false},
	DeviceName:      {"hipDeviceGetName", "", 0, "char*, int, hipDevice_t", false},
	DeviceUUID:      {"hipDeviceGetUuid", "", 0, "hipUUID*, hipDevice_t", true},
	DevicePCI:       {"hipDeviceGetPCIBusId", "", 0, "char*, int, int", false},
	DeviceAttribute: {"hipDeviceGetAttribute", "", 0, "int*, hipDeviceAttribute_t, int", false},
	DeviceBytes:     {"hipDeviceTotalMem", "", 0, "size_t*, hipDevice_t", false},
	Bind:            {"hipSetDevice", "", 0, "int", false},
	PriorityRange:   {"hipDeviceGetStreamPriorityRange", "", 0, "int*, int*", false},
	Alloc:           {"hipMalloc", "", 0, "void**, size_t", false},
	Free:            {"hipFree", "", 0, "void*", false},
	Fill:            {"hipMemsetAsync", "", 0, "void*, int, size_t, hipStream_t", false},
	Register:        {"hipHostRegister", "", 0, "void*, size_t, unsigned int", false},
	Unregister:      {"hipHostUnregister", "", 0, "void*", false},
	StreamCreate:    {"hipStreamCreateWithPriority", "", 0, "hipStream_t*, unsigned int, int", false},
	StreamDestroy:   {"hipStreamDestroy", "", 0, "hipStream_t", false},
	StreamSync:      {"hipStreamSynchronize", "", 0, "hipStream_t", false},
	StreamWait:      {"hipStreamWaitEvent", "", 0, "hipStream_t, hipEvent_t, unsigned int", false},
	EventCreate:     {"hipEventCreateWithFlags", "", 0, "hipEvent_t*, unsigned int", false},
	EventRecord:     {"hipEventRecord", "", 0, "hipEvent_t, hipStream_t", false},
	EventQuery:      {"hipEventQuery", "", 0, "hipEvent_t", false},
	EventSync:       {"hipEventSynchronize", "", 0, "hipEvent_t", false},
	EventDestroy:    {"hipEventDestroy", "", 0, "hipEvent_t", false},
	AddressRange:    {"hipMemGetAddressRange", "", 0, "hipDeviceptr_t*, size_t*, hipDeviceptr_t", false},
	IpcExport:       {"hipIpcGetMemHandle", "", 0, "hipIpcMemHandle_t*, void*", true},
	IpcOpen:         {"hipIpcOpenMemHandle", "", HIPShares, "void**, hipIpcMemHandle_t, unsigned int", true},
	IpcClose:        {"hipIpcCloseMemHandle", "", 0, "void*", true},
	IpcExportEvent:  {"hipIpcGetEventHandle", "", 0, "hipIpcEventHandle_t*, hipEvent_t", true},
	IpcOpenEvent:    {"hipIpcOpenEventHandle", "", 0, "hipEvent_t*, hipIpcEventHandle_t", true},
	CanAccessPeer:   {"hipDeviceCanAccessPeer", "", 0, "int*, int, int", true},
	EnablePeer:      {"hipDeviceEnablePeerAccess", "", 0, "int, unsigned int", true},
	MemGranularity:  {"hipMemGetAllocationGranularity", "", HIPShares, "size_t*, const hipMemAllocationProp*, hipMemAllocationGranularity_flags", true},
	MemCreate:       {"hipMemCreate", "", HIPShares, "hipMemGenericAllocationHandle_t*, size_t, const hipMemAllocationProp*, unsigned long long", true},
	MemRelease:      {"hipMemRelease", "", 0, "hipMemGenericAllocationHandle_t", true},
	MemExport:       {"hipMemExportToShareableHandle", "", 0, "void*, hipMemGenericAllocationHandle_t, hipMemAllocationHandleType, unsigned long long", true},
	MemImport:       {"hipMemImportFromShareableHandle", "", 0, "hipMemGenericAllocationHandle_t*, void*, hipMemAllocationHandleType", true},
	MemReserve:      {"hipMemAddressReserve", "", 0, "void**, size_t, size_t, void*, unsigned long long", true},
	MemUnreserve:    {"hipMemAddressFree", "", 0, "void*, size_t", true},
	MemMap:          {"hipMemMap", "", 0, "void*, size_t, size_t, hipMemGenericAllocationHandle_t, unsigned long long", true},
	MemUnmap:        {"hipMemUnmap", "", 0, "void*, size_t", true},
	MemSetAccess:    {"hipMemSetAccess", "", 0, "void*, size_t, const hipMemAccessDesc*, size_t", true},
	MemRetain:       {"hipMemRetainAllocationHandle", "", 0, "hipMemGenericAllocationHandle_t*, void*", true},

	HipGetErrorName:     {"hipGetErrorName", "", 0, "hipError_t", false},
	HipGetLastError:     {"hipGetLastError", "", 0, "void", false},
	HipMemcpyAsync:      {"hipMemcpyAsync", "", 0, "void*, const void*, size_t, hipMemcpyKind, hipStream_t", false},
	HipMemcpy2DAsync:    {"hipMemcpy2DAsync", "", 0, "void*, size_t, const void*, size_t, size_t, size_t, hipMemcpyKind, hipStream_t", false},
	HipMemcpyBatchAsync: {"hipMemcpyBatchAsync", "", HIPBatch, "void**, void**, size_t*, size_t, hipMemcpyAttributes*, size_t*, size_t, size_t*, hipStream_t", true},
}
