"""What tests of the experiments' machinery share: probe jobs that workers can import, and commands in a process."""

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab import claims as experiments
from lucid_lab import cli
from lucid_lab.claims.engine import command, study
from lucid_lab.claims.engine.pool import Progress

NAME = "lucid_lab.claims.probe"
SOURCE = Path(__file__).with_name("probe.py")
# The text of `sitecustomize.py`, which Python runs when it starts: it makes the probes known to workers.
SITE = """
import importlib.util, sys

class Probe:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            return importlib.util.spec_from_file_location(name, {file!r})

sys.meta_path.insert(0, Probe)
"""


class Probes:
    """The module of the probes, and the diary that they write."""

    def __init__(self, module: Any, folder: Path) -> None:
        self.module, self.folder = module, folder

    def entries(self) -> list[dict[str, Any]]:
        path = self.folder / "diary.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def runs(self) -> list[str]:
        """Names of the probes that began, in order."""
        return [entry["begin"] for entry in self.entries() if "begin" in entry]

    def span(self, name: str) -> tuple[float, float]:
        times = [entry["time"] for entry in self.entries() if name in (entry.get("begin"), entry.get("end"))]
        return times[0], times[-1]


@contextmanager
def probing(folder: Path) -> Iterator[Probes]:
    """Make probe jobs and the experiment `probe` known to this process and to workers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE.format(name=NAME, file=str(SOURCE)))
    spec = importlib.util.spec_from_file_location(NAME, SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUCID_PROBE", str(folder / "diary.txt"))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setitem(sys.modules, NAME, module)
        patch.setattr(experiments, "probe", module, raising=False)
        for place in (study, command):
            patch.setattr(place, "EXPERIMENTS", ("memory_update", "probe"))
        spec.loader.exec_module(module)
        yield Probes(module, folder)


class Command:
    """`lucid ...` in a process group of its own, as a terminal starts it."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.folder = folder
        self.process = multiprocessing.get_context("fork").Process(target=_child, args=(argv, folder))
        self.process.start()

    def wait(self, seconds: float = 60) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def output(self) -> str:
        return "".join((self.folder / name).read_text() for name in ("out", "err"))

    def others(self) -> list[int]:
        """Other processes of the group that are still alive, zombies left out."""
        alive = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == self.process.pid and state != "Z" and int(path.parent.name) != self.process.pid:
                alive.append(int(path.parent.name))
        return alive

    def end(self) -> None:
        """Kill the processes that are left."""
        for pid in [*self.others(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
            except ProcessLookupError:
                continue
        self.process.join()


def _child(argv: list[str], folder: Path) -> None:
    os.setsid()
    # Commands in the background of a script ignore Ctrl-C, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.use_deterministic_algorithms(False)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.exit(cli.main(argv))


def until(condition: Callable[[], Any], seconds: float = 60) -> bool:
    """Wait until a condition is true. Returns whether it is."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def silent() -> Progress:
    return Progress(quiet=True)
