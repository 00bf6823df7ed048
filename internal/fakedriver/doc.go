// Package fakedriver builds and loads strict fakes of the vendors' libraries: the CUDA
// driver and runtime, and HIP.
package fakedriver
