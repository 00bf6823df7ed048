#include "fake.h"
bool chunks_cover(Memory *m, uint64_t addr, uint64_t bytes) { (void)m; (void)addr; (void)bytes; return true; }
Chunk *chunk_at(Memory *m, uint64_t addr) { (void)m; (void)addr; return NULL; }
