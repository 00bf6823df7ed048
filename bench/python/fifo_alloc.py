"""A page allocator as an engine in Python writes it: a queue of free ids and a lock,
all pages that were asked for or none."""

import collections
import platform
import threading

from rival import serve


class Allocator:
    def __init__(self, pages):
        self.free_ids = collections.deque(range(pages))
        self.lock = threading.Lock()

    def alloc(self, n):
        with self.lock:
            if n > len(self.free_ids):
                raise RuntimeError(f"{n} pages asked for, {len(self.free_ids)} free")
            take = self.free_ids.popleft
            return [take() for _ in range(n)]

    def free(self, ids):
        with self.lock:
            self.free_ids.extend(ids)


def prepare(config):
    allocator = Allocator(config["pages"])
    n, pairs = config["n"], config["pairs"]

    def work():
        for _ in range(pairs):
            allocator.free(allocator.alloc(n))

    return f"Python {platform.python_version()}", work


serve(prepare)
