"""Parts in parallel processes, with a progress bar. Nothing here decides what is written."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any

from tqdm import tqdm

from .errors import DataError
from .parts import Job, Record, encode_part
from .readers import Part
from .sources import Source
from .tokenizer import Encoder


class Stopped(Exception):
    """The run was given up: another part failed, or the user stopped it."""


def encode_parts(parts: Iterable[Part], source: Source, job: Job, workers: int, bar: "tqdm[Any]") -> Iterator[Record]:
    """Records of parts, as they are finished. `parts` is asked for the next one when a worker is free."""
    if workers > 1:
        yield from _in_parallel(parts, source, job, workers, bar)
        return
    encoder = Encoder.of(job.out)
    for part in parts:
        yield encode_part(source, encoder, part, job, _Counted(bar))


class _Counted:
    """Documents and bytes on a progress bar."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.bar = bar
        self.documents = 0

    def __call__(self, size: int, documents: int = 1) -> None:
        self.documents += documents
        self.bar.set_postfix(documents=self.documents, refresh=False)
        self.bar.update(size)


def _in_parallel(parts: Iterable[Part], source: Source, job: Job, workers: int, bar: "tqdm[Any]") -> Iterator[Record]:
    # A fork would copy the threads' locks of torch and tokenizers in whatever state they are.
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", 2), context.Event()
    waiting = iter(parts)
    running: set[Future[Record]] = set()
    seen, counted = [0, 0], _Counted(bar)
    with ProcessPoolExecutor(workers, context, _start, (pickle.dumps(source), job, counts, stop)) as pool:
        try:
            while True:
                while len(running) < workers and (part := next(waiting, None)):
                    running.add(pool.submit(_encode, part))
                if not running:
                    return
                done, running = wait(running, timeout=0.3, return_when=FIRST_COMPLETED)
                now = counts[:]
                counted(now[1] - seen[1], now[0] - seen[0])
                seen = now
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker was killed, perhaps for want of memory. Finished parts are kept: run the same command again, "
                "with fewer --workers"
            ) from error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


# What a worker process was told when it started.
_told: dict[str, Any] = {}


def _start(pickled: bytes, job: Job, counts: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _told.update(pickled=pickled, job=job, counts=counts, stop=stop)


def _die_with_parent() -> None:
    """After kill -9 of the command, no worker goes on writing into a folder that the next run may be using."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait_for([parent.sentinel])
        os._exit(1)


def _encode(part: Part) -> Record:
    job, counts, stop = _told["job"], _told["counts"], _told["stop"]
    if "source" not in _told:
        # Here and not at the start, where an error (an unreachable hub) would look like a worker that died.
        _told.update(source=pickle.loads(_told["pickled"]), encoder=Encoder.of(job.out))

    def report(size: int) -> None:
        if stop.is_set():
            raise Stopped
        with counts.get_lock():
            counts[0] += 1
            counts[1] += size

    return encode_part(_told["source"], _told["encoder"], part, job, report)
