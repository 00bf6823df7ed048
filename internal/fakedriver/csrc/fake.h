// A strict fake of a vendor's driver: what the files of it share.
//
// memory.c  who owns which addresses, and how the fake reaches them; pin.c: host memory
// stream.c  queues and their threads; event.c: points in them
// copy.c    copies: checked when queued, run late
// share.c   memory and events of other processes
// control.c options, injected errors, violations, counts; exports.c: what tests call
// cuda.c, hip.c  the vendors' names and error codes over the rest
//
// One lock guards everything that is not said to be a thread's own. It is never held
// while bytes move or a thread sleeps. Functions that need it say "locked".
#ifndef FAKE_H
#define FAKE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define PRINTF(text, first) __attribute__((format(printf, text, first)))

// Codes that both vendors share, and below them those that one has alone: the other
// says INVALID_VALUE.
enum {
	OK = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	MAP_FAILED_CODE = 205,
	PEER_UNSUPPORTED = 217,
	OPERATING_SYSTEM = 304,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	NOT_READY = 600,
	ILLEGAL_ADDRESS = 700,
	PEER_ALREADY_ENABLED = 704,
	ALREADY_REGISTERED = 712,
	NOT_REGISTERED = 713,
	LAUNCH_FAILED = 719,
	NOT_PERMITTED = 800,
	NOT_SUPPORTED = 801,
	UNKNOWN = 999,

	BAD_PITCH = 12,
	BAD_POINTER = 17,
	BAD_DIRECTION = 21,
};

enum {
	MAX_DEVICES = 16,
	OS_PAGE = 4096,
	MAX_PITCH = 0x7fffffff,
	GRANULARITY = 2 << 20, // of memory that is mapped piece by piece
};

typedef struct Context Context;
typedef struct Memory Memory;
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Record Record;
typedef struct Shared Shared;
typedef struct Chunk Chunk;

// Context is what a process has of one device.
struct Context {
	int device;    // the ordinal
	int retained;  // times retained by callers
	int runtime;   // retained by the runtime library, for good
	int failed;    // not 0: what every call returns from now on
	uint64_t used; // bytes of device memory
	uint32_t peers;
	Stream *legacy;
};

extern Context contexts[MAX_DEVICES];

// Modes: when streams run what they were given.
enum {
	RANDOM = 0, // each operation after a random delay
	EAGER = 1,  // in the call that queues it, unless it must wait
	LAZY = 2,   // when somebody waits for it, has asked repeatedly, or patience ends
};

// Options are set by their names, see control.c.
typedef struct Options {
	int mode;
	int devices;
	int physical[MAX_DEVICES]; // what ordinals stand for; decides UUIDs
	int64_t seed;
	int64_t delay_us;       // of random mode: the middle of the delays
	int64_t patience_ms;    // of lazy mode: after so long a stream moves unasked
	int64_t scribble;       // destinations, before they are copied to
	int64_t protect;        // pages of host memory while a copy owns them
	int64_t pageable;       // copies of pageable memory are no violation
	int64_t checks;         // overlaps inside of batches and boxes
	int64_t free_waits;     // freeing device memory waits for the whole device
	int64_t expire_us;      // a thread's context is void after so long without a call
	int64_t memory;         // bytes of a device
	int64_t register_limit; // bytes of one registration
	int64_t register_code;  // what every registration returns
} Options;

extern Options options;

// Counts are what tests look at. Live things first: those up to LIVE must be 0 at the end.
enum {
	LIVE_DEVICE,
	LIVE_PINNED,
	LIVE_REGISTERED,
	LIVE_OPENED, // memory of other processes
	LIVE_HANDLES,
	LIVE_RESERVED,
	LIVE_MAPPED,
	LIVE_STREAMS,
	LIVE_EVENTS,
	LIVE_CONTEXTS,
	LIVE,
	DEVICE_BYTES = LIVE,
	REGISTERED_BYTES,
	LINEAR_COPIES,
	RECT_COPIES,
	BOX_COPIES,
	BATCHES,
	BATCH_COPIES,
	COPIED_BYTES,
	PAGEABLE_COPIES,
	VIOLATIONS,
	PENDING_ERRORS, // of threads that have not asked for theirs
	COUNTS,
};

extern int64_t *counts;

void count(int which, int64_t by);

extern pthread_mutex_t lock;
extern pthread_cond_t progress; // anything that somebody may wait for has changed

// ---- control.c

// Site is an exported function: its name, and how often it was called.
typedef struct Site {
	const char *name;
	uint64_t calls;
	bool listed;
	struct Site *next;
} Site;

// What a call needs. ENDING is BOUND, and works on a failed context too: what it ends is
// gone, and the code is returned.
enum { ANYTIME, INITIALIZED, BOUND, ENDING };

// enter is the start of every exported call: it counts, injects errors, and finds the
// context of the thread when it needs one. 0, or what the call must return.
int enter(Site *s, int need);

extern __thread Context *here;    // of the call, after enter
extern __thread const char *call; // its name
extern __thread bool in_function; // this thread runs a host function

// vendor_context finds the context of this thread: cuda.c, hip.c. *stale: it was
// bound before the last expiry.
int vendor_context(Context **c, bool *stale);
extern bool initialized;
extern const char vendor_name[4];
extern const bool handles_keep_offsets; // of interior addresses

// Binding is what a thread has bound, and when.
typedef struct Binding {
	Context *context;
	uint64_t generation;
	struct timespec used;
} Binding;

bool set_option(const char *name, const char *value);
void bind_thread(Binding *b, Context *c);
bool binding_stale(Binding *b);

#define ENTER(need)                                   \
	do {                                          \
		static Site site_ = {.name = __func__}; \
		int e_ = enter(&site_, need);         \
		if (e_)                               \
			return RESULT(e_);            \
	} while (0)

// ended is what a call returns that has ended something.
int ended(int e);

// WANT refuses a pointer that the call can't use: none, or one to Go memory.
#define WANT(p)                                             \
	do {                                                \
		if (!usable((const void *)(p)))             \
			return RESULT(INVALID_VALUE);       \
	} while (0)

bool usable(const void *p);
bool go_memory(uint64_t addr, uint64_t bytes);

void violation(const char *format, ...) PRINTF(1, 2);

uint64_t next_random(uint64_t *state);
bool attribute_override(int attribute, int *value);
void device_uuid(int device, unsigned char uuid[16]);
void nap_us(long us);

// fail makes a context return code from now on (locked).
void fail(Context *c, int code);

// end_context frees what a context still has, which is a violation unless it has
// failed (locked).
void end_context(Context *c);

// ---- memory.c

enum { DEVICE = 1, PINNED, REGISTERED, OPENED, RESERVED };

struct Memory {
	int kind;
	uint64_t base, size; // what the caller may use, to the byte
	size_t mapped;       // size in OS pages
	char *alias;         // where the fake works; NULL: at base itself
	int fd;
	uint64_t id, inode;
	Context *context;
	long pending;        // operations that are queued
	bool dropped;        // the caller has no more use of it
	int refs;            // times opened
	unsigned char key[64];
	uint16_t *writers, *readers; // by OS page, when pages are protected
	Chunk *chunks;       // of a reservation
};

// Side is one end of a copy.
typedef struct Side {
	Memory *memory; // NULL: pageable host memory
	uint64_t addr;
} Side;

Memory *find_memory(uint64_t addr);  // locked
bool is_host(const Memory *m);       // NULL is pageable
bool mapped(uint64_t addr, uint64_t bytes);

// locate finds what [addr, addr+bytes) is, and refuses what no copy can use (locked).
int locate(uint64_t addr, uint64_t bytes, Side *s);

Memory *new_memory(int kind, Context *c, uint64_t size); // locked; DEVICE or PINNED
Memory *open_memory(Context *c, int fd, uint64_t size);  // locked; OPENED, takes fd
Memory *reserve_memory(uint64_t size);                   // locked; RESERVED
Memory *nth_memory(size_t i);                            // locked; NULL after the last
Memory *last_memory(uint64_t addr);                      // locked; that begins at addr or before
int unknown_address(uint64_t addr);                      // locked; notes why it can't be freed
size_t round_up(size_t n, size_t to);
void insert_memory(Memory *m);                           // locked
void drop_memory(Memory *m);                             // locked
bool in_use(Memory *m);                                  // locked
void unpend(Memory *m);                                  // locked; one less is pending
void own_pages(const Side *s, uint64_t bytes, bool writes, int by); // locked
char *reach(const Side *s, uint64_t addr);
bool read_at(const Side *s, uint64_t addr, void *buf, size_t n);
bool write_at(const Side *d, uint64_t addr, const void *buf, size_t n);
bool move(const Side *d, uint64_t dst, const Side *s, uint64_t src, size_t n);
bool fill(const Side *d, uint64_t dst, int byte, size_t n);

int allocate(Context *c, uint64_t *out, uint64_t size);
int allocate_host(Context *c, uint64_t *out, uint64_t size);
int free_device(Context *c, uint64_t addr);
int free_host(uint64_t addr);
int register_host(Context *c, uint64_t addr, uint64_t size);
int unregister_host(uint64_t addr);
int end_memory(Context *c); // locked
int address_range(uint64_t addr, uint64_t *base, uint64_t *size, int unknown);

// ---- stream.c

struct Record {
	int refs;
	bool done;
	int queries;
	struct timespec at;
	Stream *stream;
	uint64_t seq;
	Shared *shared;
	uint64_t shared_seq;
};

struct Stream {
	uint32_t magic;
	int number;
	Context *context;
	bool blocking; // waits for the legacy stream, and it for this one
	int priority;
	pthread_cond_t work;
	struct Op *head, *tail;
	uint64_t enqueued, finished, demand;
	int queries;
	int holds;
	bool hidden; // a default stream
	bool closed, busy, blocked, over;
	uint64_t random;
	uint64_t fail_in; // the copy that fails, counted from the next
	int fail_code;
	Stream *next;
};

struct Event {
	uint32_t magic;
	unsigned flags;
	Context *context;
	Record *latest;
	Shared *shared;
	int fd, from; // of another process's event
};

enum { EVENT_BLOCKING = 1, EVENT_NO_TIMING = 2, EVENT_SHARED = 4 };

enum { COPY, FILL, RECORD, WAIT, FUNCTION, WRITE, AWAIT, AWAIT_SHARED };

// Copy is slices × rows rows of width bytes.
typedef struct Copy {
	Side dst, src;
	size_t width, rows, slices;
	size_t dst_pitch, src_pitch, dst_slice, src_slice;
	char *snapshot; // of the source, when it was read early
} Copy;

typedef struct Op {
	struct Op *next;
	int kind;
	uint64_t seq;
	struct timespec queued;
	Copy *copies; // COPY
	size_t count;
	Record *record; // RECORD, WAIT
	void (*function)(void *);
	void *argument;
	Side side;      // FILL, WRITE, AWAIT
	uint64_t bytes, value;
	unsigned flags;
	Shared *shared; // AWAIT_SHARED
	Context *context; // of the memory that a copy moves
} Op;

// stream_of checks a handle that is to be used in context c, and knows the default
// streams (locked).
int stream_of(uint64_t handle, Context *c, Stream **s);
bool is_handle(uint64_t p);
void enqueue(Stream *s, Op *o); // locked
long lateness(Stream *s);       // locked; microseconds
int wait_for(Stream *s, uint64_t seq);        // locked; the context's failure
void wait_idle(Context *c);                   // locked
void run_copies(Stream *s, Op *o);            // not locked
void release_copies(Op *o);                   // locked

int stream_create(Context *c, uint64_t *out, unsigned flags, int priority);
int stream_destroy(Context *c, uint64_t handle);
int stream_synchronize(Context *c, uint64_t handle);
int stream_query(Context *c, uint64_t handle);
int stream_wait_event(Context *c, uint64_t stream, uint64_t event, unsigned flags);
int stream_function(Context *c, uint64_t handle, void (*f)(void *), void *arg);
int stream_write32(Context *c, uint64_t handle, uint64_t addr, uint32_t value, unsigned flags);
int stream_await32(Context *c, uint64_t handle, uint64_t addr, uint32_t value, unsigned flags);
int stream_priority(Context *c, uint64_t handle, int *priority);

Event *new_event(Context *c, unsigned flags); // locked
int event_of(uint64_t handle, Event **e);     // locked
int event_create(Context *c, uint64_t *out, unsigned flags);
int event_destroy(uint64_t handle);
int event_record(Context *c, uint64_t event, uint64_t stream);
int event_query(uint64_t handle);
int event_synchronize(uint64_t handle);
int event_elapsed(float *ms, uint64_t from, uint64_t to);

Stream *first_stream(void);     // locked
int end_streams(Context *c);    // locked
int end_events(Context *c);     // locked
bool is_stream(uint64_t p);
bool in_table(uint64_t handle, const void *table, size_t used, size_t of);
void *make_table(size_t n, size_t of);
void demand(Stream *s, uint64_t seq); // locked; makes it run up to seq
Op *new_op(int kind);
Record *new_record(Stream *s, int refs);
void drop_record(Record *r); // locked

enum { PATIENT_QUERIES = 3 }; // lazy streams move when they were asked so often

// ---- copy.c

// Shape is one copy as a caller asks for it.
typedef struct Shape {
	uint64_t dst, src;
	size_t width, rows, slices;
	size_t dst_pitch, src_pitch, dst_slice, src_slice;
} Shape;

enum { ORDER_STREAM = 1, ORDER_CALL = 2, ORDER_ANY = 3 };

typedef struct Attributes {
	uint32_t order;
	struct { uint32_t type; int32_t id; } src, dst;
	uint32_t flags;
} Attributes;

int copy_linear(Context *c, uint64_t stream, uint64_t dst, uint64_t src, size_t n);
int copy_shape(Context *c, uint64_t stream, const Shape *s, bool peers);
int fill_async(Context *c, uint64_t stream, uint64_t dst, int byte, size_t n);

typedef struct Batch {
	const uint64_t *dsts, *srcs;
	const size_t *sizes;
	size_t count;
	const Attributes *attrs;
	const size_t *index;
	size_t attributes;
	size_t *failed;
	bool no_attributes; // all in stream order
	bool partial;       // what comes before a bad copy is queued
} Batch;

int copy_batch(Context *c, uint64_t stream, const Batch *b);

// ---- share.c

struct Shared {
	uint32_t magic;
	uint32_t pad;
	uint64_t recorded, done;
};

typedef struct Handle {
	unsigned char b[64];
} Handle;

int ipc_export(Handle *h, uint64_t addr);
int ipc_open(Context *c, uint64_t *out, Handle h, unsigned flags, bool again, int bad);
int ipc_close(Context *c, uint64_t addr, int bad);
int ipc_export_event(Handle *h, uint64_t event);
int ipc_open_event(Context *c, uint64_t *out, Handle h, int bad);
bool shared_done(Shared *s, uint64_t seq, int from);
Shared *new_shared(int *fd);

struct Chunk {
	uint64_t base, size;
	struct Physical *of;
	bool access;
	Chunk *next;
};

typedef struct AllocationProp {
	uint32_t type, handle_types;
	struct { uint32_t type; int32_t id; } location;
	void *win32;
	uint64_t flags;
} AllocationProp;

typedef struct AccessDesc {
	struct { uint32_t type; int32_t id; } location;
	uint32_t flags;
} AccessDesc;

int vmm_granularity(size_t *out, const AllocationProp *p, int option);
int vmm_create(uint64_t *out, size_t size, const AllocationProp *p, uint64_t flags);
int vmm_release(uint64_t handle);
int vmm_export(void *out, uint64_t handle, int type, uint64_t flags);
int vmm_import(uint64_t *out, void *os, int type);
int vmm_reserve(uint64_t *out, size_t size, size_t align, uint64_t addr, uint64_t flags);
int vmm_unreserve(uint64_t addr, size_t size);
int vmm_map(uint64_t addr, size_t size, size_t offset, uint64_t handle, uint64_t flags);
int vmm_unmap(uint64_t addr, size_t size);
int vmm_access(uint64_t addr, size_t size, const AccessDesc *d, size_t n);
int vmm_retain(uint64_t *out, uint64_t addr);
bool chunks_cover(Memory *m, uint64_t addr, uint64_t bytes); // locked
Chunk *chunk_at(Memory *m, uint64_t addr);                   // locked

#endif
