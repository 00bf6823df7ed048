"""A Mooncake peer of another make: the Python package of the project itself.

It answers commands, one JSON object a line, on standard input: see the functions whose
names begin with do_. The first argument is the address that it is reached by.
"""

import ctypes
import hashlib
import json
import mmap
import os
import sys

os.environ["MC_FORCE_TCP"] = "1"
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ["MC_TCP_BIND_ADDRESS"] = sys.argv[1]
from mooncake.engine import TransferEngine  # noqa: E402

engine = TransferEngine()
if engine.initialize(sys.argv[1] + ":12345", "P2PHANDSHAKE", "tcp", "") != 0:
    sys.exit("the engine can't be made")
memory = {}  # by base


def address(m):
    return ctypes.addressof(ctypes.c_char.from_buffer(m))


def contents(seed, n):
    """The bytes that both sides know: SHA-256 of the seed and the number of each 32."""
    head = seed.to_bytes(8, "little")
    return b"".join(hashlib.sha256(head + i.to_bytes(8, "little")).digest() for i in range((n + 31) // 32))[:n]


def do_alloc(bytes, seed):
    m = mmap.mmap(-1, bytes)
    m[:] = contents(seed, bytes)
    base = address(m)
    if engine.register_memory(base, bytes, "cpu:0") != 0:
        raise OSError("registration failed")
    memory[base] = m
    return base


def do_set(base, off, hex):
    b = bytes.fromhex(hex)
    memory[base][off : off + len(b)] = b


def do_get(base, off, n):
    return memory[base][off : off + n].hex()


def do_read(peer, at, n):
    m = mmap.mmap(-1, n)
    rc = engine.transfer_sync_read(peer, address(m), at, n)
    return {"rc": rc, "hex": m[:].hex()}


def do_write(peer, at, hex):
    b = bytes.fromhex(hex)
    m = mmap.mmap(-1, len(b))
    m[:] = b
    return engine.transfer_sync_write(peer, address(m), at, len(b))


def answer(value):
    # The library may have written to standard output, too.
    print("ANSWER", json.dumps(value), flush=True)


answer("%s:%d" % (sys.argv[1], engine.get_rpc_port()))
for line in sys.stdin:
    command = json.loads(line)
    answer(globals()["do_" + command.pop("do")](**command))
