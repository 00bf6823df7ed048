package main

import (
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
)

// deviceFlags adds the flags that name a device, its copier, and where the libraries of
// the vendors are.
func deviceFlags(f *pflag.FlagSet, device, copier *string, libraries *accel.Libraries) {
	f.StringVar(device, "device", "", "`device` of the device pages: host, cuda:N, cuda:UUID or hip:N (default host)")
	f.StringVar(copier, "copier", "", "`copier` to use: cuda, libcudart, libamdhip64 or portable (default the first that passes its self-test)")
	libraryFlags(f, libraries)
}

// libraryFlags adds the flags that say where the libraries of the vendors are.
func libraryFlags(f *pflag.FlagSet, libraries *accel.Libraries) {
	f.StringVar(&libraries.CUDA, "cuda-library", "", "`file` of the CUDA driver (default libcuda.so.1, wherever the linker finds it)")
	f.StringVar(&libraries.CUDART, "cudart-library", "", "`file` of the CUDA runtime (default the one in this process, or libcudart.so)")
	f.StringVar(&libraries.HIP, "hip-library", "", "`file` of the HIP runtime (default libamdhip64.so)")
}
