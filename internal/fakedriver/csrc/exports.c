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
