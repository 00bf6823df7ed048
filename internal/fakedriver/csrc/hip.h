// What the files of HIP share.
#ifndef FAKE_HIP_H
#define FAKE_HIP_H

#include "fake.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 71300000
#endif

enum {
	HAS_BATCH = 70100000,
	HAS_ATTRIBUTES = 71300000, // batches may have attributes
	FD_BY_VALUE = 70100000,    // an imported descriptor is the pointer itself
	MOST_COPIES = 8192,        // of one batch
};

typedef int hipError_t;
typedef uint64_t hipStream_t, hipEvent_t, hipHandle_t;

hipError_t result(int e);

#define RESULT(e) result(e)

#define WANT_DEVICE(d)                                 \
	do {                                           \
		if ((d) < 0 || (d) >= options.devices) \
			return RESULT(INVALID_DEVICE); \
	} while (0)

#endif
