package abi

import (
	"testing"

	"github.com/kvferry/kvferry/fault"
)

func TestErrors_AreFoundByTheirCodes(t *testing.T) {
	for _, table := range [][]Error{cudaErrors, hipErrors} {
		for i, e := range table {
			if i > 0 && table[i-1].Code >= e.Code {
				t.Errorf("%s comes after %s", e.Name, table[i-1].Name)
			}
			if got := find(table, e.Code); got.Name != e.Name || got.Class != e.Class {
				t.Errorf("code %d is %v, want %v", e.Code, got, e)
			}
		}
	}
}

func TestErrors_HaveAClassAndAKind(t *testing.T) {
	for _, test := range []struct {
		of   func(int) Error
		code int
		want Error
	}{
		{CUDAError, 1, Error{1, "CUDA_ERROR_INVALID_VALUE", Failed, fault.Device}},
		{CUDAError, 2, Error{2, "CUDA_ERROR_OUT_OF_MEMORY", Retry, fault.Memory}},
		{CUDAError, 100, Error{100, "CUDA_ERROR_NO_DEVICE", Failed, fault.NotFound}},
		{CUDAError, 700, Error{700, "CUDA_ERROR_ILLEGAL_ADDRESS", Lost, fault.Device}},
		{CUDAError, 719, Error{719, "CUDA_ERROR_LAUNCH_FAILED", Lost, fault.Device}},
		{CUDAError, 801, Error{801, "CUDA_ERROR_NOT_SUPPORTED", Failed, fault.Unsupported}},
		{CUDAError, 802, Error{802, "CUDA_ERROR_SYSTEM_NOT_READY", Retry, fault.Device}},
		{CUDAError, 4242, Error{4242, "error 4242", Failed, fault.Device}},
		{CUDAError, -1, Error{-1, "error -1", Failed, fault.Device}},
		{CUDARTError, 35, Error{35, "cudaError 35", Failed, fault.Unsupported}},
		{CUDARTError, 700, Error{700, "cudaError 700", Lost, fault.Device}},
		{HIPError, 2, Error{2, "hipErrorOutOfMemory", Retry, fault.Memory}},
		{HIPError, 12, Error{12, "hipErrorInvalidPitchValue", Failed, fault.Device}},
		{HIPError, 719, Error{719, "hipErrorLaunchFailure", Lost, fault.Device}},
		{HIPError, 801, Error{801, "hipErrorNotSupported", Failed, fault.Unsupported}},
	} {
		if got := test.of(test.code); got != test.want {
			t.Errorf("code %d is %v, want %v", test.code, got, test.want)
		}
	}
}
