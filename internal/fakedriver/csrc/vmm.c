// Memory that is mapped piece by piece: physical memory by handles, which travel as file
// descriptors, and address ranges that they are mapped into. One copy may cross pieces.
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_TYPE = 1, PINNED_TYPE = 1, DEVICE_LOCATION = 1, READ_WRITE = 3 };

// Physical is memory behind a handle. It goes with the last handle and the last mapping.
typedef struct Physical {
	uint64_t size;
	int fd, device;
	bool exportable;
	int handles, mappings;
	struct Physical *next;
} Physical;

static Physical *physicals;

static const char memfd_name[] = "fakedriver-vmm";

static bool granular(uint64_t n) { return n % GRANULARITY == 0; }

static Physical *physical_of(uint64_t handle)
{
	for (Physical *p = physicals; p; p = p->next)
		if ((uint64_t)p == handle && p->handles)
			return p;
	violation("%#lx is no handle of memory", handle);
	return NULL;
}

static void let_go(Physical *p)
{
	if (p->handles || p->mappings)
		return;
	for (Physical **q = &physicals; *q; q = &(*q)->next)
		if (*q == p) {
			*q = p->next;
			break;
		}
	contexts[p->device].used -= p->size;
	close(p->fd);
	free(p);
}

static uint64_t add_physical(int fd, int device, uint64_t size, bool exportable)
{
	Physical *p = calloc(1, sizeof *p);
	*p = (Physical){.size = size, .fd = fd, .device = device, .exportable = exportable, .handles = 1, .next = physicals};
	physicals = p;
	contexts[device].used += size;
	count(LIVE_HANDLES, 1);
	return (uint64_t)p;
}

static int check_prop(const AllocationProp *p)
{
	if (p->type != PINNED_TYPE || p->location.type != DEVICE_LOCATION || p->win32 || (p->handle_types & ~(uint32_t)FILE_TYPE) || p->flags)
		return INVALID_VALUE;
	return p->location.id >= 0 && p->location.id < options.devices ? OK : INVALID_DEVICE;
}

int vmm_granularity(size_t *out, const AllocationProp *p, int option)
{
	int e = check_prop(p);
	if (!e && (option < 0 || option > 1))
		e = INVALID_VALUE;
	if (!e)
		*out = GRANULARITY;
	return e;
}

int vmm_create(uint64_t *out, size_t size, const AllocationProp *p, uint64_t flags)
{
	int e = check_prop(p);
	if (e)
		return e;
	if (!size || !granular(size) || flags)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	int fd = contexts[p->location.id].used + size <= (uint64_t)options.memory ? memfd_create(memfd_name, MFD_CLOEXEC) : -1;
	if (fd < 0 || ftruncate(fd, (off_t)size)) {
		if (fd >= 0)
			close(fd);
		e = OUT_OF_MEMORY;
	} else {
		*out = add_physical(fd, p->location.id, size, p->handle_types & FILE_TYPE);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int vmm_release(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Physical *p = physical_of(handle);
	if (p) {
		p->handles--;
		count(LIVE_HANDLES, -1);
		let_go(p);
	}
	pthread_mutex_unlock(&lock);
	return p ? OK : INVALID_VALUE;
}

int vmm_export(void *out, uint64_t handle, int type, uint64_t flags)
{
	if (type != FILE_TYPE || flags)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Physical *p = physical_of(handle);
	int fd = p && p->exportable ? fcntl(p->fd, F_DUPFD_CLOEXEC, 0) : -1;
	pthread_mutex_unlock(&lock);
	if (fd < 0)
		return p && p->exportable ? OPERATING_SYSTEM : INVALID_VALUE;
	*(int *)out = fd;
	return OK;
}

// is_memory reports whether a descriptor is of memory that a fake has exported.
static bool is_memory(int fd, uint64_t *size)
{
	char path[64], name[64] = "";
	struct stat st;
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(path, name, sizeof name - 1);
	if (n < 0 || !strstr(name, memfd_name) || fstat(fd, &st))
		return false;
	*size = (uint64_t)st.st_size;
	return true;
}

int vmm_import(uint64_t *out, void *os, int type)
{
	int fd = (int)(intptr_t)os;
	uint64_t size;
	if (type != FILE_TYPE || fd < 0 || !is_memory(fd, &size))
		return INVALID_VALUE;
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (own < 0)
		return OPERATING_SYSTEM;
	pthread_mutex_lock(&lock);
	*out = add_physical(own, here->device, size, true);
	pthread_mutex_unlock(&lock);
	return OK;
}

int vmm_reserve(uint64_t *out, size_t size, size_t align, uint64_t addr, uint64_t flags)
{
	(void)addr; // a wish, which need not be granted
	if (!size || !granular(size) || flags || align > GRANULARITY || (align & (align - 1)))
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Memory *m = reserve_memory(size);
	if (m) {
		*out = m->base;
		count(LIVE_RESERVED, 1);
	}
	pthread_mutex_unlock(&lock);
	return m ? OK : OUT_OF_MEMORY;
}

int vmm_unreserve(uint64_t addr, size_t size)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->kind != RESERVED || m->base != addr || m->size != size) {
		violation("[%#lx, +%#lx) is not what was reserved", addr, size);
		e = INVALID_VALUE;
	} else if (m->chunks) {
		violation("[%#lx, +%#lx) is given back with memory mapped into it", addr, size);
		e = INVALID_VALUE;
	} else {
		count(LIVE_RESERVED, -1);
		drop_memory(m);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

Chunk *chunk_at(Memory *m, uint64_t addr)
{
	for (Chunk *k = m->chunks; k; k = k->next)
		if (addr - k->base < k->size)
			return k;
	return NULL;
}

bool chunks_cover(Memory *m, uint64_t addr, uint64_t bytes)
{
	for (uint64_t at = addr; at < addr + bytes;) {
		Chunk *k = chunk_at(m, at);
		if (!k || !k->access)
			return false;
		at = k->base + k->size;
	}
	return true;
}

// free_range reports whether nothing is mapped into a range.
static bool free_range(Memory *m, uint64_t addr, uint64_t size)
{
	for (Chunk *k = m->chunks; k; k = k->next)
		if (k->base < addr + size && addr < k->base + k->size)
			return false;
	return true;
}

int vmm_map(uint64_t addr, size_t size, size_t offset, uint64_t handle, uint64_t flags)
{
	if (!size || !granular(size) || !granular(addr) || offset || flags)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	Physical *p = physical_of(handle);
	int e = OK;
	if (!m || m->kind != RESERVED || size > m->size - (addr - m->base) || !p || size > p->size || !free_range(m, addr, size)) {
		violation("[%#lx, +%#lx) can't be mapped", addr, size);
		e = INVALID_VALUE;
	} else if (mmap(m->alias + (addr - m->base), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED) {
		e = MAP_FAILED_CODE;
	} else {
		Chunk *k = calloc(1, sizeof *k);
		*k = (Chunk){.base = addr, .size = size, .of = p, .next = m->chunks};
		m->chunks = k;
		m->context = &contexts[p->device];
		p->mappings++;
		count(LIVE_MAPPED, 1);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

// whole reports whether a range begins and ends with chunks, and is full of them.
static bool whole(Memory *m, uint64_t addr, uint64_t size)
{
	for (uint64_t at = addr; at < addr + size;) {
		Chunk *k = chunk_at(m, at);
		if (!k || k->base != at || k->size > addr + size - at)
			return false;
		at += k->size;
	}
	return true;
}

int vmm_unmap(uint64_t addr, size_t size)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->kind != RESERVED || !size || size > m->size - (addr - m->base) || !whole(m, addr, size)) {
		violation("[%#lx, +%#lx) is not what was mapped", addr, size);
		e = INVALID_VALUE;
	} else {
		if (in_use(m)) {
			violation("memory is unmapped while copies of it are queued");
			wait_idle(m->context);
		}
		for (Chunk **q = &m->chunks; *q;) {
			Chunk *k = *q;
			if (k->base < addr || k->base >= addr + size) {
				q = &k->next;
				continue;
			}
			*q = k->next;
			mmap(m->alias + (k->base - m->base), k->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
			k->of->mappings--;
			let_go(k->of);
			free(k);
			count(LIVE_MAPPED, -1);
		}
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int vmm_access(uint64_t addr, size_t size, const AccessDesc *d, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (d[i].location.type != DEVICE_LOCATION || d[i].location.id < 0 || d[i].location.id >= options.devices ||
		    (d[i].flags != READ_WRITE && d[i].flags > 1))
			return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!n || !m || m->kind != RESERVED || !size || size > m->size - (addr - m->base) || !whole(m, addr, size)) {
		violation("access to [%#lx, +%#lx), which is not what was mapped", addr, size);
		e = INVALID_VALUE;
	} else {
		for (Chunk *k = m->chunks; k; k = k->next)
			if (k->base >= addr && k->base < addr + size)
				k->access = d[n - 1].flags != 0;
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int vmm_retain(uint64_t *out, uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	Chunk *k = m && m->kind == RESERVED ? chunk_at(m, addr) : NULL;
	if (k) {
		k->of->handles++;
		count(LIVE_HANDLES, 1);
		*out = (uint64_t)k->of;
	}
	pthread_mutex_unlock(&lock);
	return k ? OK : INVALID_VALUE;
}
