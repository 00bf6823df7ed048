package abi

// The calls that libcuda and libamdhip64 both have, in one form, as places in their
// tables. Streams, events, devices and addresses are words to both.
const (
	Init = iota
	Version
	DeviceCount
	DeviceGet
	DeviceName
	DeviceUUID
	DevicePCI
	DeviceAttribute
	DeviceBytes
	Bind
	PriorityRange
	Alloc
	Free
	Fill
	Register
	Unregister
	StreamCreate
	StreamDestroy
	StreamSync
	StreamWait
	EventCreate
	EventRecord
	EventQuery
	EventSync
	EventDestroy
	AddressRange
	IpcExport
	IpcOpen
	IpcClose
	IpcExportEvent
	IpcOpenEvent
	CanAccessPeer
	EnablePeer
	MemGranularity
	MemCreate
	MemRelease
	MemExport
	MemImport
	MemReserve
	MemUnreserve
	MemMap
	MemUnmap
	MemSetAccess
	MemRetain
	numShared
)

// The calls of libcuda alone.
const (
	CuGetErrorName = iota + numShared
	CuDevicePrimaryCtxRetain
	CuDevicePrimaryCtxRelease
	CuMemcpyAsync
	CuMemcpy2DAsync
	CuMemcpy3DAsync
	CuMemcpyBatchAsync
	CuMemcpyBatchAsync8
	CuPointerGetAttribute
)

// The calls of libamdhip64 alone.
const (
	HipGetErrorName = iota + numShared
	HipGetLastError
	HipMemcpyAsync
	HipMemcpy2DAsync
	HipMemcpyBatchAsync
)

// The calls of libcudart.
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
