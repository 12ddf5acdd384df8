"""Run jobs in parallel processes, with progress; what is finished stays, whatever happens to the rest."""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from .jobs import Job, Store, Work
from .progress import Progress

LOG = "failed.txt"


class JobsFailed(Exception):
    """Which jobs failed, and where it is written why."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], store: Store, progress: Progress, processes: int | None = None) -> None:
    """Run the jobs that are not finished in the store.

    processes: how many at a time, each with one thread; default the cores there are. Jobs that measure time run last,
    one at a time.
    """
    waiting = [job for job in dict.fromkeys(jobs) if job not in store]
    for job in waiting:
        job.resolve()
    count = min(processes or available_cores(), max(1, len(waiting)))
    # Forked processes hang in torch's threads; and one job's settings do not reach the next one's process.
    context = multiprocessing.get_context("spawn")
    failed: list[str] = []
    if waiting:
        with _Pool(count, context) as pool:
            # The longest first: a long one at the end would leave the other cores without work.
            shared = sorted((job for job in waiting if not job.alone), key=lambda job: -job.seconds)
            try:
                failed += _run(pool, shared, count, store, progress)
                failed += _run(pool, [job for job in waiting if job.alone], 1, store, progress)
            except BrokenProcessPool as error:
                names = ", ".join(job.label or job.key for job in progress.running)
                raise JobsFailed(
                    f"a process was killed, which is what happens when memory runs out; running were: {names}. "
                    "--processes 1 needs less of it"
                ) from error
    if failed:
        raise JobsFailed(f"{len(failed)} of {len(waiting)} jobs failed; what they said: {', '.join(failed)}")


class _Pool:
    """An executor whose processes end at once when something else ends here, such as Ctrl-C."""

    def __init__(self, count: int, context: multiprocessing.context.SpawnContext) -> None:
        self.executor = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)

    def __enter__(self) -> ProcessPoolExecutor:
        return self.executor

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for process in list((self.executor._processes or {}).values()):
                process.kill()
        self.executor.shutdown(wait=kind is None, cancel_futures=True)


def _begin() -> None:
    # Ctrl-C goes to all processes of a terminal; the first one says what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """One that is killed cannot tell its processes, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(pool: ProcessPoolExecutor, jobs: list[Job], at_once: int, store: Store, progress: Progress) -> list[str]:
    """Run jobs, at most so many at a time. Gives the files that say why jobs failed."""
    waiting, failed = list(jobs), []
    running: dict[Future[str | None], Job] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            progress.started(job)
            running[pool.submit(do, job, store.folder)] = job
        done, _ = wait(running, timeout=progress.interval, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            message = future.result()
            progress.finished(job)
            if message is not None:
                failed.append(message)
        progress.show()
    return failed


def _core_seconds() -> float:
    """Of this process and of those it has waited for: what else the machine does is not counted."""
    return sum(os.times()[:4])


def do(job: Job, folder: Path) -> str | None:
    """Do a job here and keep its record. Gives the file that says why, if it failed."""
    store = Store(folder)
    log = store.folder_of(job) / LOG
    started = _core_seconds()
    try:
        record = job.resolve()(Work(store, job), **job.arguments)
        store.write(job, record, _core_seconds() - started)
    except Exception:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{job.label}\n{job.function} {dict(job.arguments)}\n\n{traceback.format_exc()}")
        return str(log)
    log.unlink(missing_ok=True)
    sys.stdout.flush()
    return None
