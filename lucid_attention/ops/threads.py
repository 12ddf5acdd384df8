"""Work divided over threads of Python, each of which runs torch with one thread of its own.

Torch divides every product over its threads and waits for the slowest of them at its end. Where there is work for each
core, one wait at the end of all products takes less time, above all on a busy machine. Torch and compiled code release
Python's lock, and torch's number of threads is a setting of the thread that calls it.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process: they do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), "lucid_attention")


def in_threads(work: Callable[[Item], object], items: Sequence[Item], count: int) -> None:
    """Call work(item) for all items, in at most `count` threads; `work` has no gradients.

    A thread takes the next item when it has finished one, and nobody waits for a thread that has not started: on a busy
    machine that takes milliseconds, in which this thread does all the work.
    """
    left, count = iter(items), min(count, len(items))
    if count <= 1:
        for item in left:
            work(item)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            for item in left:
                work(item)

    pool = _pool(os.getpid())
    others = [pool.submit(run) for _ in range(1, count)]
    try:
        run()
    finally:
        errors = [other.exception() for other in others if not other.cancel()]
        # New threads start with the number that was set last.
        torch.set_num_threads(before)
    for error in errors:
        if error is not None:
            raise error
