"""What tests of the benchmarks share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lucid_lab import cli
from lucid_lab.bench import path, solve
from lucid_lab.bench.records import Settings

Bench = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def timing_without_filled_memory(uninitialised_memory_is_nan: None) -> Iterator[None]:
    """Filling memory with NaN would be timed too."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens in the checks before timing (still several blocks, and a part of one); short timing."""
    monkeypatch.setattr(Settings, "budget", 0.01)
    for module in (solve, path):
        monkeypatch.setattr(module, "GATE_LENGTH", 150)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """`lucid bench ... --out tmp_path`: its exit code, and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        out = [] if "--publish" in words or not words else ["--out", str(tmp_path)]
        code = cli.main(["bench", *words, *out])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run
