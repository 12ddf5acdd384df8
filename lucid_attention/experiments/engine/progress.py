"""How far the work is, and how long it will still take."""

import sys
import time
from typing import Any

from tqdm import tqdm

from .jobs import Job


class Progress:
    """One bar on a terminal; elsewhere a line every half minute.

    The time left is that of the jobs that are known, judged by how long finished ones took against what was expected.
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
        self.said = 0.0
        self.bar: Any = None

    def add(self, jobs: list[Job]) -> None:
        """More work is known."""
        self.expected += sum(job.seconds for job in jobs)
        self.jobs += len(jobs)
        if self.terminal and not self.quiet and self.bar is None and jobs:
            self.bar = tqdm(total=self.jobs, unit="job", dynamic_ncols=True, bar_format="{desc} |{bar}| {postfix}")

    def started(self, job: Job) -> None:
        """A job begins."""
        now = time.monotonic()
        self.started_at = self.started_at or now
        self.running[job] = now

    def finished(self, job: Job) -> None:
        """A job has ended, well or not."""
        self.running.pop(job, None)
        self.finished_jobs += 1
        self.done_expected += job.seconds

    def seconds_left(self) -> float | None:
        """None as long as nothing is known of this machine's speed."""
        now = time.monotonic()
        elapsed = now - (self.started_at or now)
        # A running job counts as far as its time suggests, though never as finished.
        partly = sum(min(now - begun, 0.9 * job.seconds) for job, begun in self.running.items())
        known = self.done_expected + partly
        if elapsed < 2 or known <= 0:
            return None
        return max(1.0, elapsed * (self.expected - known) / known)

    def show(self) -> None:
        """Say where the work is."""
        if self.quiet:
            return
        left = self.seconds_left()
        text = f"{self.finished_jobs}/{self.jobs} jobs, {'…' if left is None else clock(left)} left"
        names = ", ".join(job.label or job.function for job in self.running)
        if self.bar is not None:
            self.bar.total, self.bar.n = self.jobs, self.finished_jobs
            self.bar.set_description_str(text, refresh=False)
            self.bar.set_postfix_str(names, refresh=True)
        elif not self.terminal and time.monotonic() - self.said > 30 and self.running:
            self.said = time.monotonic()
            print(f"  {text}: {names}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """No more is to come."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
