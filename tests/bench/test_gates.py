"""Nothing is timed that computes something else: wrong contestants are caught."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lucid_lab.bench.cases import decode, linear, path, path_decode, peers, solve
from lucid_lab.bench.cases.path import LUCID_PATH, PATH
from torch import Tensor

from lucid_lab.bench.gate import WrongAnswer
from tests.bench.conftest import Bench

SHAPE = path.SHAPES[1]

pytestmark = pytest.mark.usefixtures("short_runs")


def test_a_contestant_that_skips_the_solve_stops_the_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peers.ATTENTIONS, peers.OURS, peers.Peer(peers.sdpa, solves=True))
    solve.check_truth.cache_clear()
    code, printed = bench("solve", "--quick")
    solve.check_truth.cache_clear()
    assert code == 1
    assert "stopped: " in printed
    assert "'lucid_attention' does not compute what it should: its output" in printed
    assert not (tmp_path / "results.md").exists()


@pytest.mark.parametrize(("wrong", "part"), [("no gradient of keys", "the gradient of k"), ("NaN", "its output")])
def test_a_wrong_gradient_and_nan_are_caught(wrong: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return peers.ours(q, k, v) * torch.nan if wrong == "NaN" else peers.ours(q, k.detach() + 0 * k, v)

    monkeypatch.setitem(peers.ATTENTIONS, peers.OURS, peers.Peer(attention, solves=True))
    check = partial(solve.check_truth.__wrapped__, "solve", solve.SHAPES[1])
    if wrong != "NaN":
        check(False, torch.float32, (peers.OURS,))
    with pytest.raises(WrongAnswer, match=f"'lucid_attention' does not compute what it should: {part}"):
        check(True, torch.float32, (peers.OURS,))


def test_a_solver_that_is_wrong_only_at_the_length_of_the_benchmark_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return peers.ours(q, k, v) if k.shape[2] < 400 else peers.sdpa(q, k, v)

    monkeypatch.setitem(peers.ATTENTIONS, peers.OURS, peers.Peer(attention, solves=True))
    solve.check_truth.__wrapped__("solve", solve.SHAPES[1], False, torch.float32, (peers.OURS,))
    with pytest.raises(WrongAnswer, match=r"one head, N=400: 'lucid_attention' does not compute what it should"):
        solve.check_length.__wrapped__("solve", 64, 400, False, torch.float32, (peers.OURS,))


def test_a_wrong_decoder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.DECODERS, peers.DECODE_STEP, peers.Peer(peers.decode_products, solves=True))
    with pytest.raises(WrongAnswer, match="'lucid_decode' does not compute what it should: its output"):
        decode.check_truth.__wrapped__(decode.SHAPES[0])


def softmax_for_path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return peers.sdpa(q, k, v)


def without_gradient_of_w(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return path.path_attention(q, k, v, w.detach() + 0 * w, beta)


def without_the_flush(cache: peers.Cache, tokens: Any) -> peers.Decoded:
    keys = cache.k[:, :, : cache.length].clone()
    result = path_decode.path_cycle(cache, tokens, lucid=False)
    cache.k[:, :, : keys.shape[2]] = keys
    return result


def without_decay(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Any:
    return linear.delta_attention(q, k, v, beta)


PASS, STEPS = partial(path.check_truth.__wrapped__, "path", SHAPE), partial(path_decode.check_truth.__wrapped__, SHAPE)
LINEAR = partial(linear.check_truth.__wrapped__, SHAPE, 150, False)
UNGATED = linear.MEMBERS["gated_delta"]._replace(run=without_decay)
# A table of contestants, a name in it, a wrong contestant, the check, and the part that must be found wrong.
Wrong = tuple[dict[str, Any], str, Any, Callable[[], None], str]
WRONG: dict[str, Wrong] = {
    "softmax for PaTH": (path.ATTENTIONS, PATH, softmax_for_path, partial(PASS, False), "its output"),
    "no gradient of w": (path.ATTENTIONS, PATH, without_gradient_of_w, partial(PASS, True), "the gradient of w"),
    "PaTH for LUCID-PaTH": (path.ATTENTIONS, LUCID_PATH, path.path_attention, partial(PASS, False), "its output"),
    "no flush": (path_decode.CYCLES, path_decode.STEP, without_the_flush, STEPS, "its output"),
    "a step of PaTH for LUCID-PaTH": (
        path_decode.CYCLES,
        path_decode.LUCID_STEP,
        path_decode.CYCLES[path_decode.STEP],
        STEPS,
        "its output",
    ),
    "no decay": (linear.MEMBERS, "gated_delta", UNGATED, LINEAR, "its output"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_members_of_the_family_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, name, contestant, check, part = WRONG[wrong]
    monkeypatch.setitem(table, name, contestant)
    with pytest.raises(WrongAnswer, match=f"'{name}' does not compute what it should: {part} is .* away from"):
        check()
