/* What the tests of package dl call. Each function shows by its answer that the words
   of a call came to C as they left Go. */
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef uint64_t w;

/* Word i counts i + 1 times, so that an order that is wrong gives another sum. */
w sum0(void) { return 42; }
w sum1(w a) { return a; }
w sum2(w a, w b) { return a + 2 * b; }
w sum3(w a, w b, w c) { return sum2(a, b) + 3 * c; }
w sum4(w a, w b, w c, w d) { return sum3(a, b, c) + 4 * d; }
w sum5(w a, w b, w c, w d, w e) { return sum4(a, b, c, d) + 5 * e; }
w sum6(w a, w b, w c, w d, w e, w f) { return sum5(a, b, c, d, e) + 6 * f; }
w sum7(w a, w b, w c, w d, w e, w f, w g) { return sum6(a, b, c, d, e, f) + 7 * g; }
w sum8(w a, w b, w c, w d, w e, w f, w g, w h) { return sum7(a, b, c, d, e, f, g) + 8 * h; }
w sum9(w a, w b, w c, w d, w e, w f, w g, w h, w i) { return sum8(a, b, c, d, e, f, g, h) + 9 * i; }
w sum10(w a, w b, w c, w d, w e, w f, w g, w h, w i, w j) { return sum9(a, b, c, d, e, f, g, h, i) + 10 * j; }
w sum11(w a, w b, w c, w d, w e, w f, w g, w h, w i, w j, w k) { return sum10(a, b, c, d, e, f, g, h, i, j) + 11 * k; }
w sum12(w a, w b, w c, w d, w e, w f, w g, w h, w i, w j, w k, w l) { return sum11(a, b, c, d, e, f, g, h, i, j, k) + 12 * l; }
w sum13(w a, w b, w c, w d, w e, w f, w g, w h, w i, w j, w k, w l, w m) { return sum12(a, b, c, d, e, f, g, h, i, j, k, l) + 13 * m; }
w sum14(w a, w b, w c, w d, w e, w f, w g, w h, w i, w j, w k, w l, w m, w n) { return sum13(a, b, c, d, e, f, g, h, i, j, k, l, m) + 14 * n; }

/* Words of mixed widths, the widest on the stack of both machines, as the batched
   copies of the vendors have them. The answer is the number of the first that is wrong. */
int32_t mixed(int32_t a, uint32_t b, int64_t c, uint8_t d, void *e, w f, int32_t g, w h, uint32_t i, int64_t j) {
	if (a != -1) return 1;
	if (b != 0xfffffffeu) return 2;
	if (c != INT64_MIN) return 3;
	if (d != 0xab) return 4;
	if (e != (void *)0x7fffdeadbeef) return 5;
	if (f != 0xfedcba9876543210u) return 6;
	if (g != -7) return 7;
	if (h != 8) return 8;
	if (i != 0x80000009u) return 9;
	if (j != -10) return 10;
	return 0;
}

int32_t minus(int32_t a) { return -a; }
int64_t minus64(int64_t a) { return -a; }

/* Vector code that wants its stack aligned. */
w aligned(w a) {
	volatile _Alignas(16) char x[64];
	memset((char *)x, (int)a, sizeof x);
	return ((uintptr_t)x % 16) + (unsigned char)x[63];
}

struct handle { w magic[8]; };
struct opened { w first, sum; uint32_t flags; };

/* A handle by value, as the vendors' calls that open one of another process. */
int32_t open_handle(struct opened *o, struct handle h, uint32_t flags) {
	for (int i = 0; i < 8; i++)
		if (h.magic[i] >> 8 != 0xfeedfacecafeu) return 100 + i;
	o->first = h.magic[0];
	o->sum = 0;
	for (int i = 0; i < 8; i++) o->sum += (w)(i + 1) * (h.magic[i] & 0xff);
	o->flags = flags;
	memset(&h, 0, sizeof h); /* the callee's to change */
	return 0;
}

w length(const char *s) { return strlen(s); }
const char *name(int32_t i) { return i == 0 ? "KVFERRY_SUCCESS" : NULL; }
static char longer[2000];
const char *long_name(void) { memset(longer, 'x', sizeof longer - 1); return longer; }

w touch(w *p) { return ++*p; }

void block_ns(int64_t ns) {
	struct timespec t = {ns / 1000000000, ns % 1000000000};
	while (nanosleep(&t, &t) != 0) ; /* a signal of the Go runtime may end it early */
}

/* Waits until n callers are in here at once, and says how many there were; -1 after too long. */
int32_t meet(_Atomic int32_t *here, int32_t n) {
	++*here;
	for (int i = 0; i < 60000 && *here < n; i++) block_ns(1000000);
	return *here >= n ? n : -1;
}
