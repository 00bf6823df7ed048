// A driver that has next to nothing, and answers badly. What it is like is decided when
// it is compiled.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { ABSENT = 1, OLD, BROKEN, EMPTY, STUB, NEWER, LOOKUP, TWIN };

int cuDriverGetVersion(int *v)
{
	*v = LIKE == OLD ? 11020 : LIKE == TWIN ? 13000 : 12040;
	return LIKE == BROKEN ? 999 : 0;
}

static int init(unsigned flags)
{
	(void)flags;
	return LIKE == EMPTY ? 100 : LIKE == STUB ? 34 : LIKE == NEWER ? 4242 : 0;
}

static int name(int code, const char **out)
{
	*out = NULL;
	return code == 0 ? 0 : 1;
}

static int nothing(void) { return 0; }

// Names say what is answered of them; all others are there.
int cuGetProcAddress_v2(const char *n, void **fn, int version, uint64_t flags, int *status)
{
	(void)version;
	(void)flags;
	*fn = !strcmp(n, "cuInit") ? (void *)init : !strcmp(n, "cuGetErrorName") ? (void *)name : (void *)nothing;
	*status = 0;
	if (LIKE == ABSENT && !strcmp(n, "cuMemcpy2DAsync")) {
		*fn = NULL;
		*status = 1;
	}
	if (!strcmp(n, "error"))
		return 1;
	if (!strcmp(n, "not found"))
		*fn = NULL, *status = 1;
	if (!strcmp(n, "found nowhere"))
		*status = 1;
	if (!strcmp(n, "not sufficient"))
		*fn = NULL, *status = 2;
	if (!strcmp(n, "null"))
		*fn = NULL;
	return 0;
}
