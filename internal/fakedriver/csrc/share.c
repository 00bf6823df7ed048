// Memory and events of other processes. A handle names a descriptor of the process that
// made it, and what must be found there: so it ends with that process, and with the
// memory. It is passed by value, and carries a sum, by which one that was passed wrongly is
// known.
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MEMORY_MAGIC = 0x4d454d48, EVENT_HANDLE_MAGIC = 0x45564e48 };

typedef struct Fields {
	uint32_t magic;
	int32_t pid, fd, device;
	uint64_t size, id, inode, offset;
	uint64_t vendor;
	uint64_t sum;
} Fields;
_Static_assert(sizeof(Fields) == sizeof(Handle), "a handle has 64 bytes");

static uint64_t sum_of(const Fields *f)
{
	uint64_t s = 0;
	const unsigned char *b = (const unsigned char *)f;
	for (size_t i = 0; i < offsetof(Fields, sum); i++)
		s = (s ^ b[i]) * 0x100000001b3u;
	return s;
}

static void seal(Fields *f, Handle *h)
{
	f->pid = getpid();
	memcpy(&f->vendor, vendor_name, sizeof vendor_name);
	f->sum = sum_of(f);
	memcpy(h, f, sizeof *h);
}

// read_handle finds out whether a handle is one, and of another process.
static int read_handle(const Handle *h, uint32_t magic, Fields *f, int bad)
{
	memcpy(f, h, sizeof *f);
	uint64_t vendor = 0;
	memcpy(&vendor, vendor_name, sizeof vendor_name);
	if (f->magic != magic || f->sum != sum_of(f) || f->vendor != vendor) {
		violation("this is no handle: are its 64 bytes passed by value?");
		return bad;
	}
	return f->pid == getpid() ? INVALID_CONTEXT : OK;
}

// take opens what a handle names, -1 when it is gone.
static int take(const Fields *f, uint64_t size)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", f->pid, f->fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct stat st;
	if (fd >= 0 && (fstat(fd, &st) || st.st_ino != f->inode || (uint64_t)st.st_size != size)) {
		close(fd);
		fd = -1;
	}
	return fd;
}

int ipc_export(Handle *h, uint64_t addr)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = m && m->kind == DEVICE ? OK : INVALID_VALUE;
	if (!e) {
		Fields f = {.magic = MEMORY_MAGIC, .fd = m->fd, .device = options.physical[m->context->device],
			    .size = m->size, .id = m->id, .inode = m->inode, .offset = handles_keep_offsets ? addr - m->base : 0};
		seal(&f, h);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

// opened finds what was opened by the same handle.
static Memory *opened(const Handle *h)
{
	for (size_t i = 0;; i++) {
		Memory *m = nth_memory(i);
		if (!m || (m->kind == OPENED && !memcmp(m->key, h, sizeof *h)))
			return m;
	}
}

int ipc_open(Context *c, uint64_t *out, Handle h, unsigned flags, bool again, int bad)
{
	if (flags != 1)
		return INVALID_VALUE;
	Fields f;
	int e = read_handle(&h, MEMORY_MAGIC, &f, bad);
	if (e)
		return e;
	pthread_mutex_lock(&lock);
	Memory *m = again ? opened(&h) : NULL;
	if (m) {
		m->refs++;
		count(LIVE_OPENED, 1);
	} else {
		uint64_t whole = (f.size + OS_PAGE - 1) / OS_PAGE * OS_PAGE;
		int fd = take(&f, whole);
		m = fd < 0 ? NULL : open_memory(c, fd, f.size);
		if (m) {
			memcpy(m->key, &h, sizeof h);
			m->refs = 1;
			count(LIVE_OPENED, 1);
		}
	}
	if (m)
		*out = m->base;
	pthread_mutex_unlock(&lock);
	return m ? OK : bad;
}

int ipc_close(Context *c, uint64_t addr, int bad)
{
	pthread_mutex_lock(&lock);
	Memory *m = find_memory(addr);
	int e = OK;
	if (!m || m->kind != OPENED || m->base != addr) {
		violation("address %#lx is not what was opened", addr);
		e = bad;
	} else {
		if (m->context != c)
			violation("memory that device %d has opened is closed with device %d current", m->context->device, c->device);
		if (m->refs == 1 && in_use(m))
			violation("memory of another process is closed while copies of it are queued");
		count(LIVE_OPENED, -1);
		if (--m->refs == 0)
			drop_memory(m);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

static Shared *map_shared(int fd)
{
	Shared *s = mmap(NULL, OS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return s == MAP_FAILED ? NULL : s;
}

Shared *new_shared(int *fd)
{
	*fd = memfd_create("fakedriver-event", MFD_CLOEXEC);
	Shared *s = *fd < 0 || ftruncate(*fd, OS_PAGE) ? NULL : map_shared(*fd);
	if (s)
		s->magic = EVENT_HANDLE_MAGIC;
	return s;
}

// shared_done reports whether a recording has run. Those of a process that is gone are
// over.
bool shared_done(Shared *s, uint64_t seq, int from)
{
	return __atomic_load_n(&s->done, __ATOMIC_ACQUIRE) >= seq || (from && kill(from, 0) && errno == ESRCH);
}

int ipc_export_event(Handle *h, uint64_t event)
{
	pthread_mutex_lock(&lock);
	Event *e = NULL;
	struct stat st;
	int code = event_of(event, &e);
	if (!code && (!(e->flags & EVENT_SHARED) || e->from || fstat(e->fd, &st)))
		code = INVALID_HANDLE;
	if (!code) {
		Fields f = {.magic = EVENT_HANDLE_MAGIC, .fd = e->fd, .device = options.physical[e->context->device], .inode = st.st_ino};
		seal(&f, h);
	}
	pthread_mutex_unlock(&lock);
	return code;
}

int ipc_open_event(Context *c, uint64_t *out, Handle h, int bad)
{
	Fields f;
	int code = read_handle(&h, EVENT_HANDLE_MAGIC, &f, bad);
	if (code)
		return code;
	int fd = take(&f, OS_PAGE);
	Shared *s = fd < 0 ? NULL : map_shared(fd);
	if (!s) {
		if (fd >= 0)
			close(fd);
		return bad;
	}
	pthread_mutex_lock(&lock);
	Event *e = new_event(c, EVENT_SHARED | EVENT_NO_TIMING);
	if (e) {
		e->shared = s;
		e->fd = fd;
		e->from = f.pid;
		*out = (uint64_t)e;
	}
	pthread_mutex_unlock(&lock);
	return e ? OK : OUT_OF_MEMORY;
}
