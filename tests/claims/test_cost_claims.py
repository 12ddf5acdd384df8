"""The cost of LUCID: verdicts at their borders, and tiny runs of the benchmarks behind them."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab.bench import decode, models, solve
from lucid_lab.bench.harness import Spread, WrongAnswer
from lucid_lab.bench.records import Result, Settings
from lucid_lab.bench.solve import LUCID, SDPA
from lucid_lab.claims import decode_latency, operator_cost, run_claim, training_overhead
from lucid_lab.toys.lab import SMALL, SMOKE, Lab, Record

from .made_up import MadeUpLab

COSTS = ("operator_cost", "training_overhead", "decode_latency")


@pytest.fixture(autouse=True)
def no_checks_in_timings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Filling memory with NaN would be timed too. A few rounds are enough."""
    monkeypatch.setattr(Settings, "budget", 0.01)
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("name", COSTS)
def test_a_tiny_run_reaches_a_result_and_judges_nothing(name: str, tmp_path: Path) -> None:
    result = run_claim(name, Lab(SMOKE, tmp_path, processes=1, quiet=True))
    assert result["verdict"] == "too small to judge"
    assert result["rule"].startswith("The verdict")
    assert result["figures"]
    assert all(len(row) == len(table["columns"]) for table in result["tables"] for row in table["rows"])


def test_nothing_is_timed_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solve.CONTESTANTS, LUCID, solve.sdpa)
    settings = {"shape": (24, 4, 2), "length": 48, "backward": False, "quick": True}  # of no other test
    with pytest.raises(WrongAnswer, match="Nothing was timed"):
        operator_cost.time_attention(tmp_path, settings)


def timed(ratio: float, lucid: float = 0.1, rounds: int = 5) -> Record:
    """A record in which LUCID takes `lucid` seconds. Ratios are 0.002 below and 0.004 above in the quartiles."""
    spreads = {name: Spread(value, value, value, rounds) for name, value in ((SDPA, lucid / ratio), (LUCID, lucid))}
    return asdict(Result(spreads, {models.RATIO: Spread(ratio, ratio - 0.002, ratio + 0.004, rounds)}))


@pytest.mark.parametrize(
    ("grouped", "plain", "verdict"),
    [(1.29, 2.29, "holds"), (1.30, 2.29, "partly"), (1.29, 2.31, "partly"), (1.30, 2.31, "does not hold")],
)
def test_the_operator_holds_up_to_1_15_times_the_count_of_operations(
    grouped: float, plain: float, verdict: str
) -> None:
    def rule(name: str, item: Any) -> Record:
        longest = item["length"] == 4096
        return timed((grouped if item["shape"].heads == 32 else plain) if longest else 9.0)

    conclusion = operator_cost.run(MadeUpLab(SMALL, rule))
    assert conclusion.verdict == verdict
    assert f"32/4 heads of 64, forward and backward: {grouped:.2f} ×" in conclusion.ours
    assert [row[1] for row in conclusion.tables[0]["rows"]] == [2.0, 2.0, 1.125, 1.125]
    lucid = conclusion.figures[0]["series"][1]
    assert (lucid["role"], lucid["x"], lucid["y"]) == ("lucid", [512, 1024, 2048, 4096], [100.0] * 4)


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ((2.9, 6.4, 8.4), "holds"),
        ((3.1, 6.4, 8.4), "partly"),
        ((2.9, 6.6, 8.6), "partly"),
        ((4, 9, 9), "does not hold"),
    ],
)
def test_training_holds_up_to_three_points_above_the_paper(percents: tuple[float, ...], verdict: str) -> None:
    names = list(training_overhead.PAPER)
    assert training_overhead.PAPER == {"Gemma-3-1B": 0.0, "Gemma-3-4B": 3.5, "Qwen-2.5-1.5B": 5.5}
    measured = dict(zip(names, percents, strict=True))
    lab = MadeUpLab(SMALL, lambda name, item: timed(1 + measured[item["model"]] / 100, rounds=3))
    conclusion = training_overhead.run(lab)
    assert [item for _, item in lab.calls] == [{"model": name, "tokens": 2048, "quick": False} for name in names]
    assert conclusion.verdict == verdict
    assert conclusion.seeds == 3
    above = [name for name in names if measured[name] > training_overhead.PAPER[name] + 3]
    assert (f"percentage: {', '.join(above)}." in conclusion.because) == bool(above)
    assert "Qwen-2.5-1.5B pays +11 % at 65536 tokens" in conclusion.because
    first = conclusion.figures[0]["groups"][0]["bars"][0]
    assert (first["value"], first["spread"]) == (pytest.approx(percents[0]), pytest.approx(0.3))
    assert [line["value"] for line in conclusion.figures[0]["references"]] == [0.0, 3.5, 5.5]
    low, high = percents[0] - 0.2, percents[0] + 0.4
    assert f"Gemma-3-1B {percents[0]:+.1f} % ({low:+.1f} to {high:+.1f})" in conclusion.ours
    assert conclusion.tables[0]["rows"][0][-1] == "~0 %"


def decoding(step: float, static: float) -> MadeUpLab:
    """A token of LUCID takes 100 ms, one of sdpa with a dynamic cache twice that; the fastest standard step 0.5 ms."""

    def rule(name: str, item: Any) -> Record:
        if name == "time_token":
            return timed(0.5 if item["cache"] == "dynamic" else static)
        times = {SDPA: 0.004, decode.PRODUCTS: 0.0005, decode.SOFTMAX_STEP: 0.001, LUCID: step}
        peers = {decode.TO_TORCH: decode.PRODUCTS, decode.TO_STEP: decode.SOFTMAX_STEP, decode.TO_SDPA: SDPA}
        ratios = {key: Spread(*[step / times[peer]] * 3, 5) for key, peer in peers.items()}
        return asdict(Result({key: Spread(*[seconds] * 3, 5) for key, seconds in times.items()}, ratios))

    return MadeUpLab(SMALL, rule)


def test_decoding_is_judged_against_the_fastest_attention_and_against_transformers() -> None:
    lab = decoding(step=0.00055, static=0.9)
    conclusion = decode_latency.run(lab)
    assert len([name for name, _ in lab.calls if name == "time_token"]) == 3 * 4
    # 28 layers that each need 0.05 ms more make 1.4 ms of 100.
    assert "Qwen-2.5-1.5B +1.4 %" in conclusion.ours
    assert "Gemma-3-1B +0.2 %" in conclusion.ours
    assert conclusion.verdict == "holds"
    assert conclusion.figures[0]["references"] == [{"name": "paper", "value": 1.3}]
    assert conclusion.tables[1]["rows"][1][:5] == ["Qwen-2.5-1.5B", 28, decode.PRODUCTS, 0.5, 0.55]
    # Slower steps: with 28 and 22 layers it is too much, with 4 it is not.
    slower = decode_latency.run(decoding(step=0.0008, static=0.9))
    assert slower.verdict == "partly"
    assert "above it: Qwen-2.5-1.5B, paper's 1B." in slower.because
    # A token that is slower in Transformers counts as well, up to the border.
    assert decode_latency.run(decoding(step=0.00055, static=1.0429)).verdict == "holds"
    assert decode_latency.run(decoding(step=0.00055, static=1.0431)).verdict == "does not hold"
