/* Stands in for Mooncake's library where it must fail on demand, which the real one does
   when it likes. It ends the process at everything that the real one forbids: more
   requests in flight than it takes, a batch that is used after it was given back, a slice
   that is too long, a task that is not there.

   What a request does is said by the upper half of its remote address; the lower half
   lies in a memory of its own that answers with the low byte of each address. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GOOD, FAILS_ONCE, FAILS, TIMES_OUT_FIRST, NEVER_ENDS, REFUSED, HALF_REFUSED, RELEASE };
enum { MOST = 1024, WAITING = 0, COMPLETED = 4, TIMEOUT = 5, FAILED = 6 };

struct request { int op; void *source; int32_t target; uint64_t offset, length; };
struct status { int status; uint64_t bytes; };
struct batch { uint64_t magic; size_t most, n; struct request r[256]; int polls[256], seen[256]; };

const char *settings = "MC_TCP_PROGRESS_TIMEOUT_SEC";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int in_flight, released;
static uint64_t failed_once[64];
int most_in_flight, batches; /* for the test to read */

static void must(int good, const char *what) {
	if (!good) {
		fprintf(stderr, "strict: %s\n", what);
		abort();
	}
}

void *createTransferEngine(const char *metadata, const char *name, const char *host, uint64_t port, int discover) {
	must(!strcmp(metadata, "P2PHANDSHAKE") && *name && *host && !port && !discover, "createTransferEngine");
	return &lock;
}
void destroyTransferEngine(void *e) { must(e == &lock && !in_flight && !batches, "destroyed with batches left"); }
int getLocalIpAndPort(void *e, char *to, size_t n) { return snprintf(to, n, "127.0.0.1:15000") < 0 || !e; }
void *installTransport(void *e, const char *protocol, void **args) { return !args && !strcmp(protocol, "tcp") ? e : 0; }
int32_t openSegmentNoCache(void *e, const char *name) { return e && *name ? 5 : -1; }
uint64_t allocateBatchID(void *e, size_t n) {
	must(e == &lock && n >= 1 && n <= 256, "size of a batch");
	struct batch *b = calloc(1, sizeof *b);
	b->magic = 0xba7c4, b->most = n;
	pthread_mutex_lock(&lock);
	batches++;
	pthread_mutex_unlock(&lock);
	return (uint64_t)b;
}
static struct batch *batch(uint64_t id) {
	struct batch *b = (struct batch *)id;
	must(b && b->magic == 0xba7c4, "no batch");
	return b;
}
int submitTransfer(void *e, uint64_t id, struct request *r, size_t n) {
	struct batch *b = batch(id);
	must(e == &lock && b->n + n <= b->most, "batch is full");
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < n; i++) {
		int does = r[i].offset >> 32;
		must(r[i].op == 0 && r[i].target == 5 && r[i].source && r[i].length >= 1 && r[i].length <= 1 << 20, "request");
		if (does == REFUSED || does == HALF_REFUSED) {
			pthread_mutex_unlock(&lock);
			return 8;
		}
		b->r[b->n++] = r[i];
		if (++in_flight > most_in_flight)
			most_in_flight = in_flight;
		must(in_flight <= MOST, "too many in flight");
	}
	pthread_mutex_unlock(&lock);
	return 0;
}
static int outcome(struct request *r, int polls) {
	switch (r->offset >> 32) {
	case FAILS:
		return FAILED;
	case FAILS_ONCE:
		for (int i = 0; i < 64; i++) {
			if (failed_once[i] == r->offset)
				break;
			if (!failed_once[i]) {
				failed_once[i] = r->offset;
				return FAILED;
			}
		}
		return COMPLETED;
	case TIMES_OUT_FIRST:
		return polls < 3 ? TIMEOUT : COMPLETED;
	case NEVER_ENDS:
		return released ? COMPLETED : WAITING;
	case RELEASE:
		released = 1;
	}
	return COMPLETED;
}
int getTransferStatus(void *e, uint64_t id, size_t task, struct status *s) {
	struct batch *b = batch(id);
	must(e == &lock, "engine");
	if (task >= b->n)
		return 1;
	must(!b->seen[task], "a task is polled that was seen to end");
	pthread_mutex_lock(&lock);
	s->status = outcome(&b->r[task], b->polls[task]++);
	if (s->status == COMPLETED)
		for (uint64_t i = 0; i < b->r[task].length; i++)
			((uint8_t *)b->r[task].source)[i] = b->r[task].offset + i;
	if (s->status == COMPLETED || s->status == FAILED)
		b->seen[task] = 1, in_flight--;
	pthread_mutex_unlock(&lock);
	return 0;
}
int freeBatchID(void *e, uint64_t id) {
	struct batch *b = batch(id);
	must(e == &lock, "engine");
	for (size_t i = 0; i < b->n; i++)
		if (!b->seen[i])
			return 4;
	b->magic = 0;
	free(b);
	pthread_mutex_lock(&lock);
	batches--;
	pthread_mutex_unlock(&lock);
	return 0;
}

#define UNUSED(name) int name(void) { must(0, #name); return 0; }
UNUSED(uninstallTransport) UNUSED(openSegment) UNUSED(closeSegment) UNUSED(removeLocalSegment) UNUSED(syncSegmentCache)
UNUSED(registerLocalMemory) UNUSED(unregisterLocalMemory) UNUSED(registerLocalMemoryBatch) UNUSED(unregisterLocalMemoryBatch)
