"""Jobs and an experiment for tests of the machinery: every job writes into a diary when it runs.

`probing.py` loads it as `lucid_lab.claims.probe`, in the test and in worker processes.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lucid_lab.claims.engine.jobs import Job
from lucid_lab.claims.engine.result import Claim, Conclusion
from lucid_lab.claims.engine.scale import Scale
from lucid_lab.claims.engine.verdict import as_at_small_scale

PAPER_NUMBERS, judge_paper = as_at_small_scale("memory_update")
CLAIM = Claim("Probes run", "0.0", "Every probe is run once.", "1 run")


def diary() -> Path:
    """The file that probes write into: a line when they begin and a line when they end."""
    return Path(os.environ["LUCID_PROBE"])


def note(**entry: Any) -> None:
    with diary().open("a") as file:
        file.write(json.dumps({**entry, "time": time.monotonic(), "pid": os.getpid()}) + "\n")


def touch(work: Any, name: str, value: float = 0.0, seconds: float = 0.0) -> dict[str, Any]:
    """Write into the diary, wait, and write again."""
    note(begin=name)
    time.sleep(seconds)
    note(end=name)
    interrupt = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    (work.folder / "made.txt").write_text(name)
    return {"value": value, "threads": torch.get_num_threads(), "deaf": interrupt}


def fragile(work: Any, name: str) -> dict[str, Any]:
    """Fail as long as the file `broken` exists."""
    note(begin=name)
    if diary().with_name("broken").exists():
        raise RuntimeError(f"{name} has broken")
    return {"value": 1.0}


def killed(work: Any, name: str) -> dict[str, Any]:
    """Die as a process does when memory runs out."""
    note(begin=name)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def endless(work: Any, number: float) -> dict[str, Any]:
    """A record that JSON cannot write."""
    return {"value": number}


def probe(name: str, *, seconds: float = 0.0, expected: float = 1.0, alone: bool = False, value: float = 0.0) -> Job:
    return Job("probe:touch", {"name": name, "seconds": seconds, "value": value}, name, expected, alone)


def plan(scale: Scale, done: Any) -> list[Job]:
    """a and b; then c, which depends on their records; then d, which depends on that of c."""
    slow = 30.0 if os.environ.get("LUCID_PROBE_SLOW") else 0.0
    first = [probe("a", value=1.0, expected=60), probe("b", value=2.0, seconds=slow)]
    if not all(job in done for job in first):
        return first
    second = probe("c", value=10 + sum(done[job]["value"] for job in first))
    if second not in done:
        return [*first, second]
    return [*first, second, probe("d", value=done[second]["value"] + 1)]


def conclude(scale: Scale, done: Any) -> Conclusion:
    total = done[plan(scale, done)[-1]]["value"]
    return Conclusion(f"{total:g}", "holds", "They ran.", 1)


def paper() -> list[Any]:
    return []
