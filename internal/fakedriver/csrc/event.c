// Events: points in the queues of streams. Each recording is an object of its own, so that
// who waits for one is not confused by the next.
#include "fake.h"

#include <stdlib.h>
#include <unistd.h>

enum {
	EVENT_MAGIC = 0x45564e54,
	ENDED_MAGIC = 0x454e4445,
	MAX_EVENTS = 1 << 20,
};

static Event *events; // a table as that of streams
static size_t event_slots;

bool is_handle(uint64_t p) { return is_stream(p) || in_table(p, events, event_slots, sizeof *events); }

Event *new_event(Context *c, unsigned flags)
{
	if (!events && !(events = make_table(MAX_EVENTS, sizeof *events)))
		return NULL;
	if (event_slots == MAX_EVENTS)
		return NULL;
	Event *e = &events[event_slots++];
	e->magic = EVENT_MAGIC;
	e->flags = flags;
	e->context = c;
	e->fd = -1;
	count(LIVE_EVENTS, 1);
	return e;
}

int event_of(uint64_t handle, Event **e)
{
	if (!in_table(handle, events, event_slots, sizeof *events)) {
		violation("%#lx is not an event", handle);
		return INVALID_HANDLE;
	}
	*e = (Event *)handle;
	if ((*e)->magic != EVENT_MAGIC) {
		violation("event %#lx was destroyed", handle);
		return INVALID_HANDLE;
	}
	return OK;
}

int event_create(Context *c, uint64_t *out, unsigned flags)
{
	if (flags > 7 || ((flags & EVENT_SHARED) && !(flags & EVENT_NO_TIMING)))
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Event *e = new_event(c, flags);
	if (e && (flags & EVENT_SHARED))
		e->shared = new_shared(&e->fd);
	if (e)
		*out = (uint64_t)e;
	pthread_mutex_unlock(&lock);
	return e ? OK : OUT_OF_MEMORY;
}

static void end_event(Event *e)
{
	e->magic = ENDED_MAGIC;
	drop_record(e->latest);
	e->latest = NULL;
	if (e->fd >= 0)
		close(e->fd); // what is queued keeps the mapping
	count(LIVE_EVENTS, -1);
}

int event_destroy(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Event *e = NULL;
	int code = event_of(handle, &e);
	if (!code)
		end_event(e);
	pthread_mutex_unlock(&lock);
	return code;
}

int event_record(Context *c, uint64_t event, uint64_t stream)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	Event *e = NULL;
	int code = event_of(event, &e);
	if (!code)
		code = stream_of(stream, c, &s);
	if (!code && e->context != s->context) {
		violation("an event of device %d is recorded on a stream of device %d", e->context->device, s->context->device);
		code = INVALID_HANDLE;
	}
	if (!code) {
		Record *r = new_record(s, 2);
		drop_record(e->latest);
		e->latest = r;
		if (e->shared) {
			r->shared = e->shared;
			r->shared_seq = __atomic_add_fetch(&e->shared->recorded, 1, __ATOMIC_ACQ_REL);
		}
		Op *o = new_op(RECORD);
		o->record = r;
		r->seq = s->enqueued + 1;
		enqueue(s, o);
	}
	pthread_mutex_unlock(&lock);
	return code;
}

// event_done reports whether the latest recording has run (locked).
static bool event_done(const Event *e)
{
	if (e->shared)
		return shared_done(e->shared, __atomic_load_n(&e->shared->recorded, __ATOMIC_ACQUIRE), e->from);
	return !e->latest || e->latest->done;
}

int event_query(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Event *e = NULL;
	int code = event_of(handle, &e);
	if (!code && !event_done(e)) {
		code = NOT_READY;
		if (e->latest && ++e->latest->queries % PATIENT_QUERIES == 0)
			demand(e->latest->stream, e->latest->seq);
	}
	if (e && e->latest && e->latest->stream->context->failed)
		code = e->latest->stream->context->failed;
	pthread_mutex_unlock(&lock);
	return code;
}

int event_synchronize(uint64_t handle)
{
	pthread_mutex_lock(&lock);
	Event *e = NULL;
	int code = event_of(handle, &e);
	if (!code && e->shared) {
		uint64_t seq = __atomic_load_n(&e->shared->recorded, __ATOMIC_ACQUIRE);
		if (e->latest)
			demand(e->latest->stream, e->latest->seq);
		while (!shared_done(e->shared, seq, e->from) && !e->context->failed) {
			pthread_mutex_unlock(&lock);
			nap_us(50);
			pthread_mutex_lock(&lock);
		}
		code = e->context->failed;
	} else if (!code && e->latest) {
		Record *r = e->latest;
		Context *c = r->stream->context;
		r->refs++;
		demand(r->stream, r->seq);
		while (!r->done && !c->failed)
			pthread_cond_wait(&progress, &lock);
		drop_record(r);
		code = c->failed;
	}
	pthread_mutex_unlock(&lock);
	return code;
}

int event_elapsed(float *ms, uint64_t from, uint64_t to)
{
	pthread_mutex_lock(&lock);
	Event *a, *b;
	int code = event_of(from, &a);
	if (!code)
		code = event_of(to, &b);
	if (!code && ((a->flags | b->flags) & EVENT_NO_TIMING || !a->latest || !b->latest))
		code = INVALID_HANDLE;
	if (!code && (!a->latest->done || !b->latest->done))
		code = NOT_READY;
	if (!code)
		*ms = (float)(b->latest->at.tv_sec - a->latest->at.tv_sec) * 1e3f + (float)(b->latest->at.tv_nsec - a->latest->at.tv_nsec) * 1e-6f;
	pthread_mutex_unlock(&lock);
	return code;
}

int stream_wait_event(Context *c, uint64_t stream, uint64_t event, unsigned flags)
{
	if (flags > 1)
		return INVALID_VALUE;
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	Event *e = NULL;
	int code = stream_of(stream, c, &s);
	if (!code)
		code = event_of(event, &e);
	if (!code && e->shared) {
		Op *o = new_op(AWAIT_SHARED);
		o->shared = e->shared;
		o->value = __atomic_load_n(&e->shared->recorded, __ATOMIC_ACQUIRE);
		o->flags = (unsigned)e->from;
		enqueue(s, o);
	} else if (!code && e->latest && !e->latest->done) {
		Op *o = new_op(WAIT);
		o->record = e->latest;
		o->record->refs++;
		enqueue(s, o);
	}
	pthread_mutex_unlock(&lock);
	return code;
}

// end_events ends the events of a context, and returns how many there were (locked).
int end_events(Context *c)
{
	int forgotten = 0;
	for (size_t i = 0; i < event_slots; i++)
		if (events[i].context == c && events[i].magic == EVENT_MAGIC) {
			end_event(&events[i]);
			forgotten++;
		}
	return forgotten;
}
