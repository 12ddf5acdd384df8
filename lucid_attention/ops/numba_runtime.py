"""C functions that Numba compiles, run in torch's threads.

A function takes the address of its arguments, a block of memory with the integers of COUNTERS: the address of the
second one, then three zeros. Every thread calls it with the same address; they share the work by counting. Compiled
code is cached next to the source, or in NUMBA_CACHE_DIR.
"""

import ctypes
import gc
import importlib
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

logger = logging.getLogger(__name__)

COUNTERS = ("counters", "slots", "next", "done")
# Set in a process that was forked from this one: OpenMP's threads do not survive that.
_forked: list[bool] = []
# Reason why compiled code is disabled in this process.
_off: list[str] = []


def switch_off(reason: str) -> None:
    """Disable compiled code in this process: Numba is never imported."""
    _off[:] = [reason]


@cache
def compiled(module: str, name: str) -> Any:
    """A function of a module `numba_*` of this package, or the reason why there is none."""
    try:
        compile_ = importlib.import_module(module, __package__).compiled
    except ImportError as missing:
        return f"{missing.name or missing} is not installed: in a checkout of lucid-attention, pip install '.[cpu]'"
    # A compiler makes many objects that live on; looking for garbage among them is a tenth of its time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _compiled(compile_, name)
    finally:
        if collecting:
            gc.enable()


def _compiled(compile_: Any, name: str) -> Any:
    # Errors of a compiler have no common base class, and a folder where nothing can be kept is one of them.
    try:
        return compile_(name, cache=True)
    except Exception:
        logger.debug("Numba could not write or read its cache", exc_info=True)
    try:
        return compile_(name, cache=False)
    except Exception as error:
        logger.warning("lucid_attention continues with torch, because Numba failed: %s", error)
        return f"Numba failed: {error}"


@cache
def _parallel() -> Any:
    """OpenMP's entry that runs a function in several threads, out of the library that torch uses; None without one."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    os.register_at_fork(after_in_child=lambda: _forked.append(True))
    return parallel


def threads() -> int:
    """How many threads `run` may use: torch's number, or 1 where its threads are not available."""
    count = torch.get_num_threads()
    return 1 if count > 1 and (_forked or _parallel() is None) else count


def obstacle(*tensors: Tensor) -> str:
    """Why compiled code cannot read these tensors; empty if it can."""
    if _off:
        return _off[0]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return "it is not part of graphs"
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "it is not part of transforms"
    for x in tensors:
        if type(x) is not Tensor or x.is_neg():
            return "it is for plain tensors"
    return "" if tensors[0].is_cpu else f"it is for CPUs, got tensors on {tensors[0].device.type}"


def run(function: Any, arguments: int, threads: int) -> None:
    """Run the function on the arguments at this address, until all work is done."""
    if threads == 1:
        function.ctypes(arguments)
    else:
        _parallel()(function.address, arguments, threads, 0)
