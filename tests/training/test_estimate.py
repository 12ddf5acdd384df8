"""The estimate of memory and hours against what small real steps take."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_lab.cli import main
from lucid_lab.training.estimate import DEVICES, REACHED, WORKSPACE, estimate
from lucid_lab.training.inputs import new_config
from lucid_lab.training.loss import use_chunked_loss
from lucid_lab.training.recipe import Recipe
from lucid_lab.training.recipes import RECIPES, tiny_lm


def small(attention: str, model_vocab_size: int = 700, **changes: Any) -> Recipe:
    """A run of one step whose activations are larger than its weights."""
    model = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": model_vocab_size}
    model |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    settings: dict[str, Any] = {
        "sequence_length": 512,
        "batch_size": 4,
        "micro_batch_size": 2,
        "steps": 1,
        "loss_rows": 256,
    }
    settings |= {"data": "none", "data_options": {}}
    return replace(tiny_lm(), attention=attention, model=model, **(settings | changes))


def stepped(recipe: Recipe, steps: int = 1) -> None:
    """Train a new model for some steps, as `transformers.Trainer` does."""
    torch.manual_seed(0)
    config = new_config(recipe)
    model = LucidForCausalLM(config).train()
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if recipe.loss_rows:
        use_chunked_loss(model, recipe.loss_rows)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(config.vocab_size, (recipe.micro_batch_size, recipe.sequence_length))
    for _ in range(steps):
        for _ in range(recipe.batch_size // recipe.micro_batch_size):
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        model.zero_grad()


def peak_memory(recipe: Recipe) -> int:
    """The most bytes that two steps of a recipe have at a time, by torch's profiler."""
    # Models of earlier tests would be let go while the profiler counts.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepped(recipe, 2)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


CASES = {
    "lucid, checkpointing": small("lucid", gradient_checkpointing=True),
}
SLOW_CASES = {
    "lucid": small("lucid"),
    "softmax": small("softmax"),
    "softmax, checkpointing": small("softmax", gradient_checkpointing=True),
    "lucid, bfloat16": small("lucid", precision="bfloat16"),
    "lucid, bfloat16, checkpointing": small("lucid", precision="bfloat16", gradient_checkpointing=True),
    "lucid, all logits": small("lucid", loss_rows=0),
    "lucid, large vocabulary": small("lucid", gradient_checkpointing=True, model_vocab_size=20_000),
    "delta": small("delta"),
    "lucid_path": small("lucid_path"),
}


def check_memory(recipe: Recipe, low: float = 0.93, high: float = 1.2) -> None:
    estimated = estimate(recipe).memory_bytes - WORKSPACE
    assert low < estimated / peak_memory(recipe) < high


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_a_real_step(case: str) -> None:
    check_memory(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_memory_is_that_of_a_real_step_in_other_settings(case: str) -> None:
    # The tree of PaTH is inside its operator, where the estimate does not look.
    check_memory(SLOW_CASES[case], 0.75 if case == "lucid_path" else 0.93)


def test_operations_are_those_of_a_real_step() -> None:
    recipe = small("softmax")
    # Not the fused attention, whose operations torch does not count.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stepped(recipe)
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    T, config = recipe.sequence_length, new_config(recipe)
    assert config.head_dim is not None
    # Whole products of T × T, of which only the lower halves are needed.
    pairs = 12 * T * config.head_dim * config.num_attention_heads * config.num_hidden_layers * T * recipe.batch_size
    assert counts["aten.bmm"] == pytest.approx(pairs, rel=0.01)
    needed = estimate(recipe).operations
    assert needed == pytest.approx(counts["aten.mm"] + pairs / 2 * (T + 1) / T, rel=0.01)


def test_checkpointing_computes_the_layers_once_more() -> None:
    plain, again = (estimate(small("softmax", gradient_checkpointing=on)) for on in (False, True))
    head = 6 * 700 * 96 * 512 * 4
    assert again.operations - head == pytest.approx((plain.operations - head) * 4 / 3)
    assert again.memory["activations"] == again.activations["with checkpointing"] < plain.memory["activations"]
    assert plain.memory["activations"] == plain.activations["without checkpointing"]


def test_lucid_adds_a_solve_in_float32_for_each_key_value_head() -> None:
    softmax, lucid = (estimate(small(name)) for name in ("softmax", "lucid"))
    assert softmax.float32_operations == 0
    assert lucid.operations - softmax.operations == pytest.approx(lucid.float32_operations)
    scores = 3 * 4 * 16 * 513 / 2 * 6 * 6 * 512 * 4
    assert lucid.float32_operations == pytest.approx(scores * 2 / 6)


def test_hours_and_memory_depend_on_the_gpus() -> None:
    recipe = RECIPES["pretrain_2k"]()
    one, eight = estimate(recipe, 1, "H100"), estimate(recipe, 8, "H100")
    assert eight.hours == pytest.approx(one.hours / 8)
    assert eight.gpu_hours == pytest.approx(one.gpu_hours)
    fast = one.operations - one.float32_operations
    seconds = (fast / DEVICES["H100"].bfloat16 + one.float32_operations / DEVICES["H100"].float32) / REACHED
    assert one.hours == pytest.approx(seconds / 3600)
    # Two gradients, one of them in the buckets that processes exchange.
    assert eight.memory["exchange"] == one.memory["gradients"] == 4 * one.parameters
    shared = estimate(recipe, 8, "H100", parallel="fsdp")
    assert shared.memory["optimizer"] == pytest.approx(eight.memory["optimizer"] / 8, rel=0.001)
    assert eight.fits


@pytest.mark.slow
def test_gemma_4b_fits_only_if_the_gpus_share_its_state() -> None:
    gemma = replace(RECIPES["pretrain_2k"](), preset="gemma3_4b", attention="softmax")
    assert not estimate(gemma, 8, "H100").fits
    assert estimate(gemma, 8, "H100", parallel="fsdp").fits


def test_the_command_prints_the_estimate_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny_lm", "--dry-run", "--gpus", "2", "--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    assert "memory of each GPU:" in out
    assert "on 2 × A100" in out
    assert "of 80.0 GB: fits" in out
    for part in ("weights", "gradients", "optimizer", "activations", "with checkpointing", "loss"):
        assert part in out
    assert list(tmp_path.iterdir()) == []
    assert main(["train", "tiny_lm", "--dry-run", "--gpu", "H10"]) == 1
    assert "--gpu must be one of A100, H100, H200, got 'H10'" in capsys.readouterr().err
    assert main(["train", "tiny_lm", "--dry-run", "--gpus", "0"]) == 1
    assert "--gpus must be at least 1, got 0" in capsys.readouterr().err


def test_the_vocabulary_is_that_of_the_data_if_they_are_there(tmp_path: Path, tokens: Path) -> None:
    recipe = replace(tiny_lm(), data=str(tmp_path / "none"), data_options={})
    missing, there = estimate(recipe), estimate(replace(recipe, data=str(tokens)))
    vocab_size = json.loads((tokens / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    assert there.parameters - missing.parameters == 2 * 256 * (vocab_size - 512)
    assert estimate(tiny_lm()).parameters - missing.parameters == 2 * 256 * (4096 - 512)
