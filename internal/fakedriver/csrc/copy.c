// Copies. What a call asks for is checked at once, as the real driver does and more;
// what it means is done by the stream's thread: the destination is scribbled over, and
// then the rows, and the copies of a batch, come in an order that nobody can rely on.
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { SCRIBBLE = 0xDB };

static size_t rows_of(const Copy *c) { return c->rows * c->slices; }

// extent returns how many bytes lie between the first and the end of the last one of a
// side. false: more than an address can tell.
static bool extent(size_t width, size_t rows, size_t pitch, size_t slices, size_t slice, uint64_t addr, uint64_t *bytes)
{
	uint64_t a, b, n, end;
	if (__builtin_mul_overflow(rows - 1, pitch, &a) || __builtin_mul_overflow(slices - 1, slice, &b) ||
	    __builtin_add_overflow(a, b, &n) || __builtin_add_overflow(n, width, &n) || __builtin_add_overflow(addr, n, &end))
		return false;
	*bytes = n;
	return true;
}

typedef struct Range {
	uint64_t from, to;
} Range;

static int by_start(const void *a, const void *b)
{
	const Range *x = a, *y = b;
	return x->from < y->from ? -1 : x->from > y->from;
}

// sorted sorts ranges, unless they are.
static void sorted(Range *r, size_t n)
{
	for (size_t i = 1; i < n; i++)
		if (r[i].from < r[i - 1].from) {
			qsort(r, n, sizeof *r, by_start);
			return;
		}
}

// joined makes one of sorted ranges that overlap, and returns how many are left.
static size_t joined(Range *r, size_t n)
{
	size_t k = 0;
	for (size_t i = 1; i < n; i++)
		if (r[i].from >= r[k].to)
			r[++k] = r[i];
		else if (r[i].to > r[k].to)
			r[k].to = r[i].to;
	return n ? k + 1 : 0;
}

// meet reports whether one of a overlaps one of b, both sorted and joined.
static bool meet(const Range *a, size_t n, const Range *b, size_t m)
{
	for (size_t i = 0, j = 0; i < n && j < m;) {
		if (a[i].from < b[j].to && b[j].from < a[i].to)
			return true;
		if (a[i].to < b[j].to)
			i++;
		else
			j++;
	}
	return false;
}

static Range *rows_as_ranges(uint64_t addr, const Shape *s, size_t pitch, size_t slice)
{
	Range *r = malloc(s->rows * s->slices * sizeof *r);
	for (size_t i = 0, n = 0; i < s->slices; i++)
		for (size_t j = 0; j < s->rows; j++, n++) {
			r[n].from = addr + i * slice + j * pitch;
			r[n].to = r[n].from + s->width;
		}
	sorted(r, s->rows * s->slices);
	return r;
}

static void check_overlap(const Shape *s, uint64_t dst_bytes, uint64_t src_bytes)
{
	if (s->dst >= s->src + src_bytes || s->src >= s->dst + dst_bytes)
		return;
	size_t n = s->rows * s->slices;
	Range *d = rows_as_ranges(s->dst, s, s->dst_pitch, s->dst_slice), *r = rows_as_ranges(s->src, s, s->src_pitch, s->src_slice);
	if (meet(d, joined(d, n), r, joined(r, n)))
		violation("source [%#lx, +%#lx) and destination [%#lx, +%#lx) overlap", s->src, src_bytes, s->dst, dst_bytes);
	free(d);
	free(r);
}

// check_devices wants a copy to be of the device that makes it.
static void check_devices(Context *c, const Copy *o, bool peers)
{
	const Memory *d = o->dst.memory, *s = o->src.memory;
	const Context *dc = is_host(d) ? NULL : d->context, *sc = is_host(s) ? NULL : s->context;
	if ((dc || sc) && dc != c && sc != c)
		violation("a stream of device %d copies memory of device %d", c->device, (dc ? dc : sc)->device);
	const Context *other = dc && dc != c ? dc : sc;
	if (dc && sc && dc != sc && !peers && !(c->peers & 1u << other->device))
		violation("slow path: devices %d and %d have no peer access", dc->device, sc->device);
}

// own_rows does what own_pages does for every row of both sides.
static void own_rows(const Copy *o, int by)
{
	for (int w = 0; w < 2; w++) {
		const Side *s = w ? &o->dst : &o->src;
		if (!s->memory || !s->memory->writers || (!w && o->snapshot))
			continue;
		size_t pitch = w ? o->dst_pitch : o->src_pitch, slice = w ? o->dst_slice : o->src_slice;
		for (size_t i = 0; i < o->slices; i++)
			for (size_t j = 0; j < o->rows; j++) {
				Side row = {s->memory, s->addr + i * slice + j * pitch};
				own_pages(&row, o->width, w, by);
			}
	}
}

static bool take_snapshot(Copy *o)
{
	o->snapshot = malloc(o->width * rows_of(o));
	char *to = o->snapshot;
	for (size_t i = 0; i < o->slices; i++)
		for (size_t j = 0; j < o->rows; j++, to += o->width)
			if (!read_at(&o->src, o->src.addr + i * o->src_slice + j * o->src_pitch, to, o->width))
				return false;
	return true;
}

// prepare makes an operation of what a call asks for. *blocks: the call can't return
// before it has run (locked).
static int prepare(Stream *s, const Shape *want, int order, bool peers, Copy *o, bool *blocks)
{
	uint64_t dst_bytes, src_bytes;
	if (!extent(want->width, want->rows, want->dst_pitch, want->slices, want->dst_slice, want->dst, &dst_bytes) ||
	    !extent(want->width, want->rows, want->src_pitch, want->slices, want->src_slice, want->src, &src_bytes)) {
		violation("a copy is larger than memory");
		return INVALID_VALUE;
	}
	*o = (Copy){
		.width = want->width, .rows = want->rows, .slices = want->slices,
		.dst_pitch = want->dst_pitch, .src_pitch = want->src_pitch,
		.dst_slice = want->dst_slice, .src_slice = want->src_slice,
	};
	int e = locate(want->dst, dst_bytes, &o->dst);
	if (!e)
		e = locate(want->src, src_bytes, &o->src);
	if (e)
		return e;
	if (options.checks)
		check_overlap(want, dst_bytes, src_bytes);
	check_devices(s->context, o, peers);
	if (!o->dst.memory || !o->src.memory) {
		count(PAGEABLE_COPIES, 1);
		if (!options.pageable)
			violation("slow path: pageable memory at %#lx", o->src.memory ? want->dst : want->src);
		*blocks |= !o->dst.memory;
	}
	if (!o->src.memory || order == ORDER_CALL || (order == ORDER_ANY && next_random(&s->random) % 2))
		if (!take_snapshot(o)) {
			free(o->snapshot);
			o->snapshot = NULL;
			violation("source %#lx can't be read", want->src);
			return INVALID_VALUE;
		}
	for (int w = 0; w < 2; w++) {
		Memory *m = w ? o->dst.memory : o->src.memory;
		if (m)
			m->pending++;
	}
	own_rows(o, 1);
	return OK;
}

static void unprepare(Copy *o)
{
	own_rows(o, -1);
	unpend(o->dst.memory);
	unpend(o->src.memory);
	free(o->snapshot);
}

void release_copies(Op *o)
{
	for (size_t i = 0; i < o->count; i++)
		unprepare(&o->copies[i]);
	free(o->copies);
	if (o->kind == FILL)
		unpend(o->side.memory);
}

static size_t gcd(size_t a, size_t b) { return b ? gcd(b, a % b) : a; }

// Shuffle is an order of n things: start, start+step, … modulo n.
typedef struct Shuffle {
	size_t n, at, step;
} Shuffle;

static Shuffle shuffle(uint64_t *random, size_t n)
{
	Shuffle s = {n, next_random(random) % n, 1};
	if (n > 1) {
		s.step = next_random(random) % n;
		while (gcd(s.step, n) != 1)
			s.step = (s.step + 1) % n;
	}
	return s;
}

static size_t next_of(Shuffle *s)
{
	size_t i = s->at;
	s->at = (s->at + s->step) % s->n;
	return i;
}

// do_row copies row i, or scribbles over where it will go.
static bool do_row(Copy *o, size_t i, bool scribble)
{
	uint64_t dst = o->dst.addr + i / o->rows * o->dst_slice + i % o->rows * o->dst_pitch;
	if (scribble)
		return fill(&o->dst, dst, SCRIBBLE, o->width);
	if (o->snapshot)
		return write_at(&o->dst, dst, o->snapshot + i * o->width, o->width);
	return move(&o->dst, dst, &o->src, o->src.addr + i / o->rows * o->src_slice + i % o->rows * o->src_pitch, o->width);
}

static void gone(Stream *s, uint64_t addr)
{
	pthread_mutex_lock(&lock);
	violation("host memory of a queued copy is gone, at %#lx", addr);
	fail(s->context, ILLEGAL_ADDRESS);
	pthread_mutex_unlock(&lock);
}

// armed reports whether this copy of a stream is the one that fails (locked).
static bool armed(Stream *s) { return s->fail_in && --s->fail_in == 0; }

void run_copies(Stream *s, Op *o)
{
	if (o->kind == FILL) {
		if (!fill(&o->side, o->side.addr, (int)o->value, o->bytes))
			gone(s, o->side.addr);
		return;
	}
	pthread_mutex_lock(&lock);
	bool fails = armed(s);
	long late = lateness(s);
	pthread_mutex_unlock(&lock);
	if (options.scribble)
		for (size_t i = 0; i < o->count; i++)
			for (size_t r = 0; r < rows_of(&o->copies[i]); r++)
				if (!do_row(&o->copies[i], r, true)) {
					gone(s, o->copies[i].dst.addr);
					return;
				}
	nap_us(late / 2); // others see the destination scribbled over
	Shuffle entries = shuffle(&s->random, o->count);
	size_t count_now = fails ? o->count / 2 : o->count;
	for (size_t i = 0; i < count_now; i++) {
		Copy *c = &o->copies[next_of(&entries)];
		size_t n = rows_of(c);
		for (Shuffle rows = shuffle(&s->random, n); n > 0; n--)
			if (!do_row(c, next_of(&rows), false)) {
				gone(s, c->dst.addr);
				return;
			}
		count(COPIED_BYTES, (int64_t)(c->width * rows_of(c)));
	}
	if (fails) {
		pthread_mutex_lock(&lock);
		fail(s->context, s->fail_code);
		pthread_mutex_unlock(&lock);
	}
}

// submit queues copies that prepare has made (locked).
static int submit(Stream *s, Copy *copies, size_t n, bool blocks)
{
	Op *o = new_op(COPY);
	o->copies = copies;
	o->count = n;
	enqueue(s, o);
	return blocks ? wait_for(s, s->enqueued) : OK;
}

int copy_shape(Context *c, uint64_t stream, const Shape *want, bool peers)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	bool blocks = false;
	int e = stream_of(stream, c, &s);
	if (!e && want->width && want->rows && want->slices) {
		Copy *o = malloc(sizeof *o);
		e = prepare(s, want, ORDER_STREAM, peers, o, &blocks);
		if (e) {
			free(o);
		} else {
			count(want->slices > 1 ? BOX_COPIES : want->rows > 1 ? RECT_COPIES : LINEAR_COPIES, 1);
			e = submit(s, o, 1, blocks);
		}
	}
	pthread_mutex_unlock(&lock);
	return e;
}

int copy_linear(Context *c, uint64_t stream, uint64_t dst, uint64_t src, size_t n)
{
	Shape s = {.dst = dst, .src = src, .width = n, .rows = 1, .slices = 1};
	return copy_shape(c, stream, &s, false);
}

int fill_async(Context *c, uint64_t stream, uint64_t dst, int byte, size_t n)
{
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	Side side;
	int e = stream_of(stream, c, &s);
	if (!e && n)
		e = locate(dst, n, &side);
	if (!e && n && !side.memory) {
		violation("pageable memory %#lx is set by a stream", dst);
		e = INVALID_VALUE;
	}
	if (!e && n) {
		Op *o = new_op(FILL);
		o->side = side;
		o->value = (uint64_t)byte & 0xff;
		o->bytes = n;
		side.memory->pending++;
		enqueue(s, o);
	}
	pthread_mutex_unlock(&lock);
	return e;
}

static int check_attributes(const Batch *b)
{
	if (b->no_attributes)
		return OK;
	if (!b->attrs || !b->index || !b->attributes || b->attributes > b->count || b->index[0])
		return INVALID_VALUE;
	for (size_t k = 0; k < b->attributes; k++) {
		if ((k && b->index[k] <= b->index[k - 1]) || b->index[k] >= b->count)
			return INVALID_VALUE;
		const Attributes *a = &b->attrs[k];
		if (a->order < ORDER_STREAM || a->order > ORDER_ANY || a->flags > 1 || a->src.type > 4 || a->dst.type > 4)
			return INVALID_VALUE;
	}
	return OK;
}

// check_batch finds copies whose result depends on their order.
static void check_batch(const Batch *b)
{
	Range *d = malloc(b->count * sizeof *d), *s = malloc(b->count * sizeof *s);
	for (size_t i = 0; i < b->count; i++) {
		d[i] = (Range){b->dsts[i], b->dsts[i] + b->sizes[i]};
		s[i] = (Range){b->srcs[i], b->srcs[i] + b->sizes[i]};
	}
	sorted(d, b->count);
	sorted(s, b->count);
	for (size_t i = 1; i < b->count; i++)
		if (d[i].from < d[i - 1].to) {
			violation("destinations of a batch overlap");
			break;
		}
	if (meet(d, joined(d, b->count), s, joined(s, b->count)))
		violation("copies of a batch depend on each other");
	free(d);
	free(s);
}

int copy_batch(Context *c, uint64_t stream, const Batch *b)
{
	if (stream <= 1) {
		violation("a batch on the legacy stream");
		return INVALID_VALUE;
	}
	if (!b->count)
		return INVALID_VALUE;
	int e = check_attributes(b);
	if (e) {
		violation("a batch with bad attributes");
		return e;
	}
	if (options.checks)
		check_batch(b);
	pthread_mutex_lock(&lock);
	Stream *s = NULL;
	e = stream_of(stream, c, &s);
	Copy *copies = e ? NULL : malloc(b->count * sizeof *copies);
	bool blocks = false;
	size_t n = 0;
	for (size_t k = 0; !e && n < b->count; n++) {
		while (!b->no_attributes && k + 1 < b->attributes && b->index[k + 1] <= n)
			k++;
		if (b->sizes[n]) {
			Shape want = {.dst = b->dsts[n], .src = b->srcs[n], .width = b->sizes[n], .rows = 1, .slices = 1};
			e = prepare(s, &want, b->no_attributes ? ORDER_STREAM : (int)b->attrs[k].order, false, &copies[n], &blocks);
		} else {
			violation("copy %zu of a batch is empty", n);
			e = INVALID_VALUE;
		}
		if (e) {
			if (b->failed)
				*b->failed = n;
			break;
		}
	}
	if (e && copies && !(b->partial && n)) {
		while (n > 0)
			unprepare(&copies[--n]);
		free(copies);
	} else if (s && n) {
		count(BATCHES, 1);
		count(BATCH_COPIES, (int64_t)n);
		int waited = submit(s, copies, n, blocks);
		e = e ? e : waited;
	}
	pthread_mutex_unlock(&lock);
	return e;
}
