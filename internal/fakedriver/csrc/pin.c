// Pinned host memory: the driver's own, and that of callers, which they register.
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static uint64_t page_of(uint64_t addr) { return addr & ~(uint64_t)(OS_PAGE - 1); }

int allocate_host(Context *c, uint64_t *out, uint64_t size)
{
	if (!size)
		return INVALID_VALUE;
	if (size > (uint64_t)options.register_limit)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	Memory *m = new_memory(PINNED, c, size);
	if (m) {
		count(LIVE_PINNED, 1);
		*out = m->base;
	}
	pthread_mutex_unlock(&lock);
	return m ? OK : OUT_OF_MEMORY;
}

int free_host(uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->base != addr || m->kind != PINNED) {
		e = unknown_address(addr);
	} else {
		if (in_use(m))
			violation("pinned memory %#lx is freed while copies of it are queued", addr);
		drop_memory(m);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

// second_mapping returns another mapping of [lo, lo+n), or NULL: only shared memory of
// one file, mapped in one piece, can have one.
static char *second_mapping(uint64_t lo, size_t n)
{
	FILE *f = fopen("/proc/self/maps", "re");
	if (!f)
		return NULL;
	char line[512], access[5];
	unsigned long from, to, off, inode, want = lo, next_off = 0, first_inode = 0;
	bool whole = false;
	while (!whole && fgets(line, sizeof line, f)) {
		if (sscanf(line, "%lx-%lx %4s %lx %*s %lu", &from, &to, access, &off, &inode) != 5 || to <= want)
			continue;
		if (from > want || access[3] != 's' || !inode || (first_inode && (inode != first_inode || off != next_off)))
			break;
		first_inode = inode;
		next_off = off + (to - from);
		want = to;
		whole = want >= lo + n;
	}
	fclose(f);
	if (!whole)
		return NULL;
	void *p = mremap((void *)lo, 0, n, MREMAP_MAYMOVE);
	if (p == MAP_FAILED)
		return NULL;
	if (mprotect(p, n, PROT_READ | PROT_WRITE)) {
		munmap(p, n); // the caller may only read it
		return NULL;
	}
	return p;
}

static bool wholly_mapped(uint64_t lo, size_t n)
{
	unsigned char v[1024];
	for (size_t done = 0; done < n;) {
		size_t part = n - done < sizeof v * OS_PAGE ? n - done : sizeof v * OS_PAGE;
		if (mincore((void *)(lo + done), part, v))
			return false;
		done += part;
	}
	return true;
}

int register_host(Context *c, uint64_t addr, uint64_t size)
{
	if (!size || addr + size < addr)
		return INVALID_VALUE;
	if (options.register_code)
		return (int)options.register_code;
	if (size > (uint64_t)options.register_limit)
		return OUT_OF_MEMORY;
	uint64_t lo = page_of(addr), hi = round_up(addr + size, OS_PAGE);
	if (!wholly_mapped(lo, hi - lo)) {
		violation("[%#lx, +%#lx) is registered, but not mapped", addr, size);
		return INVALID_VALUE;
	}
	pthread_mutex_lock(&lock);
	Memory *last = last_memory(hi - 1);
	if (last && round_up(last->base + last->size, OS_PAGE) > lo) {
		pthread_mutex_unlock(&lock);
		return ALREADY_REGISTERED;
	}
	Memory *m = calloc(1, sizeof *m);
	m->kind = REGISTERED;
	m->context = c;
	m->base = addr;
	m->size = size;
	m->mapped = hi - lo;
	m->fd = -1;
	m->alias = second_mapping(lo, hi - lo);
	if (m->alias && options.protect) {
		m->writers = calloc(m->mapped / OS_PAGE, sizeof *m->writers);
		m->readers = calloc(m->mapped / OS_PAGE, sizeof *m->readers);
	}
	insert_memory(m);
	count(LIVE_REGISTERED, 1);
	count(REGISTERED_BYTES, (int64_t)size);
	pthread_mutex_unlock(&lock);
	return OK;
}

int unregister_host(uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->base != addr || m->kind != REGISTERED) {
		violation("address %#lx is not what was registered", addr);
		e = NOT_REGISTERED;
	} else {
		if (in_use(m))
			violation("host memory %#lx is unregistered while copies of it are queued", addr);
		if (!wholly_mapped(page_of(addr), m->mapped))
			violation("host memory %#lx was unmapped while it was registered", addr);
		drop_memory(m);
	}
	pthread_mutex_unlock(&lock);
	return e;
}
