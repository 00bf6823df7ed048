"""Prints golden.json: the keys of package prefix, worked out without it."""

import hashlib
import json
import struct


def key(*fields):
    h = hashlib.sha256()
    for f in fields:
        h.update(struct.pack("<I", len(f)))
        h.update(f)
    return h.digest()


def ints(tokens):
    return struct.pack("<%dI" % len(tokens), *tokens)


def item_bytes(items):
    return b"".join(struct.pack("<IIII", s, o, n, len(d)) + d for s, o, n, d in items)


vectors = []


def vector(func, want, **args):
    vectors.append({"func": func, **args, "key": want.hex()})


for fields in ([], [b""], [b"", b""], [b"a", b"bc"], [b"ab", b"c"], [b"abc"], [bytes(range(256)) * 3]):
    vector("Fingerprint", key(*fields), fields=[f.hex() for f in fields])

zero, root = bytes(32), key(b"root")
image, sound = bytes(range(32)), b"\xff" * 20
for prev, tokens, items in (
    (zero, [], []),
    (root, [1], []),
    (root, [1, 2, 3, 4], []),
    (root, [0, 4294967295, 65536], []),
    (root, list(range(512)), []),
    (root, list(range(5000)), []),
    (root, [7, 7], [(1, 0, 1, image)]),
    (root, [7, 7], [(0, 2, 9, image), (1, 0, 300, sound)]),
    (root, [], [(0, 0, 0, b"")]),
):
    vector("Next", key(prev, ints(tokens), item_bytes(items)), prev=prev.hex(), tokens=tokens,
           items=[{"start": s, "offset": o, "length": n, "digest": d.hex()} for s, o, n, d in items])

for n in (0, 1, 46, 182789, 2**32, 2**64 - 1):
    vector("NextID", key(root, struct.pack("<Q", n)), prev=root.hex(), id=str(n))
    for part in (0, 1, 2**32 - 1):
        vector("NextIDPart", key(root, struct.pack("<QI", n, part)), prev=root.hex(), id=str(n), part=part)

chain, prev = [], root
for at in range(0, 96, 32):
    prev = key(prev, ints(range(at, at + 32)), b"")
    chain.append(prev.hex())
vectors.append({"func": "AppendChain", "prev": root.hex(), "tokens": list(range(100)), "page_size": 32, "keys": chain})

first = b"kvferry namespace 1"
vector("Root", key(first, b"", b"", b"", b"", b"", b"", bytes(8), bytes(8), b"", b"", b""), namespace={})
vector(
    "Root",
    key(first, b"acme", b"llama-3-8b", image, b"".join(struct.pack("<I", len(a)) + a for a in (b"lora-1", b"lora-2")),
        b"fp8", sound, struct.pack("<Q", 512), struct.pack("<Q", 32), b"NHD", b"kvferry-tokens-1", b"salt"),
    namespace={"tenant": "acme", "model": "llama-3-8b", "digest": image.hex(), "adapters": ["lora-1", "lora-2"],
               "dtype": "fp8", "scales": sound.hex(), "page_size": 512, "layers": 32, "layout": "NHD",
               "scheme": "kvferry-tokens-1", "salt": "salt"},
)

print("[\n" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in vectors) + "\n]")
