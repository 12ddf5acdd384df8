"""Nothing is timed that computes something else: wrong contestants are caught."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_lab.bench import decode, path, solve
from lucid_lab.bench.harness import Shape, WrongAnswer
from lucid_lab.bench.path import LUCID_PATH, PATH
from lucid_lab.bench.records import Settings
from lucid_lab.bench.solve import LUCID
from tests.bench.conftest import Bench

GROUPED = Shape(64, 8, 2)

pytestmark = pytest.mark.usefixtures("short_runs")


def test_a_contestant_that_skips_the_solve_stops_the_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(solve.CONTESTANTS, LUCID, solve.sdpa)
    solve.check_truth.cache_clear()
    code, printed = bench("solve", "--quick")
    solve.check_truth.cache_clear()
    assert code == 1
    assert "'LUCID' does not compute what it should: its output" in printed
    assert not (tmp_path / "solve.json").exists()


def without_gradient_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return solve.lucid_attention(q, k.detach() + 0 * k, v)


def nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return solve.lucid_attention(q, k, v) * torch.nan


def softmax_at_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (solve.sdpa if k.shape[2] >= 400 else solve.lucid_attention)(q, k, v)


def path_without_gradient(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return path.path_attention(q, k, v, w.detach() + 0 * w, beta)


SOLVE, PASS = solve.check_truth.__wrapped__, path.check_truth.__wrapped__
# A table of contestants, a name in it, a wrong contestant, the check, and the part that must be found wrong.
Wrong = tuple[dict[str, Any], str, Any, Callable[[], None], str]
WRONG: dict[str, Wrong] = {
    "no gradient of k": (
        solve.CONTESTANTS, LUCID, without_gradient_of_keys,
        partial(SOLVE, GROUPED, 150, True, torch.float32, (LUCID,)), "the gradient of k",
    ),
    "NaN": (solve.CONTESTANTS, LUCID, nan, partial(SOLVE, GROUPED, 150, False, torch.float32, (LUCID,)), "its output"),
    "wrong only at the length of the point": (
        solve.CONTESTANTS, LUCID, softmax_at_length,
        partial(solve.measure, GROUPED, 400, backward=False, settings=Settings(quick=True)), "its output",
    ),
    "a standard decoder for LUCID": (
        decode.DECODERS, LUCID, decode.by_products, partial(decode.check_truth.__wrapped__, GROUPED), "its output",
    ),
    "no gradient of w": (
        path.ATTENTIONS, PATH, path_without_gradient, partial(PASS, GROUPED, 150, True), "the gradient of w",
    ),
    "PaTH for LUCID-PaTH": (
        path.ATTENTIONS, LUCID_PATH, path.path_attention, partial(PASS, GROUPED, 150, False), "its output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_contestants_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contestants, name, contestant, check, part = WRONG[wrong]
    solve.check_truth.cache_clear()
    monkeypatch.setitem(contestants, name, contestant)
    with pytest.raises(WrongAnswer, match=f"'{name}' does not compute what it should: {part} is .* away from"):
        check()
    solve.check_truth.cache_clear()


def test_a_wrong_step_of_path_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = path.path_decode

    def without_norms(*arguments: Any, inverse_norms: Tensor | None) -> Any:
        return right(*arguments)

    monkeypatch.setattr(path, "path_decode", without_norms)
    with pytest.raises(WrongAnswer, match="'LUCID-PaTH' does not compute what it should"):
        path.measure_decoding(GROUPED, 200, Settings(quick=True))
