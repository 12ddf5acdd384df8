"""What tests of the benchmarks share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lucid_lab.bench.cases import linear, path, path_decode, solve
from lucid_lab.bench.results import Settings

from lucid_lab import cli

Bench = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def timing_without_filled_memory(uninitialised_memory_is_nan: None) -> Iterator[None]:
    """Filling memory with NaN would be timed too."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens in the checks before timing (still several leaves and chunks, and a part of one); short timing."""
    monkeypatch.setattr(Settings, "budget", 0.01)
    monkeypatch.setattr(solve, "GATE_LENGTH", 200)
    monkeypatch.setattr(path, "GATE_LENGTH", 150)
    monkeypatch.setattr(path_decode, "GATE_CONTEXT", 70)
    monkeypatch.setattr(path_decode, "APPLY_EVERY", 40)
    monkeypatch.setattr(linear, "GATE_LENGTH", 150)
    monkeypatch.setattr(linear, "RECURRENT_LENGTH", 150)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """`lucid bench ... --out tmp_path`: its exit code, and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(["bench", *words, *(["--out", str(tmp_path)] if words else [])])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run
