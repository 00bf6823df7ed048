// What the files of the CUDA driver API share.
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "fake.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 13000
#endif

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef Context *CUcontext;
typedef uint64_t CUstream, CUevent, CUhandle;

// The driver has no codes of its own for these.
static inline CUresult result(int e) { return e == BAD_PITCH || e == BAD_POINTER || e == BAD_DIRECTION ? INVALID_VALUE : e; }

#define RESULT(e) result(e)

#endif
