"""Peak memory of one call in a fresh process: `python -m lucid_attention.bench.cases.memory_worker JOB`, in JSON.

A process of its own, because a peak cannot fall: what an earlier call took would hide the next one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lucid_attention import precondition

from .. import gate
from ..results import ROOT
from . import path_peers, peers
from .solve import Shape, evaluate

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PRECONDITION = "precondition"
WARM_UP_LENGTH = 300
# Seconds until a fresh process has torch, for estimates of duration.
START_UP = 2.0


@dataclass(frozen=True)
class Job:
    """A name of `peers.ATTENTIONS` or `path_peers.ATTENTIONS`, or `PRECONDITION` for the solve alone."""

    name: str
    D: int
    heads: int
    kv_heads: int
    N: int
    backward: bool
    threads: int


@dataclass(frozen=True)
class Cost:
    """Peak memory over what the inputs take, and the time of this one call."""

    megabytes: float
    seconds: float


def cost(job: Job) -> Cost:
    """Run `job` in a process of its own."""
    # What is alive counts. glibc keeps freed memory for later unless it is told to map each tensor by itself.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "lucid_attention.bench.cases.memory_worker", json.dumps(asdict(job))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the memory of {job} could not be measured (exit code {done.returncode}):\n{done.stderr}")
    return Cost(**json.loads(done.stdout))


def _call(job: Job, N: int) -> Callable[[], object]:
    if job.name in path_peers.ATTENTIONS:
        given = path_peers.inputs(Shape(job.D, job.heads, job.kv_heads), N)
        return lambda: path_peers.evaluate(job.name, given, job.backward)
    tensors = gate.inputs(job.D, job.heads, job.kv_heads, N)
    if job.name == PRECONDITION:
        k, v = tensors[1:3]
        return lambda: precondition(k, v)
    return lambda: evaluate(peers.ATTENTIONS[job.name].run, tensors, job.backward)


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no line {name}")


def _peak_without_proc() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _measure(job: Job) -> Cost:
    torch.set_num_threads(job.threads)
    # What libraries set up on first use is not counted.
    _call(job, WARM_UP_LENGTH)()
    call = _call(job, job.N)
    if RESET.exists():
        RESET.write_text("5")  # the peak starts again from here
        before = _status("VmRSS")
    else:
        before = _peak_without_proc()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM") if RESET.exists() else _peak_without_proc()
    del result
    return Cost((peak - before) / 1e6, seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Job(**json.loads(sys.argv[1]))))))
