"""Run jobs in parallel processes and show the progress. Finished jobs stay, even if others fail."""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...processes import WorkerPool, available_cores
from .jobs import Job, Store, Work

LOG = "failed.txt"


class JobsFailed(Exception):
    """The failed jobs, and the files with their errors."""


class Progress:
    """One bar on a terminal; elsewhere a line every half minute.

    The time left is an estimate for the jobs known so far: finished jobs show how their
    duration on this machine compares with the expected one.
    """

    interval = 0.5

    def __init__(self, *, quiet: bool = False) -> None:
        self.expected = 0.0
        self.done_expected = 0.0
        self.started_at: float | None = None
        self.jobs = self.finished_jobs = 0
        self.running: dict[Job, float] = {}
        self.terminal = sys.stderr.isatty()
        self.quiet = quiet
        self.last_line_at = 0.0
        self.bar: Any = None

    def add(self, jobs: list[Job]) -> None:
        """Count jobs that have just been planned."""
        self.expected += sum(job.seconds for job in jobs)
        self.jobs += len(jobs)
        if self.terminal and not self.quiet and self.bar is None and jobs:
            self.bar = tqdm(total=self.jobs, unit="job", dynamic_ncols=True, bar_format="{desc} |{bar}| {postfix}")

    def started(self, job: Job) -> None:
        """Note that a job begins."""
        now = time.monotonic()
        self.started_at = self.started_at or now
        self.running[job] = now

    def finished(self, job: Job) -> None:
        """Note that a job has ended, whether it succeeded or failed."""
        self.running.pop(job, None)
        self.finished_jobs += 1
        self.done_expected += job.seconds

    def seconds_left(self) -> float | None:
        """The seconds left; None as long as the speed of this machine is unknown."""
        now = time.monotonic()
        elapsed = now - (self.started_at or now)
        # A running job counts by the time it has run, up to nine tenths of its expected time.
        running_seconds = sum(min(now - start, 0.9 * job.seconds) for job, start in self.running.items())
        done_seconds = self.done_expected + running_seconds
        if elapsed < 2 or done_seconds <= 0:
            return None
        return max(1.0, elapsed * (self.expected - done_seconds) / done_seconds)

    def show(self) -> None:
        """Update the bar, or print a line if the last one is half a minute old."""
        if self.quiet:
            return
        seconds = self.seconds_left()
        text = f"{self.finished_jobs}/{self.jobs} jobs, {'…' if seconds is None else clock(seconds)} left"
        names = ", ".join(job.label or job.function for job in self.running)
        if self.bar is not None:
            self.bar.total, self.bar.n = self.jobs, self.finished_jobs
            self.bar.set_description_str(text, refresh=False)
            self.bar.set_postfix_str(names, refresh=True)
        elif not self.terminal and time.monotonic() - self.last_line_at > 30 and self.running:
            self.last_line_at = time.monotonic()
            print(f"  {text}: {names}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def run_jobs(jobs: Sequence[Job], store: Store, progress: Progress, processes: int | None = None) -> None:
    """Run the jobs that are not finished in the store.

    processes: jobs at a time, each with one thread; default one per core. Jobs that measure time run last,
    one at a time.
    """
    unfinished = [job for job in dict.fromkeys(jobs) if job not in store]
    for job in unfinished:
        job.resolve()
    count = min(processes or available_cores(), max(1, len(unfinished)))
    failed: list[str] = []
    if unfinished:
        with _Pool(count) as pool:
            # The longest first: a long job at the end would leave the other cores without work.
            shared = sorted((job for job in unfinished if not job.alone), key=lambda job: -job.seconds)
            try:
                failed += _run(pool, shared, count, store, progress)
                failed += _run(pool, [job for job in unfinished if job.alone], 1, store, progress)
            except BrokenProcessPool as error:
                names = ", ".join(job.label or job.key for job in progress.running)
                raise JobsFailed(
                    f"a process was killed, probably because memory ran out, during: {names}. "
                    "--processes 1 needs less memory"
                ) from error
    if failed:
        raise JobsFailed(f"{len(failed)} of {len(unfinished)} jobs failed; the reasons are in {', '.join(failed)}")


class _Pool:
    """An executor that kills its processes when its block ends with an exception, such as Ctrl-C."""

    def __init__(self, count: int) -> None:
        self.executor = WorkerPool(count, _begin)

    def __enter__(self) -> WorkerPool:
        return self.executor

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for process in list((self.executor._processes or {}).values()):
                process.kill()
        self.executor.shutdown(wait=kind is None, cancel_futures=True)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def _run(pool: WorkerPool, jobs: list[Job], at_once: int, store: Store, progress: Progress) -> list[str]:
    """Run jobs, at most `at_once` at a time. Returns the log files of the jobs that failed."""
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
            log = future.result()
            progress.finished(job)
            if log is not None:
                failed.append(log)
        progress.show()
    return failed


def _core_seconds() -> float:
    """Processor time of this process and of children it has waited for. Other load on the machine does not count."""
    return sum(os.times()[:4])


def do(job: Job, folder: Path) -> str | None:
    """Run a job in this process and keep its record. Returns the log file if the job failed."""
    store = Store(folder)
    log = store.folder_of(job) / LOG
    started = _core_seconds()
    try:
        record = job.resolve()(Work(store, job), **job.arguments)
        log.unlink(missing_ok=True)
        store.write(job, record, _core_seconds() - started)
    except Exception:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{job.label}\n{job.function} {dict(job.arguments)}\n\n{traceback.format_exc()}")
        return str(log)
    sys.stdout.flush()
    return None
