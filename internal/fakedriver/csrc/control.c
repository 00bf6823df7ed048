// What tests set and look at: options, injected errors, violations, counts.
//
// Options have names. fakeSet sets one in a running library, and the environment sets it
// for a process that the test starts: FAKE_DELAY_US is delay_us. Such a process is looked
// at through two files: FAKE_LOG gets each violation as a line, and FAKE_STATE is the
// counts themselves, which stay when the process is gone, however it went.
#include "fake.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

Context contexts[MAX_DEVICES];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
bool initialized;
__thread Context *here;
__thread const char *call;
__thread bool in_function;

Options options = {
	.mode = RANDOM,
	.delay_us = 100,
	.patience_ms = 20,
	.seed = 1,
	.devices = 2,
	.physical = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
	.scribble = true,
	.checks = true,
	.free_waits = true,
	.memory = 8ull << 30,
	.register_limit = 512ull << 30,
};

static int64_t own_counts[COUNTS];
int64_t *counts = own_counts;

// The books of this file have a lock of their own: violations are noted with and
// without the other.
static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;

enum { KEPT = 1000 };
static char *noted[KEPT];
static int log_fd = -1;

static Site *sites;

// Rule is an error to be injected: the nth call of name from now on returns code.
typedef struct Rule {
	char name[64];
	long nth;
	int code;
	struct Rule *next;
} Rule;
static Rule *rules;

static struct { int attribute, value; } overrides[64];
static int override_count;

static uint64_t generation = 1; // of the bindings that are still good

void count(int which, int64_t by) { __atomic_fetch_add(&counts[which], by, __ATOMIC_RELAXED); }

void violation(const char *format, ...)
{
	char text[512];
	int n = snprintf(text, sizeof text, "%s: ", call ? call : "stream");
	va_list list;
	va_start(list, format);
	vsnprintf(text + n, sizeof text - (size_t)n, format, list);
	va_end(list);
	pthread_mutex_lock(&books);
	if (counts[VIOLATIONS] < KEPT)
		noted[counts[VIOLATIONS]] = strdup(text);
	count(VIOLATIONS, 1);
	if (log_fd >= 0)
		dprintf(log_fd, "%s\n", text);
	pthread_mutex_unlock(&books);
}

uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

// nap_us sleeps all of it: Go interrupts system calls of the threads it knows.
void nap_us(long us)
{
	struct timespec t = {us / 1000000, us % 1000000 * 1000};
	while (us > 0 && nanosleep(&t, &t) && errno == EINTR)
		;
}

// go_memory reports whether an address is that of a Go value: the heap, where stacks lie
// too, and the data of the program. The kernel chooses addresses for mappings that nobody
// asks a place for, this library's among them, and Go asks for places far below: since
// Go 1.26 at random ones.
bool go_memory(uint64_t addr, uint64_t bytes)
{
	static const uint64_t mappings = 0x550000000000, heap = 0xc000000000, heap_end = 0xd000000000;
	if ((uint64_t)own_counts > mappings)
		return addr < mappings;
	return addr + bytes > heap && addr < heap_end;
}

bool usable(const void *p)
{
	if (!p)
		return false;
	if (go_memory((uint64_t)p, 1)) {
		violation("pointer %p to Go memory", p);
		return false;
	}
	return true;
}

static void nowstamp(struct timespec *t)
{
	if (options.expire_us)
		clock_gettime(CLOCK_MONOTONIC, t);
}

void bind_thread(Binding *b, Context *c)
{
	b->context = c;
	b->generation = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
	nowstamp(&b->used);
}

bool binding_stale(Binding *b)
{
	if (b->generation != __atomic_load_n(&generation, __ATOMIC_ACQUIRE))
		return true;
	if (!options.expire_us)
		return false;
	struct timespec now;
	nowstamp(&now);
	bool late = (now.tv_sec - b->used.tv_sec) * 1000000 + (now.tv_nsec - b->used.tv_nsec) / 1000 > options.expire_us;
	b->used = now;
	return late;
}

static int injected(const char *name)
{
	int code = OK;
	pthread_mutex_lock(&books);
	for (Rule **p = &rules; *p;) {
		Rule *r = *p;
		if (strcmp(r->name, name) || --r->nth > 0) {
			p = &r->next;
			continue;
		}
		code = r->code;
		*p = r->next;
		free(r);
	}
	pthread_mutex_unlock(&books);
	return code;
}

int enter(Site *s, int need)
{
	call = s->name;
	if (!__atomic_load_n(&s->listed, __ATOMIC_ACQUIRE)) {
		pthread_mutex_lock(&books);
		if (!s->listed) {
			s->next = sites;
			sites = s;
			__atomic_store_n(&s->listed, true, __ATOMIC_RELEASE);
		}
		pthread_mutex_unlock(&books);
	}
	__atomic_fetch_add(&s->calls, 1, __ATOMIC_RELAXED);
	if (__atomic_load_n(&rules, __ATOMIC_RELAXED)) {
		int code = injected(s->name);
		if (code)
			return code;
	}
	if (in_function && need != ANYTIME) {
		violation("called from a host function");
		return NOT_PERMITTED;
	}
	if (need >= INITIALIZED && !initialized) {
		violation("called before the library was initialized");
		return NOT_INITIALIZED;
	}
	if (need < BOUND)
		return OK;
	bool stale = false;
	int e = vendor_context(&here, &stale);
	if (e)
		return e;
	if (stale) {
		violation("the context of this thread was set by an earlier section");
		return INVALID_CONTEXT;
	}
	return need == ENDING ? OK : here->failed;
}

int ended(int e) { return here->failed ? here->failed : e; }

void fail(Context *c, int code)
{
	if (!c->failed)
		c->failed = code;
	for (Stream *s = first_stream(); s; s = s->next)
		pthread_cond_signal(&s->work);
	pthread_cond_broadcast(&progress);
}

void end_context(Context *c)
{
	int s = end_streams(c), e = end_events(c);
	// What is still queued was asked for, and is done first.
	wait_idle(c);
	int m = end_memory(c);
	if (!c->failed && s + e + m)
		violation("device %d is released with %d streams, %d events and %d memories", c->device, s, e, m);
	c->failed = 0;
	c->peers = 0;
}

bool attribute_override(int attribute, int *value)
{
	for (int i = override_count; i-- > 0;)
		if (overrides[i].attribute == attribute) {
			*value = overrides[i].value;
			return true;
		}
	return false;
}

void device_uuid(int device, unsigned char uuid[16])
{
	uint64_t r = 0xfa4edeull + (uint64_t)options.physical[device] * 7919, w[2];
	w[0] = next_random(&r);
	w[1] = next_random(&r);
	memcpy(uuid, w, 16);
}

static void set_mode(const char *v)
{
	options.mode = !strcasecmp(v, "lazy") ? LAZY : !strcasecmp(v, "eager") ? EAGER : !strcasecmp(v, "random") ? RANDOM : atoi(v);
}

// set_visible is CUDA_VISIBLE_DEVICES: what each ordinal stands for.
static void set_visible(const char *v)
{
	options.devices = 0;
	for (char *end; *v && options.devices < MAX_DEVICES; v = *end ? end + 1 : end)
		options.physical[options.devices++] = (int)strtol(v, &end, 10);
}

static void add_rule(const char *v)
{
	Rule *r = calloc(1, sizeof *r);
	if (sscanf(v, "%63[^:]:%ld:%d", r->name, &r->nth, &r->code) != 3) {
		free(r);
		return;
	}
	pthread_mutex_lock(&books);
	r->next = rules;
	rules = r;
	pthread_mutex_unlock(&books);
}

static void add_override(const char *v)
{
	if (override_count < (int)(sizeof overrides / sizeof overrides[0]) &&
	    sscanf(v, "%d=%d", &overrides[override_count].attribute, &overrides[override_count].value) == 2)
		override_count++;
}

// many calls set for each of the parts of v, which are apart by commas.
static void many(const char *v, void (*set)(const char *))
{
	char *copy = strdup(v), *rest = copy;
	for (char *part; (part = strsep(&rest, ","));)
		set(part);
	free(copy);
}

static void set_log(const char *path) { log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600); }

static void set_state(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof own_counts)) {
		close(fd);
		return;
	}
	int64_t *p = mmap(NULL, sizeof own_counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p != MAP_FAILED)
		counts = p;
}

static void set_devices(const char *v)
{
	long n = strtol(v, NULL, 0);
	options.devices = n < 0 ? 0 : n < MAX_DEVICES ? (int)n : MAX_DEVICES;
}

static void set_rules(const char *v) { many(v, add_rule); }
static void set_attributes(const char *v) { many(v, add_override); }

// The options: numbers, and those that are said in another way.
static const struct {
	const char *name;
	int64_t *number;
	void (*set)(const char *);
} settings[] = {
	{"delay_us", &options.delay_us, NULL},
	{"patience_ms", &options.patience_ms, NULL},
	{"seed", &options.seed, NULL},
	{"scribble", &options.scribble, NULL},
	{"protect", &options.protect, NULL},
	{"pageable", &options.pageable, NULL},
	{"checks", &options.checks, NULL},
	{"free_waits", &options.free_waits, NULL},
	{"expire_us", &options.expire_us, NULL},
	{"memory", &options.memory, NULL},
	{"register_limit", &options.register_limit, NULL},
	{"register_code", &options.register_code, NULL},
	{"mode", NULL, set_mode},             // random, eager, lazy
	{"devices", NULL, set_devices},       // how many
	{"visible", NULL, set_visible},       // which: 1,0
	{"fail", NULL, set_rules},            // the 2nd call from now on: cuMemAlloc_v2:2:700,…
	{"attributes", NULL, set_attributes}, // of all devices: 40=1,…
	{"log", NULL, set_log},
	{"state", NULL, set_state},
};

enum { SETTINGS = sizeof settings / sizeof settings[0] };

bool set_option(const char *name, const char *v)
{
	for (int i = 0; i < SETTINGS; i++) {
		if (strcmp(settings[i].name, name))
			continue;
		if (settings[i].number)
			*settings[i].number = strtoll(v, NULL, 0);
		else
			settings[i].set(v);
		return true;
	}
	return false;
}

__attribute__((constructor)) static void begin(void)
{
	for (int i = 0; i < SETTINGS; i++) {
		char env[32] = "FAKE_";
		for (size_t j = 0; settings[i].name[j]; j++)
			env[5 + j] = (char)toupper(settings[i].name[j]);
		const char *v = getenv(env);
		if (v)
			set_option(settings[i].name, v);
	}
	for (int i = 0; i < MAX_DEVICES; i++)
		contexts[i].device = i;
}

static Site *site_named(const char *name)
{
	Site *s = sites;
	while (s && strcmp(s->name, name))
		s = s->next;
	return s;
}

// fakeCalls returns how often a function was called.
EXPORT uint64_t fakeCalls(const char *name)
{
	pthread_mutex_lock(&books);
	Site *s = site_named(name);
	uint64_t n = s ? __atomic_load_n(&s->calls, __ATOMIC_RELAXED) : 0;
	pthread_mutex_unlock(&books);
	return n;
}

// fakeEnter is what enter is, for a function of the runtime library: it returns the error
// that is to be injected.
EXPORT int fakeEnter(const char *name)
{
	pthread_mutex_lock(&books);
	Site *s = site_named(name);
	if (!s) {
		s = calloc(1, sizeof *s);
		*s = (Site){.name = strdup(name), .listed = true, .next = sites};
		sites = s;
	}
	pthread_mutex_unlock(&books);
	return enter(s, ANYTIME);
}

// fakeViolation returns the i-th violation, NULL when there are no more (or they were
// not kept).
EXPORT const char *fakeViolation(size_t i)
{
	pthread_mutex_lock(&books);
	const char *s = i < KEPT && (int64_t)i < counts[VIOLATIONS] ? noted[i] : NULL;
	pthread_mutex_unlock(&books);
	return s;
}

// fakeForgive forgets the violations.
EXPORT void fakeForgive(void)
{
	pthread_mutex_lock(&books);
	for (int i = 0; i < KEPT; i++) {
		free(noted[i]);
		noted[i] = NULL;
	}
	counts[VIOLATIONS] = 0;
	pthread_mutex_unlock(&books);
}

// fakeExpire makes the contexts that threads have set void: who goes on without setting
// it again has relied on somebody else's.
EXPORT void fakeExpire(void) { __atomic_fetch_add(&generation, 1, __ATOMIC_ACQ_REL); }
