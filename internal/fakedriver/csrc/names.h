// The vendors' names of error codes.
#ifndef NAMES_H
#define NAMES_H

#include <stddef.h>

#define CUDA_NAMES(X) \
	X(0, "CUDA_SUCCESS") \
	X(1, "CUDA_ERROR_INVALID_VALUE") \
	X(2, "CUDA_ERROR_OUT_OF_MEMORY") \
	X(3, "CUDA_ERROR_NOT_INITIALIZED") \
	X(4, "CUDA_ERROR_DEINITIALIZED") \
	X(34, "CUDA_ERROR_STUB_LIBRARY") \
	X(36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER") \
	X(46, "CUDA_ERROR_DEVICE_UNAVAILABLE") \
	X(100, "CUDA_ERROR_NO_DEVICE") \
	X(101, "CUDA_ERROR_INVALID_DEVICE") \
	X(200, "CUDA_ERROR_INVALID_IMAGE") \
	X(201, "CUDA_ERROR_INVALID_CONTEXT") \
	X(205, "CUDA_ERROR_MAP_FAILED") \
	X(206, "CUDA_ERROR_UNMAP_FAILED") \
	X(208, "CUDA_ERROR_ALREADY_MAPPED") \
	X(211, "CUDA_ERROR_NOT_MAPPED") \
	X(214, "CUDA_ERROR_ECC_UNCORRECTABLE") \
	X(215, "CUDA_ERROR_UNSUPPORTED_LIMIT") \
	X(216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE") \
	X(217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED") \
	X(220, "CUDA_ERROR_NVLINK_UNCORRECTABLE") \
	X(226, "CUDA_ERROR_CONTAINED") \
	X(304, "CUDA_ERROR_OPERATING_SYSTEM") \
	X(400, "CUDA_ERROR_INVALID_HANDLE") \
	X(401, "CUDA_ERROR_ILLEGAL_STATE") \
	X(500, "CUDA_ERROR_NOT_FOUND") \
	X(600, "CUDA_ERROR_NOT_READY") \
	X(700, "CUDA_ERROR_ILLEGAL_ADDRESS") \
	X(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES") \
	X(702, "CUDA_ERROR_LAUNCH_TIMEOUT") \
	X(704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED") \
	X(705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED") \
	X(708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE") \
	X(709, "CUDA_ERROR_CONTEXT_IS_DESTROYED") \
	X(710, "CUDA_ERROR_ASSERT") \
	X(711, "CUDA_ERROR_TOO_MANY_PEERS") \
	X(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED") \
	X(713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED") \
	X(714, "CUDA_ERROR_HARDWARE_STACK_ERROR") \
	X(715, "CUDA_ERROR_ILLEGAL_INSTRUCTION") \
	X(716, "CUDA_ERROR_MISALIGNED_ADDRESS") \
	X(717, "CUDA_ERROR_INVALID_ADDRESS_SPACE") \
	X(718, "CUDA_ERROR_INVALID_PC") \
	X(719, "CUDA_ERROR_LAUNCH_FAILED") \
	X(720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") \
	X(800, "CUDA_ERROR_NOT_PERMITTED") \
	X(801, "CUDA_ERROR_NOT_SUPPORTED") \
	X(802, "CUDA_ERROR_SYSTEM_NOT_READY") \
	X(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH") \
	X(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE") \
	X(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED") \
	X(901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED") \
	X(902, "CUDA_ERROR_STREAM_CAPTURE_MERGE") \
	X(903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED") \
	X(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED") \
	X(905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION") \
	X(906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT") \
	X(907, "CUDA_ERROR_CAPTURED_EVENT") \
	X(908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD") \
	X(909, "CUDA_ERROR_TIMEOUT") \
	X(910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE") \
	X(999, "CUDA_ERROR_UNKNOWN")

#define CUDART_NAMES(X) \
	X(0, "cudaSuccess") \
	X(1, "cudaErrorInvalidValue") \
	X(2, "cudaErrorMemoryAllocation") \
	X(3, "cudaErrorInitializationError") \
	X(4, "cudaErrorCudartUnloading") \
	X(12, "cudaErrorInvalidPitchValue") \
	X(17, "cudaErrorInvalidDevicePointer") \
	X(21, "cudaErrorInvalidMemcpyDirection") \
	X(34, "cudaErrorStubLibrary") \
	X(35, "cudaErrorInsufficientDriver") \
	X(36, "cudaErrorCallRequiresNewerDriver") \
	X(46, "cudaErrorDevicesUnavailable") \
	X(100, "cudaErrorNoDevice") \
	X(101, "cudaErrorInvalidDevice") \
	X(200, "cudaErrorInvalidKernelImage") \
	X(201, "cudaErrorDeviceUninitialized") \
	X(205, "cudaErrorMapBufferObjectFailed") \
	X(206, "cudaErrorUnmapBufferObjectFailed") \
	X(208, "cudaErrorAlreadyMapped") \
	X(211, "cudaErrorNotMapped") \
	X(214, "cudaErrorECCUncorrectable") \
	X(215, "cudaErrorUnsupportedLimit") \
	X(216, "cudaErrorDeviceAlreadyInUse") \
	X(217, "cudaErrorPeerAccessUnsupported") \
	X(220, "cudaErrorNvlinkUncorrectable") \
	X(226, "cudaErrorContained") \
	X(304, "cudaErrorOperatingSystem") \
	X(400, "cudaErrorInvalidResourceHandle") \
	X(401, "cudaErrorIllegalState") \
	X(500, "cudaErrorSymbolNotFound") \
	X(600, "cudaErrorNotReady") \
	X(700, "cudaErrorIllegalAddress") \
	X(701, "cudaErrorLaunchOutOfResources") \
	X(702, "cudaErrorLaunchTimeout") \
	X(704, "cudaErrorPeerAccessAlreadyEnabled") \
	X(705, "cudaErrorPeerAccessNotEnabled") \
	X(708, "cudaErrorSetOnActiveProcess") \
	X(709, "cudaErrorContextIsDestroyed") \
	X(710, "cudaErrorAssert") \
	X(711, "cudaErrorTooManyPeers") \
	X(712, "cudaErrorHostMemoryAlreadyRegistered") \
	X(713, "cudaErrorHostMemoryNotRegistered") \
	X(714, "cudaErrorHardwareStackError") \
	X(715, "cudaErrorIllegalInstruction") \
	X(716, "cudaErrorMisalignedAddress") \
	X(717, "cudaErrorInvalidAddressSpace") \
	X(718, "cudaErrorInvalidPc") \
	X(719, "cudaErrorLaunchFailure") \
	X(720, "cudaErrorCooperativeLaunchTooLarge") \
	X(800, "cudaErrorNotPermitted") \
	X(801, "cudaErrorNotSupported") \
	X(802, "cudaErrorSystemNotReady") \
	X(803, "cudaErrorSystemDriverMismatch") \
	X(804, "cudaErrorCompatNotSupportedOnDevice") \
	X(900, "cudaErrorStreamCaptureUnsupported") \
	X(901, "cudaErrorStreamCaptureInvalidated") \
	X(902, "cudaErrorStreamCaptureMerge") \
	X(903, "cudaErrorStreamCaptureUnmatched") \
	X(904, "cudaErrorStreamCaptureUnjoined") \
	X(905, "cudaErrorStreamCaptureIsolation") \
	X(906, "cudaErrorStreamCaptureImplicit") \
	X(907, "cudaErrorCapturedEvent") \
	X(908, "cudaErrorStreamCaptureWrongThread") \
	X(909, "cudaErrorTimeout") \
	X(910, "cudaErrorGraphExecUpdateFailure") \
	X(999, "cudaErrorUnknown")

#define HIP_NAMES(X) \
	X(1, "hipErrorInvalidValue") \
	X(2, "hipErrorOutOfMemory") \
	X(3, "hipErrorNotInitialized") \
	X(4, "hipErrorDeinitialized") \
	X(12, "hipErrorInvalidPitchValue") \
	X(17, "hipErrorInvalidDevicePointer") \
	X(21, "hipErrorInvalidMemcpyDirection") \
	X(35, "hipErrorInsufficientDriver") \
	X(100, "hipErrorNoDevice") \
	X(101, "hipErrorInvalidDevice") \
	X(200, "hipErrorInvalidImage") \
	X(201, "hipErrorInvalidContext") \
	X(205, "hipErrorMapFailed") \
	X(206, "hipErrorUnmapFailed") \
	X(208, "hipErrorAlreadyMapped") \
	X(211, "hipErrorNotMapped") \
	X(214, "hipErrorECCNotCorrectable") \
	X(215, "hipErrorUnsupportedLimit") \
	X(216, "hipErrorContextAlreadyInUse") \
	X(217, "hipErrorPeerAccessUnsupported") \
	X(304, "hipErrorOperatingSystem") \
	X(400, "hipErrorInvalidHandle") \
	X(401, "hipErrorIllegalState") \
	X(500, "hipErrorNotFound") \
	X(600, "hipErrorNotReady") \
	X(700, "hipErrorIllegalAddress") \
	X(701, "hipErrorLaunchOutOfResources") \
	X(702, "hipErrorLaunchTimeOut") \
	X(704, "hipErrorPeerAccessAlreadyEnabled") \
	X(705, "hipErrorPeerAccessNotEnabled") \
	X(708, "hipErrorSetOnActiveProcess") \
	X(709, "hipErrorContextIsDestroyed") \
	X(710, "hipErrorAssert") \
	X(712, "hipErrorHostMemoryAlreadyRegistered") \
	X(713, "hipErrorHostMemoryNotRegistered") \
	X(719, "hipErrorLaunchFailure") \
	X(720, "hipErrorCooperativeLaunchTooLarge") \
	X(801, "hipErrorNotSupported") \
	X(900, "hipErrorStreamCaptureUnsupported") \
	X(901, "hipErrorStreamCaptureInvalidated") \
	X(902, "hipErrorStreamCaptureMerge") \
	X(903, "hipErrorStreamCaptureUnmatched") \
	X(904, "hipErrorStreamCaptureUnjoined") \
	X(905, "hipErrorStreamCaptureIsolation") \
	X(906, "hipErrorStreamCaptureImplicit") \
	X(907, "hipErrorCapturedEvent") \
	X(908, "hipErrorStreamCaptureWrongThread") \
	X(910, "hipErrorGraphExecUpdateFailure") \
	X(999, "hipErrorUnknown") \
	X(1052, "hipErrorRuntimeMemory") \
	X(1053, "hipErrorRuntimeOther")

typedef struct Name {
	int code;
	const char *name;
} Name;

#define NAME(code, name) {code, name},

static inline const char *name_of(const Name *n, size_t count, int code)
{
	for (size_t i = 0; i < count; i++)
		if (n[i].code == code)
			return n[i].name;
	return NULL;
}

#endif
