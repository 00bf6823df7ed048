package abi

import (
	"strconv"

	"github.com/kvferry/kvferry/fault"
)

// CUDAError returns what is known of a code of libcuda. Those of libcudart have the same
// numbers, and other names: see [CUDARTError].
func CUDAError(code int) Error { return find(cudaErrors, code) }

// CUDARTError returns what is known of a code of libcudart, which knows the name itself.
func CUDARTError(code int) Error {
	e := find(cudaErrors, code)
	e.Name = "cudaError " + strconv.Itoa(code)
	if code == 35 { // the driver is older than the runtime, or there is none
		e.Kind = fault.Unsupported
	}
	return e
}

// cudaErrors are sorted by their codes. Lost are the errors after which a context stays
// unusable: the work that it was given has failed, and nothing says what else.
var cudaErrors = []Error{
	{Code: 1, Name: "CUDA_ERROR_INVALID_VALUE"},
	{Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY", Class: Retry, Kind: fault.Memory},
	{Code: 3, Name: "CUDA_ERROR_NOT_INITIALIZED"},
	{Code: 4, Name: "CUDA_ERROR_DEINITIALIZED", Class: Lost},
	{Code: 5, Name: "CUDA_ERROR_PROFILER_DISABLED"},
	{Code: 6, Name: "CUDA_ERROR_PROFILER_NOT_INITIALIZED"},
	{Code: 7, Name: "CUDA_ERROR_PROFILER_ALREADY_STARTED"},
	{Code: 8, Name: "CUDA_ERROR_PROFILER_ALREADY_STOPPED"},
	{Code: 34, Name: "CUDA_ERROR_STUB_LIBRARY", Kind: fault.Unsupported},
	{Code: 36, Name: "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", Kind: fault.Unsupported},
	{Code: 46, Name: "CUDA_ERROR_DEVICE_UNAVAILABLE", Class: Retry},
	{Code: 100, Name: "CUDA_ERROR_NO_DEVICE", Kind: fault.NotFound},
	{Code: 101, Name: "CUDA_ERROR_INVALID_DEVICE", Kind: fault.NotFound},
	{Code: 102, Name: "CUDA_ERROR_DEVICE_NOT_LICENSED"},
	{Code: 200, Name: "CUDA_ERROR_INVALID_IMAGE"},
	{Code: 201, Name: "CUDA_ERROR_INVALID_CONTEXT"},
	{Code: 202, Name: "CUDA_ERROR_CONTEXT_ALREADY_CURRENT"},
	{Code: 205, Name: "CUDA_ERROR_MAP_FAILED"},
	{Code: 206, Name: "CUDA_ERROR_UNMAP_FAILED"},
	{Code: 207, Name: "CUDA_ERROR_ARRAY_IS_MAPPED"},
	{Code: 208, Name: "CUDA_ERROR_ALREADY_MAPPED"},
	{Code: 209, Name: "CUDA_ERROR_NO_BINARY_FOR_GPU"},
	{Code: 210, Name: "CUDA_ERROR_ALREADY_ACQUIRED"},
	{Code: 211, Name: "CUDA_ERROR_NOT_MAPPED"},
	{Code: 212, Name: "CUDA_ERROR_NOT_MAPPED_AS_ARRAY"},
	{Code: 213, Name: "CUDA_ERROR_NOT_MAPPED_AS_POINTER"},
	{Code: 214, Name: "CUDA_ERROR_ECC_UNCORRECTABLE", Class: Lost},
	{Code: 215, Name: "CUDA_ERROR_UNSUPPORTED_LIMIT"},
	{Code: 216, Name: "CUDA_ERROR_CONTEXT_ALREADY_IN_USE"},
	{Code: 217, Name: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
	{Code: 218, Name: "CUDA_ERROR_INVALID_PTX"},
	{Code: 219, Name: "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT"},
	{Code: 220, Name: "CUDA_ERROR_NVLINK_UNCORRECTABLE", Class: Lost},
	{Code: 221, Name: "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"},
	{Code: 222, Name: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
	{Code: 223, Name: "CUDA_ERROR_JIT_COMPILATION_DISABLED"},
	{Code: 224, Name: "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY"},
	{Code: 225, Name: "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC"},
	{Code: 226, Name: "CUDA_ERROR_CONTAINED", Class: Lost},
	{Code: 300, Name: "CUDA_ERROR_INVALID_SOURCE"},
	{Code: 301, Name: "CUDA_ERROR_FILE_NOT_FOUND"},
	{Code: 302, Name: "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"},
	{Code: 303, Name: "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"},
	{Code: 304, Name: "CUDA_ERROR_OPERATING_SYSTEM"},
	{Code: 400, Name: "CUDA_ERROR_INVALID_HANDLE"},
	{Code: 401, Name: "CUDA_ERROR_ILLEGAL_STATE"},
	{Code: 402, Name: "CUDA_ERROR_LOSSY_QUERY"},
	{Code: 500, Name: "CUDA_ERROR_NOT_FOUND"},
	{Code: 600, Name: "CUDA_ERROR_NOT_READY"},
	{Code: 700, Name: "CUDA_ERROR_ILLEGAL_ADDRESS", Class: Lost},
	{Code: 701, Name: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
	{Code: 702, Name: "CUDA_ERROR_LAUNCH_TIMEOUT", Class: Lost},
	{Code: 703, Name: "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING"},
	{Code: 704, Name: "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
	{Code: 705, Name: "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"},
	{Code: 708, Name: "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"},
	{Code: 709, Name: "CUDA_ERROR_CONTEXT_IS_DESTROYED", Class: Lost},
	{Code: 710, Name: "CUDA_ERROR_ASSERT", Class: Lost},
	{Code: 711, Name: "CUDA_ERROR_TOO_MANY_PEERS"},
	{Code: 712, Name: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
	{Code: 713, Name: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
	{Code: 714, Name: "CUDA_ERROR_HARDWARE_STACK_ERROR", Class: Lost},
	{Code: 715, Name: "CUDA_ERROR_ILLEGAL_INSTRUCTION", Class: Lost},
	{Code: 716, Name: "CUDA_ERROR_MISALIGNED_ADDRESS", Class: Lost},
	{Code: 717, Name: "CUDA_ERROR_INVALID_ADDRESS_SPACE", Class: Lost},
	{Code: 718, Name: "CUDA_ERROR_INVALID_PC", Class: Lost},
	{Code: 719, Name: "CUDA_ERROR_LAUNCH_FAILED", Class: Lost},
	{Code: 720, Name: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
	{Code: 721, Name: "CUDA_ERROR_TENSOR_MEMORY_LEAK", Class: Lost},
	{Code: 800, Name: "CUDA_ERROR_NOT_PERMITTED"},
	{Code: 801, Name: "CUDA_ERROR_NOT_SUPPORTED", Kind: fault.Unsupported},
	{Code: 802, Name: "CUDA_ERROR_SYSTEM_NOT_READY", Class: Retry},
	{Code: 803, Name: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", Kind: fault.Unsupported},
	{Code: 804, Name: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", Kind: fault.Unsupported},
	{Code: 805, Name: "CUDA_ERROR_MPS_CONNECTION_FAILED"},
	{Code: 806, Name: "CUDA_ERROR_MPS_RPC_FAILURE"},
	{Code: 807, Name: "CUDA_ERROR_MPS_SERVER_NOT_READY", Class: Retry},
	{Code: 808, Name: "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", Class: Retry},
	{Code: 809, Name: "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", Class: Retry},
	{Code: 810, Name: "CUDA_ERROR_MPS_CLIENT_TERMINATED", Class: Lost},
	{Code: 811, Name: "CUDA_ERROR_CDP_NOT_SUPPORTED"},
	{Code: 812, Name: "CUDA_ERROR_CDP_VERSION_MISMATCH"},
	{Code: 900, Name: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
	{Code: 901, Name: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
	{Code: 902, Name: "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
	{Code: 903, Name: "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
	{Code: 904, Name: "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
	{Code: 905, Name: "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
	{Code: 906, Name: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
	{Code: 907, Name: "CUDA_ERROR_CAPTURED_EVENT"},
	{Code: 908, Name: "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
	{Code: 909, Name: "CUDA_ERROR_TIMEOUT"},
	{Code: 910, Name: "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"},
	{Code: 911, Name: "CUDA_ERROR_EXTERNAL_DEVICE"},
	{Code: 912, Name: "CUDA_ERROR_INVALID_CLUSTER_SIZE"},
	{Code: 913, Name: "CUDA_ERROR_FUNCTION_NOT_LOADED"},
	{Code: 914, Name: "CUDA_ERROR_INVALID_RESOURCE_TYPE"},
	{Code: 915, Name: "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"},
	{Code: 916, Name: "CUDA_ERROR_KEY_ROTATION"},
	{Code: 999, Name: "CUDA_ERROR_UNKNOWN"},
}
