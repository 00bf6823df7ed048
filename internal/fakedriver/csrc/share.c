#include "fake.h"
bool shared_done(Shared *s, uint64_t seq, int from) { (void)from; return s->done >= seq; }
Shared *new_shared(int *fd) { *fd = -1; return NULL; }
