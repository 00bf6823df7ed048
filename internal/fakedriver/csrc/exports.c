// The functions that tests call in a running library, and those by which the CUDA runtime
// keeps its books with the driver's.
#include "fake.h"

#include <stdlib.h>
#include <string.h>

// fakeSet sets an option. 0: there is no such option.
EXPORT int fakeSet(const char *name, const char *value)
{
	pthread_mutex_lock(&lock);
	bool ok = set_option(name, value);
	for (Stream *s = first_stream(); s; s = s->next)
		pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&lock);
	return ok;
}

// fakeCounts writes the first n counts.
EXPORT int fakeCounts(int64_t *out, size_t n)
{
	for (size_t i = 0; i < n && i < COUNTS; i++)
		out[i] = __atomic_load_n(&counts[i], __ATOMIC_RELAXED);
	return COUNTS;
}

// fakeLose makes a device fail with code.
EXPORT int fakeLose(int device, int code)
{
	if (device < 0 || device >= options.devices)
		return INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	fail(&contexts[device], code);
	pthread_mutex_unlock(&lock);
	return OK;
}

// fakePeek reads device or host memory as it is now: it waits for nothing.
EXPORT int fakePeek(uint64_t addr, void *to, size_t n)
{
	pthread_mutex_lock(&lock);
	Side s;
	int e = locate(addr, n, &s);
	if (!e && !read_at(&s, addr, to, n))
		e = INVALID_VALUE;
	pthread_mutex_unlock(&lock);
	return e;
}

// fakePoke writes memory.
EXPORT int fakePoke(uint64_t addr, const void *from, size_t n)
{
	pthread_mutex_lock(&lock);
	Side s;
	int e = locate(addr, n, &s);
	if (!e && !write_at(&s, addr, from, n))
		e = INVALID_VALUE;
	pthread_mutex_unlock(&lock);
	return e;
}

// ---- streams

static Stream *held(uint64_t handle)
{
	return is_stream(handle) ? (Stream *)handle : NULL;
}

// fakeHold keeps a stream from running anything, until as many calls of fakeRelease. What
// it runs at the time ends first.
EXPORT int fakeHold(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = held(handle);
	if (s) {
		s->holds++;
		pthread_cond_broadcast(&progress);
		while (s->busy)
			pthread_cond_wait(&progress, &lock);
	}
	pthread_mutex_unlock(&lock);
	return s ? OK : INVALID_HANDLE;
}

EXPORT int fakeRelease(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = held(handle);
	if (s && s->holds > 0) {
		s->holds--;
		pthread_cond_signal(&s->work);
	}
	pthread_mutex_unlock(&lock);
	return s ? OK : INVALID_HANDLE;
}

// fakeQueued returns how many operations a stream has not ended.
EXPORT int64_t fakeQueued(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = held(handle);
	int64_t n = s ? (int64_t)(s->enqueued - s->finished) : -1;
	pthread_mutex_unlock(&lock);
	return n;
}

// fakeFailCopy makes the nth copy from now on that runs on a stream fail the context.
EXPORT int fakeFailCopy(uint64_t handle, uint64_t nth, int code)
{
	pthread_mutex_lock(&lock);
	Stream *s = held(handle);
	if (s) {
		s->fail_in = nth;
		s->fail_code = code;
	}
	pthread_mutex_unlock(&lock);
	return s ? OK : INVALID_HANDLE;
}

// ---- for the runtime library

// fakeViolate notes a violation of one of its functions.
EXPORT void fakeViolate(const char *site, const char *text)
{
	call = site;
	violation("%s", text);
}

// fakePending counts the threads that have an error to ask for.
EXPORT void fakePending(int by) { count(PENDING_ERRORS, by); }

// fakeKind tells pageable (0), pinned (1) and device memory (2) apart.
EXPORT int fakeKind(uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int kind = !m ? 0 : is_host(m) ? 1 : 2;
	pthread_mutex_unlock(&lock);
	return kind;
}

// fakeRetain keeps the context of a device for the runtime library, which never gives it
// back.
EXPORT Context *fakeRetain(int device)
{
	if (device < 0 || device >= options.devices)
		return NULL;
	pthread_mutex_lock(&lock);
	contexts[device].runtime = 1;
	pthread_mutex_unlock(&lock);
	return &contexts[device];
}
