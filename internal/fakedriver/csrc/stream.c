// Queues and the threads that serve them. A queue's thread runs what it was given in
// order, but when is up to the mode: late and at random, only when somebody waits, or
// at once.
//
// Handles are addresses in a table whose slots are used once, so that a handle that was
// given back, or is none, is known for what it is.
#include "fake.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
	STREAM_MAGIC = 0x5354524d,
	ENDED_MAGIC = 0x454e4445,
	MAX_STREAMS = 1 << 16,
};

static Stream *streams; // the table
static size_t stream_slots;
static Stream *serving; // the list of those that have a thread
static __thread Stream *own_stream; // the per-thread default stream
static __thread Context *own_context;

static const uint64_t legacy_names[] = {0, 1};
static const uint64_t per_thread_name = 2;

Stream *first_stream(void) { return serving; }

void *make_table(size_t n, size_t of)
{
	void *p = mmap(NULL, n * of, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

bool in_table(uint64_t handle, const void *table, size_t used, size_t of)
{
	uint64_t off = handle - (uint64_t)table;
	return table && handle >= (uint64_t)table && off < used * of && off % of == 0;
}

bool is_stream(uint64_t p) { return in_table(p, streams, stream_slots, sizeof *streams); }

static void *serve(void *arg);

static Stream *new_stream(Context *c, bool blocking, bool hidden, int priority)
{
	if (!streams && !(streams = make_table(MAX_STREAMS, sizeof *streams)))
		return NULL;
	if (stream_slots == MAX_STREAMS)
		return NULL;
	Stream *s = &streams[stream_slots++];
	s->magic = STREAM_MAGIC;
	s->number = (int)stream_slots;
	s->context = c;
	s->blocking = blocking;
	s->hidden = hidden;
	s->priority = priority;
	s->random = (uint64_t)options.seed * 0x9e3779b97f4a7c15u + stream_slots;
	pthread_condattr_t a;
	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	pthread_cond_init(&s->work, &a);
	pthread_condattr_destroy(&a);
	s->next = serving;
	serving = s;
	// Signals are the business of the caller's threads.
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_t t;
	int e = pthread_create(&t, NULL, serve, s);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (e) {
		serving = s->next;
		s->magic = ENDED_MAGIC;
		return NULL;
	}
	pthread_detach(t);
	return s;
}

int stream_of(uint64_t handle, Context *c, Stream **out)
{
	if (handle == legacy_names[0] || handle == legacy_names[1]) {
		if (!c->legacy)
			c->legacy = new_stream(c, false, true, 0);
		*out = c->legacy;
		return *out ? OK : OUT_OF_MEMORY;
	}
	if (handle == per_thread_name) {
		if (!own_stream || own_context != c || own_stream->magic != STREAM_MAGIC) {
			own_stream = new_stream(c, true, true, 0);
			own_context = c;
		}
		*out = own_stream;
		return *out ? OK : OUT_OF_MEMORY;
	}
	if (!is_stream(handle)) {
		violation("%#lx is not a stream", handle);
		return INVALID_HANDLE;
	}
	Stream *s = (Stream *)handle;
	if (s->magic != STREAM_MAGIC) {
		violation("stream %d was destroyed", s->number);
		return INVALID_HANDLE;
	}
	if (c && s->context != c) {
		violation("stream %d is of device %d, but device %d is current", s->number, s->context->device, c->device);
		return INVALID_HANDLE;
	}
	*out = s;
	return OK;
}

// demand makes s run up to seq, in lazy mode.
void demand(Stream *s, uint64_t seq)
{
	if (s->demand < seq) {
		s->demand = seq;
		pthread_cond_signal(&s->work);
	}
}

static void append(Stream *s, Op *o)
{
	o->next = NULL;
	o->seq = ++s->enqueued;
	clock_gettime(CLOCK_MONOTONIC, &o->queued);
	if (s->tail)
		s->tail->next = o;
	else
		s->head = o;
	s->tail = o;
	pthread_cond_signal(&s->work);
}

Record *new_record(Stream *s, int refs)
{
	Record *r = calloc(1, sizeof *r);
	r->refs = refs;
	r->stream = s;
	return r;
}

void drop_record(Record *r)
{
	if (r && --r->refs == 0)
		free(r);
}

Op *new_op(int kind)
{
	Op *o = calloc(1, sizeof *o);
	o->kind = kind;
	return o;
}

// follow makes what comes on s wait for what is queued on before.
static void follow(Stream *s, Stream *before)
{
	if (before == s || before->finished == before->enqueued)
		return;
	Record *r = new_record(before, 2);
	Op *mark = new_op(RECORD), *wait = new_op(WAIT);
	mark->record = wait->record = r;
	append(before, mark);
	r->seq = mark->seq;
	append(s, wait);
}

// caught_up reports whether s has nothing to do that it could do now.
static bool caught_up(const Stream *s, uint64_t seq) { return s->finished >= seq || s->blocked || s->holds || s->context->failed; }

void enqueue(Stream *s, Op *o)
{
	Context *c = s->context;
	if (s == c->legacy) {
		for (Stream *t = serving; t; t = t->next)
			if (t->context == c && t->blocking && !t->over)
				follow(s, t);
	} else if (s->blocking && c->legacy) {
		follow(s, c->legacy);
	}
	append(s, o);
	if (options.mode == EAGER && !in_function) {
		uint64_t seq = o->seq;
		while (!caught_up(s, seq))
			pthread_cond_wait(&progress, &lock);
	}
}

static bool overdue(const Op *o)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - o->queued.tv_sec) * 1000 + (now.tv_nsec - o->queued.tv_nsec) / 1000000 >= options.patience_ms;
}

// runnable reports whether s may begin what is next.
static bool runnable(const Stream *s)
{
	if (!s->head)
		return false;
	if (s->context->failed)
		return true;
	if (s->holds)
		return false;
	return options.mode != LAZY || s->demand >= s->head->seq || overdue(s->head);
}

static void wait_for_work(Stream *s)
{
	if (!s->head || s->holds || options.mode != LAZY) {
		pthread_cond_wait(&s->work, &lock);
		return;
	}
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += options.patience_ms / 1000;
	until.tv_nsec += options.patience_ms % 1000 * 1000000;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	pthread_cond_timedwait(&s->work, &lock, &until);
}

enum { BACKLOG = 32 };

// lateness draws how long s waits before what it does next: mostly about the delay,
// sometimes not at all or four times as long. Of a long backlog only some are late, or a
// test of many small copies would only wait.
long lateness(Stream *s)
{
	if (options.mode != RANDOM || options.delay_us <= 0)
		return 0;
	uint64_t r = next_random(&s->random);
	if (s->enqueued - s->finished > BACKLOG && r >> 48 & (BACKLOG - 1))
		return 0;
	switch (r % 8) {
	case 0: return 0;
	case 1: return options.delay_us * 4;
	default: return (long)((r >> 8) % (uint64_t)(2 * options.delay_us));
	}
}

static void be_late(Stream *s)
{
	long us = lateness(s);
	if (us > 0) {
		pthread_mutex_unlock(&lock);
		nap_us(us);
		pthread_mutex_lock(&lock);
	}
}

static void wait_record(Stream *s, Record *r)
{
	s->blocked = true;
	pthread_cond_broadcast(&progress);
	while (!r->done && !s->context->failed) {
		demand(r->stream, r->seq);
		pthread_cond_wait(&progress, &lock);
	}
	s->blocked = false;
}

static bool reached(uint32_t now, uint32_t value, unsigned flags)
{
	switch (flags & 3) {
	case 0: return (int32_t)(now - value) >= 0;
	case 1: return now == value;
	case 2: return (now & value) != 0;
	default: return ~(now | value) != 0;
	}
}

// wait_memory waits for a word or another process, which tell nobody when they change.
static void wait_memory(Stream *s, Op *o)
{
	s->blocked = true;
	pthread_cond_broadcast(&progress);
	for (;;) {
		bool is = o->kind == AWAIT
			? reached(__atomic_load_n((uint32_t *)reach(&o->side, o->side.addr), __ATOMIC_ACQUIRE), (uint32_t)o->value, o->flags)
			: shared_done(o->shared, o->value, (int)o->flags);
		if (is || s->context->failed)
			break;
		pthread_mutex_unlock(&lock);
		nap_us(50);
		pthread_mutex_lock(&lock);
	}
	s->blocked = false;
}

static void run(Stream *s, Op *o)
{
	s->busy = o->kind == COPY || o->kind == FILL;
	be_late(s);
	switch (o->kind) {
	case COPY:
	case FILL:
		pthread_mutex_unlock(&lock);
		run_copies(s, o);
		pthread_mutex_lock(&lock);
		break;
	case WAIT:
		wait_record(s, o->record);
		break;
	case AWAIT:
	case AWAIT_SHARED:
		wait_memory(s, o);
		break;
	case FUNCTION:
		pthread_mutex_unlock(&lock);
		in_function = true;
		o->function(o->argument);
		in_function = false;
		pthread_mutex_lock(&lock);
		break;
	case WRITE:
		__atomic_store_n((uint32_t *)reach(&o->side, o->side.addr), (uint32_t)o->value, __ATOMIC_RELEASE);
		break;
	}
	s->busy = false;
}

// settle ends an operation that has run, or was dropped with its context.
static void settle(Stream *s, Op *o)
{
	s->finished = o->seq;
	switch (o->kind) {
	case COPY:
	case FILL:
		release_copies(o);
		break;
	case WRITE:
	case AWAIT:
		unpend(o->side.memory);
		break;
	case RECORD:
		o->record->done = true;
		clock_gettime(CLOCK_MONOTONIC, &o->record->at);
		if (o->record->shared && __atomic_load_n(&o->record->shared->done, __ATOMIC_ACQUIRE) < o->record->shared_seq)
			__atomic_store_n(&o->record->shared->done, o->record->shared_seq, __ATOMIC_RELEASE);
		drop_record(o->record);
		break;
	case WAIT:
		drop_record(o->record);
		break;
	}
	free(o);
	pthread_cond_broadcast(&progress);
}

static void *serve(void *arg)
{
	Stream *s = arg;
	pthread_mutex_lock(&lock);
	for (;;) {
		while (!runnable(s) && !(s->closed && !s->head))
			wait_for_work(s);
		Op *o = s->head;
		if (!o)
			break;
		s->head = o->next;
		if (!s->head)
			s->tail = NULL;
		if (!s->context->failed)
			run(s, o);
		settle(s, o);
	}
	s->over = true;
	for (Stream **p = &serving; *p; p = &(*p)->next)
		if (*p == s) {
			*p = s->next;
			break;
		}
	pthread_cond_broadcast(&progress);
	pthread_mutex_unlock(&lock);
	return NULL;
}

int wait_for(Stream *s, uint64_t seq)
{
	demand(s, seq);
	while (s->finished < seq && !s->context->failed)
		pthread_cond_wait(&progress, &lock);
	return s->context->failed;
}

// wait_idle waits for all streams of a device.
void wait_idle(Context *c)
{
	for (;;) {
		Stream *s = serving;
		while (s && (s->context != c || s->finished == s->enqueued))
			s = s->next;
		if (!s)
			return;
		demand(s, s->enqueued);
		pthread_cond_wait(&progress, &lock);
	}
}

int stream_create(Context *c, uint64_t *out, unsigned flags, int priority)
{
	if (flags > 1)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Stream *s = new_stream(c, !(flags & 1), false, priority);
	if (s) {
		count(LIVE_STREAMS, 1);
		*out = (uint64_t)s;
	}
	pthread_mutex_unlock(&lock);
	return s ? OK : OUT_OF_MEMORY;
}

static bool is_default(uint64_t handle) { return handle <= per_thread_name; }

// close_stream takes the handle away; what is queued still runs (locked).
static void close_stream(Stream *s)
{
	s->magic = ENDED_MAGIC;
	s->closed = true;
	pthread_cond_signal(&s->work);
}

int stream_destroy(Context *c, uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	int e = stream_of(handle, c, &s);
	if (!e && is_default(handle)) {
		violation("a default stream is destroyed");
		e = INVALID_HANDLE;
	}
	if (!e) {
		close_stream(s);
		count(LIVE_STREAMS, -1);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int stream_synchronize(Context *c, uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	int e = stream_of(handle, c, &s);
	if (!e)
		e = wait_for(s, s->enqueued);
	pthread_mutex_unlock(&lock);
	return e;
}

int stream_query(Context *c, uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	int e = stream_of(handle, c, &s);
	if (!e && s->finished < s->enqueued) {
		e = NOT_READY;
		if (++s->queries % PATIENT_QUERIES == 0)
			demand(s, s->enqueued);
	}
	if (s && s->context->failed)
		e = s->context->failed;
	pthread_mutex_unlock(&lock);
	return e;
}

int stream_priority(Context *c, uint64_t handle, int *priority)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	int e = stream_of(handle, c, &s);
	if (!e)
		*priority = s->priority;
	pthread_mutex_unlock(&lock);
	return e;
}

int stream_function(Context *c, uint64_t handle, void (*f)(void *), void *arg)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	int e = stream_of(handle, c, &s);
	if (!e) {
		Op *o = new_op(FUNCTION);
		o->function = f;
		o->argument = arg;
		enqueue(s, o);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

// word queues a write of, or a wait for, 4 bytes.
static int word(Context *c, uint64_t handle, uint64_t addr, uint32_t value, unsigned flags, int kind)
{
	if (addr % 4)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	Side side;
	int e = stream_of(handle, c, &s);
	if (!e)
		e = locate(addr, 4, &side);
	if (!e && !side.memory) {
		violation("a stream writes or reads the pageable word %#lx", addr);
		e = INVALID_VALUE;
	}
	if (!e) {
		Op *o = new_op(kind);
		o->side = side;
		o->value = value;
		o->flags = flags;
		side.memory->pending++;
		enqueue(s, o);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int stream_write32(Context *c, uint64_t handle, uint64_t addr, uint32_t value, unsigned flags)
{
	return flags > 1 ? INVALID_VALUE : word(c, handle, addr, value, flags, WRITE);
}

int stream_await32(Context *c, uint64_t handle, uint64_t addr, uint32_t value, unsigned flags)
{
	return flags > 3 ? INVALID_VALUE : word(c, handle, addr, value, flags, AWAIT);
}

// end_streams closes what a context has of streams, and returns how many its owner has
// forgotten (locked).
int end_streams(Context *c)
{
	int forgotten = 0;
	for (Stream *s = serving; s; s = s->next) {
		if (s->context != c || s->magic != STREAM_MAGIC)
			continue;
		if (!s->hidden) {
			count(LIVE_STREAMS, -1);
			forgotten++;
		}
		close_stream(s);
	}
	c->legacy = NULL;
	return forgotten;
}
