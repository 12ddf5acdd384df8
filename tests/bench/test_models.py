"""Models of Transformers in benchmarks: their shapes, what runs, and the gate before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lucid_lab.bench import models
from lucid_lab.bench.harness import WrongAnswer
from lucid_lab.bench.models import FULL, GEMMA_1B, GEMMA_4B, PAPER_1B, QWEN, SLIDING, ModelShape
from lucid_lab.bench.records import read_case
from tests.bench.conftest import Bench

pytestmark = pytest.mark.usefixtures("short_runs")


def test_quick_runs_of_models(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TRAINING_SHAPES", (QWEN,))
    monkeypatch.setattr(models, "DECODING_SHAPES", (GEMMA_1B,))
    code, printed = bench("model_training", "model_decode", "on_device", "--quick", "--device", "cpu")
    assert code == 0, printed
    sizes = [tuple(sizes.values()) for sizes, _ in read_case(tmp_path / "model_decode.json")[1]]
    assert sizes == [(1, "Gemma-3-1B", cache, 96) for cache in ("dynamic", "static")]
    sizes = [tuple(sizes.values()) for sizes, _ in read_case(tmp_path / "on_device.json")[1]]
    assert sizes[:2] == [(1, "cpu", "Gemma-3-1B", "training", 64), (1, "cpu", "Gemma-3-1B", "decoding", 96)]
    ((_, result),) = read_case(tmp_path / "model_training.json")[1]
    assert result.counted == {models.RATIO: QWEN.counted(64)}
    assert result.seconds.keys() == {"SDPA", "LUCID"}


# Published at https://huggingface.co; 64 tokens more for the text model of Gemma 3 4B.
PARAMETERS = {GEMMA_1B: 999_885_952, GEMMA_4B: 3_880_099_328 + 64 * 2560, QWEN: 1_543_714_304}
FULL_LAYERS = {GEMMA_1B: 4, GEMMA_4B: 5, QWEN: 28}


@pytest.mark.parametrize("shape", PARAMETERS, ids=lambda shape: shape.name)
def test_the_shapes_have_the_published_layers_and_parameters(shape: ModelShape) -> None:
    assert shape.kinds.count(FULL) == FULL_LAYERS[shape]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config(shape))
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[shape]


def test_a_part_of_a_model_has_its_proportions() -> None:
    assert GEMMA_1B.part().kinds == [*[SLIDING] * 5, FULL]
    for shape in (GEMMA_1B, GEMMA_4B, QWEN, PAPER_1B):
        part = shape.part()
        assert part.vocab / shape.vocab == pytest.approx(part.layers / shape.layers, rel=1e-3)
        assert part.counted(2048) == pytest.approx(shape.counted(2048), rel=1e-3)


def test_operations_are_counted_as_torch_counts_them() -> None:
    """All products but those of attention; and pairs of a query and a key: 0, 1, 2, 3, 4 see 1, 2, 3, 3, 3 keys."""
    shape = QWEN.small()
    model, ids = models.build(shape, [FULL]), torch.randint(shape.vocab, (1, 40))
    with FlopCounterMode(display=False) as counter:
        models.training_step(model, ids)
    products = counter.get_flop_counts()["Global"]
    linear = sum(n for name, n in products.items() if "mm" in str(name) and "bmm" not in str(name))
    # Neither the embedding nor the first layer's input needs the gradient of the input ids.
    assert linear == 6 * 40 * (shape.weights + shape.hidden * shape.vocab)
    assert models.visible_pairs(5, 3) == 12
    assert models.visible_pairs(5, 99) == 15
    weights = 28 * (1536 * 128 * (2 * 12 + 2 * 2) + 3 * 1536 * 8960) + 1536 * 151_936
    solve = 28 * 2 * 14 * (2048 * 2049 / 2) * 128
    assert QWEN.counted(2048) == pytest.approx(1 + solve / (6 * 2048 * weights + 6 * solve), rel=1e-9)


@pytest.mark.parametrize("kind", [models.DYNAMIC, models.STATIC])
def test_a_filled_cache_repeats_its_first_tokens(kind: str) -> None:
    softmax = models.build(GEMMA_1B.small()).eval()
    model = models.with_lucid(softmax)
    assert all(a is b for a, b in zip(softmax.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        past = models.filled_cache(model, kind, 96, 8)
        assert past.get_seq_length() == 96
        keys = past.layers[5].keys
        assert torch.equal(keys[:, :, 64:96], keys[:, :, :32])
        assert keys[:, :, :32].abs().min() > 0
        models.generate(model, past, torch.ones(1, 1, dtype=torch.long), 3)
    assert past.get_seq_length() == 99


right = models.with_lucid


def without_gradients(model: Any, strength: float = 1.0) -> Any:
    wrong = right(model, strength)
    if strength:
        for layer in wrong.model.layers:
            layer.self_attn.v_proj.register_full_backward_hook(lambda module, dx, do: (torch.zeros_like(dx[0]),))
    return wrong


def wrong_from_a_cache(model: Any, strength: float = 1.0) -> Any:
    wrong = right(model, strength)
    wrong.register_forward_pre_hook(
        lambda module, args, given: (
            (args, given | {"inputs_embeds": given["inputs_embeds"] * 1.1})
            if given.get("past_key_values") is not None
            else None
        ),
        with_kwargs=True,
    )
    return wrong


WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "softmax": (lambda model, strength=1.0: right(model, 0.0), "LUCID", "its output"),
    "gradient": (without_gradients, "LUCID", "the gradient of its input"),
    "strength 0": (lambda model, strength=1.0: right(model, 1.0), "LUCID of strength 0", "its output"),
    "decoding": (wrong_from_a_cache, "LUCID", "its output from a dynamic cache"),
}


@pytest.mark.parametrize("shape", [GEMMA_1B, QWEN], ids=lambda shape: shape.name)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_models_are_caught(wrong: str, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name, part = WRONG[wrong]
    monkeypatch.setattr(models, "with_lucid", model)
    with pytest.raises(WrongAnswer, match=f"'{name}' does not compute what it should: {part} is .* away from"):
        models.check.__wrapped__(shape)
