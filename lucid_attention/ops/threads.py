"""Work divided over threads of Python, each of which runs torch with one thread of its own.

Torch divides every product over its threads and waits for the slowest of them at its end. Where there is work for each
core, one wait at the end of all products takes less time, above all on a busy machine. Torch and compiled code release
Python's lock, and torch's number of threads is a setting of the thread that calls it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process: they do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), "lucid_attention")


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Call work(0) … work(count − 1) at the same time; `work` has no gradients."""
    if count == 1:
        work(0)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run(i: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            work(i)

    pool = _pool(os.getpid())
    others = [pool.submit(run, i) for i in range(1, count)]
    try:
        run(0)
    finally:
        errors = [other.exception() for other in others]
        # New threads start with the number that was set last.
        torch.set_num_threads(before)
    for error in errors:
        if error is not None:
            raise error
