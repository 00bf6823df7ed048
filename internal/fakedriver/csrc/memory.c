// Who owns which addresses. Device memory is a memfd: the addresses that callers get
// have no access at all, with guards around them, so that a touch by the CPU is a
// fault, and the fake works through a mapping of its own. Pinned memory is a memfd with
// two mappings, for the same reason: the caller's can be protected while a copy owns
// it. A caller's own memory gets a second mapping when it is shared memory, which is
// the only kind that can have one.
//
// Addresses that were freed are not used again for a long time, so that a use of them
// is seen.
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FRESH = 0xCD, FREED = 0xDF, DEAD = 4096 };

// The live memories, by address.
static Memory **table;
static size_t live, room;

// The last ones that were freed.
static struct {
	uint64_t base, size;
	char *region;
	size_t region_size;
} dead[DEAD];
static size_t deaths;

static uint64_t last_id;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// place returns the index of the first memory that begins after addr.
static size_t place(uint64_t addr)
{
	size_t lo = 0, hi = live;
	while (lo < hi) {
		size_t mid = (lo + hi) / 2;
		if (table[mid]->base <= addr)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

Memory *find_memory(uint64_t addr)
{
	Memory *m = last_memory(addr);
	return m && addr - m->base < m->size ? m : NULL;
}

void insert_memory(Memory *m)
{
	if (live == room) {
		room = room ? 2 * room : 64;
		table = realloc(table, room * sizeof *table);
	}
	size_t i = place(m->base);
	memmove(table + i + 1, table + i, (live - i) * sizeof *table);
	table[i] = m;
	live++;
	m->id = ++last_id;
}

static void remove_memory(Memory *m)
{
	size_t i = place(m->base) - 1;
	live--;
	memmove(table + i, table + i + 1, (live - i) * sizeof *table);
}

static void bury(Memory *m, char *region, size_t region_size)
{
	size_t i = deaths++ % DEAD;
	if (dead[i].region)
		munmap(dead[i].region, dead[i].region_size);
	dead[i].base = m->base;
	dead[i].size = m->size;
	dead[i].region = region;
	dead[i].region_size = region_size;
}

static bool is_dead(uint64_t addr)
{
	for (size_t i = 0; i < DEAD && i < deaths; i++)
		if (dead[i].region && addr - dead[i].base < dead[i].size)
			return true;
	return false;
}

bool is_host(const Memory *m) { return !m || m->kind == PINNED || m->kind == REGISTERED; }

bool mapped(uint64_t addr, uint64_t bytes)
{
	uint64_t lo = addr & ~(uint64_t)(OS_PAGE - 1), hi = (addr + bytes - 1) & ~(uint64_t)(OS_PAGE - 1);
	unsigned char v;
	return !mincore((void *)lo, OS_PAGE, &v) && !mincore((void *)hi, OS_PAGE, &v);
}

int locate(uint64_t addr, uint64_t bytes, Side *s)
{
	s->addr = addr;
	s->memory = NULL;
	if (go_memory(addr, bytes)) {
		violation("address %#lx is Go memory", addr);
		return INVALID_VALUE;
	}
	Memory *m = find_memory(addr);
	if (m) {
		if (bytes > m->size - (addr - m->base)) {
			violation("[%#lx, +%#lx) runs past the end of [%#lx, +%#lx)%s", addr, bytes, m->base, m->size,
				  find_memory(m->base + m->size) ? ", into the next" : "");
			return INVALID_VALUE;
		}
		if (m->kind == RESERVED && !chunks_cover(m, addr, bytes)) {
			violation("[%#lx, +%#lx) is reserved, but not mapped with access", addr, bytes);
			return INVALID_VALUE;
		}
		s->memory = m;
		return OK;
	}
	if (is_dead(addr)) {
		violation("address %#lx was freed", addr);
		return INVALID_VALUE;
	}
	size_t i = place(addr);
	if (i < live && table[i]->base - addr < bytes) {
		violation("[%#lx, +%#lx) begins outside of [%#lx, +%#lx), which it reaches into", addr, bytes, table[i]->base, table[i]->size);
		return INVALID_VALUE;
	}
	if (!mapped(addr, bytes)) {
		violation("address %#lx is not mapped", addr);
		return INVALID_VALUE;
	}
	return OK;
}

// reserve returns size bytes without access at an address that is a multiple of
// GRANULARITY, with room before and after that nobody uses.
static char *reserve(size_t size, char **region, size_t *region_size)
{
	*region_size = round_up(size, OS_PAGE) + 2 * GRANULARITY;
	*region = mmap(NULL, *region_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (*region == MAP_FAILED)
		return NULL;
	return (char *)round_up((uintptr_t)*region + OS_PAGE, GRANULARITY);
}

Memory *new_memory(int kind, Context *c, uint64_t size)
{
	char *region;
	size_t region_size;
	char *at = reserve(size, &region, &region_size);
	if (!at)
		return NULL;
	Memory *m = calloc(1, sizeof *m);
	m->kind = kind;
	m->context = c;
	m->base = (uint64_t)at;
	m->size = size;
	m->mapped = round_up(size, OS_PAGE);
	m->fd = memfd_create(kind == DEVICE ? "fakedriver-device" : "fakedriver-pinned", MFD_CLOEXEC);
	struct stat st = {0};
	if (m->fd < 0 || ftruncate(m->fd, (off_t)m->mapped) || fstat(m->fd, &st))
		goto failed;
	m->inode = st.st_ino;
	m->alias = mmap(NULL, m->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
	if (m->alias == MAP_FAILED)
		goto failed;
	if (kind == PINNED && mmap(at, m->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->fd, 0) == MAP_FAILED)
		goto failed;
	if (kind == PINNED && options.protect) {
		m->writers = calloc(m->mapped / OS_PAGE, sizeof *m->writers);
		m->readers = calloc(m->mapped / OS_PAGE, sizeof *m->readers);
	}
	// A whole large memory would have to be committed.
	memset(m->alias, FRESH, size < 64 << 20 ? size : 64 << 20);
	insert_memory(m);
	return m;
failed:
	if (m->fd >= 0)
		close(m->fd);
	munmap(region, region_size);
	free(m);
	return NULL;
}

Memory *open_memory(Context *c, int fd, uint64_t size)
{
	char *region;
	size_t region_size;
	char *at = reserve(size, &region, &region_size);
	char *alias = mmap(NULL, round_up(size, OS_PAGE), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (!at || alias == MAP_FAILED) {
		close(fd);
		return NULL;
	}
	Memory *m = calloc(1, sizeof *m);
	*m = (Memory){.kind = OPENED, .context = c, .base = (uint64_t)at, .size = size, .mapped = round_up(size, OS_PAGE), .alias = alias, .fd = fd};
	insert_memory(m);
	return m;
}

Memory *reserve_memory(uint64_t size)
{
	char *region;
	size_t region_size;
	char *at = reserve(size, &region, &region_size);
	char *alias = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!at || alias == MAP_FAILED)
		return NULL;
	Memory *m = calloc(1, sizeof *m);
	*m = (Memory){.kind = RESERVED, .context = here, .base = (uint64_t)at, .size = size, .mapped = size, .alias = alias, .fd = -1};
	insert_memory(m);
	return m;
}

Memory *last_memory(uint64_t addr)
{
	size_t i = place(addr);
	return i ? table[i - 1] : NULL;
}

Memory *nth_memory(size_t i) { return i < live ? table[i] : NULL; }

static void release(Memory *m)
{
	if (m->alias)
		munmap(m->alias, m->mapped);
	if (m->fd >= 0)
		close(m->fd);
	free(m->writers);
	free(m->readers);
	free(m);
}

// drop_memory ends a memory for the caller. What is queued keeps working on it: the real
// driver promises nothing then, which the caller of this has noted.
void drop_memory(Memory *m)
{
	remove_memory(m);
	if (m->kind == DEVICE) {
		count(LIVE_DEVICE, -1);
		count(DEVICE_BYTES, -(int64_t)m->size);
		m->context->used -= m->size;
		// Who has opened it in another process sees that it is gone.
		memset(m->alias, FREED, m->size < 64 << 20 ? m->size : 64 << 20);
	}
	if (m->kind == PINNED)
		count(LIVE_PINNED, -1);
	if (m->kind == REGISTERED) {
		count(LIVE_REGISTERED, -1);
		count(REGISTERED_BYTES, -(int64_t)m->size);
		if (m->writers)
			mprotect((void *)(m->base & ~(uint64_t)(OS_PAGE - 1)), m->mapped, PROT_READ | PROT_WRITE);
	} else {
		// What lies before the first multiple of GRANULARITY stays mapped without access,
		// and costs nothing.
		mmap((void *)m->base, m->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		bury(m, (char *)m->base, m->mapped);
	}
	free(m->writers);
	free(m->readers);
	m->writers = m->readers = NULL;
	m->dropped = true;
	if (!m->pending)
		release(m);
}

void unpend(Memory *m)
{
	if (m && --m->pending == 0 && m->dropped)
		release(m);
}

static void settle_memory(Memory *m)
{
	while (m->pending)
		pthread_cond_wait(&progress, &lock);
}

// in_use reports whether queued copies need a memory. Those of a device that has failed
// are waited for: they are dropped, or end.
bool in_use(Memory *m)
{
	if (m->context->failed)
		settle_memory(m);
	return m->pending;
}

// own_pages notes that a copy will write or read [s.addr, +bytes), or no longer does, and
// gives the caller no more access to the OS pages than is safe.
void own_pages(const Side *s, uint64_t bytes, bool writes, int by)
{
	Memory *m = s->memory;
	if (!m || !m->writers || !bytes)
		return;
	uint64_t origin = m->base & ~(uint64_t)(OS_PAGE - 1);
	uint64_t from = 0, to = 0; // pages whose access changes to access
	int access = -1;
	for (uint64_t p = (s->addr - origin) / OS_PAGE; p <= (s->addr + bytes - 1 - origin) / OS_PAGE; p++) {
		int before = m->writers[p] ? PROT_NONE : m->readers[p] ? PROT_READ : PROT_READ | PROT_WRITE;
		if (writes)
			m->writers[p] += by;
		else
			m->readers[p] += by;
		int now = m->writers[p] ? PROT_NONE : m->readers[p] ? PROT_READ : PROT_READ | PROT_WRITE;
		if (now == before)
			continue;
		if (p != to || now != access) {
			if (to > from)
				mprotect((void *)(origin + from * OS_PAGE), (to - from) * OS_PAGE, access);
			from = p;
			access = now;
		}
		to = p + 1;
	}
	if (to > from)
		mprotect((void *)(origin + from * OS_PAGE), (to - from) * OS_PAGE, access);
}

// reach returns where the fake finds addr.
char *reach(const Side *s, uint64_t addr)
{
	Memory *m = s->memory;
	if (!m || !m->alias)
		return (char *)addr;
	uint64_t origin = m->kind == REGISTERED ? m->base & ~(uint64_t)(OS_PAGE - 1) : m->base;
	return m->alias + (addr - origin);
}

// direct reports whether the fake has a mapping of its own.
static bool direct(const Side *s) { return s->memory && s->memory->alias; }

// Memory that the fake has no mapping of its own of may be gone, or closed by its owner:
// the kernel says so, where a plain copy would end the process.
static bool foreign(uint64_t addr, void *buf, size_t n, bool write)
{
	struct iovec mine = {buf, n}, theirs = {(void *)addr, n};
	ssize_t done = write ? process_vm_writev(getpid(), &mine, 1, &theirs, 1, 0) : process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0);
	if (done < 0 && (errno == ENOSYS || errno == EPERM)) {
		memcpy(write ? theirs.iov_base : buf, write ? buf : theirs.iov_base, n);
		return true;
	}
	return done == (ssize_t)n;
}

bool read_at(const Side *s, uint64_t addr, void *buf, size_t n)
{
	if (!direct(s))
		return foreign(addr, buf, n, false);
	memcpy(buf, reach(s, addr), n);
	return true;
}

bool write_at(const Side *d, uint64_t addr, const void *buf, size_t n)
{
	if (!direct(d))
		return foreign(addr, (void *)buf, n, true);
	memcpy(reach(d, addr), buf, n);
	return true;
}

bool move(const Side *d, uint64_t dst, const Side *s, uint64_t src, size_t n)
{
	return direct(d) ? read_at(s, src, reach(d, dst), n) : write_at(d, dst, reach(s, src), n);
}

bool fill(const Side *d, uint64_t dst, int byte, size_t n)
{
	if (direct(d)) {
		memset(reach(d, dst), byte, n);
		return true;
	}
	char junk[OS_PAGE];
	memset(junk, byte, sizeof junk);
	for (size_t done = 0; done < n; done += sizeof junk)
		if (!foreign(dst + done, junk, n - done < sizeof junk ? n - done : sizeof junk, true))
			return false;
	return true;
}

int allocate(Context *c, uint64_t *out, uint64_t size)
{
	if (!size)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Memory *m = c->used + size <= (uint64_t)options.memory ? new_memory(DEVICE, c, size) : NULL;
	if (m) {
		c->used += size;
		count(LIVE_DEVICE, 1);
		count(DEVICE_BYTES, (int64_t)size);
		*out = m->base;
	}
	pthread_mutex_unlock(&lock);
	return m ? OK : OUT_OF_MEMORY;
}

int unknown_address(uint64_t addr)
{
	if (is_dead(addr))
		violation("address %#lx is freed twice", addr);
	else
		violation("address %#lx is not what was allocated", addr);
	return INVALID_VALUE;
}

int free_device(Context *c, uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->base != addr || m->kind != DEVICE) {
		e = unknown_address(addr);
	} else {
		if (m->context != c)
			violation("memory of device %d is freed with device %d current", m->context->device, c->device);
		if (options.free_waits)
			wait_idle(m->context);
		for (Stream *s = first_stream(); s; s = s->next)
			if (s->enqueued > s->demand && m->pending) {
				s->demand = s->enqueued;
				pthread_cond_signal(&s->work);
			}
		settle_memory(m);
		drop_memory(m);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int address_range(uint64_t addr, uint64_t *base, uint64_t *size, int unknown)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	uint64_t b = 0, n = 0;
	if (!m || m->kind == REGISTERED) {
		e = unknown;
	} else if (m->kind == RESERVED) {
		Chunk *k = chunk_at(m, addr);
		if (k)
			b = k->base, n = k->size;
		else
			e = unknown;
	} else {
		b = m->base, n = m->size;
	}
	pthread_mutex_unlock(&lock);
	if (!e && base)
		*base = b;
	if (!e && size)
		*size = n;
	return e;
}

// end_memory ends what a context has of memory, and returns how many its owner has
// forgotten (locked).
int end_memory(Context *c)
{
	int forgotten = 0;
	for (size_t i = live; i-- > 0;)
		if (table[i]->context == c && table[i]->kind != RESERVED) {
			count(LIVE_OPENED, -table[i]->refs);
			drop_memory(table[i]);
			forgotten++;
		}
	return forgotten;
}
