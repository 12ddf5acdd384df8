"""Commands in processes that need no second to import: a server has imported the libraries, and they are its forks.

The processes of a step with several find each other as those of `torchrun` do, through variables of the environment.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from .steps import Step

PROGRAM = "lucid_lab.cli"
# What the commands import.
LIBRARIES = (
    "lucid_lab.training.run",
    "lucid_lab.evals.runner",
    "lucid_lab.analysis.command",
    "lucid_lab.data.tokenize",
    "lm_eval.evaluator",
    "matplotlib.pyplot",
)
# Seconds between two looks at the processes.
LOOK = 0.05


def run_warm(step: Step, folder: Path) -> int:
    """Run a step in a folder, on the CPU. Returns its exit code. When a process fails, the others are ended."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(LIBRARIES))
    processes = [
        server.Process(target=_begin, args=(step.words, str(folder), variables)) for variables in _variables(step)
    ]
    try:
        for process in processes:
            process.start()
        return _wait(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()


def _wait(processes: list[ForkServerProcess]) -> int:
    while True:
        codes = [process.exitcode for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(LOOK)


def _variables(step: Step) -> list[dict[str, str]]:
    """The environment of every process."""
    common = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if step.processes == 1:
        return [common]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = str(step.processes)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(step.processes)]


def _begin(words: tuple[str, ...], folder: str, variables: dict[str, str]) -> None:
    """What `python -m lucid_lab.cli` does, in a folder."""
    import torch

    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [PROGRAM, *words]
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
