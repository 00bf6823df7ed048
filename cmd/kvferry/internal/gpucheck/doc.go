// Package gpucheck has tests and nothing else: those of devices, copiers and processes
// that share memory, on the device that KVFERRY_GPU names ("cuda:0", "hip:0"). Without it
// they run on fake devices, so that what tools/gpucheck takes to a machine with a GPU is
// known to work. They need no other file than their own binary: see `make gpucheck`.
package gpucheck
