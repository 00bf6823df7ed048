package cuda

import (
	"fmt"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/gpu"
)

// resolver asks the library for its version, and returns what finds its functions: the
// library's own way where it has one, else the loader's. Kind: fault.Unsupported.
func resolver(lib *gpu.Library, opened *dl.Library) (func(abi.Call) dl.Func, error) {
	version := opened.Find("cuDriverGetVersion")
	if version == 0 {
		return nil, gpu.NotOne("libcuda", opened.Name(), "cuDriverGetVersion", "driver of NVIDIA's")
	}
	lib.File = version.File()
	b, err := dl.NewBlock(1)
	if err != nil {
		return nil, err
	}
	defer b.Free()
	if r := version.Call(b.Addr); gpu.Code(r) != 0 {
		return nil, fault.New(fault.Unsupported, "libcuda", "cuDriverGetVersion of %s returns %d", lib.File, gpu.Code(r))
	}
	lib.Version = int(int32(b.Words[0]))
	lib.Release = release(lib.Version)
	if lib.Version < abi.CUDALeast {
		return nil, fault.New(fault.Unsupported, "libcuda", "the driver in %s is of CUDA %s, and %s is the least", lib.File, lib.Release, release(abi.CUDALeast)).
			Hint("install a newer driver")
	}
	ask := opened.Find(abi.CuGetProcAddress().Export())
	return func(c abi.Call) dl.Func {
		switch {
		case c.Version > lib.Version:
			return 0
		case ask == 0:
			return opened.Find(c.Export())
		}
		return procAddress(ask, c)
	}, nil
}

// procAddress asks the driver for the form of a function that came with c.Version. A
// driver says "success" of what it does not have, so all three of its answers must agree.
func procAddress(ask dl.Func, c abi.Call) dl.Func {
	b, err := dl.NewBlock(32)
	if err != nil {
		return 0
	}
	defer b.Free()
	const address, status = 16, 17 // words
	b.PutString(0, c.Name)
	b.Words[status] = ^uint64(0)
	r := ask.Call(b.Addr, b.Addr+8*address, uintptr(c.Version), 0, b.Addr+8*status)
	if gpu.Code(r) != 0 || int32(b.Words[status]) != abi.CUProcAddressOK {
		return 0
	}
	return dl.Func(b.Words[address])
}

// batchForm says which form of batches the driver has, by the call that makes it; why
// not, when it has none.
func batchForm(lib *gpu.Library) (call int, form gpu.BatchForm, no string) {
	nine, eight := lib.Func(abi.CuMemcpyBatchAsync), lib.Func(abi.CuMemcpyBatchAsync8)
	switch {
	case eight != 0 && eight != nine: // the same address would be the older form
		return abi.CuMemcpyBatchAsync8, gpu.BatchForm{Attributes: true}, ""
	case nine != 0:
		return abi.CuMemcpyBatchAsync, gpu.BatchForm{Attributes: true, FailedAt: true}, ""
	case lib.Version < abi.CUDABatch:
		return 0, form, fmt.Sprintf("the driver is of CUDA %s, and batches came with %s", lib.Release, release(abi.CUDABatch))
	}
	return 0, form, fmt.Sprintf("the driver, of CUDA %s, has no cuMemcpyBatchAsync", lib.Release)
}

// release writes a version for people.
func release(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
