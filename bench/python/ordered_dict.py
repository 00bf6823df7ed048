"""An LRU over an OrderedDict that serves the requests of a trace."""

import collections
import hashlib
import json
import platform

from rival import serve


def prepare(config):
    with open(config["paths"]) as f:
        requests = [
            [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in json.loads(line)]
            for line in f
        ]
    capacity = config["capacity"]
    looked = sum(map(len, requests))

    def work():
        cache, hits = collections.OrderedDict(), 0
        refresh, evict = cache.move_to_end, cache.popitem
        for keys in requests:
            at = 0
            for key in keys:
                if key not in cache:
                    break
                refresh(key)
                at += 1
            hits += at
            for key in keys[at:]:
                if key in cache:
                    refresh(key)
                    continue
                if len(cache) >= capacity:
                    evict(last=False)
                cache[key] = None
        return f"hit {hits / looked:.4f}"

    return f"Python {platform.python_version()}", work


serve(prepare)
