"""Processes: how many cores there are, workers that end with their parent, the processes of torchrun."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """End this worker process when the process that started it ends, even by SIGKILL.

    Without this a worker would wait for work for ever, or keep writing into a folder that the next run uses.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    try:
        wait([parent.sentinel])
    finally:
        os._exit(1)


def distributed_state() -> Any:
    """accelerate's `PartialState`: this process alone, or one of those that torchrun started."""
    import torch
    from accelerate import PartialState

    # Without an accelerator, accelerate sees several processes only when it is asked to use the CPU.
    return PartialState(cpu=not torch.accelerator.is_available())
