"""Processes: how many cores there are, workers that end with their parent, the processes of torchrun."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# What ends a command: Ctrl-C, and what schedulers send.
STOPS = (signal.SIGINT, signal.SIGTERM)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool(ProcessPoolExecutor):
    """Worker processes that leave Ctrl-C to their parent from their first moment, and end with it.

    Spawned, not forked: a fork would copy locks that threads of torch and tokenizers may hold.
    initializer: called in every worker before its first task.
    """

    def __init__(self, workers: int, initializer: Callable[..., None], arguments: tuple[Any, ...] = ()) -> None:
        super().__init__(workers, multiprocessing.get_context("spawn"), _begin_worker, (initializer, *arguments))

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. This starts a worker if fewer run than may."""
        with stops_wait():
            return super().submit(function, *args, **kwargs)


@contextmanager
def stops_wait() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block ends. Processes that start in the block start with both blocked.

    A worker takes a second until it can ignore Ctrl-C. A parent that stopped while it starts a worker would leave a
    worker behind that reads half of its arguments.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The start of the tracker unblocks both signals, so it comes first.
    resource_tracker.ensure_running()
    arrived: list[int] = []
    handlers = {}
    # The mask is this thread's. Another thread may take the signal, and Python then runs the handler in this one.
    if threading.current_thread() is threading.main_thread():
        handlers = {stop: handler for stop in STOPS if callable(handler := signal.getsignal(stop))}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        for stop in handlers:
            signal.signal(stop, lambda number, _: arrived.append(number))
        yield
    finally:
        # Signals that waited are delivered here, to the handlers above: only what is raised below can end this block.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for stop, handler in handlers.items():
            signal.signal(stop, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def _begin_worker(initializer: Callable[..., None], *arguments: Any) -> None:
    # A terminal sends Ctrl-C to all processes. Only the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    end_with_parent()
    initializer(*arguments)


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
