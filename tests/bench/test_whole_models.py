"""The cost of whole models: the run, its formulas, and the gate before it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lucid_lab.bench.cases import model_decode, model_training, whole_models
from lucid_lab.bench.cases.model_decode import with_growth
from lucid_lab.bench.cases.model_training import compose, head_step
from lucid_lab.bench.cases.whole_models import (
    FULL,
    GEMMA_1B,
    GEMMA_4B,
    PAPER_1B,
    QWEN,
    SLIDING,
    ModelShape,
    pairs,
)
from lucid_lab.bench.command import BENCHMARKS, _publish
from lucid_lab.bench.results import Results, Settings
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lucid_lab.bench.gate import WrongAnswer
from lucid_lab.bench.harness import machine
from tests.bench.conftest import Bench

pytestmark = pytest.mark.usefixtures("short_runs")


def test_a_quick_run_of_whole_models_fills_every_cell_of_the_page(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_training, "SHAPES", (GEMMA_1B, QWEN))
    monkeypatch.setattr(model_decode, "SHAPES", (GEMMA_1B, QWEN, PAPER_1B))
    monkeypatch.setattr(model_decode, "TOKENS", 2)
    code, printed = bench("model_training", "model_decode", "--quick")
    assert code == 0, printed
    results = Results(tmp_path, {"machine": machine(), "quick": True}, BENCHMARKS)
    assert results.load() == ""
    docs = tmp_path / "docs"
    docs.mkdir()
    _publish(results, ["models"], docs)
    page = (docs / "benchmarks_models.md").read_text()

    training, decoding = page.split("### model_decode, 1 thread")
    assert "### model_training, 1 thread" in training
    for model in ("Gemma-3-1B", "Qwen-2.5-1.5B"):
        (row,) = re.findall(rf"^\| {model} .*", training, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        without_window = {3} if model.startswith("Qwen") else set()
        assert {i for i, cell in enumerate(cells) if not cell} == without_window
    for model in ("Gemma-3-1B", "Qwen-2.5-1.5B", "paper's 1B"):
        rows = re.findall(rf"^\| {model} .*", decoding, re.MULTILINE)
        assert [row.split("|")[3].strip() for row in rows] == ["dynamic", "static"]
    assert {len(row.split("|")) for row in decoding.splitlines() if row.startswith("| ")} == {15}


def test_training_runs_with_the_largest_thread_count_alone() -> None:
    settings = Settings((1, 2), False)
    assert {case.threads for case in model_training.BENCHMARK.cases(settings)} == {2}
    assert {case.threads for case in model_decode.BENCHMARK.cases(settings)} == {1, 2}


def test_the_time_of_a_model_is_the_sum_over_its_layers() -> None:
    gemma = replace(GEMMA_1B, sliding_layers=22, full_layers=4)
    times = {model_training.WINDOW: [1.0, 2.0], "SDPA": [3.0, 4.0], "LUCID": [5.0, 6.0]}
    assert compose(gemma, times, "SDPA") == [22 + 12, 44 + 16]
    assert compose(gemma, times, "LUCID", head=10.0) == [22 + 20 + 10, 44 + 24 + 10]
    assert compose(QWEN, {"SDPA": [2.0]}, "SDPA") == [56]
    assert with_growth([1.0, 2.0], growth=8.0, context=64, layers=2) == [2.0, 3.0]


def test_a_query_sees_its_window() -> None:
    """Queries 0, 1, 2, 3, 4 see 1, 2, 3, 3, 3 keys."""
    assert pairs(5, 3) == 12
    assert pairs(5, 5) == pairs(5, 99) == 15


# Published at https://huggingface.co; 64 tokens more for the text model of Gemma 3 4B.
PARAMETERS = {GEMMA_1B: 999_885_952, GEMMA_4B: 3_880_099_328 + 64 * 2560, QWEN: 1_543_714_304}


@pytest.mark.parametrize("shape", PARAMETERS, ids=lambda shape: shape.name)
def test_the_shapes_have_the_published_layers_and_parameters(shape: ModelShape) -> None:
    kinds = ([SLIDING] * 5 + [FULL]) * 6 if shape.window else [FULL] * 28
    kinds = kinds[: shape.layers]
    assert (kinds.count(SLIDING), kinds.count(FULL)) == (shape.sliding_layers, shape.full_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole_models.config(shape, kinds, shape.vocab))
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[shape]


@pytest.mark.parametrize("shape", [GEMMA_1B, QWEN], ids=lambda shape: shape.name)
def test_the_count_of_operations_is_that_of_torch_for_all_but_attention(shape: ModelShape) -> None:
    shape = shape.small()
    model = whole_models.with_softmax(shape, [FULL])
    x = whole_models.hidden_states(shape, 40).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(n for name, n in products.items() if "mm" in str(name) and "bmm" not in str(name))
    assert linear == 6 * 40 * shape.weights


def test_the_head_that_is_timed_computes_its_gradients() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, gradient = torch.randint(11, (7,)), torch.zeros(11, 5, dtype=torch.float64)
    F.cross_entropy(x @ weight.T, targets, reduction="sum").backward()
    with torch.no_grad():
        torch.testing.assert_close(head_step(x, weight, gradient, targets), x.grad)
    torch.testing.assert_close(gradient, weight.grad)


right = whole_models.with_lucid


def without_lucid(model: Any, strength: float = 1.0) -> Any:
    return whole_models.twin(model)


def without_gradients(model: Any, strength: float = 1.0) -> Any:
    wrong = right(model, strength)
    for layer in wrong.layers:
        layer.self_attn.v_proj.register_full_backward_hook(lambda module, dx, do: (torch.zeros_like(dx[0]),))
    return wrong


def always_at_full_strength(model: Any, strength: float = 1.0) -> Any:
    return right(model, 1.0)


def at_half_strength(model: Any, strength: float = 1.0) -> Any:
    return right(model, 0.5)


Check = Callable[[ModelShape], None]
WRONG: dict[str, tuple[Callable[..., Any], Check, str, str]] = {
    "softmax": (without_lucid, whole_models.check_training.__wrapped__, "LUCID", "its output"),
    "gradient": (without_gradients, whole_models.check_training.__wrapped__, "LUCID", "the gradient of its input"),
    "strength 0": (
        always_at_full_strength,
        whole_models.check_training.__wrapped__,
        "LUCID of strength 0",
        "its output",
    ),
    "decoding": (
        at_half_strength,
        whole_models.check_decoding.__wrapped__,
        "LUCID",
        "its output from a dynamic cache",
    ),
}


@pytest.mark.parametrize("shape", [GEMMA_1B, QWEN], ids=lambda shape: shape.name)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_models_are_caught(wrong: str, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    model, check, name, part = WRONG[wrong]
    monkeypatch.setattr(whole_models, "with_lucid", model)
    with pytest.raises(WrongAnswer, match=f"'{name}' does not compute what it should: {part} is .* away from"):
        check(shape)
